"""The unit of PPO's scores: how the initial policy's own samples score."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from shutil import rmtree
from statistics import mean, stdev

from files.records import read_record
from ppo.config import PPOConfig
from ppo.initial_models import ScoreScale
from reward.external import ExternalReward
from reward.results import RewardResults
from reward.sampling import SamplingSpec
from reward.sampling_everywhere import sample_everywhere
from stages.data import SAMPLES
from stages.run import StageRun
from training.data import Prompt
from training.seeds import derive_seed

SCALE_PROMPTS = 512  # on which the spread of an unknown reward model's scores is measured


def was_measured(run: StageRun) -> bool:
    """Whether the rankings that the reward stage scores are samples of the policy that PPO starts from."""
    return {"sft", "reward"} <= set(run.parents) and "collect" in run.at("reward").parents


def score_scale(
    run: StageRun, policy: Path, judge: Path | ExternalReward, prompts: Sequence[Prompt], config: PPOConfig
) -> ScoreScale:
    """Mean and standard deviation of the scores of the initial policy's own samples: the unit of PPO's scores.

    Where [collect] sampled that policy, the reward stage has measured them. Otherwise they are measured here, on one
    sample per prompt: published rankings hold responses of other policies, whose scores may differ. The samples
    are kept until the stage is done, so a run that resumes has the same scale.

    Raises:
        ValueError: the reward gives every sample the same score, or too many fail.
    """
    if was_measured(run) and not config.objective_weights:
        path = run.folder_of("reward") / "results.json"
        where, scores = str(path), read_record(path, RewardResults)
        assert scores.sample_score_mean is not None, "a reward model of a single objective has a mean score"
        assert scores.sample_score_std is not None, "a reward model of a single objective has a spread of scores"
        scale = ScoreScale(scores.sample_score_mean, scores.sample_score_std)
    else:
        where = run.job.substitute(run.name, run.own("reward")) or str(judge)
        spec = SamplingSpec(
            policy=policy,
            num_samples=1,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive_seed(run.seed, "ppo", "scale"),
            precision=run.engine.resolved_precision(),
            reward=str(judge) if isinstance(judge, Path) else "",
            objective_weights=config.objective_weights,
            external_reward=None if isinstance(judge, Path) else judge,
        )
        samples = sample_everywhere(run, "scale", spec, prompts[:SCALE_PROMPTS])
        found = [sample.score for sample in samples if isfinite(sample.score)]
        num_failed = len(samples) - len(found)
        if len(found) < 2 or num_failed > config.max_failed_share * len(samples):
            rmtree(run.folder / SAMPLES / "scale")  # so that the next try asks again
            raise ValueError(
                f"{num_failed} of {len(samples)} samples of the SFT policy have no finite score; ppo.max_failed_share"
                f" allows {config.max_failed_share:.0%}, and at least two scores are needed."
                f" The first: {next(sample.failure for sample in samples if not isfinite(sample.score))}"
            )
        scale = ScoreScale(mean(found), stdev(found))
    if not scale.std > 0:
        raise ValueError(
            f"{where}: the scores of the SFT policy's samples have a spread of {scale.std}; a reward that tells them"
            " apart was expected"
        )
    return scale
