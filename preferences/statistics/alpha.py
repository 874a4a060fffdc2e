"""Krippendorff's alpha: agreement beyond chance, with missing answers and any number of labelers.

    alpha = 1 - D_o / D_e

D_o is the disagreement within units (what was judged), D_e the disagreement of values drawn from all units. 1 is full
agreement, 0 is chance, below 0 is worse than chance. Krippendorff 2011, Computing Krippendorff's Alpha-Reliability;
Hayes & Krippendorff 2007, Communication Methods and Measures 1(1).

A result of 0/0 is NaN with a reason, never 0: with nothing to disagree on, agreement shows nothing.

Shape letters: U units, V values in ascending order, T tasks, P pairs of responses.
"""

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from preferences.statistics.bootstrap import NUM_RESAMPLES, percentiles, resampled_sums
from preferences.statistics.estimates import LEVEL, Floats, Ints
from preferences.statistics.panel import PairCounts, Panel

MAX_VALUES = 21  # distinct ratings, such as 0 to 10 in halves; each pair of values takes a column of a table

NO_OVERLAP = "no two labelers judged the same task"
NO_VARIATION = "all answers are alike, so chance would agree as much"


@dataclass(frozen=True)
class Alpha:
    """Alpha with a 95% interval by bootstrap over prompts; higher is better.

    At least two labelers judged each of `num_units` units, in `num_tasks` tasks. `reason` says why alpha is NaN, and is
    empty if it is known. `low` and `high` are NaN for a single prompt.
    """

    value: float
    low: float
    high: float
    num_units: int
    num_tasks: int
    reason: str


def ordinal_alpha(counts_UV: Floats) -> float:
    """Alpha of ordinal values: `counts_UV[u, v]` labelers gave unit u the v-th smallest value. NaN if unknown.

        o_ck = Σ_u (n_uc·n_uk - [c = k]·n_uc) / (m_u - 1),  n_c = Σ_k o_ck,  n = Σ_c n_c
        alpha = 1 - (n - 1) · Σ_ck o_ck·δ²_ck / Σ_ck n_c·n_k·δ²_ck,  δ_ck = Σ_{g=c..k} n_g - (n_c + n_k)/2

    m_u is the number of values of unit u. Units with fewer than two values are left out.
    """
    one_cluster_U = np.zeros(len(counts_UV), dtype=np.int64)
    return float(_alpha_of_coincidences(_coincidences(counts_UV, one_cluster_U, 1))[0])


def ranking_alpha(counts: PairCounts, prompt_T: Ints, *, seed: int) -> Alpha:
    """Alpha of K-way rankings with ties. A unit is a pair of responses; its value is {second, tie, first} better.

    Ranks have a meaning only within their task (and ties shift them). So units are pairs, whose values mean the same in
    every task and for every K. Which response of a pair is called first is arbitrary. So the values' distribution is
    symmetric, and with Krippendorff's ordinal metric a tie lies halfway between the preferences: δ² = 1 for opposite
    preferences, ¼ for a tie and a preference. Two values whose pairs are oriented at random disagree by ½ if neither is
    a tie, and by ¼ if one is. With τ the share of ties among values of units that several labelers judged,

        D_o = Σ_u 2/(m_u - 1) · Σ_{pairs of labelers} δ² / Σ_u m_u,    D_e = (1 - τ)/2

    It equals `ordinal_alpha` of the units read in both directions, except for its n - 1. Without ties, and with equally
    many labelers per unit, alpha = 2·(pairwise agreement) - 1, which for two labelers is the mean of Kendall's tau.
    """
    num_TP = counts.num_TP
    judged_TP = num_TP > 1
    preferred_TP = counts.first_TP + counts.second_TP
    squares_TP = counts.first_TP * counts.second_TP + counts.tied_TP * preferred_TP / 4
    observed_T = np.sum(2 * squares_TP / np.where(judged_TP, num_TP - 1, 1), axis=1, where=judged_TP)
    expected_T = np.sum(preferred_TP, axis=1, where=judged_TP) / 2
    overlapping_T = judged_TP.sum(axis=1) > 0
    num_units, num_tasks = int(judged_TP.sum()), int(overlapping_T.sum())
    if num_units == 0 or expected_T.sum() == 0:
        return _unknown(NO_OVERLAP if num_units == 0 else NO_VARIATION, num_units, num_tasks)
    value = 1 - float(observed_T.sum() / expected_T.sum())
    table_CS = _by_prompt(np.stack([observed_T, expected_T], axis=1), prompt_T, overlapping_T)
    if len(table_CS) == 1:
        return Alpha(value, math.nan, math.nan, num_units, num_tasks, "")
    sums_RS = resampled_sums(table_CS, seed=seed, num_resamples=NUM_RESAMPLES)
    sums_RS = sums_RS[sums_RS[:, 1] > 0]  # a resample with nothing but ties has no alpha
    return Alpha(value, *percentiles(1 - sums_RS[:, 0] / sums_RS[:, 1], LEVEL), num_units, num_tasks, "")


