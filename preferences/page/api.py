"""The HTTP API: everything that the pages do, for programs. `/api/openapi.json` describes it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from preferences.accounts import Account, Accounts
from preferences.formats.registry import FORMATS
from preferences.page.config import LabelingConfig
from preferences.page.forms import MAX_NOTE_CHARACTERS, MAX_RATING, MIN_RATING
from preferences.page.security import MAX_SIGN_IN_BYTES, MAX_TASKS_BYTES, Attempts, sign_in, unstorable_in
from preferences.page.service import LabelingService, LeadView, PresentedTask, TaskForm, exported_what
from preferences.rankings import why_excluded
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL, Answer, Message, Task

CLIENT = "api"
MAX_INTEGER = 2**53  # every JSON reader handles integers up to this
MAX_TASKS_AT_ONCE = 1_000
MAX_FLAGS = 1_000  # flags of one response, checked before comparing them with the allowed flags

# A whole number in the sense of JSON Schema's "integer", which includes 3.0.
IS_WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Number = Annotated[int, Field(ge=0, le=MAX_INTEGER), IS_WHOLE]
Rank = Annotated[int, Field(ge=1, le=MAX_RESPONSES), IS_WHOLE]
Rating = Annotated[float, Field(ge=MIN_RATING, le=MAX_RATING)]
# `Body` refuses texts that cannot be stored, and this pattern documents that in the OpenAPI schema. It lists all
# characters except NUL and surrogates, because the patterns of some languages cannot name surrogates.
STORABLE = "^[\u0001-\ud7ff\ue000-\U0010ffff]*$"
Text = Annotated[str, Field(pattern=STORABLE)]
Name = Annotated[str, Field(min_length=1, max_length=512, pattern=STORABLE)]
Note = Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS, pattern=STORABLE)]
ExportFormat = Annotated[str, Field(json_schema_extra={"enum": [form.name for form in FORMATS.values() if form.write]})]
Names = Annotated[bool, Query(description="Name the labelers; by default they have pseudonyms.")]
SignIns = Annotated[bool, Query(description="Sign-ins and refused ones, instead of everything else.")]
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


# ---- what requests and responses contain ----


class Body(BaseModel):
    """A request. Unknown fields are refused, as is text that some database cannot store."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_storable(cls, value: Any) -> Any:
        if unstorable_in(value):
            raise ValueError("a text contains NUL or a lone surrogate, which cannot be stored")
        return value


class Credentials(Body):
    name: Text
    key: Text


class Session(BaseModel):
    token: str
    name: str
    role: str


class Form(Body):
    """The form that came with the task. Send it back unchanged. `task` is a random handle."""

    task: Name
    revision: Number
    shown_at: Number
    seal: Text

    def task_form(self) -> TaskForm:
        return TaskForm(self.task, self.revision, self.shown_at, self.seal)


class MessageBody(Body):
    role: Literal["system", "user", "assistant"]
    content: Text


class TaskBody(BaseModel):
    """A task to judge. Responses have no sources and are in the order to show them in.

    Show a `warning` alone first. If the labeler wants to see the task, post the form to `/reveals`; time counts from
    then.
    """

    form: Form
    warning: str
    prompt: list[MessageBody]
    responses: list[str]
    asks_ratings: bool
    flags: list[str]
    expires_at: float


class NoTask(BaseModel):
    """Why there is no task: "instructions" to read, "screening" not passed, the "daily quota" met, "batches closed",
    "no fitting task" (all open ones require tags that the account lacks), or "nothing open".
    """

    waiting: str


class AnswerBody(Body):
    """An answer. Lists are in the order shown; rank 1 is the best, equal ranks are ties."""

    form: Form
    ranks: Annotated[list[Rank], Field(min_length=MIN_RESPONSES, max_length=MAX_RESPONSES)]
    ratings: Annotated[list[Rating], Field(max_length=MAX_RESPONSES)] = []
    flags: Annotated[list[Annotated[list[Text], Field(max_length=MAX_FLAGS)]], Field(max_length=MAX_RESPONSES)] = []
    note: Note = ""


class SkipBody(Body):
    form: Form
    reason: Annotated[str, Field(min_length=1, max_length=MAX_NOTE_CHARACTERS, pattern=STORABLE)]


class RevealBody(Body):
    form: Form


class UndoBody(Body):
    """What to take back. `task` is the handle from `/history`; `revision` is one more than that of the event."""

    task: Name
    revision: Number


class VoidBody(Body):
    """Which judgment to void, as in `/judgments`: its task, labeler (pseudonym or name) and revision."""

    task_id: Name
    labeler: Name
    revision: Number
    reason: Annotated[str, Field(min_length=1, max_length=MAX_NOTE_CHARACTERS, pattern=STORABLE)]


