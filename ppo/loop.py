"""PPO's training loop: from the newest checkpoint through all iterations to the model, with metrics, kept policies,
checkpoints and the alarm.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree

import torch
from torch import Tensor

from cluster.remote import Pending
from files.atomic import atomic_folder, remove_unfinished
from lm.adapters import ADAPTER
from lm.samplers.draws import Evidence
from lm.samplers.engine import max_difference
from lm.tokenizer import Tokenizer
from lm.weights import read_config
from ppo.alarm import Rang, SpotChecks
from ppo.config import PeopleSource, PPOConfig
from ppo.controller import UNOBSERVED, GoldScores, MissingScoresError, Observers, PPOController, ScoredBy, prompt_order
from ppo.people import PeopleChecks
from ppo.prompts import NamedSources
from ppo.rank import InitialModels
from ppo.report import PPOResults
from ppo.roles import Roles
from ppo.rollout import Rollout
from ppo.rollout_log import RolloutLog, SampleLog, followed_rows
from ppo.routes import require_routes
from reward.sources import RewardSum
from stages.data import Fitting
from stages.world import OpenLabels
from training.checkpoint import Resumption, find_resumption
from training.engine import StageContext
from training.metrics import MetricsLog
from training.notices import StoppedError, say, stop_requested
from training.packing import stream_rows
from training.writer import PROGRESS

# Files in a checkpoint: the evidence of the test of draws, and with placement `continuous`, the responses that no
# iteration has learned from, and the digest of the weights that each iteration started with.
DRAWS, UNFINISHED, VERSIONS = "draws.json", "unfinished.safetensors", "weights.json"


def train(
    context: StageContext,
    config: PPOConfig,
    roles: Roles,
    models: InitialModels,
    fitting: Fitting,
    *,
    enter: Callable[[str], None] = lambda _phase: None,
    gold: GoldScores | None = None,
    open_labels: OpenLabels | None = None,
) -> None:
    """Iterate from the newest checkpoint to the end; write `model/`, `model_ema/` and `results.json`.

    `samples.jsonl` gets some responses for people to read, and `rollouts.jsonl` records which weights sampled each
    response. With `keep_policies_every`, `policies/NNNNNN/` are model directories of the policy during training.
    `enter` and `gold` are as for `Observers`. `open_labels` opens the label store of an alarm whose source is people.

    Raises:
        ValueError: a prompt leaves no room for a response.
        MissingScoresError: too many scores fail; a checkpoint has been saved.
    """
    tokenizer, checkpoints = models.tokenizer, context.folder / "checkpoints"
    resumption = _find_resumption(context, config, roles)
    first = resumption.step
    with (
        closing(MetricsLog(context.folder, context.engine.trackers, resume_step=first)) as log,
        closing(SampleLog(context.folder, fitting.prompts, tokenizer, seed=context.seed, resume_step=first)) as samples,
        closing(RolloutLog(context.folder, resume_step=first)) as rollouts,
        _spot_checks(context, config, models, fitting, tokenizer, first, open_labels) as spot_checks,
    ):
        observers = Observers(samples, rollouts, spot_checks, enter, gold)
        controller = controller_of(context, config, roles, models, fitting, observers)
        if resumption.name:
            load_checkpoint(controller, checkpoints / resumption.name)
        done = _iterate(checkpoints, config, controller, first, log)
    roles.learners.finish_saving()
    roles.learners.export_policy(context.folder)
    rang = _alarm_that_rang(config, spot_checks, done)
    if rang is not None and rang.result < done:
        _roll_back(context.folder, rang.result)
    context.write_results(
        PPOResults(
            done,
            controller.kl.coef,
            models.scale.mean,
            models.scale.std,
            overlong=fitting.overlong or None,
            overlong_by_source={name: found for name, found in fitting.overlong_by_source.items() if found},
            sources=fitting.sources,
            num_prompts=dict(zip((source.title for source in config.named_sources), fitting.sizes, strict=True)),
            generator=config.sampler.kind,
            alarm=rang,
        )
    )


def _spot_checks(
    context: StageContext,
    config: PPOConfig,
    models: InitialModels,
    fitting: Fitting,
    tokenizer: Tokenizer,
    first: int,
    open_labels: OpenLabels | None,
) -> AbstractContextManager[SpotChecks | PeopleChecks | None]:
    if config.alarm is None:
        return nullcontext()
    if isinstance(config.alarm.source, PeopleSource):
        assert open_labels is not None, "whoever trains with people as spot checkers can open their store"
        return closing(
            PeopleChecks(
                config.alarm,
                open_labels,
                context.folder,
                fitting.prompts,
                tokenizer,
                prompt_order(config, _sizes_of(fitting), context.seed),
                num_iterations=config.num_iterations,
                seed=context.seed,
                resume_step=first,
            )
        )
    return closing(
        SpotChecks(
            config.alarm,
            context.folder,
            fitting.prompts,
            tokenizer,
            models.scale,
            num_iterations=config.num_iterations,
            seed=context.seed,
            resume_step=first,
            sizes=fitting.sizes,
            weights=config.prompt_weights,
        )
    )


def _sizes_of(fitting: Fitting) -> tuple[int, ...]:
    """Returns the number of prompts of each source."""
    return fitting.sizes or (len(fitting.prompts),)


def _alarm_that_rang(config: PPOConfig, spot_checks: SpotChecks | PeopleChecks | None, done: int) -> Rang | None:
    """Returns the alarm that rang, if any, with the iteration of the policy that the stage is to end with: the last of
    `done` iterations, or if the job rolls back, the last policy that was kept before the scores fell.
    """
    if spot_checks is None or spot_checks.rang is None:
        return None
    if config.alarm is None or config.alarm.action != "roll_back":
        return replace(spot_checks.rang, result=done)
    every = config.keep_policies_every
    return replace(spot_checks.rang, result=(spot_checks.rang.fall - 1) // every * every)  # 0 = the initial policy


def _roll_back(folder: Path, iteration: int) -> None:
    """Replace the stage's model by the policy that it kept after so many iterations."""
    for name in ("model_ema", ADAPTER):  # of the policy that is given up
        if (folder / name).is_dir():
            rmtree(folder / name)
    with atomic_folder(folder / "model") as temporary:
        copytree(kept_policy(folder, iteration), temporary, dirs_exist_ok=True)


