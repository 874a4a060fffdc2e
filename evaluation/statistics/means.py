"""Means and win rates with honest intervals: over prompts, not rows, and comparisons stay paired."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from intervals.bootstrap import bootstrap_ratio
from intervals.estimates import LEVEL, Floats, Interval, without_nan
from intervals.score import score_interval

NUM_RESAMPLES = 10_000

_PAIRS_PER_CHUNK = 1_000_000  # bounds the memory of comparing all sample pairs


@dataclass(frozen=True)
class WinRate:
    """How often A beats B, from 0 to 1, ties counting half; above 0.5 A is better.

    `num_prompts` prompts were counted. `num_masked` scores were NaN and left out; `num_prompts_lost` prompts had no
    pair of scores left. Without prompts the three rates are NaN.
    """

    mean: float
    low: float
    high: float
    num_prompts: int
    num_masked: int
    num_prompts_lost: int

    def as_dict(self) -> dict[str, float | int | None]:
        """For JSON: what is NaN (unknown) becomes None."""
        return without_nan(asdict(self))


def bootstrap_mean(
    values: Sequence[float] | Sequence[Floats] | Floats,
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """The mean of all values with a percentile bootstrap interval over prompts.

    `values` holds one number per prompt, or one 1-D array per prompt (its samples; their number may vary). The mean
    is over all rows; whole prompts are resampled. Efron & Tibshirani 1993, ch. 13.

    Raises ValueError for no prompts, a prompt without values, or a value that is not finite.
    """
    rows = [np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values]
    for prompt, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0 or not np.isfinite(row).all():
            raise ValueError(f"values[{prompt}] is {row.tolist()}; one or more finite numbers were expected")
    sums = np.array([row.sum() for row in rows], dtype=np.float64)
    counts = np.array([row.size for row in rows], dtype=np.float64)
    return Interval(*bootstrap_ratio(sums, counts, seed=seed, num_resamples=num_resamples, level=level))


def win_rate(scores_a: npt.ArrayLike, scores_b: npt.ArrayLike) -> WinRate:
    """How often a sample of A outscores a sample of B on the same prompt, with the 95% score interval over prompts.

    `scores_a` is [prompts, samples] or [prompts], `scores_b` too, with the same prompts in the same order and any
    number of samples; higher is better. Win 1, tie 0.5, loss 0; all sample pairs of a prompt are averaged, then
    prompts are averaged. A NaN score (a scorer that failed) is masked and counted, never a loss.

    Swapping A and B gives one minus the rate and the mirrored interval.
    Raises ValueError for other shapes or no prompts.
    """
    a_PA, b_PB = _by_prompt(scores_a, "scores_a"), _by_prompt(scores_b, "scores_b")
    if len(a_PA) != len(b_PB):
        raise ValueError(f"scores_a has {len(a_PA)} prompts and scores_b {len(b_PB)}; the same prompts were expected")
    rates_P = _win_rates(a_PA, b_PB)
    used_P = rates_P[~np.isnan(rates_P)]
    mean = low = high = math.nan
    if len(used_P) > 0:
        mean, (low, high) = float(used_P.mean()), score_interval(used_P)
    return WinRate(
        mean,
        low,
        high,
        num_prompts=len(used_P),
        num_masked=int(np.isnan(a_PA).sum() + np.isnan(b_PB).sum()),
        num_prompts_lost=len(rates_P) - len(used_P),
    )


def _by_prompt(scores: npt.ArrayLike, name: str) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; [prompts, samples] or [prompts], not empty, was expected")
    return array


def _win_rates(a_PA: Floats, b_PB: Floats) -> Floats:
    """Per prompt, the mean over its sample pairs of win 1, tie 0.5, loss 0; NaN where no pair is left. [prompts]"""
    rates = np.full(len(a_PA), np.nan)
    step = max(1, _PAIRS_PER_CHUNK // (a_PA.shape[1] * b_PB.shape[1]))
    for start in range(0, len(a_PA), step):
        a = a_PA[start : start + step, :, None]
        b = b_PB[start : start + step, None, :]
        # NaN compares false both ways, so a masked pair adds to neither side.
        wins = (a > b).sum(axis=(1, 2)) + 0.5 * (a == b).sum(axis=(1, 2))
        num_pairs = (~np.isnan(a)).sum(axis=(1, 2)) * (~np.isnan(b)).sum(axis=(1, 2))
        some = num_pairs > 0
        rates[start : start + step][some] = wins[some] / num_pairs[some]
    return rates
