"""What a lead sees: counts at once, and statistics of a batch, computed again only when something was judged."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from preferences.formats.parts import Report
from preferences.formats.registry import format_to_write
from preferences.plots import labeler_shares, places_plot, progress_plot, share_plot, time_plot
from preferences.results import BatchCounts
from preferences.standing import standing
from preferences.store import LabelStore
from preferences.summary import LabelReport, summary

EXPORTS = ("heed", "rankings", "trl", "hh")
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


class LeadView:
    """Reads the store for leads."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store
        self._reports: dict[str, tuple[int, LabelReport]] = {}
        self._lock = threading.Lock()  # one report at a time: it takes a core for a second

    def counts(self) -> Counts:
        return Counts(self.store.batch_counts())

    def report(self, batch: str) -> LabelReport:
        """Statistics of a batch. Raises ValueError for an unknown one."""
        if batch not in self.store.batches():
            raise ValueError(f"batch {batch!r} is not in the store")
        with self._lock:
            newest = self.store.newest_judgment(batch)
            known, report = self._reports.get(batch, (-1, None))
            if report is None or known != newest:
                tasks = [stored.task for stored in self.store.tasks(batch)]
                report = summary(tasks, self.store.judgments(batch), seed=SEED)
                self._reports[batch] = (newest, report)
            return report

    def quality(self, batch: str) -> dict[str, Any]:
        """What the page on quality shows; of the first batch unless one is named."""
        batches = self.store.batches()
        chosen = batch or next(iter(batches), "")
        report = self.report(chosen) if chosen else None
        judged = report is not None and report.num_answers > 0
        plots = self._plots(chosen, report) if report is not None and judged else []
        return {"batches": batches, "batch": chosen, "report": report if judged else None, "plots": plots}

    def _plots(self, batch: str, report: LabelReport) -> list[tuple[str, Markup]]:
        """What people would rather look at than read, each with its title."""
        judgments = self.store.judgments(batch)
        num_wanted = sum(stored.num_labelers for stored in self.store.tasks(batch))
        milliseconds = [answer.milliseconds for answer in standing(judgments).answers if answer.milliseconds > 0]
        plots = [("Answers over time", progress_plot(judgments, num_wanted=num_wanted))]
        for field, title in SHARES.items():
            rows = labeler_shares(report.labelers, field)
            plots.append((title, share_plot(rows, name=field, title=title, chance=0.5)))
        for places in report.ranks_by_place:
            plots.append((f"Mean rank by place, {places.num_responses} responses", places_plot(places)))
        plots.append(("Seconds an answer", time_plot(milliseconds)))
        return [(title, Markup(plot)) for title, plot in plots if plot]

    def export(self, batch: str, form: str) -> Iterator[str]:
        """A batch as JSONL. Raises ValueError for an unknown batch or format."""
        write = format_to_write(form).write
        assert write is not None, f"{form} is not written"
        stored = self.store.tasks(batch)
        if not stored:
            raise ValueError(f"batch {batch!r} is not in the store")
        return (json.dumps(row) + "\n" for row in write(stored, self.store.judgments(batch), Report()))
