"""Attacks on a running server over HTTP: what each must not achieve, and who is still served. Those that reach the
database run on SQLite and PostgreSQL.

Numbers A1 to A10 and B7 are those of the trials of November 2026 that these attacks come from.
"""

import contextlib
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from preferences import keys
from preferences.accounts import IDLE_SECONDS, SESSION_SECONDS, Accounts
from preferences.keys import HASHES_AT_ONCE, HASHES_WAITING
from preferences.page.app import make_app, server_settings
from preferences.page.config import LabelingConfig, ServerConfig
from preferences.page.security import (
    LINKS_PER_ADDRESS,
    MAX_BODY_BYTES,
    MAX_SIGN_IN_BYTES,
    MAX_TASKS_BYTES,
    PER_ADDRESS,
    PER_NAME,
    PER_NAME_AND_ADDRESS,
)
from preferences.records import Message, Task
from preferences.store import LabelStore
from tests.preferences.page.test_pages import form

PLAIN = LabelingConfig(asks_ratings=False, flags=("rude", "wrong"), task_order="arrival")
PUBLIC = "https://labels.example.org"
OTHER_ADDRESS = "127.0.0.2"  # all of 127.0.0.0/8 is this machine
NUL = "a\x00b"
# For tests that do not depend on the database: addresses, headers, connections and limits kept in memory.
ON_ONE_DATABASE = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)


class Site:
    """A server with accounts, and clients that are signed in."""

    def __init__(self, url, config, run):
        self.store, self.accounts, self.config = LabelStore(url), Accounts(url), config
        self.keys, self.clients = {}, []
        self.address, self.stop = run(make_app(self.store, self.accounts, config))

    def join(self, name, role="labeler"):
        _, self.keys[name] = self.accounts.accept(self.accounts.invite(name, role))
        self.accounts.confirm_reading(name, self.config.version)

    def client(self, address="", **options):
        transport = httpx.HTTPTransport(local_address=address) if address else None
        self.clients.append(httpx.Client(base_url=self.address, timeout=60, transport=transport, **options))
        return self.clients[-1]

    def visit(self, name, **options):
        """Returns a signed-in browser."""
        client = self.client(follow_redirects=True, **options)
        found = client.post("/sign-in", data={"name": name, "key": self.keys[name]})
        assert found.status_code == 200, found.text
        return client

    def call(self, name):
        """Returns a signed-in API client."""
        return self.client(headers={"Authorization": f"Bearer {self.accounts.open_session(name)}"})

    def close(self):
        for client in self.clients:
            client.close()
        self.stop()
        self.accounts.close()
        self.store.close()


@pytest.fixture
def site(new_database, serve_app):
    opened = []

    def open_site(config=PLAIN, **server):
        told = config.with_server(server)
        opened.append(Site(new_database(), told, serve_app))
        opened[-1].store.add_tasks([make_task(n) for n in range(5)], batch="main", num_labelers=2)
        for name, role in (("ann", "labeler"), ("bob", "labeler"), ("eve", "lead")):
            opened[-1].join(name, role)
        return opened[-1]

    yield open_site
    for one in opened:
        one.close()


def make_task(number):
    return Task(f"t{number}", (Message("user", f"Say {number}"),), (f"{number}a", f"{number}b"), ("x", "y"))


def post_form(client, page, action, **fields):
    return client.post(action, data=form(page, action) | fields)


def token_of(client):
    """Returns the hidden fields of this session's forms."""
    return form(client.get("/instructions"), "/sign-out")["csrf"]


# ---- A1, A2: links and closed accounts ----


@pytest.mark.parametrize("role", ["labeler", "lead"])
def test_a_closed_account_does_not_come_back_by_a_link(site, role):
    opened = site()
    opened.join("mal", role)
    mal, eve = opened.visit("mal"), opened.visit("eve")
    link = opened.accounts.invite("mal", role)
    kept = opened.call("mal")
    eve.post("/lead/state", data={"csrf": token_of(eve), "name": "mal", "state": "closed"})
    stranger = opened.client()
    assert stranger.get(f"/welcome/{link}").status_code == 410
    assert stranger.post(f"/welcome/{link}").status_code == 410
    assert mal.get("/task").url.path == "/sign-in"
    assert mal.get("/lead/export", params={"batch": "main", "format": "heed"}).url.path == "/sign-in"
    assert kept.get("/api/judgments/main").status_code == 401
    credentials = {"name": "mal", "key": opened.keys["mal"]}
    for refused in (stranger.post("/api/session", json=credentials), stranger.post("/sign-in", data=credentials)):
        assert (refused.status_code, "account is closed; ask a labeling lead" in refused.text) == (403, True)
    page = opened.visit("eve").post("/lead/invite", data={"csrf": token_of(eve), "names": "mal", "role": role})
    assert page.status_code in (403, 422)  # of another session, or of a closed account
    with pytest.raises(ValueError, match="the account is closed"):
        opened.accounts.invite("mal", role)
    with pytest.raises(ValueError, match="a closed one"):
        opened.accounts.open_session("mal")


