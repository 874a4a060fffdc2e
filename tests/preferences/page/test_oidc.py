"""Signing in through an OpenID provider that runs here, over HTTP, and that checks PKCE and can be made to lie."""

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import JSONResponse, RedirectResponse
from starlette.routing import Route

from preferences.accounts import Accounts
from preferences.page.app import listening, make_app
from preferences.page.config import LabelingConfig
from preferences.page.site import COOKIE
from preferences.records import Message, Task

pytest.importorskip("authlib", reason="Authlib is not installed")
jwt = pytest.importorskip("joserfc.jwt", reason="joserfc, which Authlib installs, is missing")
from joserfc.jwk import KeySet, RSAKey  # noqa: E402

SECRET = "the client's secret"
CLIENT = "heed"


class Provider:
    """A provider at which `user` is always signed in. `twist` changes the claims of an ID token before it is signed."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.user = {"sub": "248289761001", "email": "Ann@Example.com", "email_verified": True}
        self.twist = lambda claims: claims
        self.algorithm, self.signing_key = "RS256", self.key
        self.grants: dict[str, dict[str, str]] = {}
        self.asked: list[dict[str, str]] = []

    def __enter__(self) -> "Provider":
        listener = listening("127.0.0.1", 0)
        self.issuer = f"http://127.0.0.1:{listener.getsockname()[1]}"
        routes = [
            Route("/.well-known/openid-configuration", self.metadata),
            Route("/authorize", self.authorize),
            Route("/token", self.token, methods=["POST"]),
            Route("/jwks", lambda _: JSONResponse(KeySet([self.key]).as_dict(private=False))),
        ]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()

    def metadata(self, _request):
        return JSONResponse(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/jwks",
                "response_types_supported": ["code"],
                "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
            }
        )

    def authorize(self, request):
        asked = dict(request.query_params)
        self.asked.append(asked)
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert {"openid", "email"} <= set(asked["scope"].split())
        code = secrets.token_urlsafe(16)
        self.grants[code] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}", 302)

    async def token(self, request):
        form = await request.form()
        name, _, secret = base64.b64decode(request.headers["authorization"].partition(" ")[2]).decode().partition(":")
        grant = self.grants.pop(form["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        if (
            grant is None
            or (name, secret.replace("+", " ").replace("%27", "'")) != (CLIENT, SECRET)
            or form["redirect_uri"] != grant["redirect_uri"]
            or challenge.decode() != grant["code_challenge"]
        ):
            return JSONResponse({"error": "invalid_grant"}, 400)
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": grant["nonce"], **self.user}
        header = {"alg": self.algorithm, "kid": "one"}
        if self.algorithm == "HS256":
            signed = with_public_key(header, claims, self.key.as_pem(private=False))
        else:
            signed = jwt.encode(header, self.twist(claims), self.signing_key)
        return JSONResponse({"access_token": "a", "token_type": "Bearer", "id_token": signed})


def with_public_key(header, claims, key: bytes) -> str:
    """Signs with the public key as if it were a secret, which everybody can; libraries refuse to."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = hmac.new(key, b".".join(parts), hashlib.sha256).digest()
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


@pytest.fixture
def provider():
    with Provider() as running:
        yield running


def configured(provider, tmp_path, **more):
    (tmp_path / "secret").write_text(SECRET + "\n")
    return LabelingConfig.model_validate(
        {
            "asks_ratings": False,
            "oidc": {
                "issuer": provider.issuer,
                "client_id": CLIENT,
                "client_secret_file": tmp_path / "secret",
                "domains": ["example.com"],
                "leads": ["Eve@example.com"],
                "label": "Example",
                **more,
            },
        }
    )


@pytest.fixture
def opened(world, provider, tmp_path):
    """Returns a browser without scripts at a server with this provider."""

    def open_browser(**more):
        app = make_app(world.store, world.accounts, configured(provider, tmp_path, **more), clock=world.clock)
        return TestClient(app, base_url="http://127.0.0.1:8100", follow_redirects=False)

    return open_browser


def go(browser, path="/sign-in/oidc"):
    """Follows a sign-in through the provider. Returns the page that the browser ends on."""
    sent = browser.get(path)
    assert sent.status_code == 302
    back = httpx.get(sent.headers["location"])
    found = urlsplit(back.headers["location"])
    return browser.get(f"{found.path}?{found.query}")


