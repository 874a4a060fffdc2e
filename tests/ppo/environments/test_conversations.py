"""Conversations in rounds, with a sampler whose turns are written beforehand: what is appended, and what each kind of
failure costs.
"""

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from files.rows import Row
from lm.generation import Generated, Limits
from lm.tokenizer import Messages, Tokenizer
from lm.tool_calls import AssistantMessage
from ppo.environments.conversations import Conversations, Sampled
from ppo.environments.environment import Environment, Episode, Reply

MAX_NEW_TOKENS = 40
DEADLINE_SECONDS = 3.0  # a busy machine answers within it; three tests wait for it to pass
ASKED = [{"role": "user", "content": "the fox"}]


@dataclass
class Scripted:
    """A sampler that writes, as the n-th turn of a conversation, the n-th text of `turns`."""

    tokenizer: Tokenizer
    turns: Sequence[str]
    calls: list[tuple[list[list[int]], list[int], list[int]]] = field(default_factory=list)

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        assert temperature == 0.5
        assert not isinstance(max_new_tokens, int)
        text, limits = self.turns[len(self.calls)], list(max_new_tokens)
        self.calls.append(([list(prompt) for prompt in prompts], list(seeds), limits))
        whole = [*self.tokenizer.encode_plain([text])[0], self.tokenizer.turn_end_id]
        responses = [whole[:limit] for limit in limits]
        logprobs = [[-0.5 * (place + 1) for place in range(len(response))] for response in responses]
        return Generated(responses, [response == whole for response in responses], logprobs)


Answer = Callable[[AssistantMessage], Any]


@dataclass
class Told(Episode):
    """An episode whose replies a function gives."""

    answer: Answer
    said: list[str] = field(default_factory=list)
    is_closed: bool = False
    begins: Messages = ()
    last_score: Any = 0.0

    async def begin(self) -> Messages:
        return self.begins

    async def reply(self, message: AssistantMessage) -> Reply:
        self.said.append(message.text)
        answer = self.answer(message)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def score(self) -> float:
        return self.last_score

    async def close(self) -> None:
        self.is_closed = True


class Hall(Environment):
    """Opens the episodes that a test prepared, in the order of their rows."""

    kind: Literal["hall"] = "hall"
    deadline_seconds: float = DEADLINE_SECONDS
    max_turns: int = 3

    def open(self, conversation: Messages, row: Row, seed: int) -> Episode:
        EPISODES[row["number"]].seed = seed
        assert conversation == ASKED
        return EPISODES[row["number"]]


EPISODES: list[Any] = []


def sampled(tokenizer: Tokenizer, turns: Sequence[str], *episodes: Episode, **limits: int) -> tuple[Sampled, Scripted]:
    EPISODES[:] = episodes
    sampler, prompt = Scripted(tokenizer, turns), tokenizer.encode_prompt(ASKED)
    talks = Conversations(
        Hall(), tokenizer, sampler,  # type: ignore[arg-type]
        max_new_tokens=limits.get("max_new_tokens", MAX_NEW_TOKENS),
        max_prompt_tokens=limits.get("max_prompt_tokens", 60), temperature=0.5,
    )  # fmt: skip
    rows = [{"number": number} for number in range(len(episodes))]
    found = talks.sample([prompt] * len(rows), [ASKED] * len(rows), rows, [7 + number for number in range(len(rows))])
    return found, sampler


def reply(text: str, reward: float = 0.0) -> Reply:
    return Reply([{"role": "user", "content": text}], reward)


