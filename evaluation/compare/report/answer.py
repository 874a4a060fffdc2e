"""Describes a comparison in words: the answer, which claims exactly as much as the evidence supports, and warnings.

The only place that does, except `measures.hacking_answer`: the terminal, the page of a comparison and the report of a
run show these sentences. Warnings are what a reader should know before relying on a comparison.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from math import isfinite
from typing import Literal

from evaluation.compare.folder import ComparisonFolder
from evaluation.compare.report.measures import Styles, hacking_answer
from evaluation.compare.results import CompareResults, PolicyResults
from evaluation.measures.kl import largest_shift
from evaluation.policies import BEST_OF_N
from evaluation.statistics.results import AlgorithmPair, JudgeSummary, PairSummary, Rating, Ratings, Summary
from evaluation.statistics.significance import ALPHA, holm_level
from evaluation.statistics.summary import follows_position
from evaluation.statistics.win_rates import TOO_FEW
from stages.reports.parts import Answer
from stages.reports.text import (
    count,
    count_of,
    in_capital,
    kl_with_ends,
    listed,
    number,
    p_value,
    percent,
    points,
    share_ends,
)

Tone = Literal["better", "worse", "unclear"]
NO_KL: Mapping[str, float] = {}
MAX_NAMED = 3  # pairs that an answer about many policies names

# Thresholds of warnings:
FEW_PROMPTS = 100
FEW_CLUSTERS = 10  # with fewer, sign flips and Student's quantiles leave little to show
MANY_FLIPS = 0.2
LEAST_AGREEMENT = 0.667  # below it Krippendorff would draw no conclusions (Content Analysis, 2004, ch. 11)
LEAST_DIVERSITY_KEPT = 0.85  # of the initial policy's distinct bigrams
LEAST_END_RATE = 0.9
FEW_POLICIES = 2  # trained ones, about which one paragraph can speak

WEIGHTS_ONLY = "This is about these weights only: another seed of the same algorithm may do better or worse."


def often(pair: PairSummary, styles: Styles) -> str:
    """Says in a clause how often the pair's first policy is preferred; if neither is ahead, neither is named."""
    if is_even(pair):
        return "every verdict is a tie" if all_tied(pair) else "each of the two is preferred half of the time"
    return f"{styles[pair.policy_a].title} is preferred {percent(pair.win_rate.mean)} of the time"


def is_even(pair: PairSummary) -> bool:
    """Returns whether a win rate is one half, up to rounding."""
    return math.isclose(pair.win_rate.mean, 0.5, rel_tol=0, abs_tol=1e-9)


def all_tied(pair: PairSummary) -> bool:
    """Returns whether no verdict prefers either policy."""
    return pair.verdicts.wins == pair.verdicts.losses == 0


def answer_of(summary: Summary, styles: Styles, kl_ends: Mapping[str, float] = NO_KL) -> Answer:
    """Returns the answer by the first judge, and whether the others agree. In every pair, the policy that is ahead must
    come first. If algorithms have several runs, the answer is on the algorithms; what follows is on the weights.
    `kl_ends` has the upper ends of the policies' KL from one reference, nats, as far as they are known; the summary is
    `within_kl` already.
    """
    judges = [judge for judge in summary.judges if judge.num_verdicts]
    limits_of_data = [
        *(f"No verdict on {p.policy_a} and {p.policy_b}: {p.conclusion.reason}." for p in summary.withheld),
        *(
            f"{count_of(num, 'prompt')} in the training data of {name} {'is' if num == 1 else 'are'} left out."
            for name, num in summary.num_seen.items()
        ),
    ]
    if not judges and limits_of_data:
        return Answer("unclear", limits_of_data[0], tuple(limits_of_data[1:]))
    if not judges:
        return Answer("unclear", "There is no result: no verdict succeeded.", ())
    first, *others = judges
    if len(summary.policies) == 2:
        tone, text = _of_two(first.pairs[0], first.judge, styles)
        limits = [detectable(first.pairs[0])] if first.pairs[0].conclusion.kind == "undecided" else []
        more = [*limits, *(_other_judge(judge, first.pairs[0], styles) for judge in others)]
    else:
        tone, text = _of_many(first, len(summary.policies), styles)
        differences = _differences(first, styles)
        if tone == "unclear" and differences:  # who is the best is open, so what is shown comes first
            tone, text, differences = "better", differences[0], [text]
        more = [
            *differences,
            *_beyond_kl(first, styles, kl_ends),
            _pairs_shown(first),
            *(_of_many(judge, len(summary.policies), styles)[1] for judge in others),
        ]
    if first.algorithms:
        head, *rest = [sentence for judge in judges for sentence in _of_algorithms(judge)]
        tone = "better" if first.algorithms[0].different else "unclear"
        return Answer(
            tone,
            head,
            (*rest, *limits_of_data, f"The rest is about these weights, whatever their algorithm. {text}", *more),
        )
    return Answer(tone, text, (*limits_of_data, *more, WEIGHTS_ONLY))


