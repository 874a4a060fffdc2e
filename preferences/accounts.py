"""Accounts of leads and labelers: keys, sessions, one-time links, and the audit log.

A closed account has no access: closing it ends its sessions and voids its link, and each sign-in and request checks its
state too. A name has at most one link. The audit log stores people under their pseudonyms and shows them by name,
unless they were erased.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from preferences import leases, personal_data, recording
from preferences.assignment import as_tags
from preferences.database import open_engines
from preferences.keys import KeyHasher, digest, new_key, new_token
from preferences.names import (
    COMMAND_LINE,
    SERVER,
    is_name,
    is_reserved,
    look_alike,
    name_in,
    pseudonym_of,
    pseudonyms,
    require_name,
)
from preferences.schema import accounts, audit_log, instructions, invitations, sessions

Role = Literal["lead", "labeler"]
State = Literal["new", "admitted", "closed"]
ROLES = ("lead", "labeler")
STATES = ("new", "admitted", "closed")

SESSION_SECONDS = 12 * 3_600.0
IDLE_SECONDS = 2 * 3_600.0  # a session that no request has used for this long ends
INVITATION_SECONDS = 7 * 24 * 3_600.0
FIRST_LEAD = "lead"
MAX_EVENTS_SHOWN = 100
MAX_DAILY_QUOTA = 100_000
SIGNED_IN, SIGN_IN_FAILED, UNKNOWN = "signed in", "refused a sign-in of", "an unknown name"
_CHANGING = 7_243_003  # key of the advisory lock for changing accounts and links
_NUM_LEADS = select(func.count()).where(accounts.c.role == "lead", accounts.c.state != "closed")


@dataclass(frozen=True)
class Account:
    """Somebody who may sign in. `read_version` is the version of the instructions that they confirmed reading."""

    name: str
    role: Role
    state: State
    read_version: str
    tags: tuple[str, ...] = ()  # which tasks they may get; see `preferences.assignment`
    daily_quota: int = 0  # answers per day; 0 = the configuration's


@dataclass(frozen=True)
class Invitation:
    """A one-time link: the account it gives, when it expires (seconds since the epoch), and who made it."""

    name: str
    role: Role
    expires_at: float
    invited_by: str


@dataclass(frozen=True)
class AuditEvent:
    """A change, an export or a sign-in, and who made it. `subject` is a name, a batch or a task."""

    actor: str
    action: str
    subject: str
    created_at: float


class AccountClosedError(Exception):
    """Name and key match, but the account is closed."""


class Accounts:
    """Accounts, sessions and invitations in the label store's database. `clock` returns seconds since the epoch."""

    def __init__(self, url_or_path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._reader, self._writer = open_engines(url_or_path)
        self._hasher = KeyHasher()
        self.num_changes = 0  # of accounts and sessions by this process; those who wait look at it
        # by the hash of a session's token; in memory, so that reading never writes
        self._used_at: dict[str, float] = {}

    def close(self) -> None:
        self._reader.dispose()

    @contextmanager
    def _changing(self) -> Iterator[Connection]:
        """Opens a transaction that changes accounts, sessions or links. They are changed one at a time."""
        with self._writer.begin() as connection:
            if connection.dialect.name == "postgresql":  # SQLite has a single writer anyway
                connection.execute(select(func.pg_advisory_xact_lock(_CHANGING)))
            yield connection
        self.num_changes += 1

    # ---- one-time links ----

    def invite(self, name: str, role: Role, *, by: str = COMMAND_LINE) -> str:
        """Returns the code of a one-time link that gives `name` an account, or a new key for an existing account.

        It voids any older link of the name.

        Raises: ValueError for a malformed name or role, and for a name that has the other role, is closed, or looks
        like another name.
        """
        return self.invite_all([name], role, by=by)[0]

    def invite_all(self, names: Sequence[str], role: Role, *, tags: Iterable[object] = (), by: str) -> list[str]:
        """Invites all of these people or nobody, and adds `tags` to theirs. Returns the codes of their links.

        Raises: ValueError as `invite`, and for a bad tag.
        """
        wanted = as_tags("tags", tags)
        for name in names:
            require_name(name)
            if is_reserved(name):
                raise ValueError(
                    f"name {name!r} is reserved, for pseudonyms or for the audit log; another was expected"
                )
        if role not in ROLES:
            raise ValueError(f"role is {role!r}; one of {ROLES} was expected")
        with self._changing() as connection:
            return [self._invite(connection, name, role, wanted, by) for name in names]

    def _invite(self, connection: Connection, name: str, role: Role, tags: tuple[str, ...], by: str) -> str:
        now = self._clock()
        _require_free(connection, name, role, now)
        if tags:  # a new account holds them, and gets its key from the link
            found = connection.scalar(select(accounts.c.tags).where(accounts.c.name == name))
            if found is None:
                _insert(connection, name, role, now)
            both = list(as_tags("tags", {*(found or ()), *tags}))
            connection.execute(update(accounts).where(accounts.c.name == name).values(tags=both))
        self._log_about(connection, by, f"gave {', '.join(tags)} to and invited" if tags else "invited", name)
        return _new_link(connection, name, role, by, now)

    def invite_first_lead(self) -> tuple[str, str] | None:
        """Returns name and code of the only link for a first lead; None if there is a lead or one is invited."""
        with self._changing() as connection:
            connection.execute(delete(invitations).where(invitations.c.invited_by == SERVER))
            is_invited = any(link.role == "lead" for link in _open_links(connection, self._clock()))
            if is_invited or connection.scalar(_NUM_LEADS):
                return None
            return _first_lead_link(connection, self._clock())

    def links(self) -> list[Invitation]:
        """Returns the links that can still be used, by name."""
        with self._reader.begin() as connection:
            return _open_links(connection, self._clock())

    def revoke(self, name: str, *, by: str = COMMAND_LINE) -> None:
        """Voids the link of a name. Raises: ValueError if it has none."""
        is_open = (invitations.c.name == name, invitations.c.expires_at > self._clock())
        with self._writer.begin() as connection:
            if not is_name(name) or not connection.execute(delete(invitations).where(*is_open)).rowcount:
                raise ValueError(f"name {name!a} has no link that could be revoked")
            self._log_about(connection, by, "revoked", name)

    def invitation(self, code: str) -> Invitation | None:
        """Returns a link's invitation, or None if the link was used, was voided, expired or never existed."""
        with self._reader.begin() as connection:
            return _find_link(connection, code, self._clock())

    def accept(self, code: str) -> tuple[Account, str] | None:
        """Redeems a link. Returns the account and its new key; the store keeps only the key's hash.

        Returns None for a link that cannot be used and for a closed account. Raises: BusyError.
        """
        if self.invitation(code) is None:  # check before hashing, which takes memory
            return None
        key = new_key()
        key_hash = self._hasher.hash(key)
        with self._changing() as connection:
            link = _find_link(connection, code, self._clock())
            used = delete(invitations).where(invitations.c.code_hash == digest(code))
            is_usable = link is not None and connection.execute(used).rowcount
            account = self._join(connection, link.name, link.role, key_hash) if link is not None and is_usable else None
        return (account, key) if account is not None else None

    def _join(self, connection: Connection, name: str, role: Role, key_hash: str) -> Account | None:
        """Sets the key of a name and creates its account if needed. Returns None if the account does not allow it."""
        found = _row_of(connection, name)
        if found is None:
            _insert(connection, name, role, self._clock(), key_hash=key_hash)
        elif found.state == "closed" or found.role != role:
            return None
        else:  # a new key ends the sessions of the old one
            connection.execute(update(accounts).where(accounts.c.name == name).values(key_hash=key_hash))
            connection.execute(delete(sessions).where(sessions.c.account == name))
        if role == "lead":
            connection.execute(delete(invitations).where(invitations.c.invited_by == SERVER))
        self._log_about(connection, name, "joined", name)
        return _as_account(found) if found is not None else Account(name, role, "new", "")

    # ---- accounts ----

    def end_access_of_copies(self, place: int) -> int:
        """Ends all sessions and links if the store was last served at another place (`database.place_of`).

        Returns how many ended, or -1 if the store is where it was or has not been served.
        """
        if not place:
            return -1
        with self._changing() as connection:
            before = connection.exec_driver_sql("PRAGMA user_version").scalar() or place
            connection.exec_driver_sql(f"PRAGMA user_version = {place}")
            if before == place:
                return -1
            return sum(connection.execute(delete(table)).rowcount for table in (sessions, invitations))

    def all(self) -> list[Account]:
        """Returns all accounts, by name."""
        with self._reader.begin() as connection:
            rows = connection.execute(select(accounts).order_by(accounts.c.name)).all()
        return [_as_account(row) for row in rows]

    def account(self, name: str) -> Account | None:
        with self._reader.begin() as connection:
            row = _row_of(connection, name)
        return _as_account(row) if row is not None else None

    def set_state(self, name: str, state: State, *, by: str = COMMAND_LINE) -> None:
        """Admits somebody, or closes their account, which ends sessions, voids the link and frees leased tasks.

        Raises: ValueError for an unknown name.
        """
        if state not in STATES:
            raise ValueError(f"state is {state!r}; one of {STATES} was expected")
        with self._changing() as connection:
            changed = update(accounts).where(accounts.c.name == name).values(state=state)
            if not is_name(name) or connection.execute(changed).rowcount == 0:
                raise ValueError(f"name {name!a} has no account")
            if state == "closed":
                connection.execute(delete(sessions).where(sessions.c.account == name))
                connection.execute(delete(invitations).where(invitations.c.name == name))
                leases.release_all(connection, name, pseudonym_of(connection, name))
            self._log_about(connection, by, state, name)

    def set_assignment(self, name: str, tags: Iterable[object], daily_quota: int, *, by: str = COMMAND_LINE) -> None:
        """Sets a person's tags, and how many answers per day they may give (0 = the configuration's number).

        Raises: ValueError for an unknown name, a bad tag, and an impossible number.
        """
        wanted = as_tags("tags", tags)
        if not 0 <= daily_quota <= MAX_DAILY_QUOTA:
            raise ValueError(f"daily_quota is {daily_quota}; 0 to {MAX_DAILY_QUOTA:,} was expected")
        changed = update(accounts).where(accounts.c.name == name)
        with self._writer.begin() as connection:
            if (
                not is_name(name)
                or not connection.execute(changed.values(tags=list(wanted), daily_quota=daily_quota)).rowcount
            ):
                raise ValueError(f"name {name!a} has no account")
            quota = f"{daily_quota} answers per day" if daily_quota else "the default number of answers per day"
            self._log_about(connection, by, f"set tags to {', '.join(wanted) or 'none'} and {quota} for", name)

    def admit_screened(self, name: str) -> None:
        """Admits a new labeler who passed the screening. An account that a lead closed meanwhile stays closed."""
        is_new = (accounts.c.name == name, accounts.c.state == "new")
        with self._writer.begin() as connection:
            connection.execute(update(accounts).where(*is_new).values(state="admitted"))

    def confirm_reading(self, name: str, version: str) -> None:
        """Stores that somebody confirmed reading this version of the instructions."""
        with self._writer.begin() as connection:
            connection.execute(update(accounts).where(accounts.c.name == name).values(read_version=version))

    # ---- sessions ----

    def sign_in(self, name: str, key: str) -> str | None:
        """Returns a session's token, or None for a wrong name or key.

        A name without an account takes just as long to refuse, and only the right key learns that an account is closed.
        Raises: BusyError, AccountClosedError.
        """
        if not is_name(name):
            return None
        with self._reader.begin() as connection:
            row = _row_of(connection, name)
        if self._hasher.verify(row.key_hash if row is not None else "", key):
            return self._open_own_session(name)
        with self._writer.begin() as connection:  # for unknown names too, so that the time does not give them away
            # An unknown name is not stored, because somebody may have typed their key there.
            subject = pseudonym_of(connection, name) if row is not None else UNKNOWN
            recording.log(connection, SERVER, SIGN_IN_FAILED, subject, self._clock())
        return None

    def sign_in_with(self, issuer: str, subject: str, name: str, role: Role) -> str:
        """Returns a session's token for somebody for whom an OpenID provider vouches, as `subject` of `issuer`.

        The first time it creates an account with this name and role, without a key. Later the person keeps the name
        and gets the role. Raises: ValueError for a name that is taken or malformed, AccountClosedError.
        """
        identity = digest(f"{issuer}\0{subject}")
        with self._changing() as connection:
            found = connection.execute(select(accounts).where(accounts.c.identity == identity)).one_or_none()
            if found is None:
                self._join_with(connection, identity, name, role)
            else:
                name = found.name
                if found.role != role and found.state != "closed":
                    self._set_role(connection, name, role)
        return self._open_own_session(name)

    def apply_oidc(self, domains: Collection[str], leads: Collection[str]) -> None:
        """Makes labelers of company accounts that may no longer lead; those outside `domains` lose sessions, key, link.

        It goes by the account's name, which is the address at the first sign-in; the next sign-in goes by the new one.
        """
        with self._changing() as connection:
            for row in connection.execute(select(accounts).where(accounts.c.identity != "")).all():
                if row.role == "lead" and row.name not in leads:
                    self._set_role(connection, row.name, "labeler")
                if row.name.rpartition("@")[2] not in domains:
                    connection.execute(delete(sessions).where(sessions.c.account == row.name))
                    connection.execute(delete(invitations).where(invitations.c.name == row.name))
                    connection.execute(update(accounts).where(accounts.c.name == row.name).values(key_hash=""))

    def _set_role(self, connection: Connection, name: str, role: Role) -> None:
        """Changes a role, which ends the account's sessions and voids its link."""
        connection.execute(update(accounts).where(accounts.c.name == name).values(role=role))
        connection.execute(delete(sessions).where(sessions.c.account == name))
        connection.execute(delete(invitations).where(invitations.c.name == name))
        self._log_about(connection, SERVER, f"made a {role} of", name)

    def _join_with(self, connection: Connection, identity: str, name: str, role: Role) -> None:
        require_name(name)
        found = _row_of(connection, name)
        if is_reserved(name) or (found is not None and (found.key_hash or found.identity)):
            raise ValueError(f"name {name!r} is taken by another account; a lead can erase that one")
        _require_free(connection, name, role, self._clock())
        if found is not None:  # a lead invited the address, and nobody has used the link
            connection.execute(update(accounts).where(accounts.c.name == name).values(identity=identity))
        else:
            _insert(connection, name, role, self._clock(), identity=identity)
        if role == "lead":
            connection.execute(delete(invitations).where(invitations.c.invited_by == SERVER))
        self._log_about(connection, name, "joined", name)

    def open_session(self, name: str) -> str:
        """Returns a session's token for an account. Raises: ValueError if it is closed or does not exist."""
        token = self._open_session(name)
        if token is None:
            raise ValueError(f"name {name!a} has no account, or a closed one")
        return token

    def _open_own_session(self, name: str) -> str:
        token = self._open_session(name)
        if token is None:
            raise AccountClosedError("your account is closed; ask a labeling lead to admit you")
        return token

    def _open_session(self, name: str) -> str | None:
        token, now = new_token(), self._clock()
        with self._writer.begin() as connection:
            connection.execute(delete(sessions).where(sessions.c.expires_at <= now))  # clean up expired sessions
            state = connection.scalar(select(accounts.c.state).where(accounts.c.name == name).with_for_update())
            if state is None or state == "closed":
                return None
            new = {"token_hash": digest(token), "account": name, "expires_at": now + SESSION_SECONDS}
            connection.execute(insert(sessions).values(new))
            self._log_about(connection, name, SIGNED_IN, name)
            current = set(connection.scalars(select(sessions.c.token_hash)))
        used_at = self._used_at.copy() | {digest(token): now}
        self._used_at = {one: at for one, at in used_at.items() if one in current}
        return token

    def session(self, token: str) -> Account | None:
        """Returns the account of a session, or None if the session has ended. Each call counts as use of it."""
        hashed, now = digest(token), self._clock()
        statement = (
            select(accounts)
            .join(sessions, sessions.c.account == accounts.c.name)
            .where(sessions.c.token_hash == hashed, sessions.c.expires_at > now)
            .where(accounts.c.state != "closed")
        )
        with self._reader.begin() as connection:
            row = connection.execute(statement).one_or_none()
        if row is None:
            return None
        if now - self._used_at.get(hashed, now) > IDLE_SECONDS:
            self.sign_out(token)
            return None
        self._used_at[hashed] = now
        return _as_account(row)

    def sign_out(self, token: str) -> None:
        with self._changing() as connection:
            connection.execute(delete(sessions).where(sessions.c.token_hash == digest(token)))

    # ---- audit log ----

    def log(self, actor: str, action: str, subject: str) -> None:
        """Appends an event about a batch or a task to the audit log."""
        with self._writer.begin() as connection:
            recording.log(connection, actor, action, subject, self._clock())

    def _log_about(self, connection: Connection, actor: str, action: str, name: str) -> None:
        recording.log(connection, actor, action, pseudonym_of(connection, name), self._clock())

    def audit_log(self, *, sign_ins: bool = False) -> list[AuditEvent]:
        """Returns the last events, newest first: sign-ins and refused ones, or everything else."""
        names = name_in(audit_log.c.actor), name_in(audit_log.c.subject)
        is_sign_in = audit_log.c.act.in_((SIGNED_IN, SIGN_IN_FAILED))
        found = select(names[0], audit_log.c.act, names[1], audit_log.c.created_at)
        newest = found.where(is_sign_in if sign_ins else ~is_sign_in).order_by(audit_log.c.act_id.desc())
        with self._reader.begin() as connection:
            return [AuditEvent(*row) for row in connection.execute(newest.limit(MAX_EVENTS_SHOWN))]

    # ---- personal data ----

    def pseudonyms(self) -> dict[str, str]:
        """Returns the pseudonym of everybody whom the store names."""
        with self._reader.begin() as connection:
            return pseudonyms(connection)

    def held_about(self, name: str, *, by: str = COMMAND_LINE) -> dict[str, Any]:
        """Returns everything held about a person, and logs that `by` has read it; see `personal_data.held_about`."""
        with self._writer.begin() as connection:
            found = personal_data.held_about(connection, name)
            self._log_about(connection, by, "exported the data of", name)
        return found

    def erase(self, name: str, *, by: str = COMMAND_LINE) -> str:
        """Erases a person; judgments stay under the pseudonym, which is returned. See `personal_data.erase`.

        It rewrites the database's files, and labelers wait meanwhile (about a second per 100 MB).

        Raises: ValueError for an unknown name.
        """
        with self._changing() as connection:
            who = personal_data.erase(connection, name)
            recording.log(connection, by if by != name else who, "erased", who, self._clock())
        personal_data.purge(self._writer)
        return who

    # ---- instructions ----

    def store_instructions(self, version: str, text: str, flags: tuple[str, ...]) -> None:
        """Stores what a version of the instructions said, so that it can be read years after the judgments."""
        values = {"version": version, "text": text, "flags": list(flags), "created_at": self._clock()}
        try:
            with self._writer.begin() as connection:
                connection.execute(insert(instructions).values(values))
        except IntegrityError:  # stored already
            return

    def instructions_text(self, version: str) -> str | None:
        """Returns what a version of the instructions said, or None for a version that is not stored."""
        with self._reader.begin() as connection:
            return connection.scalar(select(instructions.c.text).where(instructions.c.version == version))


def _row_of(connection: Connection, name: str) -> Row[Any] | None:
    return connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()


def _insert(connection: Connection, name: str, role: Role, now: float, **values: str) -> None:
    new = {"name": name, "role": role, "key_hash": "", "state": "new", "read_version": "", "created_at": now}
    connection.execute(insert(accounts).values(new | values))


def _as_account(row: Row[Any]) -> Account:
    return Account(row.name, row.role, row.state, row.read_version, tuple(row.tags), row.daily_quota)


# ---- one-time links ----


def _new_link(connection: Connection, name: str, role: Role, by: str, now: float) -> str:
    """Makes a link and voids any older link of the name. Returns the new link's code."""
    code = new_token()
    connection.execute(delete(invitations).where(invitations.c.name == name))
    until = now + INVITATION_SECONDS
    values = {"code_hash": digest(code), "name": name, "role": role, "expires_at": until, "invited_by": by}
    connection.execute(insert(invitations).values(values))
    return code


def _first_lead_link(connection: Connection, now: float) -> tuple[str, str]:
    """Makes the link for a first lead. Returns its name and code.

    Raises: ValueError if every candidate name is taken.
    """
    for number in range(1, 1_000):
        name = FIRST_LEAD if number == 1 else f"{FIRST_LEAD}-{number}"
        try:
            _require_free(connection, name, "lead", now)
        except ValueError:
            continue  # the name of a labeler or of a closed account
        return name, _new_link(connection, name, "lead", SERVER, now)
    raise ValueError(f"accounts: {FIRST_LEAD!r} and {FIRST_LEAD}-2 to {FIRST_LEAD}-999 are taken; invite a lead")


def _require_free(connection: Connection, name: str, role: Role, now: float) -> None:
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


def _open_links(connection: Connection, now: float) -> list[Invitation]:
    """Returns the links that can still be used, by name."""
    statement = select(invitations).where(invitations.c.expires_at > now).order_by(invitations.c.name)
    return [_as_invitation(row) for row in connection.execute(statement)]


def _find_link(connection: Connection, code: str, now: float) -> Invitation | None:
    """Returns the invitation of a code, or None if it was used, was voided, expired or never existed."""
    statement = select(invitations).where(invitations.c.code_hash == digest(code), invitations.c.expires_at > now)
    row = connection.execute(statement).one_or_none()
    return _as_invitation(row) if row is not None else None


def _as_invitation(row: Row[Any]) -> Invitation:
    return Invitation(row.name, row.role, row.expires_at, row.invited_by)
