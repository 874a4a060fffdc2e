"""The cluster bootstrap: how sure a mean is, when rows come in clusters (one prompt, many samples).

Resampling rows as if they were independent makes intervals far too narrow; here whole clusters are resampled.
Efron & Tibshirani 1993, ch. 13 (percentile interval); Davison & Hinkley 1997, 3.8 (clusters).
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_INDICES_PER_CHUNK = 1_000_000  # bounds the memory of a resampling at about 20 MB


def bootstrap_ratio(
    sums: Floats, counts: Floats, *, seed: int, num_resamples: int, level: float
) -> tuple[float, float, float]:
    """(mean, low, high) of all rows, resampling clusters: the mean is `sums.sum() / counts.sum()`.

    `sums[c]` is the total over cluster c's rows, `counts[c]` how many rows it has, above 0. `level` is the
    interval's nominal coverage. From a single cluster no interval can be had: low and high are NaN.
    Raises ValueError for no clusters, or a level outside 0 to 1.
    """
    assert sums.shape == counts.shape, f"{sums.shape} sums, {counts.shape} counts"
    assert bool((counts > 0).all()), "a cluster without rows"
    num_clusters = len(sums)
    if num_clusters == 0:
        raise ValueError("values is empty; an interval needs at least one prompt or task")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; a number between 0 and 1 was expected")
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; at least 1 was expected")
    mean = float(sums.sum() / counts.sum())
    if num_clusters == 1:
        return mean, float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    step = max(1, _INDICES_PER_CHUNK // num_clusters)
    for start in range(0, num_resamples, step):
        stop = min(start + step, num_resamples)
        drawn = generator.integers(0, num_clusters, size=(stop - start, num_clusters), dtype=np.int32)
        means[start:stop] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return mean, float(low), float(high)
