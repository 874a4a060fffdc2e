"""Beam search over the same cache. Shape letters: K beams, V vocabulary."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lm.batch import Batch
from lm.encoder_decoder import EncoderDecoder
from lm.generation import check_room, check_sources
from lm.model import LanguageModel


@dataclass(frozen=True)
class Hypothesis:
    """A response and log π(response | prompt) in nats; `score` divides it by (number of tokens)^length_penalty."""

    response: list[int]
    logprob: float
    score: float
    finished: bool


@torch.inference_mode()
def beam_search(
    model: LanguageModel | EncoderDecoder,
    prompt: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    end_ids: Collection[int],
    length_penalty: float = 1.0,
    source: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """The `num_beams` best responses found, best score first; `source` is what an encoder-decoder reads.

    Each step extends every running response by every token. Responses that end are set aside, and the `num_beams`
    likeliest others continue, until none of them can beat the worst of `num_beams` set aside. Responses still running
    at `max_new_tokens` are cut off there.
    Raises: ValueError as for `generate`, and for `num_beams` or `length_penalty` below their range.
    """
    if num_beams < 1 or length_penalty < 0:
        raise ValueError(f"num_beams is {num_beams}, length_penalty {length_penalty}; from 1 and from 0 were expected")
    check_room(model, [prompt], max_new_tokens)
    sources = None if source is None else [source]
    check_sources(model, sources, 1)
    batch = Batch.start(model, [0], [prompt], max_new_tokens, sources, num_slots=num_beams)
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
                over.append(Hypothesis(response, logprob, logprob / step**length_penalty, token in end_ids))
            elif len(goes_on) < num_beams:
                goes_on.append((beam, token, logprob))
        over = sorted(over, key=lambda hypothesis: -hypothesis.score)[:num_beams]
        # Log-probs only fall, and the longest response divides them by most: no running response can exceed this.
        bound = goes_on[0][2] / max_new_tokens**length_penalty if goes_on else -math.inf
        if len(over) == num_beams and bound <= over[-1].score:
            break
        tokens = torch.tensor([token for _, token, _ in goes_on], device=totals_KV.device)
        running = [([*running[beam][0], token], logprob) for beam, token, logprob in goes_on]
        batch.keep([beam for beam, _, _ in goes_on])
        batch.feed(tokens)
    return over
