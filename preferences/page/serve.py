"""Runs the labeling server.

Leaves out: deadlines for slow clients, which the proxy in front of the server has, HTTP/2 and WebSockets.
"""

import errno
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import uvicorn

from preferences.accounts import Accounts
from preferences.database import create_or_check, place_of
from preferences.page.app import make_app
from preferences.page.arena import ArenaSetup
from preferences.page.config import LabelingConfig, ServerConfig
from preferences.page.service import warning_of
from preferences.store import LabelStore

MAX_HEADER_BYTES = 32_000
SHUTDOWN_SECONDS = 10
KEEP_ALIVE_SECONDS = 15  # how long a connection may idle between requests
MAX_CONNECTIONS = 1_000  # above it, requests are answered with 503
COPIED = (
    "warning: this store was copied or moved since it was last served: {num_ended} sessions and unused links have"
    " ended. Who was shut out after a copy was made is not shut out in it; see People, or heed label restore --current"
)
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
                num_ended = accounts.end_access_of_copies(place_of(url_or_path))
                if num_ended >= 0:
                    announce(COPIED.format(num_ended=num_ended))
                announce(f"{'labeling page' if arena is None else 'arena'}: {server.public_url}")
                with store.reading() as connection:
                    warning = warning_of(config, connection)
                if warning:
                    announce(f"warning: {warning}")
                domains, leads = (config.oidc.domains, config.oidc.leads) if config.oidc is not None else ((), ())
                accounts.apply_oidc(domains, leads)
                first = accounts.invite_first_lead()
                if first is not None:
                    announce(f"there is no lead yet; one-time link for {first[0]!r}: {server.link(first[1])}")
                own = config.model_copy(update={"server": server})
                with ExitStack() as closing:
                    opened = None if arena is None else closing.enter_context(arena.opened(url_or_path, store, own))
                    app = make_app(store, accounts, own, arena=opened)
                    with suppress(KeyboardInterrupt):
                        uvicorn.Server(server_settings(app)).run([listener])
            finally:
                accounts.close()


def server_settings(app: Any) -> uvicorn.Config:
    """Returns uvicorn's configuration, without trust in headers about a request's sender.

    The application itself decides which proxies' headers to trust (`ServerConfig.trusted_proxies`).
    """
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        limit_concurrency=MAX_CONNECTIONS,
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
