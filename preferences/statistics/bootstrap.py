"""The cluster bootstrap: how certain a mean is when rows come in clusters (one prompt, many samples).

Resampling rows as if they were independent makes intervals far too narrow, so whole clusters are resampled.
Efron & Tibshirani 1993, ch. 13 (percentile interval); Davison & Hinkley 1997, 3.8 (clusters).
"""

import numpy as np

from preferences.statistics.estimates import Floats

NUM_RESAMPLES = 2_000  # enough for two digits of an interval's ends
MAX_CLUSTERS = 2_000  # more clusters than these are grouped at random into blocks, and the blocks are resampled

_INDICES_PER_CHUNK = 1_000_000  # bounds the memory of resampling at about 20 MB


def bootstrap_ratio(
    sums: Floats, counts: Floats, *, seed: int, num_resamples: int, level: float
) -> tuple[float, float, float]:
    """Returns (mean, low, high) of all rows, resampling clusters. The mean is `sums.sum() / counts.sum()`.

    `sums[c]` is the total over cluster c's rows and `counts[c]` its number of rows, above 0. `level` is the interval's
    nominal coverage. With a single cluster low and high are NaN.

    Raises: ValueError if there are no clusters, or `level` is not between 0 and 1.
    """
    assert sums.shape == counts.shape, f"{sums.shape} sums, {counts.shape} counts"
    assert bool((counts > 0).all()), "a cluster without rows"
    num_clusters = len(sums)
    if num_clusters == 0:
        raise ValueError("values is empty; an interval needs at least one prompt or task")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; a number between 0 and 1 was expected")
    mean = float(sums.sum() / counts.sum())
    if num_clusters == 1:
        return mean, float("nan"), float("nan")
    resampled_RS = resampled_sums(np.stack([sums, counts], axis=1), seed=seed, num_resamples=num_resamples)
    low, high = percentiles(resampled_RS[:, 0] / resampled_RS[:, 1], level)
    return mean, low, high


def percentiles(values: Floats, level: float) -> tuple[float, float]:
    """Returns the percentile interval, which leaves out (1 - level)/2 of the resampled values on either side."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def resampled_sums(table_CS: Floats, *, seed: int, num_resamples: int) -> Floats:
    """Returns [R, S]: the column sums of a table with one row per cluster, for R resamples of C rows with replacement.

    Above MAX_CLUSTERS clusters it resamples random blocks of equal size (to within one). Sums over blocks of
    independent clusters are independent too, and have the same total variance.
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; at least 1 was expected")
    generator = np.random.default_rng(seed)
    table_BS = _blocks(table_CS, generator) if len(table_CS) > MAX_CLUSTERS else table_CS
    num_blocks = len(table_BS)
    sums_RS = np.empty((num_resamples, table_CS.shape[1]))
    step = max(1, _INDICES_PER_CHUNK // num_blocks)
    for start in range(0, num_resamples, step):
        stop = min(start + step, num_resamples)
        drawn_RB = generator.integers(0, num_blocks, size=(stop - start, num_blocks), dtype=np.int32)
        # Count how often each block was drawn, so that one matrix product gives all columns.
        index_RB = drawn_RB + num_blocks * np.arange(stop - start)[:, None]
        times_RB = np.bincount(index_RB.ravel(), minlength=(stop - start) * num_blocks)
        sums_RS[start:stop] = times_RB.reshape(-1, num_blocks).astype(np.float64) @ table_BS
    return sums_RS


def _blocks(table_CS: Floats, generator: np.random.Generator) -> Floats:
    block_C = generator.permutation(len(table_CS)) % MAX_CLUSTERS
    return np.stack([np.bincount(block_C, column, MAX_CLUSTERS) for column in table_CS.T], axis=1)