def evidence(pair: PairSummary, prompts: str = "") -> str:
    """Returns the evidence to put in brackets after a claim about two policies; `prompts` says on which prompts."""
    rate = pair.win_rate
    prompts = prompts or prompts_in_words(rate.num_prompts, rate.num_clusters)
    if not (isfinite(rate.low) and isfinite(rate.high)):
        return f"too few prompts for an interval, ties counting half; {prompts}"
    ends, p = share_ends(rate.low, rate.high), p_value(pair.significance.holm_p)
    return f"{interval_name(pair)} {ends}, ties counting half; {p}; {prompts}"


def interval_name(pair: PairSummary | AlgorithmPair) -> str:
    """Returns what the interval of a win rate is, to put before its ends."""
    if not is_taken_back(pair):
        return "95% interval"
    num = pair.num_pairs if isinstance(pair, AlgorithmPair) else pair.significance.num_pairs
    return f"{level_of(pair)} interval, widened for {count_of(num, 'comparison')} (Holm),"


def level(p: float, holm_p: float) -> str:
    """Formats the level of the interval of one of several comparisons: "95%" unless Holm's correction widens it."""
    return f"{100 * (1 - holm_level(p, holm_p)):.1f}".removesuffix(".0") + "%"


def level_of(pair: PairSummary | AlgorithmPair) -> str:
    """Formats the level of the interval of a pair's win rate."""
    return level(*_p_of(pair))


def _p_of(pair: PairSummary | AlgorithmPair) -> tuple[float, float]:
    return (pair.p, pair.holm_p) if isinstance(pair, AlgorithmPair) else (pair.significance.p, pair.significance.holm_p)


def prompts_in_words(num_prompts: int, num_clusters: int) -> str:
    """Formats "100 prompts", or "100 prompts in 20 clusters" if several prompts share a cluster."""
    prompts = count_of(num_prompts, "prompt")
    return prompts if num_clusters == num_prompts else f"{prompts} in {count_of(num_clusters, 'cluster')}"


def _of_algorithms(judge: JudgeSummary) -> list[str]:
    """Says of every pair of algorithms whether one is better, over seeds and prompts."""
    sentences = []
    for pair in judge.algorithms:
        a, b, rate = pair.algorithm_a, pair.algorithm_b, pair.win_rate
        runs = f"{number(pair.num_runs_a)} and {number(pair.num_runs_b)} runs"
        prompts = prompts_in_words(pair.num_prompts, pair.num_clusters)
        interval_text = (
            f"{interval_name(pair)} over seeds and prompts {share_ends(rate.low, rate.high)};"
            f" {p_value(pair.holm_p)}; {prompts}"
        )
        why = _by_name(pair.conclusion.reason, judge.judge)
        if pair.conclusion.kind == "bound":
            interval_text += f"; {why}, and the interval holds whatever they would have been"
        if pair.conclusion.kind == "none":
            sentences.append(f"Cannot tell which of the algorithms {a} and {b} is better: {why}.")
        elif pair.different:
            sentences.append(
                f"As algorithms, {a} is preferred to {b} {percent(rate.mean)} of the time by the judge {judge.judge},"
                f" over {runs} ({interval_text}). {pair.conclusion.caution}".rstrip()
            )
        else:
            sentences.append(
                f"No difference between the algorithms {a} and {b} is shown by the judge {judge.judge}: over {runs},"
                f" {a} is preferred {percent(rate.mean)} of the time ({interval_text}). {_detectable_by_runs(pair)}"
            )
    return sentences


