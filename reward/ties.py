"""How well scores predict wins, ties and losses: Davidson's model (1970) with ν fitted to given scores.

The measure does not depend on how training treated ties, so reward models trained either way can be compared.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from preferences.records import Ranking
from preferences.statistics.intervals import bootstrap_ratio

Floats = npt.NDArray[np.float64]
LEVEL, NUM_RESAMPLES = 0.95, 2_000


def fit_log_nu(differences_P: Floats, tied_P: npt.NDArray[np.bool_]) -> float:
    """The maximum-likelihood log ν of these pairs: the one at which the expected number of ties is the observed one.

    Half a tie and half an untied pair are added to the observations, so the value is finite.
    """
    num_pairs = len(differences_P)
    wanted = (tied_P.sum() + 0.5) * num_pairs / (num_pairs + 1)
    low, high = -40.0, 40.0
    while high - low > 1e-9:  # the expected number of ties rises with ν
        middle = (low + high) / 2
        low, high = (middle, high) if _tie_chances(differences_P, middle).sum() < wanted else (low, middle)
    return (low + high) / 2


def _tie_chances(differences_P: Floats, log_nu: float) -> Floats:
    half_P = differences_P / 2
    chances_P: Floats = np.exp(log_nu - _log_normaliser(half_P, log_nu))
    return chances_P


def _log_normaliser(half_P: Floats, log_nu: float) -> Floats:
    """log(e^(d/2) + ν + e^(-d/2))."""
    normaliser_P: Floats = np.logaddexp(np.logaddexp(half_P, -half_P), log_nu)
    return normaliser_P


def outcomes(rankings: Sequence[Ranking], scores: Mapping[str, Sequence[float]]) -> tuple[Floats, Floats, list[str]]:
    """For every pair of every ranking: score difference, lead of the first (1, 0 = a tie, -1), and task."""
    differences, ahead, tasks = [], [], []
    for ranking in rankings:
        of_task = scores[ranking.task_id]
        for i, j in combinations(range(len(ranking.ranks)), 2):
            differences.append(of_task[i] - of_task[j])
            ahead.append(float(np.sign(ranking.ranks[j] - ranking.ranks[i])))
            tasks.append(ranking.task_id)
    return np.array(differences), np.array(ahead), tasks


def tie_metrics(
    train: Sequence[Ranking], heldout: Sequence[Ranking], scores: Mapping[str, Sequence[float]], *, seed: int
) -> dict[str, float | None]:
    """ν fitted to the pairs of `train`, and the mean log-likelihood of the held-out pairs under it (nats per pair, with
    a 95% interval over tasks; higher is better). `scores` has the tasks of both.
    """
    differences, ahead, _ = outcomes(train, scores)
    log_nu = fit_log_nu(differences, ahead == 0)
    differences, ahead, tasks = outcomes(heldout, scores)
    half = differences / 2
    likelihood = np.where(ahead == 0, log_nu, half * ahead) - _log_normaliser(half, log_nu)
    names, place = np.unique(tasks, return_inverse=True)
    mean, low, high = bootstrap_ratio(
        np.bincount(place, likelihood, len(names)).astype(np.float64),
        np.bincount(place, minlength=len(names)).astype(np.float64),
        seed=seed,
        num_resamples=NUM_RESAMPLES,
        level=LEVEL,
    )
    return {
        "nu": float(np.exp(log_nu)),
        "heldout_log_likelihood": mean,
        # A single task gives no interval.
        "low": None if np.isnan(low) else low,
        "high": None if np.isnan(high) else high,
        "heldout_tie_share": float((ahead == 0).mean()),
    }
