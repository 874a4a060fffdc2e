"""Bootstrap means for studies, resampling prompts. Comparisons use `preferences.statistics.intervals`."""

from collections.abc import Sequence

import numpy as np

from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import bootstrap_ratio

NUM_RESAMPLES = 10_000


def bootstrap_mean(
    values: Sequence[float] | Sequence[Floats] | Floats,
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """Returns the mean of all values with a percentile bootstrap interval over prompts.

    `values` holds one number per prompt, or one 1-D array per prompt (its samples; their number may vary). The mean
    is over all rows; whole prompts are resampled. Efron & Tibshirani 1993, ch. 13.

    Raises: ValueError for no prompts, a prompt without values, or a value that is not finite.
    """
    rows = [np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in values]
    for prompt, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0 or not np.isfinite(row).all():
            raise ValueError(f"values[{prompt}] is {row.tolist()}; one or more finite numbers were expected")
    sums = np.array([row.sum() for row in rows], dtype=np.float64)
    counts = np.array([row.size for row in rows], dtype=np.float64)
    return Interval(*bootstrap_ratio(sums, counts, seed=seed, num_resamples=num_resamples, level=level))