def _detectable_by_runs(pair: AlgorithmPair) -> str:
    """Describes the smallest difference that this many runs and prompts could have shown."""
    if not pair.detectable < 0.5:
        return "With so few runs, which differ so much, hardly any difference could have been shown."
    return (
        f"4 of 5 such studies would only detect a win rate {points_up(pair.detectable)} points or more from"
        f" 50%{for_holm(pair.num_pairs)}."
    )


def is_taken_back(pair: PairSummary | AlgorithmPair) -> bool:
    """Returns whether the pair alone would show a difference, which Holm's correction for all pairs takes back. Its
    interval is then wider than a 95% interval: it has the level of the corrected test.
    """
    p, holm_p = _p_of(pair)
    return p < ALPHA <= holm_p


def _of_two(pair: PairSummary, judge: str, styles: Styles, prompts: str = "") -> tuple[Tone, str]:
    """Says which of two policies is preferred, or why that is open. The one that is ahead must come first."""
    ahead, behind, mean = styles[pair.policy_a].title, styles[pair.policy_b].title, percent(pair.win_rate.mean)
    brackets, why = evidence(pair, prompts), _by_name(pair.conclusion.reason, judge)
    if pair.conclusion.kind == "none":
        return "unclear", f"Cannot tell which of {ahead} and {behind} is better: {why}."
    if pair.conclusion.kind == "bound":
        brackets += f"; {why}, and the interval holds whatever they would have been"
    if pair.different:
        return "better", f"{ahead} is preferred to {behind} {mean} of the time by the judge {judge} ({brackets})."
    return "unclear", (
        f"No difference between {ahead} and {behind} is shown by the judge {judge}: {often(pair, styles)} ({brackets})."
    )


def _by_name(reason: str, judge: str) -> str:
    """Returns a reason that speaks of "the judge" with the judge's name."""
    return reason.replace("the judge", f"the judge {judge}", 1)


def points_up(distance: float) -> str:
    """Formats a distance that could have been shown, in points, rounded up: a smaller one may have been seen."""
    steps = 1_000 if distance < 0.099 else 100
    return points(math.ceil(distance * steps) / steps)


def kl_limit(pair: PairSummary, kl_ends: Mapping[str, float]) -> float:
    """Returns how far from 50% the policies' KL allows their win rate to be; NaN if it is not known."""
    return largest_shift(*(kl_ends.get(name, math.nan) for name in (pair.policy_a, pair.policy_b)))


def is_beyond_kl(pair: PairSummary, kl_ends: Mapping[str, float]) -> bool:
    """Returns whether a win rate is further from 50% than the policies' KL allows."""
    return abs(pair.win_rate.mean - 0.5) > kl_limit(pair, kl_ends)


def _beyond_kl(judge: JudgeSummary, styles: Styles, kl_ends: Mapping[str, float]) -> list[str]:
    """Says for each of several pairs that differ by more than their KL allows that this is open."""
    pairs = [pair for pair in judge.pairs if pair.conclusion.kind == "none" and is_beyond_kl(pair, kl_ends)]
    return [_of_two(pair, judge.judge, styles)[1] for pair in pairs]


def detectable(pair: PairSummary) -> str:
    """Describes the smallest difference that this many prompts could have shown, after Holm's correction."""
    prompts = prompts_in_words(pair.win_rate.num_prompts, pair.win_rate.num_clusters)
    if math.isnan(pair.power.detectable):
        decided = pair.prompts.wins + pair.prompts.losses
        if decided == pair.win_rate.num_prompts or pair.win_rate.num_clusters < pair.win_rate.num_prompts:
            return f"With {prompts} no difference could have been shown."
        ties = f"only {number(decided)} of them without a tie" if decided else "all of them ties"
        return f"With {prompts}, {ties}, no difference could have been shown."
    return (
        f"With {prompts}, 4 of 5 such studies would only detect a win rate {points_up(pair.power.detectable)} points or"
        f" more from 50%{for_holm(pair.significance.num_pairs)}."
    )


def for_holm(num_pairs: int) -> str:
    """Returns what to add to a statement that takes Holm's correction into account."""
    return f" after the correction for {count_of(num_pairs, 'comparison')} (Holm)" if num_pairs > 1 else ""


