"""Compares two algorithms of which several training runs (seeds) each were measured on the same prompts.

A comparison of two policies says which of two sets of weights is better. A sentence on the algorithms that made them
has to hold for other seeds, too. So the intervals and tests here are over the seeds of either algorithm and over
prompts, which are crossed: all runs answer the same prompts.

    x_ijp  what is compared, of A's run i and B's run j on prompt p: a preference for A, or a difference of two values
    θ      its mean, and its variance V = V_P + max(0, V_A - V_AP) + max(0, V_B - V_BP)

V_P is the variance over clusters of prompts of the mean over all runs. V_A is the variance of the means of A's runs,
divided by their number; V_AP, the part of it that stems from having finitely many prompts, is contained in V_P already
(analysis of variance of two crossed random factors; Searle, Casella & McCulloch 1992, Variance Components, ch. 4).

Few runs leave their variance poorly known, so their part of the interval has Student's quantile with ν degrees of
freedom: one less than the runs of the algorithm that has fewer (Hsu 1938). Welch's (1947), up to the number of runs
minus two, are too many if the runs of one algorithm are alike by chance, and those for V as a whole (Satterthwaite
1946) far too many. The squared half widths of the two parts add (Zou & Donner 2008, Statistics in Medicine 27):

    h² = h_P² + t_ν²·(V_A + V_B) - min(t_ν, t_P)²·(V_AP + V_BP),   V_A at least V_AP, V_B at least V_BP

h_P is the distance from θ to the end of the interval over prompts alone (`significance.EqualityTest`, `GainTest`), and
t_P Student's quantile over clusters. So the interval contains the one over prompts alone.

Shape letters: A, B runs of the two algorithms, P prompts, C clusters.
"""

import math
from functools import cached_property

import numpy as np
import scipy

from evaluation.statistics.significance import ALPHA, POWER, EqualityTest, GainTest
from preferences.statistics.estimates import Floats, Interval, Ints

_SMALLEST_P, _LARGEST_P = 1e-9, 1 - 1e-6  # p beyond these is given as 1e-9 and 1
_P_PRECISION = 1e-4


