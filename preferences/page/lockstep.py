"""Two answers that are written at the same time, shown so that speed does not tell who writes which.

Both sides show as many characters as the slower one has written, so they start together and grow together. Once one has
ended, the other is shown at the pace so far, which is the slower one's, even if all of it is there already.

Leaves out: the answers' length and style, and the pace itself, which is that of the slower policy.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

USUAL_PACE = 40.0  # characters per second, if one side ends before a pace is known


@dataclass(frozen=True)
class Glance:
    """What both sides show now. `is_over`: nothing more will come; what came is stored, unless there is a failure."""

    texts: tuple[str, str]
    is_over: bool
    failure: str = ""


class LockstepTurn:
    """A turn that two policies are answering; sides 0 and 1 are shown as A and B. `clock` returns seconds.

    Methods may be called from any thread. `on_end` is called once, without a lock, when both have ended or one failed.
    """

    def __init__(self, person: str, clock: Callable[[], float], on_end: Callable[["LockstepTurn"], None]) -> None:
        self.person, self._clock, self._on_end = person, clock, on_end
        self._lock = threading.Lock()
        self._texts, self._ended = ["", ""], [False, False]
        self.records: list[Mapping[str, Any]] = [{}, {}]
        self.failure = ""
        self._began_at: float | None = None  # when both had written something
        self._parted_at: float | None = None  # when all of one answer was shown
        self._num_begun = self._num_common = self._num_shown = 0  # characters shown at these moments, and now
        self.seen_at = clock()  # when somebody last looked
        self.is_stored = False

    @property
    def is_written(self) -> bool:
        """Whether both policies have ended, although not all of it may be shown yet."""
        return all(self._ended)

    @property
    def texts(self) -> tuple[str, str]:
        return self._texts[0], self._texts[1]

    def wrote(self, side: int, text: str) -> None:
        """Takes one side's whole text so far."""
        with self._lock:
            self._texts[side] = text
            self._advance()

    def ended(self, side: int, text: str, record: Mapping[str, Any]) -> None:
        """Takes one side's whole text, and how it was sampled."""
        with self._lock:
            self._advance()
            self._texts[side], self.records[side], self._ended[side] = text, record, True
            self._advance()
            is_over = all(self._ended) and not self.failure
        if is_over:
            self._on_end(self)

    def failed(self, reason: str) -> None:
        """Takes a sentence that says why there is no answer, and does not say whose."""
        with self._lock:
            is_first, self.failure = not self.failure, self.failure or reason
        if is_first:
            self._on_end(self)

    def look(self) -> Glance:
        """Returns what both sides show now."""
        self.seen_at = self._clock()
        return self.look_unseen()

    def look_unseen(self) -> Glance:
        """Like `look`, but not on behalf of somebody who waits."""
        with self._lock:
            self._advance()
            shown = self._texts[0][: self._num_shown], self._texts[1][: self._num_shown]
            is_shown = self._num_shown >= max(map(len, self._texts))
            is_over = bool(self.failure) or (self.is_written and self.is_stored and is_shown)
            return Glance(shown, is_over, self.failure)

    def _advance(self) -> None:
        """Updates how many characters both sides show."""
        now, lengths = self._clock(), [len(text) for text in self._texts]
        if self._parted_at is None:
            self._num_shown = max(self._num_shown, min(lengths))
            if self._num_shown and self._began_at is None:
                self._began_at, self._num_begun = now, self._num_shown
            if any(ended and length <= self._num_shown for length, ended in zip(lengths, self._ended, strict=True)):
                self._parted_at, self._num_common = now, self._num_shown
            return
        elapsed = self._parted_at - self._began_at if self._began_at is not None else 0.0
        num_since = self._num_common - self._num_begun
        pace = num_since / elapsed if elapsed > 0 and num_since else USUAL_PACE
        allowed = self._num_common + int(pace * (now - self._parted_at))
        self._num_shown = max(self._num_shown, min(allowed, max(lengths)))
