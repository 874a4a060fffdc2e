"""Sessions of conversations whose turns are answered while others are sampled (placement `continuous`).

The caller asks for an answer as soon as a turn has ended, and takes it at a time of its own (`ppo.schedule`), however
fast the environment is. A session that this process does not have, such as that of a conversation from a checkpoint, is
opened again and gets the turns so far; the conversation continues if the replies are those that the policy has read.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from files.importing import explain
from files.rows import Row
from lm.tokenizer import Messages
from ppo.environments.conversations import (
    GRACE_SECONDS,
    Answer,
    EpisodeThread,
    Found,
    Rules,
    allow_episodes,
    checked_score,
    reason_of,
)
from ppo.environments.environment import DeadlineError, Episode, within


@dataclass(frozen=True)
class Topic:
    """What a conversation is about, and the seed of its response."""

    messages: Messages  # of the prompt
    row: Row
    prompt: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Turns:
    """A conversation up to the policy's last turn. The lists have an entry per token after the prompt."""

    prompt: Sequence[int]  # with the messages that the episode began with
    tokens: Sequence[int]
    written: Sequence[bool]  # True = by the policy
    rewards: Sequence[float]
    is_closed: bool  # whether the last turn ended by itself, so that there is something to answer

    def parts(self) -> list[slice]:
        """Returns turns and replies in order, beginning and ending with a turn."""
        runs = groupby(range(len(self.tokens)), key=self.written.__getitem__)
        places = [[*run] for _, run in runs]
        return [slice(own[0], own[-1] + 1) for own in places]


class Sessions:
    """The sessions of one process, by numbers of conversations."""

    def __init__(self, rules: Rules, most_open: int) -> None:
        """At most about `most_open` sessions are open at once."""
        allow_episodes(most_open)
        self.rules, self.failure, self._sessions = rules, "", dict[int, _Session]()
        self._seconds = 0.0

    def open(self, number: int, topic: Topic) -> None:
        """Start opening a session, unless it is open."""
        if number not in self._sessions:
            self._sessions[number] = _Session(self.rules, topic)

    def prompt(self, number: int) -> tuple[Sequence[int], str]:
        """Wait until the session is open. Returns the prompt that the policy reads, and why the conversation has
        failed, an entry of `ppo.rollout.FAILURES`.
        """
        session = self._sessions[number]
        try:
            return self._result(session.opening, 1), ""
        except Exception as error:
            return session.topic.prompt, self._failed(error)

    def ask(self, number: int, topic: Topic, turns: Turns) -> None:
        """Start answering the policy's last turn, unless that has been asked for."""
        self.open(number, topic)
        self._sessions[number].ask(turns)

    def answer(self, number: int) -> tuple[Answer, str]:
        """Wait for the answer to the turn asked for. Returns it, and why the conversation has failed."""
        session, failure = self._sessions[number], ""
        assert session.answer is not None, f"nothing was asked of conversation {number}"
        try:
            found = self._result(session.answer, session.num_calls)
        except Exception as error:
            found, failure = Answer(is_over=True), self._failed(error)
        session.answer = None
        return found, failure

    def forget(self, number: int) -> None:
        """Start closing a session, if there is one."""
        if (session := self._sessions.pop(number, None)) is not None:
            session.close()

    def close(self) -> None:
        """Close all sessions, and wait for it."""
        self.rules.wait({session.close() for session in self._sessions.values()})
        self._sessions = {}

    def take_seconds(self) -> float:
        """Returns for how long this process has waited for environments since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _result(self, future: Future[Found], num_calls: int) -> Found:
        self._seconds += self.rules.wait({future}, num_calls)
        if not future.done():
            raise DeadlineError(f"no answer within {self.rules.environment.deadline_seconds:g} seconds")
        return future.result()

    def _failed(self, error: Exception) -> str:
        self.failure = explain(error, __file__)
        return reason_of(error)


class _Session:
    """An episode, and the calls that are under way."""

    def __init__(self, rules: Rules, topic: Topic) -> None:
        self.rules, self.topic, self.num_calls = rules, topic, 0
        self.answer: Future[Answer] | None = None
        self._episode: Episode | None = None
        self._num_answered = 0  # turns
        self._thread = EpisodeThread(None)  # each call below has its own limit
        self.opening = self._thread.start(self._open)

    def ask(self, turns: Turns) -> None:
        if self.answer is None:
            self.num_calls = (len(turns.parts()) + 1) // 2 - self._num_answered + 2  # with opening and score
            self.answer = self._thread.start(partial(self._answered, turns))

    def close(self) -> Future[None]:
        """Start closing the episode. An error here no longer affects a response."""

        async def close() -> None:
            if self._episode is not None:
                await self._limited(self._episode.close)

        closed = self._thread.start(close)
        self._thread.end()
        return closed

    async def _open(self) -> Sequence[int]:
        topic = self.topic

        async def begin() -> Messages:
            self._episode = self.rules.open(topic.messages, topic.row, topic.seed)
            return await self._episode.begin()

        return self.rules.prompt(topic.messages, topic.prompt, await self._limited(begin))

    async def _answered(self, turns: Turns) -> Answer:
        if list(self.opening.result()) != list(turns.prompt):
            raise RuntimeError("the environment was opened again and begins otherwise")
        *earlier, last = turns.parts()
        for turn, reply in [*zip(earlier[::2], earlier[1::2], strict=True)][self._num_answered :]:
            found = await self._reply(turns, turn)
            is_same = np.float32(found.reward) == np.float32(turns.rewards[turn.stop - 1])
            if list(found.tokens) != list(turns.tokens[reply]) or not is_same:
                raise RuntimeError("the environment was asked again and answers otherwise")
        found = await self._reply(turns, last) if turns.is_closed else Answer(is_over=True)
        if found.is_over:
            assert self._episode is not None, "an episode is opened before it answers"
            score = checked_score(await self._limited(self._episode.score))
            found = replace(found, reward=found.reward + score)
        return found

    async def _reply(self, turns: Turns, turn: slice) -> Answer:
        assert self._episode is not None, "an episode is opened before it answers"
        message = self.rules.tokenizer.assistant_message(turns.tokens[turn])
        reply = await self._limited(partial(self._episode.reply, message))
        self._num_answered += 1
        return self.rules.answer(reply, self._num_answered, turn.stop)

    async def _limited(self, call: Callable[[], Awaitable[Found]]) -> Found:
        """Returns what a call gives. Code that blocks may end after its deadline; whether the answer counts must not
        depend on when it is taken.
        """
        started, limit = time.monotonic(), self.rules.call_seconds
        found = await within(call, limit)
        if limit is not None and time.monotonic() - started > limit + GRACE_SECONDS:
            raise DeadlineError(f"no answer within {limit:g} seconds")
        return found
