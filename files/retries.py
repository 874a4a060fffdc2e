"""Requests to external servers, repeated after transient failures.

A broken connection, a timeout, a malformed answer, and statuses that say "try later" are transient; any other refusal
would only repeat. Pauses double, and are at least as long as Retry-After asks for. Dates in Retry-After are not
supported.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import httpx
import tenacity

from files.urls import without_credentials

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
QUIET_SECONDS = 5.0  # a longer outage is reported
SHOWN_CHARACTERS = 200  # of an answer, in an error message
RETRIED_STATUSES = frozenset({408, 425, 429})  # "try later"; all statuses from 500 on are retried too
MAX_RESPONSE_BYTES = 16 * 2**20

Value = TypeVar("Value")


class ServerError(Exception):
    """A server gave no proper answer. The message is one line: the server, its last answer, and how long it failed."""


def post_json(
    url: str,
    value: Any,
    read: Callable[[bytes], Value],
    *,
    timeout_seconds: float,
    max_wait_seconds: float,
    waiting: Callable[[str], AbstractContextManager[None]],
    key: str = "",
    stopped: threading.Event | None = None,
) -> Value:
    """POST a JSON value until the server gives a proper answer. Returns what `read` finds in it; `read` raises
    ValueError, saying what was expected, for a malformed one.

    `timeout_seconds` limits the time to the end of each answer, and `max_wait_seconds` how long the request is
    repeated after its first failure. A server that has given this process no proper answer for as long is asked once.
    `waiting` reports an outage while its context is open. Redirects are not followed: they would get the `key` too.

    Raises:
        ServerError: there is no proper answer.
    """
    outage, body = _Outage(url, key, max_wait_seconds, waiting), json.dumps(value).encode()
    stopped = stopped or threading.Event()

    def send() -> Value:
        response = _sent(url, body, key, timeout_seconds)
        if not response.is_success:
            raise _StatusError(response)
        try:
            return read(response.content)
        except ValueError as error:
            raise httpx.DecodingError(f"{_shown(response.content, key)} was answered; {error}") from None

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise tenacity.RetryError(outage.last)

    retrying = tenacity.Retrying(**outage.policy(_is_transient), sleep=pause)
    with outage.reporting, suppress(tenacity.RetryError, _StatusError):
        return retrying(send)
    raise outage.error()


async def until_up(
    name: str,
    attempt: Callable[[], Awaitable[Value]],
    *,
    max_wait_seconds: float,
    waiting: Callable[[str], AbstractContextManager[None]],
) -> Value:
    """Await `attempt` as `post_json` repeats requests: errors but RuntimeError are an outage of the server `name`.

    Raises:
        ServerError: the outage lasts longer than `max_wait_seconds`.
    """
    outage = _Outage(name, "", max_wait_seconds, waiting)
    with outage.reporting, suppress(tenacity.RetryError):
        return await tenacity.AsyncRetrying(**outage.policy(_is_no_answer))(attempt)
    raise outage.error() from outage.last.exception()


class _StatusError(Exception):
    """A server answered with a status that reports an error. Its argument is the httpx.Response."""


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, _StatusError):
        return error.args[0].status_code >= 500 or error.args[0].status_code in RETRIED_STATUSES
    return isinstance(error, httpx.RequestError)


def _is_no_answer(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, RuntimeError)


@dataclass
class _Server:
    """What the threads of this process know of a server."""

    away_since: float = math.inf  # when it first failed since its last proper answer, monotonic
    is_reported: bool = False


@cache
def _server(_url: str) -> _Server:
    return _Server()


@dataclass
class _Outage:
    """How long a request has failed, or its server in all threads of this process, and whether this is reported."""

    url: str
    key: str
    max_wait_seconds: float
    waiting: Callable[[str], AbstractContextManager[None]]
    failed_since: float = math.inf
    last: tenacity.Future = field(default_factory=lambda: tenacity.Future(0))  # of the attempts
    reporting: ExitStack = field(default_factory=ExitStack)

    @property
    def server(self) -> _Server:
        return _server(self.url)

    @property
    def seconds(self) -> float:
        return max(0.0, time.monotonic() - min(self.failed_since, self.server.away_since))

    def policy(self, is_outage: Callable[[BaseException], bool]) -> dict[str, Any]:
        """Returns tenacity's settings: attempts are repeated after errors that `is_outage` accepts."""

        def is_away(state: tenacity.RetryCallState) -> bool:
            assert state.outcome is not None
            self.last, error = state.outcome, state.outcome.exception()
            if error is not None and is_outage(error):
                return True
            self.server.away_since = math.inf
            return False

        def pause(state: tenacity.RetryCallState) -> float:
            seconds = max(exponential(state), min(_requested_pause(self.last.exception()), LONGEST_PAUSE_SECONDS))
            return max(0.0, min(seconds, self.seconds_left()))

        exponential = tenacity.wait_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        return {"retry": is_away, "stop": lambda _: self.seconds_left() <= 0, "wait": pause}

    def seconds_left(self) -> float:
        """Returns how long the request may still be repeated after its last failure."""
        now, server = time.monotonic(), self.server
        self.failed_since, server.away_since = min(self.failed_since, now), min(server.away_since, now)
        left = self.max_wait_seconds - self.seconds
        if self.seconds >= QUIET_SECONDS and left > 0 and not server.is_reported:
            server.is_reported = True
            self.reporting.callback(setattr, server, "is_reported", False)
            notice = f"waiting up to {self.max_wait_seconds:.0f} s for {self.trouble}"
            self.reporting.enter_context(self.waiting(notice))
        return left

    @property
    def trouble(self) -> str:
        """The server and what it last said, without credentials."""
        return f"{without_credentials(self.url)}: {without_credentials(self.said)}"

    @property
    def said(self) -> str:
        """The last attempt in a few words: its status and the beginning of its text, or what went wrong."""
        error = self.last.exception()
        if isinstance(error, httpx.DecodingError):
            return str(error)
        if not isinstance(error, _StatusError):
            return f"{type(error).__name__}: {error}"
        (response,) = error.args
        content = f": {_shown(response.content, self.key)}" if response.content else ""
        return f"status {response.status_code} ({response.reason_phrase}){content}"

    def error(self) -> ServerError:
        """Returns what to raise after the last attempt."""
        how_long = f"; no proper answer for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        return ServerError(f"{self.trouble}{how_long}")


