"""Labelers' forms: parsing them into answers, and keeping in memory those that could not be saved.

Parsing returns sentences for the page about what is missing. What a labeler was shown and typed survives a failed save,
but not a server that is killed. A form that reaches another server is returned without its task's texts.
"""

import re
import sys
import threading
from dataclasses import dataclass, replace

from preferences.accounts import Account
from preferences.annotations import MAX_CRITERIA, MAX_SPANS
from preferences.leases import Lease
from preferences.page.annotation_forms import annotation_fields, read_annotations
from preferences.page.cache import ByteCache
from preferences.page.config import LabelingConfig
from preferences.page.fields import LETTERS, Fields, read_each
from preferences.page.service import PresentedTask, TaskForm
from preferences.records import Answer, Judgment, ShownTask

MIN_RATING, MAX_RATING = 1, 7
MAX_NOTE_CHARACTERS = 4_000
MAX_REMEMBERED_BYTES = 64 * 2**20  # memory for the most recently shown tasks
TASK_BYTES = 10_000  # memory that a task takes in addition to its texts
_TURN = re.compile(r"turn_\d{1,2}_\d{1,6}")  # the field of a turn's rating: criterion and turn


# ---- reading a form ----


def task_form(fields: Fields) -> TaskForm:
    """Returns what the form sends back about its task. The seal is checked later."""
    return TaskForm(
        fields.text("task"), fields.number("revision") or 0, fields.number("shown_at") or 0, fields.text("seal")
    )


def read_answer(fields: Fields, shown: ShownTask, config: LabelingConfig) -> tuple[Answer | None, list[str]]:
    """Returns the answer to a task, in the order shown, or None and a sentence for each mistake."""
    wrong: list[str] = []
    num, limits = len(shown.responses), (MIN_RATING, MAX_RATING)
    ranks = read_each(fields, "rank", num, 1, num, wrong, noun="rank") if num > 1 else [1]
    ratings = read_each(fields, "rating", num, *limits, wrong, noun="rating") if config.asks_ratings else []
    annotations = read_annotations(fields, shown, config, wrong)
    flags = [tuple(fields.ticked.get(f"flags_{place}", ())) for place in range(num)]
    unknown = sorted({flag for marked in flags for flag in marked} - set(config.flags))
    if unknown:
        wrong.append(f"“{unknown[0]}” is not one of the marks that you can give.")
    note = fields.text("note").strip()
    if len(note) > MAX_NOTE_CHARACTERS:
        wrong.append(f"The note has {len(note)} characters; at most {MAX_NOTE_CHARACTERS} are allowed.")
    if wrong:
        return None, wrong
    marked = tuple(flags) if any(flags) else ()
    return Answer(tuple(ranks), 0, tuple(ratings), marked, note, annotations), []


def answer_fields(judgment: Judgment, lease: Lease, config: LabelingConfig) -> Fields:
    """Returns the form of a stored answer to the lease's task, so that it can be changed."""
    order = lease.order
    values, ticked = {"note": judgment.note}, {}
    values |= annotation_fields(judgment.annotations.as_shown(order), lease.shown.responses, config)
    for place, index in enumerate(order):
        values[f"rank_{place}"] = str(judgment.ranks[index])
        if judgment.ratings:
            values[f"rating_{place}"] = f"{judgment.ratings[index]:.0f}"
        if judgment.flags:
            ticked[f"flags_{place}"] = list(judgment.flags[index])
    return Fields(values, ticked)


def read_reason(fields: Fields, config: LabelingConfig) -> str:
    """Returns why a task is skipped: a reason that was chosen, the labeler's own words, or both; "" if neither."""
    chosen, own = fields.text("chosen_reason"), fields.text("reason").strip()
    return ": ".join(part for part in (chosen if chosen in config.all_skip_reasons else "", own) if part)


# ---- what could not be stored ----


@dataclass(frozen=True)
class KnownTask:
    """A task that somebody was shown, and what they typed that could not be stored (None = nothing failed)."""

    account: Account
    presented: PresentedTask
    unsaved: Fields | None = None


class UnsavedForms:
    """The most recently shown tasks, with input that could not be stored, by session, task and revision."""

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._shown: ByteCache[tuple[str, str, int], KnownTask] = ByteCache(max_bytes)
        self._lock = threading.Lock()

    def put(self, session: str, account: Account, presented: PresentedTask) -> Fields | None:
        """Remembers a task that is being shown. Returns its input that could not be stored before, if any."""
        key = (session, presented.form.task, presented.form.revision)
        with self._lock:
            known = self._shown.get(key)
            unsaved = known.unsaved if known is not None else None
            self._keep(key, KnownTask(account, presented, unsaved))
        return unsaved

    def failed(self, session: str, form: TaskForm, fields: Fields) -> KnownTask | None:
        """Remembers input that could not be stored. Returns None if this server did not make the form."""
        key = (session, form.task, form.revision)
        with self._lock:
            known = self._shown.get(key)
            if known is None or known.presented.form.seal != form.seal:
                return None
            return self._keep(key, replace(known, unsaved=fields))

    def stored(self, session: str, form: TaskForm) -> None:
        """Forgets a task that was answered or skipped."""
        self._shown.remove((session, form.task, form.revision))

    def _keep(self, key: tuple[str, str, int], known: KnownTask) -> KnownTask:
        shown, fields = known.presented.lease.shown, known.unsaved or Fields({})
        texts = [text for message in shown.prompt for text in message.fields] + [
            *shown.responses,
            *fields.values.values(),
        ]
        self._shown.put(key, known, TASK_BYTES + sum(map(sys.getsizeof, texts)))
        return known


def as_text(fields: Fields) -> str:
    """Returns what was entered into a form, as lines that can be copied; "" if nothing was."""
    lines = []
    for place, letter in enumerate(LETTERS):
        said = [f"{name} {value}" for name in ("rank", "rating") if (value := fields.text(f"{name}_{place}"))]
        by_criterion = ((number, fields.text(f"criterion_{number}_{place}")) for number in range(MAX_CRITERIA))
        said += [f"criterion {number + 1}: {value}" for number, value in by_criterion if value]
        marks = fields.ticked.get(f"flags_{place}", ())
        if said or marks:
            lines.append(f"Response {letter}: {', '.join([*said, *marks])}")
        for number in range(MAX_SPANS):
            if quote := fields.text(f"span_quote_{place}_{number}").strip():
                lines.append(f"Passage of {letter} ({fields.text(f'span_label_{place}_{number}')}): {quote}")
        if edit := fields.text(f"edit_{place}").strip():
            lines.append(f"Your version of {letter}: {edit}")
    rated = [(name.split("_"), value) for name, value in fields.values.items() if _TURN.fullmatch(name) and value]
    lines += [f"Turn {int(turn) + 1}, criterion {int(of) + 1}: {value}" for (_, of, turn), value in rated]
    for name, label in (("note", "Note"), ("question", "Question"), ("reason", "Reason to skip")):
        if fields.text(name).strip():
            lines.append(f"{label}: {fields.text(name)}")
    return "\n".join(lines)
