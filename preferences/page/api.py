"""The HTTP API, by which programs label, add tasks, adjudicate, and read statistics and exports.

`/api/openapi.json` describes it. Leads organize work and people on the pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from files.conversations import tool_messages
from files.strict_json import refuse_unsound
from preferences.accounts import Account, Accounts
from preferences.annotations import MAX_EDIT_CHARACTERS, MAX_TURN_RATINGS, Annotations, CriterionRatings, TurnRating
from preferences.formats.registry import FORMATS
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.page.forms import MAX_NOTE_CHARACTERS, MAX_RATING, MIN_RATING
from preferences.page.security import MAX_SIGN_IN_BYTES, MAX_TASKS_BYTES, Attempts, sign_in, unstorable_in
from preferences.page.service import LabelingService, LeadView, PresentedTask, TaskForm, exported_what
from preferences.rankings import why_excluded
from preferences.records import GOLD, MAX_RESPONSES, OVERALL, Answer, Message, Task, assistant_turns

MAX_INTEGER = 2**53  # every JSON reader handles integers up to this
MAX_TASKS_AT_ONCE = 1_000
MAX_FLAGS = 1_000  # flags of one response, checked before comparing them with the allowed flags

# A whole number in the sense of JSON Schema's "integer", which includes 3.0.
IS_WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Number = Annotated[int, Field(ge=0, le=MAX_INTEGER), IS_WHOLE]
Rank = Annotated[int, Field(ge=1, le=MAX_RESPONSES), IS_WHOLE]
Rating = Annotated[float, Field(ge=MIN_RATING, le=MAX_RATING)]
Point = Annotated[float, Field(allow_inf_nan=False)]
RightRating = Point | Annotated[list[Point], Field(min_length=2, max_length=2)]
# `Body` refuses texts that cannot be stored, and this pattern documents that in the OpenAPI schema. It lists all
# characters except NUL and surrogates, because the patterns of some languages cannot name surrogates.
STORABLE = "^[\u0001-\ud7ff\ue000-\U0010ffff]*$"
Text = Annotated[str, Field(pattern=STORABLE)]
STORABLE_TEXT = {"type": "string", "pattern": STORABLE}
# A call of a tool, described with JSON text: a description of all objects with storable texts would be unreadable.
FUNCTION = {
    "type": "object",
    "required": ["name", "arguments"],
    "properties": {"name": STORABLE_TEXT, "arguments": STORABLE_TEXT},
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {"id": STORABLE_TEXT, "type": {"const": "function"}, "function": FUNCTION},
    "additionalProperties": False,
}
Name = Annotated[str, Field(min_length=1, max_length=512, pattern=STORABLE)]
Note = Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS, pattern=STORABLE)]
Edit = Annotated[str, Field(max_length=MAX_EDIT_CHARACTERS, pattern=STORABLE)]


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
    """A message, as in OpenAI's API. The content may be null next to calls. A call's `arguments` may also be an object,
    and `tools`, the schemas of functions in the first message, a list.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": CALL})] = []
    tool_call_id: Text = ""
    name: Text = ""
    tools: Annotated[list[dict[str, Any]] | str, WithJsonSchema(STORABLE_TEXT)] = ""


class TaskBody(BaseModel):
    """A task to judge. Responses have no sources and are in the order to show them in.

    Show a `warning` alone first. If the labeler wants to see the task, post the form to `/reveals`; time counts from
    then.
    """

    form: Form
    warning: str
    prompt: list[dict[str, Any]]  # messages as in new tasks, without the fields that they do not have
    responses: list[str]
    asks_ratings: bool
    flags: list[str]
    criteria: list[LabelCriterion]
    asks_edits: bool
    expires_at: float


class NoTask(BaseModel):
    """Why there is no task: "instructions" to read, "screening" not passed, the "daily quota" met, "batches closed",
    "no fitting task" (all open ones require tags that the account lacks), or "nothing open".
    """

    waiting: str


class AnswerBody(Body):
    """An answer. Lists are in the order shown; rank 1 is the best, equal ranks are ties. A task with one response needs
    no ranks.

    `criteria` has one rating per response by each criterion of the task (for yes or no, 1 or 0), and `turns` one rating
    per turn of the assistant in the prompt, in order, by each criterion with `each_turn`. `edits` has a better version
    of each response, or "" for none.
    """

    form: Form
    ranks: Annotated[list[Rank], Field(max_length=MAX_RESPONSES)] = []
    ratings: Annotated[list[Rating], Field(max_length=MAX_RESPONSES)] = []
    flags: Annotated[list[Annotated[list[Text], Field(max_length=MAX_FLAGS)]], Field(max_length=MAX_RESPONSES)] = []
    note: Note = ""
    criteria: dict[Text, Annotated[list[Number], Field(min_length=1, max_length=MAX_RESPONSES)]] = {}
    turns: dict[Text, Annotated[list[Number], Field(max_length=MAX_TURN_RATINGS)]] = {}
    edits: Annotated[list[Edit], Field(max_length=MAX_RESPONSES)] = []


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


