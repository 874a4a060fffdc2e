"""The HTTP API: all that the page does, for programs. `/api/openapi.json` describes it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from labeling.attempts import Attempts, sign_in
from labeling.forms import MAX_NOTE_CHARACTERS, MAX_RATING, MIN_RATING
from labeling.labeling import Asked, Labeling, ShownForm
from labeling.lead import LeadView
from labeling.security import MAX_SIGN_IN_BYTES, MAX_TASKS_BYTES, unstorable_in
from preferences.formats.registry import FORMATS
from preferences.people import Account, People
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL, Answer, Message, Task
from preferences.standing import held_back

CLIENT = "api"
MAX_WHOLE = 2**53  # what every JSON reader takes
MAX_TASKS_AT_ONCE = 1_000
MAX_FLAGS = 1_000  # of one response, before they are compared with those that can be given

Number = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Rank = Annotated[int, Field(ge=1, le=MAX_RESPONSES)]
Rating = Annotated[float, Field(ge=MIN_RATING, le=MAX_RATING)]
# `Body` refuses what cannot be stored; the pattern says so in the description.
Text = Annotated[str, Field(pattern="^[^\\x00]*$")]
Name = Annotated[str, Field(min_length=1, max_length=512, pattern="^[^\\x00]*$")]
Note = Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS, pattern="^[^\\x00]*$")]


class Body(BaseModel):
    """What a request says; unknown fields are refused, and texts that no database holds."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_storable(cls, said: Any) -> Any:
        if unstorable_in(said):
            raise ValueError("a text contains NUL or a lone surrogate, which cannot be stored")
        return said


class Credentials(Body):
    name: Text
    key: Text


class Session(BaseModel):
    token: str
    name: str
    role: str


class Form(Body):
    """What came with the task, which it names by a random handle; it is given back unchanged."""

    task: Name
    revision: Number
    shown_at: Number
    seal: Text

    def shown(self) -> ShownForm:
        return ShownForm(self.task, self.revision, self.shown_at, self.seal)


class MessageBody(Body):
    role: Literal["system", "user", "assistant"]
    content: Text


class AskedTask(BaseModel):
    """A task to judge. Responses are blinded and in the order to show them in."""

    form: Form
    prompt: list[MessageBody]
    responses: list[str]
    asks_ratings: bool
    flags: list[str]
    expires_at: float


class Nothing(BaseModel):
    """Why there is no task: instructions to read, nothing open, or a screening that is not passed."""

    waiting: str


class AnswerBody(Body):
    """Lists are in the order shown; rank 1 is the best, equal ranks are ties."""

    form: Form
    ranks: Annotated[list[Rank], Field(min_length=MIN_RESPONSES, max_length=MAX_RESPONSES)]
    ratings: Annotated[list[Rating], Field(max_length=MAX_RESPONSES)] = []
    flags: Annotated[list[Annotated[list[Text], Field(max_length=MAX_FLAGS)]], Field(max_length=MAX_RESPONSES)] = []
    note: Note = ""


class SkipBody(Body):
    form: Form
    reason: Annotated[str, Field(min_length=1, max_length=MAX_NOTE_CHARACTERS, pattern="^[^\\x00]*$")]


class UndoBody(Body):
    """`task` is the handle that `/history` gives. `revision` is the number of the undo itself: one more than that of
    what is taken back.
    """

    task: Name
    revision: Number


class NewTask(Body):
    task_id: Name
    prompt: Annotated[list[MessageBody], Field(min_length=1)]
    responses: Annotated[list[Text], Field(min_length=MIN_RESPONSES, max_length=MAX_RESPONSES)]
    sources: list[Text]
    objective: Name = OVERALL
    gold_ranks: list[Rank] = []
    repeat_of: Text = ""
    num_labelers: Annotated[int, Field(ge=1, le=1_000)] = 1


class NewTasks(Body):
    batch: Name
    tasks: Annotated[list[NewTask], Field(min_length=1, max_length=MAX_TASKS_AT_ONCE)]


class ExportBody(BaseModel):
    """Rows of a format. `left_out` counts, by kind, what the format has no place for or what is no training data."""

    rows: list[dict[str, Any]]
    left_out: dict[str, int]


class InvitationBody(Body):
    name: Text
    role: Literal["lead", "labeler"]


class RevocationBody(Body):
    name: Text


class StateBody(Body):
    name: Text
    state: Literal["admitted", "closed"]


ExportFormat = Annotated[str, Field(json_schema_extra={"enum": [form.name for form in FORMATS.values() if form.write]})]
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


