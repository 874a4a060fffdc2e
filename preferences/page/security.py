"""Checks on every request before a route sees it, the security headers of every response, and rate limits.

Sign-ins are limited by address and by name, one-time links by address. Only failures count. A try is counted before it
is verified and uncounted if it succeeds, so that simultaneous tries cannot get past a limit together.

Leaves out: counts shared by several servers on one store; each has its own.
"""

import ipaddress
import threading
import time
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preferences.accounts import Account, Accounts
from preferences.names import MAX_NAME_CHARACTERS

# No loading from other sites, no framing, and no inline scripts.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with "no-referrer", browsers send Origin: null for our own forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
HSTS = "max-age=31536000"  # a year, for a server whose public address is https
MAX_BODY_BYTES = 1_000_000
MAX_TASKS_BYTES = 4_000_000  # tasks that a lead adds
MAX_SIGN_IN_BYTES = 16_000  # for requests without a session

WINDOW_SECONDS = 300
PER_NAME_AND_ADDRESS = 8
PER_ADDRESS = 64  # leaves room for the typing errors of an office that shares one address
PER_NAME = 100  # above it, addresses that have failed at the name must wait; others may still try
LINKS_PER_ADDRESS = 32


# ---- every request and response ----


class Harden:
    """ASGI middleware: refuses requests from other sites' pages and invalid addresses, and sets the headers."""

    def __init__(self, app: ASGIApp, public_url: str = "") -> None:
        self.app, self.public_url = app, public_url
        is_https = public_url.startswith("https://")
        self.headers = HEADERS | ({"Strict-Transport-Security": HSTS} if is_https else {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
                if message["status"] == 413 or has_two_lengths:
                    headers["Connection"] = "close"  # otherwise the server would read the rest and discard it
            await send(message)

        asked = Headers(scope=scope)
        has_two_lengths = "content-length" in asked and "transfer-encoding" in asked
        refused = _refusal(scope, asked, self.public_url, has_two_lengths=has_two_lengths)
        return await (refused or self.app)(scope, receive, send_hardened)


def _refusal(scope: Scope, headers: Headers, public_url: str, *, has_two_lengths: bool) -> Response | None:
    if has_two_lengths:  # a proxy may use the other one, and take the rest for a separate request (RFC 9112, 6.1)
        return _refused(scope, "refused: the request has both Content-Length and Transfer-Encoding", 400)
    if scope["method"] not in ("GET", "HEAD") and not _is_own(headers, public_url):
        return _refused(scope, "refused: this came from another site's page", 403)
    asked = (scope["path"].encode("utf-8", "replace"), unquote_to_bytes(scope["query_string"]))
    if any(b"\0" in part for part in asked):
        return _refused(scope, "refused: the address contains a NUL character", 400)
    return None


def _is_own(headers: Headers, public_url: str) -> bool:
    """Whether a request comes from a page of this server, or from no page at all.

    Older browsers, and all browsers over plain HTTP, do not send Sec-Fetch-Site, but they do send Origin.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or origin == public_url or origin.partition("://")[2] == headers.get("host", "")


def _refused(scope: Scope, text: str, status: int) -> Response:
    if scope["path"].startswith("/api/"):
        return JSONResponse({"detail": text}, status)
    return PlainTextResponse(text, status)


def is_storable(text: str) -> bool:
    """Whether every supported database can store the text: PostgreSQL has no NUL, UTF-8 no lone surrogates."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def unstorable_in(value: object) -> bool:
    """Whether a JSON value contains a text that cannot be stored."""
    waiting = [value]  # a loop, because JSON may be nested deeper than Python's stack
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            if not is_storable(found):
                return True
        elif isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            waiting += found
    return False


# ---- rate limits ----


class TooManyTriesError(Exception):
    """Tries failed too often. The next one is allowed in `wait_seconds`."""

    def __init__(self, wait_seconds: int) -> None:
        super().__init__(f"too many tries; try again in {wait_seconds} seconds")
        self.wait_seconds = wait_seconds


@dataclass(frozen=True)
class Try:
    """A counted try with its counters' keys, so that it can be uncounted."""

    counted: tuple[tuple[RateLimitItem, str], ...]


class Attempts:
    """Counts failed tries in windows of `seconds` from the first failure. A block ends with its window."""

    def __init__(self, seconds: int = WINDOW_SECONDS) -> None:
        self._storage = MemoryStorage()
        self._limiter = FixedWindowRateLimiter(self._storage)
        # The library locks each counter separately and drops expired counters' locks; here several change at once.
        self._lock = threading.Lock()
        self._pair = RateLimitItemPerSecond(PER_NAME_AND_ADDRESS, seconds, "pair")
        self._address = RateLimitItemPerSecond(PER_ADDRESS, seconds, "address")
        self._name = RateLimitItemPerSecond(PER_NAME, seconds, "name")
        self._links = RateLimitItemPerSecond(LINKS_PER_ADDRESS, seconds, "links")

    def reserve_sign_in(self, name: str, address: str) -> Try:
        """Counts a try at a name from an address.

        A name under attack from many addresses is not locked: an address that has not failed at it may still try.

        Raises: TooManyTriesError.
        """
        pair = f"{address} {name}"
        with self._lock:
            if not self._limiter.test(self._name, name) and self._num(self._pair, pair):
                raise self._too_many(self._pair, pair)
            return self._reserve((self._pair, pair), (self._address, address), (self._name, name))

    def reserve_link(self, address: str) -> Try:
        """Counts a try to use a link from an address. Raises: TooManyTriesError."""
        with self._lock:
            return self._reserve((self._links, address))

    def succeeded(self, tried: Try) -> None:
        """Uncounts a try that was not a failure."""
        with self._lock:
            for item, key in tried.counted:
                if self._num(item, key):
                    self._storage.decr(item.key_for(key))

    def _reserve(self, *keys: tuple[RateLimitItem, str]) -> Try:
        for item, key in keys:
            if item is not self._name and not self._limiter.test(item, key):
                raise self._too_many(item, key)
        for item, key in keys:
            self._limiter.hit(item, key)
        return Try(keys)

    def _num(self, item: RateLimitItem, key: str) -> int:
        return self._storage.get(item.key_for(key))

    def _too_many(self, item: RateLimitItem, key: str) -> TooManyTriesError:
        until = self._limiter.get_window_stats(item, key).reset_time
        return TooManyTriesError(max(1, int(until - time.time()) + 1))


def address_of(request: Request) -> str:
    """Returns the sender that limits apply to: an IPv4 address, or the /64 network of an IPv6 address."""
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else str(address)


def sign_in(accounts: Accounts, attempts: Attempts, request: Request, name: str, key: str) -> str | None:
    """Returns a session's token, or None if name and key do not match.

    Raises: TooManyTriesError, BusyError, AccountClosedError.
    """
    tried = attempts.reserve_sign_in(name[:MAX_NAME_CHARACTERS], address_of(request))
    try:
        token = accounts.sign_in(name, key)
    except BaseException:
        attempts.succeeded(tried)  # nothing was verified
        raise
    if token is not None:
        attempts.succeeded(tried)
    return token


def use_link(accounts: Accounts, attempts: Attempts, request: Request, code: str) -> tuple[Account, str] | None:
    """Like `Accounts.accept`, with rate limits. Raises: TooManyTriesError, BusyError."""
    tried = attempts.reserve_link(address_of(request))
    try:
        accepted = accounts.accept(code)
    except BaseException:
        attempts.succeeded(tried)
        raise
    if accepted is not None:
        attempts.succeeded(tried)
    return accepted
