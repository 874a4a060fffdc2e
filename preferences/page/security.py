"""What every answer of the page carries, and how often somebody may try to sign in."""

import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from preferences.people import People

# Nothing is loaded from elsewhere, nothing is framed, and no script stands in the page itself.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
MAX_BODY_BYTES = 4_000_000


async def harden(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Middleware: refuse what another site's page sends and what is too long; set the headers."""
    if request.method not in ("GET", "HEAD"):
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return Response("refused: this came from another site's page", 403)
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return Response(f"refused: more than {MAX_BODY_BYTES} bytes", 413)
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if not request.url.path.startswith("/static/"):
        response.headers.setdefault("Cache-Control", "no-store")
    return response


class TooManyTriesError(Exception):
    """Sign-ins failed too often; `wait_seconds` have to pass."""

    def __init__(self, wait_seconds: int) -> None:
        super().__init__(f"too many tries; again in {wait_seconds} seconds")
        self.wait_seconds = wait_seconds


class Attempts:
    """Failed sign-ins by name and by address: at most `limit` of each within `seconds`."""

    def __init__(self, limit: int, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.seconds, self._clock = limit, seconds, clock
        self._failed: dict[str, deque[float]] = {}
        self._lock = threading.Lock()

    def wait_seconds(self, *keys: str) -> int:
        """How long until one may try again under all these keys; 0 = now."""
        with self._lock:
            return max(self._wait(key) for key in keys)

    def note_failure(self, *keys: str) -> None:
        with self._lock:
            now = self._clock()
            for key in [key for key, times in self._failed.items() if times[-1] <= now - self.seconds]:
                del self._failed[key]  # nobody's guesses pile up here
            for key in keys:
                self._failed.setdefault(key, deque(maxlen=self.limit)).append(now)

    def _wait(self, key: str) -> int:
        times = self._failed.get(key, deque())
        remaining = times[0] + self.seconds - self._clock() if len(times) == self.limit else 0.0
        return max(0, int(remaining) + 1) if remaining > 0 else 0


def sign_in(people: People, attempts: Attempts, request: Request, name: str, key: str) -> str | None:
    """A session's token; None where name and key do not go together. Raises TooManyTriesError."""
    keys = (f"name {name}", f"address {request.client.host if request.client else ''}")
    wait_seconds = attempts.wait_seconds(*keys)
    if wait_seconds:
        raise TooManyTriesError(wait_seconds)
    token = people.sign_in(name, key)
    if token is None:
        attempts.note_failure(*keys)
    return token
