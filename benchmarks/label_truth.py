"""The true value of every label statistic for the labelers of `benchmarks.known_labelers`, in closed form.

Utilities are normal, and so are their differences between two responses of a task. An attentive labeler prefers the
response at position i to the one at position j with probability Φ(μ), where V is the variance of a utility:

    μ = position bias · (j - i)/(K - 1) / √(2V),   V = 1 + shared taste² + own taste² + noise²

Two of them order a pair alike with probability Φ₂(μ, μ'; ρ) + Φ₂(-μ, -μ'; ρ), the bivariate normal with the correlation
ρ of their utilities; without position bias that is ½ + arcsin(ρ)/π (Sheppard 1899). Display orders are independent
between labelers and between a task and its repeat, so the probability is averaged over both. Shares are over untied
pairs, so each labeler is weighted by how often they do not tie.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations

import numpy as np
from scipy import stats

from benchmarks.known_labelers import CUTS, NUM_RESPONSES, NUM_WORDS, PACE_SPREAD, SHARED_TASTE, TRAITS, Traits
from preferences.statistics.agreement import Alpha
from preferences.statistics.estimates import Floats, Interval, Share
from preferences.statistics.quality import TOO_FAST_WORDS_PER_MINUTE
from preferences.statistics.summary import LabelReport

LIKED_BY_ALL = 1 + SHARED_TASTE**2  # variance of quality and shared taste


def held_against_truth(report: LabelReport) -> Iterator[tuple[str, str, Interval | Share | Alpha, float]]:
    """Yields (what, labeler or "", estimate, truth) for every interval in the report of a world with `TRAITS`."""
    yield "agreement, over all", "", report.agreement, overall_agreement()
    yield "alpha of rankings", "", report.alpha, alpha()
    yield "alpha of ratings", "", report.rating_alpha, rating_alpha()
    yield "shown first, over all", "", report.shown_first, overall_shown_first()
    by_name = {labeler.labeler: labeler for labeler in report.labelers}
    for traits in TRAITS:
        found = by_name[traits.name]
        yield "agreement with others", traits.name, found.agreement, agreement_with_others(traits)
        yield "self-agreement", traits.name, found.self_agreement, self_agreement(traits)
        yield "accuracy on gold", traits.name, found.gold_accuracy, gold_accuracy(traits)
        yield "shown first, by labeler", traits.name, found.shown_first, shown_first(traits)
        yield "too fast", traits.name, found.pace.too_fast, too_fast(traits)
        yield "mean rating", traits.name, found.ratings.mean, mean_rating(traits)


def is_covered(estimate: Interval | Share | Alpha, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


# ---- how often a labeler gives which answer ----


def untied(traits: Traits) -> float:
    """Returns the share of answers that are not ties."""
    return 1 - (1 - traits.lazy) * traits.tie


def attentive_if_untied(traits: Traits) -> float:
    return (1 - traits.lazy) * (1 - traits.tie) / untied(traits)


def variance(traits: Traits) -> float:
    """The variance of an attentive labeler's utilities, without position bias."""
    return LIKED_BY_ALL + traits.own_taste**2 + traits.noise**2


def first_preferred(traits: Traits, places_apart: int) -> float:
    """P(attentive prefers the response shown `places_apart` earlier)."""
    return float(stats.norm.cdf(_shift(traits, places_apart)))


def _shift(traits: Traits, places_apart: int) -> float:
    return traits.position_bias * places_apart / (NUM_RESPONSES - 1) / math.sqrt(2 * variance(traits))


def _places_apart() -> list[int]:
    """The signed distances between a pair's positions, over all display orders."""
    return [j - i for i in range(NUM_RESPONSES) for j in range(NUM_RESPONSES) if i != j]


# ---- two labelers who order a pair ----


def ordered_alike(correlation: float, one: Traits, other: Traits) -> float:
    """P(two attentive answers order a pair alike); the pair's positions are independent in both."""
    both = stats.multivariate_normal([0.0, 0.0], [[1.0, correlation], [correlation, 1.0]])
    shifts, other_shifts = ({_shift(traits, apart) for apart in _places_apart()} for traits in (one, other))
    weights, other_weights = (
        {shift: np.mean([_shift(traits, apart) == shift for apart in _places_apart()]) for shift in of}
        for traits, of in ((one, shifts), (other, other_shifts))
    )
    return float(
        sum(
            weight * other_weight * (both.cdf([shift, other_shift]) + both.cdf([-shift, -other_shift]))
            for shift, weight in weights.items()
            for other_shift, other_weight in other_weights.items()
        )
    )


