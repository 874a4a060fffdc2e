"""Where rewards come from: a reward model, a Python function or an HTTP endpoint. A failed score comes with a reason.

`reward.sources` lists all kinds, including those that combine these.
"""

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, SupportsFloat

from pydantic import ConfigDict, Field, FiniteFloat

from files.fields import kind_of, shown
from files.importing import explain, file_of, load_function
from files.rows import Row
from files.urls import without_credentials
from lm.progress import in_users_code, note_progress
from lm.tokenizer import Messages
from training.config import Config
from training.data import NO_FIELDS, RowFields
from training.notices import printing_aloud, waiting_aloud

# Gets prompts (each a list of messages), responses (texts) and, if it has a parameter `rows`, the prompts' rows of
# data; returns a number per response, None for a failure.
ScoringFunction = Callable[..., Sequence[float | None]]

SHOWN_CHARACTERS = 200  # of a prompt, in an error message
MAX_WAIT_SECONDS = 600.0
MAX_WAIT = "How long a request is repeated while its server gives no proper answer, in seconds."


@dataclass(frozen=True)
class Scored:
    """The score of one response, higher is better; NaN if scoring failed, for the reason in `failure`. A reason that is
    worth counting has a short `failure_kind`, also if it makes the score 0.
    """

    score: float
    failure: str = ""
    failure_kind: str = ""


class ModelReward(Config):
    """A reward model: the one that the reward stage trains, or another."""

    model_config = ConfigDict(title="Reward model")
    source_key: ClassVar[str] = "model"  # the key that names where scores come from

    kind: Literal["model"] = Field(default="model", description="The kind of this table.")
    model: str = Field(
        default="", description="Model directory or hub id of a reward model; empty = the reward stage's model."
    )
    objective_weights: dict[str, FiniteFloat] = Field(
        default_factory=dict,
        description="Weight of each objective's score in the reward; only for a model with several objectives.",
    )


class ExternalReward(Config, ABC):
    """A reward that is no model of Heed's: it scores texts."""

    source_key: ClassVar[str]
    noun: ClassVar[str]  # what a report calls it, before its source
    takes_any_number: ClassVar[bool] = (
        False  # whether all responses are scored in one call, which runs them in parallel
    )

    @abstractmethod
    def score(
        self, conversations: Sequence[Messages], responses: Sequence[str], rows: Sequence[Row] = ()
    ) -> list[Scored]:
        """Score the responses to as many conversations. Never raises: a failed score has its reason.

        `rows` are what `fields_of` returned for the prompts' rows of data; it is empty if `reads_rows` is False.
        """

    @property
    def row_fields(self) -> RowFields:
        """The fields of their rows that prompts must keep to be scored."""
        return RowFields(self.fields_of, self.model_dump_json()) if self.reads_rows else NO_FIELDS

    @property
    def reads_rows(self) -> bool:
        """Whether scoring needs the rows that the prompts come from. Raises: ValueError as `RewardFunction.load`."""
        return False

    def fields_of(self, where: str, row: Row) -> Row:  # noqa: ARG002  # for the kinds that read rows
        """Returns the fields of a prompt's row that scoring needs; only called if `reads_rows`.

        Raises: ValueError, starting with `where` and naming the field, for a row that cannot be scored.
        """
        return {}

    def check(self, rows: Iterable[Row]) -> None:
        """Check before a run that this machine can score responses to the prompts of these rows. Raises: ValueError."""

    @property
    def parts(self) -> Mapping[str, "ExternalReward"]:
        """The sources that score one by one, by the name of their objective; itself, under "", if it is only one."""
        return {"": self}

    def parts_for(self, row: Row) -> Sequence[str]:  # noqa: ARG002  # a sum lets each row choose
        """Returns the names of the parts that score responses to this row's prompt."""
        return list(self.parts)

    def columns(
        self, conversations: Sequence[Messages], responses: Sequence[str], size: int, rows: Sequence[Row] = ()
    ) -> list[list[Scored]]:
        """Returns the scores by objective, in the order of `objective_weights`, from calls with `size` responses."""
        return [score_in_parts(part, conversations, responses, size, rows) for part in self.parts.values()]

    @property
    def leaves_parts_out(self) -> bool:
        """Whether a missing score of an objective with weight 0 may mean that it was left out, and did not fail."""
        return False

    @property
    def waits(self) -> bool:
        """Whether scoring only waits for a server, so that a rank can compute meanwhile."""
        return False

    def prepared(self, folder: Path) -> Self:  # noqa: ARG002  # for the kinds that need it
        """Returns this reward ready for the ranks: with its cache in a stage's folder, and its model in one here."""
        return self

    def close(self) -> None:
        """Release what scoring has loaded."""

    @property
    def source(self) -> str:
        """What the job names: a function, or a URL."""
        return str(getattr(self, self.source_key))

    @property
    def short_name(self) -> str:
        """The source as reports call it."""
        return self.source

    @property
    def num_parallel(self) -> int:
        """How many calls of `score` a rank makes at once, in threads; 0 = one after another in its main thread, to
        which a user's code may be bound.
        """
        return 0


