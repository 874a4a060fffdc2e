"""Compares Heed's loop with a bare PyTorch loop at the demo's size: `python -m benchmarks.speed overhead`.

The two alternate in one process, one step each, over the same rows with the same model, loss and optimizer. Heed's
steps are those of its training loop, with its log and TensorBoard, at ZeRO 0. A step has one worker's share of the
demo's batch.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.own import OneRow, responses
from benchmarks.speed.table import spread, taken_on
from files.hashes import derive_seed
from heed.jobs.job_file import load_job
from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit, load
from pretrain.stage import STAGE as PRETRAIN
from sft.stage import STAGE as SFT
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.engine import Engine
from training.loop import LoopConfig, Objective, TrainingLoop
from training.objectives import CausalLMObjective, PackedObjective
from training.optimizers import make_optimizers
from training.packing import IntArray, pack

AIM = 0.9
WARMUP_STEPS, TIMED_STEPS = 10, 40  # steps of each loop per round; both loops warm up in the first round only
NUM_ROWS = 512


STAGE = "overhead"  # both loops derive their seeds from it


@dataclass(frozen=True)
class Work:
    """The work of both loops: rows for a model of this shape, one micro-batch per step."""

    shape: ModelConfig
    optimizer: OptimizerConfig
    objective: Objective[LanguageModel]
    batch_size: int
    dropout: float
    engine: EngineConfig

    def source(self) -> RandomInit[LanguageModel]:
        return RandomInit(lambda: LanguageModel(self.shape, self.dropout), seed=0)


@dataclass
class BareLoop:
    """The shortest equivalent training loop: loss, backward, clip, step."""

    work: Work
    num_steps: int

    def __post_init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load(self.work.source()).to(self.device).train()
        self.optimizers = make_optimizers(self.model, self.work.optimizer, self.device)
        self.losses: list[float] = []

    def step(self, step: int, rows: IntArray) -> None:
        optimizer_config, objective = self.work.optimizer, self.work.objective
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer_config.rate(step, self.num_steps)
        is_bf16 = self.work.engine.resolved_precision() == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if is_bf16 else nullcontext():
            loss, _ = objective.loss(self.model, rows, self.device, derive_seed(0, STAGE, "dropout", step))
        loss = loss / objective.count(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer_config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


@dataclass
class Turns:
    """An objective that runs the bare loop's step when Heed's step begins, and times both.

    It relies on Heed's loop calling `count` once per step, before everything except the choice of rows.
    """

    work: Work
    bare: BareLoop
    clock: Callable[[], float]
    heed_seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _begun: float = 0.0

    def __len__(self) -> int:
        return len(self.work.objective)

    def count(self, rows: IntArray) -> float:
        now = self.clock()
        if self.bare_seconds:
            self.heed_seconds.append(now - self._begun)
        self.bare.step(len(self.bare_seconds), rows)
        self._begun = self.clock()
        self.bare_seconds.append(self._begun - now)
        self.tokens.append(self.work.objective.num_tokens(rows))
        return self.work.objective.count(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return self.work.objective.num_tokens(rows)

    def loss(
        self, model: LanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.work.objective.loss(model, rows, device, seed)


def take_turns(work: Work, num_steps: int, clock: Callable[[], float], folder: Path) -> tuple[Turns, dict[str, Tensor]]:
    """Returns the seconds of `num_steps` steps of each loop, and Heed's weights after one more, untimed step."""
    turns = Turns(work, BareLoop(work, num_steps + 1), clock)
    engine = Engine(work.source(), work.optimizer, work.engine, world_size=1, micro_batch=work.batch_size)
    batch = BatchConfig(batch_size=work.batch_size, micro_batch_size=work.batch_size)
    never = num_steps + 2
    config = LoopConfig(STAGE, 0, num_steps + 1, batch, save_every_steps=never, evaluate_every_steps=never)
    TrainingLoop(engine, config, turns, OneRow(work.objective), folder).run()
    weights = {name: weight.clone() for name, weight in engine.weights_for_file()}
    engine.close()
    return turns, weights


def works() -> Iterator[tuple[str, Work]]:
    """Yields the demo's pretraining, with its own optimizer and with AdamW, and its SFT, on rows of random tokens."""
    job = load_job(None)
    pretrain, sft, shape = job.section_of(PRETRAIN), job.section_of(SFT), job.model
    assert shape is not None
    rng = np.random.default_rng(0)
    rows_BT = rng.integers(8, shape.vocab_size, (NUM_ROWS, pretrain.seq_len), dtype=np.int32)
    lengths = rng.integers(sft.seq_len // 4, sft.seq_len // 2, 4 * NUM_ROWS).tolist()
    sequences = [(rng.integers(8, shape.vocab_size, n).tolist(), responses(range(n), n // 2)) for n in lengths]
    stream, packed = CausalLMObjective(rows_BT), PackedObjective(pack(sequences, sft.seq_len, pad_id=0))
    rank_rows = pretrain.batch.batch_size // job.workers
    yield "pretraining, Muon", Work(shape, pretrain.optimizer, stream, rank_rows, pretrain.dropout, job.engine)
    yield "pretraining, AdamW", Work(shape, sft.optimizer, stream, rank_rows, pretrain.dropout, job.engine)
    rank_rows = sft.batch.batch_size // job.workers
    yield "SFT, AdamW, dropout", Work(shape, sft.optimizer, packed, rank_rows, sft.dropout, job.engine)


def measure(seconds: str, rounds: int) -> dict[str, Any]:
    """Returns seconds and tokens of the steps, by row and round."""
    clock = time.process_time if seconds == "cpu_seconds" else time.perf_counter
    found: dict[str, Any] = {}
    for name, work in works():
        with tempfile.TemporaryDirectory() as folder:
            turns, _ = take_turns(work, WARMUP_STEPS + rounds * TIMED_STEPS, clock, Path(folder) / "overhead")
        starts = range(WARMUP_STEPS, WARMUP_STEPS + rounds * TIMED_STEPS, TIMED_STEPS)
        found[name] = [
            {
                "tokens": sum(turns.tokens[start : start + TIMED_STEPS]),
                "heed": sum(turns.heed_seconds[start : start + TIMED_STEPS]),
                "bare": sum(turns.bare_seconds[start : start + TIMED_STEPS]),
            }
            for start in starts
        ]
    return {"rows": found}


def markdown(found: Mapping[str, Any]) -> str:
    """Formats both rates in tokens per second, and Heed's divided by the bare loop's: median (lowest to highest)."""
    lines = [
        *taken_on(found, found["rounds"]),
        "",
        f"| the demo's model | Heed, ms per step | bare PyTorch | Heed, tokens per second | Heed / bare, aim {AIM} |",
        "|---|---|---|---|---|",
    ]
    for name, runs in found["rows"].items():
        ratios = [run["bare"] / run["heed"] for run in runs]
        heed, bare = (1000 * median(run[who] for run in runs) / TIMED_STEPS for who in ("heed", "bare"))
        rate = median(run["tokens"] / run["heed"] for run in runs)
        lines.append(f"| {name} | {heed:.1f} | {bare:.1f} | {rate:,.0f} | {spread(ratios, '.3f')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n" + json.dumps(measure(sys.argv[1], int(sys.argv[2]))), flush=True)