def controller_of(
    context: StageContext,
    config: PPOConfig,
    roles: Roles,
    models: InitialModels,
    fitting: Fitting,
    observers: Observers = UNOBSERVED,
) -> PPOController:
    """Build the controller as it is before its first iteration."""
    stream = models.pretraining
    num_rows = len(stream_rows(stream.path, stream.seq_len)) if stream else 0
    names = [source.title for source in config.named_sources]
    shape, _, _ = read_config(models.sft, "language")
    require_routes(config, shape)
    if shape.num_experts and config.sampler.has_own_process and config.router_replay is None:
        say(f"ppo: sampler {config.sampler.kind!r} records no routes, so the learner's routers choose experts")
    return PPOController(
        config,
        roles,
        fitting.tokens,
        models.scale,
        num_pretraining_rows=num_rows,
        seed=context.seed,
        followed=followed_rows(_sizes_of(fitting), config.prompt_weights, roles.rows_multiple, context.seed),
        max_difference=max_difference(context.engine.resolved_precision(), shape.num_hidden_layers),
        sources=NamedSources(names, fitting.sizes) if names else None,
        scored_by=_scored_by(config, fitting),
        observers=observers,
    )


def _scored_by(config: PPOConfig, fitting: Fitting) -> ScoredBy | None:
    """Returns a function that says which rewards of a sum score each response; None for other kinds of rewards."""
    if not isinstance(config.reward, RewardSum):
        return None
    reward = config.reward

    def scored_by(rollout: Rollout) -> Tensor:
        rows = [fitting.prompts[row].row for row in rollout.prompt_rows_B.tolist()]
        chosen = [reward.parts_for(row) for row in rows]
        return torch.tensor([[name in names for name in reward.parts] for names in chosen])

    return scored_by


