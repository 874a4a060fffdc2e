"""Keys of people and tokens of sessions and links: what is kept of them, and how much memory checking them takes.

A key is kept as its argon2 hash, which takes 64 MiB while it is computed. Sessions and links are 256 random bits, of
which SHA-256 is kept.
"""

import hashlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

HASHES_AT_ONCE = 2  # 128 MiB
HASHES_WAITING = 16  # each holds a thread of the server, which has 40
WAIT_SECONDS = 5.0


class BusyError(RuntimeError):
    """Too many keys are being checked at the moment; the same request may be sent again."""


class KeyHasher:
    """Hashes and verifies keys, few at a time: others wait, and where too many wait they are refused."""

    def __init__(
        self, at_once: int = HASHES_AT_ONCE, waiting: int = HASHES_WAITING, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._hasher, self._wait_seconds = PasswordHasher(), wait_seconds
        self._places = threading.BoundedSemaphore(at_once + waiting)
        self._turns = threading.BoundedSemaphore(at_once)
        self._nobody = self._hasher.hash(secrets.token_urlsafe())

    def hash(self, key: str) -> str:
        """What is kept of a key. Raises BusyError."""
        with self._turn():
            return self._hasher.hash(key)

    def verify(self, kept: str, key: str) -> bool:
        """Whether this is the key. Nothing kept ("") takes as long and is nobody's. Raises BusyError."""
        with self._turn():
            try:
                # What UTF-8 cannot hold is in no key.
                return self._hasher.verify(kept or self._nobody, key.encode("utf-8", "replace")) and bool(kept)
            except (VerificationError, InvalidHashError):
                return False

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise BusyError("too many keys are being checked; try again in a few seconds")
        try:
            if not self._turns.acquire(timeout=self._wait_seconds):
                raise BusyError("too many keys are being checked; try again in a few seconds")
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._places.release()


def new_key() -> str:
    """A key for a person: 192 random bits."""
    return secrets.token_urlsafe(24)


def new_token() -> str:
    """A token of a session or a link: 256 random bits."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
