"""What a lead sees: counts at once, and statistics of a batch, computed again only when something was judged."""

import threading
from dataclasses import dataclass
from typing import Any

from preferences.results import BatchCounts
from preferences.store import LabelStore
from preferences.summary import LabelReport, summary

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
        return {"batches": batches, "batch": chosen, "report": report if judged else None, "plots": ()}
