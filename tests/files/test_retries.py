"""What may pass is sent again, at growing pauses; what will not is not; nobody's patience or memory is exceeded."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from files import retries
from files.retries import post_json
from tests.serving import serving

FIRST_PAUSE_SECONDS = 0.05


class Server(ThreadingHTTPServer):
    """Sends what was queued: (status, headers, body) each; a status of 0 breaks the connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.queued: list[tuple[int, dict[str, str], bytes]] = []
        self.received: list[tuple[float, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/first"

    def pauses(self) -> list[float]:
        """Seconds between the requests."""
        times = [at for at, _, _ in self.received]
        return [after - before for before, after in itertools.pairwise(times)]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((time.monotonic(), self.path, body))
        status, headers, content = self.server.queued.pop(0)
        if not status:
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep the terminal clean."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", FIRST_PAUSE_SECONDS)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Server()) as server:
        yield server


def post(server: Server, num_retries: int, **more: Any) -> httpx.Response:
    return post_json(server.url, {"a": 1}, headers={}, timeout_seconds=5.0, num_retries=num_retries, **more)


def test_pauses_double(server: Server) -> None:
    server.queued = [(500, {}, b""), (429, {}, b""), (0, {}, b""), (200, {}, b"done")]
    attempts: list[int] = []
    response = post(server, 3, on_attempt=lambda: attempts.append(len(server.received)))
    assert (response.status_code, response.content) == (200, b"done")
    assert [body for _, _, body in server.received] == [{"a": 1}] * 4
    assert all(pause >= FIRST_PAUSE_SECONDS * 2**number for number, pause in enumerate(server.pauses())), (
        server.pauses()
    )
    assert attempts == [0, 1, 2, 3]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_repeated(server: Server, status: int) -> None:
    server.queued = [(status, {}, b"no")]
    response = post(server, 3)
    assert (response.status_code, response.content, len(server.received)) == (status, b"no", 1)


def test_the_last_failure_is_what_comes_back(server: Server) -> None:
    server.queued = [(0, {}, b""), (503, {}, b"later")]
    assert post(server, 1).reason_phrase == "Service Unavailable"
    server.queued = [(503, {}, b"later"), (0, {}, b"")]
    with pytest.raises(httpx.RequestError):
        post(server, 1)
    assert not server.queued


def test_a_pause_is_as_long_as_the_server_asks_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.queued = [(429, {"Retry-After": "1"}, b""), (503, {"Retry-After": "Mon, 23 Nov 2026 07:00:00 GMT"}, b"")]
    server.queued.append((200, {}, b""))
    post(server, 2)
    first, second = server.pauses()
    assert first >= 1.0
    assert second < 30  # dates are not understood, and take no request longer than a busy machine does
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.1)
    server.queued = [(429, {"Retry-After": "3600"}, b""), (200, {}, b"")]
    post(server, 1)
    assert server.pauses()[-1] < 60


def test_nothing_more_is_sent_once_it_is_stopped(server: Server) -> None:
    server.queued = [(429, {"Retry-After": "60"}, b"wait")] * 2
    stopped = threading.Event()
    timer = threading.Timer(0.3, stopped.set)
    timer.start()
    response = post(server, 5, stopped=stopped)
    timer.join()
    assert (response.status_code, response.content, len(server.received)) == (429, b"wait", 1)


def test_a_redirect_is_not_followed(server: Server) -> None:
    """A key would be sent to wherever it leads."""
    server.queued = [(307, {"Location": server.url.replace("first", "second")}, b"")]
    assert post(server, 3).status_code == 307
    assert [path for _, path, _ in server.received] == ["/first"]


def test_a_response_that_is_too_long_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_RESPONSE_BYTES", 10)
    server.queued = [(200, {}, b"x" * 10), (200, {}, b"x" * 11)]
    assert post(server, 0).content == b"x" * 10
    with pytest.raises(httpx.ReadError, match="a response of more than 10 bytes"):
        post(server, 0)


def test_a_response_that_breaks_off_is_a_failure_unless_it_reports_an_error(server: Server) -> None:
    cut = {"Content-Length": "100"}
    server.queued = [(200, cut, b"half"), (404, cut, b"half")]
    with pytest.raises(httpx.RequestError):
        post(server, 0)
    response = post(server, 3)
    assert (response.status_code, response.content, server.queued) == (404, b"half", [])
