"""What a lead sees: counts at once, and statistics of a batch, computed again only when something was judged."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from preferences.formats.parts import Oddity, Report
from preferences.formats.registry import format_to_write
from preferences.records import Judgment
from preferences.results import BatchCounts
from preferences.standing import standing
from preferences.statistics.plots import labeler_shares, places_plot, progress_plot, share_plot, time_plot
from preferences.statistics.summary import LabelReport, summary
from preferences.store import LabelStore

EXPORTS = ("heed", "rankings", "trl", "hh")
EXAMPLES_PER_KIND = 5  # of what an export leaves out, on the page; the report's file has all
SHARES = {
    "agreement": "Agrees with the others",
    "gold_accuracy": "Agrees with gold tasks",
    "shown_first": "Prefers what is shown first",
}
SEED = 0  # of the intervals: the same judgments give the same page


@dataclass(frozen=True)
class Counts:
    """How far all batches are."""

    batches: list[BatchCounts]


@dataclass(frozen=True)
class Quality:
    """Statistics of a batch and its plots with their titles, as of the batch's newest judgment."""

    newest: int
    report: LabelReport
    plots: list[tuple[str, Markup]]


@dataclass(frozen=True)
class Exported:
    """A batch in a format, with what the format has no place for."""

    rows: list[dict[str, Any]]
    report: Report

    @property
    def lines(self) -> str:
        """The rows as JSONL."""
        return _as_lines(self.rows)

    @property
    def report_lines(self) -> str:
        """Everything that was left out or changed, as JSONL."""
        return _as_lines([dict(vars(oddity)) for oddity in self.report.oddities])

    @property
    def examples(self) -> Mapping[str, list[Oddity]]:
        """Of each kind of oddity the first few, the most frequent kind first."""
        found: dict[str, list[Oddity]] = {kind: [] for kind in self.report.counts()}
        for oddity in self.report.oddities:
            if len(found[oddity.kind]) < EXAMPLES_PER_KIND:
                found[oddity.kind].append(oddity)
        return found


class LeadView:
    """Reads the store for leads."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store
        self._known: dict[str, Quality] = {}
        self._lock = threading.Lock()  # one report at a time: it takes a core for a second

    def counts(self) -> Counts:
        return Counts(self.store.batch_counts())

    def report(self, batch: str) -> LabelReport:
        """Statistics of a batch. Raises ValueError for an unknown one."""
        return self._quality(batch).report

    def quality(self, batch: str) -> dict[str, Any]:
        """What the page on quality shows; of the first batch unless one is named."""
        batches = self.store.batches()
        chosen = batch or next(iter(batches), "")
        found = self._quality(chosen) if chosen else None
        is_judged = found is not None and found.report.num_answers > 0
        report, plots = (found.report, found.plots) if found is not None and is_judged else (None, [])
        return {"batches": batches, "batch": chosen, "report": report, "plots": plots}

    def _quality(self, batch: str) -> Quality:
        if batch not in self.store.batches():
            raise ValueError(f"batch {batch!r} is not in the store")
        with self._lock:
            newest = self.store.newest_judgment(batch)
            if batch not in self._known or self._known[batch].newest != newest:
                tasks, judgments = self.store.tasks(batch), self.store.judgments(batch)
                report = summary([stored.task for stored in tasks], judgments, seed=SEED)
                num_wanted = sum(stored.num_labelers for stored in tasks)
                self._known[batch] = Quality(newest, report, plots_of(judgments, num_wanted, report))
            return self._known[batch]

    def export(self, batch: str, form: str) -> Exported:
        """A batch in a format. Raises ValueError for an unknown batch or format."""
        write = format_to_write(form).write
        assert write is not None, f"{form} is not written"
        stored = self.store.tasks(batch)
        if not stored:
            raise ValueError(f"batch {batch!r} is not in the store")
        report = Report()
        rows = list(write(stored, self.store.judgments(batch), report))
        report.num_rows = len(rows)
        return Exported(rows, report)


def _as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def plots_of(judgments: Sequence[Judgment], num_wanted: int, report: LabelReport) -> list[tuple[str, Markup]]:
    """What people would rather look at than read, each with its title."""
    milliseconds = [answer.milliseconds for answer in standing(judgments).answers if answer.milliseconds > 0]
    plots = [("Answers over time", progress_plot(judgments, num_wanted=num_wanted))]
    for field, title in SHARES.items():
        rows = labeler_shares(report.labelers, field)
        plots.append((title, share_plot(rows, name=field, title=title, chance=0.5)))
    for places in report.ranks_by_place:
        plots.append((f"Mean rank by place, {places.num_responses} responses", places_plot(places)))
    plots.append(("Seconds an answer", time_plot(milliseconds)))
    return [(title, Markup(plot)) for title, plot in plots if plot]
