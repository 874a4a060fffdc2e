"""Computes all statistics of a comparison from its verdicts, which are checked and sorted before anything is counted.

The records are in `results`. How far judges can be relied on is position bias, flips when the order is swapped, and
agreement between judges and between the labelers of one judge. All errors are over clusters of prompts; without
clusters, every prompt is its own.

Shape letters: V verdicts, C clusters, N cells (the verdicts of one order of one pair on one prompt), S strata (one
order of one pair), T items (two responses to a prompt), as in `preferences.statistics.agreement`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from evaluation.statistics.algorithms import AlgorithmTest
from evaluation.statistics.ratings import rate
from evaluation.statistics.results import (
    Agreement,
    AlgorithmPair,
    CategoryWinRate,
    Conclusion,
    Failures,
    Flips,
    JudgeSummary,
    PairSummary,
    PositionBias,
    Significance,
    Summary,
    Withheld,
)
from evaluation.statistics.significance import (
    MOST_BOUNDED,
    MOST_IGNORED,
    EqualityTest,
    holm,
    holm_level,
    holm_levels,
)
from evaluation.statistics.win_rates import counts_of, lengths_controlled, pair_test, pair_win_rate, prompt_means
from evaluation.verdicts import NO_CLUSTERS, Clusters, Comparisons, Verdict, comparisons_of, places_of
from preferences.statistics.agreement import ranking_alpha
from preferences.statistics.estimates import UNKNOWN, Floats, Interval, Ints, Share
from preferences.statistics.intervals import Tally, clustered_shares, share_interval, strata_interval
from preferences.statistics.panel import PairCounts

Runs = Mapping[str, Sequence[str]]  # an algorithm's name to its training runs (policies, models), two or more
NO_RUNS: Runs = {}
AnyTest = TypeVar("AnyTest", EqualityTest, AlgorithmTest)


def summarise(
    verdicts: Sequence[Verdict],
    policies: Sequence[str] = (),
    clusters: Clusters = NO_CLUSTERS,
    runs: Runs = NO_RUNS,
    *,
    withheld: Sequence[Withheld] = (),
    seen: Mapping[str, Collection[str]] = MappingProxyType({}),
    seed: int,
) -> Summary:
    """Returns win rates, tests, ratings and agreement from all judges' verdicts, failed ones included.

    `policies` gives the order: ratings are differences from the first, and a pair's a comes before its b. By default
    they are sorted by name. The order of rows does not matter, and swapping policies mirrors every number. `clusters`
    groups prompts that are not independent; all intervals and tests are then over the groups. `runs` names the
    algorithms of which several runs are compared. Verdicts on `withheld` pairs, and on prompts that either policy has
    `seen` in training, are left out.

    Raises: ValueError naming the row for verdicts that `in_order` refuses, for a policy not among `policies`,
    and if there are no verdicts.
    """
    if not verdicts:
        raise ValueError("no verdicts; at least one was expected")
    rows = in_order(verdicts)
    names = comparisons_of(rows, policies).policies
    judges = sorted({verdict.judge for verdict in rows})
    apart = [{pair.policy_a, pair.policy_b} for pair in withheld]
    rows = [row for row in unseen(rows, seen) if {row.policy_a, row.policy_b} not in apart]
    return Summary(
        policies=names,
        judges=tuple(
            _judge([v for v in rows if v.judge == judge], judge, names, clusters, runs, seed) for judge in judges
        ),
        agreement=tuple(judges_agree(rows, one, other, clusters) for one, other in combinations(judges, 2)),
        failures=_failures(rows, names),
        num_prompts=len({verdict.prompt_id for verdict in rows}),
        num_clusters=len({clusters.get(verdict.prompt_id, verdict.prompt_id) for verdict in rows}),
        seed=seed,
        withheld=tuple(withheld),
        num_seen={policy: len(prompts) for policy, prompts in seen.items() if prompts},
    )


def unseen(verdicts: Sequence[Verdict], seen: Mapping[str, Collection[str]]) -> list[Verdict]:
    """Returns the verdicts on prompts that neither of their policies has `seen` in training."""
    prompts = {policy: frozenset(prompt_ids) for policy, prompt_ids in seen.items()}
    return [
        row
        for row in verdicts
        if not any(row.prompt_id in prompts.get(policy, ()) for policy in (row.policy_a, row.policy_b))
    ]


def _judge(
    rows: Sequence[Verdict], judge: str, names: tuple[str, ...], clusters: Clusters, runs: Runs, seed: int
) -> JudgeSummary:
    comparisons = comparisons_of(rows, names, clusters)
    pairs = [(a, b) for a, b in combinations(range(len(names)), 2) if len(comparisons.between(a, b))]
    ratings = rate(comparisons, anchor=names[0], seed=seed) if len(comparisons) else None
    bias = position_bias(comparisons)
    if ratings is not None and (reason := why_none(bias)):
        ratings = replace(ratings, policies=(), reason=reason)
    return JudgeSummary(
        judge=judge,
        num_prompts=len(comparisons.prompts),
        num_labelers=len(comparisons.labelers),
        num_verdicts=len(comparisons),
        num_failed=len(rows) - len(comparisons),
        pairs=_pairs(rows, comparisons, pairs, clusters, seed),
        algorithms=_algorithms(rows, comparisons, clusters, runs, seed),
        ratings=ratings,
        position_bias=bias,
        flips=flips(rows, clusters),
        labelers=labelers_agree(rows, judge, clusters),
    )


def _pairs(
    rows: Sequence[Verdict],
    comparisons: Comparisons,
    pairs: Sequence[tuple[int, int]],
    clusters: Clusters,
    seed: int,
) -> tuple[PairSummary, ...]:
    of_pairs = [comparisons.between(a, b) for a, b in pairs]
    tests = [pair_test(pair, seed=seed) for pair in of_pairs]
    names = comparisons.policies
    rows_of_pairs = [[row for row in rows if {row.policy_a, row.policy_b} == {names[a], names[b]}] for a, b in pairs]
    bounds = [
        _bounds(
            of_pair,
            names[a : a + 1],
            lambda filled, a=a, b=b: pair_test(  # type: ignore[misc]
                comparisons_of(filled, names, clusters).between(a, b), seed=seed
            ),
        )
        for of_pair, (a, b) in zip(rows_of_pairs, pairs, strict=True)
    ]
    p_M = np.array([_p_of(test, ends) for test, ends in zip(tests, bounds, strict=True)])
    corrected, levels = holm(p_M).tolist(), holm_levels(p_M).tolist()
    summaries = []
    at_equal_length = lengths_controlled(of_pairs)
    for (a, b), pair, of_pair, fitted, test, ends, p, holm_p, level in zip(
        pairs, of_pairs, rows_of_pairs, at_equal_length, tests, bounds, p_M.tolist(), corrected, levels, strict=True
    ):
        alpha, bias = holm_level(p, holm_p), position_bias(pair)
        rate = pair_win_rate(pair, test, alpha=alpha)
        if ends:
            rate = replace(rate, low=ends[0].interval(alpha)[0], high=ends[1].interval(alpha)[1])
        conclusion = _conclusion(Interval(rate.mean, rate.low, rate.high), bias, of_pair)
        summaries.append(
            PairSummary(
                policy_a=names[a],
                policy_b=names[b],
                win_rate=rate,
                verdicts=counts_of(pair.won_V),
                prompts=counts_of(test.x_P),
                num_failed=len(of_pair) - len(pair),
                num_prompts_missing=len(comparisons.prompts) - len(test.x_P),
                significance=Significance(p, test.num_draws, holm_p, len(pairs)),
                conclusion=conclusion,
                different=conclusion.shown != "",
                power=test.power(level),
                length_controlled=fitted,
                position_bias=bias,
                flips=flips(of_pair, clusters),
                categories=_categories(pair, seed),
            )
        )
    return tuple(summaries)


def _bounds(
    rows: Sequence[Verdict], side: Collection[str], test: Callable[[Sequence[Verdict]], AnyTest]
) -> tuple[AnyTest, AnyTest] | None:
    """Returns the tests with failed verdicts counted against a side, and for it; None if few failed, or too many."""
    if not MOST_IGNORED < _failed_share(rows) <= MOST_BOUNDED:
        return None
    least, most = (
        [
            replace(row, failure="", preference_a=worth if row.policy_a in side else 1 - worth) if row.failure else row
            for row in rows
        ]
        for worth in (0.0, 1.0)
    )
    return test(least), test(most)


def _p_of(test: AnyTest, bounds: tuple[AnyTest, AnyTest] | None) -> float:
    """Returns a pair's p; with bounds, 1 unless both are on the same side of ½, and then that of the nearer one."""
    if bounds is None:
        return test.p
    least, most = bounds
    return least.p if least.mean > 0.5 else most.p if most.mean < 0.5 else 1.0


