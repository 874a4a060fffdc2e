"""Pairs of policies as the report shows them: the one ahead first, and a table of tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compare.report.words import p_value, points, span
from evaluation.statistics.results import (
    CategoryWinRate,
    Counts,
    JudgeSummary,
    LengthControlled,
    PairSummary,
    Summary,
    WinRate,
)
from intervals.estimates import Interval
from reports.text import Policy, number, percent


def as_shown(summary: Summary, judges: Sequence[str]) -> Summary:
    """The same summary with judges in this order, and every pair turned so that policy_a is preferred more often."""
    ordered = sorted(summary.judges, key=lambda judge: judges.index(judge.judge))
    return replace(summary, judges=tuple(_ahead_first(judge) for judge in ordered))


def _ahead_first(judge: JudgeSummary) -> JudgeSummary:
    return replace(judge, pairs=tuple(turned(pair) if pair.win_rate.mean < 0.5 else pair for pair in judge.pairs))


def turned(pair: PairSummary) -> PairSummary:
    """The pair from the other policy's side. Tests, power, position and flips are the same from both."""
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
    """The coefficient of the length difference keeps its sign: the difference and the outcome both turn."""
    return replace(found, mean=1 - found.mean, low=1 - found.high, high=1 - found.low)


def _turned_category(found: CategoryWinRate) -> CategoryWinRate:
    return replace(found, win_rate=_turned_rate(found.win_rate))


@dataclass(frozen=True)
class Link:
    """A number that leads to its rows: the sample browser filtered to them, by place of policies, judge and verdict."""

    text: str
    pair: str
    judge: int
    verdict: str


@dataclass(frozen=True)
class PairRow:
    """A row of the table of tests."""

    policy_a: Policy
    policy_b: Policy
    is_different: bool
    links: tuple[Link, ...]
    cells: tuple[tuple[str, str], ...]  # text, and a second line


PAIR_COLUMNS = (
    "Wins", "Ties", "Losses", "Win rate", "Bootstrap", "Permutation p", "Holm p", "Sign test p", "Detectable",
    "Failed",
)  # fmt: skip


def pair_rows(
    judge: JudgeSummary, place: int, policies: Sequence[str], looks: dict[str, Policy]
) -> tuple[PairRow, ...]:
    """The table's rows, a pair each."""
    return tuple(_pair_row(pair, place, policies, looks) for pair in judge.pairs)


def _pair_row(pair: PairSummary, judge: int, policies: Sequence[str], looks: dict[str, Policy]) -> PairRow:
    a, b = policies.index(pair.policy_a), policies.index(pair.policy_b)
    key, rate, significance = f"{min(a, b)}-{max(a, b)}", pair.win_rate, pair.significance
    counts = ((pair.prompts.wins, str(a)), (pair.prompts.ties, "tie"), (pair.prompts.losses, str(b)))
    over = rate.over_labelers
    return PairRow(
        policy_a=looks[pair.policy_a],
        policy_b=looks[pair.policy_b],
        is_different=pair.different,
        links=tuple(Link(number(num), key, judge, verdict) for num, verdict in counts),
        cells=(
            ("–" if math.isnan(rate.mean) else percent(rate.mean), span(rate.low, rate.high)),
            (
                _bootstrap(rate.bootstrap),
                "" if math.isnan(over.low) else f"other labelers {span(over.low, over.high)}",
            ),
            (_p(significance.permutation_p), ""),
            (_p(significance.holm_p), "different" if pair.different else "not shown"),
            (_p(significance.sign_p), ""),
            ("none" if math.isnan(pair.power.detectable) else f"±{points(pair.power.detectable)}", _needed(pair)),
            (
                number(pair.num_failed),
                f"{number(pair.num_prompts_missing)} missing" if pair.num_prompts_missing else "",
            ),
        ),
    )


def _bootstrap(found: Interval) -> str:
    """Prompts that came out alike are alike in every resample, which is no precision."""
    return "no spread" if found.low == found.high else span(found.low, found.high)


def _p(p: float) -> str:
    return p_value(p).removeprefix("p ").removeprefix("= ")


def _needed(pair: PairSummary) -> str:
    """How many prompts the observed difference needs, where it was not shown."""
    needed = pair.power.num_prompts_needed
    return "" if pair.different or needed is None else f"needs {number(needed)} prompts"