@cache
def agreement(one: Traits, other: Traits) -> float:
    """P(two labelers order a pair alike | neither ties it); ½ if one of them does not read."""
    both = attentive_if_untied(one) * attentive_if_untied(other)
    correlation = LIKED_BY_ALL / math.sqrt(variance(one) * variance(other))
    return 0.5 + both * (ordered_alike(correlation, one, other) - 0.5)


def agreement_with_others(traits: Traits) -> float:
    others = [other for other in TRAITS if other is not traits]
    return float(np.average([agreement(traits, o) for o in others], weights=[_comparable(o) for o in others]))


def overall_agreement() -> float:
    pairs = list(combinations(TRAITS, 2))
    weights = [_comparable(one) * _comparable(other) for one, other in pairs]
    return float(np.average([agreement(*pair) for pair in pairs], weights=weights))


def _comparable(traits: Traits) -> float:
    """The share of a labeler's tasks that are judged without a tie."""
    return (1 - traits.skip) * untied(traits)


@cache
def self_agreement(traits: Traits) -> float:
    correlation = (LIKED_BY_ALL + traits.own_taste**2) / variance(traits)
    return 0.5 + attentive_if_untied(traits) ** 2 * (ordered_alike(correlation, traits, traits) - 0.5)


@cache
def gold_accuracy(traits: Traits) -> float:
    """Returns the expected accuracy on gold tasks. Gold follows quality only, not position; a tie is half right."""
    gold = Traits("gold", 0, 0, 0, 0, 0, 0, 0, 0, 1)
    alike = ordered_alike(1 / math.sqrt(variance(traits)), traits, gold)
    return 0.5 + (1 - traits.lazy) * (1 - traits.tie) * (alike - 0.5)


# ---- Krippendorff's alpha ----


def alpha() -> float:
    """1 - D_o/D_e for a task with n answers; D_o weights its pairs of labelers by 1/(n - 1).

    Opposite preferences disagree by 1, a tie and a preference by ¼; by chance, ½ and ¼.
    """
    observed, weights = [], []
    for one, other in combinations(TRAITS, 2):
        both, tied = untied(one) * untied(other), untied(one) + untied(other) - 2 * untied(one) * untied(other)
        observed.append(both * (1 - agreement(one, other)) + tied / 4)
        weights.append((1 - one.skip) * (1 - other.skip))
    answers = [1 - traits.skip for traits in TRAITS]
    share_untied = float(np.average([untied(traits) for traits in TRAITS], weights=answers))
    return 1 - float(np.average(observed, weights=weights)) / (share_untied / 2)


@cache
def rating_alpha() -> float:
    """Computed from the joint distribution of two labelers' ratings of one response."""
    pairs = list(combinations(TRAITS, 2))
    weights = [(1 - one.skip) * (1 - other.skip) for one, other in pairs]
    joint = np.average([_joint_ratings(*pair) for pair in pairs], axis=0, weights=weights)
    joint = (joint + joint.T) / 2
    margin = joint.sum(axis=0)
    middle = np.cumsum(margin) - margin / 2
    squares = (middle[:, None] - middle[None, :]) ** 2
    return 1 - float((joint * squares).sum() / (np.outer(margin, margin) * squares).sum())


def _joint_ratings(one: Traits, other: Traits) -> Floats:
    covariance = [[1 + one.noise**2, 1.0], [1.0, 1 + other.noise**2]]
    ends = np.array([-20.0, *CUTS, 20.0])
    grid = np.stack(np.meshgrid(ends, ends, indexing="ij"), axis=-1)
    below = stats.multivariate_normal([0.0, 0.0], covariance).cdf(grid)
    return np.asarray(np.diff(np.diff(below, axis=0), axis=1))


# ---- positions, time, ratings ----


def shown_first(traits: Traits) -> float:
    """The share of untied pairs whose earlier response is preferred."""
    attentive = float(np.mean([first_preferred(traits, apart) for apart in _places_apart() if apart > 0]))
    attentive_share = (1 - traits.lazy) * (1 - traits.tie)
    return (traits.lazy_first + traits.lazy_random / 2 + attentive_share * attentive) / untied(traits)


def overall_shown_first() -> float:
    weights = [_comparable(traits) for traits in TRAITS]
    return float(np.average([shown_first(traits) for traits in TRAITS], weights=weights))


def too_fast(traits: Traits) -> float:
    cutoff = NUM_WORDS * 60_000 / TOO_FAST_WORDS_PER_MINUTE
    fast = stats.norm.cdf(math.log(cutoff / traits.median_milliseconds) / PACE_SPREAD)
    return traits.lazy + (1 - traits.lazy) * float(fast)


def mean_rating(traits: Traits) -> float:
    spread = math.sqrt(1 + traits.noise**2)
    return 1 + float(sum(stats.norm.sf(cut / spread) for cut in CUTS))