class NewTask(Body):
    task_id: Name
    prompt: Annotated[list[MessageBody], Field(min_length=1)]
    responses: Annotated[list[Text], Field(min_length=MIN_RESPONSES, max_length=MAX_RESPONSES)]
    sources: list[Text]
    objective: Name = OVERALL
    gold_ranks: list[Rank] = []
    repeat_of: Text = ""
    warning: Text = ""
    num_labelers: Annotated[int, Field(ge=1, le=1_000), IS_WHOLE] = 1


class NewTasks(Body):
    batch: Name
    tasks: Annotated[list[NewTask], Field(min_length=1, max_length=MAX_TASKS_AT_ONCE)]


class ExportBody(BaseModel):
    """Rows of a format. `left_out` counts, by kind, what the format cannot hold and what is not training data."""

    rows: list[dict[str, Any]]
    left_out: dict[str, int]


class InvitationBody(Body):
    name: Text
    role: Literal["lead", "labeler"]


class RevocationBody(Body):
    name: Text


class ErasureBody(Body):
    name: Text


class StateBody(Body):
    name: Text
    state: Literal["admitted", "closed"]


class Problem(BaseModel):
    detail: str


# Given as a schema, because FastAPI would build a validator per route and status from a model, which takes longer than
# the rest of creating the application.
_IN_JSON = {"application/json": {"schema": Problem.model_json_schema()}}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "content": _IN_JSON}
    for status, description in {
        400: "Unreadable: not UTF-8, a NUL character in the address, or another host",
        401: "No session",
        403: "Not allowed in this session",
        404: "No such address, or no such batch",
        409: "Contradicts what is stored, or came too late",
        413: "Too long",
        429: "Too many tries",
        503: "Busy; the same request may be sent again",
    }.items()
}


# ---- the routes ----