def _other_judge(judge: JudgeSummary, first: PairSummary, styles: Styles) -> str:
    """Describes another judge's result on the same two policies."""
    pair = judge.pairs[0]
    finding = f"{often(pair, styles)} ({evidence(pair)})"
    if pair.conclusion.kind == "none":
        return f"By the judge {judge.judge} one cannot tell: {_by_name(pair.conclusion.reason, judge.judge)}."
    if not pair.different:
        return f"The judge {judge.judge} shows no difference: {finding}."
    contrary = "contrary to the first judge, " if first.different and pair.policy_a != first.policy_a else ""
    return f"By the judge {judge.judge}, {contrary}{finding}."


def _differences(judge: JudgeSummary, styles: Styles) -> list[str]:
    """Names the pairs of policies that differ, the largest differences first; empty if none is shown."""
    shown = [pair for pair in judge.pairs if pair.different]
    if not shown:
        return []
    shown.sort(key=lambda pair: -pair.win_rate.mean)
    named: list[str] = []
    for pair in shown[:MAX_NAMED]:
        a, b, rate = styles[pair.policy_a].title, styles[pair.policy_b].title, pair.win_rate
        ends = share_ends(rate.low, rate.high) if named else evidence(pair)
        says = "to" if named else "is preferred to"
        named.append(f"{a} {says} {b} {percent(rate.mean)}{'' if named else ' of the time'} ({ends})")
    others = len(shown) - len(named)
    rest = f"; {count_of(others, 'more pair')} {'differs' if others == 1 else 'differ'}" if others else ""
    return [f"By the judge {judge.judge}, {listed(named)}{rest}."]


def _pairs_shown(judge: JudgeSummary) -> str:
    """Says how many pairs differ, and what could have been shown about the others."""
    num_different = sum(pair.different for pair in judge.pairs)
    least = [pair.power.detectable for pair in judge.pairs if pair.conclusion.kind == "undecided"]
    if not num_different and not least:
        return "No pair allows a conclusion."
    if not least and num_different == len(judge.pairs):
        return f"All {count_of(num_different, 'pair')} differ after Holm's correction."
    verb = "differs" if num_different == 1 else "differ"
    text = f"Of {count_of(len(judge.pairs), 'pair')} {num_different} {verb} after Holm's correction"
    if num_none := len(judge.pairs) - num_different - len(least):
        text += f", {num_none} {'allows' if num_none == 1 else 'allow'} no conclusion"
    if not least:
        return f"{text}."
    if any(math.isnan(value) for value in least):
        return f"{text}; other pairs have too few prompts to show any difference."
    return (
        f"{text}; for the {'other' if len(least) == 1 else 'others'}, 4 of 5 such studies would detect a win rate"
        f" {points_up(max(least))} points or more from 50%."
    )


def _of_many(judge: JudgeSummary, num_policies: int, styles: Styles) -> tuple[Tone, str]:
    """Returns the ranking by a judge's ratings, as far as its rank ranges settle it."""
    ratings = judge.ratings
    assert ratings is not None, "a judge with verdicts has ratings"
    if len(ratings.islands) > 1:
        return "unclear", f"There is no ranking of all policies by the judge {judge.judge}: {islands(ratings, styles)}."
    if not ratings.policies:
        return "unclear", f"There is no ranking by the judge {judge.judge}: {ratings.reason}."
    none = [pair.conclusion.reason for pair in judge.pairs if pair.conclusion.kind == "none"]
    if reason := follows_position(judge.position_bias) or next(iter(none), ""):
        return "unclear", f"Cannot tell which policy is best by the judge {judge.judge}: {reason}."
    ordered = by_rating(ratings)
    leaders = [f"{styles[r.policy].title} ({rank_range(r)})" for r in ordered if r.best_rank == 1]
    rest = [f"{styles[r.policy].title} ({rank_range(r)})" for r in ordered if r.best_rank > 1]
    if len(leaders) == 1:
        best = styles[ordered[0].policy].title
        text = f"{best} is the best of {num_policies} policies by the judge {judge.judge}, ahead of {listed(rest)}."
        return "better", text
    not_best = f", {listed(rest)} {'is' if len(rest) == 1 else 'are'} not" if rest else ""
    return "unclear", (
        f"Which of {num_policies} policies is the best is not settled by the judge {judge.judge}:"
        f" {listed(leaders, 'or')} may be{not_best}."
    )


