"""Pairs of policies as the report shows them, the one ahead first; and a table of tests."""

import math
from collections.abc import Sequence
from dataclasses import replace

from evaluation.compare.report.answer import Styles, is_taken_back
from evaluation.statistics.results import (
    CategoryWinRate,
    Counts,
    JudgeSummary,
    LengthControlled,
    PairSummary,
    Summary,
    WinRate,
)
from preferences.statistics.estimates import Interval
from stages.reports.parts import Cell, Row, SampleFilter, Table
from stages.reports.text import count_of, number, p_value, percent, points, share_ends


def as_shown(summary: Summary, judges: Sequence[str]) -> Summary:
    """Returns the same summary with judges in this order, and every pair oriented so that policy_a is preferred more
    often."""
    ordered = sorted(summary.judges, key=lambda judge: judges.index(judge.judge))
    return replace(summary, judges=tuple(_ahead_first(judge) for judge in ordered))


def _ahead_first(judge: JudgeSummary) -> JudgeSummary:
    return replace(judge, pairs=tuple(turned(pair) if pair.win_rate.mean < 0.5 else pair for pair in judge.pairs))


def turned(pair: PairSummary) -> PairSummary:
    """Returns the pair from the other policy's side. Tests, power, position and flips are the same from both sides."""
    return replace(
        pair,
        policy_a=pair.policy_b,
        policy_b=pair.policy_a,
        win_rate=_turned_rate(pair.win_rate),
        verdicts=_turned_counts(pair.verdicts),
        prompts=_turned_counts(pair.prompts),
        length_controlled=_turned_length(pair.length_controlled),
        categories=tuple(_turned_category(found) for found in pair.categories),
    )


def _turned_rate(rate: WinRate) -> WinRate:
    return replace(
        rate, mean=1 - rate.mean, low=1 - rate.high, high=1 - rate.low,
        bootstrap=_turned_interval(rate.bootstrap), over_labelers=_turned_interval(rate.over_labelers),
    )  # fmt: skip


def _turned_interval(found: Interval) -> Interval:
    return Interval(1 - found.mean, 1 - found.high, 1 - found.low)


def _turned_counts(counts: Counts) -> Counts:
    return Counts(counts.losses, counts.ties, counts.wins)


def _turned_length(found: LengthControlled) -> LengthControlled:
    """The coefficient of the length difference keeps its sign, because the difference and the outcome are both
    reversed."""
    return replace(found, mean=1 - found.mean, low=1 - found.high, high=1 - found.low)


def _turned_category(found: CategoryWinRate) -> CategoryWinRate:
    return replace(found, win_rate=_turned_rate(found.win_rate))


PAIR_COLUMNS = ("Pair", "Wins", "Ties", "Losses", "Win rate", "p", "Detectable", "Failed")


def tests_table(judge: JudgeSummary, place: int, policies: Sequence[str], styles: Styles) -> Table:
    """A table with a row per pair and its test; the numbers of prompts filter the samples."""
    rows = tuple(_row(pair, place, policies, styles) for pair in judge.pairs)
    holm = f" p-values are corrected for {count_of(len(rows), 'pair')} (Holm)." if len(rows) > 1 else ""
    if any(is_taken_back(pair) for pair in judge.pairs):
        holm += " Where that takes a difference back, the interval is widened to the level of the corrected test."
    caption = (
        'Prompts won, tied and lost, and the test of "preferred equally often"; a number leads to its prompts. A'
        " difference is shown if p is below .05, which is when the interval excludes 50%: both come from the same test."
        f"{holm} Detectable: the distance from 50% that 4 of 5 such studies would have seen, in points."
    )
    return Table(caption, PAIR_COLUMNS, rows, "tests", f"Test of each pair by {judge.judge}")


def _row(pair: PairSummary, judge: int, policies: Sequence[str], styles: Styles) -> Row:
    a, b = policies.index(pair.policy_a), policies.index(pair.policy_b)
    key, rate, significance = f"{min(a, b)}-{max(a, b)}", pair.win_rate, pair.significance
    counts = (
        ("wins", pair.prompts.wins, str(a)),
        ("ties", pair.prompts.ties, "tie"),
        ("losses", pair.prompts.losses, str(b)),
    )
    links = [
        Cell(number(num), filter=SampleFilter(key, judge, verdict, f"{number(num)} {name}: show the prompts"))
        for name, num, verdict in counts
    ]
    over = rate.over_labelers
    other_labelers = "" if math.isnan(over.low) else f"; with other labelers {share_ends(over.low, over.high)}"
    detectable = "none" if math.isnan(pair.power.detectable) else f"±{points(pair.power.detectable)}"
    missing = f"{number(pair.num_prompts_missing)} missing" if pair.num_prompts_missing else ""
    numbers = (
        Cell(percent(rate.mean), share_ends(rate.low, rate.high) + other_labelers),
        Cell(_p(significance.holm_p), "different" if pair.different else "not shown"),
        Cell(detectable, _needed(pair)),
        Cell(number(pair.num_failed), missing),
    )
    return Row((styles[pair.policy_a], styles[pair.policy_b]), (*links, *numbers), is_strong=pair.different)


def _p(p: float) -> str:
    return p_value(p).removeprefix("p ").removeprefix("= ")


def _needed(pair: PairSummary) -> str:
    """The number of prompts that would show the observed difference, if it was not shown."""
    needed = pair.power.num_prompts_needed
    return "" if pair.different or needed is None else f"needs {number(needed)} prompts"
