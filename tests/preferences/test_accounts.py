"""Keys, sessions and one-time links."""

import pytest
import sqlalchemy

from preferences.accounts import INVITATION_SECONDS, SESSION_SECONDS, AccountClosedError, Accounts
from preferences.database import open_engines

pytestmark = pytest.mark.usefixtures("cheap_hashes")


@pytest.fixture
def url(new_database):
    return new_database()


@pytest.fixture
def accounts(url, clock):
    opened = Accounts(url, clock=clock)
    yield opened
    opened.close()


def join(accounts, name, role="labeler"):
    account, key = accounts.accept(accounts.invite(name, role))
    assert (account.name, account.role, account.state) == (name, role, "new")
    return key


def test_a_link_works_once(accounts):
    code = accounts.invite("ann", "labeler")
    assert accounts.invitation(code).name == "ann"
    account, key = accounts.accept(code)
    assert accounts.session(accounts.sign_in("ann", key)) == account
    assert accounts.invitation(code) is None
    assert accounts.accept(code) is None


def test_a_link_runs_out(accounts, clock):
    code = accounts.invite("ann", "labeler")
    clock.now += INVITATION_SECONDS + 1
    assert (accounts.invitation(code), accounts.accept(code), accounts.account("ann")) == (None, None, None)


def test_another_link_gives_a_new_key_and_ends_what_the_old_one_opened(accounts):
    old = join(accounts, "ann")
    session = accounts.sign_in("ann", old)
    _, new = accounts.accept(accounts.invite("ann", "labeler"))
    assert accounts.session(session) is None
    assert accounts.sign_in("ann", old) is None
    assert accounts.session(accounts.sign_in("ann", new)).name == "ann"


def test_wrong_keys_and_unknown_names(accounts):
    key = join(accounts, "ann")
    assert accounts.sign_in("ann", key + "x") is None
    assert accounts.sign_in("nobody", key) is None
    assert accounts.sign_in("ann", "") is None


def test_sessions_end(accounts, clock):
    key = join(accounts, "ann")
    token = accounts.sign_in("ann", key)
    accounts.sign_out(token)
    assert accounts.session(token) is None
    token = accounts.sign_in("ann", key)
    clock.now += SESSION_SECONDS + 1
    assert accounts.session(token) is None


def test_a_closed_account(accounts):
    key = join(accounts, "ann")
    token = accounts.sign_in("ann", key)
    accounts.set_state("ann", "closed")
    assert accounts.session(token) is None
    assert accounts.sign_in("ann", key + "x") is None  # a wrong key learns nothing
    with pytest.raises(AccountClosedError, match="your account is closed; ask a labeling lead"):
        accounts.sign_in("ann", key)
    with pytest.raises(ValueError, match="'bob' has no account"):
        accounts.set_state("bob", "closed")


def has_lead(accounts):
    return any(account.role == "lead" and account.state != "closed" for account in accounts.all())


def test_leads(accounts):
    assert not has_lead(accounts)
    join(accounts, "eve", "lead")
    assert has_lead(accounts)
    with pytest.raises(ValueError, match="'eve' belongs to a lead"):
        accounts.invite("eve", "labeler")
    accounts.set_state("eve", "closed")
    assert not has_lead(accounts)


def test_names_that_cannot_stand_on_a_page(accounts):
    for name in ("", " ann", "a\nb", "a\x00b", "\ud800", "x" * 65):
        with pytest.raises(ValueError, match="name is"):
            accounts.invite(name, "labeler")


def test_nothing_that_opens_anything_is_in_the_database(accounts, url):
    """Someone who can read the database cannot sign in as anyone."""
    code = accounts.invite("bob", "labeler")
    key = join(accounts, "ann")
    token = accounts.sign_in("ann", key)
    reader, _ = open_engines(url)
    with reader.connect() as connection:
        kept = str([connection.execute(sqlalchemy.text(f"SELECT * FROM {table}")).all() for table in TABLES])
    reader.dispose()
    assert "$argon2id$" in kept
    for secret in (key, token, code):
        assert secret not in kept


TABLES = ("accounts", "sessions", "invitations")
