"""What a label store holds about one person, and how to erase it.

An erasure deletes the name, the account, its sessions and links, and what the person wrote in notes and questions.
Judgments stay under the pseudonym, so that training data and statistics do not change; so do edits of responses, which
are training data.
"""

import sqlite3
import time
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, delete, select, update

from preferences import arena_records, leases, results
from preferences.schema import (
    accounts,
    arena_conversations,
    arena_turns,
    assignments,
    audit_log,
    invitations,
    judgments,
    labelers,
    questions,
    sessions,
    tasks,
)

# Tables that hold or held names, or texts that people wrote. VACUUM also clears deleted rows not yet overwritten.
PERSONAL_TABLES = (
    labelers, accounts, sessions, invitations, judgments, assignments, audit_log, questions, arena_conversations,
    arena_turns,
)  # fmt: skip
CHECKPOINT_SECONDS = 30.0  # how long to wait for others to finish reading a SQLite file
KEY_NOTE = "an argon2 hash of the key is stored, the key itself is not"


def held_about(connection: Connection, name: str) -> dict[str, Any]:
    """Returns everything that the store holds about a labeler or lead, in JSON's types.

    Other people appear in it under their pseudonyms. Raises: ValueError for an unknown name.
    """
    who = _require_known(connection, name)
    found = connection.execute(select(accounts).where(accounts.c.name == name)).mappings().one_or_none()
    account = None if found is None else {key: value for key, value in found.items() if key != "key_hash"}
    until = select(sessions.c.expires_at).where(sessions.c.account == name).order_by(sessions.c.expires_at)
    link = select(invitations.c.role, invitations.c.expires_at).where(invitations.c.name == name)
    held = select(tasks.c.task_id, assignments.c.batch, assignments.c.expires_at).where(
        assignments.c.task == tasks.c.position, assignments.c.labeler == who, ~assignments.c.is_done
    )
    message = (questions.c.author, questions.c.kind, questions.c.text, questions.c.created_at)
    said = (
        select(tasks.c.task_id, tasks.c.batch, *message)
        .join(tasks, questions.c.task == tasks.c.position)
        .where((questions.c.author == who) | (questions.c.labeler == who))  # what they wrote, and replies to them
        .order_by(questions.c.message_id)
    )
    events = select(audit_log).where((audit_log.c.actor == who) | (audit_log.c.subject == who))
    return {
        "name": name,
        "pseudonym": who,
        "account": account and {**account, "key": KEY_NOTE},
        "sessions_until": list(connection.scalars(until)),
        "links": [dict(row) for row in connection.execute(link).mappings()],
        "leases": [dict(row) for row in connection.execute(held).mappings()],
        "judgments": [{"batch": batch} | asdict(judgment) for batch, judgment in results.events_of(connection, who)],
        "questions": [dict(row) for row in connection.execute(said).mappings()],
        "conversations": [asdict(one) for one in arena_records.conversations_of(connection, who)],
        "audit_log": [
            {"actor": row.actor, "action": row.act, "subject": row.subject, "created_at": row.created_at}
            for row in connection.execute(events.order_by(audit_log.c.act_id))
        ],
    }


def erase(connection: Connection, name: str) -> str:
    """Erases a person and returns the pseudonym under which their judgments stay.

    The caller runs `purge` after the transaction, because databases keep deleted rows in their files for a while.

    Raises: ValueError for an unknown name.
    """
    who = _require_known(connection, name)
    connection.execute(delete(sessions).where(sessions.c.account == name))
    connection.execute(delete(invitations).where(invitations.c.name == name))
    connection.execute(update(invitations).where(invitations.c.invited_by == name).values(invited_by=who))
    connection.execute(delete(accounts).where(accounts.c.name == name))
    leases.release_all(connection, name, who)
    connection.execute(update(labelers).where(labelers.c.pseudonym == who).values(name=None, is_erased=True))
    connection.execute(update(judgments).where(judgments.c.labeler == who).values(note=""))
    connection.execute(update(questions).where(questions.c.author == who).values(text=""))
    arena_records.delete_conversations(connection, who)
    return who


def purge(engine: Engine) -> None:
    """Rewrites the database's files, so that nothing deleted remains in them.

    Raises: ValueError if others keep reading a SQLite file.
    """
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # ANALYZE: the planner's statistics hold values of columns too.
            names = ", ".join(table.name for table in PERSONAL_TABLES)
            connection.exec_driver_sql(f"VACUUM (FULL, ANALYZE) {names}")
        return
    raw = engine.raw_connection()
    try:
        assert isinstance(raw.driver_connection, sqlite3.Connection)
        raw.driver_connection.execute("VACUUM")
        deadline = time.monotonic() + CHECKPOINT_SECONDS
        while raw.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() > deadline:
                raise ValueError(
                    "erased, but the store's file still holds deleted rows, because others keep reading it; run the"
                    " SQLite command VACUUM when nobody does"
                )
            time.sleep(0.1)
    finally:
        raw.close()


def _require_known(connection: Connection, name: str) -> str:
    who = connection.scalar(select(labelers.c.pseudonym).where(labelers.c.name == name))
    if who is None:
        raise ValueError(f"name {name!a}: the store holds nothing under this name")
    return who
