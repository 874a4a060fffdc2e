"""Rate limits for signing in and for opening links, by address and by name.

Limits count failures. A try is counted before it is verified and uncounted if it succeeds, so that tries sent at the
same time cannot pass together. Leaves out: counts shared by several servers on one store; each has its own.
"""

import ipaddress
import threading
import time
from dataclasses import dataclass

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from starlette.requests import Request

from preferences.accounts import Account, Accounts
from preferences.names import MAX_NAME_CHARACTERS

WINDOW_SECONDS = 300
PER_NAME_AND_ADDRESS = 8
PER_ADDRESS = 64  # leaves room for the typing errors of an office that shares one address
PER_NAME = 100  # above it, addresses that have failed at the name must wait; others may still try
LINKS_PER_ADDRESS = 32


class TooManyTriesError(Exception):
    """Tries failed too often. The next one is allowed in `wait_seconds`."""

    def __init__(self, wait_seconds: int) -> None:
        super().__init__(f"too many tries; try again in {wait_seconds} seconds")
        self.wait_seconds = wait_seconds


@dataclass(frozen=True)
class Try:
    """A try that was counted, with the keys under which it was, so that it can be uncounted."""

    counted: tuple[tuple[RateLimitItem, str], ...]


class Attempts:
    """Counts failed tries in windows of `seconds` from the first failure. A block ends with its window."""

    def __init__(self, seconds: int = WINDOW_SECONDS) -> None:
        self._storage = MemoryStorage()
        self._limiter = FixedWindowRateLimiter(self._storage)
        # The library locks single counters, and drops locks with expired ones; here several counters change at once.
        self._lock = threading.Lock()
        self._pair = RateLimitItemPerSecond(PER_NAME_AND_ADDRESS, seconds, "pair")
        self._address = RateLimitItemPerSecond(PER_ADDRESS, seconds, "address")
        self._name = RateLimitItemPerSecond(PER_NAME, seconds, "name")
        self._links = RateLimitItemPerSecond(LINKS_PER_ADDRESS, seconds, "links")

    def reserve_sign_in(self, name: str, address: str) -> Try:
        """Counts a try at a name from an address.

        A name under attack from everywhere is not locked: an address that has not failed at it may still try.

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
    """Returns a session's token, or None if name and key do not match. Raises: TooManyTriesError, BusyError."""
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
