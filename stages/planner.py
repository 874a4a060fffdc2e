"""Tools with which a stage estimates what it needs before anything runs: batches, memory per rank and time.

No model is allocated. Batches are exact. Anything that depends on data that does not exist yet is an upper bound or an
assumption, and each of those is reported (stages/sizes.py). `stages.planning` computes memory and time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lm.config import ModelConfig
from lm.sequence_parallel import check_sequence_split
from lm.tokenizer import Tokenizer
from lm.transfer import MAX_TOKENS
from stages.data import PROMPTS_AT_ONCE, PromptLimit, prompt_lengths
from stages.planning.hardware import RESERVED_BYTES
from stages.planning.memory import (
    GENERATION_ROWS,
    Layout,
    Memory,
    count,
    forward_pass,
    measuring_phase,
    rows_at_once,
    sampling_phase,
    scoring_phase,
    training_memory,
)
from stages.planning.times import Times
from stages.run import JobView, StageRun
from stages.sizes import Lengths, Sizes
from training.config import BatchConfig, FineTuningConfig, OptimizerConfig, TrainingConfig
from training.data import DataConfig, OnOverlong, SourceConfig
from training.packing import bucket

RANK = "rank"  # the kind of every rank, if all are alike
RESERVED = "CUDA, NCCL, cuBLAS"
_ANY_OPTIMIZER = OptimizerConfig(learning_rate=1.0, schedule="constant")


@dataclass(frozen=True)
class StagePlan:
    """The estimate for one stage. `batch` maps names to numbers. A step is one optimizer step, one PPO iteration, or
    the whole of a stage that only samples. `memory` is per rank, by kind of rank. `once_seconds` are spent in addition
    to the steps, before or after all of them.
    """

    name: str
    unit: str
    batch: Mapping[str, int]
    memory: Mapping[str, Memory]
    num_steps: int
    seconds_per_step: float
    assumptions: tuple[str, ...]
    once_seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory."""
        return max(memory.peak for memory in self.memory.values())

    @property
    def seconds(self) -> float:
        return self.num_steps * self.seconds_per_step + self.once_seconds


