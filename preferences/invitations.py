"""One-time links: SQL over `invitations`, within the caller's transaction. A name has at most one link."""

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, insert, select

from preferences.keys import digest, new_token
from preferences.names import look_alike
from preferences.schema import accounts, invitations

Role = Literal["lead", "labeler"]

INVITATION_SECONDS = 7 * 24 * 3_600.0
SERVER = "server"  # who invites the first lead
FIRST_LEAD = "lead"


@dataclass(frozen=True)
class Invitation:
    """What a one-time link gives, until when (seconds since the epoch), and who made it."""

    name: str
    role: Role
    expires_at: float
    invited_by: str


def new_link(connection: Connection, name: str, role: Role, by: str, now: float) -> str:
    """Makes a link, which voids an older one of the name. Returns its code."""
    code = new_token()
    connection.execute(delete(invitations).where(invitations.c.name == name))
    until = now + INVITATION_SECONDS
    values = {"code_hash": digest(code), "name": name, "role": role, "expires_at": until, "invited_by": by}
    connection.execute(insert(invitations).values(values))
    return code


def first_lead_link(connection: Connection, now: float) -> tuple[str, str]:
    """Makes the link for a first lead. Returns its name and code.

    Raises: ValueError if every candidate name is taken.
    """
    for number in range(1, 1_000):
        name = FIRST_LEAD if number == 1 else f"{FIRST_LEAD}-{number}"
        try:
            require_free(connection, name, "lead", now)
        except ValueError:
            continue  # the name of a labeler or of a closed account
        return name, new_link(connection, name, "lead", SERVER, now)
    raise ValueError(f"accounts: {FIRST_LEAD!r} and {FIRST_LEAD}-2 to {FIRST_LEAD}-999 are taken; invite a lead")


def require_free(connection: Connection, name: str, role: Role, now: float) -> None:
    """Raises: ValueError for a name that has the other role, is closed, or looks like another name."""
    known = connection.execute(select(accounts.c.name, accounts.c.role, accounts.c.state)).all()
    for row in known:
        if row.name == name and row.role != role:
            raise ValueError(f"name {name!r} belongs to a {row.role}; a {role} needs another name")
        if row.name == name and row.state == "closed":
            raise ValueError(f"name {name!r}: the account is closed; admit it before inviting it again")
    invited = connection.scalars(select(invitations.c.name).where(invitations.c.expires_at > now))
    for other in (*(row.name for row in known), *invited):
        if other != name and look_alike(other, name):
            raise ValueError(f"name {name!r} looks like {other!r}, which is taken; another name was expected")


def open_links(connection: Connection, now: float) -> list[Invitation]:
    """Returns the links that can still be used, by name."""
    statement = select(invitations).where(invitations.c.expires_at > now).order_by(invitations.c.name)
    return [_as_invitation(row) for row in connection.execute(statement)]


def find(connection: Connection, code: str, now: float) -> Invitation | None:
    """Returns the invitation of a code, or None if it was used, was voided, ran out or never existed."""
    statement = select(invitations).where(invitations.c.code_hash == digest(code), invitations.c.expires_at > now)
    row = connection.execute(statement).one_or_none()
    return _as_invitation(row) if row is not None else None


def use(connection: Connection, code: str, now: float) -> Invitation | None:
    """Like `find`, and deletes the link."""
    found = find(connection, code, now)
    if found is None:
        return None
    used = delete(invitations).where(invitations.c.code_hash == digest(code))
    return found if connection.execute(used).rowcount else None


def void(connection: Connection, name: str, now: float) -> bool:
    """Deletes the link of a name. Returns whether there was one that could be used."""
    deleted = delete(invitations).where(invitations.c.name == name, invitations.c.expires_at > now)
    return bool(connection.execute(deleted).rowcount)


def _as_invitation(row: Row[Any]) -> Invitation:
    return Invitation(row.name, row.role, row.expires_at, row.invited_by)
