"""The audit log: who changed accounts, exported labels or erased people. SQL within the caller's transaction.

People stand in it under their pseudonyms and are shown by name, unless they were erased.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from preferences.invitations import SERVER
from preferences.labelers import name_in, pseudonym_of
from preferences.schema import audit_log

COMMAND_LINE = "command line"  # who acts, if no lead does
MAX_EVENTS_SHOWN = 100


@dataclass(frozen=True)
class AuditEvent:
    """What somebody did to an account, or exported from the store. `subject` is a name or a batch."""

    actor: str
    action: str
    subject: str
    created_at: float


def log(connection: Connection, actor: str, action: str, subject: str, now: float) -> None:
    """Appends an event about a batch, or about a pseudonym."""
    is_person = actor not in (COMMAND_LINE, SERVER)
    who = pseudonym_of(connection, actor) if is_person else actor
    connection.execute(insert(audit_log).values(actor=who, act=action, subject=subject, created_at=now))


def log_about(connection: Connection, actor: str, action: str, name: str, now: float) -> None:
    """Appends an event about a person."""
    log(connection, actor, action, pseudonym_of(connection, name), now)


def newest(connection: Connection) -> list[AuditEvent]:
    """Returns the last events, newest first."""
    names = name_in(audit_log.c.actor).label("actor"), name_in(audit_log.c.subject).label("subject")
    found = select(*names, audit_log.c.act, audit_log.c.created_at).order_by(audit_log.c.act_id.desc())
    rows = connection.execute(found.limit(MAX_EVENTS_SHOWN))
    return [AuditEvent(row.actor, row.act, row.subject, row.created_at) for row in rows]