def _sent(url: str, body: bytes, key: str, timeout_seconds: float) -> httpx.Response:
    """Send one request. Returns the whole response.

    httpx limits each silence of a server, so the socket is shut once the time for the whole answer is over.

    Raises:
        httpx.RequestError: there is no whole response, or one of more than `MAX_RESPONSE_BYTES`.
    """
    sockets, is_over = list[socket.socket](), threading.Event()

    def shut() -> None:
        is_over.set()
        for opened in sockets:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def trace(event: str, info: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            sockets.append(info["return_value"].get_extra_info("socket"))
            if is_over.is_set():
                shut()

    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    timer = threading.Timer(timeout_seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        with _client().stream(
            "POST", url, content=body, headers=headers, timeout=timeout_seconds, extensions={"trace": trace}
        ) as response:
            answer = _read(response)
    except httpx.RequestError:
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():  # an answer without a length ends as its connection does
        raise httpx.ReadTimeout(f"no whole answer within {timeout_seconds:g} s")
    return answer


def _read(response: httpx.Response) -> httpx.Response:
    """Reads the whole response. If it reports an error, the part that can be read is enough."""
    content = bytearray()
    try:
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > MAX_RESPONSE_BYTES:
                raise httpx.ReadError(f"a response of more than {MAX_RESPONSE_BYTES:,} bytes")
    except httpx.RequestError:
        if response.status_code < 400:
            raise
    pause = {name: value for name, value in response.headers.items() if name == "retry-after"}
    extensions = {"reason_phrase": response.reason_phrase.encode()}
    return httpx.Response(response.status_code, headers=pause, content=bytes(content), extensions=extensions)


def _shown(content: bytes, key: str) -> str:
    """Returns the beginning of an answer without the key, which some servers repeat."""
    text = " ".join(content.decode(errors="replace").split())
    return repr((text.replace(key, "***") if key else text)[:SHOWN_CHARACTERS])


def _requested_pause(error: BaseException | None) -> float:
    """Returns the seconds that Retry-After asks to wait; 0 if it is missing or not in seconds."""
    value = error.args[0].headers.get("Retry-After", "") if isinstance(error, _StatusError) else ""
    return float(value) if value.isdecimal() else 0.0


@cache
def _client() -> httpx.Client:
    """The process's only client, since creating one reads all certificates. It keeps no idle connection, which may
    go stale.
    """
    return httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
