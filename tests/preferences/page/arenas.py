"""An arena with policies that a test controls: what they write, and when."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from preferences.page.arena import Listener
from preferences.records import Message

SECRETS = ("Bright-Policy", "Dim-Policy")  # names, which no page may contain


@dataclass
class Asked:
    key: str
    policy: int
    messages: tuple[Message, ...]
    seed_of: tuple[str | int, ...]
    side: int
    to: Listener

    def write(self, text: str) -> None:
        self.to.wrote(self.side, text)

    def end(self, text: str) -> None:
        record = {"policy": self.policy, "name": SECRETS[self.policy], "kind": "endpoint", "spec": "https://x/v1#y"}
        record |= {"finished": not text.endswith("…")}  # "…" stands for an answer that the limit of tokens cuts off
        self.to.ended(self.side, text, record)


@dataclass
class ScriptedWriters:
    """Policies that answer at once with `answers`, or, with `is_waiting`, when the test says so."""

    is_waiting: bool = False
    answers: tuple[str, str] = ("The *first* policy’s answer.", "The second policy’s, which is `longer` than that.")
    identities: tuple[str, str] = SECRETS
    asked: list[Asked] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def start(
        self, key: str, policy: int, messages: Sequence[Message], seed_of: Sequence[str | int], side: int, to: Listener
    ) -> None:
        asked = Asked(key, policy, tuple(messages), tuple(seed_of), side, to)
        self.asked.append(asked)
        if not self.is_waiting:
            # As the real ones: in a thread that is not the caller's.
            thread = threading.Thread(target=asked.end, args=(self.answers[policy],))
            thread.start()
            thread.join()

    def stop(self, key: str) -> None:
        self.stopped.append(key)

    def of(self, policy: int) -> Asked:
        """Returns the last question to a policy."""
        return next(one for one in reversed(self.asked) if one.policy == policy)
