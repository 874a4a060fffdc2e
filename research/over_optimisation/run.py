"""Measures a run folder's policies against its own world: `python -m research.over_optimisation`."""

from collections.abc import Sequence
from pathlib import Path

from evaluation.compare.stage import STAGE as COMPARE
from files.records import read_record
from heed.jobs.job_file import load_job
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from lm.tokenizer import Messages
from ppo.loop import kept_policy
from ppo.report import PPOResults
from ppo.stage import STAGE as PPO
from research.over_optimisation.policies import Gold, OverOptimisation, Progress, Spec, gold_of_texts, over_optimisation
from reward.external import RewardFunction
from training.data import DataConfig, read_prompts

MIN_POLICIES = 3  # fewer determine no curve


def measure_run(
    folder: Path,
    *,
    prompts: str,
    gold: str,
    num_samples: int,
    pool_samples: int,
    seed: int,
    progress: Progress,
) -> OverOptimisation:
    """Measures the policies that `ppo.keep_policies_every` kept against PPO's first policy, by the run's reward model.

    `prompts` defaults to those that the job compares on; `gold` is `FILE.py:FUNCTION`, or "" for the gold scorer of the
    job's world. Raises: ValueError for a run without a PPO model, or without prompts or a gold scorer.
    """
    if not (folder / "job.toml").is_file():
        raise ValueError(f"{folder}: no job.toml; the folder of a run was expected")
    job = load_job(folder / "job.toml")
    config, compared = job.section(PPO), job.section(COMPARE)
    if config is None:
        raise ValueError(f"{folder / 'job.toml'}: the job has no [ppo]")
    if config.external_reward is not None:
        raise ValueError(f"{folder / 'job.toml'}: the reward is not a model; a reward model was expected as proxy")
    policies = kept_policies(folder / PPO.name)
    if len(policies) < MIN_POLICIES:
        raise ValueError(
            f"{folder}: {len(policies)} of PPO's policies are kept; at least {MIN_POLICIES} are needed for a fit: set"
            f" ppo.keep_policies_every (it is {config.keep_policies_every}) and run PPO again"
        )
    run = Run(job, folder, job.open_world(), Workers(job.world_sizes, folder, job.cluster)).of(PPO.name)
    if prompts:
        source = DataConfig(source=prompts)
    elif compared is not None:
        source = run.resolve(compared.prompts)
    else:
        raise ValueError(f"{folder / 'job.toml'}: the job has no [compare] to take prompts from; give --prompts")
    if not gold and run.opened_world is None:
        raise ValueError(f"{folder / 'job.toml'}: the job has no world with a gold scorer; give --gold")
    spec = Spec(
        num_samples=num_samples,
        pool_samples=pool_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=seed,
    )
    return over_optimisation(
        policies,
        run.start("sft"),
        run.start("reward"),
        gold_function(gold) if gold else gold_of_texts(run.world.gold_scores),
        read_prompts(source),
        spec,
        progress,
        config.reward.objective_weights,
    )


def kept_policies(stage: Path) -> dict[str, Path]:
    """Returns the policies that a PPO stage kept, by iteration, plus its last one if that was not kept.

    Raises: ValueError for an unfinished stage.
    """
    if not (stage / "results.json").is_file():
        raise ValueError(f"{stage}: no results.json; a finished PPO stage was expected")
    last = kept_policy(stage, read_record(stage / "results.json", PPOResults).num_iterations)
    kept = {f"iteration {int(path.name)}": path for path in sorted(last.parent.glob("[0-9]*"))}
    return kept if last.is_dir() else {**kept, "final": stage / "model"}


def gold_function(name: str) -> Gold:
    """Returns a gold scorer, given as `FILE.py:FUNCTION`. Raises: ValueError if there is no such function."""
    reward = RewardFunction(function=name)
    reward.load()

    def gold(conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
        return [scored.score for scored in reward.score(conversations, responses)]

    return gold
