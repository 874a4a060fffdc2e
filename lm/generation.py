"""Generation with a key-value cache: finished sequences leave, waiting ones enter, equal prompts are read once.

Shape letters: B running rows, P prompt tokens, T new tokens, S key tokens, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lm.cache import CrossAttentionCache, KVCache
from lm.decoding import Steps, decoding_steps
from lm.encoder_decoder import EncoderDecoder
from lm.graphs import StepKind
from lm.model import LanguageModel
from lm.native.decoder import LEAVE_BELOW
from lm.padding import pad_left, pad_right
from lm.prepacked import prepacked
from lm.progress import note_progress
from lm.sampling import Choice, draw_uniforms


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts. A finished one ends with the end token or where its stop said so; others
    were cut off. `logprobs` are those of the response's tokens, nats, under the model at the sampling temperature
    (greedy: 1), before top_k and top_p.
    """

    responses: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]]


Stop = Callable[[Sequence[int]], bool]  # whether a response ends with its last token


def never(_response: Sequence[int]) -> bool:
    return False


@torch.inference_mode()
def generate(
    model: LanguageModel | EncoderDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_id: int,
    choice: Choice,
    seeds: Sequence[int],
    stop: Stop = never,
    max_rows: int = 128,
    sources: Sequence[Sequence[int]] | None = None,
    steps: StepKind = "auto",
) -> Generated:
    """One response a prompt, at most `max_rows` at a time; prompts of like length side by side are padded least.

    For several samples of a prompt give it several times, side by side: where they enter together it is read once.
    An encoder-decoder reads a source for each response, and its prompts are what its decoder begins with. Every
    sequence draws from its own seed, so a sample does not depend on its batch mates beyond rounding. Steps are "auto":
    the fastest that the model and its device allow; or of the kind asked for (`lm.decoding`).
    Errors: ValueError for an empty prompt or one that leaves no room in the model's context, for sources that are
    missing, empty, longer than the context, or given to a model that reads none, and for steps that it cannot take.
    """
    if not prompts or len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds; at least one prompt and a seed for each")
    check_room(model, prompts, max_new_tokens)
    check_sources(model, sources, len(prompts))
    uniforms_NR = torch.from_numpy(draw_uniforms(seeds, max_new_tokens)).to(model.head.weight.device)
    result = Generated([[] for _ in prompts], [False] * len(prompts), [[] for _ in prompts])
    waiting = deque(range(len(prompts)))
    taken = decoding_steps(model, steps)
    leave_below = LEAVE_BELOW if taken is None else taken.leave_below
    batch: Batch | None = None
    with prepacked(model, min(max_rows, len(prompts))) if taken is None else nullcontext():
        while batch is not None or waiting:
            running = 0 if batch is None else len(batch.rows)
            if waiting and running <= leave_below * max_rows:
                entering = [waiting.popleft() for _ in range(min(max_rows - running, len(waiting)))]
                read = None if sources is None else [sources[row] for row in entering]
                fresh = Batch.start(model, entering, [prompts[row] for row in entering], max_new_tokens, read)
                batch = fresh if batch is None else batch.join(fresh, max_new_tokens)
                del fresh  # it would keep its cache for as long as the next ones run
            assert batch is not None
            note_progress()
            places = torch.tensor([min(len(result.responses[row]), max_new_tokens - 1) for row in batch.rows])
            drawn_B = uniforms_NR[batch.rows, places.to(uniforms_NR.device)]
            tokens_B, logprobs_B = choice.draw(batch.logits_BV, drawn_B)
            for row, token, logprob in zip(batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
                response = result.responses[row]
                if not (result.finished[row] or len(response) == max_new_tokens):
                    response.append(token)
                    result.logprobs[row].append(logprob)
                    result.finished[row] = token == end_id or stop(response)
            over = [result.finished[row] or len(result.responses[row]) == max_new_tokens for row in batch.rows]
            running = over.count(False)
            if not running:
                batch = None
                if taken is not None:
                    taken.forget()
                continue
            # Leaving copies the cache, so rows that are over idle until enough of them can leave together.
            if running <= leave_below * len(over):
                stay = torch.tensor([place for place, done in enumerate(over) if not done], device=tokens_B.device)
                batch.keep(stay)
                tokens_B = tokens_B[stay]
            batch.feed(model, tokens_B, taken)
    return result


class Batch:
    """Sequences that run together, with all that is known of them: `logits_BV` is for each one's next token."""

    def __init__(
        self,
        rows: list[int],
        first_real_B: Tensor,
        cache: KVCache,
        logits_BV: Tensor,
        cross_cache: CrossAttentionCache | None,
    ) -> None:
        self.rows, self.first_real_B, self.cache, self.logits_BV = rows, first_real_B, cache, logits_BV
        self.cross_cache = cross_cache

    @classmethod
    def start(
        cls,
        model: LanguageModel | EncoderDecoder,
        rows: list[int],
        prompts: Sequence[Sequence[int]],
        num_new: int,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> Self:
        """Read the prompts; `rows` are the caller's numbers for them, and there is room for `num_new` tokens."""
        config, weight = model.config, model.head.weight
        pairs = list(zip(map(tuple, prompts), map(tuple, sources or [()] * len(prompts)), strict=True))
        # Samples of one prompt see the same keys and values, so these are computed once and then copied.
        places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        tokens_BP, first_real_B = pad_left([prompt for prompt, _ in places], weight.device)
        shape = (
            config.num_hidden_layers,
            len(places),
            config.num_key_value_heads,
            tokens_BP.shape[1] + num_new,
            config.head_dim,
        )
        cross_cache = None
        if isinstance(model, EncoderDecoder):
            assert sources is not None
            cross_cache = model.read(*pad_right([source for _, source in places], weight.device))
        cache = KVCache.empty(shape, like=weight)
        batch = cls(list(range(len(places))), first_real_B, cache, weight.new_empty(0), cross_cache)
        batch._read(model, tokens_BP)
        if len(places) < len(pairs):
            batch.keep(torch.tensor([places[pair] for pair in pairs], device=weight.device))
        batch.rows = rows
        return batch

    def feed(self, model: LanguageModel | EncoderDecoder, tokens_B: Tensor, steps: Steps | None = None) -> None:
        """One more token for every sequence."""
        if steps is None:
            self._read(model, tokens_B[:, None])
        else:
            self.logits_BV = steps.next_logits(tokens_B, self.first_real_B, self.cache)
            self.cache.advance(1)

    def keep(self, stay: Tensor) -> None:
        """Only the sequences at these places stay, in this order."""
        self.rows = [self.rows[place] for place in stay.tolist()]
        self.first_real_B, self.logits_BV = self.first_real_B[stay], self.logits_BV[stay]
        # Columns that are padding to all would stay for as long as others enter.
        first = int(self.first_real_B.min())
        self.cache.keep(stay, first)
        self.first_real_B = self.first_real_B - first
        self.cross_cache = None if self.cross_cache is None else self.cross_cache.keep(stay)

    def join(self, other: Self, num_new: int) -> Self:
        """Both, with room for `num_new` tokens more."""
        length = max(self.cache.length, other.cache.length)
        first_real_B = [batch.first_real_B + (length - batch.cache.length) for batch in (self, other)]
        return type(self)(
            self.rows + other.rows,
            torch.cat(first_real_B),
            self.cache.join(other.cache, length + num_new),
            torch.cat([self.logits_BV, other.logits_BV]),
            None if self.cross_cache is None or other.cross_cache is None else self.cross_cache.join(other.cross_cache),
        )

    def _read(self, model: LanguageModel | EncoderDecoder, tokens_BT: Tensor) -> None:
        T, S = tokens_BT.shape[1], self.cache.length + tokens_BT.shape[1]
        columns_S = torch.arange(S, device=tokens_BT.device)
        columns_T = columns_S[S - T :]
        # A sequence that is over may idle past the end of the context; nothing reads what it is given.
        positions_BT = (columns_T - self.first_real_B[:, None]).clamp(0, model.config.max_position_embeddings - 1)
        real_BS = columns_S >= self.first_real_B[:, None]
        # A padding query may see itself: a row of the softmax must not be empty, and nothing reads its result.
        mask_BTS = (columns_S <= columns_T[:, None]) & (real_BS[:, None, :] | (columns_S == columns_T[:, None]))
        hidden_BTD = model.decoder(tokens_BT, positions_BT, mask_BTS, self.cache, self.cross_cache)
        self.cache.advance(T)
        self.logits_BV = model.head(hidden_BTD[:, -1])


def prompts_and_sources(
    model: LanguageModel | EncoderDecoder, asked: Sequence[Sequence[int]], end_id: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """What to give `generate` so that the model answers: a decoder continues what is asked; an encoder-decoder reads it
    and begins behind the end token, as it was trained.
    """
    tokens = [list(question) for question in asked]
    if isinstance(model, EncoderDecoder):
        return [[end_id] for _ in tokens], tokens
    return tokens, None


def check_room(model: LanguageModel | EncoderDecoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Errors: ValueError for a prompt that is empty or leaves no room for the response in the model's context."""
    room = model.config.max_position_embeddings - max_new_tokens
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= room:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; 1 to {room} were expected: the context of"
                f" {model.config.max_position_embeddings} tokens less {max_new_tokens} for the response"
            )


def check_sources(
    model: LanguageModel | EncoderDecoder, sources: Sequence[Sequence[int]] | None, num_prompts: int
) -> None:
    """Errors: ValueError unless an encoder-decoder has a source for every prompt, of 1 to `max_position_embeddings`
    tokens, and any other model none.
    """
    expected = num_prompts if isinstance(model, EncoderDecoder) else None
    if (None if sources is None else len(sources)) != expected:
        raise ValueError("an encoder-decoder needs a source for every prompt, and no other model reads any")
    for index, source in enumerate(sources or ()):
        if not 1 <= len(source) <= model.config.max_position_embeddings:
            raise ValueError(
                f"source {index} has {len(source)} tokens; 1 to {model.config.max_position_embeddings} were expected"
            )