class GoldBody(Body):
    """What is right to say about a single response: ratings, or the lowest and the highest right ones, and marks.

    The response has exactly the right `flags`; without them (null), any are right.
    """

    rating: RightRating | None = None
    criteria: dict[Text, RightRating] = {}
    flags: list[Text] | None = None


class NewTask(Body):
    """A task to add. A gold task has `gold_ranks`, or with one response `gold`."""

    task_id: Name
    prompt: Annotated[list[MessageBody], Field(min_length=1)]
    responses: Annotated[list[Text], Field(min_length=1, max_length=MAX_RESPONSES)]
    sources: list[Text]
    objective: Name = OVERALL
    gold_ranks: list[Rank] = []
    gold: GoldBody | None = None
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


def describe_answers(schema: dict[str, Any], config: LabelingConfig) -> None:
    """Adds this configuration's requirements for an answer to an OpenAPI schema."""
    answer = schema["components"]["schemas"]["AnswerBody"]
    ratings, flags = answer["properties"]["ratings"], answer["properties"]["flags"]
    if config.asks_ratings:
        answer["required"].append("ratings")
        ratings["minItems"] = 1
        del ratings["default"]
    else:
        ratings["maxItems"] = 0
    flags["items"] |= {"uniqueItems": True, "items": {"type": "string", "enum": list(config.flags)}}
    if not config.flags:
        flags["items"] = {"type": "array", "maxItems": 0}
    criteria, edits = (answer["properties"][name] for name in ("criteria", "edits"))
    shape = next(iter(criteria.pop("patternProperties").values()))
    criteria |= {"additionalProperties": False, "required": [one.name for one in config.criteria]}
    criteria["properties"] = {
        one.name: {**shape, "items": {"type": "integer", "enum": list(one.choices)}} for one in config.criteria
    }
    turns = answer["properties"]["turns"]
    shape = next(iter(turns.pop("patternProperties").values()))
    turns |= {"additionalProperties": False}
    turns["properties"] = {
        one.name: {**shape, "items": {"type": "integer", "enum": list(one.choices)}} for one in config.turn_criteria
    }
    if config.criteria:
        answer["required"].append("criteria")
        del criteria["default"]
    if not config.asks_edits:
        edits["maxItems"] = 0


# ---- the routes ----


CLIENT = "api"
ExportFormat = Annotated[str, Field(json_schema_extra={"enum": [form.name for form in FORMATS.values() if form.write]})]
Names = Annotated[bool, Query(description="Name the labelers; by default they have pseudonyms.")]
ByCriterion = Annotated[str, Query(description="Rank by this criterion's ratings; by default, as labelers ranked.")]
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def signed_in(accounts: Accounts, bearer: HTTPAuthorizationCredentials | None) -> tuple[Account, str]:
    """Returns whose session a request is part of, and its token. Raises: HTTPException 401 without a session."""
    account = accounts.session(bearer.credentials) if bearer is not None else None
    if bearer is None or account is None:
        expected = "a session's token is expected: Authorization: Bearer …"
        raise HTTPException(401, expected, {"WWW-Authenticate": "Bearer"})
    return account, bearer.credentials


def signed_in_lead(accounts: Accounts, bearer: HTTPAuthorizationCredentials | None) -> tuple[Account, str]:
    """Like `signed_in`, for a lead. Raises: HTTPException 401 without a session, 403 for others."""
    account, token = signed_in(accounts, bearer)
    if account.role != "lead":
        raise HTTPException(403, "this is for leads")
    return account, token


