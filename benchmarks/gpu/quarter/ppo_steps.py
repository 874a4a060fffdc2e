"""The steps that run PPO: iterations of one rank with all roles, timed by the controller's own clock."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.counts import planned_bytes
from benchmarks.gpu.measure import FIRST_WORD, write_models
from benchmarks.gpu.quarter.context import GIB, QWEN, Context, Drawn, shape
from benchmarks.gpu.quarter.profiles import note_profile
from benchmarks.gpu.rows import Iteration
from benchmarks.speed.own import ENGINE, ppo_config
from lm.samplers.draws import TESTED
from lm.samplers.engine import max_difference
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from training.config import BatchConfig

ITERATIONS = 3
METRICS = (
    "response_tokens", "kl_nats", "sampler_difference", "importance_mean", "importance_max", "policy_loss",
    "value_loss",
)  # fmt: skip


def sizes_of(ctx: Context) -> Iteration:
    """Returns 512 prompts of at most 256 tokens, with responses of 256; the critic is as large as the policy."""
    model = shape(QWEN, tiny=ctx.tiny)
    return Iteration(model, model, 8, 4, 4, 8, 8) if ctx.tiny else Iteration(model, model, 512, 128, 32, 256, 256)


def ppo(ctx: Context, folder: Path, *, prefix: str, profiles: bool = False) -> None:
    """Notes iterations by phase, with their peak memory and the difference between sampler and learner.

    `folder` holds the models, which are written if it is empty. With `profiles`, the scoring of a last iteration, which
    notes nothing else, is profiled.
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
    config = ppo_config(ITERATIONS + 1, sizes.rollout, batch, sizes.response_tokens)
    models = InitialModels(folder / "policy", folder / "reward", ScoreScale(0.0, 1.0), None)
    started = ctx.now()
    roles = Roles.in_process(config, ENGINE, models)
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
    for number in range(ITERATIONS):
        _iterate(ctx, controller, number, sizes.rollout, prefix)
    if profiles:
        _profile_scoring(ctx, controller, prefix)
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


def _profile_scoring(ctx: Context, controller: PPOController, prefix: str) -> None:
    """Profiles `_score` within an iteration: the passes of all models and the test of draws."""
    score = controller._score

    def profiled(*arguments: Any) -> Any:
        found = list[Any]()
        note_profile(ctx, lambda: found.append(score(*arguments)), f"{prefix}scoring")
        return found[0] if found else score(*arguments)

    with mock.patch.object(controller, "_score", profiled):
        controller.step(ITERATIONS)


def draw_prompts(sizes: Iteration) -> list[list[int]]:
    """Returns prompts of random tokens. Lengths are uniform between half the longest and the longest."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(sizes.prompt_tokens // 2, sizes.prompt_tokens + 1, sizes.rollout).tolist()
    return [generator.integers(FIRST_WORD, sizes.model.vocab_size, length).tolist() for length in lengths]


def draws(ctx: Context) -> None:
    """Scores with the test of draws and without it, in turn, and profiles the scoring of one more iteration of each."""
    with tempfile.TemporaryDirectory(prefix="ppo-") as name:
        ppo(ctx, Path(name), prefix="tested_", profiles=True)
        with mock.patch.dict(TESTED, dict.fromkeys(TESTED, 1)):  # one token of the rollout
            ppo(ctx, Path(name), prefix="untested_", profiles=True)


def kept_steps(ctx: Context) -> None:
    """Samples in PPO with decoding steps that are kept between iterations, as "fast" does, and recorded in each."""
    with tempfile.TemporaryDirectory(prefix="ppo-") as name:
        ppo(ctx, Path(name), prefix="kept_")
        with mock.patch("ppo.generator.KEPT_SHARE", 0.0):
            ppo(ctx, Path(name), prefix="recorded_")
