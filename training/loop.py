"""The training loop of pretraining, SFT and the reward model; the stages differ only in their Objective."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from files.atomic import remove_unfinished
from files.hashes import derive_seed
from lm.progress import note_progress
from training.checkpoint import (
    changed_files,
    choose_sound,
    read_manifest,
    share_of_files,
    step_folder,
    step_folders,
)
from training.config import BatchConfig, TrainingConfig
from training.engine import Engine, LossAndMetrics
from training.metrics import MetricsLog
from training.notices import StoppedError, say, stop_requested
from training.packing import IntArray, Sampler
from training.recording import RecordableLoss, RecordableObjective

MODEL = "model"  # the folder of the model's state in a checkpoint

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Model_contra = TypeVar("Model_contra", bound=nn.Module, contravariant=True)


class Objective(Protocol[Model_contra]):
    """Rows and the loss on them."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def count(self, rows: IntArray) -> float:
        """The number of units (tokens, comparisons) over which the loss of these rows is a sum, or the sum of their
        weights. The loop divides by the count of the whole batch over all ranks.
        """
        ...

    def num_tokens(self, rows: IntArray) -> int:
        """Tokens that a forward pass of these rows reads, for the throughput."""
        ...

    def loss(
        self, model: Model_contra, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss summed over `count(rows)` units, and metrics as sums over the same units.

        A metric with its own denominator is returned as a (sum, count) pair. Dropout masks are a function of `seed`,
        the row and the position in it; each step has its own seed, and evaluation needs none.
        """
        ...


@runtime_checkable
class RaggedObjective(Protocol):
    """An objective whose rows differ in length, and which decides which rows each pass reads."""

    def rank_passes(
        self, rows: IntArray, batch: BatchConfig, num_ranks: int, *, with_gradients: bool
    ) -> list[list[IntArray]]:
        """Return the rows of each pass of each rank. Every rank has the same number of passes; some may be empty."""
        ...


@runtime_checkable
class PreparedObjective(Protocol):
    """An objective whose loss needs a number that depends on the whole batch."""

    def prepare(self, engine: Any, rows: IntArray, batch: BatchConfig) -> None:
        """Compute it for a batch over all ranks, before its passes. A collective call."""
        ...


@dataclass(frozen=True)
class LoopConfig:
    """How long to train, and how often to save and evaluate."""

    stage: str
    seed: int
    num_steps: int
    batch: BatchConfig
    save_every_steps: int
    evaluate_every_steps: int

    @classmethod
    def of(cls, stage: str, seed: int, num_steps: int, config: TrainingConfig) -> Self:
        return cls(stage, seed, num_steps, config.batch, config.save_every_steps, config.evaluate_every_steps)


class TrainingLoop(Generic[AnyModule]):
    """Batch, loss, backward, step, log, evaluate, save. A pure function of its inputs and the step it resumes at."""

    def __init__(
        self,
        engine: Engine[AnyModule],
        config: LoopConfig,
        training: Objective[AnyModule],
        heldout: Objective[AnyModule],
        folder: Path,
    ) -> None:
        self.engine, self.config, self.training, self.heldout, self.folder = engine, config, training, heldout, folder
        config.batch.num_micro_batches(engine.data_parallel_size)  # raises if the batch does not divide
        self._heldout_passes: list[IntArray] = []  # of this rank, the same in every evaluation
        self.sampler = Sampler(len(training), config.batch.batch_size, derive_seed(config.seed, config.stage, "order"))

    def run(self) -> dict[str, float]:
        """Train to the end. Returns the held-out metrics of the final weights, including `loss`.

        Raises:
            StoppedError: on every rank, after a checkpoint, if one of them was asked to stop (`training.notices`).
        """
        first_step = self._resume()
        # The last step is saved too, since a stage may be killed after training; it then resumes with no step left.
        log, heldout = None, dict[str, float]() if first_step < self.config.num_steps else self.evaluate()
        done, is_stopping = first_step, False
        if self.engine.is_main:
            log = MetricsLog(self.folder, self.engine.config.trackers, resume_step=first_step)
        with self.engine.checkpoint_writer() as writer:
            writer.sound_step = first_step or None
            for step in range(first_step, self.config.num_steps):
                metrics = {**self._step(step), "checkpoint_seconds": writer.seconds_waited()}
                done = step + 1
                is_stopping = done < self.config.num_steps and self._is_asked_to_stop()
                if done % self.config.evaluate_every_steps == 0 or done == self.config.num_steps:
                    heldout = self.evaluate()
                    metrics |= {f"heldout_{name}": value for name, value in heldout.items()}
                if log is not None:
                    log.log(done, self.config.num_steps, metrics)
                if done % self.config.save_every_steps == 0 or done == self.config.num_steps or is_stopping:
                    writer.save(self.checkpoints, done, {MODEL: self.engine.state()})
                if is_stopping:
                    break
        if log is not None:
            log.close()
        if is_stopping:
            raise StoppedError(f"{self.config.stage}: stopped at step {done} of {self.config.num_steps}")
        return heldout

    def _is_asked_to_stop(self) -> bool:
        """Whether any rank is asked to stop. A collective call, so that all ranks stop after the same step."""
        engine = self.engine
        if engine.world_size == 1:
            return stop_requested()
        return bool(engine.sum_over_ranks(torch.full((1,), float(stop_requested()), device=engine.device)) > 0)

    def _step(self, step: int) -> dict[str, float]:
        started = time.monotonic()
        engine = self.engine
        rate = engine.optimizer_config.rate(step, self.config.num_steps)
        engine.set_learning_rate(rate)
        seed = derive_seed(self.config.seed, self.config.stage, "dropout", step)
        rows = self.sampler.batch(step)
        self._prepare(self.training, rows)
        engine.model.train()
        count = self.training.count(rows)
        micro_batches = _passes(self.training, rows, self.config.batch, engine.data_parallel_size, with_gradients=True)

        def loss(mine: IntArray) -> LossAndMetrics:
            loss_sum, metrics = self._loss_of(self.training, mine, rows, seed)
            return loss_sum / (count or 1), metrics

        num_tokens = self.training.num_tokens(rows)
        mine = micro_batches[engine.data_rank]
        if engine.config.record_micro_batches and isinstance(self.training, RecordableObjective):
            recorded = RecordableLoss(self.training, engine.model)
            sums = engine.accumulate_recorded(recorded.inputs(mine, count, seed), recorded)
        else:
            sums = engine.accumulate(mine, loss, num_tokens)
        loss_mean, norm = engine.step()
        seconds = time.monotonic() - started
        if engine.has_skipped and engine.is_main:
            say(f"{self.config.stage}: step {step + 1} is skipped: its loss is {loss_mean}, its gradient norm {norm}")
        return {
            "loss": loss_mean,
            **self._means(sums, count),
            "gradient_norm": norm,
            "learning_rate": rate,
            "tokens_per_second": num_tokens / seconds,
            **engine.router_metrics,
            **({"skipped": 1.0} if engine.has_skipped else {}),
        }

    def _prepare(self, objective: Objective[AnyModule], rows: IntArray) -> None:
        if isinstance(objective, PreparedObjective):
            objective.prepare(self.engine, rows, self.config.batch)

    def _means(self, sums: Mapping[str, Tensor], count: float) -> dict[str, float]:
        """Return means over `count` units, or over a metric's own count; a metric with a count of 0 is left out."""
        if not sums:
            return {}
        flat = [value.detach().float().reshape(-1) for value in sums.values()]
        totals = self.engine.sum_over_shares(torch.cat(flat)).split([len(value) for value in flat])
        counts = [float(total[1]) if len(total) > 1 else count for total in totals]
        return {name: float(total[0] / n) for name, total, n in zip(sums, totals, counts, strict=True) if n}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return means over all held-out rows, which are split among the ranks."""
        engine = self.engine
        everything = torch.arange(len(self.heldout)).numpy()
        self._prepare(self.heldout, everything)
        engine.model.eval()
        count = self.heldout.count(everything)
        sums: dict[str, Tensor] = {}
        if not self._heldout_passes:
            shares = engine.data_parallel_size
            passes = _passes(self.heldout, everything, self.config.batch, shares, with_gradients=False)
            self._heldout_passes = passes[engine.data_rank]
        for mine in self._heldout_passes:
            note_progress()
            loss, extra = self._loss_of(self.heldout, mine, everything, seed=0)
            for name, value in {"loss": loss, **extra}.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
        return self._means(sums, count)

    def _loss_of(self, objective: Objective[AnyModule], mine: IntArray, rows: IntArray, seed: int) -> LossAndMetrics:
        """Return loss and metrics of a pass over `mine`, this rank's part of `rows`.

        ZeRO-3 gathers weights in every pass, so all ranks run the same number of passes: a rank that has run out of
        rows repeats the first one and does not count it.
        """
        engine = self.engine
        with engine.routes_counted(is_on=len(mine) > 0):
            loss, metrics = objective.loss(engine.model, mine if len(mine) else rows[:1], engine.device, seed)
        if len(mine):
            return loss, metrics
        return 0 * loss, {name: 0 * value for name, value in metrics.items()}

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _resume(self) -> int:
        """Load the newest valid checkpoint. Returns the step to start at.

        Rank 0 reads the manifests, and each rank verifies its share of the files.

        Raises:
            ValueError: there are checkpoints, and all of them are damaged.
        """
        engine, stage = self.engine, self.config.stage
        if re.fullmatch(rf"{re.escape(stage)}_\d+", self.folder.name):
            stage = self.folder.name  # "reward_2" in a second round, whose order of rows is that of "reward"
        manifests = []
        if engine.is_main:
            remove_unfinished(self.checkpoints)
            manifests = [read_manifest(folder) for folder in step_folders(self.checkpoints)]
        resumption = choose_sound(self.checkpoints, stage, engine.gather(manifests)[0], self._changed_files)
        if engine.is_main:
            for notice in resumption.notices(stage, self.config.num_steps):
                say(notice)
        if resumption.step:
            engine.load(step_folder(self.checkpoints, resumption.step) / MODEL)
        return resumption.step

    def _changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        """Like `changed_files`, with the files split among the ranks; a collective call."""
        mine = share_of_files(sha256, self.engine.rank, self.engine.world_size)
        return [name for names in self.engine.gather(changed_files(folder, mine)) for name in names]


def _passes(
    objective: Objective[Any], rows: IntArray, batch: BatchConfig, num_ranks: int, *, with_gradients: bool
) -> list[list[IntArray]]:
    """Return the rows of each pass of each rank: as the objective splits them, or slices of `micro_batch_size` rows.

    With gradients, a rank gets consecutive slices. Without, slices are dealt round-robin, and the last may be shorter.
    """
    if isinstance(objective, RaggedObjective):
        return objective.rank_passes(rows, batch, num_ranks, with_gradients=with_gradients)
    size = batch.micro_batch_size
    slices = [rows[start : start + size] for start in range(0, len(rows), size)]
    if with_gradients:
        per_rank = len(slices) // num_ranks
        return [slices[rank * per_rank : (rank + 1) * per_rank] for rank in range(num_ranks)]
    slices += [rows[:0]] * (-len(slices) % num_ranks)
    return [slices[rank::num_ranks] for rank in range(num_ranks)]
