"""What a stage is given beside its config, and how it leaves its results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import EngineConfig


@dataclass(frozen=True)
class StageContext:
    """Where a stage writes, its seed, and the engine it runs on. The same on every rank."""

    folder: Path
    seed: int
    num_workers: int
    engine: EngineConfig

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def write_results(self, results: Mapping[str, Any]) -> None:
        """The stage's figures, for the report."""
        write_json(self.folder / "results.json", results)


def write_json(path: Path, value: Any) -> None:
    """Whole or absent: written aside, then renamed."""
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
