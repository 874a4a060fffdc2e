"""What all pages share: templates, who is signed in, and forms that only their own session can send."""

import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from starlette.datastructures import FormData, UploadFile

from preferences.accounts import Account, Accounts
from preferences.adjudication import MAX_COUNTED
from preferences.database import STORE_AWAY
from preferences.leases import display_order
from preferences.page.config import LabelingConfig
from preferences.page.forms import LETTERS, Fields
from preferences.page.security import is_storable
from preferences.page.service import RefusedError, seal
from preferences.page.text import arguments_of, as_written, called_tool, show, task_title
from preferences.records import as_moment

COOKIE = "heed_session"
HTTPS_COOKIE = f"__Host-{COOKIE}"  # browsers accept this prefix only on a Secure cookie, from this very host
CHECKBOXES = "flags_"  # prefix of fields that may occur several times
MAX_FIELDS = 5_000  # of a form: ratings of every turn
SENT_CHARACTERS = 2**18  # characters of a download to send at a time
ONLY_LEADS = "this page is for leads"
RETRY_SECONDS = 10

TEMPLATES = Environment(
    loader=PackageLoader("preferences.page"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.globals["display_order"] = display_order
TEMPLATES.globals["max_queued"] = MAX_COUNTED
TEMPLATES.filters["shown"] = show
TEMPLATES.filters["counted"] = lambda number, noun: f"{number:,} {noun}" + ("" if number == 1 else "s")
TEMPLATES.filters["number"] = "{:,}".format
TEMPLATES.filters["task_title"] = lambda shown: task_title(*shown)
TEMPLATES.filters["as_written"] = lambda text: Markup(as_written(text))
TEMPLATES.filters["readable"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
TEMPLATES.filters["arguments"] = arguments_of
TEMPLATES.filters["called_at"] = called_tool
TEMPLATES.filters["moment"] = as_moment
TEMPLATES.filters["quoted"] = lambda text: quote(text, safe="")


async def _posted(request: Request) -> FormData:
    """Reads a form's fields, without files. Raises: HTTPException for text that no database can store."""
    return _storable(await request.form(max_files=0, max_fields=MAX_FIELDS))


async def _uploaded(request: Request) -> tuple[FormData, UploadFile]:
    """Like `_posted`, for a form with one file, in the field `file`."""
    posted = await request.form(max_files=1, max_fields=MAX_FIELDS)
    file = posted.get("file")
    if not isinstance(file, UploadFile):
        raise HTTPException(400, "A form with a file was expected.")
    return _storable(FormData([(name, value) for name, value in posted.multi_items() if value is not file])), file


def _storable(posted: FormData) -> FormData:
    for name, value in posted.multi_items():
        if not is_storable(name) or not isinstance(value, str) or not is_storable(value):
            raise HTTPException(400, "A field of the form contains a character that cannot be stored.")
    return posted


Posted = Annotated[FormData, Depends(_posted)]
Uploaded = Annotated[tuple[FormData, UploadFile], Depends(_uploaded)]


class SignInNeededError(Exception):
    """Nobody is signed in."""


class Site:
    """Renders pages and checks who asks for them. `has_arena`: the arena is the first page (`arena_pages`)."""

    def __init__(
        self,
        config: LabelingConfig,
        accounts: Accounts,
        num_waiting: Callable[[Account], int] = lambda _: 0,
        *,
        has_arena: bool = False,
    ) -> None:
        """`num_waiting` counts the questions that wait for a person; every page shows the number."""
        self.config, self.accounts, self.num_waiting, self.has_arena = config, accounts, num_waiting, has_arena

    def is_https(self, request: Request) -> bool:
        return self.config.server.is_https or request.url.scheme == "https"

    def cookie(self, request: Request) -> str:
        """Returns the name of the session's cookie."""
        return HTTPS_COOKIE if self.is_https(request) else COOKIE

    def token(self, request: Request) -> str:
        """Returns the token in the session's cookie, or ""."""
        return request.cookies.get(self.cookie(request), "")

    def signed_in(self, request: Request) -> tuple[Account, str]:
        """Returns the account and its session's token. Raises: SignInNeededError."""
        token = self.token(request)
        account = self.accounts.session(token) if token else None
        if account is None:
            raise SignInNeededError
        return account, token

    def lead(self, request: Request) -> tuple[Account, str]:
        """Like `signed_in`, for leads only. Raises: RefusedError."""
        account, token = self.signed_in(request)
        if account.role != "lead":
            raise RefusedError(ONLY_LEADS)
        return account, token

    def form(self, request: Request, posted: FormData) -> tuple[Account, str, Fields]:
        """Returns account, token and fields of a posted form. Raises: RefusedError if another session made it."""
        account, token = self.signed_in(request)
        fields = fields_of(posted)
        expected = seal(token, "form").encode()
        if not hmac.compare_digest(expected, fields.text("csrf").encode("utf-8", "replace")):
            raise RefusedError("this form was not made for this session; open the page again")
        return account, token, fields

    def lead_form(self, request: Request, posted: FormData) -> tuple[Account, str, Fields]:
        """Like `form`, for leads only."""
        account, token, fields = self.form(request, posted)
        if account.role != "lead":
            raise RefusedError(ONLY_LEADS)
        return account, token, fields

    def who(self, request: Request) -> tuple[Account | None, str]:
        """Like `signed_in`, but for pages that must render: None if nobody is signed in or the store is unreachable."""
        token = self.token(request)
        try:
            return (self.accounts.session(token) if token else None), token
        except STORE_AWAY:
            return None, token

    def page(self, template: str, account: Account | None, token: str, status: int = 200, **values: Any) -> Response:
        """Renders a template."""
        shared = {
            "title": self.config.title,
            "account": account,
            "num_waiting": 0 if account is None or status >= 500 else self.num_waiting(account),
            "csrf": seal(token, "form") if token else "",
            "letters": LETTERS,
            "oidc": self.config.oidc,
            "has_arena": self.has_arena,
        }
        text = TEMPLATES.get_template(f"{template}.html.jinja").render(**shared, **values)
        # A lone surrogate in somebody's text must not break the page.
        return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")

    def message(self, request: Request, status: int, heading: str, text: str) -> Response:
        """Renders a page that says what went wrong."""
        account, token = self.who(request)
        return self.page("message", account, token, status, heading=heading, text=text, typed="")

    def typed_page(self, request: Request, status: int, heading: str, text: str, typed: str) -> Response:
        """Says why a form can never be stored, and shows what was typed so that it can be copied."""
        account, token = self.who(request)
        if account is None and not typed:
            raise SignInNeededError
        return self.page("message", account, token, status, heading=heading, text=text, typed=typed)

    def unsaved_page(self, request: Request, posted: FormData, status: int, typed: str) -> Response:
        """Shows what was typed into a form that is not stored yet, so that it can be sent again."""
        values = [(name, value) for name, value in posted.multi_items() if isinstance(value, str)]
        page = self.page("unsaved", None, "", status, action=request.url.path, values=values, typed=typed)
        page.headers["Retry-After"] = str(RETRY_SECONDS)
        return page


def fields_of(form: FormData) -> Fields:
    single = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    ticked = {name: dict.fromkeys(map(str, form.getlist(name))) for name in form if name.startswith(CHECKBOXES)}
    several = {name: list(values) for name, values in ticked.items()}  # a box that is sent twice counts once
    return Fields(single, several)


def download(parts: Iterable[str], name: str, media_type: str) -> Response:
    """Returns a text, given in parts, as a file download with this name."""
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
    return StreamingResponse(_joined(parts), media_type=media_type, headers=headers)


def _joined(parts: Iterable[str]) -> Iterator[bytes]:
    """Joins small parts, because every part that is sent waits for one of the server's threads."""
    waiting, num_characters = [], 0
    for part in parts:
        waiting.append(part)
        num_characters += len(part)
        if num_characters >= SENT_CHARACTERS:
            yield "".join(waiting).encode()
            waiting, num_characters = [], 0
    yield "".join(waiting).encode()


def redirect(path: str) -> Response:
    return RedirectResponse(path, 303)
