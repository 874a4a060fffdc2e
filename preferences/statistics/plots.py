"""The chart of labelers' shares on the lead's page, as inline SVG.

It is drawn by hand and not with matplotlib (which draws a run's report), because the page is rendered for every
request: a chart takes well under a millisecond. Colours are the page's CSS variables, or its text colour if it has
none, so light and dark themes work; they are attributes, because a strict Content-Security-Policy refuses `style`.
"""

import math
from collections.abc import Sequence
from html import escape

from preferences.statistics.estimates import Share

WIDTH = 480.0  # all lengths are in CSS pixels at the natural size
ROW = 28.0
LETTER = 6.6  # approximate width of a label's letter
MAX_LABEL = 24  # letters

INK, MUTED, GRID, DATA = (f"var(--{name}, currentColor)" for name in ("ink", "muted", "grid", "heldout"))
_LINES = {
    "thin": 'stroke-width="0.8" stroke-opacity="0.6"',
    "dashed": 'stroke-width="1.2" stroke-dasharray="4 3"',
    "thick": 'stroke-width="3" stroke-opacity="0.5" stroke-linecap="round"',
}


def share_plot(rows: Sequence[tuple[str, Share]], *, name: str, title: str, chance: float | None) -> str:
    """Plots shares with their intervals, one row per label, such as agreement by labeler; "" without any.

    `name` makes the chart's ids unique on the page. A line marks `chance`. `title` and `desc` say what it shows.
    """
    known = [(label, share) for label, share in rows if not math.isnan(share.mean)]
    if not known:
        return ""
    left, right = 16 + LETTER * min(max(len(label) for label, _ in known), MAX_LABEL), WIDTH - 60
    top, bottom = 8.0, 8 + ROW * len(known)

    def x(share: float) -> float:
        return left + share * (right - left)

    marks = [_line(x(share), top, x(share), bottom, GRID, "thin") for share in (0, 0.25, 0.5, 0.75, 1)]
    marks += [_text(x(share), bottom + 18, f"{share:.0%}", "middle") for share in (0, 0.25, 0.5, 0.75, 1)]
    if chance is not None:
        marks.append(_line(x(chance), top, x(chance), bottom, MUTED, "dashed"))
    for row, (label, share) in enumerate(known):
        y = top + ROW * (row + 0.5)
        short = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
        marks += [_text(left - 10, y + 4, short, "end", INK), _text(WIDTH - 4, y + 4, f"{share.mean:.0%}", "end")]
        if not math.isnan(share.low):
            marks.append(_line(x(share.low), y, x(share.high), y, DATA, "thick"))
        marks.append(f'<circle cx="{x(share.mean):.1f}" cy="{y:.1f}" r="4" fill="{DATA}"/>')
    spoken = "; ".join(f"{label} {_spoken(share)}" for label, share in known)
    by_chance = "" if chance is None else f" By chance {chance:.0%}."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {bottom + 26:g}" role="img" aria-labelledby="{name}-title'
        f' {name}-desc" font-size="12" fill="{MUTED}"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(f"{spoken}.{by_chance}")}</desc>{"".join(marks)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, kind: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" {_LINES[kind]}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = MUTED) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _spoken(share: Share) -> str:
    return f"{share.mean:.0%}" + ("" if math.isnan(share.low) else f" ({share.low:.0%} to {share.high:.0%})")
