"""The sequences that generation runs together: they are read, take steps, and leave.

Shape letters: B sequences, U unique prompts, P prompt tokens, N tokens of all prompts, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from lm import graphs
from lm.cache import CrossAttentionCache, KVCache, PromptWriter
from lm.decoding import Steps
from lm.encoder_decoder import EncoderDecoder
from lm.graphs import decode
from lm.model import LanguageModel
from lm.padding import pad_left, pad_right


class Batch:
    """Sequences in the first slots of one cache, and their state; `logits_BV` are the logits of each one's next token.

    `rows` are the caller's numbers of the sequences. `columns_B` counts each one's tokens in the cache, and `lengths`
    are the same in Python.
    """

    def __init__(self, model: LanguageModel | EncoderDecoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.rows: list[int] = []
        self.lengths: list[int] = []
        self.columns_B = torch.empty(0, dtype=torch.int64, device=cache.keys.device)
        self.logits_BV = cache.keys.new_empty(0, model.config.vocab_size)
        self.cross_cache: CrossAttentionCache | None = None

    @classmethod
    def start(
        cls,
        model: LanguageModel | EncoderDecoder,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        num_new: int,
        sources: Sequence[Sequence[int]] | None = None,
        *,
        num_slots: int = 0,
    ) -> Self:
        """Read the prompts into a cache with columns for `num_new` more tokens, and `num_slots` if that is more."""
        num_columns = max(map(len, prompts)) + num_new
        num_slots = max(num_slots, len(prompts))
        batch = cls(model, KVCache.empty(model.config, num_slots, num_columns, like=model.head.weight))
        batch.admit(rows, prompts, sources)
        return batch

    def admit(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Read the prompts into the next slots."""
        pairs = list(zip(map(tuple, prompts), map(tuple, sources or [()] * len(prompts)), strict=True))
        # Samples of one prompt share keys and values, so these are computed once and then copied.
        slots: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        for slot, pair in enumerate(pairs, start=len(self.rows)):
            slots.setdefault(pair, slot)
        cross_cache = None
        if isinstance(self.model, EncoderDecoder):
            cross_cache = self.model.read(*pad_right([source for _, source in slots], self.columns_B.device))
        unique = [prompt for prompt, _ in slots]
        logits_UV = read_prompts(self.model, self.cache, unique, list(slots.values()), cross_cache)
        place = {pair: number for number, pair in enumerate(slots)}
        places = [place[pair] for pair in pairs]
        copies = [(slots[pair], slot) for slot, pair in enumerate(pairs, start=len(self.rows)) if slots[pair] != slot]
        if copies:
            self.cache.copy_slots(copies, max(map(len, unique)))
        if cross_cache is not None:
            cross_cache = cross_cache.keep(places)
            self.cross_cache = cross_cache if self.cross_cache is None else self.cross_cache.join(cross_cache)
        self.rows += rows
        self.lengths += map(len, prompts)
        self.columns_B = torch.tensor(self.lengths, device=self.columns_B.device)
        self.logits_BV = torch.cat([self.logits_BV, logits_UV[torch.tensor(places, device=logits_UV.device)]])

    def feed(self, tokens_B: Tensor, steps: Steps | None = None, num_columns: int = 0) -> None:
        """Append one token to every sequence and compute the next logits.

        With `num_columns`, only sequences that then have at most so many tokens matter: the others have ended.
        """
        num_columns = num_columns or max(self.lengths) + 1
        if steps is None:
            self.logits_BV = decode(self.model, tokens_B, self.columns_B, self.cache, num_columns, self.cross_cache)
        else:
            self.logits_BV = steps.next_logits(tokens_B, self.columns_B, self.cache, num_columns)
        self.columns_B = self.columns_B + 1
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, slots: Sequence[int]) -> None:
        """Keep only the sequences in these slots, in this order (a forking beam appears twice)."""
        moved = [(source, target) for target, source in enumerate(slots) if source != target]
        if moved:
            num_columns = min(max(self.lengths[source] for source, _ in moved), self.cache.num_columns)
            self.cache.copy_slots(moved, num_columns)
        self.rows, self.lengths = [self.rows[slot] for slot in slots], [self.lengths[slot] for slot in slots]
        slots_B = torch.tensor(slots, dtype=torch.int64, device=self.columns_B.device)
        self.columns_B, self.logits_BV = self.columns_B[slots_B], self.logits_BV[slots_B]
        if self.cross_cache is not None:
            self.cross_cache = self.cross_cache.keep(slots) if slots else None


