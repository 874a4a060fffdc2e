"""An arena with scripted policies in a separate process: `python arena_server.py URL PORT CONFIG`.

A question that begins with "slow" is answered in part only.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from preferences.page import arena as arena_module
from preferences.page.app import serve
from preferences.page.arena import ArenaSetup, Listener
from preferences.page.config import LabelingConfig
from preferences.records import Message
from tests.preferences.page.arenas import ScriptedWriters


class PartlySlow(ScriptedWriters):
    def start(
        self, key: str, policy: int, messages: Sequence[Message], seed_of: Sequence[str | int], side: int, to: Listener
    ) -> None:
        self.is_waiting = messages[-1].content.startswith("slow")
        super().start(key, policy, messages, seed_of, side, to)
        if self.is_waiting:
            self.asked[-1].write("Only the beginn")


if __name__ == "__main__":
    url, port, config = sys.argv[1:]
    arena_module.USUAL_PACE = 1e6
    arena = ArenaSetup(PartlySlow(), "arena")
    serve(url, LabelingConfig.load(Path(config)), host="127.0.0.1", port=int(port), announce=print, arena=arena)