class Api:
    """The routes of the API."""

    def __init__(self, labeling: Labeling, people: People, lead: LeadView, attempts: Attempts) -> None:
        self.labeling, self.people, self.lead, self.attempts = labeling, people, lead, attempts
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        get, post = self.router.get, self.router.post
        post("/session", summary="Sign in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/session/end", summary="Sign out", status_code=204)(self.sign_out)
        get("/instructions", summary="What labelers are told")(self.instructions)
        post("/instructions/read", summary="Say that they are read", status_code=204)(self.read_instructions)
        post("/lease", summary="The next task")(self.lease)
        post("/answers", summary="Judge a task; of a lead, adjudicate it", status_code=204)(self.answer)
        post("/skips", summary="Leave a task to others", status_code=204)(self.skip)
        post("/undos", summary="Take an answer or a skip back", status_code=204)(self.undo)
        get("/history", summary="One's own last acts")(self.history)
        get("/batches", summary="How far all batches are (leads)")(self.batches)
        post("/tasks", summary="Add tasks (leads)", status_code=204, max_body_size=MAX_TASKS_BYTES)(self.add_tasks)
        post("/reopened/{task_id:path}", summary="A task to adjudicate (leads)")(self.reopened)
        get("/judgments/{batch:path}", summary="Every act on a batch (leads)")(self.judgments)
        get("/export/{batch:path}", summary="A batch in a format, and what that leaves out (leads)")(self.export)
        get("/quality/{batch:path}", summary="Statistics of a batch (leads)")(self.quality)
        get("/people", summary="Accounts (leads)")(self.accounts)
        get("/invitations", summary="One-time links that can still be used (leads)")(self.invitations)
        post("/invitations", summary="A one-time link; it voids an older one of the name (leads)")(self.invite)
        post("/invitations/revoked", summary="Void the link of a name (leads)", status_code=204)(self.revoke)
        get("/acts", summary="What was done to people and taken out of the store (leads)")(self.acts)
        post("/people/state", summary="Admit somebody or close an account (leads)", status_code=204)(self.set_state)

    def _signed_in(self, bearer: HTTPAuthorizationCredentials | None) -> tuple[Account, str]:
        account = self.people.session(bearer.credentials) if bearer is not None else None
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

    # ---- coming and going ----

    def sign_in(self, body: Credentials, request: Request) -> Session:
        token = sign_in(self.people, self.attempts, request, body.name, body.key)
        account = self.people.session(token) if token else None
        if token is None or account is None:
            raise HTTPException(403, "name and key do not go together")
        return Session(token=token, name=account.name, role=account.role)

    def sign_out(self, bearer: Bearer) -> None:
        _, token = self._signed_in(bearer)
        self.people.sign_out(token)

    # ---- labeling ----

    def instructions(self, bearer: Bearer) -> dict[str, Any]:
        self._signed_in(bearer)
        config = self.labeling.config
        return {"version": config.version, "text": config.instructions, "flags": config.flags}

    def read_instructions(self, bearer: Bearer) -> None:
        account, _ = self._signed_in(bearer)
        self.people.has_read(account.name, self.labeling.config.version)

    def lease(self, bearer: Bearer) -> AskedTask | Nothing:
        account, token = self._signed_in(bearer)
        if account.role == "lead":
            raise HTTPException(403, "leads adjudicate; labelers lease")
        asked = self.labeling.next_task(account, token)
        return self._as_body(asked) if isinstance(asked, Asked) else Nothing(waiting=asked)

    def answer(self, body: AnswerBody, bearer: Bearer) -> None:
        account, token = self._signed_in(bearer)
        config = self.labeling.config
        if config.asks_ratings != bool(body.ratings):
            raise _invalid("ratings", f"{'one per response' if config.asks_ratings else 'none'} expected")
        unknown = {flag for flags in body.flags for flag in flags} - set(config.flags)
        if unknown:
            raise _invalid("flags", f"{sorted(unknown)[0]!r} is not among those that can be given")
        if any(len(flags) != len(set(flags)) for flags in body.flags):
            raise _invalid("flags", "each flag once per response expected")
        flags = tuple(tuple(marked) for marked in body.flags)
        answer = Answer(tuple(body.ranks), 0, tuple(body.ratings), flags, body.note)
        self.labeling.answer(account, token, body.form.shown(), answer, CLIENT)

    def skip(self, body: SkipBody, bearer: Bearer) -> None:
        account, token = self._signed_in(bearer)
        self.labeling.skip(account, token, body.form.shown(), body.reason, CLIENT)

    def undo(self, body: UndoBody, bearer: Bearer) -> None:
        account, _ = self._signed_in(bearer)
        self.labeling.undo(account, body.task, body.revision, CLIENT)

    def history(self, bearer: Bearer) -> list[dict[str, Any]]:
        account, _ = self._signed_in(bearer)
        told = []
        for act, stands in self.labeling.history(account):
            judgment = asdict(act.judgment)
            if account.role != "lead":  # an id may say what labelers must not know
                del judgment["task_id"]
            told.append({**judgment, "task": act.handle, "stands": stands})
        return told

    # ---- leading ----

    def batches(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(counts) for counts in self.lead.counts().batches]

    def add_tasks(self, body: NewTasks, bearer: Bearer) -> None:
        self._lead(bearer)
        tasks = [
            Task(
                task.task_id,
                tuple(Message(message.role, message.content) for message in task.prompt),
                tuple(task.responses),
                tuple(task.sources),
                task.objective,
                tuple(task.gold_ranks),
                task.repeat_of,
            )
            for task in body.tasks
        ]
        quotas = [task.num_labelers for task in body.tasks]
        self.labeling.store.add_tasks(tasks, batch=body.batch, num_labelers=quotas)

    def reopened(self, task_id: str, bearer: Bearer) -> AskedTask:
        account, token = self._lead(bearer)
        return self._as_body(self.labeling.reopened(account, task_id, token))

    def judgments(self, batch: str, bearer: Bearer) -> list[dict[str, Any]]:
        account, _ = self._lead(bearer)
        self._require_batch(batch)
        self.people.note(account.name, "exported", f"{batch} (judgments)")
        tasks = {stored.task.task_id: stored.task for stored in self.labeling.store.tasks(batch)}
        return [
            {**asdict(judgment), "held_back": held_back(tasks[judgment.task_id])}
            for judgment in self.labeling.store.judgments(batch)
        ]

    def export(self, batch: str, bearer: Bearer, form: Annotated[ExportFormat, Query(alias="format")]) -> ExportBody:
        account, _ = self._lead(bearer)
        self._require_batch(batch)
        found = self.lead.export(batch, form)
        self.people.note(account.name, "exported", f"{batch} ({form})")
        return ExportBody(rows=found.rows, left_out=found.report.counts())

    def quality(self, batch: str, bearer: Bearer) -> Mapping[str, Any]:
        self._lead(bearer)
        self._require_batch(batch)
        return self.lead.report(batch).as_dict()

    def _require_batch(self, batch: str) -> None:
        if batch not in self.labeling.store.batches():
            raise HTTPException(404, f"batch {batch!r} is not in the store")

    def accounts(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(account) for account in self.people.accounts()]

    def invitations(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(link) for link in self.people.links()]

    def invite(self, body: InvitationBody, bearer: Bearer) -> dict[str, str]:
        account, _ = self._lead(bearer)
        code = self.people.invite(body.name, body.role, by=account.name)
        return {"link": self.labeling.config.server.link(code)}

    def revoke(self, body: RevocationBody, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        self.people.revoke(body.name, by=account.name)

    def acts(self, bearer: Bearer) -> list[dict[str, Any]]:
        self._lead(bearer)
        return [asdict(act) for act in self.people.acts()]

    def set_state(self, body: StateBody, bearer: Bearer) -> None:
        account, _ = self._lead(bearer)
        if body.name == account.name:
            raise HTTPException(403, "nobody closes their own account; another lead can")
        self.people.set_state(body.name, body.state, by=account.name)

    def _as_body(self, asked: Asked) -> AskedTask:
        shown, config = asked.lease.shown, self.labeling.config
        return AskedTask(
            form=Form(**asdict(asked.form)),
            prompt=[MessageBody.model_validate(asdict(message)) for message in shown.prompt],
            responses=list(shown.responses),
            asks_ratings=config.asks_ratings,
            flags=list(config.flags),
            expires_at=asked.lease.expires_at,
        )


def _invalid(field: str, expected: str) -> RequestValidationError:
    """What is wrong with a field, in the form of all other 422s."""
    return RequestValidationError([{"type": "value_error", "loc": ("body", field), "msg": f"{field}: {expected}"}])


class Problem(BaseModel):
    detail: str


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "Cannot be read: no UTF-8, a NUL character in the address, another host"},
    401: {"model": Problem, "description": "No session"},
    403: {"model": Problem, "description": "Not for this session"},
    404: {"model": Problem, "description": "No such address, or no such batch"},
    409: {"model": Problem, "description": "Contradicts what is stored, or came too late"},
    413: {"model": Problem, "description": "Too long"},
    429: {"model": Problem, "description": "Too many tries"},
    503: {"model": Problem, "description": "Busy; the same request may be sent again"},
}
