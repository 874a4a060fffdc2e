"""Keeps what a labeler was shown and what they typed in memory, so that it survives a save that fails.

Leaves out: a server that is killed. A form that reaches another server is returned without its task's texts.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError

from preferences.accounts import Account
from preferences.page.forms import LETTERS, Fields
from preferences.page.service import PresentedTask, TaskForm

# The disk is full, or the database is away or refuses: trying again later may succeed.
STORE_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
MAX_REMEMBERED = 1_000  # tasks, the last ones shown
RETRY_SECONDS = 10


def reason_of(error: Exception) -> str:
    """Returns the database's message in one line. SQLAlchemy's would contain the statement, so what people wrote."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@dataclass(frozen=True)
class KnownTask:
    """A task that somebody was shown, and what they typed that could not be stored (None = nothing failed)."""

    account: Account
    presented: PresentedTask
    unsaved: Fields | None = None


class UnsavedForms:
    """The tasks shown last, with what could not be stored, by session, task and revision."""

    def __init__(self) -> None:
        self._shown: OrderedDict[tuple[str, str, int], KnownTask] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, session: str, account: Account, presented: PresentedTask) -> Fields | None:
        """Remembers a task that is being shown. Returns what could not be stored of it before."""
        key = (session, presented.form.task, presented.form.revision)
        with self._lock:
            known = self._shown.pop(key, None)
            unsaved = known.unsaved if known is not None else None
            self._shown[key] = KnownTask(account, presented, unsaved)
            while len(self._shown) > MAX_REMEMBERED:
                self._shown.popitem(last=False)
        return unsaved

    def failed(self, session: str, form: TaskForm, fields: Fields) -> KnownTask | None:
        """Remembers what could not be stored. Returns None if this server did not make the form."""
        key = (session, form.task, form.revision)
        with self._lock:
            known = self._shown.get(key)
            if known is None or known.presented.form.seal != form.seal:
                return None
            self._shown[key] = replace(known, unsaved=fields)
            return self._shown[key]

    def stored(self, session: str, form: TaskForm) -> None:
        """Forgets a task that was answered or skipped."""
        with self._lock:
            self._shown.pop((session, form.task, form.revision), None)


def as_text(fields: Fields) -> str:
    """Returns what was entered into a form, as lines that can be copied; "" if nothing was."""
    lines = []
    for place, letter in enumerate(LETTERS):
        said = [f"{name} {value}" for name in ("rank", "rating") if (value := fields.text(f"{name}_{place}"))]
        marks = fields.ticked.get(f"flags_{place}", ())
        if said or marks:
            lines.append(f"Response {letter}: {', '.join([*said, *marks])}")
    for name, label in (("note", "Note"), ("reason", "Reason to skip")):
        if fields.text(name).strip():
            lines.append(f"{label}: {fields.text(name)}")
    return "\n".join(lines)
