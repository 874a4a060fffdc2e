"""What the API's requests and responses contain, and what OpenAPI says about them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from preferences.annotations import MAX_EDIT_CHARACTERS, MAX_TURN_RATINGS
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.page.forms import MAX_NOTE_CHARACTERS, MAX_RATING, MIN_RATING
from preferences.page.security import unstorable_in
from preferences.page.service import TaskForm
from preferences.records import MAX_RESPONSES, OVERALL

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
