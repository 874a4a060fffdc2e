"""Requests to external HTTP servers, with retries after transient failures.

A broken connection, a timeout, and statuses that say "try later" are transient; any other refusal would only repeat.
Pauses double, and are at least as long as Retry-After asks for. Dates in Retry-After are not supported.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import httpx
import tenacity

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
RETRIED_STATUSES = frozenset({408, 425, 429})  # "try later"; all statuses from 500 on are retried too
MAX_RESPONSE_BYTES = 16 * 2**20


def send_with_retries(
    send: Callable[[], httpx.Response],
    give_up: tenacity.stop.stop_base,
    *,
    first_pause_seconds: float,
    longest_pause_seconds: float,
    retried_statuses: Collection[int] = RETRIED_STATUSES,
    stopped: threading.Event | None = None,
) -> httpx.Response:
    """Call `send` until its response is final, `give_up` says to stop, or `stopped` is set.

    Returns the last response, whatever its status.

    Raises:
        httpx.RequestError: the last attempt got no whole response.
    """
    stopped = stopped or threading.Event()
    outcomes: list[Future[httpx.Response]] = []

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise _StoppedError

    def is_transient(response: httpx.Response) -> bool:
        return response.status_code >= 500 or response.status_code in retried_statuses

    def keep_outcome(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        outcomes.append(state.outcome)

    exponential = tenacity.wait_exponential(first_pause_seconds, longest_pause_seconds)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(httpx.RequestError) | tenacity.retry_if_result(is_transient),
        stop=give_up,
        wait=lambda state: max(exponential(state), min(_requested_pause(state), longest_pause_seconds)),
        sleep=pause,
        after=keep_outcome,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    try:
        return retrying(send)
    except _StoppedError:
        return outcomes[-1].result()


def post_json(
    url: str,
    value: Any,
    *,
    headers: Mapping[str, str],
    timeout_seconds: float,
    num_retries: int,
    on_attempt: Callable[[], None] = lambda: None,
    stopped: threading.Event | None = None,
) -> httpx.Response:
    """POST a JSON value, with up to `num_retries` retries. Redirects are not followed: they would get the API key too.

    Returns the last response, whatever its status. `timeout_seconds` limits each silence of the server.

    Raises:
        httpx.RequestError: the last attempt got no whole response, or one of more than `MAX_RESPONSE_BYTES`.
    """
    body = json.dumps(value).encode()

    def send() -> httpx.Response:
        on_attempt()
        request = _client().build_request(
            "POST", url, content=body, headers={"Content-Type": "application/json", **headers}, timeout=timeout_seconds
        )
        response = _client().send(request, stream=True)
        try:
            return _read(response)
        finally:
            response.close()

    return send_with_retries(
        send,
        tenacity.stop_after_attempt(num_retries + 1),
        first_pause_seconds=FIRST_PAUSE_SECONDS,
        longest_pause_seconds=LONGEST_PAUSE_SECONDS,
        stopped=stopped,
    )


class _StoppedError(Exception):
    """Raised when nobody waits for the response any more."""


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


def _requested_pause(state: tenacity.RetryCallState) -> float:
    """Returns the seconds that Retry-After asks to wait; 0 if it is missing or not in seconds."""
    if state.outcome is None or state.outcome.failed:
        return 0.0
    value = state.outcome.result().headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


@cache
def _client() -> httpx.Client:
    """The process's only client, since creating one reads all certificates. It keeps no idle connection, which may
    go stale.
    """
    return httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
