"""Keys of accounts, and tokens of sessions and links: creating, storing and checking them.

A key is stored as its argon2 hash, which needs 64 MiB of memory to compute. Sessions and links have tokens of 256
random bits, stored as their SHA-256.
"""

import hashlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

HASHES_AT_ONCE = 2  # 128 MiB
HASHES_WAITING = 16  # each blocks one of the server's 40 threads
WAIT_SECONDS = 5.0


class BusyError(RuntimeError):
    """Too many keys are being checked right now. The caller may send the same request again."""


class KeyHasher:
    """Hashes and verifies a few keys at a time. Further callers wait; if too many wait, they are refused."""

    def __init__(self) -> None:
        self._hasher = PasswordHasher()
        self._queue = threading.BoundedSemaphore(HASHES_AT_ONCE + HASHES_WAITING)
        self._turns = threading.BoundedSemaphore(HASHES_AT_ONCE)
        self._nobody = self._hasher.hash(secrets.token_urlsafe())

    def hash(self, key: str) -> str:
        """Returns the hash to store. Raises: BusyError."""
        with self._turn():
            return self._hasher.hash(key)

    def verify(self, kept: str, key: str) -> bool:
        """Returns whether `key` has the stored hash `kept`. Without a hash ("") it takes just as long, and is False.

        Raises: BusyError.
        """
        with self._turn():
            try:
                # Replacing is safe, because no key contains characters that UTF-8 cannot encode.
                return self._hasher.verify(kept or self._nobody, key.encode("utf-8", "replace")) and bool(kept)
            except (VerificationError, InvalidHashError):
                return False

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._queue.acquire(blocking=False):
            raise BusyError("too many keys are being checked; try again in a few seconds")
        try:
            if not self._turns.acquire(timeout=WAIT_SECONDS):
                raise BusyError("too many keys are being checked; try again in a few seconds")
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._queue.release()


def new_key() -> str:
    """Returns a key for an account: 192 random bits."""
    return secrets.token_urlsafe(24)


def new_token() -> str:
    """Returns a token for a session or a link: 256 random bits."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Returns the SHA-256 to store for a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
