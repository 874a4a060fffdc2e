"""Conversations of the policy with an environment, sampled in rounds.

In each round the sampler writes one turn of every open conversation. The episodes answer them concurrently, and the
tokens of their replies are appended to what was sampled. Nothing is rendered or tokenized again, so the learner reads
exactly what the sampler read.

Each episode has a thread and an event loop of its own, so code that blocks delays no other episode; once its deadline
has passed, the thread is abandoned. An episode that fails, hangs or returns something invalid loses its response, which
then counts neither in the loss nor in a baseline; its tokens are still tested as draws from the policy.
"""

import asyncio
import math
import resource
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from files.hashes import derive_seed
from files.importing import explain
from files.rows import Row
from lm.progress import note_progress
from lm.samplers.engine import SamplingEngine
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

    def __init__(self, deadline_seconds: float | None) -> None:
        self._deadline_seconds = deadline_seconds
        self._calls: SimpleQueue[tuple[Callable[[], Coroutine[Any, Any, Any]], Future[Any]] | None] = SimpleQueue()
        self._last: Future[Any] | None = None
        # A daemon: a thread that hangs must not keep the process alive.
        Thread(target=self._work, name="episode", daemon=True).start()

    def start(self, call: Callable[[], Coroutine[Any, Any, Found]]) -> Future[Found]:
        self._last = future = Future[Found]()
        self._calls.put((call, future))
        return future

    @property
    def is_stuck(self) -> bool:
        """Whether its last call has not returned yet."""
        return self._last is not None and not self._last.done()

    def end(self) -> None:
        """Let the thread end once the calls started so far are done."""
        self._calls.put(None)

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (started := self._calls.get()) is not None:
                call, future = started
                try:
                    future.set_result(runner.run(within(call, self._deadline_seconds)))
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

    def wait(self, pending: Collection[Future[Any]], num_calls: int = 1) -> float:
        """Wait until all are done, or the deadline of so many calls has passed. Returns the seconds.

        While a server's outage is waited for (`training.notices`), and until requests are repeated after it, it does
        not pass. An episode that waits has time to find out that its server is away, by up to three calls.
        """
        started, limit = time.monotonic(), num_calls * self.environment.deadline_seconds
        served = 3 * limit + AFTER_OUTAGE_SECONDS
        end = started + (limit + GRACE_SECONDS if self.call_seconds is not None else served)
        while pending and (left := end - time.monotonic()) > 0:
            _, pending = wait(pending, min(1.0, left))
            note_progress()
            if waits_for():
                end = time.monotonic() + served
        return time.monotonic() - started


def reason_of(failure: Exception) -> str:
    """Returns the entry of `ppo.rollout.FAILURES`."""
    return next((reason for kind, reason in REASONS.items() if isinstance(failure, kind)), "error")


@dataclass
class Conversation:
    """A response being sampled. `tokens` are those after the prompt; the other lists have one entry per token."""

    messages: Messages  # of the prompt
    row: Row
    prompt: list[int]
    seed: int
    thread: EpisodeThread
    tokens: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)  # True = by the policy
    logprobs: list[float] = field(default_factory=list)  # nats, of the policy's tokens; 0 at the others
    rewards: list[float] = field(default_factory=list)
    routes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))  # of all tokens that were read
    num_turns: int = 0
    is_over: bool = False
    is_finished: bool = False  # ended with a closed turn, before room ran out
    failure: Exception | None = None
    episode: Episode | None = None

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Append a turn of the policy, with its log-probs, or a reply, which has none."""
        self.tokens += tokens
        self.written += [bool(logprobs)] * len(tokens)
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.rewards += [0.0] * len(tokens)

    def last_turn(self) -> list[int]:
        start = len(self.written)
        while start and self.written[start - 1]:
            start -= 1
        return self.tokens[start:]

    def add_reward(self, reward: float) -> None:
        """Reward the policy's last token. Call it before anything is appended after that token."""
        self.rewards[-1] += reward

    def fail(self, error: Exception) -> None:
        self.failure, self.is_over = self.failure or error, True

    @property
    def dialogue(self) -> Dialogue:
        return Dialogue(self.written, self.rewards, "" if self.failure is None else reason_of(self.failure))


@dataclass(frozen=True)
class Sampled:
    """Conversations that are over. `seconds` is the time spent waiting for environments, and `failure` says what went
    wrong in the first conversation that failed; "" if none did.
    """

    conversations: Sequence[Conversation]
    seconds: float
    failure: str