def test_closing_an_account_ends_its_sessions_with_the_api_and_its_link(site):
    opened = site()
    ann, link = opened.call("ann"), opened.accounts.invite("ann", "labeler")
    opened.accounts.set_state("ann", "closed", by="eve")
    assert ann.post("/api/lease").status_code == 401
    assert opened.client().post(f"/welcome/{link}").status_code == 410


def test_a_session_of_a_closed_account_is_none_even_where_it_was_left(site):
    """Simulates a store in which an older version closed the account."""
    opened = site()
    ann, token = opened.call("ann"), opened.accounts.open_session("ann")
    with opened.accounts._writer.begin() as connection:
        connection.exec_driver_sql("UPDATE accounts SET state = 'closed' WHERE name = 'ann'")
    assert ann.post("/api/lease").status_code == 401
    assert opened.accounts.session(token) is None


def test_screening_does_not_open_an_account_that_was_closed_meanwhile(site):
    opened = site()
    opened.accounts.set_state("ann", "closed")
    opened.accounts.admit_screened("ann")
    assert opened.accounts.account("ann").state == "closed"


def test_leases_of_a_closed_account_go_to_others(site):  # B7
    opened = site()
    ann = opened.call("ann")
    handles = {one.handle: one.task.task_id for one in opened.store.tasks("main")}
    first = handles[ann.post("/api/lease").json()["form"]["task"]]
    opened.accounts.set_state("ann", "closed")
    assert opened.store.batch_counts()[0].num_leased == 0
    taken = [opened.store.lease(name, seconds=60, batch="main").task_id for name in ("bob", "cy")]
    assert taken == [first, first]  # two labelers wanted, and none of them is ann


def test_a_newer_link_voids_older_ones_and_using_one_voids_all(site):
    opened = site()
    old, new = (opened.accounts.invite("ann", "labeler") for _ in range(2))
    stranger = opened.client()
    assert stranger.post(f"/welcome/{old}").status_code == 410
    assert opened.visit("ann").get("/task").url.path == "/task"  # the key still works
    assert stranger.post(f"/welcome/{new}").status_code == 200
    assert stranger.post(f"/welcome/{new}").status_code == 410
    assert opened.accounts.links() == []


def test_links_are_listed_and_revoked_on_the_page(site):
    opened = site()
    eve = opened.visit("eve")
    page = post_form(eve, eve.get("/lead/people"), "/lead/invite", names="cy", role="labeler")
    link = page.text.split("/welcome/")[1].split("<")[0]
    page = eve.get("/lead/people")
    assert "Revoke the link of cy" in page.text
    assert link not in page.text
    page = post_form(eve, page, "/lead/revoke")
    assert "Revoke the link of cy" not in page.text
    assert opened.client().post(f"/welcome/{link}").status_code == 410
    page = eve.post("/lead/revoke", data={"csrf": token_of(eve), "name": "cy"})
    assert (page.status_code, "no link" in page.text) == (422, True)


def test_there_is_one_link_for_the_first_lead_and_none_once_somebody_leads(new_database):
    accounts = Accounts(new_database())
    codes = [accounts.invite_first_lead() for _ in range(16)]
    assert [accounts.invitation(code) is not None for _, code in codes] == [False] * 15 + [True]
    accounts.accept(accounts.invite("eve", "lead"))
    assert accounts.links() == []
    assert accounts.invite_first_lead() is None

    accounts.close()


def test_a_lead_who_is_invited_needs_no_link_for_a_first_lead(new_database):
    accounts = Accounts(new_database())
    code = accounts.invite("zoe", "lead")
    assert accounts.invite_first_lead() is None
    assert accounts.invitation(code).name == "zoe"
    accounts.revoke("zoe")
    assert accounts.invite_first_lead()[0] == "lead"
    accounts.close()


