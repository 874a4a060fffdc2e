"""Next-token losses: over a token stream, over packed sequences with a loss mask, and over (source, target) pairs.

Shape letters: B rows, T tokens, S source tokens, C counted positions.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lm.dropout import keys_on_device, sequence_keys
from lm.encoder import EncoderDecoder
from lm.model import LanguageModel
from lm.sampling import token_logprobs
from lm.transfer import pad_right, upload, uploaded
from training.packing import IntArray, Packed, PackedRows
from training.recording import Inputs, packed_inputs, segments_of


class CausalLMObjective:
    """-Σ log p(token | tokens before it in the row), over all tokens except each row's first. Lower is better."""

    def __init__(self, rows_BT: NDArray[np.int32]) -> None:
        self.rows_BT = rows_BT

    def __len__(self) -> int:
        return len(self.rows_BT)

    def count(self, rows: IntArray) -> int:
        return len(rows) * (self.rows_BT.shape[1] - 1)

    def num_tokens(self, rows: IntArray) -> int:
        return self.count(rows)

    def inputs(self, rows: IntArray, seed: int) -> Inputs:
        tokens_BT = torch.from_numpy(self.rows_BT[rows].astype(np.int64))
        return {"tokens_BT": tokens_BT, "numbers_B1": torch.from_numpy(rows[:, None]), "seed": torch.tensor(seed)}

    def loss_of(self, model: LanguageModel, inputs: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT, keys_B1 = inputs["tokens_BT"], keys_on_device(inputs["seed"], inputs["numbers_B1"])
        return -model(tokens_BT[:, :-1], sequence_keys_BT=keys_B1, targets=tokens_BT[:, 1:]).sum(), {}

    def loss(
        self, model: LanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.loss_of(model, uploaded(self.inputs(rows, seed), device))


class PackedObjective:
    """-Σ log p(token | tokens before it in its own sequence) over the counted tokens. Lower is better."""

    def __init__(self, rows: Packed | PackedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, rows: IntArray) -> int:
        return self.rows.num_counted(rows)

    def num_tokens(self, rows: IntArray) -> int:
        return self.rows.num_tokens(rows)

    def batch(self, rows: IntArray, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, IntArray]:
        """Return tokens, segments and the loss mask (True = counted), [B, T] each; the counted tokens [C], without
        those of the first column, which nothing predicts; and the number of each token's sequence.

        Segments and mask stay in CPU memory, where counting does not wait for a GPU.
        """
        taken = self.rows.take(rows)
        parts = (taken.tokens, taken.segments, taken.counted)
        tokens_BT, segments_BT, counted_BT = (torch.from_numpy(part) for part in parts)
        targets_C = upload(tokens_BT[:, 1:][counted_BT[:, 1:]], device)
        return upload(tokens_BT, device), segments_BT, counted_BT, targets_C, taken.sequence_of_tokens()

    def loss(
        self, model: LanguageModel, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT, segments_BT, counted_BT, targets_C, numbers_BT = self.batch(rows, device)
        keys_BT = sequence_keys(seed, numbers_BT, device)
        logprobs_C = model(tokens_BT[:, :-1], segments_BT[:, :-1], counted_BT[:, 1:], keys_BT[:, :-1], targets_C)
        return -logprobs_C.sum(), {}

    def inputs(self, rows: IntArray, seed: int) -> Inputs:
        taken = self.rows.take(rows)
        tokens_BT, segments_BT, counted_BT = map(torch.from_numpy, (taken.tokens, taken.segments, taken.counted))
        targets_C = tokens_BT[:, 1:][counted_BT[:, 1:]]
        inputs = packed_inputs(tokens_BT[:, :-1], segments_BT[:, :-1], counted_BT[:, 1:], targets_C)
        weights_C = F.pad(torch.ones(len(targets_C)), (0, len(inputs["targets_C"]) - len(targets_C)))
        numbers_BT = torch.from_numpy(taken.sequence_of_tokens()[:, :-1])
        return inputs | {"weights_C": weights_C, "numbers_BT": numbers_BT, "seed": torch.tensor(seed)}

    def loss_of(self, model: LanguageModel, inputs: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        keys_BT = keys_on_device(inputs["seed"], inputs["numbers_BT"])
        read = inputs["tokens_BT"], segments_of(inputs), inputs["places_C"], keys_BT, inputs["targets_C"]
        return -(model(*read) * inputs["weights_C"]).sum(), {}


class PairsObjective:
    """-Σ log p(token | tokens before it, the source) over the targets' tokens. Lower is better."""

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], start_id: int) -> None:
        self.pairs, self.start_id = pairs, start_id

    def __len__(self) -> int:
        return len(self.pairs)

    def count(self, rows: IntArray) -> int:
        return sum(len(self.pairs[row][1]) for row in rows)

    def num_tokens(self, rows: IntArray) -> int:
        return sum(len(source) + len(target) for source, target in (self.pairs[row] for row in rows))

    def loss(
        self, model: EncoderDecoder, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        sources, targets = zip(*(self.pairs[row] for row in rows), strict=True)
        keys_B1 = sequence_keys(seed, rows[:, None], device)
        return teacher_forcing_loss(model, sources, targets, self.start_id, device, keys_B1), {}


def teacher_forcing_loss(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    start_id: int,
    device: torch.device,
    sequence_keys_B1: Tensor,
) -> Tensor:
    """-Σ log p(token | tokens before it, its source), in nats, over all targets.

    The decoder starts from `start_id`, which is the end token of BART and the padding token of T5. `sequence_keys_B1`
    are the pairs' keys for dropout (`lm.dropout`).
    """
    sources_BS, source_segments_BS = pad_right(sources, device)
    given_BT, segments_BT = pad_right([[start_id, *target[:-1]] for target in targets], device)
    targets_BT, _ = pad_right(targets, device)
    real_BT = segments_BT > 0
    logits_CV = model(sources_BS, given_BT, source_segments_BS, real_BT, sequence_keys_B1)
    return -token_logprobs(logits_CV, targets_BT[real_BT]).sum()