class Conversations:
    """Samples conversations with an environment."""

    def __init__(
        self,
        environment: Environment,
        tokenizer: Tokenizer,
        sampler: SamplingEngine,
        *,
        max_new_tokens: int,
        max_prompt_tokens: int,
        temperature: float,
    ) -> None:
        self.rules = Rules(environment, tokenizer, max_new_tokens, max_prompt_tokens)
        self.sampler, self.temperature, self._seconds = sampler, temperature, 0.0

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        messages: Sequence[Messages],
        rows: Sequence[Row],
        seeds: Sequence[int],
    ) -> Sampled:
        """Sample a conversation from each prompt. `messages` are those of the prompts, and `rows` the fields of their
        rows that the environment reads; `rows` may be empty. A turn's seed is derived from its conversation's seed and
        the turn's number.
        """
        self._seconds = 0.0
        allow_episodes(len(prompts))
        conversations = [
            Conversation(own, row, list(prompt), seed, EpisodeThread(self.rules.call_seconds))
            for prompt, own, row, seed in zip(prompts, messages, rows or [{}] * len(prompts), seeds, strict=True)
        ]
        self._begin(conversations)
        while running := [conversation for conversation in conversations if not conversation.is_over]:
            self._take_turns(running)
            self._close([conversation for conversation in running if conversation.is_over])
        failures = [conversation.failure for conversation in conversations if conversation.failure is not None]
        return Sampled(conversations, self._seconds, explain(failures[0], __file__) if failures else "")

    def _begin(self, conversations: Sequence[Conversation]) -> None:
        """Open all episodes. Messages that an episode begins with become part of the prompt, which is encoded again."""

        async def begin(conversation: Conversation) -> Messages:
            episode = self.rules.open(conversation.messages, conversation.row, conversation.seed)
            conversation.episode = episode
            return await episode.begin()

        for conversation, opening in self._answers(conversations, begin):
            try:
                found = self.rules.prompt(conversation.messages, conversation.prompt, opening.result())
                conversation.prompt = found
            except Exception as error:
                conversation.failure = error  # one turn is sampled nevertheless: a response has at least one token

    def _take_turns(self, running: Sequence[Conversation]) -> None:
        """Sample the next turn of conversations, and append the replies."""
        sampled = self.sampler.sample(
            [conversation.prompt + conversation.tokens for conversation in running],
            [derive_seed(conversation.seed, "turn", conversation.num_turns) for conversation in running],
            max_new_tokens=[self.rules.max_new_tokens - len(conversation.tokens) for conversation in running],
            temperature=self.temperature,
        )
        of_turns = sampled.routes or [conversation.routes for conversation in running]
        turns = zip(running, sampled.responses, sampled.finished, sampled.logprobs, of_turns, strict=True)
        for conversation, tokens, is_closed, logprobs, routes in turns:
            conversation.append(tokens, logprobs)
            # Those of earlier turns stay as they were when these were sampled.
            conversation.routes = torch.cat([conversation.routes, routes[len(conversation.routes) :]])
            conversation.num_turns += 1
            conversation.is_over = not is_closed or conversation.failure is not None
        for conversation, reply in self._answers([talk for talk in running if not talk.is_over], self._reply):
            try:
                self._take(conversation, reply.result())
            except Exception as error:
                conversation.fail(error)
        ended = [conversation for conversation in running if conversation.is_over and conversation.failure is None]
        for conversation, score in self._answers(ended, _score):
            try:
                conversation.add_reward(checked_score(score.result()))
            except Exception as error:
                conversation.fail(error)

    async def _reply(self, conversation: Conversation) -> Reply:
        assert conversation.episode is not None, "only conversations whose episode was opened go on"
        return await conversation.episode.reply(self.rules.tokenizer.assistant_message(conversation.last_turn()))

    def _take(self, conversation: Conversation, reply: Any) -> None:
        """Take an episode's reply to the policy's last turn."""
        answer = self.rules.answer(reply, conversation.num_turns, len(conversation.tokens))
        conversation.add_reward(answer.reward)
        conversation.is_over, conversation.is_finished = answer.is_over, answer.is_finished
        conversation.append(answer.tokens)

    def _close(self, conversations: Sequence[Conversation]) -> None:
        """Close episodes. An error here no longer affects a response."""

        async def close(conversation: Conversation) -> None:
            if conversation.episode is not None:
                await conversation.episode.close()

        self._answers(conversations, close)
        for conversation in conversations:
            conversation.thread.end()

    def _answers(
        self,
        conversations: Sequence[Conversation],
        ask: Callable[[Conversation], Coroutine[Any, Any, Found]],
    ) -> list[tuple[Conversation, Future[Found]]]:
        """Make a call to each episode, all at once, and wait until each has returned or its deadline has passed."""
        seconds = self.rules.environment.deadline_seconds
        stuck = [conversation.thread.is_stuck for conversation in conversations]
        futures = [conversation.thread.start(partial(ask, conversation)) for conversation in conversations]
        self._seconds += self.rules.wait({done for done, is_stuck in zip(futures, stuck, strict=True) if not is_stuck})
        late = Future[Found]()
        late.set_exception(DeadlineError(f"no answer within {seconds:g} seconds"))
        return [(own, done if done.done() else late) for own, done in zip(conversations, futures, strict=True)]


async def _score(conversation: Conversation) -> float:
    assert conversation.episode is not None, "only conversations whose episode was opened have a score"
    return await conversation.episode.score()


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


def checked_score(score: Any) -> float:
    """Returns the score. Raises: InvalidReplyError unless it is a number; NoScoreError if it is NaN."""
    if not isinstance(score, int | float) or math.isinf(score):
        raise InvalidReplyError(f"score() returned {score!r:.200}; a finite number was expected")
    if math.isnan(score):
        raise NoScoreError("score() returned NaN, which means that there is no score")
    return float(score)


def allow_episodes(number: int) -> None:
    """Raise this process's limit of open files by what so many episodes may need, as far as the machine allows."""
    number *= FILES_PER_EPISODE
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(limit + number, most) if most != resource.RLIM_INFINITY else limit + number
    if limit != resource.RLIM_INFINITY and number > limit // 2 and wanted > limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
