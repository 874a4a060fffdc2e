"""What may pass is sent again, at growing pauses; what will not is not; nobody's patience or memory is exceeded."""

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from files import retries
from files.retries import ServerError, post_json
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


def whole(content: bytes) -> bytes:
    if content == b"half":
        raise ValueError("a whole one was expected")
    return content


def post(url: str, max_wait_seconds: float = 60.0, *, timeout_seconds: float = 5.0, **more: Any) -> bytes:
    more.setdefault("waiting", lambda _: nullcontext())
    limits = {"timeout_seconds": timeout_seconds, "max_wait_seconds": max_wait_seconds}
    return post_json(url, {"a": 1}, whole, **limits, **more)


def test_pauses_double(server: Server) -> None:
    server.queued = [(500, {}, b""), (429, {}, b""), (0, {}, b""), (200, {}, b"half"), (200, {}, b"done")]
    assert post(server.url) == b"done"
    assert [body for _, _, body in server.received] == [{"a": 1}] * 5
    assert all(pause >= FIRST_PAUSE_SECONDS * 2**number for number, pause in enumerate(server.pauses())), (
        server.pauses()
    )


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_repeated(server: Server, status: int) -> None:
    server.queued = [(status, {}, b"no")]
    with pytest.raises(ServerError, match=rf"^{server.url}: status {status} \([\w ]+\): 'no'$"):
        post(server.url)
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (503, b"later", r"status 503 \(Service Unavailable\): 'later'"),
        (200, b"half", r"'half' was answered; a whole one was expected"),
        (0, b"", r"RemoteProtocolError: .*"),
    ],
)
def test_an_outage_ends_all_requests_together_and_is_reported_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, said: str
) -> None:
    monkeypatch.setattr(retries, "QUIET_SECONDS", 0.0)
    server.queued = [(status, {}, content)] * 1000
    reports: list[str] = []

    @contextmanager
    def waiting(notice: str) -> Iterator[None]:
        reports.append(notice)
        yield
        reports.append("over")

    failures: list[str] = []

    def ask() -> None:
        with pytest.raises(ServerError) as caught:
            post(server.url, 1.2, waiting=waiting)
        failures.append(str(caught.value))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(re.fullmatch(rf"{server.url}: {said}; no proper answer for \d+ s", failure) for failure in failures)
    assert [bool(re.fullmatch(rf"waiting up to 1 s for {server.url}: {said}", report)) for report in reports] == [
        True,
        False,
    ]
    num_sent = len(server.received)
    ask()
    assert len(server.received) == num_sent + 1  # its outage has lasted too long already
    server.queued = [(200, {}, b"done"), (503, {}, b""), (200, {}, b"done")]
    assert [post(server.url, 1.2) for _ in range(2)] == [b"done"] * 2  # it is back, and has all the time again


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\n"])
def test_an_answer_that_drips_meets_the_limit_of_the_whole(monkeypatch: pytest.MonkeyPatch, begins: bytes) -> None:
    """Each byte comes well within the limit of the silence."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    gone = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(begins)
            while not gone.wait(0.05):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/drips"
        try:
            with pytest.raises(ServerError, match=rf"^{url}: ReadTimeout: no whole answer within 0.4 s$"):
                post(url, 0.0, timeout_seconds=0.4)
        finally:
            gone.set()
            thread.join()


def test_a_pause_is_as_long_as_the_server_asks_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.queued = [(429, {"Retry-After": "1"}, b""), (503, {"Retry-After": "Mon, 23 Nov 2026 07:00:00 GMT"}, b"")]
    server.queued.append((200, {}, b""))
    post(server.url)
    first, second = server.pauses()
    assert first >= 1.0
    assert second < 30  # dates are not understood, and take no request longer than a busy machine does
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.1)
    server.queued = [(429, {"Retry-After": "3600"}, b""), (200, {}, b"")]
    post(server.url)
    assert server.pauses()[-1] < 60


def test_nothing_more_is_sent_once_it_is_stopped(server: Server) -> None:
    server.queued = [(429, {"Retry-After": "60"}, b"wait")] * 2
    stopped = threading.Event()
    timer = threading.Timer(0.3, stopped.set)
    timer.start()
    with pytest.raises(ServerError, match=r"status 429 \(Too Many Requests\): 'wait'"):
        post(server.url, stopped=stopped)
    timer.join()
    assert len(server.received) == 1


def test_messages_name_no_credentials(server: Server) -> None:
    server.queued = [(403, {}, b"no")]
    url = server.url.replace("http://", "http://ann:secret@") + "?key=secret"
    with pytest.raises(ServerError, match=r"http://\*\*\*@127\.0\.0\.1:\d+/first\?\*\*\*: status 403") as caught:
        post(url)
    assert "secret" not in str(caught.value)


def test_a_redirect_is_not_followed(server: Server) -> None:
    """A key would be sent to wherever it leads."""
    server.queued = [(307, {"Location": server.url.replace("first", "second")}, b"")]
    with pytest.raises(ServerError, match="status 307"):
        post(server.url)
    assert [path for _, path, _ in server.received] == ["/first"]


def test_a_response_that_is_too_long_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "MAX_RESPONSE_BYTES", 10)
    server.queued = [(200, {}, b"x" * 10), (200, {}, b"x" * 11)]
    assert post(server.url, 0) == b"x" * 10
    with pytest.raises(ServerError, match="a response of more than 10 bytes"):
        post(server.url, 0)


def test_a_response_that_breaks_off_is_a_failure_unless_it_reports_an_error(server: Server) -> None:
    cut = {"Content-Length": "100"}
    server.queued = [(200, cut, b"half"), (404, cut, b"half")]
    with pytest.raises(ServerError, match="RemoteProtocolError"):
        post(server.url, 0)
    with pytest.raises(ServerError, match=r"status 404 \(Not Found\): 'half'"):
        post(server.url)
    assert not server.queued
