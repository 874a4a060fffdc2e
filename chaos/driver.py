"""`heed run` as a process of its own, which a campaign kills, and starts again as an operator would."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chaos.result import LOSS


class Driver:
    """One run of a command, in a process group of its own; what it says is added to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log, self._said_before = log, log.stat().st_size if log.exists() else 0
        self.was_killed = False
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What this process has said, without that of earlier ones."""
        with self.log.open("rb") as file:
            file.seek(self._said_before)
            return file.read().decode(errors="replace")

    @property
    def num_losses(self) -> int:
        """How often it has said that it lost workers and continues."""
        return len(LOSS.findall(self.said))

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def has_finished(self) -> bool:
        return self.process.poll() == 0

    @property
    def was_explained(self) -> bool:
        """Whether it ended as documented: with one line that says what to do, and no traceback."""
        return not self.is_running and "Traceback (most recent call last)" not in self.said

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.said.splitlines()) if line.strip()), "")

    def kill(self) -> None:
        self.was_killed = True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


StartDriver = Callable[[], Driver]
