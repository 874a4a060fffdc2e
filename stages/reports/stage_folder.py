"""What a stage left in its folder: results, metrics, samples and lineage."""

import json
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
    samples: Sequence[Mapping[str, Any]] = ()  # of samples.jsonl: responses that are kept to be read

    def results(self, kind: type[AnyResults]) -> AnyResults | None:
        """The stage's results.json as a dataclass; None until it is finished.

        Raises:
            ValueError: a field is missing or of another type; the message names it.
        """
        if not self.raw_results:
            return None
        return record_of(self.raw_results, kind, str(self.path / "results.json"))

    def samples_as(self, kind: type[AnyResults]) -> list[AnyResults]:
        """The lines of samples.jsonl as dataclasses. Raises: as `results` does."""
        where = self.path / "samples.jsonl"
        return [record_of(line, kind, f"{where}:{place}") for place, line in enumerate(self.samples, 1)]

    @property
    def status(self) -> str:
        """finished, unfinished or not run."""
        if self.raw_results:
            return "finished"
        return "unfinished" if self.metrics else "not run"

    @property
    def trained(self) -> str:
        """What the stage trained, if not all weights: its adapters, as their file says."""
        path = self.path / "adapter" / "adapter_config.json"
        if not path.is_file():
            return ""
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"adapters of rank {found['r']}, alpha {found['lora_alpha']:g}"

    @property
    def seconds(self) -> float | None:
        """Wall-clock time of the finished stage, from its lineage."""
        seconds = self.lineage.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None