def rows_and_passes(batch: BatchConfig, num_ranks: int, width: int, rows_per_unit: int = 1) -> tuple[int, int]:
    """Return the rows per pass of one rank, and the passes per rank and step, if all rows are this wide."""
    if batch.micro_batch_size:
        return batch.micro_batch_size * rows_per_unit, batch.num_micro_batches(num_ranks)
    units = max(1, batch.micro_batch_tokens // (rows_per_unit * width))
    return units * rows_per_unit, math.ceil(batch.num_micro_batches(num_ranks) / units)


def scoring_rows(batch: BatchConfig, width: int, rows_per_unit: int = 1) -> int:
    """Return the rows per pass without gradients, for log-probabilities that no update compares with its own."""
    tokens = batch.forward_tokens or batch.micro_batch_tokens
    units = max(1, tokens // (rows_per_unit * width)) if tokens else batch.micro_batch_size
    return units * rows_per_unit


@dataclass(frozen=True)
class Planner:
    """Plans one stage of a job: the policy's shape, how work is laid out, how much data there is, how fast it runs."""

    name: str
    job: JobView
    model: ModelConfig
    layout: Layout
    sizes: Sizes
    times: Times
    shape_of: Callable[[str], ModelConfig | None] = lambda _: None
    run: StageRun | None = None  # the run as the stage would get it; None if a model of the job is not on this machine

    def shape(self, name: str) -> ModelConfig:
        """Return the shape of the model directory or hub id that a stage starts from; for "", the policy's."""
        named_shape = self.shape_of(name) if name else self.model
        if named_shape is None:
            self.sizes.assume(f"assumes that {name} has the policy's shape")
        return named_shape or self.model

    def measured(
        self,
        sources: Sequence[SourceConfig],
        what: str,
        tokenizer: Callable[[StageRun], Tokenizer],
        measure: Callable[[Tokenizer], Lengths],
    ) -> Lengths | None:
        """Measure and report the row lengths of a stage's sources; None if files or the vocabulary are missing.

        Raises: ValueError as `measure` and `Lengths.line`.
        """
        names = ", ".join(data.source for data in sources)
        if self.run is None or not all(Path(data.source).exists() for data in sources):
            return None
        run, read = self.run, [data.model_dump_json() for data in sources]
        lengths = self.sizes.measures.get(f"{self.name} {what} {read}", lambda: _if_readable(run, tokenizer, measure))
        if lengths is not None:
            self.sizes.assume(lengths.line(names, what))
        return lengths

    def answered(
        self,
        source: DataConfig,
        response_tokens: int,
        on_overlong: OnOverlong,
        tokenizer: Callable[[StageRun], Tokenizer],
    ) -> Lengths:
        """Return the lengths of prompts with responses of `response_tokens` each, or a bound on them; reports which.

        Raises: ValueError as `measured`, and as the run for a prompt that is too long.
        """
        limit = PromptLimit(self.name, self.model.max_position_embeddings, response_tokens, on_overlong)
        measured = self.measured((source,), "prompts", tokenizer, lambda known: prompt_lengths(known, source, limit))
        return self.bound(source, response_tokens) if measured is None else measured.plus(response_tokens)

    def bound(self, source: SourceConfig, response_tokens: int) -> Lengths:
        """Return a length that no prompt with its response exceeds, for data that cannot be read, and report it."""
        tokens = self.sizes.conversation_tokens(response_tokens)
        origin = "as in SFT" if self.sizes.longest else "the model's context"
        if not Path(source.source).exists():
            why = "not on this machine"
        else:
            why = "no vocabulary to count tokens with" if self.run else "not read: a model of the job is not here"
        self.sizes.assume(
            f"assumes at most {tokens:,} tokens per prompt and response ({origin}) for {source.source} ({why})"
        )
        return Lengths.bound(tokens)

    def packed_width(self, num_tokens: int) -> int:
        """Return the row width, with padding, into which `training.packing` packs a sequence of `num_tokens`."""
        return bucket(num_tokens) if self.layout.is_gpu else num_tokens

    @property
    def gpu_bytes(self) -> int:
        """Bytes of a GPU that tensors may take; 0 without one."""
        return self.times.hardware.memory_bytes - RESERVED_BYTES if self.layout.is_gpu else 0

    def training(
        self,
        unit: str,
        config: TrainingConfig,
        num_steps: int,
        seq_len: int,
        num_logits: int,
        *,
        mean_tokens: float = 0.0,
        rows_per_unit: int = 1,
        num_scores: int = 0,
        init_from: str = "",
    ) -> StagePlan:
        """Plan a stage that trains one model, of the policy's shape or that of `init_from`.

        Rows have at most `seq_len` tokens, which determines memory, and `mean_tokens` on average (0 = `seq_len`), which
        determines time. One rank holds `num_logits` at once; each unit of the batch has `rows_per_unit` rows.
        """
        batch, layout, model = config.batch, self.layout, self.shape(init_from)
        times = replace(self.times, model=model)
        width = self.packed_width(seq_len) if config.packs_sequences else seq_len
        check_sequence_split(model, layout.sequence_ranks)
        rows, micro_batches = rows_and_passes(batch, layout.shares, width, rows_per_unit)
        lora = config.lora if isinstance(config, FineTuningConfig) else None
        counts = count(model, config.optimizer, num_scores=num_scores, lora=lora)
        of = forward_pass(layout, rows, width, dropout=config.dropout, is_trained=True)
        memory = training_memory(model, counts, layout, of, num_logits, micro_batches)
        if num_scores:  # the trained model scores the held-out comparisons
            passes = {
                "evaluate": forward_pass(layout, scoring_rows(batch, width, rows_per_unit), width, is_trained=True),
                "score held-out": forward_pass(layout, max(1, MAX_TOKENS // width), width, is_trained=True),
            }
            scoring = {name: scoring_phase(model, counts, layout, of) for name, of in passes.items()}
            memory = replace(memory, phases={**memory.phases, **scoring})
        mean = round(mean_tokens) or seq_len
        tokens = batch.batch_size * rows_per_unit * mean
        head_share = min(1.0, num_logits / (rows * width * model.vocab_size))
        seconds = times.step_seconds(counts, tokens / layout.ranks, of.num_tokens, mean, head_share)
        numbers = {
            "batch_size": batch.batch_size,
            **batch.given_size,
            "ranks": layout.ranks,
            **layout.numbers,
            "micro-batches per rank and step": micro_batches,
            "steps": num_steps,
            "tokens per step": tokens,
        }
        if num_scores > 1:
            numbers["heads, one per objective"] = num_scores
        if rows_per_unit > 1:
            numbers["responses per comparison"] = rows_per_unit
        return self.planned(unit, numbers, {RANK: memory}, num_steps, seconds)

    def sampling(
        self,
        num_prompts: int,
        responses_per_prompt: int,
        response_tokens: int,
        lengths: Lengths,
        *,
        at_once: int,
        measured_by: Mapping[str, int] | None = None,
    ) -> StagePlan:
        """Plan a stage that samples on all workers, `at_once` responses per prompt at a time.

        `lengths` are those of prompts with responses. `measured_by` gives the models that then measure the samples:
        bytes per parameter by name.
        """
        seq_len = lengths.longest
        total = count(self.model, _ANY_OPTIMIZER).total
        c, model = self.layout.compute_bytes, self.model
        held = {name: width * total for name, width in (measured_by or {}).items()}
        free = self.gpu_bytes - c * total - sum(held.values())
        rows = rows_at_once(model, self.layout, free, min(GENERATION_ROWS, PROMPTS_AT_ONCE * at_once), seq_len)
        phases = {
            "generate": sampling_phase(model, self.layout, total, rows, seq_len - response_tokens, response_tokens)
        }
        if held:
            phases["generate"] |= held  # a worker keeps these models across parts of the prompts
            phases["measure"] = {**held, **measuring_phase(model, self.layout, seq_len, response_tokens)}
        numbers = {"prompts": num_prompts, "responses per prompt": responses_per_prompt, "ranks": self.layout.ranks}
        per_rank = math.ceil(num_prompts * responses_per_prompt / self.layout.ranks)
        seconds = self.times.sampling_seconds(total, per_rank, round(lengths.mean), response_tokens)
        return self.planned("responses", numbers, {RANK: Memory({"weights": c * total}, phases)}, 1, seconds)

    def unknown(self) -> StagePlan:
        """Plan a stage that gives no estimate."""
        self.sizes.assume("this stage gives no estimate; its memory and time are not counted")
        return self.planned("–", {"ranks": self.layout.ranks}, {RANK: Memory({}, {"unknown": {}})}, 0, 0.0)

    def planned(
        self,
        unit: str,
        numbers: Mapping[str, int],
        memory: Mapping[str, Memory],
        num_steps: int,
        seconds_per_step: float,
    ) -> StagePlan:
        """Return the plan of this stage, with all assumptions made for it. A GPU also holds what its libraries take."""
        if self.layout.is_gpu:
            reserved = {RESERVED: RESERVED_BYTES}
            memory = {kind: replace(of, held={**of.held, **reserved}) if of.peak else of for kind, of in memory.items()}
        return StagePlan(self.name, unit, numbers, memory, num_steps, seconds_per_step, self.sizes.taken())


def _if_readable(
    run: StageRun, tokenizer: Callable[[StageRun], Tokenizer], measure: Callable[[Tokenizer], Lengths]
) -> Lengths | None:
    try:
        vocabulary = tokenizer(run)
    except ValueError:  # not made yet, or the model's folder holds only a shape, which is enough for a plan
        return None
    return measure(vocabulary)