def _failed_share(rows: Sequence[Verdict]) -> float:
    return sum(bool(row.failure) for row in rows) / max(len(rows), 1)


def _conclusion(rate: Interval, bias: PositionBias, rows: Sequence[Verdict]) -> Conclusion:
    """Returns what a pair's verdicts show: nothing if they follow position, know only one order, or often failed."""
    if reason := why_none(bias) or (_failed(rows) if _failed_share(rows) > MOST_BOUNDED else ""):
        return Conclusion("none", reason=reason)
    found = Conclusion.of(Interval(rate.mean - 0.5, rate.low - 0.5, rate.high - 0.5))
    return replace(found, kind="bound", reason=_failed(rows)) if _failed_share(rows) > MOST_IGNORED else found


def _failed(rows: Sequence[Verdict]) -> str:
    return f"{sum(bool(row.failure) for row in rows)} of {len(rows)} verdicts of the judge failed"


def why_none(bias: PositionBias) -> str:
    """Says why verdicts allow no conclusion; "" if they do."""
    return follows_position(bias) or (bias.reason if bias.reason == ONE_ORDER else "")


def follows_position(bias: PositionBias) -> str:
    """Says that a judge takes (almost) always the same position, whatever the responses; "" if it does not."""
    which, share = ("first", bias.mean) if bias.mean > 0.5 else ("second", 1 - bias.mean)
    if not share >= FOLLOWS_POSITION:
        return ""
    return f"the judge follows position: it prefers the response shown {which} {share:.0%} of the time"


