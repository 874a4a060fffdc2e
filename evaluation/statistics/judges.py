"""How far judges can be relied on: position bias, flips when the order is swapped, and agreement.

Agreement is between judges, and between the labelers of one judge.

All errors are over clusters of prompts; without clusters, every prompt is its own.

Shape letters: V verdicts, C clusters, N cells (the verdicts of one order of one pair on one prompt), S strata (one
order of one pair), T items (two responses to a prompt), as in `preferences.statistics.agreement`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from evaluation.statistics.results import Agreement, Flips, PositionBias
from evaluation.verdicts import NO_CLUSTERS, Clusters, Comparisons, Verdict, places_of
from preferences.statistics.agreement import ranking_alpha
from preferences.statistics.estimates import Floats, Ints, Share
from preferences.statistics.intervals import Tally, clustered_shares, score_interval, share_interval
from preferences.statistics.panel import PairCounts

NO_ORDER = "the order in which responses were shown is not known for any verdict"
ONE_ORDER = "no two policies were shown in both orders, so position bias cannot be separated from strength"

Item = tuple[str, tuple[str, int], tuple[str, int]]


def position_bias(comparisons: Comparisons) -> PositionBias:
    """Returns how often the response shown first is preferred, over the pairs of policies shown in both orders.

        ½·(m_1 + 1 - m_2)   for a pair; m_1 and m_2 are a's win rate over prompts where a and where b was shown first

    This cancels a's strength, whatever the share of prompts in either order. Pairs are weighted by their number of
    prompts. The interval is the score interval of ψ_p = mean + P·u_p, where u_p is a prompt's part of the residual. If
    every prompt was shown in both orders, ψ_p is the prompt's own share of wins by the response shown first.
    """
    known_V = comparisons.first_V != 0
    if not known_V.any():
        return _unknown_bias(NO_ORDER)
    a_V, b_V = comparisons.a_V[known_V], comparisons.b_V[known_V]
    turned_V = a_V > b_V
    won_V = np.where(turned_V, 1 - comparisons.won_V[known_V], comparisons.won_V[known_V])
    is_first_V = (comparisons.first_V[known_V] > 0) != turned_V  # the policy with the lower index
    num_policies = len(comparisons.policies)
    _, pair_V = np.unique(np.minimum(a_V, b_V) * num_policies + np.maximum(a_V, b_V), return_inverse=True)
    stratum_V = 2 * pair_V + ~is_first_V
    orders = np.bincount(np.unique(stratum_V) // 2, minlength=int(pair_V.max()) + 1)
    used_V = orders[pair_V] == 2
    if not used_V.any():
        return _unknown_bias(ONE_ORDER)
    _, first_P, prompt_V = np.unique(comparisons.prompt_V[known_V][used_V], return_index=True, return_inverse=True)
    _, cluster_P = np.unique(comparisons.cluster_V[known_V][used_V][first_P], return_inverse=True)
    return _bias_over_strata(won_V[used_V], stratum_V[used_V], prompt_V, cluster_P)


def _bias_over_strata(won_V: Floats, stratum_V: Ints, prompt_V: Ints, cluster_P: Ints) -> PositionBias:
    num_prompts, num_clusters = len(cluster_P), int(cluster_P.max()) + 1
    cells, cell_V = np.unique(stratum_V * num_prompts + prompt_V, return_inverse=True)
    x_N = np.bincount(cell_V, won_V) / np.bincount(cell_V)
    stratum_N, prompt_N = cells // num_prompts, cells % num_prompts
    num_S = np.bincount(stratum_N, minlength=2 * (int(stratum_N.max()) // 2 + 1)).astype(np.float64)
    mean_S = np.bincount(stratum_N, x_N, len(num_S)) / np.maximum(num_S, 1)
    share_S = np.repeat(num_S.reshape(-1, 2).sum(axis=1), 2) / len(x_N)  # the pair's, for each of its two strata
    sign_S = np.tile([0.5, -0.5], len(num_S) // 2)
    mean = 0.5 + float((share_S * sign_S * mean_S).sum())
    is_twice = len(x_N) > num_clusters
    if len(num_S) == 2 and not is_twice:
        ends = _ends_of_two_orders(x_N[stratum_N == 0], x_N[stratum_N == 1])
    else:
        u_N = (share_S * sign_S / np.maximum(num_S, 1))[stratum_N] * (x_N - mean_S[stratum_N])
        psi_P = mean + num_prompts * np.bincount(prompt_N, u_N, num_prompts).astype(np.float64)
        ends = _ends_of_prompts(psi_P, cluster_P)
    return PositionBias(mean, *ends, num_prompts=num_prompts, num_verdicts=len(won_V), reason="")


def _ends_of_prompts(psi_P: Floats, cluster_P: Ints) -> tuple[float, float]:
    """Returns the ends of the score interval of the mean of ψ. ψ is between 0 and 1 unless a pair's two orders are on
    different prompts.
    """
    least, most = min(0.0, float(psi_P.min())), max(1.0, float(psi_P.max()))
    found = share_interval((psi_P - least) / (most - least), cluster_P)
    return max(0.0, least + (most - least) * found.low), min(1.0, least + (most - least) * found.high)


def _ends_of_two_orders(one_C: Floats, other_C: Floats) -> tuple[float, float]:
    """Returns the interval of ½·(m_1 + 1 - m_2), with m_1 and m_2 over different prompts, from both score intervals.

    The squared distances from the means to the ends of these add up. Unlike an interval from residuals, this one has a
    width even if a few prompts all came out alike. Zou & Donner 2008, Statistics in Medicine 27; Newcombe 1998.
    """
    mean_1, mean_2 = float(one_C.mean()), float(other_C.mean())
    (low_1, high_1), (low_2, high_2) = score_interval(one_C), score_interval(other_C)
    mean = (mean_1 + 1 - mean_2) / 2
    low = mean - math.hypot(mean_1 - low_1, high_2 - mean_2) / 2
    return low, mean + math.hypot(high_1 - mean_1, mean_2 - low_2) / 2


def flips(verdicts: Sequence[Verdict], clusters: Clusters = NO_CLUSTERS) -> Flips:
    """Returns how often the order changes a labeler's verdict on the same two responses, if both orders were judged.

    Failed verdicts and those with an unknown order are left out. Every prompt weighs the same.
    """
    shown: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for verdict in verdicts:
        if verdict.failure or not verdict.first:
            continue
        a = (verdict.policy_a, verdict.index_a)
        b = (verdict.policy_b, verdict.index_b)
        won = verdict.preference_a if a < b else 1 - verdict.preference_a
        first = verdict.policy_a if verdict.first == "a" else verdict.policy_b
        key = (verdict.prompt_id, verdict.judge, verdict.labeler, min(a, b), max(a, b))
        shown[key][first] = math.copysign(1.0, won - 0.5) if abs(won - 0.5) > 1e-9 else 0.0
    both = {key: tuple(signs.values()) for key, signs in shown.items() if len(signs) == 2}
    prompts = [str(key[0]) for key in both]
    changed = [one != other for one, other in both.values()]
    opposite = [one * other < 0 for one, other in both.values()]
    return Flips(_share_by_prompt(prompts, changed, clusters), _share_by_prompt(prompts, opposite, clusters))


def _share_by_prompt(prompts: Sequence[str], is_so: Sequence[bool], clusters: Clusters) -> Share:
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for prompt, so in zip(prompts, is_so, strict=True):
        by_prompt[prompt].append(so)
    if not by_prompt:
        return Share(math.nan, math.nan, math.nan, num_pairs=0, num_tasks=0)
    x_P = np.array([np.mean(found) for found in by_prompt.values()])
    found = share_interval(x_P, places_of(list(by_prompt), clusters))
    return Share(found.mean, found.low, found.high, num_pairs=len(is_so), num_tasks=len(x_P))


def _unknown_bias(reason: str) -> PositionBias:
    return PositionBias(math.nan, math.nan, math.nan, num_prompts=0, num_verdicts=0, reason=reason)


def judges_agree(verdicts: Sequence[Verdict], judge: str, other: str, clusters: Clusters = NO_CLUSTERS) -> Agreement:
    """Returns the agreement of two judges. A judge's preference between two responses is the mean of its verdicts on
    them, over labelers and orders."""
    said = _preferences((v.judge, v) for v in verdicts if v.judge in (judge, other))
    return _agreement(said, judge, other, clusters)


def labelers_agree(verdicts: Sequence[Verdict], judge: str, clusters: Clusters = NO_CLUSTERS) -> Agreement:
    """Returns the agreement of a judge's labelers. If a labeler saw both orders, the mean of both verdicts counts."""
    return _agreement(_preferences((v.labeler, v) for v in verdicts if v.judge == judge), judge, judge, clusters)


