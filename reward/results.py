"""What training a reward model leaves in results.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from preferences.statistics.estimates import Share
from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class TieResults:
    """Davidson's ν, fitted to training pairs, and how likely it makes the held-out ones (nats per pair)."""

    kind: str
    nu: float
    heldout_log_likelihood: float
    low: float
    high: float
    heldout_tie_share: float
    learned_nu: float | None = None


@dataclass(frozen=True)
class LabelerResults:
    """How often a labeler is right as far as the others know (NaN where nobody does), and what its rankings weigh."""

    accuracy: float
    num_pairs: int
    weight: float


@dataclass(frozen=True)
class RatingResults:
    """`heldout_explained` is the share of the ratings' variance within judgments that the scores explain; 1 is best."""

    ratings_per_score: float
    heldout_explained: float | None
    heldout_judgments: int


@dataclass(frozen=True)
class ObjectiveResults:
    """Of one objective. The scores' mean and standard deviation are the units of PPO's rewards."""

    heldout_accuracy: float
    heldout_pairs: int
    heldout_comparisons: int
    train_comparisons: int
    train_rankings: int
    score_shift: float
    sample_score_mean: float
    sample_score_std: float
    ties: TieResults
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    ratings: RatingResults | None = None


@dataclass(frozen=True)
class RewardResults:
    """Of a reward model. One of several objectives has theirs in `objectives`, since their scores have no common units;
    one of a single objective has its numbers here. The last two are there where the world knows the truth.
    """

    heldout_accuracy: float
    heldout_pairs: int
    heldout_comparisons: int
    train_comparisons: int
    train_rankings: int
    score_shift: float | None = None
    sample_score_mean: float | None = None
    sample_score_std: float | None = None
    ties: TieResults | None = None
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    ratings: RatingResults | None = None
    objectives: Mapping[str, ObjectiveResults] = field(default_factory=dict)
    gold_accuracy: Share | None = None
    human_pairs_accuracy: Share | None = None
    overlong: Overlong | None = None  # of the comparisons
    sources: tuple[SourceRows, ...] = ()  # of the rankings, if rows are unusual