def _algorithms(
    rows: Sequence[Verdict], comparisons: Comparisons, clusters: Clusters, runs: Runs, seed: int
) -> tuple[AlgorithmPair, ...]:
    """Returns the pairs of algorithms on which every pair of runs has verdicts on a common prompt."""
    names = comparisons.policies
    rows_of_pairs = {
        (a, b): [row for row in rows if _is_between(row, runs[a], runs[b])] for a, b in combinations(runs, 2)
    }

    def test(a: str, b: str, some: Sequence[Verdict]) -> AlgorithmTest:
        x_ABP, cluster_P, _ = _preferences(comparisons_of(some, names, clusters), runs[a], runs[b])
        return AlgorithmTest.of_preferences(x_ABP, cluster_P, seed=seed)

    common = {(a, b): _preferences(comparisons, runs[a], runs[b])[1:] for a, b in rows_of_pairs}
    tests = {
        (a, b): (test(a, b, of_pair), _bounds(of_pair, runs[a], partial(test, a, b)))
        for (a, b), of_pair in rows_of_pairs.items()
        if common[a, b][1]
    }
    p_M = np.array([_p_of(*both) for both in tests.values()])
    scores, pairs = _mean_scores(rows), []
    for ((a, b), (whole, ends)), p, holm_p, level in zip(
        tests.items(), p_M.tolist(), holm(p_M).tolist(), holm_levels(p_M).tolist(), strict=True
    ):
        alpha, of_pair, (cluster_P, prompts) = holm_level(p, holm_p), rows_of_pairs[a, b], common[a, b]
        rate = whole.interval(alpha)
        if ends:
            rate = Interval(rate.mean, ends[0].interval(alpha).low, ends[1].interval(alpha).high)
        difference = UNKNOWN if ends else _score_difference(scores, runs[a], runs[b], prompts, cluster_P, seed)
        pairs.append(
            AlgorithmPair(
                algorithm_a=a,
                algorithm_b=b,
                num_runs_a=len(runs[a]),
                num_runs_b=len(runs[b]),
                win_rate=rate,
                p=p,
                holm_p=holm_p,
                num_pairs=len(tests),
                detectable=whole.detectable(level),
                score_difference=difference,
                num_prompts=len(prompts),
                num_clusters=len(np.unique(cluster_P)),
                num_prompts_missing=len(comparisons.prompts) - len(prompts),
                conclusion=_conclusion(
                    rate, position_bias(comparisons_of(of_pair, names, clusters)), of_pair
                ).with_caution(min(len(runs[a]), len(runs[b])), len(prompts), bounded=True),
            )
        )
    return tuple(pairs)


