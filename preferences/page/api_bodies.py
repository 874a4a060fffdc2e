"""What the API's requests and responses contain."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from preferences.page.forms import MAX_NOTE_CHARACTERS, MAX_RATING, MIN_RATING
from preferences.page.security import unstorable_in
from preferences.page.service import TaskForm
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL

MAX_INTEGER = 2**53  # every JSON reader handles integers up to this
MAX_TASKS_AT_ONCE = 1_000
MAX_FLAGS = 1_000  # flags of one response, checked before they are compared with those that labelers may give

Number = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Rank = Annotated[int, Field(ge=1, le=MAX_RESPONSES)]
Rating = Annotated[float, Field(ge=MIN_RATING, le=MAX_RATING)]
# `Body` refuses what cannot be stored; the pattern documents it in the OpenAPI schema.
Text = Annotated[str, Field(pattern="^[^\\x00]*$")]
Name = Annotated[str, Field(min_length=1, max_length=512, pattern="^[^\\x00]*$")]
Note = Annotated[str, Field(max_length=MAX_NOTE_CHARACTERS, pattern="^[^\\x00]*$")]


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
    """Why there is no task: "instructions" to read, "nothing open", or "screening" not passed."""

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
    reason: Annotated[str, Field(min_length=1, max_length=MAX_NOTE_CHARACTERS, pattern="^[^\\x00]*$")]


class RevealBody(Body):
    form: Form


class UndoBody(Body):
    """What to take back. `task` is the handle from `/history`; `revision` is one more than that of the event."""

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
    warning: Text = ""
    num_labelers: Annotated[int, Field(ge=1, le=1_000)] = 1


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


# Described by its schema: FastAPI would build a validator per route and status from a model, which takes longer than
# everything else in making the application.
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
