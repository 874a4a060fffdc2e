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
    """Responses in the order of the prompts. A finished one ends with the end token or where `stop` said so; the others
    were cut off. `logprobs` are those of the response's tokens, in nats, under the model at the sampling temperature
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
    """One response per prompt, at most `max_rows` at a time. Pass prompts sorted by length to minimise padding.

    For several samples of a prompt, repeat it: neighbours that enter together are read once. An encoder-decoder reads a
    source for each response, and its prompts are what its decoder begins with. Every sequence draws from its own seed,
    so a sample does not depend on its batch mates beyond rounding. `steps` is a kind of `lm.decoding`; "auto" is the
    fastest that the model and its device allow.
    Raises: ValueError for an empty prompt or one that leaves no room in the model's context; for sources that are
    missing, empty, longer than the context, or given to a model that reads none; for steps that it cannot take.
    """
    if not prompts or len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds; at least one prompt and a seed for each")
    check_room(model, prompts, max_new_tokens)
    check_sources(model, sources, len(prompts))
    taken = decoding_steps(model, steps)
    run = _Run(model, prompts, sources, max_new_tokens, end_id, choice, seeds, stop, max_rows, taken)
    with prepacked(model, min(max_rows, len(prompts))) if taken is None else nullcontext():
        while run.has_work():
            run.admit_waiting()
            note_progress()
            tokens_B = run.draw()
            if run.all_finished():
                run.drop_batch()
            else:
                run.feed(run.drop_finished(tokens_B))
    return run.result


class _Run:
    """The state of one `generate`: prompts that wait, the batch that runs, and the responses so far."""

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None,
        max_new_tokens: int,
        end_id: int,
        choice: Choice,
        seeds: Sequence[int],
        stop: Stop,
        max_rows: int,
        steps: Steps | None,
    ) -> None:
        self.model, self.prompts, self.sources, self.steps = model, prompts, sources, steps
        self.max_new_tokens, self.end_id, self.choice, self.stop = max_new_tokens, end_id, choice, stop
        self.max_rows = max_rows
        self.leave_below = LEAVE_BELOW if steps is None else steps.leave_below
        self.uniforms_NR = torch.from_numpy(draw_uniforms(seeds, max_new_tokens)).to(model.head.weight.device)
        self.result = Generated([[] for _ in prompts], [False] * len(prompts), [[] for _ in prompts])
        self.waiting = deque(range(len(prompts)))
        self._batch: Batch | None = None

    @property
    def batch(self) -> "Batch":
        assert self._batch is not None, "no sequence runs"
        return self._batch

    def has_work(self) -> bool:
        return self._batch is not None or bool(self.waiting)

    def admit_waiting(self) -> None:
        """Reads prompts into the batch once enough rows are free."""
        num_running = 0 if self._batch is None else len(self._batch.rows)
        if not self.waiting or num_running > self.leave_below * self.max_rows:
            return
        rows = [self.waiting.popleft() for _ in range(min(self.max_rows - num_running, len(self.waiting)))]
        sources = None if self.sources is None else [self.sources[row] for row in rows]
        fresh = Batch.start(self.model, rows, [self.prompts[row] for row in rows], self.max_new_tokens, sources)
        self._batch = fresh if self._batch is None else self._batch.join(fresh, self.max_new_tokens)

    def draw(self) -> Tensor:
        """Draws the next token of every running sequence [B], and records those of unfinished ones."""
        lengths = [len(self.result.responses[row]) for row in self.batch.rows]
        places = torch.tensor([min(length, self.max_new_tokens - 1) for length in lengths])
        uniforms_B = self.uniforms_NR[self.batch.rows, places.to(self.uniforms_NR.device)]
        tokens_B, logprobs_B = self.choice.draw(self.batch.logits_BV, uniforms_B)
        for row, token, logprob in zip(self.batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            if not self._is_over(row):
                response = self.result.responses[row]
                response.append(token)
                self.result.logprobs[row].append(logprob)
                self.result.finished[row] = token == self.end_id or self.stop(response)
        return tokens_B

    def _is_over(self, row: int) -> bool:
        return self.result.finished[row] or len(self.result.responses[row]) == self.max_new_tokens

    def all_finished(self) -> bool:
        return all(map(self._is_over, self.batch.rows))

    def drop_batch(self) -> None:
        self._batch = None
        if self.steps is not None:
            self.steps.forget()

    def drop_finished(self, tokens_B: Tensor) -> Tensor:
        """The tokens of the sequences that stay. Dropping rows copies the cache, so finished ones idle until enough of
        them can leave together.
        """
        stay = [place for place, row in enumerate(self.batch.rows) if not self._is_over(row)]
        if len(stay) > self.leave_below * len(self.batch.rows):
            return tokens_B
        places = torch.tensor(stay, device=tokens_B.device)
        self.batch.keep(places)
        return tokens_B[places]

    def feed(self, tokens_B: Tensor) -> None:
        self.batch.feed(self.model, tokens_B, self.steps)


class Batch:
    """Sequences that run together, and their state; `logits_BV` are the logits of each one's next token."""

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
        """Read the prompts into a cache with room for `num_new` more tokens; `rows` are the caller's prompt numbers."""
        config, weight = model.config, model.head.weight
        pairs = list(zip(map(tuple, prompts), map(tuple, sources or [()] * len(prompts)), strict=True))
        # Samples of one prompt share keys and values, so these are computed once and then copied.
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
        """Append one token to every sequence and compute the next logits."""
        if steps is None:
            self._read(model, tokens_B[:, None])
        else:
            self.logits_BV = steps.next_logits(tokens_B, self.first_real_B, self.cache)
            self.cache.advance(1)

    def keep(self, stay: Tensor) -> None:
        """Keep only the sequences at these places, in this order."""
        self.rows = [self.rows[place] for place in stay.tolist()]
        self.first_real_B, self.logits_BV = self.first_real_B[stay], self.logits_BV[stay]
        # Otherwise columns that are padding in every row would stay for as long as new sequences enter.
        first = int(self.first_real_B.min())
        self.cache.keep(stay, first)
        self.first_real_B = self.first_real_B - first
        self.cross_cache = None if self.cross_cache is None else self.cross_cache.keep(stay)

    def join(self, other: Self, num_new: int) -> Self:
        """Both batches, with room for `num_new` more tokens."""
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
        # A finished sequence may idle past the end of the context; nothing reads its logits.
        positions_BT = (columns_T - self.first_real_B[:, None]).clamp(0, model.config.max_position_embeddings - 1)
        real_BS = columns_S >= self.first_real_B[:, None]
        # A padding query attends to itself: a row of the softmax must not be empty, and nothing reads its result.
        mask_BTS = (columns_S <= columns_T[:, None]) & (real_BS[:, None, :] | (columns_S == columns_T[:, None]))
        hidden_BTD = model.decoder(tokens_BT, positions_BT, mask_BTS, self.cache, self.cross_cache)
        self.cache.advance(T)
        self.logits_BV = model.head(hidden_BTD[:, -1])


def prompts_and_sources(
    model: LanguageModel | EncoderDecoder, asked: Sequence[Sequence[int]], end_id: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """The prompts and sources for `generate` to answer: a decoder continues what is asked; an encoder-decoder reads it
    and begins after the end token, as in training.
    """
    tokens = [list(question) for question in asked]
    if isinstance(model, EncoderDecoder):
        return [[end_id] for _ in tokens], tokens
    return tokens, None


def check_room(model: LanguageModel | EncoderDecoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises: ValueError for a prompt that is empty or leaves no room for the response in the model's context."""
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
    """Raises: ValueError unless an encoder-decoder has a source for every prompt, of 1 to `max_position_embeddings`
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