def _is_between(row: Verdict, runs_a: Sequence[str], runs_b: Sequence[str]) -> bool:
    policies = {row.policy_a, row.policy_b}
    return not policies.isdisjoint(runs_a) and not policies.isdisjoint(runs_b)


def _preferences(
    comparisons: Comparisons, runs_a: Sequence[str], runs_b: Sequence[str]
) -> tuple[Floats, Ints, list[str]]:
    """Returns the mean preference for a's run [A, B, P] over b's on the prompts with a verdict on every pair of runs,
    the clusters [P] of these prompts, and the prompts.
    """
    x_ABP = np.full((len(runs_a), len(runs_b), len(comparisons.prompts)), math.nan)
    for i, j in np.ndindex(x_ABP.shape[:2]):
        pair = comparisons.between(comparisons.policies.index(runs_a[i]), comparisons.policies.index(runs_b[j]))
        x_ABP[i, j, np.unique(pair.prompt_V)] = prompt_means(pair)
    kept_P = np.isfinite(x_ABP.sum(axis=(0, 1)))
    cluster_P = comparisons.cluster_V[np.unique(comparisons.prompt_V, return_index=True)[1]]
    prompts = [prompt for prompt, kept in zip(comparisons.prompts, kept_P, strict=True) if kept]
    return x_ABP[:, :, kept_P], cluster_P[kept_P], prompts


def _score_difference(
    scores: Mapping[tuple[str, str], float],
    runs_a: Sequence[str],
    runs_b: Sequence[str],
    prompts: Sequence[str],
    cluster_P: Ints,
    seed: int,
) -> Interval:
    """Returns the difference of the runs' mean scores; unknown if a run has no score on one of the prompts."""
    value_AP, value_BP = (
        np.array([[scores.get((run, prompt), math.nan) for prompt in prompts] for run in runs])
        for runs in (runs_a, runs_b)
    )
    if np.isnan(value_AP).any() or np.isnan(value_BP).any():
        return UNKNOWN
    return AlgorithmTest.of_values(value_AP, value_BP, cluster_P, seed=seed).interval()


def _mean_scores(rows: Sequence[Verdict]) -> dict[tuple[str, str], float]:
    """Returns each policy's mean score on each prompt, over its responses, from one judge's verdicts."""
    by_response: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if not (row.failure or math.isnan(row.score_a)):
            by_response.setdefault((row.policy_a, row.prompt_id), {})[row.index_a] = row.score_a
            by_response.setdefault((row.policy_b, row.prompt_id), {})[row.index_b] = row.score_b
    return {key: sum(scores.values()) / len(scores) for key, scores in by_response.items()}


def _categories(pair: Comparisons, seed: int) -> tuple[CategoryWinRate, ...]:
    """Returns the categories by name; none if all prompts have the same category."""
    present = sorted(set(pair.category_V.tolist()), key=lambda category: pair.categories[category])
    if len(present) < 2:
        return ()
    parts = [pair.where(pair.category_V == category) for category in present]
    tests = [pair_test(part, seed=seed) for part in parts]
    corrected = holm(np.array([test.p for test in tests])).tolist()
    return tuple(
        CategoryWinRate(
            pair.categories[category],
            pair_win_rate(part, test, alpha=holm_level(test.p, holm_p)),
            test.p,
            holm_p,
        )
        for category, part, test, holm_p in zip(present, parts, tests, corrected, strict=True)
    )


