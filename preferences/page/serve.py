"""Running the labeling server."""

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from preferences.accounts import Accounts
from preferences.database import create_or_check
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig, ServerConfig
from preferences.page.timed_protocol import Deadlines, timed_protocol
from preferences.store import LabelStore

MAX_HEADER_BYTES = 32_000
SHUTDOWN_SECONDS = 10
EVERYWHERE = ("0.0.0.0", "::", "")  # no link can use these addresses


def serve(
    url_or_path: str | Path, config: LabelingConfig, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serves the pages and the API until interrupted. If there is no lead yet, it announces a one-time link for one.

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
                announce(f"labeling page: {server.public_url}")
                first = accounts.invite_first_lead()
                if first is not None:
                    announce(f"there is no lead yet; one-time link for {first[0]!r}: {server.link(first[1])}")
                app = make_app(store, accounts, config.model_copy(update={"server": server}))
                with suppress(KeyboardInterrupt):
                    uvicorn.Server(server_settings(app, server)).run([listener])
            finally:
                accounts.close()


def server_settings(app: Any, config: ServerConfig) -> uvicorn.Config:
    """Returns uvicorn's configuration: with deadlines, and trusting no header about the sender of a request.

    The application itself decides which proxies' headers to trust (`ServerConfig.trusted_proxies`).
    """
    deadlines = Deadlines(config.header_seconds, config.body_seconds, config.reading_seconds, config.max_connections)
    return uvicorn.Config(
        app,
        http=timed_protocol(deadlines),
        ws="none",
        lifespan="off",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=config.keep_alive_seconds,
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
    # Connections inherit it. Otherwise the kernel keeps an answer's body until the client has acknowledged its headers,
    # which clients do after 40 ms; asyncio would set it only on sockets that were made with the protocol's number.
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
