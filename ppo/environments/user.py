"""A user simulated by another language model, behind an OpenAI-compatible endpoint."""

import threading
from collections.abc import Mapping
from functools import cache, cached_property
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from ppo.environments.environment import Episode, Reply, ServedEnvironment
from reward.endpoint import Endpoint
from training.data import RowFields

MAX_REPLY_TOKENS = 128
STOP = "###STOP###"  # what the user writes to end the conversation
FIELD = "user"  # of a prompt's row
# In the simulator's view, the policy is the other side.
OTHER_SIDE = {"user": "assistant", "assistant": "user"}


class SimulatedUser(ServedEnvironment):
    """A user who is played by another model. It reads the conversation so far and writes what the user says next, until
    it writes `STOP`. What the user wants may differ from prompt to prompt: the field `user` of a prompt's row is added
    to the instructions.
    """

    model_config = ConfigDict(title="Environment user")
    scores: ClassVar[bool] = False
    begins: ClassVar[bool] = False

    kind: Literal["user"] = Field(default="user", description="The kind of this table.")
    url: str = Field(
        pattern=r"^https?://.+$",
        description="Base of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1; HEED_API_KEY is its key.",
    )
    model: str = Field(pattern=r"^.+$", description="Name of the model at the endpoint.")
    instructions: str = Field(
        default="You play a user who talks to an assistant. Write only what the user says next, in a sentence or two.",
        description="What the model is told to be.",
    )
    parallel: int = Field(default=32, ge=1, description="Requests that a rank sends at once.")

    @property
    def row_fields(self) -> RowFields:
        return RowFields(_wants_of, FIELD)

    def open(self, conversation: Messages, row: Row, seed: int) -> Episode:
        wants = f"\n\n{row[FIELD]}" if row.get(FIELD) else ""
        told = f"{self.instructions}{wants}\n\nWrite {STOP} when the conversation is over."
        return UserEpisode(self, [{"role": "system", "content": told}, *_swapped(conversation)], seed)

    @cached_property
    def _endpoint(self) -> Endpoint:
        limits = {"timeout_seconds": self.deadline_seconds, "max_wait_seconds": self.max_wait_seconds}
        return Endpoint.of(f"{self.url}#{self.model}", "user", **limits)

    def said(self, messages: Messages, seed: int) -> str:
        """Returns what the user says next. Raises: RuntimeError if the endpoint does not answer with a text."""
        asked = {"messages": messages, "seed": seed % 2**31, "max_tokens": MAX_REPLY_TOKENS}
        with _places(self.url, self.parallel):
            answer = self._endpoint.ask(asked, threading.Event())
        if answer.failure:
            raise RuntimeError(answer.failure)
        return answer.text


class UserEpisode(Episode):
    """One conversation with a simulated user."""

    def __init__(self, user: SimulatedUser, messages: Messages, seed: int) -> None:
        self.user, self.messages, self.seed = user, list(messages), seed

    async def reply(self, message: AssistantMessage) -> Reply:
        self.messages.append({"role": "user", "content": message.text})
        text = self.user.said(self.messages, self.seed + len(self.messages))
        self.messages.append({"role": "assistant", "content": text})
        if STOP in text:
            return Reply(is_over=True)
        return Reply([{"role": "user", "content": text}])


def _swapped(conversation: Messages) -> list[Mapping[str, str]]:
    """Returns the prompt as the simulator sees it, without the instructions that only the policy may read."""
    turns = [message for message in conversation if message["role"] in OTHER_SIDE]
    return [{"role": OTHER_SIDE[message["role"]], "content": message["content"]} for message in turns]


def _wants_of(where: str, row: Row) -> Row:
    value = row.get(FIELD, "")
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: field {FIELD!r} is {type(value).__name__}; a text that says what the user wants was expected"
        )
    return {FIELD: value} if value else {}


@cache
def _places(_url: str, number: int) -> threading.Semaphore:
    """Returns the semaphore that limits this process's requests to an endpoint."""
    return threading.Semaphore(number)