def _failures(rows: Sequence[Verdict], names: tuple[str, ...]) -> tuple[Failures, ...]:
    counted: Counter[tuple[str, int, int, str]] = Counter()
    for row in rows:
        if row.failure:
            a, b = sorted((names.index(row.policy_a), names.index(row.policy_b)))
            counted[row.judge, a, b, row.failure] += 1
    return tuple(
        Failures(judge, names[a], names[b], failure, num) for (judge, a, b, failure), num in sorted(counted.items())
    )


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sorts verdicts, regardless of their original order and of which policy is called a.

    Raises: ValueError, naming the row, for a duplicate (same prompt, policies and samples, judge, labeler and display
    order), a score that is infinite or missing on one side, a negative sample, and a prompt with two categories.
    """
    seen: dict[tuple[object, ...], int] = {}
    category: dict[str, tuple[str, int]] = {}
    for number, verdict in enumerate(verdicts):
        _refuse_invalid(verdict, _row_text(verdict, number))
        key = _order_key(verdict)
        if key in seen:
            earlier = _row_text(verdicts[seen[key]], seen[key])
            raise ValueError(f"{_row_text(verdict, number)}: the same verdict is given twice, first at {earlier}")
        seen[key] = number
        named, place = category.setdefault(verdict.prompt_id, (verdict.category, number))
        if named != verdict.category:
            raise ValueError(
                f"{_row_text(verdict, number)}: category is {verdict.category!r}, but {named!r} at"
                f" {_row_text(verdicts[place], place)}; one category per prompt was expected"
            )
    return sorted(verdicts, key=_order_key)


def _refuse_invalid(verdict: Verdict, row: str) -> None:
    if math.isinf(verdict.score_a) or math.isinf(verdict.score_b):
        raise ValueError(f"{row}: scores are {verdict.score_a} and {verdict.score_b}; finite numbers were expected")
    if not verdict.failure and math.isnan(verdict.score_a) != math.isnan(verdict.score_b):
        raise ValueError(
            f"{row}: scores are {verdict.score_a} and {verdict.score_b}; a verdict that did not fail must have both"
            " scores or neither"
        )
    if min(verdict.index_a, verdict.index_b) < 0:
        raise ValueError(f"{row}: samples are {verdict.index_a} and {verdict.index_b}; 0 or more was expected")
    if min(verdict.length_a, verdict.length_b) < 0:
        raise ValueError(f"{row}: lengths are {verdict.length_a} and {verdict.length_b}; 0 or more was expected")


def _row_text(verdict: Verdict, number: int) -> str:
    place = verdict.where or f"verdict {number} (from 0)"
    return (
        f"{place}, prompt {verdict.prompt_id!r}, {verdict.policy_a!r} against {verdict.policy_b!r},"
        f" judge {verdict.judge!r}, labeler {verdict.labeler!r}"
    )


def _order_key(verdict: Verdict) -> tuple[object, ...]:
    a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
    first = {"a": verdict.policy_a, "b": verdict.policy_b, "": ""}[verdict.first]
    return (verdict.prompt_id, verdict.judge, verdict.labeler, min(a, b), max(a, b), first)


FOLLOWS_POSITION = 0.9  # share of verdicts for one position: each policy then wins at least 80% more there
NO_ORDER = "the order in which responses were shown is not known for any verdict"
FEW_ORDERS = "the order is known for some verdicts only, and no two policies were shown in both"
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
        of_untied_V = known_V[comparisons.won_V != 0.5]
        return _unknown_bias(ONE_ORDER if 2 * of_untied_V.sum() >= len(of_untied_V) else FEW_ORDERS)
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
        ends = strata_interval([(0.5, x_N[stratum_N == 0], None), (0.5, 1 - x_N[stratum_N == 1], None)])
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
    interval = share_interval((psi_P - least) / (most - least), cluster_P)
    return max(0.0, least + (most - least) * interval.low), min(1.0, least + (most - least) * interval.high)


def flips(verdicts: Sequence[Verdict], clusters: Clusters = NO_CLUSTERS) -> Flips:
    """Returns how often the order changes a labeler's verdict on the same two responses, if both orders were judged.

    Failed verdicts and those with an unknown order are left out. Every prompt weighs the same.
    """
    by_order: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for verdict in verdicts:
        if verdict.failure or not verdict.first:
            continue
        a = (verdict.policy_a, verdict.index_a)
        b = (verdict.policy_b, verdict.index_b)
        won = verdict.preference_a if a < b else 1 - verdict.preference_a
        first = verdict.policy_a if verdict.first == "a" else verdict.policy_b
        key = (verdict.prompt_id, verdict.judge, verdict.labeler, min(a, b), max(a, b))
        by_order[key][first] = math.copysign(1.0, won - 0.5) if abs(won - 0.5) > 1e-9 else 0.0
    both = {key: tuple(signs.values()) for key, signs in by_order.items() if len(signs) == 2}
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
    x_P = np.array([np.mean(values) for values in by_prompt.values()])
    interval = share_interval(x_P, places_of(list(by_prompt), clusters))
    return Share(interval.mean, interval.low, interval.high, num_pairs=len(is_so), num_tasks=len(x_P))


def _unknown_bias(reason: str) -> PositionBias:
    return PositionBias(math.nan, math.nan, math.nan, num_prompts=0, num_verdicts=0, reason=reason)


def judges_agree(verdicts: Sequence[Verdict], judge: str, other: str, clusters: Clusters = NO_CLUSTERS) -> Agreement:
    """Returns the agreement of two judges. A judge's preference between two responses is the mean of its verdicts on
    them, over labelers and orders."""
    preferences = _preferences_by_item((v.judge, v) for v in verdicts if v.judge in (judge, other))
    return _agreement(preferences, judge, other, clusters)


def labelers_agree(verdicts: Sequence[Verdict], judge: str, clusters: Clusters = NO_CLUSTERS) -> Agreement:
    """Returns the agreement of a judge's labelers. If a labeler saw both orders, the mean of both verdicts counts."""
    return _agreement(
        _preferences_by_item((v.labeler, v) for v in verdicts if v.judge == judge), judge, judge, clusters
    )


