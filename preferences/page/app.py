"""The labeling server: pages and API on one label store as an ASGI application, and running it.

Leaves out: HTTP/2, WebSockets, and deadlines for slow clients, which the proxy in front of the server sets.
"""

import errno
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from preferences.accounts import AccountClosedError, Accounts
from preferences.database import STORE_AWAY, create_or_check, place_of, reason_of
from preferences.keys import BusyError
from preferences.leases import LeaseLostError
from preferences.page.api import Api, describe_answers
from preferences.page.arena import Arena, ArenaSetup
from preferences.page.arena_pages import ArenaPages
from preferences.page.config import LabelingConfig, ServerConfig
from preferences.page.labeler_pages import TOO_LATE, InstructionPages, QuestionPages, Questions, SignInPages, TaskPages
from preferences.page.lead_pages import LeadPages, PeoplePages, SearchPages
from preferences.page.security import MAX_BODY_BYTES, Attempts, Harden, TooManyTriesError
from preferences.page.service import LabelingService, LeadView, RefusedError, warning_of
from preferences.page.site import RETRY_SECONDS, SignInNeededError, Site
from preferences.store import LabelStore

LOG = logging.getLogger(__name__)
AWAY = "The label store cannot be reached or cannot save just now. What was stored is safe; try again in a moment."
HEADINGS = {
    400: "This request cannot be read",
    404: "There is no such page",
    405: "Not possible",
    413: "Too long",
    429: "Too many tries",
    503: "Busy",
}
REFUSALS = {RefusedError: "Not possible", AccountClosedError: "Account closed"}
TEXTS = {404: "The address may be mistyped.", 413: "What was sent is longer than this page accepts."}


def make_app(
    store: LabelStore,
    accounts: Accounts,
    config: LabelingConfig,
    *,
    clock: Callable[[], float] = time.time,
    arena: Arena | None = None,
) -> FastAPI:
    """Returns the server as an ASGI application. `clock` returns seconds since the epoch, as the store's clock does.

    With an `arena`, the application has its pages too, and they are the first that people see.
    """
    app = FastAPI(
        title="Heed labels",
        version="1",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # such a redirect would go wherever the Host header says
        max_body_size=MAX_BODY_BYTES,
    )
    service, lead = LabelingService(store, accounts, config, clock=clock), LeadView(store)
    questions, attempts = Questions(store), Attempts()
    site = Site(config, accounts, questions.num_waiting, has_arena=arena is not None)
    routers = [
        Api(service, accounts, lead, attempts).router,
        InstructionPages(site, service).router,
        TaskPages(site, service).router,
        QuestionPages(site, questions).router,
        LeadPages(site, lead).router,
        SearchPages(site, service).router,
        PeoplePages(site, store).router,
        SignInPages(site, attempts).router,
        *([ArenaPages(site, arena).router] if arena is not None else []),
    ]
    if config.oidc is not None:
        from preferences.page.oidc import add_oidc  # only here, since most servers have no provider

        routers.append(add_oidc(app, site, attempts, config.oidc).router)
    for router in routers:
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=str(files("preferences.page") / "static")))
    # The middleware added last sees a request first.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=config.server.hosts, www_redirect=False)
    if config.server.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(config.server.trusted_proxies))
    app.add_middleware(Harden, public_url=config.server.public_url)
    _handle_errors(app, site, [route for router in routers for route in router.routes])
    build_schema = app.openapi

    def described() -> dict[str, Any]:
        if not app.openapi_schema:
            describe_answers(build_schema(), config)
        return build_schema()

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's way of extending it
    return app


def _methods_at(routes: Sequence[BaseRoute], path: str) -> str:
    """Returns the methods of all routes at a path, for a response's Allow header. Each route knows only its own."""
    found = (route.methods for route in routes if isinstance(route, Route) and route.path_regex.fullmatch(path))
    return ", ".join(sorted(set().union(*(methods or () for methods in found))))


def _handle_errors(app: FastAPI, site: Site, routes: Sequence[BaseRoute]) -> None:
    def answer(request: Request, error: Exception) -> Response:
        is_api = request.url.path.startswith("/api/")
        status, heading, detail, headers = _problem(request, error, is_api=is_api)
        if status == 405:
            headers["Allow"] = _methods_at(routes, request.url.path)
        if is_api:
            return in_json(detail, status, headers)
        page = site.message(request, status, heading, detail)
        page.headers.update(headers)
        return page

    for kind in (*REFUSALS, LeaseLostError, *STORE_AWAY, TooManyTriesError, BusyError, ValueError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(SignInNeededError, lambda *_: RedirectResponse("/sign-in", 303))
    app.add_exception_handler(RequestValidationError, _invalid)
    # Nobody reads this answer. Without it, each disconnect logs a traceback.
    app.add_exception_handler(ClientDisconnect, lambda *_: Response(status_code=400))


def _problem(request: Request, error: Exception, *, is_api: bool) -> tuple[int, str, str, dict[str, str]]:
    """Returns the status, heading, text and headers with which an error is answered."""
    if isinstance(error, tuple(REFUSALS)):
        return 403, REFUSALS[type(error)], str(error), {}
    if isinstance(error, LeaseLostError):
        return 409, "Too late", TOO_LATE, {}
    if isinstance(error, STORE_AWAY):
        LOG.error("the store cannot be reached: %s", reason_of(error))
        return 503, "Not possible just now", AWAY, {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, TooManyTriesError):
        return 429, HEADINGS[429], str(error), {"Retry-After": str(error.wait_seconds)}
    if isinstance(error, BusyError):
        return 503, HEADINGS[503], str(error), {"Retry-After": "2"}
    if isinstance(error, HTTPException):
        text = error.detail if is_api else TEXTS.get(error.status_code, error.detail)
        return error.status_code, HEADINGS.get(error.status_code, "Not possible"), text, dict(error.headers or {})
    return 409, "Not possible" if request.method == "GET" else "Not stored", str(error), {}


def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Do not send the input back: it may be a key, or contain what a response cannot encode.
    return in_json([{name: found[name] for name in ("type", "loc", "msg")} for found in error.errors()], 422)


def in_json(detail: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    """Returns a problem in the API's format, as ASCII, which can escape lone surrogates too."""
    return Response(json.dumps({"detail": detail}), status, headers, "application/json")


# ---- running it ----


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
