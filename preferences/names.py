"""Names of people: which are allowed, which look alike, and the pseudonyms that stand for them.

Names appear on pages and in data files. Judgments, assignments and the audit log hold pseudonyms, and one table maps
each to its name. Erasing a person deletes the name there; since pseudonyms are random, nothing links the two any more.
"""

import re
import secrets
import unicodedata

from sqlalchemy import ColumnElement, Connection, func, select
from sqlalchemy.dialects import postgresql, sqlite

from preferences.schema import labelers

MAX_NAME_CHARACTERS = 64
# Characters that print nothing, although Unicode does not classify them as control or format characters.
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
_PSEUDONYM = re.compile(r"labeler-[0-9a-f]{12}")
_NOBODY = re.compile(r"unknown( \d+)?|consensus")  # what published data calls labelers that it does not name
COMMAND_LINE, SERVER = "command line", "server"
NOT_PEOPLE = (COMMAND_LINE, SERVER)  # actors in the audit log


# ---- which names are allowed ----


def is_name(name: str) -> bool:
    """Whether an account may have this name."""
    is_printable = all(unicodedata.category(letter)[0] != "C" and letter not in _INVISIBLE for letter in name)
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name == name.strip() and is_printable


def require_name(name: str) -> None:
    """Raises: ValueError for a name that no account may have."""
    if not is_name(name):
        raise ValueError(
            f"name is {name!a}; 1 to {MAX_NAME_CHARACTERS} printable characters without space around them were expected"
        )


def is_pseudonym(name: str) -> bool:
    """Whether a name identifies nobody: a pseudonym of this or another store, or "unknown"."""
    return bool(_PSEUDONYM.fullmatch(name) or _NOBODY.fullmatch(name))


def is_reserved(name: str) -> bool:
    """Whether the name is reserved, so that no account may have it."""
    return is_pseudonym(name) or name in NOT_PEOPLE


# ---- names that look alike ----


def look_alike(one: str, other: str) -> bool:
    """Whether people may mistake one name for the other: "Ann" and "ann", or one with another kind of space."""
    return _appearance(one) == _appearance(other)


def _appearance(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).split()).casefold()


# ---- names and pseudonyms, within the caller's transaction ----


def new_pseudonym() -> str:
    """Returns a random pseudonym. It is not derived from the name, so it cannot be traced back to one."""
    return f"labeler-{secrets.token_hex(6)}"


def pseudonym_of(connection: Connection, name: str) -> str:
    """Returns the pseudonym of a name, and creates one if needed."""
    found = known_pseudonym(connection, name)
    if found:
        return found
    values = {"pseudonym": name, "name": None} if is_pseudonym(name) else {"pseudonym": new_pseudonym(), "name": name}
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    # Another process may insert the same name at the same time.
    connection.execute(insert(labelers).values(**values, is_erased=False).on_conflict_do_nothing())
    return known_pseudonym(connection, name)


def known_pseudonym(connection: Connection, name: str) -> str:
    """Returns the pseudonym of `name`, which may be a pseudonym itself, or "" if the store does not know it."""
    column = labelers.c.pseudonym if is_pseudonym(name) else labelers.c.name
    return connection.scalar(select(labelers.c.pseudonym).where(column == name)) or ""


def name_in(pseudonym: ColumnElement[str]) -> ColumnElement[str]:
    """Returns an SQL expression for the name behind a column's pseudonym, or the pseudonym if it has no name."""
    found = select(labelers.c.name).where(labelers.c.pseudonym == pseudonym).scalar_subquery()
    return func.coalesce(found, pseudonym)


def pseudonyms(connection: Connection) -> dict[str, str]:
    """Returns the pseudonym of each name."""
    named = select(labelers.c.name, labelers.c.pseudonym).where(labelers.c.name.is_not(None))
    return {row.name: row.pseudonym for row in connection.execute(named)}


def num_erased(connection: Connection) -> int:
    """Counts the people who were erased."""
    return connection.scalar(select(func.count()).where(labelers.c.is_erased)) or 0
