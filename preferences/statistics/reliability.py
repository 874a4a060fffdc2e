"""How often each labeler is right, estimated from the labels alone.

The one-coin model of Dawid & Skene (1979): every pair of responses has an unknown true order, and labeler l reports it
with probability a_l, independently of the others. It is fitted by EM, in which every step raises the likelihood:

    E: P(first is better) = σ(Σ_l ± log(a_l / (1 - a_l))), + for those who put it first, - for the others
    M: a_l = (2 + expected number of pairs of l that are right) / (3 + number of pairs of l)

A pair counts if at least two labelers order it; ties carry no information about who is right. The 2 and the 3 come from
a Beta(3, 2) prior, worth a pair or two, which keeps a_l below 1. Pairs of one ranking are correlated, so an estimate is
less certain than its number of pairs suggests. Pairs that are easy for everybody make labelers look alike, so if pairs
differ much in difficulty, the accuracies come out closer together than they are, in the right order. With only two
labelers, only the product of their accuracies above chance can be known, and both get the same accuracy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from preferences.records import Ranking

START = 0.7  # any start above ½ converges to the solution in which labelers are more often right than wrong
TOLERANCE, MAX_ROUNDS = 1e-6, 500


@dataclass(frozen=True)
class Reliability:
    """A labeler's probability of ordering a pair correctly, estimated from `num_pairs` pairs that others judged too."""

    accuracy: float
    num_pairs: int

    @property
    def weight(self) -> float:
        """log(a / (1 - a)), at least 0: an answer's weight in the most likely joint verdict (Nitzan & Paroush 1982).

        A labeler at chance has weight 0.
        """
        return max(0.0, math.log(self.accuracy / (1 - self.accuracy)))


def labeler_reliability(rankings: Sequence[Ranking]) -> dict[str, Reliability]:
    """Returns each labeler's reliability, by name: the mean over all votes if nobody else judged their pairs."""
    labelers = sorted({ranking.labeler for ranking in rankings})
    number = {name: index for index, name in enumerate(labelers)}
    votes = list(_votes(rankings))
    pair_V = np.array([pair for pair, _, _ in votes], dtype=np.int64)
    labeler_V = np.array([number[name] for _, name, _ in votes], dtype=np.int64)
    sign_V = np.array([sign for _, _, sign in votes], dtype=np.float64)  # 1 = the first is better, -1 = the second
    num_pairs_L = np.bincount(labeler_V, minlength=len(labelers))
    accuracy_L = np.full(len(labelers), START)
    for _ in range(MAX_ROUNDS):
        log_odds_L = np.log(accuracy_L / (1 - accuracy_L))
        evidence_P = np.bincount(pair_V, weights=sign_V * log_odds_L[labeler_V])
        right_V = 1 / (1 + np.exp(-sign_V * evidence_P[pair_V]))
        before, right_L = accuracy_L, np.bincount(labeler_V, weights=right_V, minlength=len(labelers))
        accuracy_L = (2 + right_L) / (3 + num_pairs_L)
        if np.abs(accuracy_L - before).max() < TOLERANCE:
            break
    total = num_pairs_L.sum()
    mean = float((accuracy_L * num_pairs_L).sum() / total) if total else START
    known = zip(labelers, accuracy_L.tolist(), num_pairs_L.tolist(), strict=True)
    return {name: Reliability(found if count else mean, count) for name, found, count in known}


def labeler_weights(rankings: Sequence[Ranking], reliability: Mapping[str, Reliability]) -> dict[str, float]:
    """Returns each labeler's weight, proportional to `Reliability.weight`, with mean 1 over the rankings.

    Raises: ValueError if no labeler is better than chance.
    """
    total = sum(reliability[ranking.labeler].weight for ranking in rankings)
    if not total:
        raise ValueError("no labeler agrees with the others more than chance would; there is nothing to weigh them by")
    return {name: found.weight * len(rankings) / total for name, found in reliability.items()}


def _votes(rankings: Sequence[Ranking]) -> Iterable[tuple[int, str, int]]:
    """Yields (pair, labeler, 1 or -1) for every pair that at least two labelers ordered. Pairs are numbered from 0."""
    by_task: dict[str, list[Ranking]] = {}
    for ranking in rankings:
        by_task.setdefault(ranking.task_id, []).append(ranking)
    pair = 0
    for judged in by_task.values():
        for i, j in combinations(range(len(judged[0].ranks)), 2):
            ordered = [(r.labeler, 1 if r.ranks[i] < r.ranks[j] else -1) for r in judged if r.ranks[i] != r.ranks[j]]
            if len({name for name, _ in ordered}) > 1:
                yield from ((pair, name, sign) for name, sign in ordered)
                pair += 1