def test_what_leads_do_is_kept_and_shown(site):
    opened = site()
    eve = opened.call("eve")
    opened.accounts.invite("cy", "labeler", by="eve")
    opened.accounts.revoke("cy", by="eve")
    opened.accounts.set_state("bob", "closed", by="eve")
    eve.get("/api/judgments/main")
    acts = [(act.actor, act.action, act.subject) for act in opened.accounts.audit_log()]
    assert acts[:4] == [
        ("eve", "exported", "main (judgments)"), ("eve", "closed", "bob"), ("eve", "revoked", "cy"),
        ("eve", "invited", "cy"),
    ]  # fmt: skip
    assert ("ann", "joined", "ann") in acts
    assert "closed bob" in opened.visit("eve").get("/lead/people").text
    for statement in ("UPDATE people_acts SET actor = 'x'", "DELETE FROM people_acts"):
        with pytest.raises(Exception, match="append-only"), opened.accounts._writer.begin() as connection:
            connection.exec_driver_sql(statement)


# ---- A3, A4, A5: keys, guesses, and who is kept out by whom ----


@ON_ONE_DATABASE
def test_unknown_links_cost_no_hash(site, monkeypatch):
    opened, hashed = site(), []
    monkeypatch.setattr(keys.KeyHasher, "hash", lambda _, key: hashed.append(key))
    codes = [opened.client().post(f"/welcome/{number}").status_code for number in range(LINKS_PER_ADDRESS + 3)]
    assert codes == [410] * LINKS_PER_ADDRESS + [429] * 3
    assert hashed == []
    assert opened.client().get("/welcome/0").status_code == 410


@ON_ONE_DATABASE
def test_few_keys_are_checked_at_once_and_the_rest_is_told_to_come_back(site):
    """Otherwise all 40 threads of the server could hash at once, with 64 MiB each."""
    opened = site()
    at_once, most, lock, goes_on = itertools.count(), [0, 0], threading.Lock(), threading.Event()
    plain = opened.accounts._hasher._hasher

    class Slow:
        def verify(self, kept, key):
            with lock:
                most[0] += 1
                most[1] = max(most)
            goes_on.wait(60)
            with lock:
                most[0] -= 1
            return plain.verify(kept, key)

    opened.accounts._hasher._hasher = Slow()
    named = [f"somebody-{next(at_once)}" for _ in range(40)]  # 40 names, so that no limit of one name is met

    def sign_in(name):
        with httpx.Client(base_url=opened.address, timeout=60) as client:
            return client.post("/api/session", json={"name": name, "key": "x"})

    with ThreadPoolExecutor(40) as pool:
        running = [pool.submit(sign_in, name) for name in named]
        while sum(each.done() for each in running) < 40 - HASHES_AT_ONCE - HASHES_WAITING:
            time.sleep(0.01)  # until the rest is told to come back
        # Some keys are still being checked; the threads that wait are not all that there are.
        assert opened.client().get("/sign-in").status_code == 200
        goes_on.set()
        found = [each.result() for each in running]
    assert most[1] == HASHES_AT_ONCE
    codes = [answer.status_code for answer in found]
    assert set(codes) == {403, 503}
    assert codes.count(503) >= 40 - 2 * (HASHES_AT_ONCE + HASHES_WAITING)
    assert all("retry-after" in answer.headers for answer in found if answer.status_code == 503)


def test_guesses_sent_at_once_do_not_pass_the_limit(site, monkeypatch):
    opened, verified = site(), []
    plain = keys.KeyHasher.verify
    monkeypatch.setattr(
        keys.KeyHasher, "verify", lambda self, kept, key: verified.append(key) or plain(self, kept, key)
    )

    def guess(number):
        with httpx.Client(base_url=opened.address, timeout=60) as client:
            return client.post("/api/session", json={"name": "ann", "key": str(number)}).status_code

    with ThreadPoolExecutor(30) as pool:
        codes = list(pool.map(guess, range(60)))
    assert len(verified) == codes.count(403) <= PER_NAME_AND_ADDRESS  # fewer where the machine was too busy for some
    assert set(codes) - {503} == {403, 429}


@ON_ONE_DATABASE
def test_nobody_locks_a_name_out_from_elsewhere(site):
    opened = site()
    attacker = opened.client(OTHER_ADDRESS)
    for number in range(PER_NAME_AND_ADDRESS + 2):
        code = attacker.post("/api/session", json={"name": "ann", "key": str(number)}).status_code
        assert code == (403 if number < PER_NAME_AND_ADDRESS else 429)
    right = {"name": "ann", "key": opened.keys["ann"]}
    assert attacker.post("/api/session", json=right).status_code == 429
    assert opened.client().post("/api/session", json=right).status_code == 200
    # A new link is a way in for whoever shares the attacker's address.
    assert attacker.post(f"/welcome/{opened.accounts.invite('ann', 'labeler')}").status_code == 200