def _preferences(named: Iterable[tuple[str, Verdict]]) -> dict[Item, dict[str, list[float]]]:
    """Returns, by item and rater, preferences for the policy whose name sorts first. Failed verdicts are left out."""
    said: dict[Item, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rater, verdict in named:
        if verdict.failure:
            continue
        a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
        won = verdict.preference_a if a < b else 1 - verdict.preference_a
        said[verdict.prompt_id, min(a, b), max(a, b)][rater].append(won)
    return said


def _agreement(said: dict[Item, dict[str, list[float]]], judge: str, other: str, clusters: Clusters) -> Agreement:
    from_half = [[float(np.mean(found)) - 0.5 for found in raters.values()] for raters in said.values()]
    first_T = np.array([sum(d > 1e-9 for d in found) for found in from_half], dtype=np.float64)
    second_T = np.array([sum(d < -1e-9 for d in found) for found in from_half], dtype=np.float64)
    num_T = np.array([len(found) for found in from_half], dtype=np.float64)
    cluster_T = places_of([prompt_id for prompt_id, _, _ in said], clusters)
    counts = PairCounts(first_T[:, None], second_T[:, None], (num_T - first_T - second_T)[:, None])
    # Pairs of raters, neither of whom gave a tie.
    compared_T = (first_T + second_T) * (first_T + second_T - 1) / 2
    tally = Tally(
        group_R=np.zeros(len(said), dtype=np.int64),
        task_R=np.arange(len(said)),
        prompt_R=cluster_T,
        right_R=(first_T * (first_T - 1) + second_T * (second_T - 1)) / 2,
        compared_R=compared_T,
        pairs_R=np.ones(len(said)),
        responses_R=np.full(len(said), 2),
    )
    return Agreement(judge, other, clustered_shares(tally, 1)[0], ranking_alpha(counts, cluster_T, tally.responses_R))
