"""`heed replay`: computes one PPO response again as it was sampled, with all numbers that the algorithm derived from
it, and follows the chain from it back to the labels.

The iterations from the newest checkpoint before it up to its own are computed again in memory; no file of the run
changes. With Heed's sampler, the same number of ranks and the same kind of machine, the results are the same bits.
Weights, response and score are compared with the record in rollouts.jsonl.

Shape letters: R response tokens.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch

from cluster.connection import resolve_precision
from files.atomic import lock
from files.records import read_record
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.models import hub_models
from heed.jobs.recovery import Workers
from heed.jobs.run import Run, inputs_of, what_changed
from lm.hub import model_directory
from lm.tokenizer import Messages, Tokenizer
from ppo.algorithm import token_weights
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.loop import controller_of, load_checkpoint
from ppo.rank import ScoreScale
from ppo.report import PPOResults
from ppo.rollout_log import ROLLOUTS, RolloutRecord, read_rollouts, response_digests, samplers_of
from ppo.stage import placed
from reward.config import RankingsConfig, RewardConfig
from reward.external import NoReward
from reward.prepared import read_rankings
from reward.stage import STAGE as REWARD
from stages.lineage import LINEAGE, path_hash, started_with
from stages.progress import print_notice
from stages.run import StageRun
from training.checkpoint import changed_files, read_manifest, step_folders, step_of
from training.data import Prompt
from training.metrics import read_metrics
from training.notices import speaking_through


@dataclass(frozen=True)
class ReplayedToken:
    """A token of the response.

    `reward` is in standard deviations of the initial policy's scores: the scaled score at the last token, minus the KL
    penalty at each, plus terms of teachers of the kind "reward". `ratio` is π/π_sampler before the iteration's updates,
    and `ratio_after` is π/π_before after them. `weight` is the weight of the token's loss in the minibatch's, after
    dividing by its number of counted tokens.
    """

    text: str
    is_written: bool  # by the policy; an environment wrote the others, which have no numbers
    logprob: float  # nats, as sampled
    kl: float  # log π - log π_ref, nats
    teacher: float  # Σ over teachers of weight · (log π_T - log π), in units of the reward; 0 without teachers
    reward: float
    value: float
    advantage: float
    ratio: float
    ratio_after: float
    weight: float


@dataclass(frozen=True)
class Replayed:
    """A response that was sampled again, and what rollouts.jsonl has recorded about it."""

    prompt: Prompt
    response: str
    score: float  # before scaling; NaN if scoring failed
    tokens: list[ReplayedToken]
    sampled_by: str
    recorded_sampled_by: str
    digest: str
    recorded_digest: str
    recorded_score: float
    from_iteration: int  # iterations before this one were not computed again

    @property
    def is_same(self) -> bool:
        """Whether weights, tokens, log-probs and score equal the recorded ones to the last bit."""
        is_score = self.score == self.recorded_score or (isnan(self.score) and isnan(self.recorded_score))
        return self.digest == self.recorded_digest and self.sampled_by == self.recorded_sampled_by and is_score


@dataclass(frozen=True)
class Link:
    """One link of the chain: a stage or a file, what it is, and its hash ("" if it has none)."""

    name: str
    what: str
    sha256: str


def replay_response(
    folder: Path, stage: str, iteration: int, response: int, on_progress: Callable[[int, int], None] = lambda *_: None
) -> tuple[Replayed, list[Link]]:
    """Sample a response of a run again. `iteration` counts from 1, `response` from 0, as rollouts.jsonl does.

    `on_progress(done, total)` is called after each iteration that is computed.
    Raises: ValueError for a folder that is no run, or has no such stage, iteration or response.
    """
    job = _job_of(folder)
    if stage not in job.stage_names or not isinstance(job.section(job.stage(stage)), PPOConfig):
        names = [name for name in job.stage_names if isinstance(job.section(job.stage(name)), PPOConfig)]
        raise ValueError(f"--stage {stage}: {' or '.join(names) or 'a run with a PPO stage'} was expected")
    with ExitStack() as closing:
        closing.enter_context(speaking_through(print_notice))
        closing.enter_context(lock(folder))
        workers = Workers(job.world_sizes, folder, job.cluster, job.extra_ranks, hub_models(job))
        closing.callback(workers.close)
        engine = resolve_precision(job.engine, workers.check(), job.fewest_ranks, job.cluster.start_seconds)
        job = job.model_copy(update={"engine": engine})
        run = Run(job, folder, job.open_world(), workers)
        stage_run = run.of(stage)
        _require_same_inputs(run, stage)
        config = stage_run.resolve(job.section_of(job.stage(stage)))
        assert isinstance(config, PPOConfig)
        replayed = replay_iterations(stage_run, config, iteration, response, on_progress)
        return replayed, chain_of(run, stage, replayed.prompt.messages)


def _require_same_inputs(run: Run, name: str) -> None:
    """Raise ValueError if the job file, its data or earlier stages have changed since this stage ran."""
    stage, folder = run.job.stage(name), run.stage_folder(name)
    inputs = inputs_of(run, stage)
    if started_with(folder) != inputs.fingerprint:
        changed = what_changed(folder, inputs)
        raise ValueError(f"{folder}: {run.folder / 'job.toml'} or its inputs changed after this stage ran: {changed}")


def _job_of(folder: Path) -> JobConfig:
    if not (folder / "job.toml").is_file():
        raise ValueError(f"{folder}: the folder of a run, with its job.toml, was expected")
    return load_job(folder / "job.toml")


def chain_of(run: Run, stage: str, prompt: Messages) -> list[Link]:
    """Returns what a PPO stage was made from, back to the judgments that its reward model learned from. In a later
    round, that includes what the previous round's policy was made from.
    """
    job, stage_run = run.job, run.of(stage)
    start = stage_run.start("sft").parent
    section = job.section_of(job.stage(stage))
    assert isinstance(section, PPOConfig)
    links = [
        _link(stage_run.folder, "the policy after all iterations"),
        _link(start, "the policy that PPO starts from"),
        *(_link(model_directory(teacher.model).parent, "a teacher") for teacher in section.teachers),
        *_reward_links(run, stage, prompt),
    ]
    is_own = start.parent == run.folder and start.name in job.stage_names
    if is_own and isinstance(job.section(job.stage(start.name)), PPOConfig):
        links += chain_of(run, start.name, prompt)[1:]
    return links


def _reward_links(run: Run, stage: str, prompt: Messages) -> list[Link]:
    job, stage_run = run.job, run.of(stage)
    ppo = job.section_of(job.stage(stage))
    if isinstance(ppo, PPOConfig) and isinstance(ppo.reward, NoReward):
        return []
    if isinstance(ppo, PPOConfig) and ppo.external_reward is not None:
        return [Link("reward", ppo.external_reward.source, "")]
    judge = stage_run.start(REWARD.name)
    links, own = [_link(judge.parent, "the reward model")], stage_run.own(REWARD.name)
    if own not in job.stage_names or stage_run.folder_of(REWARD.name) != judge.parent:
        return links  # a reward model from elsewhere was not made by this run
    section = job.section_of(job.stage(own))
    reward = stage_run.at(REWARD.name).resolve(section)
    assert isinstance(section, RewardConfig)
    assert isinstance(reward, RewardConfig)
    learned_from = _lineage(judge.parent).get("data", {}).get(section.rankings.source, "")
    return [*links, _rankings_link(reward.rankings, learned_from, prompt)]


def _rankings_link(source: RankingsConfig, learned_from: str, prompt: Messages) -> Link:
    """Returns a link for the rankings: how many each labeler made, and how many are about this very prompt.

    `learned_from` is the SHA-256 of the data that the reward model learned from.
    """
    rankings = read_rankings(source)
    by_labeler = Counter(ranking.labeler for ranking in rankings)
    same = sum([message.turn for message in ranking.prompt] == list(prompt) for ranking in rankings)
    people = ", ".join(f"{name} {number:,}" for name, number in sorted(by_labeler.items()))
    sha256 = path_hash(source.source)
    changed = "" if sha256 == learned_from else "; it has changed since the reward model learned from it"
    return Link(source.source, f"{len(rankings):,} judgments ({people}), {same} on this prompt{changed}", sha256)


def _lineage(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / LINEAGE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _link(folder: Path, what: str) -> Link:
    """Returns a link for a stage's folder, or for a model from elsewhere, which has no lineage."""
    lineage = _lineage(folder)
    if not lineage:
        return Link(str(folder), what, "")
    return Link(str(folder), f"{what}, by Heed {lineage['code_version']}", str(lineage["outputs"]))


