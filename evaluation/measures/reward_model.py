"""Measures scores against labelers' judgments, in any preference format including RewardBench and LLMBar: how often a
judge is right, and whether a reward model's confidence matches its accuracy.

A pair is two responses, and a labeler prefers one of them. With score difference Δ, the model predicts that the
higher-scored response is preferred with probability σ(|Δ|), between ½ and 1: its confidence. It is right if the
higher-scored response was preferred; equal scores count as half right. Pairs that a labeler tied are left out.

Shape letters: N pairs, P prompts, B bins, S draws.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

from preferences.records import Task
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints, Share
from preferences.statistics.intervals import Tally, clustered_mean, clustered_shares

NUM_BINS = 10
NUM_DRAWS = 2_000
_DRAWS_AT_ONCE = 100
LARGEST_SCALE = 1e3


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs as columns [N]. `lead_N` is the score of the preferred response minus the score of the other.

    Rows that share a `prompt_N` are not independent. `responses_N` is the number of responses in the pair's ranking,
    `labelers_N` the number of labelers who ranked them; `category_N` indexes `categories`.
    """

    lead_N: Floats
    prompt_N: Ints
    task_N: Ints
    responses_N: Ints
    labelers_N: Ints
    category_N: Ints
    categories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lead_N)

    @property
    def right_N(self) -> Floats:
        return np.asarray((self.lead_N > 0) + 0.5 * (self.lead_N == 0), dtype=np.float64)

    @property
    def confidence_N(self) -> Floats:
        return np.asarray(scipy.special.expit(np.abs(self.lead_N)))


@dataclass(frozen=True)
class CalibrationError:
    """ECE = Σ over bins of (share of the pairs) |accuracy - confidence|, over bins with equal numbers of pairs.

    A calibrated model's ECE is above 0 too: `if_calibrated` is its mean for a calibrated model with these confidences,
    and `p_value` is how often such a model would reach at least `found`.
    """

    found: float
    if_calibrated: float
    p_value: float
    num_bins: int


@dataclass(frozen=True)
class Calibration:
    """`overconfidence` is mean confidence minus accuracy; `log_loss` is the mean of -log σ(Δ), nats per pair.

    `scale` is the factor on the scores with the highest likelihood: below 1 the model is overconfident. It is NaN if no
    finite scale is best, because every pair is right or every pair is wrong.
    """

    overconfidence: Interval
    log_loss: Interval
    scale: Interval
    error: CalibrationError


def calibration(pairs: ScoredPairs, *, seed: int, num_bins: int = NUM_BINS) -> Calibration:
    """Computes all fields, with 95% intervals over prompts. Raises: ValueError for no pairs, or a non-finite lead."""
    if len(pairs) == 0:
        raise ValueError("there are no pairs with a preferred response; at least one was expected")
    if not np.isfinite(pairs.lead_N).all():
        raise ValueError(f"lead_N[{int(np.argmin(np.isfinite(pairs.lead_N)))}] is not a finite number")
    bin_N = _bins(np.abs(pairs.lead_N), num_bins)
    return Calibration(
        overconfidence=clustered_mean(pairs.confidence_N - pairs.right_N, pairs.prompt_N),
        log_loss=clustered_mean(np.logaddexp(0.0, -pairs.lead_N), pairs.prompt_N),
        scale=best_scale(pairs),
        error=calibration_error(pairs, bin_N, seed=seed),
    )


def accuracy_of(pairs: ScoredPairs, chosen_N: npt.NDArray[np.bool_]) -> Share:
    """Returns the share of the chosen pairs that the model orders as the labeler does (`clustered_shares`)."""
    num_chosen = int(chosen_N.sum())
    tally = Tally(
        group_R=np.zeros(num_chosen, dtype=np.int64),
        task_R=pairs.task_N[chosen_N],
        prompt_R=pairs.prompt_N[chosen_N],
        right_R=pairs.right_N[chosen_N],
        compared_R=np.ones(num_chosen),
        pairs_R=1.0 / pairs.labelers_N[chosen_N],  # several labelers' judgments of one pair count as one pair
        responses_R=pairs.responses_N[chosen_N],
    )
    return clustered_shares(tally, 1)[0]


def by_category(pairs: ScoredPairs) -> dict[str, Share]:
    """Returns the accuracy per category that has pairs, sorted by name."""
    present = {name: place for place, name in enumerate(pairs.categories) if (pairs.category_N == place).any()}
    return {name: accuracy_of(pairs, pairs.category_N == present[name]) for name in sorted(present)}


