"""Where rewards come from: a reward model, a Python function or an HTTP endpoint. A failed score comes with a reason.

`Reward` lists the kinds, which are the tables that `[ppo.reward]` may be.
"""

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, SupportsFloat

from pydantic import ConfigDict, Field, FiniteFloat, Tag

from files.fields import shown
from files.importing import explain, file_of, load_function
from lm.progress import in_users_code, note_progress
from lm.tokenizer import Messages
from training.config import Config, by_kind
from training.notices import printing_aloud

# Gets prompts (each a list of messages) and responses (texts); returns a number per response, None for a failure.
ScoringFunction = Callable[[list[list[dict[str, str]]], list[str]], Sequence[float | None]]

SHOWN_CHARACTERS = 200  # of a malformed response, in an error message


@dataclass(frozen=True)
class Scored:
    """The score of one response, higher is better; NaN if scoring failed, for the reason in `failure`."""

    score: float
    failure: str = ""


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
    objective_weights: ClassVar[Mapping[str, float]] = {}

    @abstractmethod
    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        """Score the responses to as many conversations. Never raises: a failed score has its reason."""

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

    kind: Literal["function"] = Field(default="function", description="The kind of this table.")
    function: str = Field(
        pattern=r"^.+$",
        description='"MODULE:FUNCTION" or "FILE.py:FUNCTION"; the current folder is searched too.',
    )

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        """Score responses. If a call fails, each response is scored alone, so a bad one does not affect the others."""
        note_progress()
        prompts = [[dict(message) for message in messages] for messages in conversations]
        function = self.load()
        try:
            with printing_aloud(self.function), in_users_code(self._called_with(conversations)):
                returned = function(prompts, list(responses))
                values = list(returned) if isinstance(returned, Iterable) else returned
        except Exception as error:  # user code
            if len(responses) > 1:
                alone = zip(conversations, responses, strict=True)
                return [scored for messages, response in alone for scored in self.score([messages], [response])]
            return [Scored(math.nan, f"{self.function} raised {explain(error, __file__)}")]
        place = _place(function)
        return [
            replace(scored, failure=f"{scored.failure}{place}") if scored.failure else scored
            for scored in checked(values, len(responses), self.function)
        ]

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

    A broken connection, silence for `timeout_seconds` and "try later" statuses are retried with doubling waits. If the
    last attempt fails, or the endpoint returns another status of 400 or above or another format, all responses of the
    request count as failed.
    """

    model_config = ConfigDict(title="Reward url")
    source_key: ClassVar[str] = "url"
    noun: ClassVar[str] = "endpoint"

    kind: Literal["url"] = Field(default="url", description="The kind of this table.")
    url: str = Field(pattern=r"^https?://.+$", description="HTTP endpoint that scores responses.")
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="How long the endpoint may be silent before a request fails, in seconds."
    )
    retries: int = Field(default=3, ge=0, description="How many times a failed request is repeated.")
    parallel: int = Field(default=4, ge=1, description="How many requests each rank sends at once.")

    @property
    def num_parallel(self) -> int:
        return self.parallel

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        import httpx  # only here: a reward model needs no HTTP client, and a bare GPU machine has none

        from files.retries import post_json

        prompts = [[dict(message) for message in messages] for messages in conversations]
        try:
            response = post_json(
                self.url,
                {"prompts": prompts, "responses": list(responses)},
                headers={},
                timeout_seconds=self.timeout_seconds,
                num_retries=self.retries,
                on_attempt=note_progress,
            )
        except httpx.RequestError as error:  # refused, reset, cut short, timed out
            failure = f"{self.url}: {type(error).__name__}: {error}"
            return [Scored(math.nan, failure)] * len(responses)
        if not response.is_success:
            failure = f"{self.url} answered with status {response.status_code} ({response.reason_phrase})"
            return [Scored(math.nan, failure)] * len(responses)
        return self._scores(response.content, len(responses))

    def _scores(self, text: bytes, num_responses: int) -> list[Scored]:
        try:
            values = json.loads(text)["scores"]
        except (ValueError, KeyError, TypeError):
            shown = text[:SHOWN_CHARACTERS].decode(errors="replace")
            failure = f"{self.url} answered {shown!r}; a JSON object with 'scores' was expected"
            return [Scored(math.nan, failure)] * num_responses
        return checked(values, num_responses, self.url)


class NoReward(ExternalReward):
    """No reward: every score is 0. Only for a policy that learns from teachers."""

    model_config = ConfigDict(title="Reward none")
    source_key: ClassVar[str] = "kind"
    noun: ClassVar[str] = "reward"

    kind: Literal["none"] = Field(default="none", description="The kind of this table.")

    def score(self, _conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        return [Scored(0.0)] * len(responses)


Reward = Annotated[
    Annotated[ModelReward, Tag("model")]
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[NoReward, Tag("none")],
    by_kind("model", "function", "url", "none"),
]
REWARD_KEYS = tuple(f"reward.{kind.source_key}" for kind in (ModelReward, RewardFunction, RemoteReward))


def score_in_parts(
    reward: ExternalReward, conversations: Sequence[Messages], responses: Sequence[str], size: int
) -> list[Scored]:
    """Score any number of responses, at most `size` per call. An endpoint gets up to `num_parallel` calls at once."""
    parts = [slice(start, start + size) for start in range(0, len(responses), size)]

    def score(part: slice) -> list[Scored]:
        return reward.score(conversations[part], responses[part])

    if not reward.num_parallel:
        return [scored for part in parts for scored in score(part)]
    with ThreadPoolExecutor(reward.num_parallel, thread_name_prefix="reward") as pool:
        return [scored for scores in pool.map(score, parts) for scored in scores]


def checked(values: Any, num_responses: int, source: str) -> list[Scored]:
    """Returns one score or failure per response. All fail unless `source` returned a list of the right length."""
    if not isinstance(values, list) or len(values) != num_responses:
        returned = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        return [Scored(math.nan, f"{source} returned {returned} for {num_responses} responses")] * num_responses
    return [_checked(value, source) for value in values]


def _checked(value: Any, source: str) -> Scored:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except Exception:  # a tensor of several numbers, an integer beyond all floats
        number = math.nan
    if not math.isfinite(number):
        return Scored(math.nan, f"{source} returned {shown(value)}; a finite number was expected")
    return Scored(number)