def _preferences_by_item(named: Iterable[tuple[str, Verdict]]) -> dict[Item, dict[str, list[float]]]:
    """Returns, by item and rater, preferences for the policy whose name sorts first. Failed verdicts are left out."""
    preferences: dict[Item, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rater, verdict in named:
        if verdict.failure:
            continue
        a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
        won = verdict.preference_a if a < b else 1 - verdict.preference_a
        preferences[verdict.prompt_id, min(a, b), max(a, b)][rater].append(won)
    return preferences


def _agreement(
    preferences: dict[Item, dict[str, list[float]]], judge: str, other: str, clusters: Clusters
) -> Agreement:
    from_half = [[float(np.mean(values)) - 0.5 for values in raters.values()] for raters in preferences.values()]
    first_T = np.array([sum(d > 1e-9 for d in offsets) for offsets in from_half], dtype=np.float64)
    second_T = np.array([sum(d < -1e-9 for d in offsets) for offsets in from_half], dtype=np.float64)
    num_T = np.array([len(offsets) for offsets in from_half], dtype=np.float64)
    cluster_T = places_of([prompt_id for prompt_id, _, _ in preferences], clusters)
    counts = PairCounts(first_T[:, None], second_T[:, None], (num_T - first_T - second_T)[:, None])
    # Pairs of raters, neither of whom gave a tie.
    compared_T = (first_T + second_T) * (first_T + second_T - 1) / 2
    tally = Tally(
        group_R=np.zeros(len(preferences), dtype=np.int64),
        task_R=np.arange(len(preferences)),
        prompt_R=cluster_T,
        right_R=(first_T * (first_T - 1) + second_T * (second_T - 1)) / 2,
        compared_R=compared_T,
        pairs_R=np.ones(len(preferences)),
        responses_R=np.full(len(preferences), 2),
    )
    return Agreement(judge, other, clustered_shares(tally, 1)[0], ranking_alpha(counts, cluster_T, tally.responses_R))
