"""Runs the labeling server on HTTP connections with deadlines.

Uvicorn waits forever for the rest of a request and keeps every connection. Here a connection must deliver all of a
request's headers, then its body, in time. A client that does not read its response is cut off too. If there are too
many connections, the one that has gone longest without a complete request is closed, so that half-sent requests do not
keep others out.

Leaves out: HTTP/2 and WebSockets.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from preferences.accounts import Accounts
from preferences.database import create_or_check
from preferences.page.app import make_app
from preferences.page.arena import ArenaSetup
from preferences.page.config import LabelingConfig, ServerConfig
from preferences.page.service import warning_of
from preferences.store import LabelStore

MAX_HEADER_BYTES = 32_000
SHUTDOWN_SECONDS = 10
EVERYWHERE = ("0.0.0.0", "::", "")  # no link can use these addresses


def serve(
    url_or_path: str | Path,
    config: LabelingConfig,
    *,
    host: str,
    port: int,
    announce: Callable[[str], None],
    arena: ArenaSetup | None = None,
) -> None:
    """Serves the pages and the API until interrupted. If there is no lead yet, it announces a one-time link for one.

    With an `arena`, its pages are there too.

    Raises: ValueError for an unusable or damaged database, and for an address that it cannot listen on.
    """
    with listening(host, port) as listener:
        created = create_or_check(url_or_path)
        with LabelStore(url_or_path) as store:
            accounts = Accounts(url_or_path)
            try:
                server = _reached_at(config.server, host, listener.getsockname()[1])
                if created:
                    announce(created)
                announce(f"{'labeling page' if arena is None else 'arena'}: {server.public_url}")
                with store.reading() as connection:
                    warning = warning_of(config, connection)
                if warning:
                    announce(f"warning: {warning}")
                first = accounts.invite_first_lead()
                if first is not None:
                    announce(f"there is no lead yet; one-time link for {first[0]!r}: {server.link(first[1])}")
                own = config.model_copy(update={"server": server})
                with ExitStack() as closing:
                    opened = None if arena is None else closing.enter_context(arena.opened(url_or_path, store, own))
                    app = make_app(store, accounts, own, arena=opened)
                    with suppress(KeyboardInterrupt):
                        uvicorn.Server(server_settings(app, Deadlines())).run([listener])
            finally:
                accounts.close()


def server_settings(app: Any, deadlines: "Deadlines") -> uvicorn.Config:
    """Returns uvicorn's configuration, with deadlines and without trust in headers about a request's sender.

    The application itself decides which proxies' headers to trust (`ServerConfig.trusted_proxies`).
    """
    return uvicorn.Config(
        app,
        http=timed_protocol(deadlines),
        ws="none",
        lifespan="off",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=deadlines.keep_alive_seconds,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


def listening(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises: ValueError if it cannot listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2_048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--port is {port}, on which another program already listens at {host}; a free port was expected"
            ) from error
        raise ValueError(f"--host is {host!r} and --port {port}: cannot listen there: {error.strerror}") from error
    # Connections inherit this option. Without it the kernel holds back a response's body until the client acknowledges
    # the headers, which takes clients 40 ms. asyncio sets it only on sockets created with the TCP protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _reached_at(config: ServerConfig, host: str, port: int) -> ServerConfig:
    """Fills in the address that the server listens on, if the configuration has no public one.

    A server that listens on all addresses cannot know the names by which it is reached, so it accepts all of them.
    """
    hosts = config.trusted_hosts
    if not hosts:
        hosts = ("*",) if host in EVERYWHERE and not config.public_url else (host,)
    name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    url = config.public_url or f"http://{name}:{port}"
    return config.model_copy(
        update={"public_url": url, "trusted_hosts": tuple(h for h in hosts if h not in EVERYWHERE)}
    )


# ---- connections with deadlines ----


@dataclass
class Deadlines:
    """A server's time limits per connection, its connection limit, and connections that may be closed to make room."""

    header_seconds: float = 10.0  # for receiving a request's headers
    body_seconds: float = 60.0  # for receiving its body
    reading_seconds: float = 60.0  # how long a client may leave a response unread
    keep_alive_seconds: int = 15  # how long a connection may idle between requests
    max_connections: int = 1_000  # above it, the one idle for longest is closed
    waiting: dict["TimedProtocol", None] = field(default_factory=dict)  # in order of arrival


class TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with deadlines. `timed_protocol` makes the class for a server."""

    deadlines: Deadlines

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""  # "headers", "body", "request" between two requests, or "" while one is answered
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.deadlines.max_connections:
            next(iter(self.deadlines.waiting), self).abort()
        if not transport.is_closing():
            self._await("headers")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts a deadline, because the client is not reading the response."""
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self.deadlines.reading_seconds, self.abort)

    def resume_writing(self) -> None:
        """Cancels the deadline, because the client is reading again."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def abort(self) -> None:
        """Closes the connection immediately."""
        self._await("")
        self.transport.abort()

    def _look(self) -> None:
        """Starts the deadline for what must arrive next."""
        if self.transport.is_closing():
            return self._await("")
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return self._await("body")
        if state is not h11.IDLE:
            return self._await("")
        return self._await("headers" if self.conn.trailing_data[0] else "request")

    def _await(self, what: str) -> None:
        """Starts the deadline for `what`, unless it is already running: a byte now and then must not extend it."""
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = what
        if not what:
            self.deadlines.waiting.pop(self, None)
            return
        self.deadlines.waiting[self] = None
        if what == "request":
            return  # uvicorn's own keep-alive timer runs
        seconds = self.deadlines.header_seconds if what == "headers" else self.deadlines.body_seconds
        self._deadline = self.loop.call_later(seconds, self.abort)


def timed_protocol(deadlines: Deadlines) -> type[TimedProtocol]:
    """Returns the protocol class for one server."""
    return type("ServerProtocol", (TimedProtocol,), {"deadlines": deadlines})
