"""Best-of-n: drawing n responses and keeping the one that a proxy scores highest, the baseline that RL has to beat.

One pool of N samples per prompt gives an estimate for every n up to N, without drawing again.

Shape letters: P prompts, N samples of a pool.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

from preferences.statistics.estimates import Floats, Interval, Ints
from preferences.statistics.intervals import clustered_mean


@dataclass(frozen=True)
class BestOfN:
    """Mean scores of best-of-n by the proxy, with 95% intervals over prompts; its KL is at most `kl_bound_nats`."""

    n: int
    kl_bound_nats: float
    gold_score: Interval
    proxy_score: Interval


def best_of_n_scores(gold_PN: Floats, proxy_PN: Floats, cluster_P: Ints | None = None) -> tuple[BestOfN, ...]:
    """Returns the scores of best-of-n for n = 1, 2, 4, ... up to N, with intervals over the prompts' clusters.

    Raises: as `best_of_n_expected` does.
    """
    cluster_P = np.arange(len(gold_PN)) if cluster_P is None else cluster_P
    of_gold_PN, of_proxy_PN = best_of_n_expected(gold_PN, proxy_PN), best_of_n_expected(proxy_PN, proxy_PN)
    rows = [(1, gold_PN.mean(axis=1), proxy_PN.mean(axis=1))]
    for power in range(1, gold_PN.shape[1].bit_length()):
        n = 2**power
        rows.append((n, of_gold_PN[:, n - 1], of_proxy_PN[:, n - 1]))
    return tuple(
        BestOfN(n, best_of_n_kl(n), clustered_mean(gold_P, cluster_P), clustered_mean(proxy_P, cluster_P))
        for n, gold_P, proxy_P in rows
    )


def best_of_n_kl(n: int) -> float:
    """Returns an upper bound on KL(best-of-n || base policy), in nats: log n - (n - 1) / n.

    It is nearly exact while n is small compared with the number of likely responses, and far too high for larger n
    (arXiv 2401.01879). Raises: ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 was expected")
    return math.log(n) - (n - 1) / n


def best_of_n_expected(gold: npt.ArrayLike, proxy: npt.ArrayLike) -> Floats:
    """Returns the expected gold score of the sample that the proxy ranks best among n, for every n up to N.

    `gold` and `proxy` are [prompts, N]; higher is better. Column n - 1 of the result [prompts, N] is the mean over all
    subsets of n of a prompt's N samples, an unbiased estimate for n fresh draws; the mean over rows is the estimate
    over prompts. Samples that tie for best by the proxy are chosen equally often.

    With i counting from 1 (worst by the proxy) to N, sample i is the best of C(i-1, n-1) of the C(N, n) subsets:
    expected_n = sum over i of C(i-1, n-1) / C(N, n) * gold_i (the estimator of pass@k and of arXiv 2112.09332, app. I).
    Raises: ValueError naming the field for other shapes and for numbers that are not finite.
    """
    gold_PN, proxy_PN = np.asarray(gold, dtype=np.float64), np.asarray(proxy, dtype=np.float64)
    if gold_PN.ndim != 2 or gold_PN.size == 0 or gold_PN.shape != proxy_PN.shape:
        raise ValueError(f"gold has shape {gold_PN.shape}, proxy {proxy_PN.shape}; both [prompts, N] were expected")
    for name, scores_PN in (("gold", gold_PN), ("proxy", proxy_PN)):
        if not np.isfinite(scores_PN).all():
            prompt = int(np.argmin(np.isfinite(scores_PN).all(axis=1)))
            raise ValueError(f"{name}[{prompt}] is {scores_PN[prompt].tolist()}; finite numbers were expected")
    order_PN = np.argsort(proxy_PN, axis=1, kind="stable")
    gold_PN = np.take_along_axis(gold_PN, order_PN, axis=1)
    proxy_PN = np.take_along_axis(proxy_PN, order_PN, axis=1)
    return _average_ties(gold_PN, proxy_PN) @ _chance_of_best(gold_PN.shape[1]).T


def _average_ties(gold_PN: Floats, sorted_proxy_PN: Floats) -> Floats:
    """Replaces each gold score by the mean over the samples with the same proxy score.

    This is exact: the probability that a tied group contains the best is the sum of its members' probabilities in any
    order, and by symmetry each member is then chosen equally often.
    """
    starts_PN = np.ones(gold_PN.shape, dtype=bool)  # True = first of its group; a row always starts one
    starts_PN[:, 1:] = sorted_proxy_PN[:, 1:] != sorted_proxy_PN[:, :-1]
    group = np.cumsum(starts_PN.ravel()) - 1
    means = np.bincount(group, weights=gold_PN.ravel()) / np.bincount(group)
    return np.asarray(means[group].reshape(gold_PN.shape), dtype=np.float64)


def _chance_of_best(num_samples: int) -> Floats:
    """Returns in entry [n - 1, i - 1] the probability C(i-1, n-1) / C(N, n) that sample i of N is the best of n."""
    n = np.arange(1, num_samples + 1)[:, None]
    i = np.arange(1, num_samples + 1)[None, :]
    rest = np.maximum(i - n, 0)
    # In logarithms: C(1000, 500) does not fit a float. (i-1)! / (i-n)! * n! (N-n)! / ((n-1)! N!), n!/(n-1)! = n.
    log_gamma = scipy.special.gammaln
    log_chance = log_gamma(i) - log_gamma(rest + 1) + np.log(n)
    log_chance += log_gamma(num_samples - n + 1) - log_gamma(num_samples + 1)
    return np.asarray(np.where(i >= n, np.exp(log_chance), 0.0), dtype=np.float64)
