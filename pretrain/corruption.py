"""Objectives that hide words: BERT's masked words for an encoder, alone or with next-sentence prediction, and BART's
denoising for an encoder-decoder.

Which words of a row are hidden depends only on the seed and the row's number, so neither the split of a batch nor
resuming changes them. Each row of the stream appears as `NUM_VIEWS` rows with different words hidden, as in BERT's own
data.

Shape letters: B rows, T tokens of a row, S tokens of a corrupted row, C counted positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.dropout import sequence_keys
from lm.encoder import EncoderDecoder, MaskedLanguageModel, NextSentenceModel, masked_tokens_loss
from lm.tokenizer import Tokenizer
from training.objectives import teacher_forcing_loss
from training.packing import IntArray

NUM_VIEWS = 10  # BERT's `dupe_factor`
MASKED_SHARE = 0.15  # arXiv 1810.04805, section 3.1
HIDDEN_SHARE, MEAN_SPAN_TOKENS = 0.3, 3.0  # arXiv 1910.13461, section 4.1 ("text infilling")


@dataclass(frozen=True)
class HiddenWords:
    """How words are hidden: the token that replaces them, the tokens that are never hidden, and the seed."""

    start_id: int
    end_id: int
    mask_id: int
    kept_ids: tuple[int, ...]  # ends of texts and the like
    vocab_size: int
    seed: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, seed: int) -> "HiddenWords":
        """Take the special tokens from a tokenizer. Raises: ValueError for a vocabulary without a mask token."""
        kept = (tokenizer.end_id, tokenizer.start_id, tokenizer.pad_id)
        return cls(tokenizer.start_id, tokenizer.end_id, tokenizer.mask_id, kept, tokenizer.vocab_size, seed)

    def generator(self, row: np.int64) -> np.random.Generator:
        return np.random.default_rng([self.seed, int(row)])

    def mask(self, tokens_T: IntArray, generator: np.random.Generator) -> tuple[IntArray, NDArray[np.bool_]]:
        """Choose 15% of a row's words; mask 80% of these, replace 10%, keep 10%. Returns the row, and a mask, True =
        chosen.
        """
        hideable = np.flatnonzero(self._hideable_V[tokens_T])
        chosen = generator.choice(hideable, size=int(self.num_masked(tokens_T)), replace=False)
        fate = generator.random(len(chosen))
        corrupted_T, is_chosen_T = tokens_T.copy(), np.zeros(len(tokens_T), dtype=np.bool_)
        is_chosen_T[chosen] = True
        corrupted_T[chosen[fate < 0.8]] = self.mask_id
        replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
        corrupted_T[replaced] = generator.integers(0, self.vocab_size, size=len(replaced))
        return corrupted_T, is_chosen_T

    def num_masked(self, tokens_BT: IntArray) -> IntArray:
        """Returns how many words of each row `mask` chooses; any leading dimensions are allowed."""
        num_hideable: IntArray = self._hideable_V[tokens_BT].sum(axis=-1)
        return np.minimum(num_hideable, max(1, round(MASKED_SHARE * tokens_BT.shape[-1])))

    @cached_property
    def _hideable_V(self) -> NDArray[np.bool_]:
        hideable_V = np.ones(self.vocab_size, dtype=np.bool_)
        hideable_V[list(self.kept_ids)] = False
        return hideable_V

    def infill(self, tokens_T: IntArray, generator: np.random.Generator) -> IntArray:
        """Returns the row with about 30% of its words hidden, in spans of Poisson length, each replaced by one mask.

        BART also inserts masks for spans of length 0; here every mask hides something.
        """
        T = len(tokens_T)
        hidden_T, budget = np.zeros(T, dtype=np.bool_), round(HIDDEN_SHARE * T)
        while (left := budget - int(hidden_T.sum())) > 0:
            length = min(max(1, int(generator.poisson(MEAN_SPAN_TOKENS))), left)
            start = int(generator.integers(0, T - length + 1))
            hidden_T[start : start + length] = True
        opens_T = hidden_T & ~np.concatenate([[False], hidden_T[:-1]])
        corrupted_T = np.where(opens_T, self.mask_id, tokens_T)
        return corrupted_T[opens_T | ~hidden_T]


class MaskedObjective:
    """-Σ log p(word | the row without it) over the chosen words. Lower is better."""

    def __init__(self, rows_BT: NDArray[np.int32], words: HiddenWords, num_views: int = NUM_VIEWS) -> None:
        self.rows_BT, self.words, self.num_views = rows_BT, words, num_views

    def __len__(self) -> int:
        return len(self.rows_BT) * self.num_views

    def count(self, rows: IntArray) -> int:
        return int(self.words.num_masked(self._rows(rows)).sum())

    def num_tokens(self, rows: IntArray) -> int:
        return len(rows) * (self.rows_BT.shape[1] + 1)

    def batch(self, rows: IntArray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns corrupted tokens [B, T + 1], a mask of the chosen words [B, T + 1], and the chosen words [C]."""
        rows_BT = self._rows(rows)
        views = [self.words.mask(row_T, self.words.generator(row)) for row, row_T in zip(rows, rows_BT, strict=True)]
        corrupted_BT, chosen_BT = (np.stack(part) for part in zip(*views, strict=True))
        # The start token comes first: there, a model trained from this one is asked about the whole text.
        tokens_BT = np.pad(corrupted_BT, ((0, 0), (1, 0)), constant_values=self.words.start_id)
        selected_BT = np.pad(chosen_BT, ((0, 0), (1, 0)))
        tokens, selected, words = map(torch.from_numpy, (tokens_BT, selected_BT, rows_BT[chosen_BT]))
        return tokens.to(device), selected.to(device), words.to(device)

    def loss(
        self, model: MaskedLanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT, selected_BT, words_C = self.batch(rows, device)
        keys_B1 = sequence_keys(seed, rows[:, None], device)
        logits_CV = model(tokens_BT, selected_BT=selected_BT, sequence_keys_BT=keys_B1)
        return masked_tokens_loss(logits_CV, words_C), {"accuracy": (logits_CV.argmax(dim=-1) == words_C).sum()}

    def _rows(self, rows: IntArray) -> IntArray:
        rows_BT: IntArray = self.rows_BT[rows % len(self.rows_BT)].astype(np.int64)
        return rows_BT


class NextSentenceObjective:
    """BERT's whole pretraining loss on pairs `[CLS] first [SEP] second [SEP]`: that of the masked words, as in
    `MaskedObjective`, and for each pair -log p(the second text follows the first, or not). Lower is better.

    A pair is a row of the stream, cut in half; in half of the pairs, drawn at random, the second text is of another
    row. Both losses are means in BERT, over words and over pairs. Here each pair counts `words_per_pair` times in a sum
    over masked words, which is the same as long as every pair has that many.
    """

    def __init__(self, rows_BT: NDArray[np.int32], words: HiddenWords, num_views: int = NUM_VIEWS) -> None:
        self.rows_BT, self.words, self.num_views = rows_BT, words, num_views
        self.half = rows_BT.shape[1] // 2
        self.words_per_pair = max(1, round(MASKED_SHARE * 2 * self.half))

    def __len__(self) -> int:
        return len(self.rows_BT) * self.num_views

    def count(self, rows: IntArray) -> int:
        return int(self.words.num_masked(self.pairs(rows)[0]).sum())

    def num_tokens(self, rows: IntArray) -> int:
        return len(rows) * (2 * self.half + 3)

    def pairs(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Returns both texts of each pair [B, 2 half], and 1 where the second is of another row [B], else 0."""
        pairs_BT = self.rows_BT[rows % len(self.rows_BT), : 2 * self.half].astype(np.int64)
        is_random_B = np.zeros(len(rows), dtype=np.int64)
        for place, row in enumerate(rows):
            generator = np.random.default_rng([self.words.seed, 1, int(row)])
            if len(self.rows_BT) > 1 and generator.random() < 0.5:
                other = (int(row) + int(generator.integers(1, len(self.rows_BT)))) % len(self.rows_BT)
                pairs_BT[place, self.half :] = self.rows_BT[other, self.half : 2 * self.half]
                is_random_B[place] = 1
        return pairs_BT, is_random_B

    def batch(self, rows: IntArray, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns corrupted tokens, token types and a mask of the chosen words, [B, T] each with the marks; the chosen
        words [C]; and 1 where the second text is a random one [B].
        """
        pairs_BT, is_random_B = self.pairs(rows)
        views = [self.words.mask(pair_T, self.words.generator(row)) for row, pair_T in zip(rows, pairs_BT, strict=True)]
        corrupted_BT, chosen_BT = (np.stack(part) for part in zip(*views, strict=True))

        def marked(values_BT: NDArray[Any], start: int, end: int) -> Tensor:
            marks = [np.full((len(rows), 1), mark, dtype=values_BT.dtype) for mark in (start, end)]
            parts = marks[0], values_BT[:, : self.half], marks[1], values_BT[:, self.half :], marks[1]
            return torch.from_numpy(np.concatenate(parts, axis=1))

        tokens_BT = marked(corrupted_BT, self.words.start_id, self.words.end_id)
        types_BT = torch.zeros_like(tokens_BT)
        types_BT[:, self.half + 2 :] = 1
        parts = tokens_BT, types_BT, marked(chosen_BT, 0, 0), *map(torch.from_numpy, (pairs_BT[chosen_BT], is_random_B))
        tokens_BT, types_BT, selected_BT, words_C, random_B = (part.to(device) for part in parts)
        return tokens_BT, types_BT, selected_BT, words_C, random_B

    def loss(
        self, model: NextSentenceModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT, types_BT, selected_BT, words_C, random_B = self.batch(rows, device)
        keys_B1 = sequence_keys(seed, rows[:, None], device)
        logits_CV, next_B2 = model(tokens_BT, None, selected_BT, types_BT, keys_B1)
        masked = masked_tokens_loss(logits_CV, words_C)
        pairs = torch.nn.functional.cross_entropy(next_B2, random_B, reduction="sum")
        num_pairs = torch.tensor(float(len(rows)), device=device)
        return masked + self.words_per_pair * pairs, {
            "accuracy": (logits_CV.argmax(dim=-1) == words_C).sum(),
            "masked_loss": masked,
            "next_sentence_loss": torch.stack([pairs, num_pairs]),
            "next_sentence_accuracy": torch.stack([(next_B2.argmax(dim=-1) == random_B).sum().float(), num_pairs]),
        }


class DenoisingObjective:
    """-Σ log p(token | tokens before it, the row with spans hidden) over the whole row. Lower is better."""

    def __init__(self, rows_BT: NDArray[np.int32], words: HiddenWords, num_views: int = NUM_VIEWS) -> None:
        self.rows_BT, self.words, self.num_views = rows_BT, words, num_views

    def __len__(self) -> int:
        return len(self.rows_BT) * self.num_views

    def count(self, rows: IntArray) -> int:
        return len(rows) * self.rows_BT.shape[1]

    def num_tokens(self, rows: IntArray) -> int:
        return self.count(rows)

    def batch(self, rows: IntArray) -> tuple[list[list[int]], list[list[int]]]:
        """Returns corrupted rows, each after a start token, and the original rows."""
        targets_BT = self.rows_BT[rows % len(self.rows_BT)].astype(np.int64)
        sources = [
            [self.words.start_id, *self.words.infill(tokens_T, self.words.generator(row)).tolist()]
            for row, tokens_T in zip(rows, targets_BT, strict=True)
        ]
        return sources, targets_BT.tolist()

    def loss(
        self, model: EncoderDecoder, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        sources, targets = self.batch(rows)
        keys_B1 = sequence_keys(seed, rows[:, None], device)
        return teacher_forcing_loss(model, sources, targets, self.words.end_id, device, keys_B1), {}
