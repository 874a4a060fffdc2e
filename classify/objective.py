"""The losses of classification, and the logits of many examples on all ranks.

    sequence   -log p(label | text), p = softmax of the label logits of the first token, summed over texts
    token      -log p(tag | sentence), at each word's first token, summed over words
    span       -½ (log p_first(i) + log p_last(j)), where p_first and p_last are softmaxes over a window's tokens, and i
               and j are the answer's first and last token, or the window's first without an answer; over windows

Shape letters: N examples, B packed rows, T tokens of a row, K labels (for spans 2, first and last), C counted
positions, L tokens of the longest example, F tokens of all examples.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from classify.config import Task
from classify.examples import BEGINS, ENDS, Examples, PackedExamples
from lm.dropout import sequence_keys
from lm.encoder import SequenceClassifier, SpanPredictor, TokenClassifier
from lm.progress import note_progress
from lm.transfer import MAX_TOKENS, first_tokens, upload
from training.config import BatchConfig
from training.engine import Engine
from training.packing import IntArray, pass_tokens, split_passes

Classifier = SequenceClassifier | TokenClassifier | SpanPredictor


def logits_of(model: nn.Module, packed: PackedExamples, *, has_types: bool, keys_BT: Tensor | None = None) -> Tensor:
    """Returns logits in fp32: [N, K] of each sequence, row by row, or [B, T, K] of each token."""
    types_BT = packed.token_types_BT if has_types else None
    logits = model(packed.tokens_BT, packed.segments_BT, types_BT, sequence_keys_BT=keys_BT)
    return torch.stack(logits, dim=-1) if isinstance(logits, tuple) else logits


def by_example(values_C: Tensor, example_C: Tensor, place_C: Tensor) -> Tensor:
    """Lays tokens' values out with a row per example, [N, L]; -inf where an example has no token."""
    N, L = int(example_C.max()) + 1, int(place_C.max()) + 1
    at_C = upload(example_C * L + place_C, values_C.device)
    return values_C.new_full((N * L,), -torch.inf).scatter(0, at_C, values_C).view(N, L)


class ClassifyObjective:
    """The loss of a task over its examples, which are packed into rows. Lower is better."""

    def __init__(self, examples: Examples, task: Task, *, has_types: bool) -> None:
        self.examples, self.task, self.has_types = examples, task, has_types
        counted = np.cumsum(examples.targets >= 0, dtype=np.int64)  # of `token`: words that have a tag
        before = np.concatenate([[0], counted])
        self._num_words = before[examples.ends] - before[examples.starts_of(np.arange(len(examples)))]

    def __len__(self) -> int:
        return len(self.examples)

    def count(self, rows: IntArray) -> int:
        return int(self._num_words[rows].sum()) if self.task == "token" else len(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return int(self.examples.lengths_of(rows).sum())

    def rank_passes(
        self, rows: IntArray, batch: BatchConfig, num_ranks: int, *, with_gradients: bool
    ) -> list[list[IntArray]]:
        """Split examples among ranks and passes by their tokens."""
        units = [[length] for length in self.examples.lengths_of(rows).tolist()]
        ranks = split_passes(units, num_ranks, pass_tokens(batch, units, with_gradients=with_gradients))
        return [[rows[places] for places in passes] for passes in ranks]

    def loss(
        self, model: nn.Module, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        packed = PackedExamples.of(self.examples, rows, device)
        keys_BT = sequence_keys(seed, rows[packed.example_BT.numpy()], device)
        logits = logits_of(model, packed, has_types=self.has_types, keys_BT=keys_BT)
        if self.task == "span":
            return self._spans(logits, packed)
        counted_BT = first_tokens(packed.segments_BT) if self.task == "sequence" else packed.targets_BT >= 0
        targets_C = upload(packed.targets_BT[counted_BT], device)
        logits_CK = logits if self.task == "sequence" else logits[upload(counted_BT, device)]
        right = (logits_CK.argmax(dim=-1) == targets_C).sum()
        return F.cross_entropy(logits_CK, targets_C, reduction="sum"), {"accuracy": right}

    def _spans(self, logits_BTK: Tensor, packed: PackedExamples) -> tuple[Tensor, Mapping[str, Tensor]]:
        real_BT = packed.real_BT
        example_C, place_C, targets_C = (
            part[real_BT] for part in (packed.example_BT, packed.place_BT, packed.targets_BT)
        )
        logits_CK = logits_BTK[upload(real_BT, logits_BTK.device)]
        loss, right_N = logits_CK.new_zeros(()), torch.ones(int(example_C.max()) + 1, device=logits_CK.device)
        for side, bit in enumerate((BEGINS, ENDS)):
            logits_NL = by_example(logits_CK[:, side], example_C, place_C)
            here_C = (targets_C & bit) > 0
            # Rows hold examples in any order; this brings the targets into that of the examples.
            targets_N = upload(place_C[here_C][example_C[here_C].argsort()], logits_NL.device)
            loss = loss + F.cross_entropy(logits_NL, targets_N, reduction="none").sum() / 2
            right_N = right_N * (logits_NL.argmax(dim=1) == targets_N)
        return loss, {"accuracy": right_N.sum()}


@torch.no_grad()
def logits_on_all_ranks(engine: Engine[Classifier], examples: Examples, task: Task, *, has_types: bool) -> Tensor:
    """Returns logits on every rank's CPU: [N, K] of sequences, or [F, K] of all examples' tokens. A collective call."""
    engine.model.eval()
    everything, num_columns = np.arange(len(examples)), len(getattr(engine.module, "labels", ())) or 2
    num_rows = len(examples) if task == "sequence" else len(examples.tokens)
    logits_FK = torch.zeros(num_rows, num_columns, device=engine.device)
    units = [[length] for length in examples.lengths_of(everything).tolist()]
    with engine.cache_weight_casts():
        # ZeRO-3 gathers weights in every pass, so a pass without examples reads the first one and discards the result.
        for mine in split_passes(units, engine.data_parallel_size, MAX_TOKENS)[engine.data_rank]:
            note_progress()
            rows = np.array(mine or [0])
            packed = PackedExamples.of(examples, rows, engine.device)
            logits = logits_of(engine.model, packed, has_types=has_types)
            if mine:
                places_C, found_CK = example_logits(logits, packed, examples, rows, task)
                logits_FK[places_C.to(engine.device)] = found_CK.to(logits_FK)
    return engine.sum_over_shares(logits_FK).cpu()


def example_logits(
    logits: Tensor, packed: PackedExamples, examples: Examples, rows: IntArray, task: Task
) -> tuple[Tensor, Tensor]:
    """Returns the numbers of the sequences, or the places of the tokens in the examples' arrays, [C]; and their logits
    [C, K].
    """
    if task == "sequence":
        firsts_BT = first_tokens(packed.segments_BT)
        return torch.from_numpy(rows)[packed.example_BT[firsts_BT]], logits
    starts_BT = torch.from_numpy(examples.starts_of(rows))[packed.example_BT]
    return (starts_BT + packed.place_BT)[packed.real_BT], logits[packed.real_BT.to(logits.device)]