def by_rating(ratings: Ratings) -> list[Rating]:
    """Sorts ratings, best first; equal ratings keep the comparison's order."""
    return sorted(ratings.policies, key=lambda rating: -rating.value)


def rank_range(rating: Rating) -> str:
    """Formats "rank 1", or "rank 1 to 3"."""
    if rating.best_rank == rating.worst_rank:
        return f"rank {rating.best_rank}"
    return f"rank {rating.best_rank} to {rating.worst_rank}"


def islands(ratings: Ratings, styles: Styles) -> str:
    """Names the groups of policies that no verdict connects."""
    first, *rest = [listed([styles[name].title for name in group]) for group in ratings.islands]
    return f"no verdict connects {first} with {' or with '.join(rest)}"


def answer_of_run(results: CompareResults) -> Answer:
    """Says whether each trained policy is preferred to the initial one, and what that alone would hide. The tone is
    that of the last policy, which is the result of the run. `more` says whether the reward was hacked, or why that is
    unknown. What a verdict on a run must say belongs here.
    """
    trained, styles = results.trained, results.styles
    answers = [_of_trained(results, one) for one in trained]
    between = [
        _of_two(pair.ahead_first, results.judge.name, styles)[1]
        for one, other in combinations(reversed(trained), 2)
        if (pair := results.pair(one.policy, other.policy)) is not None
    ]
    newest, *earlier = (answer.text for answer in reversed(answers))
    apart: tuple[str, ...] = ()
    if len(answers) > FEW_POLICIES:
        text, apart = newest, (*earlier, " ".join(between))
    else:
        text = " ".join([newest, *earlier, *between])
    more: tuple[str, ...] = ()
    few = results.cluster_by and results.num_clusters < FEW_CLUSTERS
    if results.hacking is not None:
        more = (hacking_answer(results.hacking, results.names).text, *_rate_and_score(results))
    elif results.judge.is_reward:
        more = (
            "The judge is the reward or comes from the same file, so this does not show whether the reward was gamed.",
        )
    if results.judge.relation:
        more = (f"About the judge {results.judge.name}: {results.judge.relation}.", *more)
    clusters = f"Only {count(results.num_clusters)} clusters of prompts: the intervals are wide."
    return Answer(answers[-1].tone, text, (*filter(None, apart), *more, *((clusters,) if few else ()), WEIGHTS_ONLY))


def _of_trained(results: CompareResults, one: PolicyResults) -> Answer:
    """Says whether a trained policy is preferred to the initial one."""
    names, styles, initial = results.names, dict(results.styles), results.initial
    title, pair = styles[one.policy.name].title, results.pair(one.policy, initial.policy)
    styles[initial.policy.name] = replace(styles[initial.policy.name], title=names.the_initial)
    if pair is None:
        return Answer("unclear", f"{title} and {names.the_initial} have not been compared.")
    prompts = prompts_of(results, pair)
    tone, text = _of_two(pair.ahead_first, results.judge.name, styles, prompts)
    if tone == "better" and pair.win_rate.mean < 0.5:
        tone = "worse"
    sentences = [in_capital(text) if text.startswith(names.the_initial) else text]
    if pair.conclusion.kind == "undecided" and isfinite(pair.win_rate.low):
        sentences.append(detectable(pair))
    if one.kl_nats is not None:
        kl, ends = kl_with_ends(one.kl_nats)
        sentences.append(f"{title}'s {names.kl} is {kl} ({ends or 'interval unknown'}) nats.")
    if isfinite(one.gold_score.mean):  # otherwise people gave no ratings
        scores = (
            f"The judge's mean score goes from {number(float(initial.gold_score.mean))} ({names.initial}) to"
            f" {number(float(one.gold_score.mean))} ({title})"
        )
        best = [
            f"best-of-{other.policy.n} from {names.the_initial} reaches {number(float(other.gold_score.mean))}"
            for other in results.policies.values()
            if other.policy.kind == BEST_OF_N
        ]
        sentences.append(f"{'; '.join([scores, *best])}.")
    return Answer(tone, " ".join([*sentences, *_hidden(results, one)]))