class RewardFunction(ExternalReward):
    """A Python function that scores responses.

    A response's score must depend neither on the other responses in a call nor on which call it is: batch sizes depend
    on the number of workers, and a resumed run scores the same responses again.
    """

    model_config = ConfigDict(title="Reward function")
    source_key: ClassVar[str] = "function"
    noun: ClassVar[str] = "function"
    objective_weights: ClassVar[Mapping[str, float]] = {}

    kind: Literal["function"] = Field(default="function", description="The kind of this table.")
    function: str = Field(
        pattern=r"^.+$", description='"MODULE:FUNCTION" or "FILE.py:FUNCTION"; the current folder is searched too.'
    )

    def score(
        self, conversations: Sequence[Messages], responses: Sequence[str], rows: Sequence[Row] = ()
    ) -> list[Scored]:
        """Score responses. If a call fails, each response is scored alone, so a bad one does not affect the others."""
        note_progress()
        prompts = [[dict(message) for message in messages] for messages in conversations]
        function = self.load()
        try:
            with printing_aloud(self.function), in_users_code(self._called_with(conversations)):
                named = {"rows": [dict(row) for row in rows]} if self.reads_rows else {}
                returned = function(prompts, list(responses), **named)
                values = list(returned) if isinstance(returned, Iterable) else returned
        except Exception as error:  # user code
            if len(responses) > 1:
                alone = [slice(place, place + 1) for place in range(len(responses))]
                return [scored for one in alone for scored in self.score(conversations[one], responses[one], rows[one])]
            return [Scored(math.nan, f"{self.function} raised {explain(error, __file__)}")]
        place = _place(function)
        return [
            replace(scored, failure=f"{scored.failure}{place}") if scored.failure else scored
            for scored in checked(values, responses, self.function)
        ]

    @property
    def reads_rows(self) -> bool:
        """Whether the function has a parameter `rows`."""
        function = self.load()
        try:
            return "rows" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # a callable whose parameters Python does not know
            return False

    def fields_of(self, where: str, row: Row) -> Row:
        """Returns the whole row, as JSON can hold it."""
        for name, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{where}: field {name!r} is {kind_of(value)}; {self.function} has a parameter `rows`, so a value"
                    " that JSON can hold was expected"
                ) from None
        return dict(row)

    def _called_with(self, conversations: Sequence[Messages]) -> str:
        """Name the function and the rows of a call, for whoever looks for the row on which it hangs."""
        first = " ".join(str(conversations[0][-1]["content"]).split()) if conversations else ""
        shown = first if len(first) <= SHOWN_CHARACTERS else f"{first[:SHOWN_CHARACTERS]}..."
        number = f"{len(conversations)} response{'s' if len(conversations) != 1 else ''}"
        return f"{self.function}, called with {number}, the first to the prompt {shown!r},"

    @property
    def short_name(self) -> str:
        """ "checks.py:reward" for a function in a file, whose folder says nothing to a reader."""
        return Path(self.function).name if ".py:" in self.function else self.function

    def load(self) -> ScoringFunction:
        """Returns the function itself. Raises: ValueError naming what does not exist."""
        function: ScoringFunction = load_function(self.function, "reward function")
        return function

    @property
    def file(self) -> Path:
        """The source file of the function's module. Raises: as for `load`."""
        return file_of(self.load())


