"""Better responses than one sample per prompt: the best of several samples by a score, and beam search.

Shape letters: K beams, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from lm.encoder import EncoderDecoder
from lm.generation import Batch, Stop, check_room, check_sources, generate, never, prompts_and_sources
from lm.model import LanguageModel
from lm.sampling import Choice

# Scores several responses to a prompt, all as tokens; higher is better.
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
        raise ValueError(
            f"{len(asked)} prompts with {[len(prompt_seeds) for prompt_seeds in seeds]} seeds; each needs at least one"
        )
    repeated = [prompt for prompt, prompt_seeds in zip(asked, seeds, strict=True) for _ in prompt_seeds]
    prompts, sources = prompts_and_sources(model, repeated, start_id)
    sampled = generate(
        model,
        prompts,
        sources=sources,
        max_new_tokens=max_new_tokens,
        end_ids=end_ids,
        choice=choice,
        seeds=[seed for prompt_seeds in seeds for seed in prompt_seeds],
        stop=stop,
    )
    responses = iter(sampled.responses)
    pools = [list(itertools.islice(responses, len(prompt_seeds))) for prompt_seeds in seeds]
    return [_preferred(score, prompt, pool) for prompt, pool in zip(asked, pools, strict=True)]


def _preferred(score: Scorer, prompt: Sequence[int], responses: Sequence[list[int]]) -> Best:
    scores = score(prompt, responses)
    if len(scores) != len(responses) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"the scores of {len(responses)} responses are {scores}; a finite number for each was expected"
        )
    place = max(range(len(scores)), key=lambda index: scores[index])  # max keeps the first of equals
    return Best(responses[place], scores[place], scores)


@dataclass(frozen=True)
class Hypothesis:
    """A response and log π(response | prompt) in nats; `score` is that per token."""

    response: list[int]
    logprob: float
    score: float
    finished: bool


@torch.inference_mode()
def beam_search(
    model: LanguageModel | EncoderDecoder,
    asked: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    start_id: int,
    end_ids: Collection[int],
) -> list[Hypothesis]:
    """Returns the `num_beams` best responses found, best score first; `asked` and `start_id` are as for `best_of`.

    Each step extends every running response by every token. Responses that end are set aside, and the `num_beams`
    likeliest others continue, until none of them can beat the worst of the `num_beams` best set aside. Responses still
    running at `max_new_tokens` are cut off there.
    Raises: ValueError as for `generate`, and for `num_beams` below 1.
    """
    if num_beams < 1:
        raise ValueError(f"num_beams is {num_beams}; at least 1 was expected")
    prompts, sources = prompts_and_sources(model, [asked], start_id)
    check_room(model, prompts, [max_new_tokens] * len(prompts))
    check_sources(model, sources, 1)
    batch = Batch.start(model, [0], prompts, max_new_tokens, sources, num_slots=num_beams)
    running: list[tuple[list[int], float]] = [([], 0.0)]
    over: list[Hypothesis] = []
    for step in range(1, max_new_tokens + 1):
        totals_KV = torch.log_softmax(batch.logits_BV.float(), dim=-1).double()
        totals_KV += torch.tensor([logprob for _, logprob in running], device=totals_KV.device)[:, None]
        # Each beam can end in one way only, so twice as many candidates contain enough that continue.
        totals, places = totals_KV.flatten().topk(min(2 * num_beams, totals_KV.numel()))
        V = totals_KV.shape[1]
        goes_on: list[tuple[int, int, float]] = []
        for logprob, place in zip(totals.tolist(), places.tolist(), strict=True):
            beam, token = divmod(place, V)
            response = [*running[beam][0], token]
            if token in end_ids or step == max_new_tokens:
                over.append(Hypothesis(response, logprob, logprob / step, token in end_ids))
            elif len(goes_on) < num_beams:
                goes_on.append((beam, token, logprob))
        over = sorted(over, key=lambda hypothesis: -hypothesis.score)[:num_beams]
        # Log-probs only fall, and the longest response divides them by most: no running response can exceed this.
        bound = goes_on[0][2] / max_new_tokens if goes_on else -math.inf
        if len(over) == num_beams and bound <= over[-1].score:
            break
        tokens = torch.tensor([token for _, token, _ in goes_on], device=totals_KV.device)
        running = [([*running[beam][0], token], logprob) for beam, token, logprob in goes_on]
        batch.keep([beam for beam, _, _ in goes_on])
        batch.feed(tokens)
    return over
