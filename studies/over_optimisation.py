"""A run folder's policies against its own world: `heed measure over-optimisation`."""

from collections.abc import Sequence
from pathlib import Path

from compare.stage import STAGE as COMPARE
from evaluation.measures.checkpoints import Gold, OverOptimisation, Progress, Spec, gold_of_texts, over_optimisation
from jobs.job_file import load_job
from jobs.recovery import Workers
from jobs.run import Run
from lm.tokenizer import Messages
from ppo.stage import STAGE as PPO
from ppo.stage import kept_policy
from reward.elsewhere import FunctionReward
from stages.run import read_results
from training.data import DataConfig, read_prompts


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
    """Policies that `ppo.keep_policies_every` kept, against the policy that PPO began with, by the run's reward model.

    `prompts` "" are those that the job compares on; `gold` is `FILE.py:FUNCTION`, or "" for the scorer of the job's
    world. Errors: ValueError for a run without PPO's model, or without what was asked for.
    """
    if not (folder / "job.toml").is_file():
        raise ValueError(f"{folder}: no job.toml; the folder of a run was expected")
    job = load_job(folder / "job.toml")
    config, compared = job.section(PPO), job.section(COMPARE)
    if config is None:
        raise ValueError(f"{folder / 'job.toml'}: the job has no [ppo]")
    if config.elsewhere is not None:
        raise ValueError(f"{folder / 'job.toml'}: the reward comes from no model; a reward model was expected as proxy")
    run = Run(job, folder, job.open_world(), Workers(job.world_sizes, folder, job.cluster)).of(PPO.name)
    if prompts:
        source = DataConfig(source=prompts)
    elif compared is not None:
        source = run.resolve(compared.prompts)
    else:
        raise ValueError(f"{folder / 'job.toml'}: the job has no [compare] to take prompts from; give --prompts")
    if not gold and run.opened_world is None:
        raise ValueError(f"{folder / 'job.toml'}: the job has no world whose gold scorer could be asked; give --gold")
    spec = Spec(
        num_samples=num_samples,
        pool_samples=pool_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=seed,
    )
    return over_optimisation(
        kept_policies(run.folder),
        run.start("sft"),
        run.start("reward"),
        _function(gold) if gold else gold_of_texts(run.world.gold_scores),
        read_prompts(source),
        spec,
        progress,
        config.objective_weights,
    )


def kept_policies(stage: Path) -> dict[str, Path]:
    """The policies that a PPO stage kept, by iteration, and its last where that is not among them.

    Errors: ValueError for a stage that is not done.
    """
    if not (stage / "results.json").is_file():
        raise ValueError(f"{stage}: no results.json; a finished PPO stage was expected")
    last = kept_policy(stage, read_results(stage)["num_iterations"])
    kept = {f"iteration {int(path.name)}": path for path in sorted(last.parent.glob("[0-9]*"))}
    return kept if last.is_dir() else {**kept, "the last": stage / "model"}


def _function(name: str) -> Gold:
    reward = FunctionReward(name)
    _ = reward.function  # a name that is not there is an error before anything is sampled

    def gold(conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
        return [scored.score for scored in reward.score(conversations, responses)]

    return gold