def _rate_and_score(results: CompareResults) -> tuple[str, ...]:
    """Says why only one of the win rate and the mean score shows a difference from the initial policy."""
    raising = results.raising
    pair = None if raising is None else results.pair(raising, results.initial.policy)
    if pair is None or results.hacking is None:
        return ()
    gain = results.hacking.overall.judge
    if pair.different == (gain.low > 0 or gain.high < 0):
        return ()
    return (
        "A win rate counts which response is better, a mean score also by how much: one can show a difference where the"
        " other does not.",
    )


def prompts_of(results: CompareResults, pair: PairSummary) -> str:
    """Returns the number of prompts in words, and whether they are held out, as far as that is known."""
    prompts = prompts_in_words(pair.win_rate.num_prompts, pair.win_rate.num_clusters)
    num_seen, stages = results.seen
    if num_seen:
        train = "trains" if len(stages) == 1 else "train"
        return (
            f"{prompts}, not held out: {listed(stages)} {train} on {number(num_seen)} of {number(results.num_prompts)}"
        )
    return prompts.replace("prompt", "held-out prompt", 1) if results.are_heldout else prompts


def _hidden(results: CompareResults, one: PolicyResults) -> list[str]:
    """Warns of what a win rate alone would hide: best-of-n still ahead, less varied responses, missing EOS."""
    warnings, styles, initial = [], results.styles, results.initial
    title = styles[one.policy.name].title
    for other in results.policies.values():
        pair = results.pair(one.policy, other.policy)
        if other.policy.kind == BEST_OF_N and pair is not None and pair.different and pair.win_rate.mean < 0.5:
            wins = percent(pair.win_rate.mean)
            warnings.append(
                f"{styles[other.policy.name].title} is still ahead of {title}, which wins {wins} against it."
            )
    if one.distinct_2 < LEAST_DIVERSITY_KEPT * initial.distinct_2:
        fell = f"{number(initial.distinct_2)} to {number(one.distinct_2)}"
        warnings.append(f"{title}'s responses are less varied: distinct-2 fell from {fell}.")
    if one.end_rate < LEAST_END_RATE:
        share = f"Only {percent(one.end_rate)}" if one.end_rate else "None"
        warnings.append(f"{share} of {title}'s responses end with the end token.")
    return warnings


def warnings_of(folder: ComparisonFolder, summary: Summary, styles: Styles) -> tuple[str, ...]:
    """Returns warnings, a sentence or two each, in the order of the report's sections."""
    warnings = [*_few_prompts(summary), *_few_clusters(summary), *_single_runs(folder)]
    for judge in summary.judges:
        warnings += [
            *_few_labelers(folder, judge),
            *_lost_verdicts(judge),
            *_order_effects(judge),
            *_length_effects(judge, styles),
        ]
    return (*warnings, *_low_agreement(summary), *_missing_responses(folder))


def _few_prompts(summary: Summary) -> list[str]:
    if summary.num_prompts >= FEW_PROMPTS:
        return []
    return [f"Only {count_of(summary.num_prompts, 'prompt')}: relevant differences may go undetected."]


def _few_clusters(summary: Summary) -> list[str]:
    if summary.num_clusters >= min(FEW_CLUSTERS, summary.num_prompts):
        return []
    return [
        f"Only {count_of(summary.num_clusters, 'cluster')} of prompts: the intervals rest on so few independent"
        " observations that they are wide, and approximate if clusters differ much in size."
    ]


def _single_runs(folder: ComparisonFolder) -> list[str]:
    """Warns of policies that are a single run, next to algorithms with several."""
    runs = {name for names in folder.runs.values() for name in names}
    single = [name for name in folder.policies if name not in runs]
    if not (folder.runs and single):
        return []
    return [f"There is only one run of {listed(single)}: a sentence on an algorithm takes several runs (seeds) of it."]


def _few_labelers(folder: ComparisonFolder, judge: JudgeSummary) -> list[str]:
    names = {verdict.labeler for verdict in folder.verdicts if verdict.judge == judge.judge and not verdict.failure}
    if len(names) == 1 and names != {judge.judge}:
        return [f"All verdicts of the judge {judge.judge} are by one labeler; another may judge differently."]
    if len(names) == 1 and len(folder.judges) == 1:
        return [f"{judge.judge} is the only judge: no interval here accounts for its errors."]
    apart = [pair for pair in judge.pairs if pair.different and pair.win_rate.over_labelers.low <= 0.5]
    if apart:
        rate, over = apart[0].win_rate, apart[0].win_rate.over_labelers
        return [
            f"With labelers other than these {number(rate.num_labelers)}, the judge {judge.judge} might show no"
            f" difference: the interval that also covers other labelers is {share_ends(over.low, over.high)}."
        ]
    return []


