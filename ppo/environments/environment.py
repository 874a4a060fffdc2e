"""What an environment is: the other side of a conversation that the policy learns to have.

An `Environment` is a table of the job file. It opens one `Episode` per sampled response. Episodes exchange messages,
never tokens: what the policy wrote stays as it was sampled, and the tokens of each reply are appended to it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from reward.external import MAX_WAIT, MAX_WAIT_SECONDS
from training.config import Config
from training.data import NO_FIELDS, RowFields
from training.notices import waiting_aloud

MAX_LOSSES = 3  # of a session by the same call, although the server is up

Value = TypeVar("Value")
Call = Callable[["Episode"], Awaitable[Value]]


class DeadlineError(Exception):
    """A call of an episode took longer than the environment's `deadline_seconds`."""


class SlowCallError(DeadlineError, RuntimeError):
    """A call took longer, although its server answers others."""


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the policy."""

    messages: Messages = ()  # to append before the policy's next turn; ignored if the episode is over
    reward: float = 0.0  # of the turn that it answers, higher is better
    is_over: bool = False


class Episode(ABC):
    """One conversation. Its methods are called one after another, in a thread and an event loop of its own, so they may
    block. Each call has a deadline. An exception makes this response missing, and no other.
    """

    async def begin(self) -> Messages:
        """Returns messages to append to the prompt before the policy's first turn."""
        return ()

    @abstractmethod
    async def reply(self, message: AssistantMessage) -> Reply:
        """Answer the policy's turn."""

    async def score(self) -> float:
        """Returns the score of the whole conversation, which is added to the rewards of its turns; NaN if there is
        none, so that the response is missing. Called once, after the last turn.
        """
        return 0.0

    async def close(self) -> None:  # noqa: B027  # most episodes hold nothing
        """Release what the episode holds. Always called, even after failures and missed deadlines."""


class Environment(Config, ABC):
    """The settings that all kinds of environments share."""

    scores: ClassVar[bool] = True  # whether its episodes give rewards or scores, or only converse
    begins: ClassVar[bool] = True  # whether its episodes may begin with messages of their own

    max_turns: int = Field(default=8, ge=1, description="Turns of the policy after which a conversation ends.")
    deadline_seconds: float = Field(
        default=30.0, gt=0, description="Time limit of each reply; a conversation that exceeds it has no score."
    )

    @property
    def short_name(self) -> str:
        """The environment as reports call it."""
        return str(getattr(self, "kind", type(self).__name__))

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the functions that the policy may call. The chat template writes them into prompts."""
        return ()

    @property
    def row_fields(self) -> RowFields:
        """The fields of their rows that prompts must keep."""
        return NO_FIELDS

    def check(self, rows: Sequence[Row]) -> None:
        """Check before a run that episodes of these rows can be opened. Raises: ValueError if not."""

    def load(self) -> None:
        """Load what episodes share. Each process that samples calls this once, before it opens episodes in many threads
        at once.
        """

    @abstractmethod
    def open(self, conversation: Messages, row: Row, seed: int) -> Episode:
        """Returns a new episode for a prompt. For the same arguments and the same turns of the policy it should give
        the same replies; otherwise a resumed run samples different responses.
        """


class ServedEnvironment(Environment, ABC):
    """An environment whose episodes wait for a server that is away, and limit their calls themselves."""

    max_wait_seconds: float = Field(default=MAX_WAIT_SECONDS, ge=0, description=MAX_WAIT)


class ServedEpisode(Episode):
    """An episode that outlasts its sessions, which `connect` gives. After an outage a new one gets the turns so far
    again, and the conversation continues if the replies are those that the policy has read.

    An outage is each error of a session but RuntimeError, which says that the server answered. The methods raise
    SlowCallError if the server opens sessions but does not answer a call, RuntimeError if the conversation cannot be
    continued, and ServerError after an outage of more than `max_wait_seconds`.
    """

    def __init__(self, environment: ServedEnvironment, server: str, connect: Callable[[], Episode]) -> None:
        self._environment, self._server, self._connect = environment, server, connect
        self._session: Episode | None = None
        self._done = list[tuple[Call[Any], Any]]()  # calls and their results

    async def begin(self) -> Messages:
        return await self._lasting(lambda session: session.begin())

    async def reply(self, message: AssistantMessage) -> Reply:
        return await self._lasting(lambda session: session.reply(message))

    async def score(self) -> float:
        return await self._lasting(lambda session: session.score())

    async def close(self) -> None:
        if self._session is not None:
            with suppress(Exception):  # its server may be away
                await within(self._session.close, self._environment.deadline_seconds)
        self._session = None

    async def _lasting(self, call: Call[Value]) -> Value:
        """Returns what a call gives, in a new session after each outage."""
        from files.retries import until_up  # only here: a bare GPU machine has no HTTP client

        name, seconds, num_lost, is_slow = self._server, self._environment.deadline_seconds, 0, False

        async def attempt() -> Value:
            nonlocal num_lost, is_slow
            is_open = self._session is not None or not self._done
            self._session = session = self._session or self._connect()
            try:
                for done, result in () if is_open else self._done:
                    found = await within(partial(done, session), seconds)
                    if is_slow:
                        raise SlowCallError(f"{name}: no answer within {seconds:g} seconds")
                    if found != result:
                        raise RuntimeError(f"{name} lost the conversation; asked again, it answers otherwise")
                is_open = True
                result = await within(partial(call, session), seconds)
            except Exception as error:
                await self.close()
                num_lost += is_open
                is_slow = is_open and bool(self._done) and isinstance(error, DeadlineError)
                if self._done and num_lost == MAX_LOSSES:
                    raise RuntimeError(f"{name}: {num_lost} sessions were lost at the same turn") from error
                raise
            self._done.append((call, result))
            return result

        wait = self._environment.max_wait_seconds
        return await until_up(name, attempt, max_wait_seconds=wait, waiting=waiting_aloud)


async def within(call: Callable[[], Awaitable[Value]], seconds: float | None) -> Value:
    """Returns what a call gives. Raises: DeadlineError if that takes longer than `seconds`; None means no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call()
    except TimeoutError:
        if limit.expired():
            raise DeadlineError(f"no answer within {seconds:g} seconds") from None
        raise


def run_within(call: Callable[[], Awaitable[Value]], seconds: float) -> Value:
    """Like `within`, for callers that may be in an event loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(within(call, seconds))).result()
