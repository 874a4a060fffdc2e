"""The labeling server: pages and API on one label store."""

import logging
import time
from collections.abc import Callable
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.staticfiles import StaticFiles

from preferences.leasing import LeaseLostError
from preferences.page.api import Api
from preferences.page.config import LabelingConfig
from preferences.page.html import TOO_LATE, Pages, SignInNeededError
from preferences.page.labeling import Labeling, RefusedError
from preferences.page.lead import LeadView
from preferences.page.security import Attempts, harden
from preferences.page.unsaved import RETRY_SECONDS, STORE_AWAY, reason
from preferences.people import People
from preferences.store import LabelStore

LOG = logging.getLogger(__name__)
SIGN_INS, SIGN_IN_SECONDS = 8, 900.0  # failed ones, of one name or from one address
AWAY = "The store cannot be reached or takes nothing just now. What was stored is safe; try again in a moment."


def make_app(
    store: LabelStore, people: People, config: LabelingConfig, *, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The whole server as an ASGI application. `clock` gives epoch seconds, as those of store and people do."""
    app = FastAPI(title="Heed labels", version="1", openapi_url="/api/openapi.json", docs_url=None, redoc_url=None)
    labeling, lead = Labeling(store, people, config, clock=clock), LeadView(store)
    attempts = Attempts(SIGN_INS, SIGN_IN_SECONDS)
    pages = Pages(labeling, people, lead, attempts)
    app.include_router(Api(labeling, people, lead, attempts).router)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=str(files("preferences.page") / "static")))
    app.add_middleware(BaseHTTPMiddleware, dispatch=harden)

    def problem(request: Request, status: int, heading: str, text: str) -> Response:
        if request.url.path.startswith("/api/"):
            return JSONResponse({"detail": text}, status)
        return pages.message(request, status, heading, text)

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
        response = problem(request, 503, "Not possible just now", AWAY)
        response.headers["Retry-After"] = str(RETRY_SECONDS)
        return response

    for kind in STORE_AWAY:
        app.add_exception_handler(kind, store_is_away)

    @app.exception_handler(ValueError)
    def contradicts(request: Request, error: ValueError) -> Response:
        return problem(request, 409, "Not stored", str(error))

    return app