def replay_iterations(
    stage: StageRun, config: PPOConfig, iteration: int, response: int, on_progress: Callable[[int, int], None]
) -> Replayed:
    """Compute an iteration of a stage again, and return one of its responses.

    Iterations count from 1, responses from 0. `on_progress(done, total)` is called after each computed iteration.
    Raises: ValueError for an iteration or a response that the run does not have.
    """
    records = read_rollouts(read_metrics(stage.folder / ROLLOUTS))
    require_recorded(stage.folder / ROLLOUTS, records, iteration, response)
    setup = placed(stage, config, _scale_of(stage.folder / "results.json"))
    controller = controller_of(stage.context(), config, setup.roles, setup.models, setup.fitting)
    # A checkpoint contains the rollouts that older weights sampled. To sample those again, start from an earlier one.
    checkpoint = checkpoint_before(stage.folder / "checkpoints", iteration - config.placement.max_staleness)
    first = 0
    if checkpoint is not None:
        first = step_of(checkpoint)
        load_checkpoint(controller, checkpoint)
    for number in range(first, iteration):
        controller.step(number)
        on_progress(number + 1 - first, iteration - first)
    tokenizer, record = setup.models.tokenizer, records[iteration]
    replayed = _replayed(controller, setup.fitting.prompts, tokenizer, record, response, first)
    setup.roles.close()
    return replayed


