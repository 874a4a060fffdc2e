"""How often somebody may try to sign in or to open a link, by address and by name.

Limits count failures. A try is counted before it is verified and taken back where it succeeds, so that tries sent at
once cannot pass together. Leaves out: counts shared by several servers on one store; each has its own.
"""

import ipaddress
import threading
import time
from dataclasses import dataclass

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter
from starlette.requests import Request

from preferences.names import MAX_NAME_CHARACTERS
from preferences.people import Account, People

WINDOW_SECONDS = 300
PER_NAME_AND_ADDRESS = 8
PER_ADDRESS = 64  # an office behind one address mistypes too
PER_NAME = 100  # beyond it an address that has failed at the name waits; others are still heard
LINKS_PER_ADDRESS = 32


class TooManyTriesError(Exception):
    """Tries failed too often; `wait_seconds` have to pass."""

    def __init__(self, wait_seconds: int) -> None:
        super().__init__(f"too many tries; again in {wait_seconds} seconds")
        self.wait_seconds = wait_seconds


@dataclass(frozen=True)
class Try:
    """A try that was counted: under which keys, so that it can be taken back."""

    counted: tuple[tuple[RateLimitItem, str], ...]


class Attempts:
    """Failed tries within `seconds` of the first; what is blocked is free again when they have passed."""

    def __init__(self, seconds: int = WINDOW_SECONDS) -> None:
        self._storage = MemoryStorage()
        self._limiter = FixedWindowRateLimiter(self._storage)
        # The library locks each counter, but forgets locks along with what ran out; and several counters change here.
        self._lock = threading.Lock()
        self._pair = RateLimitItemPerSecond(PER_NAME_AND_ADDRESS, seconds, "pair")
        self._address = RateLimitItemPerSecond(PER_ADDRESS, seconds, "address")
        self._name = RateLimitItemPerSecond(PER_NAME, seconds, "name")
        self._links = RateLimitItemPerSecond(LINKS_PER_ADDRESS, seconds, "links")

    def reserve_sign_in(self, name: str, address: str) -> Try:
        """Count a try at a name from an address. Raises TooManyTriesError.

        A name that is tried from everywhere is not locked: whoever has not failed at it from their address gets in.
        """
        pair = f"{address} {name}"
        with self._lock:
            if not self._limiter.test(self._name, name) and self._num(self._pair, pair):
                raise self._too_many(self._pair, pair)
            return self._reserve((self._pair, pair), (self._address, address), (self._name, name))

    def reserve_link(self, address: str) -> Try:
        """Count a try to use a link from an address. Raises TooManyTriesError."""
        with self._lock:
            return self._reserve((self._links, address))

    def succeeded(self, tried: Try) -> None:
        """Take a try back: it was no failure."""
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
    """Who sends this, as far as limits go: an IPv4 address, or the network that a site has of IPv6 addresses."""
    host = request.client.host if request.client is not None else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else str(address)


def sign_in(people: People, attempts: Attempts, request: Request, name: str, key: str) -> str | None:
    """A session's token; None where name and key do not go together. Raises TooManyTriesError and BusyError."""
    tried = attempts.reserve_sign_in(name[:MAX_NAME_CHARACTERS], address_of(request))
    try:
        token = people.sign_in(name, key)
    except BaseException:
        attempts.succeeded(tried)  # nothing was verified
        raise
    if token is not None:
        attempts.succeeded(tried)
    return token


def use_link(people: People, attempts: Attempts, request: Request, code: str) -> tuple[Account, str] | None:
    """As `People.accept`. Raises TooManyTriesError and BusyError."""
    tried = attempts.reserve_link(address_of(request))
    try:
        accepted = people.accept(code)
    except BaseException:
        attempts.succeeded(tried)
        raise
    if accepted is not None:
        attempts.succeeded(tried)
    return accepted
