"""The driver's watch over the workers it waits for: which are silent for too long, and whether all are stuck."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ray.exceptions import RayError

from cluster.config import ClusterConfig
from cluster.heartbeat import read_beats


@dataclass
class _Clock:
    """What is known about one worker since a call began."""

    num_beats: int = 0
    progress: int = -1
    silent_seconds: float = 0.0


@dataclass
class Vigil:
    """The watch over the workers of a call, or of several calls that wait for each other.

    Time counts only between two answers of the store, so a driver that was suspended, or too busy to look, does not
    blame its workers.
    """

    config: ClusterConfig
    workers: Sequence[str]
    _clocks: dict[str, _Clock] = field(default_factory=dict)
    _stalled_seconds: float = 0.0
    _unanswered_since: float = 0.0  # when the store was first asked in vain; 0 = it has answered
    _answered_at: float = 0.0

    @property
    def poll_seconds(self) -> float:
        """How often to look."""
        return min(1.0, self.config.beat_limit_seconds / 10)

    def look(self, pending: Collection[str]) -> None:
        """Read what has been heard, and add up silence and stalls of the workers that still have work to do.

        Call it every `poll_seconds`. Where Ray's head does not answer within `ANSWER_SECONDS`, nobody is blamed.
        """
        asked = time.monotonic()
        try:
            heard = read_beats(self.workers)
        except RayError:
            self._unanswered_since = self._unanswered_since or asked
            return
        now, self._unanswered_since = time.monotonic(), 0.0
        first = self._answered_at == 0.0
        # Time that the driver spent elsewhere is not the workers' silence.
        elapsed = 0.0 if first else min(now - self._answered_at, 3 * self.poll_seconds)
        self._answered_at = now
        self._count(heard, pending, elapsed)

    def _count(self, heard: dict[str, tuple[int, int]], pending: Collection[str], elapsed: float) -> None:
        moved = False
        for worker in pending:
            clock = self._clocks.setdefault(worker, _Clock())
            num_beats, progress = heard.get(worker, (clock.num_beats, clock.progress))
            clock.silent_seconds = 0.0 if num_beats != clock.num_beats else clock.silent_seconds + elapsed
            moved = moved or progress != clock.progress
            clock.num_beats, clock.progress = num_beats, progress
        self._stalled_seconds = 0.0 if moved else self._stalled_seconds + elapsed

    def limit_of(self, worker: str) -> float:
        """How long this worker may be silent: longer before its first beat, while its process starts."""
        clock = self._clocks.get(worker, _Clock())
        return self.config.silence_seconds if clock.num_beats else self.config.start_seconds

    def is_silent(self, worker: str) -> bool:
        clock = self._clocks.get(worker, _Clock())
        return clock.silent_seconds > self.limit_of(worker)

    @property
    def is_stalled(self) -> bool:
        """Whether no worker that has work to do made progress for too long."""
        return self._stalled_seconds > self.config.stall_seconds

    @property
    def is_deaf(self) -> bool:
        """Whether Ray's head has not answered for so long that nothing will be heard again."""
        since = self._unanswered_since
        return since > 0 and time.monotonic() - since > self.config.start_seconds