class AlgorithmTest:
    """The one test of "A and B are equal", over seeds and prompts, and the effect's interval at any level.

    At every α the interval excludes equality exactly if p < α: p is the smallest level at which it does. Make it with
    `of_preferences` or `of_values`; `mean` is θ.
    """

    def __init__(self, x_ABP: Floats, cluster_P: Ints, over_prompts: EqualityTest | GainTest, equal: float) -> None:
        if min(x_ABP.shape[:2]) < 2:
            raise ValueError(f"{x_ABP.shape[0]} and {x_ABP.shape[1]} runs; at least two of each were expected")
        self.mean, self._over_prompts, self._equal = float(x_ABP.mean()), over_prompts, equal
        self._v_A, self._v_AP = _variances(x_ABP.mean(axis=1), cluster_P)
        self._v_B, self._v_BP = _variances(x_ABP.mean(axis=0), cluster_P)
        self._freedom = min(x_ABP.shape[:2]) - 1
        self._num_clusters = len(np.unique(cluster_P))

    @classmethod
    def of_preferences(cls, x_ABP: Floats, cluster_P: Ints, *, seed: int) -> "AlgorithmTest":
        """Test that A and B are preferred equally often, by the mean preference for A, from 0 to 1, in each pair of
        runs on each prompt. `cluster_P` numbers the prompts' clusters.

        Raises: ValueError for fewer than two runs of an algorithm, and for no prompts.
        """
        test = EqualityTest(x_ABP.mean(axis=(0, 1)), cluster_P, seed=seed)
        return cls(x_ABP, cluster_P, test, equal=0.5)

    @classmethod
    def of_values(cls, value_AP: Floats, value_BP: Floats, cluster_P: Ints, *, seed: int) -> "AlgorithmTest":
        """Test that the mean of A's values equals that of B's; the effect is A's minus B's, in the values' unit.

        Raises: ValueError for fewer than two runs of an algorithm, and for no prompts.
        """
        x_ABP = value_AP[:, None] - value_BP[None]
        return cls(x_ABP, cluster_P, GainTest(x_ABP.mean(axis=(0, 1)), cluster_P, seed=seed), equal=0.0)

    def interval(self, alpha: float = ALPHA) -> Interval:
        """Returns the effect with its interval at level 1 - α; NaN ends if there is a single cluster of values."""
        return Interval(self.mean, *self._ends(alpha))

    def detectable(self, alpha: float = ALPHA) -> float:
        """Returns the distance from equality that such runs and prompts would show at level α with about 80% power.

            h + √((z_β·h_P/z_α)² + t_β²·(h² - h_P²)/t_ν²),   h the half width towards equality, t_β of ν, too

        It is h, which an effect that is not shown does not exceed, and the error that 80% of studies stay within.
        """
        side = int(self.mean < self._equal)
        half, over_prompts = (abs(self.mean - ends[side]) for ends in (self._ends(alpha), self._over(alpha)))
        z_alpha, z_beta = scipy.special.ndtri([1 - alpha / 2, POWER])
        t_alpha, t_beta = scipy.special.stdtrit(self._freedom, [1 - alpha / 2, POWER])
        of_runs = max(0.0, half**2 - over_prompts**2)
        return half + math.sqrt((z_beta * over_prompts / z_alpha) ** 2 + of_runs * (t_beta / t_alpha) ** 2)

    @cached_property
    def p(self) -> float:
        """The two-sided p-value, by bisection to 0.01%; at least 1e-9, and 1 if no level shows a difference.

        It is the lower end of the last bracket, and no bracket contains 5%, so p is on the same side of 5% as the
        interval at that level, and no interval at a level of p or less excludes equality.
        """
        low, high = (_SMALLEST_P, ALPHA) if self._excludes(ALPHA) else (ALPHA, _LARGEST_P)
        if high == _LARGEST_P and not self._excludes(high):
            return 1.0
        if low == _SMALLEST_P and self._excludes(low):
            return low
        while high > low * (1 + _P_PRECISION):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._excludes(middle) else (middle, high)
        return low

    def _excludes(self, alpha: float) -> bool:
        low, high = self._ends(alpha)
        return low > self._equal or high < self._equal

    def _over(self, alpha: float) -> tuple[float, float]:
        """Returns the ends of the interval over prompts alone."""
        interval = self._over_prompts.interval(alpha)
        return (interval.low, interval.high) if isinstance(interval, Interval) else interval

    def _ends(self, alpha: float) -> tuple[float, float]:
        low, high = self._over(alpha)
        of_seeds = float(scipy.special.stdtrit(self._freedom, 1 - alpha / 2))
        of_prompts = float(scipy.special.stdtrit(max(self._num_clusters - 1, 1), 1 - alpha / 2))
        added = of_seeds**2 * (self._v_A + self._v_B) - min(of_seeds, of_prompts) ** 2 * (self._v_AP + self._v_BP)
        added = max(0.0, added)
        low = self.mean - math.sqrt((self.mean - low) ** 2 + added)
        high = self.mean + math.sqrt((high - self.mean) ** 2 + added)
        return (max(low, 0.0), min(high, 1.0)) if isinstance(self._over_prompts, EqualityTest) else (low, high)


def _variances(value_SP: Floats, cluster_P: Ints) -> tuple[float, float]:
    """Returns (V_S, V_SP) of one algorithm's runs: the variance of the mean of their means, and the part of it that is
    due to the prompts on which the runs differ. V_S is at least V_SP.

        V_SP = S/(S-1) · C/(C-1) · Σ_sc r_sc² / (S·P)²,   r_sc = Σ of x_sp - x̄_s - x̄_p + x̄ over a cluster's prompts
    """
    num_runs, num_prompts = value_SP.shape
    mean_S, mean_P = value_SP.mean(axis=1), value_SP.mean(axis=0)
    v_S = float(mean_S.var(ddof=1)) / num_runs
    clusters, place_P = np.unique(cluster_P, return_inverse=True)
    r_CS = np.zeros((len(clusters), num_runs))
    np.add.at(r_CS, place_P, (value_SP - mean_S[:, None] - mean_P + value_SP.mean()).T)
    correction = num_runs / (num_runs - 1) * len(clusters) / max(len(clusters) - 1, 1)
    v_SP = correction * float((r_CS**2).sum()) / (num_runs * num_prompts) ** 2
    return max(v_S, v_SP), v_SP
