"""The statistics and plots of the Quality page, computed once per state of a batch.

A batch with more than MAX_EVENTS_HERE events takes seconds (100,000 answers: ten), mostly in Python. A separate process
computes its statistics, so that labelers' pages do not wait for the interpreter. Until it is done, the page shows the
last statistics and says when they were computed, or says that the first ones are being computed.
"""

import json
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from markupsafe import Markup

from preferences.progress import PaceLog
from preferences.statistics.estimates import Share
from preferences.statistics.summary import LabelReport, summary
from preferences.store import LabelStore

LOG = logging.getLogger(__name__)
MAX_EVENTS_HERE = 1_000  # about 0.1 s
NICENESS = 10  # labelers' pages come first
SHARES = {
    "agreement": "Agrees with others",
    "gold_accuracy": "Agrees with gold tasks",
    "shown_first": "Prefers what is shown first",
}


class AsOf(NamedTuple):
    """What a batch's statistics depend on: its numbers of events, and of people erased."""

    num_events: int
    num_erased: int


@dataclass(frozen=True)
class Quality:
    """A batch's statistics and its plots with their titles. `computed_at` is in seconds since the epoch."""

    as_of: AsOf
    computed_at: float
    report: LabelReport
    plots: list[tuple[str, Markup]]


class QualityReports:
    """Computes and keeps the statistics of a store's batches."""

    def __init__(self, store: LabelStore, pace: PaceLog) -> None:
        self.store, self.pace = store, pace
        self._known: dict[str, Quality] = {}
        self._computing = threading.Lock()  # one at a time, because it takes a core
        self._refreshing: set[str] = set()

    def of(self, batch: str) -> Quality:
        """Returns a batch's statistics. It waits until they are computed. Raises: ValueError for an unknown batch."""
        self._require(batch)
        known = self._known.get(batch)
        return known if known is not None and known.as_of == self._as_of(batch) else self._computed(batch)

    def latest(self, batch: str) -> tuple[Quality | None, bool]:
        """Returns a batch's last statistics, and whether they are up to date. If not, newer ones are being computed.

        It waits only for a small batch. A large batch's statistics may be older. They are None if none have been
        computed since the server started or since a person was erased, so they never name an erased person.

        Raises: ValueError for an unknown batch.
        """
        self._require(batch)
        known, now = self._known.get(batch), self._as_of(batch)
        if known is not None and known.as_of == now:
            return known, True
        if not _is_large(now):
            return self._computed(batch), True
        self._refresh(batch)
        return known if known is not None and known.as_of.num_erased == now.num_erased else None, False

    def _require(self, batch: str) -> None:
        if batch not in self.store.batches():
            raise ValueError(f"batch {batch!r} is not in the store")

    def _as_of(self, batch: str) -> AsOf:
        with self.store.reading() as connection:
            self.pace.read(connection)
        return AsOf(self.pace.num_events(batch), self.store.num_erased())

    def _refresh(self, batch: str) -> None:
        """Starts computing a batch's statistics in the background, unless this is already running."""
        if batch not in self._refreshing:
            self._refreshing.add(batch)
            threading.Thread(target=self._refreshed, args=(batch,), daemon=True).start()

    def _refreshed(self, batch: str) -> None:
        try:
            self._computed(batch)
        finally:
            self._refreshing.discard(batch)

    def _computed(self, batch: str) -> Quality:
        with self._computing:
            now, computed_at = self._as_of(batch), self.store.now()  # before reading: what comes later is read again
            known = self._known.get(batch)
            if known is not None and known.as_of == now:  # another request computed them while this one waited
                return known
            elsewhere = _computed_elsewhere(self.store, batch) if _is_large(now) else None
            found = elsewhere or compute(self.store, batch)
            self._known[batch] = Quality(now, computed_at, *found)
            return self._known[batch]


def _is_large(state: AsOf) -> bool:
    return state.num_events > MAX_EVENTS_HERE


def compute(store: LabelStore, batch: str) -> tuple[LabelReport, list[tuple[str, Markup]]]:
    """Returns a batch's statistics and plots."""
    report = summary([stored.task for stored in store.tasks(batch)], store.judgments(batch))
    return report, plots_of(report)


# ---- plots ----

# Drawn by hand and not with matplotlib (which draws a run's report), because the page is rendered for every request: a
# chart takes well under a millisecond. Colours are the page's CSS variables, or its text colour if it has none, so
# light and dark themes work; they are attributes, because a strict Content-Security-Policy refuses `style`.
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


def plots_of(report: LabelReport) -> list[tuple[str, Markup]]:
    """Returns the plots of the quality page, each with its title."""
    plots = []
    for field, title in SHARES.items():
        if not (report.is_single and field == "shown_first"):
            rows = [(labeler.labeler, getattr(labeler, field)) for labeler in report.labelers]
            plots.append((title, share_plot(rows, name=field, title=title, chance=None if report.is_single else 0.5)))
    return [(title, Markup(plot)) for title, plot in plots if plot]


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


# ---- in a process of its own ----


def _computed_elsewhere(store: LabelStore, batch: str) -> tuple[LabelReport, list[tuple[str, Markup]]] | None:
    """Returns what `compute` returns, computed by another process; None if that fails."""
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    asked = json.dumps([store.url, batch]).encode()  # not an argument: it may hold a password
    done = subprocess.run(
        command, input=asked, capture_output=True, env=environment, check=False, start_new_session=True
    )
    if done.returncode:
        LOG.error("the process that computes statistics failed: %s", done.stderr.decode(errors="replace").strip())
        return None
    found: tuple[LabelReport, list[tuple[str, Markup]]] = pickle.loads(done.stdout)
    return found


def answer() -> None:
    """Reads a store's URL and a batch (JSON on standard input), and writes its statistics, pickled."""
    os.nice(NICENESS)
    url, batch = json.load(sys.stdin)
    with LabelStore(url) as store:
        found = compute(store, batch)
    sys.stdout.buffer.write(pickle.dumps(found))
