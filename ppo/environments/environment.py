"""What an environment is: the other side of a conversation that the policy learns to have.

An `Environment` is a table of the job file. It opens one `Episode` per sampled response. Episodes exchange messages,
never tokens: what the policy wrote stays as it was sampled, and the tokens of each reply are appended to it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from training.config import Config
from training.data import NO_FIELDS, RowFields


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