def test_a_person_of_the_company_labels(world, provider, opened):
    world.add(Task("t", (Message("user", "Say t"),), ("a", "b"), ("x", "y")))
    browser = opened()
    assert "Sign in with Example" in browser.get("/sign-in").text
    page = go(browser)
    assert (page.status_code, 'content="0; url=/"' in page.text) == (200, True)
    assert "samesite=strict" in page.headers["set-cookie"].lower()
    assert browser.get("/task").headers["location"] == "/instructions"
    account = world.accounts.account("ann@example.com")
    assert (account.role, account.state) == ("labeler", "new")
    acts = [(event.action, event.actor) for event in world.accounts.audit_log(sign_ins=True)]
    assert acts[0] == ("signed in", "ann@example.com")
    assert world.accounts.audit_log()[0].action == "joined"
    # again, under another address: the subject says who it is
    provider.user |= {"email": "ann.smith@example.com"}
    go(opened())
    assert world.accounts.account("ann.smith@example.com") is None
    (asked, _) = provider.asked
    assert asked["redirect_uri"] == "http://127.0.0.1:8100/sign-in/oidc/callback"
    # no key opens the account
    assert world.accounts.sign_in("ann@example.com", "") is None


def test_leads_are_those_that_the_configuration_names(world, provider, opened):
    provider.user |= {"sub": "eve", "email": "eve@example.com"}
    browser = opened()
    go(browser)
    assert browser.get("/lead").status_code == 200
    go(opened(leads=[]))
    assert world.accounts.account("eve@example.com").role == "labeler"
    assert browser.get("/lead").status_code == 303  # the session of the role that is gone has ended
    logged = [f"{event.action} {event.subject}" for event in world.accounts.audit_log()]
    assert logged[0] == "made a labeler of eve@example.com"


def test_whoever_lost_a_right_has_no_session_after_a_start(world, serve):
    accounts = Accounts(world.url)  # with the clock of the server's process
    people = {"eve@example.com": "lead", "lea@example.com": "lead", "ann@example.com": "labeler"}
    people["tom@example.org"] = "labeler"
    tokens = {name: accounts.sign_in_with("https://login.example.com", name, name, of) for name, of in people.items()}
    tokens["eve"] = accounts.open_session("eve")  # with a key, which no configuration names
    accounts.invite("eve@example.com", "lead")  # to get a key as well
    config = '[oidc]\nissuer = "https://login.example.com"\nclient_id = "c"\ndomains = ["example.com"]\n'
    server = serve(world.url, config + 'leads = ["lea@example.com"]\n')

    def opens(path: str) -> dict[str, int]:
        found = {name: {"Cookie": f"{COOKIE}={token}"} for name, token in tokens.items()}
        return {name: httpx.get(f"{server.address}{path}", headers=own).status_code for name, own in found.items()}

    ended = {"eve@example.com": 303, "tom@example.org": 303}
    assert opens("/lead") == {"lea@example.com": 200, "ann@example.com": 403, "eve": 200, **ended}
    assert accounts.account("eve@example.com").role == "labeler"
    assert accounts.links() == []
    _, key = accounts.accept(accounts.invite("ann@example.com", "labeler"))
    accounts.apply_oidc((), ())  # as the start of a server without company accounts does
    assert [name for name, status in opens("/instructions").items() if status == 200] == ["eve"]
    assert accounts.sign_in("ann@example.com", key) is None
    accounts.close()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"email": "ann@example.org"}, "may not sign in here"),
        ({"email": "ann@example.com.evil.net"}, "may not sign in here"),
        ({"email_verified": False}, "is not verified"),
        ({"email_verified": "true"}, "is not verified"),
        ({"email": ""}, "has no e-mail address"),
    ],
)
def test_others_are_refused_and_told_why(world, provider, opened, user, words):
    provider.user |= user
    page = go(opened())
    assert (page.status_code, words in page.text) == (403, True)
    assert len(world.accounts.all()) == 3
    (event, *_) = world.accounts.audit_log(sign_ins=True)
    assert (event.action, event.subject) == ("refused a sign-in of", "an unknown name")


def test_a_provider_that_verifies_no_addresses(provider, opened):
    del provider.user["email_verified"]
    assert go(opened()).status_code == 403
    assert go(opened(requires_verified_email=False)).status_code == 200


TWISTS = {
    "nonce": lambda claims: claims | {"nonce": "another flow's"},
    "no nonce": lambda claims: {name: value for name, value in claims.items() if name != "nonce"},
    "audience": lambda claims: claims | {"aud": "another client"},
    "issuer": lambda claims: claims | {"iss": "https://evil.example.com"},
    "expired": lambda claims: claims | {"iat": claims["iat"] - 9_000, "exp": claims["exp"] - 9_000},
    "no subject": lambda claims: {name: value for name, value in claims.items() if name != "sub"},
}


@pytest.mark.parametrize("name", TWISTS)
def test_a_token_that_is_not_for_this_flow_is_refused(world, provider, opened, name):
    provider.twist = TWISTS[name]
    page = go(opened())
    assert (page.status_code, "was not completed" in page.text) == (403, True)
    assert len(world.accounts.all()) == 3


