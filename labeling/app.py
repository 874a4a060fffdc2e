"""The labeling server: pages and API on one label store."""

import json
import logging
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from labeling.api import Api
from labeling.attempts import Attempts, TooManyTriesError
from labeling.config import LabelingConfig
from labeling.html import TOO_LATE, Pages, SignInNeededError
from labeling.labeling import Labeling, RefusedError
from labeling.lead import LeadView
from labeling.people_pages import PeoplePages
from labeling.security import MAX_BODY_BYTES, Harden
from labeling.unsaved import RETRY_SECONDS, STORE_AWAY, reason
from preferences.keys import BusyError
from preferences.leasing import LeaseLostError
from preferences.people import People
from preferences.store import LabelStore

LOG = logging.getLogger(__name__)
AWAY = "The store cannot be reached or takes nothing just now. What was stored is safe; try again in a moment."
HEADINGS = {
    400: "This request cannot be read",
    404: "There is no such page",
    405: "Not possible",
    413: "Too long",
    429: "Too many tries",
    503: "Busy",
}
TEXTS = {
    404: "The address may be mistyped.",
    413: "What was sent is longer than anything that this page takes.",
}


def make_app(
    store: LabelStore, people: People, config: LabelingConfig, *, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The whole server as an ASGI application. `clock` gives epoch seconds, as those of store and people do."""
    app = FastAPI(
        title="Heed labels",
        version="1",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # such a redirect would lead to whatever the Host header names
        max_body_size=MAX_BODY_BYTES,
    )
    labeling, lead = Labeling(store, people, config, clock=clock), LeadView(store)
    attempts = Attempts()
    pages = Pages(labeling, people, lead)
    app.include_router(Api(labeling, people, lead, attempts).router)
    app.include_router(pages.router)
    app.include_router(PeoplePages(pages, people, attempts).router)
    app.mount("/static", StaticFiles(directory=str(files("labeling") / "static")))
    # The last one added sees a request first.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=config.server.hosts, www_redirect=False)
    if config.server.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(config.server.trusted_proxies))
    app.add_middleware(Harden)
    _handle_errors(app, pages)
    return app


def _handle_errors(app: FastAPI, pages: Pages) -> None:
    def problem(
        request: Request, status: int, heading: str, detail: str, headers: dict[str, str] | None = None
    ) -> Response:
        if request.url.path.startswith("/api/"):
            return in_json(detail, status, headers)
        page = pages.message(request, status, heading, detail)
        page.headers.update(headers or {})
        return page

    @app.exception_handler(SignInNeededError)
    def sign_in_needed(request: Request, error: SignInNeededError) -> Response:  # noqa: ARG001
        return RedirectResponse("/sign-in", 303)

    @app.exception_handler(RefusedError)
    def refused(request: Request, error: RefusedError) -> Response:
        return problem(request, 403, "Not possible", str(error))

    @app.exception_handler(LeaseLostError)
    def too_late(request: Request, error: LeaseLostError) -> Response:  # noqa: ARG001
        return problem(request, 409, "Too late", TOO_LATE)

    def store_is_away(request: Request, error: Exception) -> Response:
        LOG.error("the store is away: %s", reason(error))
        return problem(request, 503, "Not possible just now", AWAY, {"Retry-After": str(RETRY_SECONDS)})

    for kind in STORE_AWAY:
        app.add_exception_handler(kind, store_is_away)

    @app.exception_handler(TooManyTriesError)
    def too_many_tries(request: Request, error: TooManyTriesError) -> Response:
        return problem(request, 429, HEADINGS[429], str(error), {"Retry-After": str(error.wait_seconds)})

    @app.exception_handler(BusyError)
    def busy(request: Request, error: BusyError) -> Response:
        return problem(request, 503, HEADINGS[503], str(error), {"Retry-After": "2"})

    @app.exception_handler(ValueError)
    def contradicts(request: Request, error: ValueError) -> Response:
        return problem(request, 409, "Not stored", str(error))

    @app.exception_handler(HTTPException)
    def refused_by_status(request: Request, error: HTTPException) -> Response:
        heading = HEADINGS.get(error.status_code, "Not possible")
        is_api = request.url.path.startswith("/api/")
        text = error.detail if is_api else TEXTS.get(error.status_code, error.detail)
        return problem(request, error.status_code, heading, text, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:  # noqa: ARG001
        # What was sent is not sent back: it may be a key, and may hold what no answer can.
        return in_json([{name: found[name] for name in ("type", "loc", "msg")} for found in error.errors()], 422)


def in_json(detail: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    """A problem as the API says it, in ASCII, which holds lone surrogates as well."""
    return Response(json.dumps({"detail": detail}), status, headers, "application/json")
