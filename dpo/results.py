"""What DPO leaves in results.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from preferences.statistics.estimates import Interval, Share
from reward.results import LabelerResults
from training.data import Overlong, SourceRows


@dataclass(frozen=True)
class PairMeans:
    """Means over held-out pairs that are no ties, each weighing the same: of the better response and of the worse.

    Log-probabilities are sums over a response, nats, before training (the reference's) and after.
    """

    chosen_logprob_before: float
    chosen_logprob: float
    rejected_logprob_before: float
    rejected_logprob: float
    chosen_tokens: float
    rejected_tokens: float


@dataclass(frozen=True)
class DPOResults:
    """`heldout_accuracy` is that of implicit rewards; `margin` is their difference, the better response's less the
    worse's. `length_correlation` is that of implicit rewards with length within comparisons, None where lengths or
    rewards do not differ. `num_equal_pairs` of the `num_pairs` to learn from are of two equal responses, which no
    gradient can tell apart. `learned_nu` is there with ties = "davidson".
    """

    loss: str
    beta: float
    num_steps: int
    train_comparisons: int
    train_rankings: int
    heldout_comparisons: int
    heldout_accuracy: Share
    margin: Interval
    pairs: PairMeans | None
    length_correlation: float | None
    num_pairs: int
    num_equal_pairs: int
    learned_nu: float | None = None
    labelers: Mapping[str, LabelerResults] = field(default_factory=dict)
    overlong: Overlong | None = None  # of the comparisons
    sources: tuple[SourceRows, ...] = ()  # of the rankings, if rows are unusual
