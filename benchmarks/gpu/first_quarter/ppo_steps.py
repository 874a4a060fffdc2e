"""The steps that run PPO: iterations of one rank with all roles, timed by the controller's own clock."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.counts import planned_bytes
from benchmarks.gpu.first_quarter.context import GIB, QWEN, Context, Drawn, shape
from benchmarks.gpu.measure import FIRST_WORD, write_models
from benchmarks.gpu.rows import Iteration
from benchmarks.speed.own import ENGINE, ppo_config
from lm.samplers.engine import max_difference
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from training.config import BatchConfig

METRICS = (
    "response_tokens", "kl_nats", "sampler_difference", "importance_mean", "importance_max", "policy_loss",
    "value_loss",
)  # fmt: skip


def sizes_of(ctx: Context) -> Iteration:
    """Returns 512 prompts of at most 256 tokens, with responses of 256; the critic is as large as the policy."""
    model = shape(QWEN, tiny=ctx.tiny)
    return Iteration(model, model, 8, 4, 4, 8, 8) if ctx.tiny else Iteration(model, model, 512, 128, 32, 256, 256)


def ppo(
    ctx: Context, folder: Path, *, prefix: str = "", iterations: int = 3, memory: str = "fast", zero_stage: int = 0
) -> None:
    """Notes iterations by phase, with their peak memory and the difference between sampler and learner.

    `folder` holds the models, which are written if it is empty.
    """
    sizes = sizes_of(ctx)
    ctx.release_memory()
    if not any(folder.iterdir()):
        started = ctx.now()
        write_models(folder, sizes, partial(Drawn, device=ctx.device))
        ctx.note(**{f"{prefix}write_models_seconds": ctx.now() - started})
        ctx.release_memory()
    row_tokens = sizes.prompt_tokens + sizes.response_tokens
    batch = BatchConfig(batch_size=sizes.minibatch, micro_batch_tokens=sizes.micro_batch * row_tokens)
    config = ppo_config(iterations, sizes.rollout, batch, sizes.response_tokens).model_copy(update={"memory": memory})
    engine = ENGINE.model_copy(update={"zero_stage": zero_stage})
    models = InitialModels(folder / "policy", folder / "reward", ScoreScale(0.0, 1.0), None)
    started = ctx.now()
    roles = Roles.in_process(config, engine, models)
    ctx.note(**{f"{prefix}load_seconds": ctx.now() - started, f"{prefix}held_gib": ctx.held_gib()})
    controller = PPOController(
        config,
        roles,
        draw_prompts(sizes),
        models.scale,
        num_pretraining_rows=0,
        seed=0,
        max_difference=max_difference("bf16", sizes.model.num_hidden_layers),
    )
    for number in range(iterations):
        _iterate(ctx, controller, number, sizes.rollout, prefix)
    ctx.note(**{f"{prefix}planned_gib_fast_zero0": planned_bytes(sizes) / GIB})
    roles.close()
    del roles, controller
    ctx.release_memory()


def _iterate(ctx: Context, controller: PPOController, number: int, rollout: int, prefix: str) -> None:
    if ctx.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = ctx.now()
    metrics = controller.step(number)
    whole, phases = ctx.now() - started, dict(controller.phases.take())
    found = {
        "seconds": whole,
        **phases,
        "rest_seconds": whole - sum(phases.values()),
        "peak_gib": ctx.peak_gib(),
        "response_tokens_per_second": metrics["response_tokens"] * rollout / whole,
        **{name: metrics[name] for name in METRICS if name in metrics},
    }
    ctx.note(**{f"{prefix}iteration_{number}": found})


def draw_prompts(sizes: Iteration) -> list[list[int]]:
    """Returns prompts of random tokens. Lengths are uniform between half the longest and the longest."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(sizes.prompt_tokens // 2, sizes.prompt_tokens + 1, sizes.rollout).tolist()
    return [generator.integers(FIRST_WORD, sizes.model.vocab_size, length).tolist() for length in lengths]


def ppo_05b(ctx: Context) -> None:
    with tempfile.TemporaryDirectory(prefix="ppo-") as name:
        ppo(ctx, Path(name))


def ppo_modes(ctx: Context) -> None:
    """Runs PPO with the values of `ppo.memory` other than "fast", and with ZeRO."""
    with tempfile.TemporaryDirectory(prefix="ppo-") as name:
        ppo(ctx, Path(name), prefix="balanced_", iterations=2, memory="balanced")
        for memory, stage, iterations in (("small", 0, 2), ("small", 3, 1), ("fast", 1, 1)):
            prefix = f"{memory}_zero{stage}_"
            with ctx.attempt(prefix.removesuffix("_")):
                ppo(ctx, Path(name), prefix=prefix, iterations=iterations, memory=memory, zero_stage=stage)