@ON_ONE_DATABASE
def test_a_name_that_everybody_guesses_at_is_slowed_down_not_locked(site):
    opened = site(trusted_proxies=("127.0.0.1",))
    client = opened.client()

    def guess(address, key="x"):
        headers = {"X-Forwarded-For": address}
        return client.post("/api/session", json={"name": "ann", "key": key}, headers=headers).status_code

    opened.accounts._hasher._hasher = Refusing()
    for number in range(PER_NAME):
        assert guess(f"192.0.{number // 4}.{number % 4}") == 403
    assert guess("192.0.0.0") == 429  # has failed
    assert guess("198.51.100.1") == 403  # has not
    assert guess("198.51.100.1") == 429
    opened.accounts._hasher = keys.KeyHasher()
    assert guess("198.51.100.2", opened.keys["ann"]) == 200


class Refusing:
    """Verifies nothing, at once."""

    def verify(self, kept, key):  # noqa: ARG002
        return False


@ON_ONE_DATABASE
def test_one_address_cannot_try_names_without_end(site):
    opened = site()
    opened.accounts._hasher._hasher = Refusing()
    client = opened.client()
    codes = [
        client.post("/api/session", json={"name": f"n{n}", "key": "x"}).status_code for n in range(PER_ADDRESS + 2)
    ]
    assert codes == [403] * PER_ADDRESS + [429] * 2


@ON_ONE_DATABASE
def test_addresses_of_one_ipv6_network_count_as_one(site):
    opened = site(trusted_proxies=("127.0.0.1",))
    opened.accounts._hasher._hasher = Refusing()
    client, codes = opened.client(), []
    for number in range(PER_NAME_AND_ADDRESS + 1):
        headers = {"X-Forwarded-For": f"2001:db8::{number:x}"}
        codes.append(client.post("/api/session", json={"name": "ann", "key": "x"}, headers=headers).status_code)
    assert codes == [403] * PER_NAME_AND_ADDRESS + [429]


# ---- A6, A10: proxies and hosts ----


@ON_ONE_DATABASE
def test_forwarded_headers_are_believed_of_nobody_by_default(site):
    opened = site()
    opened.accounts._hasher._hasher = Refusing()
    client, codes = opened.client(), []
    for number in range(PER_NAME_AND_ADDRESS + 1):
        headers = {"X-Forwarded-For": f"192.0.2.{number}", "X-Forwarded-Proto": "https"}
        codes.append(client.post("/api/session", json={"name": "ann", "key": "x"}, headers=headers).status_code)
    assert codes[-1] == 429
    opened.accounts._hasher = keys.KeyHasher()
    headers = {"X-Forwarded-Proto": "https"}
    cookie = opened.client(OTHER_ADDRESS).post(f"/welcome/{opened.accounts.invite('cy', 'labeler')}", headers=headers)
    assert "Secure" not in cookie.headers["set-cookie"]


@ON_ONE_DATABASE
def test_behind_a_trusted_proxy_each_client_is_itself_and_cookies_are_secure(site):
    opened = site(trusted_proxies=("127.0.0.0/8",), public_url=PUBLIC, trusted_hosts=("127.0.0.1",))
    client = opened.client(headers={"X-Forwarded-Proto": "https"})
    for number in range(PER_NAME_AND_ADDRESS + 1):
        client.post(
            "/api/session", json={"name": "ann", "key": str(number)}, headers={"X-Forwarded-For": "203.0.113.9"}
        )
    right = {"name": "ann", "key": opened.keys["ann"]}
    assert client.post("/sign-in", data=right, headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 429
    # The attacker puts an address before what the proxy appends.
    spoofed = {"X-Forwarded-For": "203.0.113.77, 203.0.113.9"}
    assert client.post("/sign-in", data=right, headers=spoofed).status_code == 429
    found = client.post("/sign-in", data=right, headers={"X-Forwarded-For": "203.0.113.10"})
    assert found.status_code == 303
    assert "Secure" in found.headers["set-cookie"]


@ON_ONE_DATABASE
def test_a_public_https_url_makes_cookies_secure_and_links_its_own(site):
    opened = site(public_url=PUBLIC)
    found = opened.client().post("/sign-in", data={"name": "eve", "key": opened.keys["eve"]})
    assert "Secure" in found.headers["set-cookie"]
    assert opened.config.server.link("code") == f"{PUBLIC}/welcome/code"


@ON_ONE_DATABASE
def test_links_do_not_come_from_the_host_header(site):
    opened = site()
    eve = opened.visit("eve")
    page = eve.post(
        "/lead/invite",
        data={"csrf": token_of(eve), "names": "cy", "role": "labeler"},
        headers={"Host": "evil.example", "X-Forwarded-Host": "evil.example"},
    )
    assert page.status_code == 200
    assert "/welcome/" in page.text
    assert "evil.example" not in page.text
    for path in ("/lead/", "/static", "/sign-in/"):
        found = opened.client().get(path, headers={"Host": "evil.example"})
        assert "evil.example" not in found.headers.get("location", "") + found.text, path


@ON_ONE_DATABASE
def test_hosts_that_are_not_configured_are_refused(site):
    opened = site(public_url=PUBLIC, trusted_hosts=("*.labels.test",))
    client = opened.client()
    for host, code in (
        ("evil.example", 400), ("labels.example.org.evil.example", 400), ("labels.example.org", 200),
        ("labels.example.org:443", 200), ("a.labels.test", 200), ("localhost", 200), ("127.0.0.1:99", 200),
    ):  # fmt: skip
        assert client.get("/sign-in", headers={"Host": host}).status_code == code, host


@pytest.mark.parametrize(
    "server",
    [
        {"public_url": "labels.example.org"}, {"public_url": "ftp://x"}, {"public_url": "https://x/labels"},
        {"trusted_proxies": ("10.0.0.0/8", "10.1.2.3/8")}, {"trusted_proxies": ("proxy",)},
        {"trusted_hosts": ("https://x",)}, {"trusted_hosts": ("a*b",)},
    ],
)  # fmt: skip
def test_a_configuration_that_would_not_do_what_it_says_is_refused(server):
    with pytest.raises(ValueError, match=next(iter(server))):
        LabelingConfig().with_server(server)
    with pytest.raises(ValueError, match=next(iter(server))):
        ServerConfig.model_validate(server)


# ---- A7: bodies ----


def connect(site, source="127.0.0.1"):
    host, port = site.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30, source_address=(source, 0))


