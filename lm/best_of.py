"""Best-of-n: several responses per prompt, of which the one with the highest score is kept."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from lm.encoder_decoder import EncoderDecoder
from lm.generation import Stop, generate, never, prompts_and_sources
from lm.model import LanguageModel
from lm.sampling import Choice

# Scores of several responses to a prompt, all given as tokens; higher is better.
Scorer = Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[float]]


@dataclass(frozen=True)
class Best:
    """The preferred response to a prompt with its score, and the scores of all, in the order of the seeds."""

    response: list[int]
    score: float
    scores: Sequence[float] = field(default=(), compare=False)


def best_of(
    model: LanguageModel | EncoderDecoder,
    asked: Sequence[Sequence[int]],
    score: Scorer,
    *,
    max_new_tokens: int,
    start_id: int,
    end_ids: Collection[int],
    choice: Choice,
    seeds: Sequence[Sequence[int]],
    stop: Stop = never,
) -> list[Best]:
    """Samples one response per seed of each prompt, and returns the one with the highest score; ties go to the first.

    A decoder continues what is `asked`; an encoder-decoder reads it, and begins after `start_id`. `end_ids` and `stop`
    are as for `generate`.
    Raises: ValueError as for `generate`, for a prompt without seeds, and unless each response has a finite score.
    """
    if len(seeds) != len(asked) or not all(seeds):
        raise ValueError(f"{len(asked)} prompts with {[len(own) for own in seeds]} seeds; some for each were expected")
    repeated = [prompt for prompt, own in zip(asked, seeds, strict=True) for _ in own]
    prompts, sources = prompts_and_sources(model, repeated, start_id)
    sampled = generate(
        model,
        prompts,
        sources=sources,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        choice=choice,
        seeds=[seed for own in seeds for seed in own],
        stop=stop,
    )
    responses = iter(sampled.responses)
    pools = [list(itertools.islice(responses, len(own))) for own in seeds]
    return [_preferred(score, prompt, pool) for prompt, pool in zip(asked, pools, strict=True)]


def _preferred(score: Scorer, prompt: Sequence[int], responses: Sequence[list[int]]) -> Best:
    scores = score(prompt, responses)
    if len(scores) != len(responses) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"the scores of {len(responses)} responses are {scores}; a finite number for each was expected"
        )
    place = max(range(len(scores)), key=lambda index: scores[index])  # max keeps the first of equals
    return Best(responses[place], scores[place], scores)
