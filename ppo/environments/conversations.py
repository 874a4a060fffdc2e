"""Conversations of the policy with an environment, sampled in rounds.

In each round the sampler writes one turn of every open conversation, and then the episodes answer them concurrently.
Placement `continuous` samples them otherwise (`ppo.rounds`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from files.hashes import derive_seed
from files.rows import Row
from lm.samplers.engine import SamplingEngine
from lm.tokenizer import Messages, Tokenizer
from ppo.environments.environment import Environment
from ppo.environments.sessions import Rules, Sessions, Talk, Topic


@dataclass(frozen=True)
class Sampled:
    """Conversations that are over. `seconds` is the time spent waiting for environments, and `failure` says what went
    wrong in the last conversation that failed; "" if none did.
    """

    conversations: Sequence[Talk]
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
        self.sampler, self.temperature = sampler, temperature

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
        sessions, asked = Sessions(self.rules, len(prompts)), zip(messages, rows or [{}] * len(prompts), strict=True)
        topics = [Topic(*of, list(prompt), seed) for of, prompt, seed in zip(asked, prompts, seeds, strict=True)]
        talks = [Talk(number, topic.prompt, topic.seed) for number, topic in enumerate(topics)]
        for talk in talks:
            sessions.open(talk.number, topics[talk.number])
        for talk in talks:  # one that has failed has one turn nevertheless: a response has at least one token
            talk.prompt, talk.failure = sessions.prompt(talk.number)
        running, num_turns = talks, 0
        while running:
            self._take_turns(running, num_turns)
            for talk in running:
                sessions.ask(talk.number, topics[talk.number], talk.end_turn())
            answers = [sessions.answer(talk.number) for talk in running]
            for talk, (answer, failure) in zip(running, answers, strict=True):
                talk.take(answer, failure)
                if answer.is_over:
                    sessions.forget(talk.number)
            pairs = zip(running, answers, strict=True)
            running, num_turns = [talk for talk, (answer, _) in pairs if not answer.is_over], num_turns + 1
        sessions.close()
        return Sampled(talks, sessions.take_seconds(), sessions.failure)

    def _take_turns(self, running: Sequence[Talk], num_turns: int) -> None:
        """Sample the next turn of conversations."""
        limit = self.rules.max_new_tokens
        sampled = self.sampler.sample(
            [[*talk.prompt, *talk.tokens] for talk in running],
            [derive_seed(talk.seed, "turn", num_turns) for talk in running],
            max_new_tokens=[limit - len(talk.tokens) for talk in running],
            temperature=self.temperature,
        )
        for place, talk in enumerate(running):
            talk.tokens += sampled.responses[place]
            talk.logprobs += sampled.logprobs[place]
            talk.is_finished = sampled.finished[place]
            if sampled.routes:
                talk.add_routes(sampled.routes[place])  # those of earlier turns stay as they were
