"""What a lead sees: batch counts, and a batch's statistics, cached until its next judgment or an erasure."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from preferences.current import current_judgments
from preferences.formats.parts import Report, RowWarning
from preferences.formats.registry import format_to_write
from preferences.records import Judgment
from preferences.results import BatchCounts
from preferences.statistics.plots import labeler_shares, positions_plot, progress_plot, share_plot, time_plot
from preferences.statistics.summary import LabelReport, summary
from preferences.store import LabelStore

EXPORTS = ("heed", "rankings", "consensus", "trl", "hh")
EXAMPLES_PER_KIND = 5  # shown on the page for each kind of warning of an export; the report's file has all
SHARES = {
    "agreement": "Agrees with others",
    "gold_accuracy": "Agrees with gold tasks",
    "shown_first": "Prefers what is shown first",
}
PAGE_SIZE = 100  # answers on a page
NUM_REVIEWED = 20  # tasks on the quality page that labelers disagree on most
SEED = 0  # for the intervals: the same judgments give the same page


@dataclass(frozen=True)
class Quality:
    """A batch's statistics and its plots with their titles, as of its newest judgment and the last erasure."""

    as_of: tuple[int, int]
    report: LabelReport
    plots: list[tuple[str, Markup]]


@dataclass(frozen=True)
class Exported:
    """A batch in a format, with a report of what the format cannot hold."""

    rows: list[dict[str, Any]]
    report: Report

    @property
    def lines(self) -> str:
        """The rows as JSONL."""
        return _as_lines(self.rows)

    @property
    def report_lines(self) -> str:
        """Everything that was left out or changed, as JSONL."""
        return _as_lines([dict(vars(warning)) for warning in self.report.warnings])

    @property
    def examples(self) -> Mapping[str, list[RowWarning]]:
        """The first few warnings of each kind, most frequent kind first."""
        found: dict[str, list[RowWarning]] = {kind: [] for kind in self.report.counts()}
        for warning in self.report.warnings:
            if len(found[warning.kind]) < EXAMPLES_PER_KIND:
                found[warning.kind].append(warning)
        return found


class LeadView:
    """Reads the store for leads."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store
        self._known: dict[str, Quality] = {}
        self._lock = threading.Lock()  # one report at a time, because it takes a core for a second

    def batches(self) -> list[BatchCounts]:
        return self.store.batch_counts()

    def report(self, batch: str) -> LabelReport:
        """Returns a batch's statistics. Raises: ValueError for an unknown batch."""
        return self._quality(batch).report

    def quality(self, batch: str) -> dict[str, Any]:
        """Returns what the quality page shows, for the first batch if none is named."""
        batches = self.store.batches()
        chosen = batch or next(iter(batches), "")
        found = self._quality(chosen) if chosen else None
        is_judged = found is not None and found.report.num_answers > 0
        report, plots = (found.report, found.plots) if found is not None and is_judged else (None, [])
        reviewed = [] if report is None else [one.task_id for one in report.disagreements[:NUM_REVIEWED]]
        prompts = self.store.shown_prompts(reviewed)
        shown = {"reviewed": reviewed, "prompts": prompts}
        return {"batches": batches, "batch": chosen, "report": report, "plots": plots, **shown}

    def answers(self, batch: str, labeler: str, kind: str, start: int) -> dict[str, Any]:
        """Returns what the page of answers shows, newest first, from number `start` on."""
        counts = self.store.batch_counts()
        names = [one.name for one in counts]
        chosen = batch if batch in names else next(iter(names), "")
        found = (
            self.store.events(chosen, labeler=labeler, kind=kind, start=start, limit=PAGE_SIZE + 1) if chosen else []
        )
        return {
            "batches": names,
            "batch": chosen,
            "labelers": sorted({name for one in counts for name in one.by_labeler}),
            "labeler": labeler,
            "kinds": ("answer", "skip", "undo", "adjudication"),
            "kind": kind,
            "events": found[:PAGE_SIZE],
            "prompts": self.store.shown_prompts([event.task_id for event in found[:PAGE_SIZE]]),
            "has_more": len(found) > PAGE_SIZE,
            "start": start,
            "page_size": PAGE_SIZE,
        }

    def _quality(self, batch: str) -> Quality:
        if batch not in self.store.batches():
            raise ValueError(f"batch {batch!r} is not in the store")
        with self._lock:
            as_of = (self.store.newest_judgment(batch), self.store.num_erased())
            if batch not in self._known or self._known[batch].as_of != as_of:
                tasks, judgments = self.store.tasks(batch), self.store.judgments(batch)
                report = summary([stored.task for stored in tasks], judgments, seed=SEED)
                num_wanted = sum(stored.num_labelers for stored in tasks)
                self._known[batch] = Quality(as_of, report, plots_of(judgments, num_wanted, report))
            return self._known[batch]

    def export(self, batch: str, form: str, *, with_names: bool = False) -> Exported:
        """Returns a batch in a format, with the labelers' pseudonyms or names.

        Raises: ValueError for an unknown batch or format.
        """
        write = format_to_write(form).write
        assert write is not None, f"{form} is not written"
        stored = self.store.tasks(batch)
        if not stored:
            raise ValueError(f"batch {batch!r} is not in the store")
        report = Report()
        rows = list(write(stored, self.store.judgments(batch, with_names=with_names), report))
        report.num_rows = len(rows)
        return Exported(rows, report)


def exported_what(batch: str, what: str, *, with_names: bool) -> str:
    """Returns what the audit log says of an export."""
    return f"{batch} ({what}{', with names' if with_names else ''})"


def _as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def plots_of(judgments: Sequence[Judgment], num_wanted: int, report: LabelReport) -> list[tuple[str, Markup]]:
    """Returns the plots of the quality page, each with its title."""
    milliseconds = [answer.milliseconds for answer in current_judgments(judgments).answers if answer.milliseconds > 0]
    plots = [("Answers over time", progress_plot(judgments, num_wanted=num_wanted))]
    for field, title in SHARES.items():
        rows = labeler_shares(report.labelers, field)
        plots.append((title, share_plot(rows, name=field, title=title, chance=0.5)))
    for ranks in report.ranks_by_position:
        plots.append((f"Mean rank by position, {ranks.num_responses} responses", positions_plot(ranks)))
    plots.append(("Seconds per answer", time_plot(milliseconds)))
    return [(title, Markup(plot)) for title, plot in plots if plot]
