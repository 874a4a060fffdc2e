"""Who labelers are: their names, apart from what they did. All functions run within the caller's transaction.

Judgments, assignments and the audit log hold pseudonyms; one table holds the name of each. Erasing a person empties the
name, and nothing then connects it with the pseudonym, which is random.
"""

import re
import secrets

from sqlalchemy import ColumnElement, Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from preferences.schema import labelers

_PSEUDONYM = re.compile(r"labeler-[0-9a-f]{12}")
_NOBODY = re.compile(r"unknown( \d+)?|consensus")  # what published data calls labelers that it does not name
_RESERVED = ("command line", "server")  # actors in the audit log that are not people


def is_pseudonym(name: str) -> bool:
    """Whether a name identifies nobody: a pseudonym of this or another store, or "unknown"."""
    return bool(_PSEUDONYM.fullmatch(name) or _NOBODY.fullmatch(name))


def is_reserved(name: str) -> bool:
    """Whether no account may have this name."""
    return is_pseudonym(name) or name in _RESERVED


def new_pseudonym() -> str:
    """Returns a random pseudonym. It is not derived from the name, so it cannot be traced back to one."""
    return f"labeler-{secrets.token_hex(6)}"


def pseudonym_of(connection: Connection, name: str) -> str:
    """Returns the pseudonym of a name, which gets one if it has none yet."""
    found = known_pseudonym(connection, name)
    if found:
        return found
    values = {"pseudonym": name, "name": None} if is_pseudonym(name) else {"pseudonym": new_pseudonym(), "name": name}
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    # Another process may name them at the same time.
    connection.execute(insert(labelers).values(**values, is_erased=False).on_conflict_do_nothing())
    return known_pseudonym(connection, name)


def known_pseudonym(connection: Connection, name: str) -> str:
    """Returns the pseudonym of a name, or of itself, or "" if the store does not know it."""
    column = labelers.c.pseudonym if is_pseudonym(name) else labelers.c.name
    return connection.scalar(select(labelers.c.pseudonym).where(column == name)) or ""


def name_in(pseudonym: ColumnElement[str]) -> ColumnElement[str]:
    """Returns the name of a column's pseudonym, or the pseudonym if it has none."""
    found = select(labelers.c.name).where(labelers.c.pseudonym == pseudonym).scalar_subquery()
    return func.coalesce(found, pseudonym)


def pseudonyms(connection: Connection) -> dict[str, str]:
    """Returns the pseudonym of each name."""
    named = select(labelers.c.name, labelers.c.pseudonym).where(labelers.c.name.is_not(None))
    return {row.name: row.pseudonym for row in connection.execute(named)}


def num_erased(connection: Connection) -> int:
    """Counts the people who were erased."""
    return connection.scalar(select(func.count()).where(labelers.c.is_erased)) or 0
