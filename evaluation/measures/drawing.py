"""Draws responses of a policy as tokens, which a KL needs: text alone does not say how it was tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.source import load_for_inference
from lm.tokenizer import Messages, Tokenizer
from lm.weights import ModelFolder
from reward.sampling import BATCH
from training.data import Prompt
from training.seeds import derive_seed


@dataclass(frozen=True)
class Policy:
    """A policy with its vocabulary, ready to sample."""

    folder: Path
    model: LanguageModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(folder, load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder))


@dataclass(frozen=True)
class Drawn:
    """Responses, prompt by prompt, `num_samples` each. Tokens include EOS if the response has one."""

    conversations: list[Messages]
    queries: list[list[int]]
    responses: list[list[int]]
    texts: list[str]
    finished: list[bool]
    temperature: float
    num_samples: int


def draw(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Drawn:
    """Draws responses; each sample's seed is derived from prompt and index, as in `reward.sampling`.

    Raises: ValueError for no prompts, temperature 0 (a greedy policy has no KL), and a prompt that leaves no room.
    """
    if not prompts:
        raise ValueError("prompts is empty; at least one was expected")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; above 0 was expected: a greedy policy's KL is infinite")
    tokenizer = policy.tokenizer
    wanted = [(prompt, index) for prompt in prompts for index in range(num_samples)]
    tokens = tokenizer.encode_prompts([prompt.messages for prompt in prompts])
    encoded = {prompt.prompt_id: own for prompt, own in zip(prompts, tokens, strict=True)}
    # Sorting prompts by length minimises padding.
    order = sorted(range(len(wanted)), key=lambda place: len(encoded[wanted[place][0].prompt_id]))
    found = generate(
        policy.model,
        [encoded[wanted[place][0].prompt_id] for place in order],
        max_new_tokens=max_new_tokens,
        end_ids=tokenizer.end_ids,
        choice=Choice(temperature),
        seeds=[derive_seed(seed, "sample", wanted[place][0].prompt_id, wanted[place][1]) for place in order],
        max_rows=BATCH,
    )
    row_of = {place: row for row, place in enumerate(order)}
    responses = [found.responses[row_of[place]] for place in range(len(wanted))]
    return Drawn(
        conversations=[prompt.messages for prompt, _ in wanted],
        queries=[encoded[prompt.prompt_id] for prompt, _ in wanted],
        responses=responses,
        texts=[tokenizer.decode(response).strip() for response in responses],
        finished=[found.finished[row_of[place]] for place in range(len(wanted))],
        temperature=temperature,
        num_samples=num_samples,
    )
