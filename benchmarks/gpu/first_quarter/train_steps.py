"""The steps that train: SFT, single layers of a large model, compiled blocks, ZeRO, checkpoints.

They run the engine's steps as `training.loop.TrainingLoop` does, with random weights and random tokens.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.counts import planned_bytes, training_flops
from benchmarks.gpu.first_quarter.context import (
    GIB,
    GPT2,
    LLAMA8,
    LLAMA13,
    OPTIMIZER,
    QWEN,
    Context,
    Drawn,
    Fields,
    shape,
)
from benchmarks.gpu.first_quarter.kernels import note_profile
from benchmarks.gpu.rows import Pretraining
from cluster.processes import free_port
from lm.model import LanguageModel
from lm.samplers.engine import digests_of
from ppo.rank import WeightBroadcast
from training.checkpoint import step_folder
from training.config import EngineConfig
from training.engine import Engine
from training.objectives import CausalLMObjective, PackedObjective
from training.packing import IntArray, pack

NUM_SAVES = 2  # the first one pins the memory
STEPS_WHILE_WRITING = 2


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

    def __init__(self, ctx: Context, sizes: Pretraining, *, packed: bool, **options: Any) -> None:
        self.ctx, self.sizes, self.packed = ctx, sizes, packed
        config = EngineConfig.model_validate({"precision": "bf16", "trackers": [], **options})
        source = Drawn(partial(LanguageModel, sizes.model), ctx.device)
        started = ctx.now()
        self.engine: Engine[LanguageModel] = Engine(
            source, OPTIMIZER, config, world_size=1, micro_batch=sizes.micro_batch
        )
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
        engine.accumulate(
            np.split(chosen, self.sizes.num_micro_batches),
            lambda part: (objective.loss(engine.model, part, engine.device)[0] / count, {}),
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
        """Returns model FLOPs per token read. The head counts only for tokens with a loss, since only those need it."""
        model, seq_len = self.sizes.model, self.sizes.seq_len
        if self.packed:  # a token sees its own conversation, not its row
            seq_len = int(np.mean([len(tokens) for tokens, _ in conversations(500, seq_len, model.vocab_size)]))
        return training_flops(model, seq_len) - (1 - self.counted_share()) * 6 * model.vocab_size * model.hidden_size

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

    def checkpoints(self) -> dict[str, Any]:
        """Saves twice, training meanwhile, and loads the second checkpoint. Returns how long each call blocks training.

        `load_wrong` is the number of loaded tensors that differ from the saved ones; 0 is right.
        """
        ctx, engine = self.ctx, self.engine
        stalls, written = list[float](), list[float]()
        with tempfile.TemporaryDirectory(prefix="checkpoints-") as name, engine.checkpoint_writer() as writer:
            folder = Path(name)
            for number in range(1, NUM_SAVES + 1):
                saved = {key: part.values.detach().cpu().clone() for key, part in engine.state().items()}
                started = ctx.now()
                writer.save(folder, number, {"model": engine.state()})
                stalls.append(ctx.now() - started)
                started = time.perf_counter()
                seconds, _ = self.timed(STEPS_WHILE_WRITING)
                writer.wait()
                written.append(time.perf_counter() - started)
            newest = step_folder(folder, NUM_SAVES)
            size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
            started = ctx.now()
            engine.load(newest / "model")
            loaded = ctx.now() - started
        state = engine.state()
        return {
            "checkpoint_stall_seconds": stalls,
            "checkpoint_write_seconds": written,
            "step_while_writing": median(seconds),
            "checkpoint_gib": size / GIB,
            "load_seconds": loaded,
            "load_tensors": len(saved),
            "load_wrong": sum(not torch.equal(state[key].values.detach().cpu(), value) for key, value in saved.items()),
        }


def _objective(ctx: Context, sizes: Pretraining, *, packed: bool) -> CausalLMObjective | PackedObjective:
    rows, vocab_size = sizes.micro_batch * sizes.num_micro_batches, sizes.model.vocab_size
    if packed:
        number = 60 if ctx.tiny else 30 * rows
        return PackedObjective(pack(conversations(number, sizes.seq_len, vocab_size), sizes.seq_len, 0))
    return CausalLMObjective(
        np.random.default_rng(0).integers(0, vocab_size, (4 * rows, sizes.seq_len + 1), dtype=np.int32)
    )


def sizes_of(ctx: Context, fields: Fields, micro_batch: int, num_micro_batches: int, **changes: Any) -> Pretraining:
    """Returns micro-batches of rows with 1024 tokens; tiny ones in a rehearsal."""
    model = shape(fields, tiny=ctx.tiny, **changes)
    return Pretraining(model, 2, 2, 64) if ctx.tiny else Pretraining(model, micro_batch, num_micro_batches, 1024)


def train(
    ctx: Context, sizes: Pretraining, prefix: str, *, packed: bool = True, steps: int = 4, warmup: int = 2,
    profiles: bool = True, checkpoints: bool = False, **options: Any,
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
        with ctx.attempt(f"{prefix}phases"):
            _note(ctx, prefix, {"phase_seconds": training.phases()})
    if checkpoints:
        with ctx.attempt(f"{prefix}checkpoint"):
            _note(ctx, prefix, training.checkpoints())
    training.engine.close()
    del training
    ctx.release_memory()
    _note(ctx, prefix, {"gib_after_close": ctx.held_gib()})


def _note(ctx: Context, prefix: str, figures: dict[str, Any]) -> None:
    ctx.note(**{f"{prefix}{name}": value for name, value in figures.items()})


def sft_05b(ctx: Context) -> None:
    sizes = sizes_of(ctx, QWEN, 16, 4)
    train(ctx, sizes, "packed_", steps=6)
    with ctx.attempt("plain"):
        train(ctx, sizes, "plain_", packed=False, warmup=1)


def sft_13b(ctx: Context) -> None:
    train(ctx, sizes_of(ctx, LLAMA13, 8, 8), "packed_")


def sft_8b_layers(ctx: Context) -> None:
    """Four of Llama 3 8B's 32 layers at ZeRO 1, as the cluster's jobs train it."""
    train(ctx, sizes_of(ctx, LLAMA8, 4, 2, num_hidden_layers=4), "zero1_", zero_stage=1)


def checkpoint(ctx: Context) -> None:
    """Measures what a checkpoint of GPT-2 (124M) costs at ZeRO 0."""
    train(ctx, sizes_of(ctx, GPT2, 16, 2), "gpt2_", packed=False, checkpoints=True)


def compiled(ctx: Context) -> None:
    sizes = sizes_of(ctx, QWEN, 16, 4)
    train(ctx, sizes, "plain_", packed=False, warmup=1, compile_blocks=True)
    with ctx.attempt("packed"):
        train(ctx, sizes, "packed_", warmup=1, profiles=False, compile_blocks=True)


def zero(ctx: Context) -> None:
    """Runs each ZeRO stage on one rank, and compares losses, speed, checkpoints and memory with those of stage 0."""
    sizes = sizes_of(ctx, GPT2, 16, 2)
    train_at: Callable[..., None] = partial(train, ctx, sizes, warmup=1)
    for stage in range(4):
        prefix = f"zero{stage}_"
        with ctx.attempt(f"zero{stage}"):
            train_at(prefix=prefix, zero_stage=stage, profiles=stage < 2, checkpoints=stage in (1, 3))
    with ctx.attempt("zero1_offload"):
        train_at(prefix="zero1_offload_", zero_stage=1, profiles=False, offload=["optimizer"])
    with ctx.attempt("broadcast"):
        _broadcast(ctx)


def _broadcast(ctx: Context) -> None:
    """Times the transport of weights between GPUs with one rank, which shows whether NCCL works, not how fast it is."""
    weights = {
        f"w{number}": torch.randn(2**20 if ctx.tiny else 2**26, device=ctx.device).bfloat16() for number in range(2)
    }
    group = WeightBroadcast("127.0.0.1", free_port(), 0, 1, device=ctx.device, timeout_seconds=60.0)
    started = ctx.now()
    group.send(weights, digests_of(weights))
    ctx.note(broadcast_to_itself_seconds=ctx.now() - started)
