"""The labelers' pages, the lead's page for adjudicating, the pages for signing in and for one-time links, questions of
labelers with the leads' replies, and the instructions, with what has changed since the last time.

All are plain forms that work without JavaScript.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData

from preferences.accounts import Account
from preferences.database import STORE_AWAY, reason_of
from preferences.leases import LeaseLostError
from preferences.page import forms
from preferences.page.config import DECLINES, LabelingConfig
from preferences.page.forms import Fields, as_text, is_same_text, max_edit
from preferences.page.lead_pages import in_queue, next_in_queue
from preferences.page.security import MAX_SIGN_IN_BYTES, Attempts, TooManyTriesError, sign_in, use_link
from preferences.page.service import MAX_LEFT, LabelingService, PresentedTask, RefusedError
from preferences.page.site import Posted, SignInNeededError, Site, fields_of, redirect
from preferences.questions import MAX_QUESTION_CHARACTERS, Thread, ThreadState
from preferences.records import ShownTask
from preferences.store import LabelStore

LOG = logging.getLogger(__name__)
CLIENT = "page"
CONTEXT_LINES = 1  # unchanged lines of the instructions shown around a change
MAX_TURNS_OPEN, TURNS_OPEN = 6, 4  # a conversation of more turns is folded, except for its last ones
LONG_RESULT = 600  # characters; a tool's result that is longer is folded
EMPTY = Fields({})
QUEUE = "queue"  # the field that says from which adjudication queue a lead opened the task

TOO_LATE = (
    "Your time on this task ran out and it went to another labeler, so the answer was not stored. Here is the next one."
)
SESSION_OVER = (
    "Nothing was stored. Sign in again and open the task. What you entered is below, so that you can copy it."
)
LEADS_DO_NOT_LABEL = (
    "Leads adjudicate, on the Quality page: their answer overrides those of labelers. To label as well, invite yourself"
    " under another name as a labeler."
)
USED_UP = (
    "One-time links work once, within a week, and a newer link voids an older one. Ask the labeling lead for a new one."
)
WAITING = {
    "nothing open": (
        "Nothing to judge just now",
        "There is no task for you: all are done or with other labelers, or none has been added. Check again later.",
    ),
    "daily quota": (
        "That is all for today",
        "You have given as many answers as you may give per day. There are more after midnight (UTC); if you need more"
        " today, ask the labeling lead.",
    ),
    "batches closed": (
        "Nothing to judge just now",
        "The labeling lead has closed all batches. If you think that this is a mistake, ask them.",
    ),
    "no fitting task": (
        "No task fits you",
        "There are open tasks, but they are for people with other languages or skills than those on your account. If"
        " something is missing there, ask the labeling lead.",
    ),
    "screening": ("Thank you", "You have judged all of the first tasks. The labeling lead will look at them."),
}


class SignInPages:
    """The routes of the pages for signing in and out, and for one-time links."""

    def __init__(self, site: Site, attempts: Attempts) -> None:
        self.site, self.accounts, self.attempts = site, site.accounts, attempts
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/sign-in", response_class=HTMLResponse)(self.sign_in_form)
        post("/sign-in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/sign-out")(self.sign_out)
        get("/welcome/{code}", response_class=HTMLResponse)(self.welcome_form)
        post("/welcome/{code}", max_body_size=MAX_SIGN_IN_BYTES)(self.welcome)

    def sign_in_form(self) -> Response:
        return self.site.page("sign_in", None, "", wrong="", name="")

    def sign_in(self, request: Request, posted: Posted) -> Response:
        fields = fields_of(posted)
        name, key = fields.text("name").strip(), fields.text("key").strip()
        try:
            token = sign_in(self.accounts, self.attempts, request, name, key)
        except TooManyTriesError as error:
            wrong = f"Too many tries; try again in {error.wait_seconds} seconds, or ask the lead for a one-time link."
            page = self.site.page("sign_in", None, "", 429, wrong=wrong, name=name)
            page.headers["Retry-After"] = str(error.wait_seconds)
            return page
        if token is None:
            return self.site.page("sign_in", None, "", 403, wrong="Name and key do not match.", name=name)
        return self._with_session(redirect("/"), token, request)

    def sign_out(self, request: Request, posted: Posted) -> Response:
        _, token, _ = self.site.form(request, posted)
        self.accounts.sign_out(token)
        response = redirect("/sign-in")
        response.delete_cookie(self.site.cookie(request), secure=self.site.is_https(request))
        return response

    def welcome_form(self, code: str) -> Response:
        invitation = self.accounts.invitation(code)
        if invitation is None:
            return self._used_up()
        return self.site.page("welcome", None, "", invitation=invitation, code=code)

    def welcome(self, code: str, request: Request) -> Response:
        accepted = use_link(self.accounts, self.attempts, request, code)
        if accepted is None:
            return self._used_up()
        account, key = accepted
        token = self.accounts.open_session(account.name)
        return self._with_session(self.site.page("key", account, token, key=key), token, request)

    def _used_up(self) -> Response:
        return self.site.page("message", None, "", 410, heading="This link no longer works", text=USED_UP, typed="")

    def _with_session(self, response: Response, token: str, request: Request) -> Response:
        before = self.site.token(request)
        if before:
            self.accounts.sign_out(before)
        is_https = self.site.is_https(request)
        response.set_cookie(self.site.cookie(request), token, httponly=True, samesite="strict", secure=is_https)
        return response


class TaskPages:
    """The routes of the labelers' pages."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service = site, service
        self.router = APIRouter(include_in_schema=False)
        get, post = self.router.get, self.router.post
        get("/", response_class=HTMLResponse)(self.home)
        get("/task", response_class=HTMLResponse)(self.task)
        post("/task/answer")(self.answer)
        post("/task/ask")(self.ask)
        post("/task/skip")(self.skip)
        post("/task/reveal")(self.reveal)
        get("/answers", response_class=HTMLResponse)(self.answers)
        post("/answers/undo")(self.undo)
        get("/lead/task", response_class=HTMLResponse)(self.adjudicate)
        post("/lead/void")(self.void)

    def home(self, request: Request) -> Response:
        account, _ = self.site.signed_in(request)
        is_screened = account.role == "labeler" and account.state == "new" and self.service.config.screening is not None
        if self.site.has_arena and not is_screened:
            return redirect("/arena")
        return redirect("/lead" if account.role == "lead" else "/task")

    # ---- a task ----

    def task(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        if account.role == "lead":
            return self.site.page(
                "message", account, token, 403, heading="Leads do not label", text=LEADS_DO_NOT_LABEL, typed=""
            )
        handle = request.query_params.get("task", "")
        own = self.service.own_task(account, handle, token) if handle else None
        presented = own or self.service.next_task(account, token)
        if presented == "instructions":
            return redirect("/instructions")
        if not isinstance(presented, PresentedTask):
            heading, text = WAITING[presented]
            return self.site.page("message", account, token, heading=heading, text=text, typed="")
        return self._fresh_page(account, token, presented)

    def adjudicate(self, request: Request) -> Response:
        account, token = self.site.lead(request)
        presented = self.service.reopened(account, request.query_params.get("task", ""), token)
        if presented.lease.shown.warning and request.query_params.get("revealed", "") != "true":
            return self._warning_page(account, token, presented, queue=request.query_params.get("queue", ""))
        return self._fresh_page(account, token, presented, request.query_params.get("queue", ""))

    def void(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.lead_form(request, posted)
        revision, reason = fields.number("revision"), fields.text("reason").strip()[: forms.MAX_NOTE_CHARACTERS]
        if revision is None:
            raise RefusedError("the form names no judgment")
        task_id = fields.text("task")
        self.service.void(account, task_id, fields.text("labeler"), revision, reason, CLIENT)
        return redirect(f"/lead/task?revealed=true&task={quote(task_id, safe='')}")

    def _warning_page(
        self, account: Account, token: str, presented: PresentedTask, status: int = 200, queue: str = ""
    ) -> Response:
        """Shows a task's warning without its texts, and asks whether to continue."""
        return self.site.page("warning", account, token, status, presented=presented, declines=DECLINES, queue=queue)

    def _fresh_page(self, account: Account, token: str, presented: PresentedTask, queue: str = "") -> Response:
        """Shows a task, or only its warning until it is revealed.

        The form is filled in with the person's earlier answer, if there is one.
        """
        lease = presented.lease
        if account.role == "labeler" and lease.is_hidden:
            return self._warning_page(account, token, presented)
        earlier = self.service.earlier_answer(lease) if lease.revision else None
        fields = forms.answer_fields(earlier, lease, self.service.config) if earlier is not None else EMPTY
        if queue:
            fields = replace(fields, values={**fields.values, QUEUE: queue})
        return self._task_page(account, token, presented, fields, is_earlier=earlier is not None)

    def _task_page(
        self,
        account: Account,
        token: str,
        presented: PresentedTask,
        fields: Fields = EMPTY,
        wrong: Sequence[str] = (),
        *,
        is_earlier: bool = False,
    ) -> Response:
        is_lead = account.role == "lead"
        queue = fields.text(QUEUE) if is_lead else ""
        events = self.service.store.events_on(presented.lease.task_id) if is_lead else []
        last = {event.labeler: event for event in events}  # a labeler's last event is the one that counts
        return self.site.page(
            "task",
            account,
            token,
            422 if wrong else 200,
            presented=presented,
            config=self.service.config,
            fields=fields,
            wrong=wrong,
            is_earlier=is_earlier,
            num_left=0 if is_lead else self.service.num_left(account),
            max_left=MAX_LEFT,
            num_done=self.service.store.num_current_answers(account.name),
            ratings=range(forms.MIN_RATING, forms.MAX_RATING + 1),
            is_same_text=is_same_text,
            max_edit=max_edit(presented.lease.shown.responses),
            num_folded=_num_folded(presented.lease.shown, self.service.config),
            long_result=LONG_RESULT,
            threads=self._threads(account, presented),
            max_question=MAX_QUESTION_CHARACTERS,
            events=events,
            queue=in_queue(self.service, queue, presented.lease.task_id) if queue else None,
            voidable={(event.labeler, event.revision) for event in last.values() if event.ranks},
        )

    def _threads(self, account: Account, presented: PresentedTask) -> list[Thread]:
        """Returns the threads about a task that this person may read."""
        labeler = account.name if account.role == "labeler" else ""
        return self.service.store.threads(labeler=labeler, task_id=presented.lease.task_id)

    # ---- answers and skips ----

    def reveal(self, request: Request, posted: Posted) -> Response:
        account, token, fields = self.site.form(request, posted)
        form = forms.task_form(fields)
        self.service.reveal(account, token, form)
        # A task with events was taken back. "/task" might show another open task instead.
        return redirect(_path_of(form.task) if form.revision else "/task")

    def answer(self, request: Request, posted: Posted) -> Response:
        return self._saved(request, posted, self._answer)

    def ask(self, request: Request, posted: Posted) -> Response:
        return self._saved(request, posted, self._ask)

    def skip(self, request: Request, posted: Posted) -> Response:
        return self._saved(request, posted, self._skip)

    def _answer(self, request: Request, posted: FormData) -> Response:
        account, token, fields = self.site.form(request, posted)
        form = forms.task_form(fields)
        presented = self.service.shown_again(account, token, form)
        if account.role == "labeler" and presented.lease.is_hidden:
            return self._warning_page(account, token, presented, 422)
        answer, wrong = forms.read_answer(fields, presented.lease.shown, self.service.config)
        if answer is None:
            return self._task_page(account, token, presented, fields, wrong)
        self.service.answer(account, token, form, answer, CLIENT)
        if account.role != "lead":
            return redirect("/answers" if form.revision and presented.lease.is_done else "/task")
        queue = fields.text(QUEUE)
        return redirect(next_in_queue(self.service, queue, presented.lease.task_id) if queue else "/lead/quality")

    def _ask(self, request: Request, posted: FormData) -> Response:
        """Stores a question and shows the task again, with everything else that was entered."""
        account, token, fields = self.site.form(request, posted)
        form, text = forms.task_form(fields), fields.text("question").strip()[:MAX_QUESTION_CHARACTERS]
        presented = self.service.shown_again(account, token, form)
        if account.role != "labeler" or presented.lease.is_hidden:
            raise RefusedError("labelers ask about tasks that they were shown")
        if not text:
            return self._task_page(account, token, presented, fields, ["The question is empty."])
        self.service.ask(account, presented.lease, text)
        kept = Fields({**fields.values, "question": ""}, fields.ticked)
        return self._task_page(account, token, presented, kept)

    def _skip(self, request: Request, posted: FormData) -> Response:
        account, token, fields = self.site.form(request, posted)
        form, reason = forms.task_form(fields), forms.read_reason(fields, self.service.config)
        if not reason:
            presented = self.service.shown_again(account, token, form)
            if presented.lease.is_hidden:
                return self._warning_page(account, token, presented, 422)
            wrong = ["A skip needs a reason, so that the lead can help."]
            return self._task_page(account, token, presented, fields, wrong)
        self.service.skip(account, token, form, reason[: forms.MAX_NOTE_CHARACTERS], CLIENT)
        return redirect("/task")

    def _saved(self, request: Request, posted: FormData, save: Callable[[Request, FormData], Response]) -> Response:
        """Saves a form. If that is refused or fails, returns what the labeler typed.

        This is the only place that catches every error: whatever the cause, a labeler's work must not be lost.
        """
        try:
            return save(request, posted)
        except SignInNeededError:
            typed = as_text(fields_of(posted))
            return self.site.typed_page(request, 401, "Your session has ended", SESSION_OVER, typed)
        except RefusedError as error:
            return self.site.typed_page(request, 403, "Not possible", str(error), as_text(fields_of(posted)))
        except LeaseLostError:
            return self.site.typed_page(request, 409, "Too late", TOO_LATE, as_text(fields_of(posted)))
        except ValueError as error:
            return self.site.typed_page(request, 409, "Not stored", str(error), as_text(fields_of(posted)))
        except STORE_AWAY as error:
            LOG.error("an answer or a skip was not stored: %s", reason_of(error))
            return self.site.unsaved_page(request, posted, 503, as_text(fields_of(posted)))
        except Exception:
            LOG.exception("an answer or a skip was not stored")
            return self.site.unsaved_page(request, posted, 500, as_text(fields_of(posted)))

    # ---- past answers ----

    def answers(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        history = self.service.history(account)
        num_done = self.service.store.num_current_answers(account.name)
        return self.site.page("answers", account, token, history=history, num_done=num_done)

    def undo(self, request: Request, posted: Posted) -> Response:
        account, _, fields = self.site.form(request, posted)
        revision = fields.number("revision")
        if revision is None:
            raise RefusedError("the form names no answer")
        handle = fields.text("task")
        self.service.undo(account, handle, revision, CLIENT)
        return redirect("/answers" if account.role == "lead" else _path_of(handle))


def _num_folded(shown: ShownTask, config: LabelingConfig) -> int:
    """Returns how many of the first turns are folded: none if each turn is rated."""
    num_turns = len(shown.prompt)
    return num_turns - TURNS_OPEN if num_turns > MAX_TURNS_OPEN and not config.turn_criteria else 0


def _path_of(handle: str) -> str:
    """Returns the path of a task that the labeler has taken back."""
    return f"/task?task={quote(handle, safe='')}"


class Questions:
    """What the pages do with questions."""

    def __init__(self, store: LabelStore) -> None:
        self.store = store

    def of(self, account: Account) -> list[Thread]:
        """Returns a labeler's threads, or all threads for a lead; those that wait for this person come first."""
        if account.role == "lead":
            return sorted(self.store.threads(), key=lambda thread: thread.state != "question")
        return sorted(self.store.threads(labeler=account.name), key=lambda thread: thread.state != "reply")

    def num_waiting(self, account: Account) -> int:
        """Counts the threads that wait for this person; 0 if the store cannot be read, because every page shows it."""
        try:
            return self.store.num_waiting("" if account.role == "lead" else account.name)
        except STORE_AWAY:
            return 0

    def write(self, account: Account, handle: str, labeler: str, kind: ThreadState, text: str) -> None:
        """Appends a message to a thread. Labelers write in their own threads, whatever `labeler` is.

        Raises: RefusedError for a thread that is not there, and a ValueError for an empty or too long text.
        """
        owner = labeler if account.role == "lead" else account.name
        thread = next((one for one in self.of(account) if (one.handle, one.labeler) == (handle, owner)), None)
        if thread is None:
            raise RefusedError("there is no such question")
        said: ThreadState = "resolved" if kind == "resolved" else "reply" if account.role == "lead" else "question"
        self.store.write_message(thread.task_id, owner, account.name, said, text.strip())


class QuestionPages:
    """The routes of the page of questions."""

    def __init__(self, site: Site, questions: Questions) -> None:
        self.site, self.questions = site, questions
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/questions", response_class=HTMLResponse)(self.threads)
        self.router.post("/questions/write")(self.write)

    def threads(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        threads = self.questions.of(account)
        return self.site.page("questions", account, token, threads=threads, max_question=MAX_QUESTION_CHARACTERS)

    def write(self, request: Request, posted: Posted) -> Response:
        """Stores a reply, a further question, or that a thread is resolved."""
        account, _, fields = self.site.form(request, posted)
        handle, labeler = fields.text("task"), fields.text("labeler")
        kind: ThreadState = "resolved" if fields.text("resolved") else "reply"
        text = "" if kind == "resolved" else fields.text("text")[:MAX_QUESTION_CHARACTERS]
        if kind == "resolved" or text.strip():  # an empty reply stays unsaid
            self.questions.write(account, handle, labeler, kind, text)
        return redirect(f"/questions#{quote(f'thread-{handle}-{labeler}', safe='')}")


# ---- the instructions ----


@dataclass(frozen=True)
class Line:
    """A line of the instructions: "added", "removed" or "kept". After a gap, unchanged lines before it are left out."""

    kind: str
    text: str
    is_after_gap: bool = False


def changes(before: str, after: str) -> list[Line]:
    """Returns the lines that differ between two versions, with a line of context around them; [] if none does."""
    old, new = before.splitlines(), after.splitlines()
    found: list[Line] = []
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for number, group in enumerate(matcher.get_grouped_opcodes(CONTEXT_LINES)):
        lines = []
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                lines += [("kept", text) for text in new[new_start:new_end]]
                continue
            lines += [("removed", text) for text in old[old_start:old_end]]
            lines += [("added", text) for text in new[new_start:new_end]]
        found += [Line(kind, text, is_after_gap=bool(number) and not index) for index, (kind, text) in enumerate(lines)]
    return found


class InstructionPages:
    """The routes of the page."""

    def __init__(self, site: Site, service: LabelingService) -> None:
        self.site, self.service = site, service
        self.router = APIRouter(include_in_schema=False)
        self.router.get("/instructions", response_class=HTMLResponse)(self.instructions)
        self.router.post("/instructions")(self.confirm_reading)

    def instructions(self, request: Request) -> Response:
        account, token = self.site.signed_in(request)
        config = self.service.config
        is_new = account.role == "labeler" and account.read_version != config.version
        earlier = self.site.accounts.instructions_text(account.read_version) if is_new else None
        return self.site.page(
            "instructions",
            account,
            token,
            text=config.instructions,
            has_read=not is_new,
            is_revised=earlier is not None,
            changes=changes(earlier, config.instructions) if earlier is not None else [],
        )

    def confirm_reading(self, request: Request, posted: Posted) -> Response:
        account, _, _ = self.site.form(request, posted)
        self.site.accounts.confirm_reading(account.name, self.service.config.version)
        return redirect("/")