def _lost_verdicts(judge: JudgeSummary) -> list[str]:
    """Warns of failed verdicts, and of prompts that a pair has no verdict on."""
    warnings = []
    if judge.num_failed:
        share = judge.num_failed / (judge.num_failed + judge.num_verdicts)
        warnings.append(
            f"{count_of(judge.num_failed, 'verdict')} of the judge {judge.judge} failed ({percent(share)}); they are"
            " left out."
        )
    missing = max((pair.num_prompts_missing for pair in judge.pairs), default=0)
    if missing:
        warnings.append(
            f"The judge {judge.judge} lacks a successful verdict on {count_of(missing, 'prompt')} for some pair."
        )
    return warnings


def _order_effects(judge: JudgeSummary) -> list[str]:
    warnings, bias = [], judge.position_bias
    if bias.low > 0.5 or bias.high < 0.5:
        which = "first" if bias.mean > 0.5 else "second"
        often = bias.mean if bias.mean > 0.5 else 1 - bias.mean
        warnings.append(
            f"The judge {judge.judge} prefers the response shown {which}, {percent(often)} of the time"
            f" ({share_ends(bias.low, bias.high) if bias.mean > 0.5 else share_ends(1 - bias.high, 1 - bias.low)})."
        )
    changed = judge.flips.changed
    if changed.mean > MANY_FLIPS:
        warnings.append(
            f"The judge {judge.judge} changes {percent(changed.mean)} of its verdicts"
            f" ({share_ends(changed.low, changed.high)}) when the order is swapped."
        )
    return warnings


def _length_effects(judge: JudgeSummary, styles: Styles) -> list[str]:
    """Warns of pairs whose difference is explained by length, or may be, because one side is nearly always longer."""
    warnings = []
    for pair in judge.pairs:
        fitted, a, b = pair.length_controlled, styles[pair.policy_a].title, styles[pair.policy_b].title
        if fitted.reason.endswith(TOO_FEW):
            warnings.append(f"No win rate of {a} over {b} at equal length by the judge {judge.judge}: {fitted.reason}.")
        if pair.different and not math.isnan(fitted.mean) and fitted.low <= 0.5:
            warnings.append(
                f"At equal length the judge {judge.judge} shows no preference for {a} over {b}: {percent(fitted.mean)}"
                f" ({share_ends(fitted.low, fitted.high)}), not {percent(pair.win_rate.mean)}."
            )
    return warnings


def _low_agreement(summary: Summary) -> list[str]:
    warnings = []
    for judge in summary.judges:
        alpha = judge.labelers.alpha.value
        if judge.num_labelers > 1 and alpha < LEAST_AGREEMENT:
            warnings.append(
                f"The labelers of the judge {judge.judge} agree little: Krippendorff's α is {number(float(alpha))};"
                f" {number(LEAST_AGREEMENT)} is the minimum for tentative conclusions about single prompts."
            )
    for entry in summary.agreement:
        if entry.share.high < 0.5:
            share = f"{percent(entry.share.mean)} ({share_ends(entry.share.low, entry.share.high)})"
            warnings.append(f"The judges {entry.judge_a} and {entry.judge_b} agree in {share}: opposite to each other.")
        elif entry.share.low <= 0.5:
            warnings.append(
                f"The judges {entry.judge_a} and {entry.judge_b} are not shown to agree more often than by chance."
            )
    return warnings


def _missing_responses(folder: ComparisonFolder) -> list[str]:
    """Warns of prompts that a policy has no response to."""
    answered = Counter(policy for policy, _ in {(row.policy, row.prompt_id) for row in folder.responses})
    short = {name: len(folder.prompts) - answered[name] for name in folder.policies}
    lacking = [f"{name} lacks {number(num)}" for name, num in short.items() if num]
    if not lacking:
        return []
    return [f"Responses to some of {count_of(len(folder.prompts), 'prompt')} are missing: {listed(lacking)}."]
