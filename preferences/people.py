"""Who may label and who leads: accounts, their keys, sessions, one-time links.

A key is shown once and kept as its argon2 hash. Sessions and links are 256 random bits, of which SHA-256 is kept.
"""

import hashlib
import secrets
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from argon2 import PasswordHasher
from argon2.exceptions import VerificationError
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from preferences.database import open_engines
from preferences.schema import accounts, instructions, invitations, sessions

Role = Literal["lead", "labeler"]
State = Literal["new", "admitted", "closed"]
ROLES = ("lead", "labeler")
STATES = ("new", "admitted", "closed")
SESSION_SECONDS = 12 * 3_600.0
INVITATION_SECONDS = 7 * 24 * 3_600.0
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True)
class Account:
    """Somebody who may sign in. `read_version` are the instructions that they said they have read."""

    name: str
    role: Role
    state: State
    read_version: str


@dataclass(frozen=True)
class Invitation:
    """What a one-time link is good for."""

    name: str
    role: Role


class People:
    """Accounts, sessions and invitations in the label store's database. `clock` gives epoch seconds."""

    def __init__(self, url_or_path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reader, self._writer = open_engines(url_or_path)
        self._hasher = PasswordHasher()
        # Verified where there is no such account, so that the time taken does not tell which names exist.
        self._nobody = self._hasher.hash(secrets.token_urlsafe())

    def close(self) -> None:
        self._reader.dispose()

    # ---- invitations ----

    def invite(self, name: str, role: Role) -> str:
        """The code of a one-time link with which `name` gets an account, or a new key to theirs.

        Raises ValueError for a name or a role that cannot be, and for a name that has the other role.
        """
        require_name(name)
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; one of {ROLES} was expected")
        code = secrets.token_urlsafe(32)
        with self._writer.begin() as connection:
            held = connection.scalar(select(accounts.c.role).where(accounts.c.name == name))
            if held is not None and held != role:
                raise ValueError(f"name {name!r} is a {held}'s; a {role} needs another")
            until = self._clock() + INVITATION_SECONDS
            values = {"code_hash": _digest(code), "name": name, "role": role, "expires_at": until}
            connection.execute(insert(invitations).values(values))
        return code

    def invitation(self, code: str) -> Invitation | None:
        """What a link is good for; None where it was used, ran out or never was."""
        statement = select(invitations).where(
            invitations.c.code_hash == _digest(code), invitations.c.expires_at > self._clock()
        )
        with self._reader.begin() as connection:
            row = connection.execute(statement).one_or_none()
        return Invitation(row.name, row.role) if row is not None else None

    def accept(self, code: str) -> tuple[Account, str] | None:
        """Use a link up: the account, and its new key, which is not kept. None as for `invitation`."""
        key = secrets.token_urlsafe(24)
        key_hash = self._hasher.hash(key)
        with self._writer.begin() as connection:
            found = delete(invitations).where(
                invitations.c.code_hash == _digest(code), invitations.c.expires_at > self._clock()
            )
            row = connection.execute(found.returning(invitations.c.name, invitations.c.role)).one_or_none()
            if row is None:
                return None
            mine = accounts.c.name == row.name
            if connection.execute(update(accounts).where(mine).values(key_hash=key_hash)).rowcount == 0:
                new = {"name": row.name, "role": row.role, "key_hash": key_hash, "state": "new", "read_version": ""}
                connection.execute(insert(accounts).values(**new, created_at=self._clock()))
            else:  # a new key ends what the old one opened
                connection.execute(delete(sessions).where(sessions.c.account == row.name))
        account = self.account(row.name)
        assert account is not None, f"{row.name!r} has just been given an account"
        return account, key

    # ---- accounts ----

    def has_lead(self) -> bool:
        with self._reader.begin() as connection:
            statement = select(func.count()).where(accounts.c.role == "lead", accounts.c.state != "closed")
            return bool(connection.scalar(statement))

    def accounts(self) -> list[Account]:
        """By name."""
        with self._reader.begin() as connection:
            rows = connection.execute(select(accounts).order_by(accounts.c.name)).all()
        return [Account(row.name, row.role, row.state, row.read_version) for row in rows]

    def account(self, name: str) -> Account | None:
        with self._reader.begin() as connection:
            row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
        return Account(row.name, row.role, row.state, row.read_version) if row is not None else None

    def set_state(self, name: str, state: State) -> None:
        """Admit somebody, or close their account and end their sessions. Raises ValueError for an unknown name."""
        if state not in STATES:
            raise ValueError(f"state is {state!r}; one of {STATES} was expected")
        with self._writer.begin() as connection:
            changed = connection.execute(update(accounts).where(accounts.c.name == name).values(state=state))
            if changed.rowcount == 0:
                raise ValueError(f"name {name!r} has no account")
            if state == "closed":
                connection.execute(delete(sessions).where(sessions.c.account == name))

    def has_read(self, name: str, version: str) -> None:
        """Note that somebody said they have read the instructions."""
        with self._writer.begin() as connection:
            connection.execute(update(accounts).where(accounts.c.name == name).values(read_version=version))

    # ---- sessions ----

    def sign_in(self, name: str, key: str) -> str | None:
        """A session's token, or None for a name and key that do not go together or an account that is closed."""
        with self._reader.begin() as connection:
            row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
        try:
            self._hasher.verify(row.key_hash if row is not None else self._nobody, key)
        except VerificationError:
            return None
        return self.open_session(name) if row is not None and row.state != "closed" else None

    def open_session(self, name: str) -> str:
        """A session's token for an account; sessions that ran out are forgotten."""
        token, now = secrets.token_urlsafe(32), self._clock()
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= now))
            new = {"token_hash": _digest(token), "account": name, "expires_at": now + SESSION_SECONDS}
            connection.execute(insert(sessions).values(new))
        return token

    def session(self, token: str) -> Account | None:
        """Whose session this is; None where it ended."""
        statement = (
            select(accounts)
            .join(sessions, sessions.c.account == accounts.c.name)
            .where(sessions.c.token_hash == _digest(token), sessions.c.expires_at > self._clock())
        )
        with self._reader.begin() as connection:
            row = connection.execute(statement).one_or_none()
        return Account(row.name, row.role, row.state, row.read_version) if row is not None else None

    def sign_out(self, token: str) -> None:
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.token_hash == _digest(token)))

    # ---- instructions ----

    def keep_instructions(self, version: str, text: str, flags: tuple[str, ...]) -> None:
        """Keep what a version of the instructions said, so that a judgment's can be read years later."""
        values = {"version": version, "text": text, "flags": list(flags), "created_at": self._clock()}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(instructions).values(values))
        except IntegrityError:  # kept already
            return


def require_name(name: str) -> None:
    """Raises ValueError for what cannot name an account: it stands on pages and in data files."""
    printable = all(unicodedata.category(character)[0] != "C" for character in name)
    if not name or name != name.strip() or len(name) > MAX_NAME_CHARACTERS or not printable:
        raise ValueError(
            f"name is {name!r}; 1 to {MAX_NAME_CHARACTERS} printable characters without space around them were expected"
        )


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
