"""How long the phases of an iteration take, by the controller's clock."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("sampling", "scoring", "policy_updates", "value_updates", "sync")


class PhaseSeconds:
    """Adds up wall-clock seconds by phase. A phase is what the controller waits for: work of other ranks that overlaps
    with it is not counted. `entered` is called with each phase that begins.
    """

    def __init__(self) -> None:
        self.entered: Callable[[str], None] = lambda _phase: None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the time of a block."""
        self.entered(phase.replace("_", " "))
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    def take(self) -> Mapping[str, float]:
        """Returns the seconds of the phases since the last call, by metric: "sampling_seconds" and so on."""
        found = {f"{phase}_seconds": self._seconds[phase] for phase in PHASES if phase in self._seconds}
        self._seconds = {}
        return found
