"""`heed replay`: samples a response of a run's PPO stage again, and follows the chain from it back to the labels."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.connection import resolve_precision
from files.atomic import lock
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.models import hub_models
from heed.jobs.recovery import Workers
from heed.jobs.run import Run, inputs_of, what_changed
from lm.hub import model_directory
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.replay import Replayed, replay_iterations
from reward.config import RankingsConfig, RewardConfig
from reward.external import NoReward
from reward.prepared import read_rankings
from reward.stage import STAGE as REWARD
from stages.lineage import LINEAGE, path_hash, started_with
from stages.progress import print_notice
from training.notices import speaking_through


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
    if section.rankings is None or reward.rankings is None:
        assert reward.step_labels is not None, "a reward model learns from rankings or from step labels"
        return [*links, Link(reward.step_labels.source, "labels of steps", path_hash(reward.step_labels.source))]
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
