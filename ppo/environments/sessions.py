"""Sessions of conversations with an environment: each turn of the policy is asked about, and its answer taken later.

Nothing is rendered or tokenized again: the tokens of replies are appended to what was sampled, so the learner reads
exactly what the sampler read. A session that this process does not have, such as that of a conversation from a
checkpoint, is opened again and gets the turns so far; the conversation continues if the replies are those that the
policy has read.

Each episode has a thread and an event loop of its own, so code that blocks delays no other episode; once its deadline
has passed, the thread is abandoned. An episode that fails, hangs or returns something invalid loses its response, which
then counts neither in the loss nor in a baseline; its tokens are still tested as draws from the policy.
"""

import asyncio
import math
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from files.hashes import derive_seed
from files.importing import explain
from files.rows import Row
from lm.generation import Partial
from lm.progress import note_progress
from lm.tokenizer import Messages, Tokenizer
from ppo.environments.environment import DeadlineError, Environment, Episode, Reply, ServedEnvironment, within
from ppo.rollout import Dialogue
from training.notices import waits_for

Found = TypeVar("Found")

GRACE_SECONDS = 1.0  # after a deadline, until a call that does not end at it is given up
AFTER_OUTAGE_SECONDS = 61.0  # the longest pause of a request that is repeated, and as much as above
FILES_PER_EPISODE = 4  # an event loop has three, and an episode often a connection
CHARACTERS_PER_TOKEN = 64  # a longer reply cannot fit, so it is refused before it is tokenized
REPLY_ROLES = ("system", "user", "tool")


class InvalidReplyError(Exception):
    """An episode returned something that its contract does not allow."""


class TooLongError(Exception):
    """A reply is longer than a whole response may be."""


class NoScoreError(Exception):
    """An episode has no score for its conversation: it returned NaN."""


REASONS: Mapping[type[Exception], str] = {  # entries of `ppo.rollout.FAILURES`; all other errors are "error"
    DeadlineError: "deadline", InvalidReplyError: "invalid", TooLongError: "too_long", NoScoreError: "no_score",
}  # fmt: skip


