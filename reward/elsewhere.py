"""Rewards from elsewhere: a Python function, or an HTTP endpoint. What fails has no score and says why."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat

import httpx

from endpoints.retries import post_json
from files.python_names import explain, file_of, load_function
from lm.progress import note_progress
from lm.tokenizer import Messages
from reading.fields import shown

# Called with prompts (each a list of messages) and responses (texts); gives a number a response, None where it fails.
RewardFunction = Callable[[list[list[dict[str, str]]], list[str]], Sequence[float | None]]

SHOWN_CHARACTERS = 200  # of an answer that makes no sense


@dataclass(frozen=True)
class Scored:
    """One response's score, higher is better; NaN where it has none, and then `failure` says why."""

    score: float
    failure: str = ""


@dataclass(frozen=True)
class FunctionReward:
    """A function that Python finds as `MODULE:FUNCTION` or `FILE.py:FUNCTION`, the current folder included.

    It has to score each response by itself and alike at every call: how many it is given at once depends on the number
    of workers, and a run that goes on after a kill asks again.
    """

    name: str

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        """Where a call fails as a whole each response is tried alone, so that one bad response costs no other."""
        note_progress()
        prompts = [[dict(message) for message in messages] for messages in conversations]
        function = self.function
        try:
            returned = function(prompts, list(responses))
            values = list(returned) if isinstance(returned, Iterable) else returned
        except Exception as error:  # somebody else's code
            if len(responses) > 1:
                alone = zip(conversations, responses, strict=True)
                return [scored for messages, response in alone for scored in self.score([messages], [response])]
            return [Scored(math.nan, f"{self.name} raised {explain(error, __file__)}")]
        place = _place(function)
        return [
            replace(scored, failure=f"{scored.failure}{place}") if scored.failure else scored
            for scored in checked(values, len(responses), self.name)
        ]

    @property
    def function(self) -> RewardFunction:
        """Errors: ValueError naming what is not there."""
        function: RewardFunction = load_function(self.name, "reward function")
        return function

    @property
    def file(self) -> Path:
        """Where the function's module is written. Errors: as for `function`."""
        return file_of(self.function)


def _place(function: RewardFunction) -> str:
    """Where a function is written, in the words of a traceback; "" where Python does not know."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f'\n  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}' if code else ""


@dataclass(frozen=True)
class HTTPReward:
    """An endpoint that is sent {"prompts": [[{"role", "content"}, ...], ...], "responses": [...]} and answers
    {"scores": [...]}, a number a response, null where it has none.

    A connection that breaks, silence for `timeout_seconds` and "try later" are tried `num_retries` times more, each
    after twice the last wait. What still fails, another status from 400 on, or an answer of another form is a failure
    of all responses of the request.
    """

    url: str
    timeout_seconds: float
    num_retries: int

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[Scored]:
        prompts = [[dict(message) for message in messages] for messages in conversations]
        try:
            response = post_json(
                self.url,
                {"prompts": prompts, "responses": list(responses)},
                headers={},
                timeout_seconds=self.timeout_seconds,
                num_retries=self.num_retries,
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


Elsewhere = FunctionReward | HTTPReward


def checked(values: Any, num_responses: int, source: str) -> list[Scored]:
    """One score or failure a response of what `source` gave; all fail where it is no list of the right length."""
    if not isinstance(values, list) or len(values) != num_responses:
        found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        return [Scored(math.nan, f"{source} gave {found} for {num_responses} responses")] * num_responses
    return [_checked(value, source) for value in values]


def _checked(value: Any, source: str) -> Scored:
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except Exception:  # a tensor of several numbers, an integer beyond all floats
        number = math.nan
    if not math.isfinite(number):
        return Scored(math.nan, f"{source} gave {shown(value)}; a finite number was expected")
    return Scored(number)
