"""Measures how long training waits for checkpoints: `python -m benchmarks.checkpoints` (docs/reliability.md).

One process trains a decoder of 8.6M parameters, whose state takes 103 MB, on random tokens: without checkpoints, with
checkpoints that it waits for, and with checkpoints written in the background. The three alternate.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from training.checkpoint import State
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, TrainingLoop
from training.metrics import read_metrics
from training.objectives import CausalLMObjective
from training.writer import CheckpointWriter

MODEL = ModelConfig(
    vocab_size=4096, max_position_embeddings=128, hidden_size=384, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=6, head_dim=64, intermediate_size=1536, mlp="relu2",
)  # fmt: skip
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant")
BATCH = BatchConfig(batch_size=2, micro_batch_size=2)


class WaitingWriter(CheckpointWriter):
    """Blocks training until the checkpoint is complete."""

    def save(
        self,
        checkpoints: Path,
        step: int,
        models: Mapping[str, State],
        progress: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        super().save(checkpoints, step, models, progress, files)
        self.wait()


class Watched(Engine[LanguageModel]):
    """Keeps its writer, so that it can be inspected at the end."""

    kind: type[CheckpointWriter] = CheckpointWriter
    writer: CheckpointWriter

    def checkpoint_writer(self) -> CheckpointWriter:
        config = self.config
        self.writer = self.kind(
            self.rank, self.world_size, config.keep_checkpoints, config.collective_timeout_seconds, self.gather
        )
        return self.writer


@dataclass(frozen=True)
class Found:
    """Seconds of a run, seconds that it waited for checkpoints, and the median seconds per step."""

    total: float
    waited: float
    step: float


def train(folder: Path, num_steps: int, save_every: int, kind: type[CheckpointWriter]) -> Found:
    source = RandomInit(lambda: LanguageModel(MODEL), seed=0)
    engine = Watched(source, OPTIMIZER, EngineConfig(precision="fp32", trackers=()), world_size=1, micro_batch=2)
    engine.kind = kind
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (64, MODEL.max_position_embeddings)).astype(np.int32)
    config = LoopConfig("benchmark", 0, num_steps, BATCH, save_every, num_steps)
    loop = TrainingLoop(engine, config, CausalLMObjective(rows), CausalLMObjective(rows[:4]), folder)
    begun = time.monotonic()
    loop.run()
    total = time.monotonic() - begun
    lines = read_metrics(folder / "metrics.jsonl")
    waited = sum(line["checkpoint_seconds"] for line in lines) + engine.writer.seconds_waited()
    moments = [0.0, *(line["seconds"] for line in lines)]
    engine.close()
    return Found(total, waited, median(np.diff(moments)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    runs = {
        "none": (options.steps + 1, CheckpointWriter),
        "waited for": (options.save_every, WaitingWriter),
        "written meanwhile": (options.save_every, CheckpointWriter),
    }
    found: dict[str, list[Found]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, (save_every, kind) in runs.items():
            with tempfile.TemporaryDirectory(dir=".") as folder:
                found[name].append(train(Path(folder), options.steps, save_every, kind))
    print("| checkpoints | seconds of training | seconds waiting | share | seconds per step (median) |")
    print("|---|---|---|---|---|")
    for name, results in found.items():
        total, waited = sum(result.total for result in results), sum(result.waited for result in results)
        step = median(result.step for result in results)
        print(f"| {name} | {total:.1f} | {waited:.2f} | {waited / total:.1%} | {step:.2f} |")


if __name__ == "__main__":
    main()