class EpisodeThread:
    """Runs the calls of one episode, one after another, in a thread and an event loop of its own."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Coroutine[Any, Any, Any]], Future[Any]] | None] = SimpleQueue()
        # A daemon: a thread that hangs must not keep the process alive.
        Thread(target=self._work, name="episode", daemon=True).start()

    def start(self, call: Callable[[], Coroutine[Any, Any, Found]]) -> Future[Found]:
        future = Future[Found]()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """Let the thread end once the calls started so far are done."""
        self._calls.put(None)

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (started := self._calls.get()) is not None:
                call, future = started
                try:
                    future.set_result(runner.run(call()))
                except BaseException as error:  # SystemExit too: an episode may call sys.exit
                    named = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                    future.set_exception(named.with_traceback(error.__traceback__))


@dataclass(frozen=True)
class Answer:
    """What an environment makes of a turn: the tokens of its reply, or none if the conversation is over."""

    tokens: Sequence[int] = ()
    reward: float = 0.0  # of the turn, and of the conversation if it is over
    is_over: bool = False
    is_finished: bool = False  # over with a closed turn, before room ran out


@dataclass
class Talk(Partial):
    """A conversation that is sampled turn by turn. Before it is over, `is_finished` is that of its last turn."""

    written: list[bool] = field(default_factory=list)  # of all turns that have ended; True = by the policy
    rewards: list[float] = field(default_factory=list)  # likewise, from the environment, at each turn's last token
    failure: str = ""  # an entry of `ppo.rollout.FAILURES`

    @property
    def dialogue(self) -> Dialogue:
        num_new = len(self.tokens) - len(self.written)
        return Dialogue([*self.written, *[True] * num_new], [*self.rewards, *[0.0] * num_new], self.failure)

    def end_turn(self) -> "Turns":
        """Returns the conversation up to a turn that has ended, for its environment."""
        self.written, self.rewards = [*self.dialogue.written], [*self.dialogue.rewards]
        return Turns(self.prompt, [*self.tokens], self.written, self.rewards, self.is_finished, bool(self.failure))

    def take(self, answer: Answer, failure: str) -> None:
        """Take what the environment makes of the last turn."""
        self.failure, self.is_finished = self.failure or failure, answer.is_finished
        self.rewards[-1] += answer.reward
        self.tokens += answer.tokens
        for of_token, value in ((self.logprobs, 0.0), (self.written, False), (self.rewards, 0.0)):
            of_token += [value] * len(answer.tokens)


@dataclass(frozen=True)
class Rules:
    """What conversations with an environment are made of, however they are sampled."""

    environment: Environment
    tokenizer: Tokenizer
    max_new_tokens: int
    max_prompt_tokens: int

    @property
    def call_seconds(self) -> float | None:
        """Limit of a call; None = its episode limits it."""
        return None if isinstance(self.environment, ServedEnvironment) else self.environment.deadline_seconds

    @property
    def most_characters(self) -> int:
        return CHARACTERS_PER_TOKEN * self.max_new_tokens

    def open(self, messages: Messages, row: Row, seed: int) -> Episode:
        return self.environment.open(messages, row, derive_seed(seed, "environment"))

    def prompt(self, messages: Messages, prompt: Sequence[int], opening: Any) -> list[int]:
        """Returns the prompt with the messages that an episode begins with, encoded again if there are any.

        Raises: InvalidReplyError or TooLongError if they cannot be read.
        """
        if not _checked_messages(opening, self.most_characters):
            return list(prompt)
        found = self.tokenizer.encode_prompt([*messages, *opening])
        if len(found) > self.max_prompt_tokens:
            raise TooLongError(
                f"the prompt and the environment's first messages have {len(found)} tokens;"
                f" at most {self.max_prompt_tokens} were expected"
            )
        return found

    def answer(self, replied: Any, num_turns: int, num_tokens: int) -> Answer:
        """Returns what a reply makes of a conversation of so many turns and tokens after the prompt.

        Raises: InvalidReplyError, or TooLongError for one too long for any response.
        """
        reply = _checked_reply(replied, self.most_characters)
        if reply.is_over or num_turns == self.environment.max_turns:
            return Answer(reward=reply.reward, is_over=True, is_finished=True)
        try:
            tokens = self.tokenizer.encode_reply(reply.messages)
        except ValueError as error:
            raise InvalidReplyError(str(error)) from None
        if len(tokens) >= self.max_new_tokens:
            raise TooLongError(
                f"a reply has {len(tokens)} tokens; fewer than max_new_tokens, {self.max_new_tokens}, were expected"
            )
        if num_tokens + len(tokens) >= self.max_new_tokens:
            return Answer(reward=reply.reward, is_over=True)  # unfinished: there is no room for another turn
        return Answer(tokens, reply.reward)


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
    has_failed: bool  # before its first turn, after which it is over

    def parts(self) -> list[slice]:
        """Returns turns and replies in order, beginning and ending with a turn."""
        runs = groupby(range(len(self.tokens)), key=self.written.__getitem__)
        places = [[*run] for _, run in runs]
        return [slice(own[0], own[-1] + 1) for own in places]


class Sessions:
    """The sessions of one process, by numbers of conversations."""

    def __init__(self, rules: Rules, most_open: int) -> None:
        """At most about `most_open` sessions are open at once. `failure` says what the last failure was."""
        _allow_episodes(most_open)
        self.rules, self.failure, self._sessions = rules, "", dict[int, _Session]()
        self._closing, self._seconds = set[Future[None]](), 0.0

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
            return self._result(session, session.opening), ""
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
            found = self._result(session, session.answer)
        except Exception as error:
            found, failure = Answer(is_over=True), self._failed(error)
        session.answer = None
        return found, failure

    def forget(self, number: int) -> None:
        """Start closing a session, if there is one."""
        if (session := self._sessions.pop(number, None)) is not None:
            closing = session.close()
            self._closing = {one for one in [*self._closing, closing] if not one.done()}
            if session.is_stuck:
                self._closing.discard(closing)

    def close(self) -> None:
        """Close all sessions, and wait for it, up to the limit of a call."""
        for number in [*self._sessions]:
            self.forget(number)
        wait(self._closing, self.rules.environment.deadline_seconds + GRACE_SECONDS)

    def take_seconds(self) -> float:
        """Returns for how long this process has waited for environments since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _result(self, session: "_Session", future: Future[Found]) -> Found:
        """Wait until a call is done, or its deadline has passed. An episode that waits for its server has time to find
        out that this is away, by up to three calls; while that is waited for (`training.notices`), and until requests
        are repeated after it, no deadline passes.
        """
        started, seconds, awaited = time.monotonic(), self.rules.environment.deadline_seconds, 0.0
        limit = seconds + GRACE_SECONDS  # the thread itself says earlier whether a call was in time
        if self.rules.call_seconds is None:
            limit, awaited = 3 * seconds + AFTER_OUTAGE_SECONDS, started
        while not future.done() and (left := max(session.started, awaited) + limit - time.monotonic()) > 0:
            wait([future], min(1.0, left))
            note_progress()
            if waits_for():
                awaited = time.monotonic()
        self._seconds += time.monotonic() - started
        session.is_stuck = not future.done()
        if session.is_stuck:
            raise DeadlineError(f"no answer within {seconds:g} seconds")
        return future.result()

    def _failed(self, error: Exception) -> str:
        self.failure = explain(error, __file__)
        return next((reason for kind, reason in REASONS.items() if isinstance(error, kind)), "error")


