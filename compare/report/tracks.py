"""Forest plots as rows of a table: a dot with its interval on a common axis, the numbers beside it as text.

They are drawn by the page's style sheet, so that their text keeps its size on a phone and every number can be read out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from compare.report.words import by_rating, p_value, rank_range, span
from evaluation.statistics.results import Agreement, CategoryWinRate, Counts, PairSummary, Ratings
from reports.text import Policy, number, percent

NUM_SPACES = 3  # at most, between ticks of an axis
MARGIN = 0.08  # of the data, at either end of an axis


UNBOUNDED = {
    "": "",
    "above": "it lost nothing",
    "below": "it won nothing",
    "both": "no chain of wins ties it to the others",
}


@dataclass(frozen=True)
class Stack:
    """Wins, ties and losses as shares of a bar (0 to 1) with their counts."""

    title: str
    segments: tuple[tuple[str, str, float, int], ...]  # kind, whose, share, count

    @property
    def spoken(self) -> str:
        """What a screen reader says."""
        return ", ".join(f"{whose} {number(count)}" for _, whose, _, count in self.segments)


@dataclass(frozen=True)
class Dot:
    """A dot with an interval as shares of the axis, 0 to 1; the interval's ends are None where they are unknown.

    `open_low` and `open_high` tell that the interval goes on beyond the axis.
    """

    mean: float
    low: float | None
    high: float | None
    open_low: bool = False
    open_high: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Row:
    """A row: its head, what is drawn, the value and interval as text, and further cells."""

    heads: tuple[Policy | str, ...]
    dots: tuple[Dot, ...]
    value: str
    interval: str
    cells: tuple[str, ...] = ()
    stack: Stack | None = None
    note: str = ""


@dataclass(frozen=True)
class Tracks:
    """A forest plot. `ticks` are (share of the axis, text), `mark` is where its line of no difference stands."""

    name: str
    title: str
    caption: str
    corner: str
    value: str  # what the dots are
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    mark: float | None
    rows_from: str

    @property
    def is_shares(self) -> bool:
        """Whether the axis goes from 0 to 100%, whose lines the style sheet draws."""
        return self.ticks is SHARE_TICKS


SHARE_TICKS = ((0.0, "0%"), (0.5, "50%"), (1.0, "100%"))


def share_dot(mean: float, low: float, high: float, kind: str = "") -> Dot:
    """A share on an axis from 0 to 1."""
    return Dot(mean, None if math.isnan(low) else low, None if math.isnan(high) else high, kind=kind)


def stack(counts: Counts, ahead: str, behind: str, title: str) -> Stack | None:
    """Wins, ties and losses of `ahead`; None where there are none of any."""
    total = counts.wins + counts.ties + counts.losses
    if not total:
        return None
    parts = (
        ("won", f"{ahead} wins", counts.wins),
        ("tied", "ties", counts.ties),
        ("lost", f"{behind} wins", counts.losses),
    )
    return Stack(title, tuple((kind, whose, num / total, num) for kind, whose, num in parts))


def win_rows(pairs: Sequence[PairSummary], looks: dict[str, Policy]) -> tuple[Row, ...]:
    """A row for each pair: win rate of its first policy, and its prompts won, tied and lost."""
    rows = []
    for pair in pairs:
        a, b, rate = looks[pair.policy_a], looks[pair.policy_b], pair.win_rate
        if math.isnan(rate.mean):
            rows.append(Row((a, b), (), "–", "no verdict stands"))
            continue
        rows.append(
            Row(
                (a, b),
                (share_dot(rate.mean, rate.low, rate.high),),
                percent(rate.mean),
                span(rate.low, rate.high),
                stack=stack(pair.prompts, a.title, b.title, "Prompts"),
            )
        )
    return tuple(rows)


def category_rows(pair: PairSummary) -> tuple[Row, ...]:
    """The win rate of the pair's first policy in every category."""
    return tuple(_category_row(found) for found in pair.categories)


def _category_row(found: CategoryWinRate) -> Row:
    rate = found.win_rate
    return Row(
        (found.category or "(no category)",),
        (share_dot(rate.mean, rate.low, rate.high),) if not math.isnan(rate.mean) else (),
        percent(rate.mean) if not math.isnan(rate.mean) else "–",
        span(rate.low, rate.high),
        (p_value(found.holm_p), number(rate.num_prompts)),
    )