class Api:
    """The routes of the API."""

    def __init__(self, service: LabelingService, accounts: Accounts, lead: LeadView, attempts: Attempts) -> None:
        self.service, self.accounts, self.lead, self.attempts = service, accounts, lead, attempts
        self.router = APIRouter(prefix="/api", responses=ERRORS)
        get, post = self.router.get, self.router.post
        post("/session", summary="Sign in", max_body_size=MAX_SIGN_IN_BYTES)(self.sign_in)
        post("/session/end", summary="Sign out", status_code=204)(self.sign_out)
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

    # ---- signing in and out ----

    def sign_in(self, body: Credentials, request: Request) -> Session:
        token = sign_in(self.accounts, self.attempts, request, body.name, body.key)
        account = self.accounts.session(token) if token else None
        if token is None or account is None:
            raise HTTPException(403, "name and key do not match")
        return Session(token=token, name=account.name, role=account.role)

    def sign_out(self, bearer: Bearer) -> None:
        _, token = signed_in(self.accounts, bearer)
        self.accounts.sign_out(token)

    # ---- for labelers ----

    def instructions(self, bearer: Bearer) -> dict[str, Any]:
        signed_in(self.accounts, bearer)
        config = self.service.config
        return {"version": config.version, "text": config.instructions, "flags": config.flags}

    def confirm_reading(self, bearer: Bearer) -> None:
        account, _ = signed_in(self.accounts, bearer)
        self.accounts.confirm_reading(account.name, self.service.config.version)

    def lease(self, bearer: Bearer) -> TaskBody | NoTask:
        account, token = signed_in(self.accounts, bearer)
        if account.role == "lead":
            raise HTTPException(403, "leads adjudicate; labelers lease")
        presented = self.service.next_task(account, token)
        return self._as_body(presented) if isinstance(presented, PresentedTask) else NoTask(waiting=presented)

    def answer(self, body: AnswerBody, bearer: Bearer) -> None:
        account, token = signed_in(self.accounts, bearer)
        form = body.form.task_form()
        shown = self.service.shown_again(account, token, form)
        config, responses = self.service.config, shown.lease.shown.responses
        if config.asks_ratings != bool(body.ratings):
            raise _invalid("ratings", f"{'one per response' if config.asks_ratings else 'none'} expected")
        unknown = {flag for flags in body.flags for flag in flags} - set(config.flags)
        if unknown:
            raise _invalid("flags", f"{sorted(unknown)[0]!r} is not a flag that labelers may give")
        if any(len(flags) != len(set(flags)) for flags in body.flags):
            raise _invalid("flags", "each flag at most once per response expected")
        flags = tuple(tuple(marked) for marked in body.flags)
        turns: tuple[int, ...] = ()
        if config.turn_criteria:
            turns = assistant_turns(shown.lease.shown.prompt)
        annotations = _annotations(body, config, turns)
        ranks = tuple(body.ranks) or ((1,) if len(responses) == 1 else ())
        answer = Answer(ranks, 0, tuple(body.ratings), flags, body.note, annotations)
        self.service.answer(account, token, form, answer, CLIENT)

    def skip(self, body: SkipBody, bearer: Bearer) -> None:
        account, token = signed_in(self.accounts, bearer)
        self.service.skip(account, token, body.form.task_form(), body.reason, CLIENT)

    def reveal(self, body: RevealBody, bearer: Bearer) -> None:
        account, token = signed_in(self.accounts, bearer)
        self.service.reveal(account, token, body.form.task_form())

    def undo(self, body: UndoBody, bearer: Bearer) -> None:
        account, _ = signed_in(self.accounts, bearer)
        self.service.undo(account, body.task, body.revision, CLIENT)

    def history(self, bearer: Bearer) -> list[dict[str, Any]]:
        account, _ = signed_in(self.accounts, bearer)
        rows = []
        for event, is_current in self.service.history(account):
            judgment = asdict(event.judgment)
            if account.role != "lead":  # an id may reveal what labelers must not know
                del judgment["task_id"]
            rows.append({**judgment, "task": event.handle, "is_current": is_current})
        return rows

    # ---- for leads ----

    def batches(self, bearer: Bearer) -> list[dict[str, Any]]:
        signed_in_lead(self.accounts, bearer)
        return [asdict(counts) for counts in self.lead.batches()]

    def add_tasks(self, body: NewTasks, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        tasks = [_task(task) for task in body.tasks]
        quotas = [task.num_labelers for task in body.tasks]
        self.service.store.add_tasks(tasks, batch=body.batch, num_labelers=quotas)
        self.accounts.log(account.name, "added", f"{len(tasks)} tasks to {body.batch}")

    def reopened(self, task_id: str, bearer: Bearer) -> TaskBody:
        account, token = signed_in_lead(self.accounts, bearer)
        return self._as_body(self.service.reopened(account, task_id, token))

    def void(self, body: VoidBody, bearer: Bearer) -> None:
        account, _ = signed_in_lead(self.accounts, bearer)
        self.service.void(account, body.task_id, body.labeler, body.revision, body.reason, CLIENT)

    def judgments(self, batch: str, bearer: Bearer, *, names: Names = False) -> list[dict[str, Any]]:
        account, _ = signed_in_lead(self.accounts, bearer)
        self._require_batch(batch)
        self.accounts.log(account.name, "exported", exported_what(batch, "judgments", with_names=names))
        tasks = {stored.task.task_id: stored.task for stored in self.service.store.tasks(batch)}
        return [
            {**asdict(judgment), "why_excluded": why_excluded(tasks[judgment.task_id])}
            for judgment in self.service.store.judgments(batch, with_names=names)
        ]

    def export(
        self,
        batch: str,
        bearer: Bearer,
        form: Annotated[ExportFormat, Query(alias="format")],
        criterion: ByCriterion = "",
        *,
        names: Names = False,
    ) -> ExportBody:
        account, _ = signed_in_lead(self.accounts, bearer)
        self._require_batch(batch)
        found = self.lead.export(batch, form, with_names=names, criterion=criterion)
        self.accounts.log(account.name, "exported", exported_what(batch, form, with_names=names))
        return ExportBody(rows=found.rows, left_out=found.report.counts())

    def quality(self, batch: str, bearer: Bearer) -> Mapping[str, Any]:
        signed_in_lead(self.accounts, bearer)
        self._require_batch(batch)
        return self.lead.report(batch).as_dict()

    def _require_batch(self, batch: str) -> None:
        if batch not in self.service.store.batches():
            raise HTTPException(404, f"batch {batch!r} is not in the store")

    def _as_body(self, presented: PresentedTask) -> TaskBody:
        shown, config = presented.lease.shown, self.service.config
        return TaskBody(
            form=Form(**asdict(presented.form)),
            warning=shown.warning,
            prompt=[message.turn for message in shown.prompt],
            responses=list(shown.responses),
            asks_ratings=config.asks_ratings,
            flags=list(config.flags),
            criteria=list(config.criteria),
            asks_edits=config.asks_edits,
            expires_at=presented.lease.expires_at,
        )


def _task(new: NewTask) -> Task:
    """Returns a new task. Raises: ValueError naming the task and its malformed message or misplaced `gold`."""
    where = f"task {new.task_id!r}"
    if new.gold is not None and len(new.responses) > 1:
        raise ValueError(f"{where}: gold is for a single response; gold_ranks was expected")
    refuse_unsound([[message.tool_calls, message.tools] for message in new.prompt])
    given = [message.model_dump(exclude_defaults=True) for message in new.prompt]
    return Task(
        new.task_id,
        tuple(Message.of(turn) for turn in tool_messages(where, given, "prompt")),
        tuple(new.responses),
        tuple(new.sources),
        new.objective,
        tuple(new.gold_ranks) if new.gold is None else (1,),
        new.repeat_of,
        {} if new.gold is None else {GOLD: new.gold.model_dump(exclude_defaults=True)},
        new.warning,
    )


def _annotations(body: AnswerBody, config: LabelingConfig, turns: Sequence[int]) -> Annotations:
    """Returns an answer's annotations. `turns` are the places of the assistant's turns in the task's prompt.

    Raises: RequestValidationError for what the configuration does not ask for; ValueError for another number of turns.
    """
    asked = {criterion.name: criterion for criterion in config.criteria}
    if body.criteria.keys() != asked.keys():
        raise _invalid("criteria", f"ratings by {', '.join(asked) or 'no criteria'} expected")
    for name, ratings in body.criteria.items():
        if not all(rating in asked[name].choices for rating in ratings):
            raise _invalid("criteria", f"{name}: only {', '.join(map(str, asked[name].choices))} expected")
    rated = _turn_ratings(body.turns, config, turns)
    if body.edits and not config.asks_edits:
        raise _invalid("edits", "none expected")
    return Annotations(
        tuple(CriterionRatings(name, tuple(ratings)) for name, ratings in body.criteria.items()),
        tuple(body.edits) if any(body.edits) else (),
        rated,
    )


def _turn_ratings(
    given: Mapping[str, Sequence[int]], config: LabelingConfig, turns: Sequence[int]
) -> tuple[TurnRating, ...]:
    asked = {criterion.name: criterion for criterion in config.turn_criteria}
    if not given.keys() <= asked.keys():
        raise _invalid("turns", f"ratings by {', '.join(asked) or 'no criteria'} expected")
    for name, ratings in given.items():
        if not all(rating in asked[name].choices for rating in ratings):
            raise _invalid("turns", f"{name}: only {', '.join(map(str, asked[name].choices))} expected")
        if len(ratings) != len(turns):
            raise ValueError(f"turns: {name} has {len(ratings)} ratings; {len(turns)} were expected")
    return tuple(
        TurnRating(turn, name, rating)
        for name, ratings in given.items()
        for turn, rating in zip(turns, ratings, strict=True)
    )


def _invalid(field: str, expected: str) -> RequestValidationError:
    """Returns an error about a field, in the format of all other 422s."""
    return RequestValidationError([{"type": "value_error", "loc": ("body", field), "msg": f"{field}: {expected}"}])
