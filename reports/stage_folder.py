"""What a stage left in its folder: results, metrics and lineage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from files.records import record_of

AnyResults = TypeVar("AnyResults")


@dataclass(frozen=True)
class StageFolder:
    """What one stage left. Empty `raw_results`: it has not finished; no metrics either: it has not begun."""

    name: str
    path: Path
    raw_results: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    lineage: Mapping[str, Any]

    def results(self, kind: type[AnyResults]) -> AnyResults | None:
        """The stage's results.json as a dataclass; None until it is finished.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        if not self.raw_results:
            return None
        return record_of(self.raw_results, kind, str(self.path / "results.json"))

    @property
    def status(self) -> str:
        """finished, unfinished or not run."""
        if self.raw_results:
            return "finished"
        return "unfinished" if self.metrics else "not run"

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the finished stage, from its lineage."""
        seconds = self.lineage.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None
