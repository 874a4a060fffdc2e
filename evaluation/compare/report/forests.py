"""The rows of a comparison's forest plots."""

import math
from dataclasses import replace

from evaluation.compare.report.answer import Styles, by_rating, rank_range
from evaluation.statistics.results import Agreement, CategoryWinRate, Counts, PairSummary, Ratings, WinRate
from stages.reports.parts import Dot, ForestRow, Stack, axis, share_dot, share_row
from stages.reports.text import UNKNOWN, number, p_value, percent, share_ends

UNBOUNDED = {
    "": "",
    "above": "it lost nothing",
    "below": "it won nothing",
    "both": "no chain of wins ties it to the others",
}


def stack_of(counts: Counts, ahead: str, behind: str, title: str) -> Stack | None:
    """Returns wins, ties and losses of `ahead`; None if there are none."""
    total = counts.wins + counts.ties + counts.losses
    if not total:
        return None
    parts = (
        ("won", f"{ahead} wins", counts.wins),
        ("tied", "ties", counts.ties),
        ("lost", f"{behind} wins", counts.losses),
    )
    return Stack(title, tuple((kind, whose, num / total, num) for kind, whose, num in parts))


def _share(rate: WinRate) -> tuple[float, float, float]:
    return rate.mean, rate.low, rate.high


def win_row(pair: PairSummary, styles: Styles) -> ForestRow:
    """A row with the win rate of a pair's first policy, and its prompts won, tied and lost."""
    a, b = styles[pair.policy_a], styles[pair.policy_b]
    stack = stack_of(pair.prompts, a.title, b.title, "Prompts")
    return share_row((a, b), _share(pair.win_rate), stack=stack, unknown="no verdict stands")


def category_row(found: CategoryWinRate) -> ForestRow:
    """A row with the win rate of a pair's first policy in one category."""
    cells = (p_value(found.holm_p), number(found.win_rate.num_prompts))
    return share_row((found.category or "(no category)",), _share(found.win_rate), cells)


def length_row(pair: PairSummary, styles: Styles) -> ForestRow:
    """Rows with a pair's plain win rate and, hollow, the one at equal length."""
    fitted, heads = pair.length_controlled, (styles[pair.policy_a], styles[pair.policy_b])
    if math.isnan(fitted.mean):
        return share_row(heads, _share(pair.win_rate), (UNKNOWN,), note=fitted.reason)
    note = "fitted with a prior: these verdicts alone have no finite fit" if fitted.shrunk else ""
    text = f"{percent(fitted.mean)} ({share_ends(fitted.low, fitted.high)})"
    row = share_row(heads, _share(pair.win_rate), (text,), note=note)
    return replace(row, dots=(*row.dots, share_dot(fitted.mean, fitted.low, fitted.high, "hollow")))


def agreement_row(head: str, found: Agreement) -> ForestRow:
    """A row with the agreement of two judges, or of one judge's labelers."""
    share, alpha = found.share, found.alpha
    ends = "" if math.isnan(alpha.low) else f" ({number(float(alpha.low))} to {number(float(alpha.high))})"
    cells = (number(float(alpha.value)) + ends, number(share.num_pairs))
    return share_row((head,), (share.mean, share.low, share.high), cells, note=alpha.reason, unknown="")


def rating_rows(
    ratings: Ratings, styles: Styles
) -> tuple[tuple[ForestRow, ...], tuple[tuple[float, str], ...], float | None]:
    """Returns a row per policy, best first; the axis's ticks; and the position of 0."""
    ordered = by_rating(ratings)
    ends = [value for r in ordered for value in (r.value, r.low, r.high) if math.isfinite(value)]
    low, high, ticks = axis(min(ends), max(ends))

    def place(value: float) -> float:
        return (min(max(value, low), high) - low) / (high - low)

    rows = []
    for rating in ordered:
        is_known = not (math.isnan(rating.low) or math.isnan(rating.high))
        interval = f"{rating_text(rating.low)} to {rating_text(rating.high)}" if is_known else "unknown"
        dot = Dot(
            place(rating.value),
            place(rating.low) if is_known else None,
            place(rating.high) if is_known else None,
            open_low=rating.low == -math.inf,
            open_high=rating.high == math.inf,
        )
        rows.append(
            ForestRow(
                (styles[rating.policy],),
                (dot,),
                rating_text(rating.value),
                "by definition" if rating.policy == ratings.anchor else interval,
                (rank_range(rating).removeprefix("rank "),),
                note=UNBOUNDED[rating.unbounded],
            )
        )
    zero = (0 - low) / (high - low) if low <= 0 <= high else None
    return tuple(rows), tuple((place(tick), rating_text(tick, 1)) for tick in ticks), zero


def rating_text(value: float, digits: int = 2) -> str:
    """A rating in log-odds, with possibly infinite ends."""
    if math.isinf(value):
        return "∞" if value > 0 else "\u2212∞"
    return number(float(value), digits) if abs(value) >= 0.5 * 10**-digits else number(0.0, digits)
