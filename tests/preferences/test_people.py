"""Keys, sessions and one-time links."""

import pytest
import sqlalchemy

from preferences.database import open_engines
from preferences.people import INVITATION_SECONDS, SESSION_SECONDS, People


@pytest.fixture
def url(new_database):
    return new_database()


@pytest.fixture
def people(url, clock):
    opened = People(url, clock=clock)
    yield opened
    opened.close()


def join(people, name, role="labeler"):
    account, key = people.accept(people.invite(name, role))
    assert (account.name, account.role, account.state) == (name, role, "new")
    return key


def test_a_link_works_once(people):
    code = people.invite("ann", "labeler")
    assert people.invitation(code).name == "ann"
    account, key = people.accept(code)
    assert people.session(people.sign_in("ann", key)) == account
    assert people.invitation(code) is None
    assert people.accept(code) is None


def test_a_link_runs_out(people, clock):
    code = people.invite("ann", "labeler")
    clock.now += INVITATION_SECONDS + 1
    assert (people.invitation(code), people.accept(code), people.account("ann")) == (None, None, None)


def test_another_link_gives_a_new_key_and_ends_what_the_old_one_opened(people):
    old = join(people, "ann")
    session = people.sign_in("ann", old)
    _, new = people.accept(people.invite("ann", "labeler"))
    assert people.session(session) is None
    assert people.sign_in("ann", old) is None
    assert people.session(people.sign_in("ann", new)).name == "ann"


def test_wrong_keys_and_unknown_names(people):
    key = join(people, "ann")
    assert people.sign_in("ann", key + "x") is None
    assert people.sign_in("nobody", key) is None
    assert people.sign_in("ann", "") is None


def test_sessions_end(people, clock):
    key = join(people, "ann")
    token = people.sign_in("ann", key)
    people.sign_out(token)
    assert people.session(token) is None
    token = people.sign_in("ann", key)
    clock.now += SESSION_SECONDS + 1
    assert people.session(token) is None


def test_a_closed_account(people):
    key = join(people, "ann")
    token = people.sign_in("ann", key)
    people.set_state("ann", "closed")
    assert people.session(token) is None
    assert people.sign_in("ann", key) is None
    with pytest.raises(ValueError, match="'bob' has no account"):
        people.set_state("bob", "closed")


def test_leads(people):
    assert not people.has_lead()
    join(people, "eve", "lead")
    assert people.has_lead()
    with pytest.raises(ValueError, match="'eve' is a lead's"):
        people.invite("eve", "labeler")
    people.set_state("eve", "closed")
    assert not people.has_lead()


@pytest.mark.parametrize("name", ["", " ann", "a\nb", "a\x00b", "\ud800", "x" * 65])
def test_names_that_cannot_stand_on_a_page(people, name):
    with pytest.raises(ValueError, match="name is"):
        people.invite(name, "labeler")


def test_nothing_that_opens_anything_is_in_the_database(people, url):
    """Whoever reads the database can sign in as nobody."""
    code = people.invite("bob", "labeler")
    key = join(people, "ann")
    token = people.sign_in("ann", key)
    reader, _ = open_engines(url)
    with reader.connect() as connection:
        kept = str([connection.execute(sqlalchemy.text(f"SELECT * FROM {table}")).all() for table in TABLES])
    reader.dispose()
    assert "$argon2id$" in kept
    for secret in (key, token, code):
        assert secret not in kept


TABLES = ("accounts", "sessions", "invitations")