def length_rows(pairs: Sequence[PairSummary], looks: dict[str, Policy]) -> tuple[Row, ...]:
    """The win rate of each pair as it is, and, hollow, the one at equal length."""
    rows = []
    for pair in pairs:
        raw, fitted = pair.win_rate, pair.length_controlled
        if math.isnan(raw.mean):
            continue
        dots, text, note = [share_dot(raw.mean, raw.low, raw.high)], "–", fitted.reason
        if not math.isnan(fitted.mean):
            dots.append(share_dot(fitted.mean, fitted.low, fitted.high, "hollow"))
            text = f"{percent(fitted.mean)} ({span(fitted.low, fitted.high)})"
            note = "fitted with a prior: these verdicts alone have no finite fit" if fitted.shrunk else ""
        heads = (looks[pair.policy_a], looks[pair.policy_b])
        rows.append(Row(heads, tuple(dots), percent(raw.mean), span(raw.low, raw.high), (text,), note=note))
    return tuple(rows)


def rating_rows(
    ratings: Ratings, looks: dict[str, Policy]
) -> tuple[tuple[Row, ...], tuple[tuple[float, str], ...], float | None]:
    """A row for each policy, best first; the axis's ticks; where 0 stands on it."""
    ordered = by_rating(ratings)
    ends = [value for r in ordered for value in (r.value, r.low, r.high) if math.isfinite(value)]
    low, high, ticks = axis(min(ends), max(ends))

    def place(value: float) -> float:
        return (min(max(value, low), high) - low) / (high - low)

    rows = []
    for rating in ordered:
        ends_known = not (math.isnan(rating.low) or math.isnan(rating.high))
        dot = Dot(
            place(rating.value),
            place(rating.low) if ends_known else None,
            place(rating.high) if ends_known else None,
            open_low=rating.low == -math.inf,
            open_high=rating.high == math.inf,
        )
        note = UNBOUNDED[rating.unbounded]
        interval = f"{rating_text(rating.low)} to {rating_text(rating.high)}" if ends_known else "unknown"
        if rating.policy == ratings.anchor:
            interval = "by definition"
        look = looks[rating.policy]
        rows.append(
            Row(
                (look,),
                (dot,),
                rating_text(rating.value),
                interval,
                (rank_range(rating).removeprefix("rank "),),
                note=note,
            )
        )
    zero = (0 - low) / (high - low) if low <= 0 <= high else None
    return tuple(rows), tuple((place(tick), rating_text(tick, 1)) for tick in ticks), zero


def rating_text(value: float, digits: int = 2) -> str:
    """A rating in log-odds, infinite ends included."""
    if math.isinf(value):
        return "∞" if value > 0 else "\u2212∞"
    return number(float(value), digits) if abs(value) >= 0.5 * 10**-digits else number(0.0, digits)


def agreement_rows(found: Sequence[tuple[str, Agreement]]) -> tuple[Row, ...]:
    """A row for each two judges, and for the labelers of each judge that has several."""
    rows = []
    for head, agreement in found:
        share, alpha = agreement.share, agreement.alpha
        value = number(float(alpha.value)) if not math.isnan(alpha.value) else "–"
        ends = "" if math.isnan(alpha.low) else f" ({number(float(alpha.low))} to {number(float(alpha.high))})"
        cells = (value + ends, number(share.num_pairs))
        if math.isnan(share.mean):
            rows.append(Row((head,), (), "–", "", cells, note=alpha.reason))
            continue
        dot = share_dot(share.mean, share.low, share.high)
        rows.append(Row((head,), (dot,), percent(share.mean), span(share.low, share.high), cells, note=alpha.reason))
    return tuple(rows)


def axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The ends of an axis that holds low to high with a margin, and round ticks within it."""
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / NUM_SPACES))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if width / (power * factor) <= NUM_SPACES)
    start, end = low - MARGIN * width, high + MARGIN * width
    return start, end, [place * step for place in range(math.ceil(start / step), math.floor(end / step) + 1)]
