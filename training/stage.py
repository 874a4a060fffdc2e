"""What a stage gets in addition to its config, and how it writes its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from files.atomic import write_json
from files.records import as_json
from lm.source import ModelSource
from training.config import EngineConfig, TrainingConfig
from training.engine import Engine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class StageContext:
    """A stage's folder, seed and engine config; the same on every rank."""

    folder: Path
    seed: int
    num_workers: int
    engine: EngineConfig

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def write_results(self, results: "DataclassInstance | Mapping[str, Any]") -> None:
        """Write the stage's results.json, which the report and later stages read back (`files.records`)."""
        write_json(self.folder / "results.json", as_json(results))


def build_engine(context: StageContext, source: ModelSource[AnyModule], config: TrainingConfig) -> Engine[AnyModule]:
    """Build this rank's engine for a stage that trains one model."""
    micro_batch = config.batch.micro_batch_size or 1  # DeepSpeed counts with it and computes nothing by it
    return Engine(source, config.optimizer, context.engine, world_size=context.num_workers, micro_batch=micro_batch)