class _Session:
    """An episode, and the calls that are under way."""

    def __init__(self, rules: Rules, topic: Topic) -> None:
        self.rules, self.topic, self.started = rules, topic, time.monotonic()  # the latter of the call under way
        self.answer: Future[Answer] | None = None
        self.is_stuck = False  # in a call that nobody waits for any longer
        self._episode: Episode | None = None
        self._num_answered = 0  # turns
        self._thread = EpisodeThread()
        self.opening = self._thread.start(self._open)

    def ask(self, turns: Turns) -> None:
        if self.answer is None:
            if self.opening.done():  # otherwise the thread may be stuck
                self.started = time.monotonic()
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
        if turns.has_failed:
            return Answer(is_over=True)
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
            score = _checked_score(await self._limited(self._episode.score))
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
        self.started, limit = time.monotonic(), self.rules.call_seconds
        found = await within(call, limit)
        if limit is not None and time.monotonic() - self.started > limit + GRACE_SECONDS / 2:
            raise DeadlineError(f"no answer within {limit:g} seconds")
        return found


def _checked_reply(reply: Any, most_characters: int) -> Reply:
    """Returns the reply. Raises: InvalidReplyError or TooLongError if it breaks the contract."""
    if not isinstance(reply, Reply):
        raise InvalidReplyError(f"reply() returned {type(reply).__name__}; a Reply was expected")
    if not isinstance(reply.reward, int | float) or not math.isfinite(reply.reward):
        raise InvalidReplyError(f"reply() returned the reward {reply.reward!r}; a finite number was expected")
    if not reply.is_over and not _checked_messages(reply.messages, most_characters):
        raise InvalidReplyError(
            "reply() returned no messages although the episode is not over; at least one was expected"
        )
    return reply


def _checked_messages(messages: Any, most_characters: int) -> Messages:
    """Returns the messages. Raises: InvalidReplyError or TooLongError if they cannot be appended."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidReplyError(f"messages are {type(messages).__name__}; a list of messages was expected")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise InvalidReplyError(f"a message is {message!r:.200}; a role and text content were expected")
        if message.get("role") not in REPLY_ROLES:
            raise InvalidReplyError(
                f"a message's role is {message.get('role')!r:.200}; one of {', '.join(REPLY_ROLES)} was expected"
            )
    num_characters = sum(1 + len(message["content"]) for message in messages)
    if num_characters > most_characters:
        raise TooLongError(f"a reply has {num_characters:,} characters; at most {most_characters:,} were expected")
    return messages


def _checked_score(score: Any) -> float:
    """Returns the score. Raises: InvalidReplyError unless it is a number; NoScoreError if it is NaN."""
    if not isinstance(score, int | float) or math.isinf(score):
        raise InvalidReplyError(f"score() returned {score!r:.200}; a finite number was expected")
    if math.isnan(score):
        raise NoScoreError("score() returned NaN, which means that there is no score")
    return float(score)


def _allow_episodes(number: int) -> None:
    """Raise this process's limit of open files by what so many episodes may need, as far as the machine allows."""
    number *= FILES_PER_EPISODE
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(limit + number, most) if most != resource.RLIM_INFINITY else limit + number
    if limit != resource.RLIM_INFINITY and number > limit // 2 and wanted > limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