def read_prompts(
    model: LanguageModel | EncoderDecoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    cross_cache: CrossAttentionCache | None,
) -> Tensor:
    """Logits [U, V] after each prompt, whose keys and values are then in its slot."""
    if not reads_packed(model):
        return _read_padded(model, cache, prompts, slots, cross_cache)
    parts = [_read_packed(model, cache, prompts[part], slots[part]) for part in _parts(prompts)]
    return torch.cat(parts)


def reads_packed(model: LanguageModel | EncoderDecoder) -> bool:
    """Whether prompts are read one after another in one row, some thousand tokens at a time, or all at once with
    padding: on a CPU, whose matrix products are no faster for it, and where each sequence attends to its own source.
    """
    return model.head.weight.is_cuda and isinstance(model, LanguageModel)


def _parts(prompts: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Neighbours with at most `PROMPT_TOKENS` in total, or one prompt."""
    start, total = 0, 0
    for place, prompt in enumerate(prompts):
        if total and total + len(prompt) > graphs.PROMPT_TOKENS:
            yield slice(start, place)
            start, total = place, 0
        total += len(prompt)
    yield slice(start, len(prompts))


def _read_packed(
    model: LanguageModel | EncoderDecoder, cache: KVCache, prompts: Sequence[Sequence[int]], slots: Sequence[int]
) -> Tensor:
    device = cache.keys.device
    lengths_U = torch.tensor([len(prompt) for prompt in prompts])
    tokens_1N = torch.tensor([[token for prompt in prompts for token in prompt]]).to(device)
    ends_U = lengths_U.cumsum(0)
    columns_N = torch.arange(tokens_1N.shape[1]) - (ends_U - lengths_U).repeat_interleave(lengths_U)
    segments_1N = torch.arange(1, len(prompts) + 1).repeat_interleave(lengths_U)[None]
    slots_N = torch.tensor(slots).repeat_interleave(lengths_U)
    places_N = torch.arange(tokens_1N.shape[1], device=device)
    columns_N, slots_N, last_U = (x.to(device) for x in (columns_N, slots_N, ends_U - 1))
    writer = PromptWriter(cache, places_N, slots_N, columns_N)
    hidden_1ND = model.decoder(tokens_1N, columns_N[None], model.decoder.mask_of(segments_1N, device), writer)
    return model.head(hidden_1ND[0, last_U])


def _read_padded(
    model: LanguageModel | EncoderDecoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    cross_cache: CrossAttentionCache | None,
) -> Tensor:
    """All prompts at once, padded on the left."""
    tokens_BP, first_real_B = pad_left(prompts, cache.keys.device)
    places_P = torch.arange(tokens_BP.shape[1], device=tokens_BP.device)
    positions_BP = (places_P - first_real_B[:, None]).clamp(min=0)
    real_BP = places_P >= first_real_B[:, None]
    # A padding query attends to itself: a row of the softmax must not be empty, and nothing reads its result.
    mask_BPP = (places_P <= places_P[:, None]) & (real_BP[:, None, :] | (places_P == places_P[:, None]))
    slots_BP = torch.tensor(slots, device=tokens_BP.device)[:, None].expand(tokens_BP.shape)
    writer = PromptWriter(cache, real_BP.flatten().nonzero()[:, 0], slots_BP[real_BP], positions_BP[real_BP])
    hidden_BPD = model.decoder(tokens_BP, positions_BP, mask_BPP, writer, cross_cache)
    return model.head(hidden_BPD[:, -1])