@ON_ONE_DATABASE
@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/api/session", MAX_SIGN_IN_BYTES),
        ("/sign-in", MAX_SIGN_IN_BYTES),
        ("/task/answer", MAX_BODY_BYTES),
        ("/api/tasks", MAX_TASKS_BYTES),
    ],
)
def test_a_chunked_body_is_refused_as_soon_as_it_is_too_long(site, path, limit):
    opened = site()
    kind = "application/json" if path.startswith("/api") else "application/x-www-form-urlencoded"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk, sent = b"10000\r\n" + b"a" * 0x10000 + b"\r\n", 0
    with connect(opened) as connection:
        connection.sendall(head.encode())
        with contextlib.suppress(ConnectionError, TimeoutError):  # the server has hung up
            while sent < 100_000_000:
                connection.sendall(chunk)
                sent += 0x10000
        answer = received(connection)
    assert sent < limit + 20_000_000  # what fits into the buffers of both kernels comes on top
    if answer:  # else the kernel threw it away along with the connection
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert opened.client().get("/sign-in").status_code == 200


def received(connection):
    try:
        return connection.recv(1_000)
    except ConnectionError:
        return b""


def test_a_long_body_by_its_announced_length(site):
    opened = site()
    client = opened.client()
    found = client.post(
        "/api/session", content=b"a" * (MAX_SIGN_IN_BYTES + 1), headers={"Content-Type": "application/json"}
    )
    assert found.status_code == 413
    found = client.post("/sign-in", data={"name": "a" * MAX_SIGN_IN_BYTES, "key": "x"})
    assert found.status_code == 413
    tasks = [
        {
            "task_id": "long",
            "prompt": [{"role": "user", "content": "x" * 2_000_000}],
            "responses": ["a", "b"],
            "sources": ["x", "y"],
        }
    ]
    assert opened.call("eve").post("/api/tasks", json={"batch": "main", "tasks": tasks}).status_code == 204


# ---- A8: NUL and lone surrogates ----


def test_nul_in_forms_and_addresses(site):
    opened = site()
    eve, stranger = opened.visit("eve"), opened.client()
    token = token_of(eve)
    tried = [
        stranger.post("/sign-in", data={"name": NUL, "key": "x"}),
        stranger.post("/sign-in", data={"name": "x", "key": NUL}),
        stranger.get("/welcome/%00"), stranger.post("/welcome/%00"), stranger.get("/%00"),
        stranger.get("/sign-in?a=%00"),
        eve.post("/lead/state", data={"csrf": token, "name": NUL, "state": "closed"}),
        eve.post("/lead/invite", data={"csrf": token, "names": NUL, "role": "labeler"}),
        eve.post("/lead/revoke", data={"csrf": token, "name": NUL}),
        eve.post("/answers/undo", data={"csrf": token, "task": NUL, "revision": "1"}),
        eve.post("/task/answer", data={"csrf": token, "task": NUL, "seal": "x"}),
        eve.post("/task/skip", data={"csrf": token, "task": "t1", "reason": NUL}),
        eve.post("/sign-out", data={"csrf": token, NUL: "x"}),
        eve.get("/lead/task?task=%00"), eve.get("/lead/export?batch=%00&format=heed"),
        eve.get("/lead/quality?batch=a%00b"),
    ]  # fmt: skip
    assert {answer.status_code for answer in tried} == {400}
    assert opened.accounts.session(eve.cookies["heed_session"]) is not None