def _bins(margin_N: Floats, num_bins: int) -> Ints:
    """Assigns bins of equally many pairs (±1) by rising margin, at most one per pair; equal margins share a bin."""
    order = np.argsort(margin_N, kind="stable")
    bin_N = np.empty(len(margin_N), dtype=np.int64)
    bin_N[order] = np.arange(len(margin_N)) * min(num_bins, len(margin_N)) // len(margin_N)
    _, value_N = np.unique(margin_N, return_inverse=True)
    first = np.full(int(value_N.max()) + 1, num_bins)
    np.minimum.at(first, value_N, bin_N)
    return np.asarray(np.unique(first[value_N], return_inverse=True)[1], dtype=np.int64)


def calibration_error(pairs: ScoredPairs, bin_N: Ints, *, seed: int) -> CalibrationError:
    """Computes the ECE and its distribution under calibration.

    For a calibrated model, right - confidence has mean 0 on every prompt, so flipping the signs of whole prompts at
    random gives data that are equally likely (a wild bootstrap; Cameron, Gelbach & Miller 2008). Bins of equal mass
    follow Nguyen & O'Connor 2015, arXiv 1508.05154.
    """
    _, place_N = np.unique(pairs.prompt_N, return_inverse=True)
    num_bins, num_prompts = int(bin_N.max()) + 1, int(place_N.max()) + 1
    off_PB = np.zeros((num_prompts, num_bins))
    np.add.at(off_PB, (place_N, bin_N), (pairs.right_N - pairs.confidence_N) / len(pairs))
    error = float(np.abs(off_PB.sum(axis=0)).sum())
    generator = np.random.default_rng(seed)
    errors_S = np.concatenate([_by_chance(off_PB, generator) for _ in range(NUM_DRAWS // _DRAWS_AT_ONCE)])
    by_chance = float(errors_S.mean())
    # The tolerance keeps rounding from deciding whether a draw reaches `error`.
    p_value = (1 + int((errors_S >= error - 1e-12).sum())) / (1 + len(errors_S))
    return CalibrationError(error, by_chance, p_value, num_bins)


def _by_chance(off_PB: Floats, generator: np.random.Generator) -> Floats:
    signs_SP = 2.0 * generator.integers(0, 2, size=(_DRAWS_AT_ONCE, len(off_PB)), dtype=np.int8) - 1
    return np.asarray(np.abs(signs_SP @ off_PB).sum(axis=1))


def best_scale(pairs: ScoredPairs) -> Interval:
    """Returns the s that maximises Σ log σ(s Δ), with a sandwich interval over prompts.

    Its derivative Σ Δ σ(-sΔ) falls with s; bisection finds the root.
    """
    lead_N = pairs.lead_N

    def slope(s: float) -> float:
        return float((lead_N * scipy.special.expit(-s * lead_N)).sum())

    low, high = -LARGEST_SCALE, LARGEST_SCALE
    if not slope(low) > 0 > slope(high):
        return UNKNOWN
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    s = (low + high) / 2
    _, place_N = np.unique(pairs.prompt_N, return_inverse=True)
    score_P = np.bincount(place_N, lead_N * scipy.special.expit(-s * lead_N))
    information = float((lead_N**2 * scipy.special.expit(s * lead_N) * scipy.special.expit(-s * lead_N)).sum())
    num_prompts = len(score_P)
    if num_prompts < 2:
        return Interval(s, float("nan"), float("nan"))
    error = float(np.sqrt(num_prompts / (num_prompts - 1) * (score_P**2).sum())) / information
    half = float(scipy.special.stdtrit(num_prompts - 1, (1 + LEVEL) / 2)) * error
    return Interval(s, s - half, s + half)


CATEGORY_FIELDS = ("subset", "category", "domain", "kind")  # of a task's details; the first present one counts


def highest_accuracy(agreement: float) -> float:
    """Returns the highest possible accuracy if two labelers agree with each other this often: (1 + √(2a - 1)) / 2.

    If a share p of labelers prefers one response of a pair, two of them agree with probability p² + (1 - p)², and
    someone who knows p predicts one with probability max(p, 1 - p). With q = |2p - 1| these are (1 + q²)/2 and
    (1 + q)/2, and by Jensen E q ≤ √(E q²). The result is at least the agreement itself.
    """
    return (1 + math.sqrt(max(0.0, 2 * agreement - 1))) / 2 if not math.isnan(agreement) else math.nan


def category_of_task(task: Task) -> str:
    """Returns the first of CATEGORY_FIELDS that the task's details have; its objective if they have none."""
    named = (task.details[field] for field in CATEGORY_FIELDS if isinstance(task.details.get(field), str))
    return next(named, task.objective)