def _iterate(checkpoints: Path, config: PPOConfig, controller: PPOController, first: int, log: MetricsLog) -> int:
    """Run the iterations from `first` to the last, or until the alarm ends training. Log the metrics of each; keep the
    policy and save a checkpoint when due. Returns how many iterations have been run.

    Raises: StoppedError after a checkpoint, if this process was asked to stop (`training.notices`).
    """
    waited_seconds = 0.0
    if first == 0 and config.alarm is not None and config.alarm.action == "roll_back":
        controller.roles.learners.keep_policy(kept_policy(checkpoints.parent, 0))
    for iteration in range(first, config.num_iterations):
        if _is_ended(config, controller):
            return iteration
        started = time.monotonic()
        try:
            metrics = controller.step(iteration)
        except MissingScoresError:  # such as after a server's outage, which costs no iteration
            if iteration > first and iteration % config.save_every_iterations:
                _save(controller, checkpoints, iteration)
            controller.roles.learners.finish_saving()
            raise
        done, seconds = iteration + 1, time.monotonic() - started
        tokens = metrics["response_tokens"] * config.rollout_batch_size
        metrics |= {"tokens_per_second": tokens / seconds, "checkpoint_seconds": waited_seconds}
        metrics |= {**controller.phases.take(), **controller.roles.generators.take_work()}
        log.log(done, config.num_iterations, metrics)
        started = time.monotonic()
        # Keep the policy before the checkpoint, so that a run that resumes from it has every policy up to it.
        if config.keep_policies_every and done % config.keep_policies_every == 0:
            controller.roles.learners.keep_policy(kept_policy(checkpoints.parent, done))
        is_last = done == config.num_iterations or _is_ended(config, controller)
        is_stopping = not is_last and stop_requested()
        if done % config.save_every_iterations == 0 or is_last or is_stopping:
            _save(controller, checkpoints, done)
        if is_stopping:
            controller.roles.learners.finish_saving()
            raise StoppedError(f"ppo: stopped at iteration {done} of {config.num_iterations}")
        waited_seconds = time.monotonic() - started
    return config.num_iterations


def _is_ended(config: PPOConfig, controller: PPOController) -> bool:
    """Returns whether the alarm has ended training."""
    checks = controller.observers.spot_checks
    rang = None if checks is None else checks.rang
    return rang is not None and config.alarm is not None and config.alarm.action != "warn"


def kept_policy(folder: Path, iteration: int) -> Path:
    """Returns where a stage in `folder` keeps the policy after this many iterations."""
    return folder / "policies" / f"{iteration:06d}"


def _save(controller: PPOController, checkpoints: Path, done: int) -> None:
    """Save a checkpoint, including what older weights sampled: the weights are thousands of times as large."""
    generators, placement = controller.roles.generators, controller.config.placement
    if placement.max_staleness:
        controller.start_sampling(done)  # generators need not wait for the checkpoint
    stale = controller.stale_rollouts(done)
    files = {f"rollout-{iteration:06d}.safetensors": rollout.as_bytes() for iteration, rollout in stale.items()}
    if placement.samples_rounds:  # as they are after those rollouts
        files[UNFINISHED] = generators.unfinished()
        files[VERSIONS] = json.dumps([*controller.started_with.items()]).encode()
    files[DRAWS] = controller.evidence.as_bytes()
    controller.roles.learners.save(checkpoints, done, {"kl_coef": controller.kl.coef}, files)


def _find_resumption(context: StageContext, config: PPOConfig, roles: Roles) -> Resumption:
    """Find the newest sound checkpoint, and report which it is. The learners verify its files.

    Raises:
        ValueError: there are checkpoints, and all of them are damaged.
    """
    checkpoints = context.folder / "checkpoints"
    remove_unfinished(checkpoints)
    stage = context.folder.name  # "ppo_2" in a second round
    resumption = find_resumption(checkpoints, stage, roles.learners.changed_files)
    for notice in resumption.notices(stage, config.num_iterations, "iteration"):
        say(notice)
    return resumption


def load_checkpoint(controller: PPOController, folder: Path) -> None:
    """Restore the roles, the KL coefficient, the rollouts of older weights and the test of draws from a checkpoint."""
    controller.roles.load(folder)
    if (folder / DRAWS).is_file():  # older checkpoints have none
        controller.evidence = Evidence.load(folder / DRAWS)
    controller.kl.coef = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["kl_coef"]
    if controller.config.placement.samples_rounds:
        controller.roles.generators.restore((folder / UNFINISHED).read_bytes())
        controller.started_with = dict(json.loads((folder / VERSIONS).read_bytes()))
    for path in folder.glob("rollout-*.safetensors"):
        controller.in_flight[int(path.stem.removeprefix("rollout-"))] = _held(Rollout.load(path))


def _held(rollout: Rollout) -> Pending[Rollout]:
    return lambda: rollout
