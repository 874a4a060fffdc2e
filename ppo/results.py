"""What PPO leaves in results.json."""

from dataclasses import dataclass

from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class PPOResults:
    """`score_scale_*` are the mean and standard deviation that reward model scores are put into units of."""

    num_iterations: int
    final_kl_coef: float
    score_scale_mean: float
    score_scale_std: float
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
    generator: str = "heed"
