"""Checks on every request before a route sees it, and the security headers of every response."""

from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No loading from other sites, no framing, and no inline scripts.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; form-action 'self';"
        " base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
MAX_BODY_BYTES = 1_000_000
MAX_TASKS_BYTES = 4_000_000  # tasks that a lead adds
MAX_SIGN_IN_BYTES = 16_000  # the most that may come without a session


class Harden:
    """ASGI middleware: refuses requests from other sites' pages and invalid addresses, and sets the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("Cache-Control", "no-store")
                if message["status"] == 413:
                    headers["Connection"] = "close"  # otherwise the server would read the rest and discard it
            await send(message)

        refused = _refusal(scope)
        return await (refused or self.app)(scope, receive, send_hardened)


def _refusal(scope: Scope) -> Response | None:
    site = Headers(scope=scope).get("sec-fetch-site", "same-origin")
    if scope["method"] not in ("GET", "HEAD") and site not in ("same-origin", "none"):
        return _refused(scope, "refused: this came from another site's page", 403)
    asked = (scope["path"].encode("utf-8", "replace"), unquote_to_bytes(scope["query_string"]))
    if any(b"\0" in part for part in asked):
        return _refused(scope, "refused: the address contains a NUL character", 400)
    return None


def _refused(scope: Scope, text: str, status: int) -> Response:
    if scope["path"].startswith("/api/"):
        return JSONResponse({"detail": text}, status)
    return PlainTextResponse(text, status)


def is_storable(text: str) -> bool:
    """Whether every supported database can store the text: PostgreSQL has no NUL, UTF-8 no lone surrogates."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def unstorable_in(value: object) -> bool:
    """Whether a JSON value contains a text that cannot be stored."""
    waiting = [value]  # a loop, because JSON may be nested deeper than Python's stack
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            if not is_storable(found):
                return True
        elif isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            waiting += found
    return False