def rating_alpha(panel: Panel, *, seed: int) -> Alpha:
    """Alpha of ratings as ordinal values. A unit is a response, which each labeler rates once.

    Answers without ratings are left out. Each resample has its own metric, because the metric depends on the ratings.
    """
    answers = panel.answers
    rated = [row for row, answer in enumerate(answers) if answer.ratings]
    lengths = np.array([len(answers[row].ratings) for row in rated], dtype=np.int64)
    flat = chain.from_iterable(answers[row].ratings for row in rated)
    values, value_N = np.unique(np.fromiter(flat, np.float64, lengths.sum()), return_inverse=True)
    if len(values) > MAX_VALUES:
        return _unknown(f"ratings take {len(values)} values; at most {MAX_VALUES} were expected", 0, 0)
    task_N = np.repeat(panel.task_J[rated], lengths)
    place_N = np.arange(len(task_N)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    width = int(place_N.max(initial=0)) + 1
    _, unit_N = np.unique(task_N * width + place_N, return_inverse=True)
    num_units, num_values = int(unit_N.max(initial=-1)) + 1, max(len(values), 1)
    counts = np.bincount(unit_N * num_values + value_N, minlength=num_units * num_values)
    counts_UV = counts.reshape(num_units, num_values).astype(np.float64)
    task_U = np.zeros(num_units, dtype=np.int64)
    task_U[unit_N] = task_N
    return _alpha_of_units(counts_UV, task_U, panel.prompt_T, seed)


def _alpha_of_units(counts_UV: Floats, task_U: Ints, prompt_T: Ints, seed: int) -> Alpha:
    judged_U = counts_UV.sum(axis=1) > 1
    counts_UV = counts_UV[judged_U]
    tasks, task_U = np.unique(task_U[judged_U], return_inverse=True)
    num_units, num_values = counts_UV.shape
    if num_units == 0:
        return _unknown(NO_OVERLAP, 0, 0)
    if (counts_UV.sum(axis=0) > 0).sum() == 1:
        return _unknown(NO_VARIATION, num_units, len(tasks))
    observed_TVV = _coincidences(counts_UV, task_U, len(tasks))
    value = float(_alpha_of_coincidences(observed_TVV.sum(axis=0, keepdims=True))[0])
    table_CS = _by_prompt(observed_TVV.reshape(len(tasks), -1), prompt_T[tasks], np.ones(len(tasks), dtype=bool))
    if len(table_CS) == 1:
        return Alpha(value, math.nan, math.nan, num_units, len(tasks), "")
    sums_RS = resampled_sums(table_CS, seed=seed, num_resamples=NUM_RESAMPLES)
    alphas_R = _alpha_of_coincidences(sums_RS.reshape(-1, num_values, num_values))
    return Alpha(value, *percentiles(alphas_R[~np.isnan(alphas_R)], LEVEL), num_units, len(tasks), "")


def _coincidences(counts_UV: Floats, cluster_U: Ints, num_clusters: int) -> Floats:
    """Returns [clusters, V, V]: ordered pairs of values that two labelers gave a unit, over m_u - 1, by cluster."""
    num_U = counts_UV.sum(axis=1)
    weight_U = np.where(num_U > 1, 1 / np.maximum(num_U - 1, 1), 0.0)
    num_values = counts_UV.shape[1]
    table_CVV = np.empty((num_clusters, num_values, num_values))
    for c in range(num_values):
        for k in range(c, num_values):
            pairs_U = counts_UV[:, c] * (counts_UV[:, k] - (c == k)) * weight_U
            table_CVV[:, c, k] = table_CVV[:, k, c] = np.bincount(cluster_U, pairs_U, num_clusters)
    return table_CVV


def _alpha_of_coincidences(observed_RVV: Floats) -> Floats:
    """Returns [R]: alpha of each of R coincidence tables, NaN where nothing varies."""
    count_RV = observed_RVV.sum(axis=2)
    total_R = count_RV.sum(axis=1)
    # The number of values below c plus half of those at c. δ_ck is the difference of two of these.
    midrank_RV = np.cumsum(count_RV, axis=1) - count_RV / 2
    squares_RVV = (midrank_RV[:, :, None] - midrank_RV[:, None, :]) ** 2
    observed_R = np.einsum("rck,rck->r", observed_RVV, squares_RVV)
    expected_R = np.einsum("rc,rk,rck->r", count_RV, count_RV, squares_RVV)
    alpha_R = np.full(len(total_R), np.nan)
    known_R = expected_R > 0
    alpha_R[known_R] = 1 - (total_R[known_R] - 1) * observed_R[known_R] / expected_R[known_R]
    return alpha_R


def _by_prompt(table_TS: Floats, prompt_T: Ints, used_T: npt.NDArray[np.bool_]) -> Floats:
    """Returns [prompts, S]: the sums of the used tasks' rows, by prompt."""
    _, cluster_T = np.unique(prompt_T[used_T], return_inverse=True)
    return np.stack([np.bincount(cluster_T, column) for column in table_TS[used_T].T], axis=1).astype(np.float64)


def _unknown(reason: str, num_units: int, num_tasks: int) -> Alpha:
    return Alpha(math.nan, math.nan, math.nan, num_units, num_tasks, reason)