@pytest.fixture
def chatty(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer.with_template("chat")


def test_replies_are_appended_to_what_was_sampled(chatty: Tokenizer) -> None:
    answers = iter([reply("the dog", 0.25), Reply(reward=1.0, is_over=True)])
    episode = Told(lambda _: next(answers), last_score=10.0)
    found, sampler = sampled(chatty, [" bird", " the bush"], episode)
    (talk,) = found.conversations
    first, second = ([*chatty.encode_plain([text])[0], chatty.end_id] for text in (" bird", " the bush"))
    between = chatty.encode_reply([{"role": "user", "content": "the dog"}])
    assert talk.tokens == [*first, *between, *second]
    assert talk.written == [True] * len(first) + [False] * len(between) + [True] * len(second)
    # What the learner reads is what the second turn was sampled after.
    (prompts, seeds, limits), (later_prompts, later_seeds, later_limits) = sampler.calls
    assert later_prompts == [prompts[0] + first + between]
    assert (limits, later_limits) == ([MAX_NEW_TOKENS], [MAX_NEW_TOKENS - len(first) - len(between)])
    assert len({*seeds, *later_seeds, episode.seed}) == 3  # type: ignore[attr-defined]
    assert episode.said == [" bird", " the bush"]
    assert episode.is_closed
    assert talk.is_finished
    # A turn's reward is at its last token, and the conversation's score at the last one of all.
    expected = {len(first) - 1: 0.25, len(talk.tokens) - 1: 11.0}
    assert talk.rewards == [expected.get(place, 0.0) for place in range(len(talk.tokens))]
    assert [logprob for logprob, own in zip(talk.logprobs, talk.written, strict=True) if not own] == [0.0] * len(
        between
    )
    assert (found.failure, talk.dialogue.failure) == ("", "")
    assert 0 < found.seconds < 60


def test_a_conversation_ends_at_its_last_turn(chatty: Tokenizer) -> None:
    episode = Told(lambda _: reply("the dog", 1.0))
    found, sampler = sampled(chatty, ["a", "b", "c"], episode)
    assert len(sampler.calls) == 3
    (talk,) = found.conversations
    assert talk.is_finished
    assert sum(talk.rewards) == 3.0
    assert talk.written[-2:] == [True, True]  # the last reply is not appended


def test_a_turn_that_is_cut_off_is_not_answered(chatty: Tokenizer) -> None:
    episode = Told(lambda _: reply("the dog"), last_score=2.0)
    found, _ = sampled(chatty, ["the bird " * 40], episode)
    (talk,) = found.conversations
    assert (len(talk.tokens), talk.is_finished, episode.said) == (MAX_NEW_TOKENS, False, [])
    assert talk.rewards[-1] == 2.0


def test_a_reply_without_room_for_another_turn_leaves_the_conversation_unfinished(chatty: Tokenizer) -> None:
    between = len(chatty.encode_reply([{"role": "user", "content": "the dog"}]))
    for room, num_turns in ((2 + between, 1), (3 + between, 2)):
        episode = Told(lambda _: reply("the dog", 0.5))
        found, sampler = sampled(chatty, ["a", "b", "c"], episode, max_new_tokens=room)
        (talk,) = found.conversations
        assert len(sampler.calls) == num_turns
        assert not talk.is_finished
        assert talk.dialogue.failure == ""
        assert talk.written[-1]


def test_an_episode_may_begin_with_messages_which_are_the_prompts(chatty: Tokenizer) -> None:
    begins = [{"role": "user", "content": "the bush"}]
    found, sampler = sampled(chatty, ["a"], Told(lambda _: Reply(is_over=True), begins=begins))
    (talk,) = found.conversations
    assert talk.prompt == chatty.encode_prompt([*ASKED, *begins]) == sampler.calls[0][0][0]
    assert all(talk.written)
    long, _ = sampled(chatty, ["a"], Told(lambda _: Reply(is_over=True), begins=begins), max_prompt_tokens=3)
    assert long.conversations[0].dialogue.failure == "too_long"


BLOCKED_SECONDS = 40  # far more than the deadline


async def _sleeps(_: AssistantMessage) -> Reply:
    await asyncio.sleep(600)
    return Reply(is_over=True)


async def _ignores_that_time_is_up(_: AssistantMessage) -> Reply:
    for _attempt in range(2 * BLOCKED_SECONDS):
        try:
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            continue
    return Reply(is_over=True)


def _blocks(_: AssistantMessage) -> Reply:
    time.sleep(BLOCKED_SECONDS)
    return Reply(is_over=True)


def _dies(_: AssistantMessage) -> Reply:
    sys.exit(3)


def _breaks(_: AssistantMessage) -> Reply:
    raise KeyError("board")


FAULTS: dict[str, tuple[Answer, str, str]] = {
    "hangs": (_sleeps, "deadline", f"no answer within {DEADLINE_SECONDS:g} seconds"),
    "blocks": (_blocks, "deadline", f"no answer within {DEADLINE_SECONDS:g} seconds"),
    "ignores": (_ignores_that_time_is_up, "deadline", f"no answer within {DEADLINE_SECONDS:g} seconds"),
    "dies": (_dies, "error", "SystemExit: 3"),
    "breaks": (_breaks, "error", "KeyError: 'board'"),
    "is nonsense": (lambda _: "what?", "invalid", "returned str; a Reply was expected"),
    "is silent": (lambda _: Reply(), "invalid", "returned no messages"),
    "is the policy": (lambda _: Reply([{"role": "assistant", "content": "x"}]), "invalid", "role is 'assistant'"),
    "has no text": (lambda _: Reply([{"role": "user", "content": 3}]), "invalid", "text content were expected"),
    "has no message": (lambda _: Reply(["hello"]), "invalid", "text content were expected"),
    "is no text": (lambda _: Reply([{"role": "user", "content": "a\ud800"}]), "invalid", "half of a surrogate pair"),
    "rewards with NaN": (lambda _: reply("x", math.nan), "invalid", "the reward nan; a finite number"),
    "rewards with text": (lambda _: Reply([], "1", True), "invalid", "the reward '1'; a finite number"),
    "is too long": (lambda _: reply("the dog " * 60), "too_long", "fewer than max_new_tokens, 40, were expected"),
    "floods": (lambda _: reply("x" * 50_000_000), "too_long", "at most 2,560 were expected"),
    "floods with messages": (lambda _: Reply([{"role": "user", "content": ""}] * 10_000), "too_long", "at most 2,560"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_loses_its_response_and_nothing_else(fault: str, chatty: Tokenizer) -> None:
    answer, reason, message = FAULTS[fault]
    goods = [iter([reply("the dog"), Reply(reward=1.0, is_over=True)]) for _ in range(2)]
    episodes = [Told(lambda _: next(goods[0])), Told(answer), Told(lambda _: next(goods[1]))]
    started = time.monotonic()
    found, sampler = sampled(chatty, ["a", "b"], *episodes)
    assert time.monotonic() - started < BLOCKED_SECONDS - 10
    assert [talk.dialogue.failure for talk in found.conversations] == ["", reason, ""]
    assert message in found.failure
    assert [sum(talk.rewards) for talk in found.conversations[::2]] == [1.0, 1.0]
    assert all(talk.is_finished for talk in found.conversations[::2])
    assert found.conversations[0].tokens == found.conversations[2].tokens
    # The lost response keeps its tokens, which the sampler's proof reads, and ends with a token of the policy.
    assert found.conversations[1].written == [True, True]
    assert len(sampler.calls[1][0]) == 2
    if reason != "deadline":
        assert episodes[1].is_closed


@pytest.mark.parametrize(
    ("score", "reason"), [(math.nan, "no_score"), (math.inf, "invalid"), (None, "invalid"), ("1", "invalid")]
)
def test_a_conversation_without_a_score_is_missing(score: object, reason: str, chatty: Tokenizer) -> None:
    found, _ = sampled(chatty, ["a"], Told(lambda _: Reply(is_over=True), last_score=score))
    assert found.conversations[0].dialogue.failure == reason


def test_what_fails_at_the_beginning_or_the_end(chatty: Tokenizer) -> None:
    """An episode that cannot begin costs one turn, for a response has at least one token. Closing costs nothing."""

    class Late(Told):
        async def begin(self) -> Messages:
            raise ConnectionError("no server")

    class Stays(Told):
        async def close(self) -> None:
            raise RuntimeError("still there")

    stays = Stays(lambda _: Reply(reward=1.0, is_over=True))
    found, sampler = sampled(chatty, ["a"], Late(lambda _: reply("x")), stays)
    assert [talk.dialogue.failure for talk in found.conversations] == ["error", ""]
    assert "ConnectionError: no server" in found.failure
    assert len(sampler.calls) == 1
    assert sum(found.conversations[1].rewards) == 1.0


def test_many_episodes_answer_at_once(chatty: Tokenizer) -> None:
    """They block until all have been asked, and leave no threads behind."""
    all_asked = threading.Barrier(40)

    def waits(_: AssistantMessage) -> Reply:
        all_asked.wait()
        return Reply(reward=1.0, is_over=True)

    found, _ = sampled(chatty, ["a"], *(Told(waits) for _ in range(40)))
    assert found.failure == ""
    assert sum(sum(talk.rewards) for talk in found.conversations) == 40.0
    ends = time.monotonic() + 30
    while sum(thread.name == "episode" for thread in threading.enumerate()) > 2:  # those of the tests that block
        assert time.monotonic() < ends
        time.sleep(0.05)
