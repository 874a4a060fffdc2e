"""What a labeler typed outlives a save that fails: what they were shown and what they said is kept in memory meanwhile.

Leaves out: what a server knew that was killed. A form that comes to another server is handed back without its texts.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError

from labeling.forms import LETTERS, Fields
from labeling.labeling import Asked, ShownForm
from preferences.people import Account

# The disk is full, the database is away or refuses: what is tried again later may succeed.
STORE_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
MAX_REMEMBERED = 1_000  # tasks that were last shown
RETRY_SECONDS = 10


def reason(error: Exception) -> str:
    """The database's own words in one line; SQLAlchemy would add the statement, and with it what people wrote."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@dataclass(frozen=True)
class Shown:
    """A task before somebody, and what they said of it that could not be stored (None = nothing failed)."""

    account: Account
    asked: Asked
    unsaved: Fields | None = None


class Memory:
    """The tasks that sessions were shown last, with what could not be stored; by session, task and revision."""

    def __init__(self) -> None:
        self._shown: OrderedDict[tuple[str, str, int], Shown] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, session: str, account: Account, asked: Asked) -> Fields | None:
        """Remember a task that is shown; returns what could not be stored of it before."""
        key = (session, asked.form.task, asked.form.revision)
        with self._lock:
            known = self._shown.pop(key, None)
            unsaved = known.unsaved if known is not None else None
            self._shown[key] = Shown(account, asked, unsaved)
            while len(self._shown) > MAX_REMEMBERED:
                self._shown.popitem(last=False)
        return unsaved

    def failed(self, session: str, form: ShownForm, fields: Fields) -> Shown | None:
        """Remember what could not be stored; None where this form was not made here."""
        key = (session, form.task, form.revision)
        with self._lock:
            known = self._shown.get(key)
            if known is None or known.asked.form.seal != form.seal:
                return None
            self._shown[key] = replace(known, unsaved=fields)
            return self._shown[key]

    def stored(self, session: str, form: ShownForm) -> None:
        """Forget a task that was answered or skipped."""
        with self._lock:
            self._shown.pop((session, form.task, form.revision), None)


def as_text(fields: Fields) -> str:
    """What was entered into a form, as lines that can be copied; "" where it was nothing."""
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
