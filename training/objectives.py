"""Next-token losses over rows of tokens: a plain stream, and packed sequences of which some tokens count.

Shape letters: B rows, T tokens, C counted positions.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.logprobs import token_logprobs
from lm.model import LanguageModel
from training.packing import IntArray, PackedRows


class StreamObjective:
    """-Σ log p(token | tokens before it in the row), every token but each row's first. Lower is better."""

    def __init__(self, rows_BT: NDArray[np.int32]) -> None:
        self.rows_BT = rows_BT

    def __len__(self) -> int:
        return len(self.rows_BT)

    def count(self, rows: IntArray) -> int:
        return len(rows) * (self.rows_BT.shape[1] - 1)

    def num_tokens(self, rows: IntArray) -> int:
        return self.count(rows)

    def loss(self, model: LanguageModel, rows: IntArray, device: torch.device) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT = torch.from_numpy(self.rows_BT[rows].astype(np.int64)).to(device)
        return -token_logprobs(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum(), {}


class PackedObjective:
    """-Σ log p(token | tokens before it in its own sequence) over the counted tokens. Lower is better."""

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, rows: IntArray) -> int:
        return int(self.rows.counted[rows].sum())

    def num_tokens(self, rows: IntArray) -> int:
        return int((self.rows.segments[rows] > 0).sum())

    def loss(self, model: LanguageModel, rows: IntArray, device: torch.device) -> tuple[Tensor, Mapping[str, Tensor]]:
        tokens_BT = torch.from_numpy(self.rows.tokens[rows]).to(device)
        segments_BT = torch.from_numpy(self.rows.segments[rows]).to(device)
        counted_BT = torch.from_numpy(self.rows.counted[rows]).to(device)
        logits_CV = model(tokens_BT[:, :-1], segments_BT[:, :-1], counted_BT[:, 1:])
        return -token_logprobs(logits_CV, tokens_BT[:, 1:][counted_BT[:, 1:]]).sum(), {}
