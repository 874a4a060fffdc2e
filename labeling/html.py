"""The pages: plain forms, post and redirect, nothing that needs JavaScript."""

import hmac
import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.datastructures import FormData

from labeling import forms
from labeling.labeling import Asked, Labeling, RefusedError, seal
from labeling.lead import EXPORTS, Exported, LeadView
from labeling.security import is_storable
from labeling.text import show
from labeling.unsaved import RETRY_SECONDS, STORE_AWAY, Memory, as_text, reason
from preferences.formats.registry import FORMATS
from preferences.leasing import LeaseLostError
from preferences.people import Account, People

LOG = logging.getLogger(__name__)
COOKIE = "heed_session"
CLIENT = "page"
EMPTY = forms.Fields({})
TICKED = "flags_"  # fields that may come several times

TEMPLATES = Environment(
    loader=PackageLoader("labeling"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["shown"] = show
TEMPLATES.filters["moment"] = lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
TEMPLATES.filters["quoted"] = lambda text: quote(text, safe="")


async def _posted(request: Request) -> FormData:
    """A form's fields, no files. Raises HTTPException for texts that no database holds."""
    posted = await request.form(max_files=0)
    for name, value in posted.multi_items():
        if not is_storable(name) or not isinstance(value, str) or not is_storable(value):
            raise HTTPException(400, "A field of the form contains a character that cannot be stored.")
    return posted


Posted = Annotated[FormData, Depends(_posted)]


class SignInNeededError(Exception):
    """Nobody is signed in, or not in the role that the page is for."""


class Pages:
    """The routes of the page."""

    def __init__(self, labeling: Labeling, people: People, lead: LeadView) -> None:
        self.labeling, self.people, self.lead = labeling, people, lead
        self.config, self.memory = labeling.config, Memory()
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/", response_class=HTMLResponse)(self.home)
        get("/instructions", response_class=HTMLResponse)(self.instructions)
        post("/instructions")(self.read_instructions)
        get("/task", response_class=HTMLResponse)(self.task)
        post("/task/answer")(self.answer)
        post("/task/skip")(self.skip)
        get("/answers", response_class=HTMLResponse)(self.answers)
        post("/answers/undo")(self.undo)
        get("/lead", response_class=HTMLResponse)(self.lead_page)
        get("/lead/quality", response_class=HTMLResponse)(self.quality_page)
        get("/lead/task", response_class=HTMLResponse)(self.adjudicate_form)
        get("/lead/export", response_class=HTMLResponse)(self.export_page)
        get("/lead/export/rows")(self.export_rows)
        get("/lead/export/report")(self.export_report)

    # ---- who is there ----

    def _signed_in(self, request: Request) -> tuple[Account, str]:
        token = request.cookies.get(COOKIE, "")
        account = self.people.session(token) if token else None
        if account is None:
            raise SignInNeededError
        return account, token

    def _lead(self, request: Request) -> tuple[Account, str]:
        account, token = self._signed_in(request)
        if account.role != "lead":
            raise RefusedError("this page is for leads")
        return account, token

    def _form(self, request: Request, posted: FormData) -> tuple[Account, str, forms.Fields]:
        """A posted form of somebody who is signed in. Raises RefusedError where it was not made for this session."""
        account, token = self._signed_in(request)
        fields = fields_of(posted)
        expected = seal(token, "form").encode()
        if not hmac.compare_digest(expected, fields.text("csrf").encode("utf-8", "replace")):
            raise RefusedError("this form was not given to this session; open the page again")
        return account, token, fields

    def _lead_form(self, request: Request, posted: FormData) -> tuple[Account, str, forms.Fields]:
        """As `_form`, of a lead."""
        account, token, fields = self._form(request, posted)
        if account.role != "lead":
            raise RefusedError("this page is for leads")
        return account, token, fields

    def _page(self, template: str, account: Account | None, token: str, status: int = 200, **values: Any) -> Response:
        shared = {
            "title": self.config.title,
            "account": account,
            "csrf": seal(token, "form") if token else "",
            "letters": forms.LETTERS,
        }
        text = TEMPLATES.get_template(f"{template}.html.jinja").render(**shared, **values)
        # A lone surrogate in somebody's text is no reason to show no page.
        return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")

    def home(self, request: Request) -> Response:
        account, _ = self._signed_in(request)
        return see("/lead" if account.role == "lead" else "/task")

    def message(self, request: Request, status: int, heading: str, text: str) -> Response:
        """A page that says what went wrong, to whoever is there."""
        account, token = self._who(request)
        return self._page("message", account, token, status, heading=heading, text=text, typed="")

    def _who(self, request: Request) -> tuple[Account | None, str]:
        """Who is there, for a page that has to be shown in any case: nobody, while the store is away."""
        token = request.cookies.get(COOKIE, "")
        try:
            return (self.people.session(token) if token else None), token
        except STORE_AWAY:
            return None, token

    # ---- labeling ----

    def instructions(self, request: Request) -> Response:
        account, token = self._signed_in(request)
        has_read = account.read_version == self.config.version
        return self._page("instructions", account, token, text=self.config.instructions, has_read=has_read)

    def read_instructions(self, request: Request, posted: Posted) -> Response:
        account, _, _ = self._form(request, posted)
        self.people.has_read(account.name, self.config.version)
        return see("/")

    def task(self, request: Request) -> Response:
        account, token = self._signed_in(request)
        if account.role == "lead":
            return self._page(
                "message", account, token, 403, heading="Leads do not label", text=LEADS_DO_NOT_LABEL, typed=""
            )
        asked = self.labeling.next_task(account, token)
        if asked == "instructions":
            return see("/instructions")
        if not isinstance(asked, Asked):
            heading, text = WAITING[asked]
            return self._page("message", account, token, heading=heading, text=text, typed="")
        unsaved = self.memory.put(token, account, asked)
        return self._task_page(account, token, asked, unsaved or EMPTY, is_unsaved=unsaved is not None)

    def _task_page(
        self,
        account: Account,
        token: str,
        asked: Asked,
        fields: forms.Fields = EMPTY,
        wrong: Sequence[str] = (),
        *,
        status: int = 200,
        is_unsaved: bool = False,
    ) -> Response:
        is_away = status >= 500  # then the store is asked for nothing
        return self._page(
            "task",
            account,
            token,
            422 if wrong else status,
            asked=asked,
            config=self.config,
            fields=fields,
            wrong=wrong,
            is_unsaved=is_unsaved,
            num_done=None if is_away else self.labeling.store.num_standing(account.name),
            ratings=range(forms.MIN_RATING, forms.MAX_RATING + 1),
        )

    def answer(self, request: Request, posted: Posted) -> Response:
        return self._saved(request, posted, self._answer)

    def skip(self, request: Request, posted: Posted) -> Response:
        return self._saved(request, posted, self._skip)

    def _answer(self, request: Request, posted: FormData) -> Response:
        account, token, fields = self._form(request, posted)
        form = forms.shown_form(fields)
        asked = self.labeling.shown_again(account, token, form)
        answer, wrong = forms.read_answer(fields, len(asked.lease.order), self.config)
        if answer is None:
            return self._task_page(account, token, asked, fields, wrong)
        self.labeling.answer(account, token, form, answer, CLIENT)
        self.memory.stored(token, form)
        return see("/lead/quality" if account.role == "lead" else "/task")

    def _skip(self, request: Request, posted: FormData) -> Response:
        account, token, fields = self._form(request, posted)
        form, reason = forms.shown_form(fields), fields.text("reason").strip()
        if not reason:
            asked = self.labeling.shown_again(account, token, form)
            return self._task_page(account, token, asked, fields, ["A skip needs a reason, so that the lead can help."])
        self.labeling.skip(account, token, form, reason[: forms.MAX_NOTE_CHARACTERS], CLIENT)
        self.memory.stored(token, form)
        return see("/task")

    def _saved(self, request: Request, posted: FormData, act: Callable[[Request, FormData], Response]) -> Response:
        """Do what a form asks for; where that is refused or fails, give back what was typed into it.

        The one place that catches every error: whatever the cause, a labeler's work must not be lost with it.
        """
        try:
            return act(request, posted)
        except SignInNeededError:
            return self._typed_page(request, posted, 401, "Your session has ended", SESSION_OVER)
        except RefusedError as error:
            return self._typed_page(request, posted, 403, "Not possible", str(error))
        except LeaseLostError:
            return self._typed_page(request, posted, 409, "Too late", TOO_LATE)
        except ValueError as error:
            return self._typed_page(request, posted, 409, "Not stored", str(error))
        except STORE_AWAY as error:
            LOG.error("an answer or a skip was not stored: %s", reason(error))
            return self._unsaved_page(request, posted, 503)
        except Exception:
            LOG.exception("an answer or a skip was not stored")
            return self._unsaved_page(request, posted, 500)

    def _typed_page(self, request: Request, posted: FormData, status: int, heading: str, text: str) -> Response:
        """Why nothing was stored and never will be of this form, and what it held, to be copied."""
        account, token = self._who(request)
        typed = as_text(fields_of(posted))
        if account is None and not typed:
            raise SignInNeededError
        return self._page("message", account, token, status, heading=heading, text=text, typed=typed)

    def _unsaved_page(self, request: Request, posted: FormData, status: int) -> Response:
        """The same form again, as it was filled in, to be sent again; without its texts where they are not known."""
        token, fields = request.cookies.get(COOKIE, ""), fields_of(posted)
        form = forms.shown_form(fields)
        shown = self.memory.failed(token, form, fields)
        if shown is not None:
            page = self._task_page(shown.account, token, shown.asked, fields, status=status, is_unsaved=True)
        else:
            values = [(name, value) for name, value in posted.multi_items() if isinstance(value, str)]
            path, typed = request.url.path, as_text(fields)
            page = self._page("unsaved", None, "", status, action=path, values=values, typed=typed)
        page.headers["Retry-After"] = str(RETRY_SECONDS)
        return page

    def answers(self, request: Request) -> Response:
        account, token = self._signed_in(request)
        acts = self.labeling.history(account)
        done = self.labeling.store.num_standing(account.name)
        return self._page("answers", account, token, acts=acts, num_done=done)

    def undo(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self._form(request, posted)
        revision = fields.number("revision")
        if revision is None:
            raise RefusedError("the form names no answer")
        self.labeling.undo(account, fields.text("task"), revision, CLIENT)
        return see("/answers" if account.role == "lead" else "/task")

    # ---- leading ----

    def lead_page(self, request: Request) -> Response:
        account, token = self._lead(request)
        return self._page("lead", account, token, counts=self.lead.counts(), export_formats=EXPORTS)

    def quality_page(self, request: Request) -> Response:
        account, token = self._lead(request)
        return self._page("quality", account, token, **self.lead.quality(request.query_params.get("batch", "")))

    def adjudicate_form(self, request: Request) -> Response:
        account, token = self._lead(request)
        asked = self.labeling.reopened(account, request.query_params.get("task", ""), token)
        unsaved = self.memory.put(token, account, asked)
        return self._task_page(account, token, asked, unsaved or EMPTY, is_unsaved=unsaved is not None)

    def export_page(self, request: Request) -> Response:
        """What an export holds and what it leaves out, before anything is downloaded."""
        account, token = self._lead(request)
        batch, form, found = self._exported(request)
        description = FORMATS[form].description
        return self._page("export", account, token, batch=batch, form=form, description=description, found=found)

    def export_rows(self, request: Request) -> Response:
        account, _ = self._lead(request)
        batch, form, found = self._exported(request)
        self.people.note(account.name, "exported", f"{batch} ({form})")
        response = _download(found.lines, f"{batch}.{form}.jsonl")
        response.headers["Heed-Left-Out"] = json.dumps(found.report.counts())  # for those who download by a program
        return response

    def export_report(self, request: Request) -> Response:
        self._lead(request)
        batch, form, found = self._exported(request)
        return _download(found.report_lines, f"{batch}.{form}.left-out.jsonl")

    def _exported(self, request: Request) -> tuple[str, str, Exported]:
        batch, form = (request.query_params.get(name, "") for name in ("batch", "format"))
        return batch, form, self.lead.export(batch, form)


TOO_LATE = "Your time on this task ran out and it went to others, so the answer was not stored. Here is the next one."
SESSION_OVER = "Nothing was stored. Sign in again and open the task; what you had entered is below, to be copied."
LEADS_DO_NOT_LABEL = (
    "Leads adjudicate, under Quality: their answer stands over those of labelers. To label as well, invite yourself"
    " under another name as a labeler."
)
WAITING = {
    "nothing open": ("Nothing to judge just now", "Thank you. All tasks are done or with others; look again later."),
    "screening": (
        "Thank you",
        "You have judged all first tasks. The labeling lead will look at them.",
    ),
}


def fields_of(form: FormData) -> forms.Fields:
    single = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    ticked = {name: dict.fromkeys(map(str, form.getlist(name))) for name in form if name.startswith(TICKED)}
    several = {name: list(values) for name, values in ticked.items()}  # a box that is sent twice is ticked once
    return forms.Fields(single, several)


def _download(text: str, name: str) -> Response:
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"}
    return Response(text, media_type="application/jsonl", headers=headers)


def see(path: str) -> Response:
    return RedirectResponse(path, 303)
