"""`heed replay`: a response of a run's PPO stage once more, and the chain from it back to the labels."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cluster.precision import resolve_precision
from files.hashes import file_hash
from files.lock import lock
from jobs.hub_models import hub_models
from jobs.job import JobConfig
from jobs.job_file import load_job
from jobs.recovery import Workers
from jobs.run import Run
from lm.tokenizer import Messages
from ppo.config import PPOConfig
from ppo.replay import Replayed, replay
from reward.comparisons import RankingsConfig, read_rankings
from reward.config import RewardConfig
from reward.stage import STAGE as REWARD
from stages.lineage import LINEAGE
from stages.progress import print_notice
from stages.sampling import SAMPLES
from training.notices import speaking_through


@dataclass(frozen=True)
class Link:
    """One step of the chain: a stage or a file, what it is, and a hash of it ("" where it has none)."""

    name: str
    what: str
    sha256: str


def replay_response(
    folder: Path, stage: str, iteration: int, response: int, told: Callable[[int, int], None] = lambda *_: None
) -> tuple[Replayed, list[Link]]:
    """Sample a response of a run again. `iteration` counts from 1, `response` from 0, as rollouts.jsonl does.

    `told(done, total)` is called after each iteration that is computed.
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
        config = stage_run.resolve(job.section_of(job.stage(stage)))
        assert isinstance(config, PPOConfig)
        closing.callback(shutil.rmtree, stage_run.folder / SAMPLES, ignore_errors=True)  # of the scale of scores
        found = replay(stage_run, config, iteration, response, told)
        return found, chain_of(run, stage, found.prompt.messages)


def _job_of(folder: Path) -> JobConfig:
    if not (folder / "job.toml").is_file():
        raise ValueError(f"{folder}: the folder of a run, with its job.toml, was expected")
    return load_job(folder / "job.toml")


def chain_of(run: Run, stage: str, prompt: Messages) -> list[Link]:
    """What a PPO stage was made from, back to the judgments that taught its reward model."""
    job, stage_run = run.job, run.of(stage)
    links = [_link(stage_run.folder, "the policy after all iterations")]
    links.append(_link(stage_run.start("sft").parent, "the policy that PPO starts from"))
    ppo = job.section_of(job.stage(stage))
    if isinstance(ppo, PPOConfig) and ppo.external_reward is not None:
        return [*links, Link("reward", str(ppo.reward_function or ppo.reward_url), "")]
    judge = stage_run.start(REWARD.name)
    links.append(_link(judge.parent, "the reward model"))
    own = stage_run.own(REWARD.name)
    if own not in job.stage_names or stage_run.folder_of(REWARD.name) != judge.parent:
        return links  # a reward model from elsewhere has a chain of its own
    reward = stage_run.at(REWARD.name).resolve(job.section_of(job.stage(own)))
    assert isinstance(reward, RewardConfig)
    return [*links, _rankings_link(reward.rankings, prompt)]


def _rankings_link(source: RankingsConfig, prompt: Messages) -> Link:
    """The rankings, how many there are by whom, and how many judge responses to this very prompt."""
    rankings = read_rankings(source)
    by_labeler = Counter(ranking.labeler for ranking in rankings)
    asked = [(message["role"], message["content"]) for message in prompt]
    same = sum([(message.role, message.content) for message in ranking.prompt] == asked for ranking in rankings)
    people = ", ".join(f"{name} {number:,}" for name, number in sorted(by_labeler.items()))
    what = f"{len(rankings):,} judgments ({people}), {same} of this prompt"
    path = Path(source.source)
    return Link(source.source, what, file_hash(path) if path.is_file() else "")


def _link(folder: Path, what: str) -> Link:
    """A stage's folder, or a model from elsewhere."""
    try:
        lineage = json.loads((folder / LINEAGE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Link(str(folder), what, "")
    return Link(str(folder), f"{what}, by Heed {lineage['code_version']}", str(lineage["outputs"]))
