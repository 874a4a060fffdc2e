"""Forest plots as rows of a table: a dot with its interval on a common axis, and the numbers next to it as text.

The page's style sheet draws them, so that their text keeps its size on a phone and every number can be read out.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from stages.reports.styles import PolicyStyle
from stages.reports.text import UNKNOWN, number, percent, share_ends

MAX_SPACES = 3  # between ticks of an axis
MARGIN = 0.08  # of the data, at either end of an axis
SHARE_TICKS = ((0.0, "0%"), (0.5, "50%"), (1.0, "100%"))


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

    `open_low` and `open_high` mean that the interval continues beyond the axis.
    """

    mean: float
    low: float | None
    high: float | None
    open_low: bool = False
    open_high: bool = False
    kind: str = ""


@dataclass(frozen=True)
class ForestRow:
    """A row: its head, what is drawn, the value and interval as text, and further cells."""

    heads: tuple[PolicyStyle | str, ...]
    dots: tuple[Dot, ...]
    value: str
    interval: str
    cells: tuple[str, ...] = ()
    stack: Stack | None = None
    note: str = ""


@dataclass(frozen=True)
class Forest:
    """A forest plot. `ticks` are (share of the axis, text); `mark` is where its line of no difference stands."""

    name: str
    title: str
    caption: str
    corner: str
    value: str  # what the dots are
    columns: tuple[str, ...]
    rows: tuple[ForestRow, ...]
    rows_from: str  # the rows that the numbers are computed from
    ticks: tuple[tuple[float, str], ...] = SHARE_TICKS
    mark: float | None = 0.5
    part: ClassVar[str] = "forest"

    @property
    def is_shares(self) -> bool:
        """Whether the axis goes from 0 to 100%, whose lines the style sheet draws."""
        return self.ticks is SHARE_TICKS


def share_dot(mean: float, low: float, high: float, kind: str = "") -> Dot:
    """A share on an axis from 0 to 1."""
    return Dot(mean, None if math.isnan(low) else low, None if math.isnan(high) else high, kind=kind)


def axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """The ends of an axis that holds low to high with a margin, and round ticks within it."""
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / MAX_SPACES))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if width / (power * factor) <= MAX_SPACES)
    start, end = low - MARGIN * width, high + MARGIN * width
    return start, end, [place * step for place in range(math.ceil(start / step), math.floor(end / step) + 1)]


def share_row(
    heads: tuple[PolicyStyle | str, ...],
    share: tuple[float, float, float],
    cells: tuple[str, ...] = (),
    *,
    stack: Stack | None = None,
    note: str = "",
    unknown: str = "unknown",
) -> ForestRow:
    """A row of a share, as (mean, low, high); without a dot, and with `unknown` for its interval, where it is NaN."""
    mean, low, high = share
    if math.isnan(mean):
        return ForestRow(heads, (), UNKNOWN, unknown, cells, note=note)
    return ForestRow(heads, (share_dot(*share),), percent(mean), share_ends(low, high), cells, stack, note)