def _place(function: ScoringFunction) -> str:
    """Returns where a function is defined, in the format of a traceback; "" if Python does not know."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f'\n  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code else ""


class RemoteReward(ExternalReward):
    """An HTTP endpoint that receives {"prompts": [[{"role", "content"}, ...], ...], "responses": [...]} and returns
    {"scores": [...]}, one number per response, null for a failure.

    A broken connection, no whole answer within `timeout_seconds`, another format and "try later" statuses are retried
    with doubling waits. If there is no proper answer for `max_wait_seconds`, or the endpoint returns another status of
    400 or above, all responses of the request count as failed.
    """

    model_config = ConfigDict(title="Reward url")
    source_key: ClassVar[str] = "url"
    noun: ClassVar[str] = "endpoint"
    objective_weights: ClassVar[Mapping[str, float]] = {}

    kind: Literal["url"] = Field(default="url", description="The kind of this table.")
    url: str = Field(pattern=r"^https?://.+$", description="HTTP endpoint that scores responses.")
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="Time limit of each whole answer, in seconds; it is then asked again."
    )
    max_wait_seconds: float = Field(default=MAX_WAIT_SECONDS, ge=0, description=MAX_WAIT)
    parallel: int = Field(default=4, ge=1, description="How many requests each rank sends at once.")

    @property
    def num_parallel(self) -> int:
        return self.parallel

    @property
    def waits(self) -> bool:
        return True

    def score(
        self,
        conversations: Sequence[Messages],
        responses: Sequence[str],
        rows: Sequence[Row] = (),  # noqa: ARG002  # an endpoint gets texts only
    ) -> list[Scored]:
        # Only here: a reward model needs no HTTP client, and a bare GPU machine has none.
        from files.retries import ServerError, post_json

        prompts = [[dict(message) for message in messages] for messages in conversations]
        note_progress()
        try:
            values = post_json(
                self.url,
                {"prompts": prompts, "responses": list(responses)},
                partial(_scores, number=len(responses)),
                timeout_seconds=self.timeout_seconds,
                max_wait_seconds=self.max_wait_seconds,
                waiting=waiting_aloud,
            )
        except ServerError as error:
            return [Scored(math.nan, str(error))] * len(responses)
        note_progress()
        return checked(values, responses, without_credentials(self.url))


def _scores(content: bytes, number: int) -> list[Any]:
    """Returns the scores in an endpoint's answer. Raises: ValueError for one of another format. Infinity is not JSON;
    nor is NaN, but servers in Python write it for null.
    """
    try:
        values = json.loads(content, parse_constant={"NaN": None}.__getitem__)["scores"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("a JSON object with 'scores' was expected") from None
    if not isinstance(values, list) or len(values) != number:
        raise ValueError(f"'scores' with {number} numbers was expected")
    return values


class NoReward(ExternalReward):
    """No reward: every score is 0. Only for a policy that learns from teachers."""

    model_config = ConfigDict(title="Reward none")
    source_key: ClassVar[str] = "kind"
    noun: ClassVar[str] = "reward"

    objective_weights: ClassVar[Mapping[str, float]] = {}

    kind: Literal["none"] = Field(default="none", description="The kind of this table.")

    def score(
        self, _conversations: Sequence[Messages], responses: Sequence[str], _rows: Sequence[Row] = ()
    ) -> list[Scored]:
        return [Scored(0.0)] * len(responses)


def score_in_parts(
    reward: ExternalReward,
    conversations: Sequence[Messages],
    responses: Sequence[str],
    size: int,
    rows: Sequence[Row] = (),
) -> list[Scored]:
    """Score any number of responses, at most `size` per call unless the reward takes any number. An endpoint gets up to
    `num_parallel` calls at once.
    """
    size = max(size, len(responses)) if reward.takes_any_number else size
    parts = [slice(start, start + size) for start in range(0, len(responses), size)]

    def score(part: slice) -> list[Scored]:
        return reward.score(conversations[part], responses[part], rows[part])

    if not reward.num_parallel:
        return [scored for part in parts for scored in score(part)]
    with ThreadPoolExecutor(reward.num_parallel, thread_name_prefix="reward") as pool:
        return [scored for scores in pool.map(score, parts) for scored in scores]


def checked(values: Any, responses: Sequence[str], source: str) -> list[Scored]:
    """Returns one score or failure per response. All fail unless `source` returned a list of the right length."""
    if not isinstance(values, list) or len(values) != len(responses):
        returned = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        return [Scored(math.nan, f"{source} returned {returned} for {len(responses)} responses")] * len(responses)
    return [_checked(value, source) for value in values]


def _checked(value: Any, source: str) -> Scored:
    number = _number(value)
    if not math.isfinite(number):
        return Scored(math.nan, f"{source} returned {shown(value)}; a finite number was expected")
    return Scored(number)


def _number(value: Any) -> float:
    """Returns a value as a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except Exception:  # a tensor of several numbers, an integer beyond all floats
        return math.nan