@pytest.mark.parametrize("text", ["a\\u0000b", "a\\ud800b"])
def test_texts_that_cannot_be_stored_in_json(site, text):
    opened = site()
    ann, eve = opened.call("ann"), opened.call("eve")
    asked = ann.post("/api/lease").json()["form"]
    sent = json.dumps(asked)
    task = '{"task_id": "%s", "prompt": [{"role": "user", "content": "%s"}]'
    task += ', "responses": ["a", "b"], "sources": ["x", "y"]}'
    bodies = [
        (opened.client(), "/api/session", f'{{"name": "{text}", "key": "x"}}'),
        (opened.client(), "/api/session", f'{{"name": "ann", "key": "{text}"}}'),
        (opened.client(), "/api/session", f'{{"name": "ann", "key": "x", "{text}": 1}}'),
        (ann, "/api/answers", f'{{"form": {sent}, "ranks": [1, 2], "note": "{text}"}}'),
        (ann, "/api/answers", f'{{"form": {sent}, "ranks": [1, 2], "flags": [["{text}"], []]}}'),
        (ann, "/api/answers", f'{{"form": {sent.replace(asked["task"], text)}, "ranks": [1, 2]}}'),
        (ann, "/api/skips", f'{{"form": {sent}, "reason": "{text}"}}'),
        (ann, "/api/undos", f'{{"task": "{text}", "revision": 1}}'),
        (eve, "/api/tasks", f'{{"batch": "{text}", "tasks": [{task % ("n1", "hi")}]}}'),
        (eve, "/api/tasks", f'{{"batch": "main", "tasks": [{task % (text, "hi")}]}}'),
        (eve, "/api/tasks", f'{{"batch": "main", "tasks": [{task % ("n1", text)}]}}'),
    ]  # fmt: skip
    for client, path, body in bodies:
        found = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert found.status_code == 422, (path, body, found.text)
        assert all(set(problem) == {"type", "loc", "msg"} for problem in found.json()["detail"])
    for path in ("/api/judgments/%00", "/api/quality/%00", "/api/reopened/%00"):
        assert eve.request("POST" if "reopened" in path else "GET", path).status_code == 400, path
    assert opened.store.judgments("main") == []


def test_no_traceback_and_no_parameters_in_the_log(new_database, serve):
    """Of a server in a process of its own: what it writes while it is sent all of that, and bodies that are no JSON."""
    server = serve(new_database())
    with httpx.Client(base_url=server.address, timeout=60) as client:
        for body in (
            b'{"name": "a\\u0000b", "key": "secret"}',
            b'{"name": "\\ud800", "key": "secret"}',
            b"\xff",
            b"[" * 15_000,
        ):
            found = client.post("/api/session", content=body, headers={"Content-Type": "application/json"})
            assert 400 <= found.status_code < 500
        assert client.post("/sign-in", data={"name": NUL, "key": "secret"}).status_code == 400
        multipart = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\n\\ud800\\x00\r\n--x--\r\n'
        kind = "multipart/form-data; boundary=x; charset=unicode_escape"
        assert client.post("/sign-in", content=multipart, headers={"Content-Type": kind}).status_code == 400
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "secret" not in log


def test_a_failing_statement_is_logged_without_its_values(new_database):
    accounts = Accounts(new_database())
    with pytest.raises(Exception, match="hide_parameters") as failed, accounts._writer.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO accounts (name) VALUES (%s)" if connection.dialect.name == "postgresql" else
            "INSERT INTO accounts (name) VALUES (?)", ("somebody's secret",),
        )  # fmt: skip
    assert connection.engine.hide_parameters
    assert "[SQL parameters hidden" in str(failed.value)
    accounts.close()


# ---- A10: the rest ----


def test_names_that_look_like_another_or_like_nothing(site):
    opened = site()
    refused = [
        "Ann",
        "ANN",
        "ａｎｎ",
        "an\u200bn",
        "ann\ufe0f",
        "a\u034fnn",
        " ann",
        "an\ud800n",
        "x" * 65,
        "",
        "a\nb",
    ]
    for name in refused:
        with pytest.raises(ValueError, match="name"):
            opened.accounts.invite(name, "labeler")
    assert opened.accounts.links() == []


