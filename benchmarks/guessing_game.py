"""An environment of one's own: a game of two turns, small enough to enumerate its exact policy gradient."""

import re

from pydantic import Field

from files.hashes import derive_seed
from files.rows import Row
from lm.tokenizer import Messages
from lm.tool_calls import AssistantMessage
from ppo.environments.environment import Environment, Episode, Reply

LARGEST_NUMBER = 9  # the number is drawn from 1 to this


class GuessingGame(Environment):
    """A number to guess. After a wrong guess the reply says whether the number is higher or lower. The n-th guess earns
    1/n if it is right; a turn without a number ends the game.
    """

    max_turns: int = Field(default=2, ge=1, description="Guesses after which the game ends.")

    def open(self, _conversation: Messages, _row: Row, seed: int) -> Episode:
        return Game(1 + derive_seed(seed, "number") % LARGEST_NUMBER)


class Game(Episode):
    """A game with one number to guess."""

    def __init__(self, number: int) -> None:
        self.number, self.num_guesses = number, 0

    async def reply(self, message: AssistantMessage) -> Reply:
        said = re.search(r"\d{1,9}", message.text)
        if said is None:
            return Reply(is_over=True)
        self.num_guesses += 1
        if int(said[0]) == self.number:
            return Reply(reward=1 / self.num_guesses, is_over=True)
        return Reply([{"role": "user", "content": "higher" if int(said[0]) < self.number else "lower"}])