def require_recorded(path: Path, records: dict[int, RolloutRecord], iteration: int, response: int) -> None:
    """Check that rollouts.jsonl has the iteration and the response. Raises: ValueError if it does not."""
    if not records:
        raise ValueError(f"{path}: has no recorded iterations; a run of this version of Heed was expected")
    if iteration not in records:
        raise ValueError(f"--iteration {iteration}: {path} has iterations {min(records)} to {max(records)}")
    number = len(records[iteration].responses)
    if not 0 <= response < number:
        raise ValueError(f"--response {response}: iteration {iteration} has responses 0 to {number - 1}")


def _scale_of(results: Path) -> ScoreScale | None:
    """Returns the score scale of a run; None unless the run is finished."""
    if not results.is_file():
        return None
    stage_results = read_record(results, PPOResults)
    return ScoreScale(stage_results.score_scale_mean, stage_results.score_scale_std)


def checkpoint_before(checkpoints: Path, iteration: int) -> Path | None:
    """Returns the newest sound checkpoint from before an iteration; None = start from the beginning."""
    for folder in step_folders(checkpoints):
        manifest = read_manifest(folder)
        if step_of(folder) < iteration and not manifest.damage and not changed_files(folder, manifest.sha256):
            return folder
    return None


def _replayed(
    controller: PPOController,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    record: RolloutRecord,
    response: int,
    first: int,
) -> Replayed:
    batch = controller.batch
    assert batch is not None, "an iteration was computed"
    rollout, config, recorded_score = batch.rollout, controller.config, record.scores[response]
    minibatches = controller.minibatches(record.step - 1, len(rollout))[: config.num_minibatches]
    after_BR = controller.roles.learners.start_policy_logprobs(rollout, minibatches)()
    rows = next(rows for rows in minibatches if response in rows.tolist())
    weight_BR, num_tokens = token_weights(batch.counted_BR[rows], config.loss.token_weight, config.max_new_tokens)
    weight_R = weight_BR[rows.tolist().index(response)] / num_tokens
    columns = {
        "logprob": rollout.behaviour_logprobs_BR[response],
        "kl": (batch.logprobs_BR - batch.ref_logprobs_BR)[response],
        "teacher": batch.teacher_BR[response],
        "reward": batch.rewards_BR[response],
        "value": batch.values_BR[response],
        "advantage": batch.advantages_BR[response],
        "ratio": (batch.logprobs_BR - rollout.behaviour_logprobs_BR)[response].exp(),
        "ratio_after": (after_BR - batch.logprobs_BR)[response].exp(),
        "weight": weight_R,
    }
    length = int(rollout.response_tokens_B[response])
    tokens = rollout.response_BR[response, :length].tolist()
    written = rollout.written_BR[response, :length].tolist()
    numbers = torch.stack([*columns.values()])[:, :length].T.tolist()
    return Replayed(
        prompt=prompts[int(rollout.prompt_rows_B[response])],
        response=tokenizer.decode(tokens),
        score=float(batch.scores_B[response]),
        tokens=[
            ReplayedToken(tokenizer.token_text(token), is_written, **dict(zip(columns, row, strict=True)))
            for token, is_written, row in zip(tokens, written, numbers, strict=True)
        ],
        sampled_by=samplers_of(rollout)[response],
        recorded_sampled_by=record.sampled_by[response],
        digest=response_digests(rollout)[response],
        recorded_digest=record.responses[response],
        recorded_score=nan if recorded_score is None else recorded_score,
        from_iteration=first + 1,
    )