@pytest.mark.parametrize("how", ["another key", "the public key as a secret"])
def test_a_token_with_another_signature_is_refused(world, provider, opened, how):
    if how == "another key":
        provider.signing_key = RSAKey.generate_key(2048, {"kid": "one"})
    else:
        provider.algorithm = "HS256"
    assert go(opened()).status_code == 403
    assert len(world.accounts.all()) == 3


def test_a_flow_ends_only_in_the_browser_that_began_it_and_only_once(provider, opened):
    ann, mallory = opened(), opened()
    back = httpx.get(ann.get("/sign-in/oidc").headers["location"]).headers["location"]
    path = back.removeprefix("http://127.0.0.1:8100")
    assert mallory.get(path).status_code == 403  # no flow began there
    mallory.get("/sign-in/oidc")
    assert mallory.get(path).status_code == 403  # another one did
    forged = path.partition("state=")[0] + "state=forged"
    assert ann.get(forged).status_code == 403
    page = go(ann)
    assert page.status_code == 200
    code = parse_qs(urlsplit(path).query)["code"][0]
    assert code in provider.grants  # nobody has redeemed it
    assert ann.get("/sign-in/oidc/callback?error=access_denied").status_code == 403
    assert ann.get("/sign-in/oidc/callback").status_code == 403
    for _ in range(40):
        last = mallory.get("/sign-in/oidc/callback")
    assert last.status_code == 429


def test_a_closed_account_and_a_name_that_is_taken(world, provider, opened):
    go(opened())
    world.accounts.set_state("ann@example.com", "closed")
    page = go(opened())
    assert (page.status_code, "account is closed" in page.text) == (403, True)
    world.join("bob@example.com")  # invited with a link
    provider.user |= {"sub": "bob", "email": "bob@example.com"}
    assert go(opened()).status_code == 403
    provider.user |= {"sub": "bob", "email": "B0b@example.com".replace("0", "o")}
    assert go(opened()).status_code == 403


def test_a_provider_that_is_away(provider, opened):
    browser = opened()
    provider.server.should_exit = True
    provider.thread.join()
    page = browser.get("/sign-in/oidc")
    assert (page.status_code, "cannot be reached" in page.text) == (503, True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"issuer": "http://login.example.com"}, "oidc.issuer: .*an https address"),
        ({"domains": []}, "oidc.domains"),
        ({"client_id": ""}, "oidc.client_id"),
        ({"isuer": "x"}, "oidc.isuer: unknown key; did you mean issuer?"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(tmp_path, more, words):
    good = {"issuer": "https://login.example.com", "client_id": "c", "domains": ["example.com"]}
    lines = [f"{name} = {value!r}" for name, value in (good | more).items()]
    (tmp_path / "label.toml").write_text("[oidc]\n" + "\n".join(lines))
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        LabelingConfig.load(tmp_path / "label.toml")


def test_a_missing_secret_stops_the_start(world, provider, tmp_path, monkeypatch):
    def start(**more):
        config = configured(provider, tmp_path, **more)
        return make_app(world.store, world.accounts, config, clock=world.clock)

    with pytest.raises(ValueError, match=r"client_secret_file: .*nowhere: No such file"):
        start(client_secret_file=tmp_path / "nowhere")
    monkeypatch.delenv("HEED_OIDC_SECRET", raising=False)
    with pytest.raises(ValueError, match="client_secret_env: the environment variable HEED_OIDC_SECRET is empty"):
        start(client_secret_env="HEED_OIDC_SECRET")
    monkeypatch.setenv("HEED_OIDC_SECRET", SECRET)
    assert start(client_secret_env="HEED_OIDC_SECRET")


def test_in_a_browser(world, provider, tmp_path, browser):
    """Browsers hold back SameSite=strict cookies after a redirect from another site, which clients in tests do not."""
    config = configured(provider, tmp_path)
    port = listening("127.0.0.1", 0)
    number = port.getsockname()[1]
    # localhost and 127.0.0.1 are different sites, as the company's provider and this server are
    server = config.server.model_copy(update={"public_url": f"http://localhost:{number}"})
    app = make_app(world.store, world.accounts, config.model_copy(update={"server": server}))
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run, args=([port],), daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    page = browser.new_context().new_page()
    try:
        page.goto(f"http://localhost:{number}/")
        page.get_by_role("link", name="Sign in with Example").click()
        page.get_by_role("button", name="I have read this: start").wait_for()
        assert "ann@example.com" in page.locator("header").inner_text()
    finally:
        page.context.close()
        running.should_exit = True
        thread.join()