class Api:
    """The routes of the API."""

    def __init__(self, service: LabelingService, accounts: Accounts, lead: LeadView, attempts: Attempts) -> None:
        self.service, self.accounts, self.lead, self.attempts = service, accounts, lead, attempts
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        get, post = self.router.get, self.router.post
        post("/session", summary="Sign in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/session/end", summary="Sign out", status_code=204)(self.sign_out)
        get("/sessions", summary="Your sessions")(self.sessions)
        post("/sessions/end", summary="Sign out everywhere", status_code=204)(self.sign_out_everywhere)
        get("/instructions", summary="The instructions for labelers")(self.instructions)
        post("/instructions/read", summary="Confirm reading the instructions", status_code=204)(self.confirm_reading)
        post("/lease", summary="The next task")(self.lease)
        post("/answers", summary="Judge a task; for leads: adjudicate it", status_code=204)(self.answer)
        post("/skips", summary="Leave a task to other labelers", status_code=204)(self.skip)
        post("/reveals", summary="Show a task that has a warning", status_code=204)(self.reveal)
        post("/undos", summary="Take an answer or a skip back", status_code=204)(self.undo)
        get("/history", summary="Your own last events")(self.history)
        get("/batches", summary="Progress of all batches (leads)")(self.batches)
        post("/tasks", summary="Add tasks (leads)", status_code=204, max_body_size=MAX_TASKS_BYTES)(self.add_tasks)
        post("/reopened/{task_id:path}", summary="A task to adjudicate (leads)")(self.reopened)
        post("/voids", summary="Void a judgment (leads)", status_code=204)(self.void)
        get("/judgments/{batch:path}", summary="Every event on a batch (leads)")(self.judgments)
        get("/export/{batch:path}", summary="A batch in a format, and what it leaves out (leads)")(self.export)
        get("/quality/{batch:path}", summary="Statistics of a batch (leads)")(self.quality)
        get("/accounts", summary="Accounts (leads)")(self.list_accounts)
        get("/invitations", summary="One-time links that can still be used (leads)")(self.invitations)
        post("/invitations", summary="Make a one-time link, which voids an older one (leads)")(self.invite)
        post("/invitations/revoked", summary="Void the link of a name (leads)", status_code=204)(self.revoke)
        get("/people/{name:path}", summary="Everything held about a person (leads)")(self.held_about)
        post("/people/erased", summary="Erase a person, except for judgments (leads)")(self.erase)
        get("/audit-log", summary="Who did what, or signed in (leads)")(self.audit_log)
        post("/accounts/state", summary="Admit somebody or close an account (leads)", status_code=204)(self.set_state)

    def _signed_in(self, bearer: HTTPAuthorizationCredentials | None) -> tuple[Account, str]:
        account = self.accounts.session(bearer.credentials) if bearer is not None else None
        if bearer is None or account is None:
            raise HTTPException(
                401, "a session's token is expected: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"}
            )
        return account, bearer.credentials

    def _lead(self, bearer: HTTPAuthorizationCredentials | None) -> tuple[Account, str]:
        account, token = self._signed_in(bearer)
        if account.role != "lead":
            raise HTTPException(403, "this is for leads")
        return account, token

    # ---- signing in and out ----

    def sign_in(self, body: Credentials, request: Request) -> Session:
        token = sign_in(self.accounts, self.attempts, request, body.name, body.key)
        account = self.accounts.session(token) if token else None
        if token is None or account is None:
            raise HTTPException(403, "name and key do not match")
        return Session(token=token, name=account.name, role=account.role)

    def sign_out(self, bearer: Bearer) -> None:
        _, token = self._signed_in(bearer)
        self.accounts.sign_out(token)

    def sessions(self, bearer: Bearer) -> list[dict[str, Any]]:
        account, token = self._signed_in(bearer)
        return [asdict(session) for session in self.accounts.sessions_of(account.name, token)]

    def sign_out_everywhere(self, bearer: Bearer) -> None:
        account, _ = self._signed_in(bearer)
        self.accounts.sign_out_everywhere(account.name)

    # ---- for labelers ----

    def instructions(self, bearer: Bearer) -> dict[str, Any]:
        self._signed_in(bearer)
        config = self.service.config
        return {"version": config.version, "text": config.instructions, "flags": config.flags}

    def confirm_reading(self, bearer: Bearer) -> None:
        account, _ = self._signed_in(bearer)
        self.accounts.confirm_reading(account.name, self.service.config.version)

    def lease(self, bearer: Bearer) -> TaskBody | NoTask:
        account, token = self._signed_in(bearer)
        if account.role == "lead":
            raise HTTPException(403, "leads adjudicate; labelers lease")
        presented = self.service.next_task(account, token)
        return self._as_body(presented) if isinstance(presented, PresentedTask) else NoTask(waiting=presented)

    def answer(self, body: AnswerBody, bearer: Bearer) -> None:
        account, token = self._signed_in(bearer)
        config = self.service.config
        if config.asks_ratings != bool(body.ratings):
            raise _invalid("ratings", f"{'one per response' if config.asks_ratings else 'none'} expected")
        unknown = {flag for flags in body.flags for flag in flags} - set(config.flags)
        if unknown:
            raise _invalid("flags", f"{sorted(unknown)[0]!r} is not a flag that labelers may give")
        if any(len(flags) != len(set(flags)) for flags in body.flags):
            raise _invalid("flags", "each flag at most once per response expected")
        flags = tuple(tuple(marked) for marked in body.flags)
        answer = Answer(tuple(body.ranks), 0, tuple(body.ratings), flags, body.note)
        self.service.answer(account, token, body.form.task_form(), answer, CLIENT)

    def skip(self, body: SkipBody, bearer: Bearer) -> None:
        account, token = self._signed_in(bearer)
        self.service.skip(account, token, body.form.task_form(), body.reason, CLIENT)

    def reveal(self, body: RevealBody, bearer: Bearer) -> None:
        account, token = self._signed_in(bearer)
        self.service.reveal(account, token, body.form.task_form())

    def undo(self, body: UndoBody, bearer: Bearer) -> None:
        account, _ = self._signed_in(bearer)
        self.service.undo(account, body.task, body.revision, CLIENT)

    def history(self, bearer: Bearer) -> list[dict[str, Any]]:
        account, _ = self._signed_in(bearer)
        rows = []
        for event, is_current in self.service.history(account):
            judgment = asdict(event.judgment)
            if account.role != "lead":  # an id may reveal what labelers must not know
                del judgment["task_id"]
            rows.append({**judgment, "task": event.handle, "is_current": is_current})
        return rows

    # ---- for leads ----

    def batches(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(counts) for counts in self.lead.batches()]

    def add_tasks(self, body: NewTasks, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        tasks = [
            Task(
                task.task_id,
                tuple(Message(message.role, message.content) for message in task.prompt),
                tuple(task.responses),
                tuple(task.sources),
                task.objective,
                tuple(task.gold_ranks),
                task.repeat_of,
                warning=task.warning,
            )
            for task in body.tasks
        ]
        quotas = [task.num_labelers for task in body.tasks]
        self.service.store.add_tasks(tasks, batch=body.batch, num_labelers=quotas)
        self.accounts.log(account.name, "added", f"{len(tasks)} tasks to {body.batch}")

    def reopened(self, task_id: str, bearer: Bearer) -> TaskBody:
        account, token = self._lead(bearer)
        return self._as_body(self.service.reopened(account, task_id, token))

    def void(self, body: VoidBody, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        self.service.void(account, body.task_id, body.labeler, body.revision, body.reason, CLIENT)

    def judgments(self, batch: str, bearer: Bearer, *, names: Names = False) -> list[dict[str, Any]]:
        account, _ = self._lead(bearer)
        self._require_batch(batch)
        self.accounts.log(account.name, "exported", exported_what(batch, "judgments", with_names=names))
        tasks = {stored.task.task_id: stored.task for stored in self.service.store.tasks(batch)}
        return [
            {**asdict(judgment), "why_excluded": why_excluded(tasks[judgment.task_id])}
            for judgment in self.service.store.judgments(batch, with_names=names)
        ]

    def export(
        self, batch: str, bearer: Bearer, form: Annotated[ExportFormat, Query(alias="format")], *, names: Names = False
    ) -> ExportBody:
        account, _ = self._lead(bearer)
        self._require_batch(batch)
        found = self.lead.export(batch, form, with_names=names)
        self.accounts.log(account.name, "exported", exported_what(batch, form, with_names=names))
        return ExportBody(rows=found.rows, left_out=found.report.counts())

    def quality(self, batch: str, bearer: Bearer) -> Mapping[str, Any]:
        self._lead(bearer)
        self._require_batch(batch)
        return self.lead.report(batch).as_dict()

    def _require_batch(self, batch: str) -> None:
        if batch not in self.service.store.batches():
            raise HTTPException(404, f"batch {batch!r} is not in the store")

    def list_accounts(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        pseudonyms = self.accounts.pseudonyms()
        return [{**asdict(account), "pseudonym": pseudonyms[account.name]} for account in self.accounts.all()]

    def invitations(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(link) for link in self.accounts.links()]

    def invite(self, body: InvitationBody, bearer: Bearer) -> dict[str, str]:
        account, _ = self._lead(bearer)
        code = self.accounts.invite(body.name, body.role, by=account.name)
        return {"link": self.service.config.server.link(code)}

    def revoke(self, body: RevocationBody, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        self.accounts.revoke(body.name, by=account.name)

    def held_about(self, name: str, bearer: Bearer) -> dict[str, Any]:
        account, _ = self._lead(bearer)
        if name not in self.accounts.pseudonyms():
            raise HTTPException(404, f"the store holds nothing under the name {name!a}")
        return self.accounts.held_about(name, by=account.name)

    def erase(self, body: ErasureBody, bearer: Bearer) -> dict[str, str]:
        account, _ = self._lead(bearer)
        if body.name == account.name:
            raise HTTPException(403, "you cannot erase yourself; another lead can")
        return {"pseudonym": self.accounts.erase(body.name, by=account.name)}

    def audit_log(self, bearer: Bearer, *, sign_ins: SignIns = False) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(event) for event in self.accounts.audit_log(sign_ins=sign_ins)]

    def set_state(self, body: StateBody, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        if body.name == account.name:
            raise HTTPException(403, "you cannot close your own account; another lead can")
        self.accounts.set_state(body.name, body.state, by=account.name)

    def _as_body(self, presented: PresentedTask) -> TaskBody:
        shown, config = presented.lease.shown, self.service.config
        return TaskBody(
            form=Form(**asdict(presented.form)),
            warning=shown.warning,
            prompt=[MessageBody.model_validate(asdict(message)) for message in shown.prompt],
            responses=list(shown.responses),
            asks_ratings=config.asks_ratings,
            flags=list(config.flags),
            expires_at=presented.lease.expires_at,
        )


def describe_answers(schema: dict[str, Any], config: LabelingConfig) -> None:
    """Adds this configuration's requirements for an answer to an OpenAPI schema."""
    answer = schema["components"]["schemas"]["AnswerBody"]
    ratings, flags = answer["properties"]["ratings"], answer["properties"]["flags"]
    if config.asks_ratings:
        answer["required"].append("ratings")
        ratings["minItems"] = MIN_RESPONSES
        del ratings["default"]
    else:
        ratings["maxItems"] = 0
    flags["items"] |= {"uniqueItems": True, "items": {"type": "string", "enum": list(config.flags)}}
    if not config.flags:
        flags["items"] = {"type": "array", "maxItems": 0}


def _invalid(field: str, expected: str) -> RequestValidationError:
    """Returns an error about a field, in the format of all other 422s."""
    return RequestValidationError([{"type": "value_error", "loc": ("body", field), "msg": f"{field}: {expected}"}])