def test_names_that_look_like_somebody_who_is_only_invited(site):
    opened = site()
    opened.accounts.invite("Ian Miller", "labeler")
    for name in ("Ian  Miller", "ian miller", "Ian\u00a0Miller"):
        with pytest.raises(ValueError, match="looks like 'Ian Miller'"):
            opened.accounts.invite(name, "labeler")
    for name in ("Ian Muller", "Jörg", "Jorg", "李雷", "Анна", "labeler-1", "labeler-2", "labeler-10"):
        opened.accounts.invite(name, "labeler")


def test_equal_flags_and_too_many(site):
    opened = site()
    ann = opened.call("ann")
    answer = {"form": ann.post("/api/lease").json()["form"], "ranks": [1, 2]}
    for flags in ([["rude", "rude"], []], [["rude"] * 50_000, []], [["rude"]] * 10):
        found = ann.post("/api/answers", json=answer | {"flags": flags})
        assert (found.status_code, isinstance(found.json()["detail"], list)) == (422, True)
    assert opened.store.judgments("main") == []
    bob = opened.visit("bob")
    fields = form(bob.get("/task")) | {"rank_0": "1", "rank_1": "2", "flags_0": ["rude"] * 50}
    bob.post("/task/answer", data=fields)
    assert [set(flags) for flags in opened.store.judgments("main")[0].flags] in ([{"rude"}, set()], [set(), {"rude"}])
    assert sum(map(len, opened.store.judgments("main")[0].flags)) == 1


def test_which_tasks_exist_is_not_for_labelers_to_find_out(site):
    opened = site()
    ann, bob = opened.call("ann"), opened.call("bob")
    mine = ann.post("/api/lease").json()["form"]
    ann.post("/api/answers", json={"form": mine, "ranks": [1, 2]})
    other = next(one.handle for one in opened.store.tasks("main") if one.task.task_id == "t4")
    answers = [bob.post("/api/undos", json={"task": name, "revision": 1}) for name in (mine["task"], other, "none")]
    assert {(answer.status_code, answer.text) for answer in answers} == {(answers[0].status_code, answers[0].text)}
    assert answers[0].status_code == 403
    assert ann.post("/api/undos", json={"task": mine["task"], "revision": 1}).status_code == 204


def test_unknown_batches_are_not_found(site):
    eve = site().call("eve")
    assert eve.get("/api/judgments/nothing").status_code == 404
    assert eve.get("/api/quality/nothing").status_code == 404
    assert eve.get("/api/judgments/main").json() == []


