"""Win rates of a judge, corrected by people's verdicts on some of its prompts: prediction-powered inference.

Shape letters: P prompts of the judge, L those that people judged too, C clusters of prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy

from evaluation.statistics.results import Summary
from evaluation.statistics.significance import ALPHA
from evaluation.statistics.win_rates import prompt_means
from evaluation.verdicts import Clusters, Verdict, comparisons_of, places_of
from preferences.statistics.estimates import Floats, Interval, Ints

MIN_LABELLED = 10  # clusters of prompts that people judged too
UNSEEN = 2  # labelled clusters on which people contradict the judge, at least, for the variance


@dataclass(frozen=True)
class CorrectedWinRate:
    """How often people would prefer a to b on all prompts of a judge, with a 95% interval without Holm's correction.
    `weight` is the judge's: 1 for its verdicts as they are, 0 for people's alone.
    """

    judge: str
    people: str
    policy_a: str
    policy_b: str
    win_rate: Interval
    weight: float
    num_labelled: int
    num_prompts: int


def corrected_win_rates(
    summary: Summary, verdicts: Sequence[Verdict], people: Sequence[str], clusters: Clusters
) -> list[CorrectedWinRate]:
    """Returns the corrected win rate of each pair of each judge, for each of the judges that are `people`; none where
    people judged fewer than MIN_LABELLED clusters, or all of its prompts.
    """
    found = []
    judges = [(one.judge, pair) for one in summary.judges if one.judge not in people for pair in one.pairs]
    for (judge, pair), person in product(judges, people):
        policies = pair.policy_a, pair.policy_b
        f, y = (_preferences(verdicts, name, *policies) for name in (judge, person))
        cluster_P = places_of(list(f), clusters)
        y_P = np.array([y.get(prompt, math.nan) for prompt in f])
        num_labelled = int((~np.isnan(y_P)).sum())
        if num_labelled < len(f) and len(np.unique(cluster_P[~np.isnan(y_P)])) >= MIN_LABELLED:
            rate, weight = corrected(np.array(list(f.values())), y_P, cluster_P)
            found.append(CorrectedWinRate(judge, person, *policies, rate, weight, num_labelled, len(f)))
    return found


def corrected(f_P: Floats, y_P: Floats, cluster_P: Ints) -> tuple[Interval, float]:
    """Returns the mean of people's preferences over all prompts with its interval, and the judge's weight λ.

        θ = λ·mean_P(f) + mean_L(y - λ·f),   λ = cov_L(y, f) / var_P(f), from 0 to 1

    f is the judge's preference, y people's, NaN where they did not judge; L must be a random sample of P. λ = 1 is
    arXiv 2301.09633, other weights are PPI++'s (arXiv 2311.01453). The variance sums each cluster's part of the error,

        e_p = λ·(f_p - mean_P(f))/P + [p in L]·(y_p - λ·f_p - mean_L(y - λ·f))/L

    and is at least that of UNSEEN contradicted clusters of L. Student's quantile is for the clusters of L minus 2.
    """
    is_labelled_P = ~np.isnan(y_P)
    f_L, y_L = f_P[is_labelled_P], y_P[is_labelled_P]
    variance = float(f_P.var())
    covariance = float(((f_L - f_L.mean()) * y_L).mean())
    weight = min(1.0, max(0.0, covariance / variance)) if variance else 0.0
    rest_L = y_L - weight * f_L
    mean = weight * float(f_P.mean()) + float(rest_L.mean())
    e_P = weight * (f_P - f_P.mean()) / len(f_P)
    e_P[is_labelled_P] += (rest_L - rest_L.mean()) / len(rest_L)
    e_C = np.bincount(cluster_P, e_P)
    num_labelled = len(np.unique(cluster_P[is_labelled_P]))
    squares = max(float((e_C**2).sum()) * num_labelled / (num_labelled - 2), UNSEEN / num_labelled**2)
    half = float(scipy.special.stdtrit(num_labelled - 2, 1 - ALPHA / 2)) * math.sqrt(squares)
    return Interval(min(1.0, max(0.0, mean)), max(0.0, mean - half), min(1.0, mean + half)), weight


def _preferences(verdicts: Sequence[Verdict], judge: str, a: str, b: str) -> dict[str, float]:
    """Returns a judge's mean preference for a over b on each prompt."""
    own = comparisons_of([v for v in verdicts if v.judge == judge and {v.policy_a, v.policy_b} == {a, b}], (a, b))
    pair = own.between(0, 1)
    return dict(zip([own.prompts[place] for place in np.unique(pair.prompt_V)], prompt_means(pair), strict=True))
