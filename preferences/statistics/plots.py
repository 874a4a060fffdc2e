"""Charts of the lead's page as inline SVG: functions from a report or judgments to markup.

They are drawn by hand and not with matplotlib (which draws a run's report), because the page is rendered for every
request: a chart takes well under a millisecond. Colours are the page's CSS variables, or its text colour if it has
none, so light and dark themes work; they are attributes, because a strict Content-Security-Policy refuses `style`.
Every chart describes in `title` and `desc` what the picture shows. Without data the result is "".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from preferences.rankings import current_judgments
from preferences.records import Judgment, as_moment, is_moment
from preferences.statistics.estimates import Interval, Share
from preferences.statistics.quality import PositionRanks
from preferences.statistics.summary import LabelerReport

WIDTH = 480.0  # all lengths are in CSS pixels at the natural size
ROW = 28.0
LETTER = 6.6  # approximate width of a label's letter
MAX_LABEL = 24  # letters
DURATIONS = (0.1, 1, 10, 60, 600, 3_600, 36_000, 360_000)  # seconds, the ticks of a time axis
NUM_BARS = 24

INK, MUTED, GRID, DATA = (f"var(--{name}, currentColor)" for name in ("ink", "muted", "grid", "heldout"))

Label = tuple[float, str]  # value on the axis, text


@dataclass(frozen=True)
class Frame:
    """The data area of a chart. `x` and `y` map values to pixels."""

    left: float
    top: float
    right: float
    bottom: float
    x_ends: tuple[float, float]
    y_ends: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_ends
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_ends
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


# ---- the charts ----


def progress_plot(judgments: Sequence[Judgment], *, num_wanted: int) -> str:
    """Plots the number of current answers over time. `num_wanted` is their number once all tasks are done.

    An answer with an impossible time is left out.
    """
    answers = current_judgments(judgments).answers
    times = np.sort([answer.created_at for answer in answers if is_moment(answer.created_at)])
    if len(times) == 0:
        return ""
    start, end = float(times[0]), max(float(times[-1]), float(times[0]) + 60)
    frame = Frame(52, 14, WIDTH - 16, 190, (start, end), (0, max(num_wanted, len(times))))
    # A path with about one point per pixel looks the same as one with a point per answer.
    shown = np.unique(np.linspace(0, len(times) - 1, 400).round().astype(np.int64))
    steps = "".join(f"H{frame.x(times[row]):.1f}V{frame.y(row + 1):.1f}" for row in shown)
    path = f"M{frame.x(start):.1f} {frame.y(0):.1f}{steps}"
    marks = [
        _y_axis(frame, [(value, f"{value:,.0f}") for value in _ticks(*frame.y_ends)]),
        *(_text(x, 210, _when(value), anchor) for x, value, anchor in (
            (frame.left, start, "start"), (frame.right, end, "end"),
        )),
        _line(frame.left, frame.y(num_wanted), frame.right, frame.y(num_wanted), MUTED, "dashed"),
        f'<path d="{path}" fill="none" stroke="{DATA}" stroke-width="2"/>',
    ]  # fmt: skip
    share = len(times) / num_wanted if num_wanted else math.nan
    done = f"{len(times):,} of {num_wanted:,} answers" + (f" ({share:.0%})" if num_wanted else "")
    return _svg("progress", "Answers over time", f"{done}, from {_when(start)} to {_when(end)}.", 220, marks)


def share_plot(rows: Sequence[tuple[str, Share]], *, name: str, title: str, chance: float | None) -> str:
    """Plots shares with their intervals, one row per label, such as `agreement` or `gold_accuracy` by labeler.

    `name` makes the chart's ids unique on the page. A line marks `chance`.
    """
    known = [(label, share) for label, share in rows if not math.isnan(share.mean)]
    if not known:
        return ""
    left = 16 + LETTER * min(max(len(label) for label, _ in known), MAX_LABEL)
    frame = Frame(left, 8, WIDTH - 60, 8 + ROW * len(known), (0, 1), (0, len(known)))
    marks = [_x_axis(frame, [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)])]
    if chance is not None:
        marks.append(_line(frame.x(chance), frame.top, frame.x(chance), frame.bottom, MUTED, "dashed"))
    for row, (label, share) in enumerate(known):
        y = frame.top + ROW * (row + 0.5)
        marks += [
            _text(left - 10, y + 4, _short(label), "end", INK),
            _text(WIDTH - 4, y + 4, f"{share.mean:.0%}", "end"),
        ]
        if not math.isnan(share.low):
            marks.append(_line(frame.x(share.low), y, frame.x(share.high), y, DATA, "thick"))
        marks.append(_dot(frame.x(share.mean), y))
    spoken = "; ".join(f"{label} {_spoken_share(share)}" for label, share in known)
    by_chance = "" if chance is None else f" By chance {chance:.0%}."
    return _svg(name, title, f"{spoken}.{by_chance}", frame.bottom + 26, marks)


def positions_plot(ranks: PositionRanks) -> str:
    """Plots the mean rank by the position shown, best on top, with a line for its value without bias."""
    k = ranks.num_responses
    frame = Frame(52, 14, WIDTH - 16, 190, (0.5, k + 0.5), (k, 1))
    neutral = (k + 1) / 2
    marks = [
        _y_axis(frame, [(rank, f"{rank}") for rank in range(1, k + 1)]),
        *(_text(frame.x(position), 210, f"position {position}", "middle") for position in range(1, k + 1)),
        _line(frame.left, frame.y(neutral), frame.right, frame.y(neutral), MUTED, "dashed"),
    ]
    for position, mean in enumerate(ranks.means, start=1):
        if not math.isnan(mean.low):
            low, high = (min(max(end, 1), k) for end in (mean.low, mean.high))
            marks.append(_line(frame.x(position), frame.y(low), frame.x(position), frame.y(high), DATA, "thick"))
        marks.append(_dot(frame.x(position), frame.y(mean.mean)))
    spoken = "; ".join(f"position {number} {_spoken_mean(mean)}" for number, mean in enumerate(ranks.means, start=1))
    text = f"Mean rank by position shown, over {ranks.num_answers:,} answers to tasks with {k} responses: {spoken}."
    return _svg(f"positions-{k}", f"Rank by position, {k} responses", f"{text} Without bias {neutral:g}.", 220, marks)


def time_plot(milliseconds: Sequence[int]) -> str:
    """Plots a histogram of the seconds per answer, on a logarithmic axis. The dashed line is the median."""
    if not milliseconds:
        return ""
    seconds = np.clip(np.asarray(milliseconds, dtype=np.float64) / 1000, DURATIONS[0], DURATIONS[-1])
    first = max(row for row, tick in enumerate(DURATIONS[:-1]) if tick <= seconds.min())
    last = min(row for row, tick in enumerate(DURATIONS) if row > first and tick >= seconds.max())
    ticks = [math.log10(tick) for tick in DURATIONS[first : last + 1]]
    edges = np.linspace(ticks[0], ticks[-1], NUM_BARS + 1)
    counts, _ = np.histogram(np.log10(seconds), edges)
    frame = Frame(52, 14, WIDTH - 30, 190, (ticks[0], ticks[-1]), (0, float(counts.max())))
    marks = [_y_axis(frame, [(value, f"{value:,.0f}") for value in _ticks(*frame.y_ends)])]
    for low, high, num in zip(edges, edges[1:], counts, strict=False):
        x, y, width = frame.x(low) + 0.5, frame.y(num), frame.x(high) - frame.x(low) - 1
        marks.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{190 - y:.1f}" fill="{DATA}"/>')
    marks += [_text(frame.x(tick), 210, _duration(10.0**tick), "middle") for tick in ticks]
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    middle = frame.x(math.log10(median))
    marks.append(_line(middle, frame.top, middle, frame.bottom, INK, "dashed"))
    text = f"{len(seconds):,} answers, median {_duration(median)}, half between {_duration(low)} and {_duration(high)}."
    return _svg("time", "Time on a task", text, 220, marks)


def labeler_shares(labelers: Sequence[LabelerReport], field: str) -> list[tuple[str, Share]]:
    """Returns (name, share) of every labeler, for `share_plot`. `field` names a Share of LabelerReport."""
    return [(labeler.labeler, getattr(labeler, field)) for labeler in labelers]


# ---- parts of a chart ----


def _svg(name: str, title: str, text: str, height: float, marks: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="{name}-title {name}-desc"'
        f' font-size="12" fill="{MUTED}"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(text)}</desc>{"".join(marks)}</svg>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, kind: str) -> str:
    style = {
        "thin": 'stroke-width="0.8" stroke-opacity="0.6"',
        "dashed": 'stroke-width="1.2" stroke-dasharray="4 3"',
        "thick": 'stroke-width="3" stroke-opacity="0.5" stroke-linecap="round"',
    }
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {style[kind]}/>'


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{DATA}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = MUTED) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _y_axis(frame: Frame, labels: Sequence[Label]) -> str:
    lines = "".join(_line(frame.left, frame.y(v), frame.right, frame.y(v), GRID, "thin") for v, _ in labels)
    return lines + "".join(_text(frame.left - 8, frame.y(v) + 4, text, "end") for v, text in labels)


def _x_axis(frame: Frame, labels: Sequence[Label]) -> str:
    lines = "".join(_line(frame.x(v), frame.top, frame.x(v), frame.bottom, GRID, "thin") for v, _ in labels)
    return lines + "".join(_text(frame.x(v), frame.bottom + 18, text, "middle") for v, text in labels)


def _ticks(low: float, high: float) -> list[float]:
    """Returns three to six integers in steps of 1, 2 or 5 times a power of ten."""
    raw = max((high - low) / 5, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [float(value) for value in np.arange(0, high + step * 1e-6, step)]


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def _spoken_share(share: Share) -> str:
    span = "" if math.isnan(share.low) else f" ({share.low:.0%} to {share.high:.0%})"
    return f"{share.mean:.0%}{span}"


def _spoken_mean(mean: Interval) -> str:
    span = "" if math.isnan(mean.low) else f" ({mean.low:.2f} to {mean.high:.2f})"
    return f"{mean.mean:.2f}{span}"


def _duration(seconds: float) -> str:
    if seconds < 59.9:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 3_599 else f"{seconds / 3_600:.3g} h"


def _when(seconds: float) -> str:
    return as_moment(seconds, "%Y-%m-%d %H:%M UTC")