@ON_ONE_DATABASE
def test_addresses_that_are_not_there(site):
    opened = site()
    found = opened.client().get("/nowhere")
    assert (found.status_code, found.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "There is no such page" in found.text
    assert opened.visit("ann").get("/lead/nowhere").status_code == 404
    assert opened.client().get("/api/nowhere").json() == {"detail": "Not Found"}
    assert "text/html" in opened.client().get("/static/none.js").headers["content-type"]
    assert opened.client().put("/sign-in").status_code == 405


@ON_ONE_DATABASE
def test_leads_are_told_that_they_do_not_label(site):
    opened = site()
    page = opened.visit("eve").get("/task")
    assert (page.status_code, "Leads do not label" in page.text) == (403, True)
    assert opened.call("eve").post("/api/lease").status_code == 403


@ON_ONE_DATABASE
def test_the_servers_name_is_not_told(site):
    assert "server" not in site().client().get("/sign-in").headers


def test_uvicorn_believes_no_header_by_itself():
    settings = server_settings(None)
    assert (settings.proxy_headers, settings.ws, settings.lifespan) == (False, "none", "off")


# ---- sessions ----


def test_signing_in_again_ends_the_session_before(site):
    opened = site()
    ann = opened.visit("ann")
    before = ann.cookies["heed_session"]
    ann.post("/sign-in", data={"name": "ann", "key": opened.keys["ann"]})
    assert ann.cookies["heed_session"] != before
    assert opened.accounts.session(before) is None


def test_a_session_that_nobody_uses_ends(new_database):
    now = [1_000_000.0]
    accounts = Accounts(new_database(), clock=lambda: now[0])
    accounts.accept(accounts.invite("ann", "labeler"))
    used, idle = accounts.open_session("ann"), accounts.open_session("ann")
    for token in (used, idle):
        assert accounts.session(token).name == "ann"
    for _ in range(4):
        now[0] += IDLE_SECONDS * 0.9
        assert accounts.session(used).name == "ann"
    assert accounts.session(idle) is None
    now[0] -= IDLE_SECONDS * 3  # it does not come back with the clock
    assert accounts.session(idle) is None
    now[0] += SESSION_SECONDS
    assert accounts.session(used) is None  # used or not
    accounts.close()


def test_sign_ins_tasks_and_adjudications_are_in_the_audit_log(site):
    opened = site()
    opened.visit("ann")
    stranger = opened.client()
    for name in ("ann", "a-key-typed-as-a-name"):
        stranger.post("/sign-in", data={"name": name, "key": "wrong"})
    eve = opened.call("eve")
    task = {"task_id": "new", "prompt": [{"role": "user", "content": "x"}], "responses": ["a", "b"]}
    eve.post("/api/tasks", json={"batch": "more", "tasks": [{**task, "sources": ["x", "y"]}]})
    asked = eve.post("/api/reopened/t1").json()
    for _ in range(2):  # what is sent again is no second act
        assert eve.post("/api/answers", json={"form": asked["form"], "ranks": [1, 2]}).status_code == 204
    for _ in range(2):
        assert eve.post("/api/undos", json={"task": asked["form"]["task"], "revision": 1}).status_code == 204
    signed = [(act.actor, act.action, act.subject) for act in opened.accounts.audit_log(sign_ins=True)]
    assert signed[:4] == [
        ("eve", "signed in", "eve"), ("server", "refused a sign-in of", "an unknown name"),
        ("server", "refused a sign-in of", "ann"), ("ann", "signed in", "ann"),
    ]  # fmt: skip
    acts = [(act.actor, act.action, act.subject) for act in opened.accounts.audit_log()]
    assert acts[:3] == [
        ("eve", "took back the adjudication of", "t1"), ("eve", "adjudicated", "t1"),
        ("eve", "added", "1 tasks to more"),
    ]  # fmt: skip
    page = opened.visit("eve").get("/lead/people").text
    assert "refused a sign-in of ann" in page
    assert "a-key-typed" not in page


# ---- what browsers and proxies are told ----


@ON_ONE_DATABASE
def test_a_public_https_url_has_hsts_and_a_cookie_of_this_host(site):
    opened = site(public_url=PUBLIC)
    found = opened.client().post("/sign-in", data={"name": "eve", "key": opened.keys["eve"]})
    cookie = found.headers["set-cookie"]
    assert cookie.startswith("__Host-heed_session=")
    assert "Path=/;" in cookie
    assert "Domain" not in cookie
    token = cookie.split("=", 1)[1].split(";")[0]
    signed_in = opened.client(headers={"Cookie": f"__Host-heed_session={token}"})
    assert signed_in.get("/lead").status_code == 200
    assert opened.client(headers={"Cookie": f"heed_session={token}"}).get("/lead").status_code == 303
    assert found.headers["strict-transport-security"] == "max-age=31536000"
    assert "strict-transport-security" not in site().client().get("/sign-in").headers


@ON_ONE_DATABASE
def test_other_sites_sign_nobody_in_by_browsers_that_only_send_an_origin(site):
    opened = site(public_url=PUBLIC, trusted_hosts=("127.0.0.1",))
    right = {"name": "ann", "key": opened.keys["ann"]}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"{PUBLIC}.evil.example", "http://[x"):
        for path in ("/sign-in", f"/welcome/{opened.accounts.invite('cy', 'labeler')}"):
            found = opened.client().post(path, data=right, headers={"Origin": origin})
            assert (found.status_code, "set-cookie" in found.headers) == (403, False), (origin, path)
    for origin in (opened.address, PUBLIC):
        assert opened.client().post("/sign-in", data=right, headers={"Origin": origin}).status_code == 303
    fetched = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert opened.client().post("/sign-in", data=right, headers=fetched).status_code == 403
    # With "no-referrer", a browser leaves out the origin of our own forms and sends null.
    assert opened.client().get("/sign-in").headers["referrer-policy"] == "same-origin"


@ON_ONE_DATABASE
@pytest.mark.parametrize("path", ["/sign-in", "/api/session"])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(site, path):
    opened = site()
    with connect(opened) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
            "0\r\n\r\nGET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )
        answer = b""
        while part := received(connection):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()


@ON_ONE_DATABASE
def test_forms_that_break_off_leave_no_traceback(new_database, serve):
    server = serve(new_database())
    kind = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\nname="
    for path in ("/sign-in", "/task/answer", "/api/session"):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}".encode())
                time.sleep(0.1)
    assert httpx.get(f"{server.address}/sign-in").status_code == 200
    assert "Traceback" not in server.log.read_text()


@ON_ONE_DATABASE
def test_a_refused_method_names_all_that_the_address_has(site):
    client = site().client()
    for path, allowed in (
        ("/sign-in", "GET, POST"), ("/api/session", "POST"), ("/lead/people", "GET"),
    ):  # fmt: skip
        found = client.options(path)
        assert (found.status_code, found.headers["allow"]) == (405, allowed), path
