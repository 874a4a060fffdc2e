"""The PPO stage: the controller's loop with its metrics and checkpoints."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from files.atomic import remove_unfinished
from lm.tokenizer import Tokenizer
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.initial_models import InitialModels
from ppo.roles import Roles, Sampling
from ppo.rollout import Rollout
from training.checkpoint import find_resumption
from training.data import Prompt
from training.metrics import MetricsLog
from training.notices import say
from training.packing import stream_rows
from training.stage import StageContext
from training.writer import PROGRESS


def run(
    context: StageContext, config: PPOConfig, roles: Roles, models: InitialModels, prompts: Sequence[Prompt]
) -> None:
    """Iterate from the newest checkpoint to the end; write `model/`, `model_ema/` and `results.json`.

    With `keep_policies_every` also `policies/NNNNNN/`: model directories of the policy along the way.

    Errors: ValueError for a prompt that leaves no room for a response, and where too many scores fail.
    """
    tokenizer = Tokenizer.load(models.sft)
    stream = models.pretraining
    num_rows = len(stream_rows(stream.path, stream.seq_len)) if stream else 0
    encoded = [tokenizer.encode_prompt(prompt.messages) for prompt in prompts]
    controller = PPOController(config, roles, encoded, models.scale, num_pretraining_rows=num_rows, seed=context.seed)
    first = _resume(context, controller)
    log = MetricsLog(context.folder, context.engine.trackers, resume_step=first)
    checkpoints, waited_seconds = context.folder / "checkpoints", 0.0
    for iteration in range(first, config.num_iterations):
        started = time.monotonic()
        figures = controller.step(iteration)
        done, seconds = iteration + 1, time.monotonic() - started
        tokens = figures["response_tokens"] * config.rollout_batch_size
        figures |= {"tokens_per_second": tokens / seconds, "checkpoint_seconds": waited_seconds}
        log.log(done, config.num_iterations, figures)
        started = time.monotonic()
        # Before the checkpoint, so that a run that goes on from one has every policy up to it.
        if config.keep_policies_every and done % config.keep_policies_every == 0:
            roles.keep_policy(kept_policy(context.folder, done))
        if done % config.save_every_iterations == 0 or done == config.num_iterations:
            _save(roles, checkpoints, controller, done)
        waited_seconds = time.monotonic() - started
    log.close()
    roles.finish_saving()
    roles.export_policy(context.folder)
    scale = {"score_scale_mean": models.scale.mean, "score_scale_std": models.scale.std}
    context.write_results({"num_iterations": config.num_iterations, "final_kl_coef": controller.kl.coef, **scale})


def kept_policy(folder: Path, iteration: int) -> Path:
    """Where a stage in `folder` keeps the policy that so many iterations made."""
    return folder / "policies" / f"{iteration:06d}"


def _save(roles: Roles, checkpoints: Path, controller: PPOController, done: int) -> None:
    """Rollouts that older weights sample are kept themselves: those weights are thousands of times as large."""
    if controller.config.max_staleness:
        controller.start_sampling(done)  # generators need not wait for the checkpoint
    stale = controller.stale_rollouts(done)
    rollouts = {f"rollout-{iteration:06d}.safetensors": rollout.as_bytes() for iteration, rollout in stale.items()}
    roles.save(checkpoints, done, {"kl_coef": controller.kl.coef}, rollouts)


def _resume(context: StageContext, controller: PPOController) -> int:
    """Load the newest sound checkpoint; returns the iteration to start at. The learners verify the files.

    Raises:
        ValueError: there are checkpoints, and all of them are damaged.
    """
    checkpoints = context.folder / "checkpoints"
    remove_unfinished(checkpoints)
    found = find_resumption(checkpoints, "ppo", controller.roles.changed_files)
    for notice in found.notices("ppo", controller.config.num_iterations, "iteration"):
        say(notice)
    if not found.name:
        return 0
    folder = checkpoints / found.name
    controller.roles.load(folder)
    controller.kl.coef = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["kl_coef"]
    for path in folder.glob("rollout-*.safetensors"):
        controller.in_flight[int(path.stem.removeprefix("rollout-"))] = _held(Rollout.load(path))
    return found.step


def _held(rollout: Rollout) -> Sampling:
    return lambda: rollout
