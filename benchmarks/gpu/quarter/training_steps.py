"""The steps that train: a small model in three ways, layers of a large one, a whole large one, a mixture of experts.

They run the engine's steps as `training.loop.TrainingLoop` does, with random weights and random tokens.
"""

import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.counts import planned_bytes, training_flops
from benchmarks.gpu.quarter.context import (
    GIB,
    GPT_OSS,
    LLAMA8,
    OPTIMIZER,
    QWEN,
    QWEN3_30B,
    Context,
    Drawn,
    Fields,
    shape,
)
from benchmarks.gpu.quarter.profiles import note_profile
from benchmarks.gpu.quarter.sampling_steps import decode
from benchmarks.gpu.rows import Pretraining
from lm.lora import LoRAConfig, WithAdapters
from lm.model import LanguageModel
from lm.source import ModelSource
from training.config import EngineConfig
from training.engine import Engine
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import IntArray, pack
from training.recording import RecordableLoss

MIXTURE_LAYERS, SINK_LAYERS = 8, 4  # of 48, and of 24


def conversations(number: int, longest: int, vocab_size: int) -> list[tuple[list[int], list[bool]]]:
    """Returns conversations of random tokens with lengths like HH-RLHF's: log-normal, 200 tokens in the median.

    The second half of each counts in the loss.
    """
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.3, 0.7, number), 12, longest).astype(int).tolist()
    return [
        (generator.integers(3, vocab_size, length).tolist(), [place >= length // 2 for place in range(length)])
        for length in lengths
    ]


class Training:
    """An engine and its rows. A step is `sizes.num_micro_batches` micro-batches."""

    def __init__(
        self, ctx: Context, sizes: Pretraining, *, packed: bool, lora: LoRAConfig | None = None, **options: Any
    ) -> None:
        self.ctx, self.sizes, self.packed, self.lora = ctx, sizes, packed, lora
        config = EngineConfig.model_validate({"precision": "bf16", "trackers": [], **options})
        drawn = Drawn(partial(LanguageModel, sizes.model), ctx.device)
        source: ModelSource[Any] = drawn if lora is None else WithAdapters(drawn, lora, 0)
        started = ctx.now()
        self.engine: Engine[Any] = Engine(source, OPTIMIZER, config, world_size=1, micro_batch=sizes.micro_batch)
        self.build_seconds = ctx.now() - started
        self.objective = _objective(ctx, sizes, packed=packed)
        self.rows = np.random.default_rng(1)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def draw_rows(self, number: int) -> IntArray:
        chosen: IntArray = self.rows.permutation(max(number, len(self.objective)))[:number] % len(self.objective)
        return chosen

    def step(self) -> int:
        """Runs a step, and returns the number of tokens that it read."""
        engine, objective = self.engine, self.objective
        chosen = self.draw_rows(self.sizes.micro_batch * self.sizes.num_micro_batches)
        count = objective.count(chosen)
        engine.set_learning_rate(OPTIMIZER.learning_rate)
        engine.model.train()
        micro_batches = np.split(chosen, self.sizes.num_micro_batches)
        if engine.config.record_micro_batches:
            recorded = RecordableLoss(objective, engine.model)
            engine.accumulate_recorded(recorded.inputs(micro_batches, count, 0), recorded)
        else:
            engine.accumulate(
                micro_batches, lambda part: (objective.loss(engine.model, part, engine.device)[0] / count, {})
            )
        loss, norm = engine.step()
        self.losses.append(loss)
        self.norms.append(norm)
        return objective.num_tokens(chosen)

    def timed(self, number: int) -> tuple[list[float], int]:
        """Runs steps; returns the seconds of each, and the tokens of all."""
        seconds, num_tokens = list[float](), 0
        for _ in range(number):
            started = self.ctx.now()
            num_tokens += self.step()
            seconds.append(self.ctx.now() - started)
        return seconds, num_tokens

    def flops_per_token(self) -> float:
        """Returns model FLOPs per token read. The head counts only for tokens with a loss, since only those need it.

        With adapters two of three products count, since the frozen body has no gradient of its own.
        """
        model, seq_len = self.sizes.model, self.sizes.seq_len
        if self.packed:  # a token sees its own conversation, not its row
            seq_len = int(np.mean([len(tokens) for tokens, _ in conversations(500, seq_len, model.vocab_size)]))
        every = training_flops(model, seq_len) - (1 - self.counted_share()) * 6 * model.vocab_size * model.hidden_size
        return every * (1 if self.lora is None else 2 / 3)

    def counted_share(self) -> float:
        everything = np.arange(len(self.objective))
        return self.objective.count(everything) / self.objective.num_tokens(everything)

    def phases(self) -> dict[str, float]:
        """Returns the seconds of a micro-batch's forward pass, of forward and backward, and of a step.

        `enqueued` is how long the CPU takes; the GPU finishes later.
        """
        ctx, engine, objective = self.ctx, self.engine, self.objective
        chosen = self.draw_rows(self.sizes.micro_batch)
        count = objective.count(chosen)
        engine.set_learning_rate(OPTIMIZER.learning_rate)
        taken: dict[str, float] = {}
        started = ctx.now()
        with engine.cache_weight_casts():
            loss = objective.loss(engine.model, chosen, engine.device)[0] / count
            taken["forward_enqueued"] = time.perf_counter() - started
            taken["forward"] = ctx.now() - started
            del loss
        started = ctx.now()
        engine.accumulate([chosen], lambda part: (objective.loss(engine.model, part, engine.device)[0] / count, {}))
        taken["forward_backward_enqueued"] = time.perf_counter() - started
        taken["forward_backward"] = ctx.now() - started
        started = ctx.now()
        engine.step()
        taken["step"] = ctx.now() - started
        return taken


def _objective(ctx: Context, sizes: Pretraining, *, packed: bool) -> CausalLMObjective | PackedObjective:
    rows, vocab_size = sizes.micro_batch * sizes.num_micro_batches, sizes.model.vocab_size
    if packed:
        number = 60 if ctx.tiny else 30 * rows
        return PackedObjective(pack(conversations(number, sizes.seq_len, vocab_size), sizes.seq_len, 0))
    shape_BT = (4 * sizes.micro_batch * sizes.num_micro_batches, sizes.seq_len + 1)
    return CausalLMObjective(np.random.default_rng(0).integers(0, sizes.model.vocab_size, shape_BT, dtype=np.int32))


def sizes_of(ctx: Context, fields: Fields, micro_batch: int, num_micro_batches: int, **changes: Any) -> Pretraining:
    """Returns micro-batches of rows with 1024 tokens; tiny ones in a rehearsal."""
    model = shape(fields, tiny=ctx.tiny, **changes)
    return Pretraining(model, 2, 2, 64) if ctx.tiny else Pretraining(model, micro_batch, num_micro_batches, 1024)


def train(
    ctx: Context, sizes: Pretraining, prefix: str, *, packed: bool = True, steps: int = 4, warmup: int = 2,
    profiles: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Notes tokens and FLOPs per second, MFU, memory, kernels and phases of some steps. `options` are the engine's."""
    ctx.release_memory()
    training = Training(ctx, sizes, packed=packed, **options)
    (first, *_), _ = training.timed(1 + warmup)
    seconds, num_tokens = training.timed(2 if ctx.tiny else steps)
    rate, per_token = num_tokens / sum(seconds), training.flops_per_token()
    figures = {
        "tokens_per_second": rate,
        "tflops": rate * per_token / 1e12,
        "mfu": rate * per_token / ctx.hardware.flops,
        "step_seconds": median(seconds),
        "first_step_seconds": first,
        "build_seconds": training.build_seconds,
        "counted_share": training.counted_share(),
        "flops_per_token": per_token,
        "peak_gib": ctx.peak_gib(),
        "planned_gib_zero0": planned_bytes(sizes) / GIB,
        "losses": training.losses,
        "norms": training.norms,
        "parameters": sum(parameter.numel() for parameter in training.engine.module.parameters()),
        "options": str(options),
    }
    _note(ctx, prefix, figures)
    if profiles:
        note_profile(ctx, training.step, f"{prefix}step")
        if not training.engine.config.record_micro_batches:  # which has no phases on the CPU
            with ctx.attempt(f"{prefix}phases"):
                _note(ctx, prefix, {"phase_seconds": training.phases()})
    training.engine.close()
    del training
    ctx.release_memory()
    _note(ctx, prefix, {"gib_after_close": ctx.held_gib()})


def _note(ctx: Context, prefix: str, figures: dict[str, Any]) -> None:
    ctx.note(**{f"{prefix}{name}": value for name, value in figures.items()})


def sft_05b(ctx: Context) -> None:
    """The 0.5B model: plain, compiled, recorded, and both, one after another."""
    sizes = sizes_of(ctx, QWEN, 16, 4)
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "compiled_": {"compile_blocks": True},
        "recorded_": {"record_micro_batches": True},
        "compiled_recorded_": {"compile_blocks": True, "record_micro_batches": True},
    }
    for name, options in kinds.items():
        # On a CPU, each length of a packed row's sequences compiles once more, for minutes.
        compiles = "compile_blocks" in options
        for packed in (True, False) if ctx.on_gpu or not compiles else (False,):
            prefix = f"{name}{'packed' if packed else 'rows'}_"
            with ctx.attempt(prefix.removesuffix("_")):
                train(ctx, sizes, prefix, packed=packed, warmup=1, profiles=not name or packed, **options)


def zero1_8b(ctx: Context) -> None:
    """Four of Llama 3 8B's 32 layers at ZeRO 1: 8,192 tokens per optimizer step, as measured before, and 65,536."""
    for micro_batches in (2, 16):
        sizes = sizes_of(ctx, LLAMA8, 4, micro_batches, num_hidden_layers=4)
        with ctx.attempt(f"tokens{4096 * micro_batches}"):
            train(ctx, sizes, f"tokens{4096 * micro_batches}_", steps=3, warmup=1, zero_stage=1)


def whole_8b(ctx: Context) -> None:
    """All layers of Llama 3 8B, 65,536 tokens per optimizer step: by adapters, and all weights at ZeRO 1 with the
    optimizer's states in CPU memory, which take 96 GB.
    """
    sizes = sizes_of(ctx, LLAMA8, 4, 16)
    with ctx.attempt("adapters"):
        train(
            ctx, sizes, "adapters_", steps=2, warmup=0, zero_stage=1, lora=LoRAConfig(rank=16),
            checkpoint_activations=True,
        )  # fmt: skip
    with ctx.attempt("offloaded"):
        train(
            ctx, sizes, "offloaded_", steps=2, warmup=0, profiles=False, zero_stage=1, offload=["optimizer"],
            checkpoint_activations=True,
        )  # fmt: skip


def mixtures(ctx: Context) -> None:
    """Training steps and sampling with 128 rows: eight of Qwen3-30B-A3B's 48 layers, and four of gpt-oss-20b's 24."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    kept = ("mlp", "mlp_bias", "attention_bias", "attention_sinks", "norm_topk_prob")
    tiny_oss = {**experts, **{name: GPT_OSS[name] for name in kept}, "sliding_window": (16, 0)}
    for prefix, fields, num_layers, changes in (
        ("", QWEN3_30B, MIXTURE_LAYERS, experts), ("sinks_", GPT_OSS, SINK_LAYERS, tiny_oss),
    ):  # fmt: skip
        model = shape(fields, tiny=ctx.tiny, num_hidden_layers=num_layers)
        if ctx.tiny:
            model = model.model_copy(update=changes)
        sizes = Pretraining(model, 2, 2, 64) if ctx.tiny else Pretraining(model, 8, 4, 1024)
        with ctx.attempt(f"{prefix}training"):
            train(ctx, sizes, f"{prefix}training_", steps=3, warmup=1)
        with ctx.attempt(f"{prefix}sampling"):
            decode(ctx, model, 128, 128, f"{prefix}sampling_")
