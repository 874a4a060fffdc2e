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
        plots = [Markup(plot) for plot in self._plots(chosen, report)] if report is not None and judged else []
        return {"batches": batches, "batch": chosen, "report": report if judged else None, "plots": plots}

    def _plots(self, batch: str, report: LabelReport) -> list[str]:
        """What people would rather look at than read: progress, agreement, gold, places, time."""
        judgments = self.store.judgments(batch)
        num_wanted = sum(stored.num_labelers for stored in self.store.tasks(batch))
        seconds = [answer.milliseconds for answer in standing(judgments).answers if answer.milliseconds > 0]
        shares = (
            ("agreement", "Agreement with the others", 0.5),
            ("gold_accuracy", "Agreement with gold tasks", 0.5),
            ("shown_first", "Preference for the response shown first", 0.5),
        )
        plots = [progress_plot(judgments, num_wanted=num_wanted)]
        for name, title, chance in shares:
            plots.append(share_plot(labeler_shares(report.labelers, name), name=name, title=title, chance=chance))
        plots += [places_plot(places) for places in report.ranks_by_place]
        return [plot for plot in (*plots, time_plot(seconds)) if plot]

    def export(self, batch: str, form: str) -> Iterator[str]:
        """A batch as JSONL. Raises ValueError for an unknown batch or format."""
        write = format_to_write(form).write
        assert write is not None, f"{form} is not written"
        stored = self.store.tasks(batch)
        if not stored:
            raise ValueError(f"batch {batch!r} is not in the store")
        return (json.dumps(row) + "\n" for row in write(stored, self.store.judgments(batch), Report()))
