"""Who may label and who leads: accounts, their keys, sessions, one-time links.

A closed account opens nothing: closing it ends its sessions and voids its link, and each way in checks its state too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from preferences import claims
from preferences.database import open_engines
from preferences.keys import KeyHasher, digest, new_key, new_token
from preferences.names import is_name, look_alike, require_name
from preferences.schema import accounts, instructions, invitations, people_acts, sessions

Role = Literal["lead", "labeler"]
State = Literal["new", "admitted", "closed"]
ROLES = ("lead", "labeler")
STATES = ("new", "admitted", "closed")
SESSION_SECONDS = 12 * 3_600.0
INVITATION_SECONDS = 7 * 24 * 3_600.0
COMMAND_LINE, SERVER = "command line", "server"  # who invites, where no lead does
FIRST_LEAD = "lead"
MAX_ACTS_SHOWN = 100
_CHANGING = 7_243_003  # the advisory lock of who changes accounts and links
_NUM_LEADS = select(func.count()).where(accounts.c.role == "lead", accounts.c.state != "closed")


@dataclass(frozen=True)
class Account:
    """Somebody who may sign in. `read_version` are the instructions that they said they have read."""

    name: str
    role: Role
    state: State
    read_version: str


@dataclass(frozen=True)
class Invitation:
    """What a one-time link is good for, until when (epoch seconds), and who gave it."""

    name: str
    role: Role
    expires_at: float
    invited_by: str


@dataclass(frozen=True)
class Act:
    """What somebody did to people or took out of the store; `subject` is a name or a batch."""

    actor: str
    act: str
    subject: str
    created_at: float


class People:
    """Accounts, sessions and invitations in the label store's database. `clock` gives epoch seconds."""

    def __init__(self, url_or_path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reader, self._writer = open_engines(url_or_path)
        self._hasher = KeyHasher()

    def close(self) -> None:
        self._reader.dispose()

    # ---- one-time links ----

    def invite(self, name: str, role: Role, *, by: str = COMMAND_LINE) -> str:
        """The code of a one-time link with which `name` gets an account, or a new key to theirs.

        It voids an older link of the name. Raises ValueError for a name or a role that cannot be, for a name that has
        the other role, is closed, or looks like another's.
        """
        require_name(name)
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; one of {ROLES} was expected")
        with self._writer.begin() as connection:
            _one_at_a_time(connection)
            self._require_free(connection, name, role)
            self._note(connection, by, "invited", name)
            return self._new_link(connection, name, role, by)

    def invite_first_lead(self) -> tuple[str, str] | None:
        """Name and code of a link for the first lead, the only such link there is; None where somebody leads."""
        with self._writer.begin() as connection:
            _one_at_a_time(connection)
            connection.execute(delete(invitations).where(invitations.c.invited_by == SERVER))
            if connection.scalar(_NUM_LEADS):
                return None
            for number in range(1, 1_000):
                name = FIRST_LEAD if number == 1 else f"{FIRST_LEAD}-{number}"
                try:
                    self._require_free(connection, name, "lead")
                except ValueError:
                    continue  # a closed account's, or a labeler's
                return name, self._new_link(connection, name, "lead", SERVER)
        raise ValueError(f"accounts: {FIRST_LEAD!r} and {FIRST_LEAD}-2 to {FIRST_LEAD}-999 are taken; invite a lead")

    def _new_link(self, connection: Connection, name: str, role: Role, by: str) -> str:
        code = new_token()
        connection.execute(delete(invitations).where(invitations.c.name == name))
        until = self._clock() + INVITATION_SECONDS
        values = {"code_hash": digest(code), "name": name, "role": role, "expires_at": until, "invited_by": by}
        connection.execute(insert(invitations).values(values))
        return code

    def _require_free(self, connection: Connection, name: str, role: Role) -> None:
        known = connection.execute(select(accounts.c.name, accounts.c.role, accounts.c.state)).all()
        for row in known:
            if row.name == name and row.role != role:
                raise ValueError(f"name {name!r} is a {row.role}'s; a {role} needs another")
            if row.name == name and row.state == "closed":
                raise ValueError(f"name {name!r}: the account is closed; admit it before inviting it again")
        invited = connection.scalars(select(invitations.c.name).where(invitations.c.expires_at > self._clock()))
        for other in (*(row.name for row in known), *invited):
            if other != name and look_alike(other, name):
                raise ValueError(f"name {name!r} looks like {other!r}, which is taken; another was expected")

    def links(self) -> list[Invitation]:
        """Links that can still be used, by name."""
        open_links = select(invitations).where(invitations.c.expires_at > self._clock()).order_by(invitations.c.name)
        with self._reader.begin() as connection:
            return [_as_invitation(row) for row in connection.execute(open_links)]

    def revoke(self, name: str, *, by: str = COMMAND_LINE) -> None:
        """Void the link of a name. Raises ValueError where it has none."""
        with self._writer.begin() as connection:
            voided = delete(invitations).where(invitations.c.name == name, invitations.c.expires_at > self._clock())
            if not is_name(name) or connection.execute(voided).rowcount == 0:
                raise ValueError(f"name {name!a} has no link that could be revoked")
            self._note(connection, by, "revoked", name)

    def invitation(self, code: str) -> Invitation | None:
        """What a link is good for; None where it was used, voided, ran out or never was."""
        statement = select(invitations).where(
            invitations.c.code_hash == digest(code), invitations.c.expires_at > self._clock()
        )
        with self._reader.begin() as connection:
            row = connection.execute(statement).one_or_none()
        return _as_invitation(row) if row is not None else None

    def accept(self, code: str) -> tuple[Account, str] | None:
        """Use a link up: the account, and its new key, which is not kept. None as for `invitation`, and for an account
        that was closed. Raises BusyError.
        """
        if self.invitation(code) is None:  # before a hash takes its memory
            return None
        key = new_key()
        key_hash = self._hasher.hash(key)
        with self._writer.begin() as connection:
            _one_at_a_time(connection)
            found = delete(invitations).where(
                invitations.c.code_hash == digest(code), invitations.c.expires_at > self._clock()
            )
            link = connection.execute(found.returning(invitations.c.name, invitations.c.role)).one_or_none()
            account = self._join(connection, link.name, link.role, key_hash) if link is not None else None
        return (account, key) if account is not None else None

    def _join(self, connection: Connection, name: str, role: Role, key_hash: str) -> Account | None:
        """Give a name this key, and an account where it has none; None where its account does not allow it."""
        held = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
        if held is None:
            new = {"name": name, "role": role, "key_hash": key_hash, "state": "new", "read_version": ""}
            connection.execute(insert(accounts).values(**new, created_at=self._clock()))
        elif held.state == "closed" or held.role != role:
            return None
        else:  # a new key ends what the old one opened
            connection.execute(update(accounts).where(accounts.c.name == name).values(key_hash=key_hash))
            connection.execute(delete(sessions).where(sessions.c.account == name))
        if role == "lead":
            connection.execute(delete(invitations).where(invitations.c.invited_by == SERVER))
        self._note(connection, name, "joined", name)
        return _as_account(held) if held is not None else Account(name, role, "new", "")

    # ---- accounts ----

    def has_lead(self) -> bool:
        with self._reader.begin() as connection:
            return bool(connection.scalar(_NUM_LEADS))

    def accounts(self) -> list[Account]:
        """By name."""
        with self._reader.begin() as connection:
            rows = connection.execute(select(accounts).order_by(accounts.c.name)).all()
        return [_as_account(row) for row in rows]

    def account(self, name: str) -> Account | None:
        with self._reader.begin() as connection:
            row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
        return _as_account(row) if row is not None else None

    def set_state(self, name: str, state: State, *, by: str = COMMAND_LINE) -> None:
        """Admit somebody, or close their account: its sessions end, its link is void, its leases go to others.

        Raises ValueError for an unknown name.
        """
        if state not in STATES:
            raise ValueError(f"state is {state!r}; one of {STATES} was expected")
        with self._writer.begin() as connection:
            _one_at_a_time(connection)
            changed = update(accounts).where(accounts.c.name == name).values(state=state)
            if not is_name(name) or connection.execute(changed).rowcount == 0:
                raise ValueError(f"name {name!a} has no account")
            if state == "closed":
                connection.execute(delete(sessions).where(sessions.c.account == name))
                connection.execute(delete(invitations).where(invitations.c.name == name))
                claims.free_all(connection, name)
            self._note(connection, by, state, name)

    def admit_screened(self, name: str) -> None:
        """Admit a new labeler who passed the screening; an account that a lead closed meanwhile stays closed."""
        is_new = (accounts.c.name == name, accounts.c.state == "new")
        with self._writer.begin() as connection:
            connection.execute(update(accounts).where(*is_new).values(state="admitted"))

    def has_read(self, name: str, version: str) -> None:
        """Note that somebody said they have read the instructions."""
        with self._writer.begin() as connection:
            connection.execute(update(accounts).where(accounts.c.name == name).values(read_version=version))

    # ---- sessions ----

    def sign_in(self, name: str, key: str) -> str | None:
        """A session's token, or None for a name and key that do not go together or an account that is closed.

        It takes as long for a name that has no account. Raises BusyError.
        """
        if not is_name(name):
            return None
        with self._reader.begin() as connection:
            row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
        if not self._hasher.verify(row.key_hash if row is not None else "", key):
            return None
        return self._open_session(name)

    def open_session(self, name: str) -> str:
        """A session's token for an account. Raises ValueError for one that is closed or not there."""
        token = self._open_session(name)
        if token is None:
            raise ValueError(f"name {name!a} has no account, or a closed one")
        return token

    def _open_session(self, name: str) -> str | None:
        token, now = new_token(), self._clock()
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= now))  # those that ran out
            state = connection.scalar(select(accounts.c.state).where(accounts.c.name == name).with_for_update())
            if state is None or state == "closed":
                return None
            new = {"token_hash": digest(token), "account": name, "expires_at": now + SESSION_SECONDS}
            connection.execute(insert(sessions).values(new))
        return token

    def session(self, token: str) -> Account | None:
        """Whose session this is; None where it ended."""
        statement = (
            select(accounts)
            .join(sessions, sessions.c.account == accounts.c.name)
            .where(sessions.c.token_hash == digest(token), sessions.c.expires_at > self._clock())
            .where(accounts.c.state != "closed")
        )
        with self._reader.begin() as connection:
            row = connection.execute(statement).one_or_none()
        return _as_account(row) if row is not None else None

    def sign_out(self, token: str) -> None:
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.token_hash == digest(token)))

    # ---- what was done ----

    def note(self, actor: str, act: str, subject: str) -> None:
        """Keep that somebody did this, for good."""
        with self._writer.begin() as connection:
            self._note(connection, actor, act, subject)

    def _note(self, connection: Connection, actor: str, act: str, subject: str) -> None:
        values = {"actor": actor, "act": act, "subject": subject, "created_at": self._clock()}
        connection.execute(insert(people_acts).values(values))

    def acts(self) -> list[Act]:
        """The last acts, the newest first."""
        newest = select(people_acts).order_by(people_acts.c.act_id.desc()).limit(MAX_ACTS_SHOWN)
        with self._reader.begin() as connection:
            rows = connection.execute(newest).all()
        return [Act(row.actor, row.act, row.subject, row.created_at) for row in rows]

    # ---- instructions ----

    def keep_instructions(self, version: str, text: str, flags: tuple[str, ...]) -> None:
        """Keep what a version of the instructions said, so that a judgment's can be read years later."""
        values = {"version": version, "text": text, "flags": list(flags), "created_at": self._clock()}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(instructions).values(values))
        except IntegrityError:  # kept already
            return


def _one_at_a_time(connection: Connection) -> None:
    """Who changes accounts and links takes turns. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_CHANGING)))


def _as_account(row: Row[Any]) -> Account:
    return Account(row.name, row.role, row.state, row.read_version)


def _as_invitation(row: Row[Any]) -> Invitation:
    return Invitation(row.name, row.role, row.expires_at, row.invited_by)
