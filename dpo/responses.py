"""Log-probabilities of whole responses, packed with their prompts into few rows.

Shape letters: N responses, R response tokens, L rows, T tokens of a row, C tokens of all responses, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dpo.learner import PolicyLearner
from lm.layers import sequence_keys
from lm.logprobs import token_logprobs
from lm.transfer import upload
from training.packing import IntArray, packed_rows
from training.tokens import Sequences


@dataclass(frozen=True)
class PackedResponses:
    """A policy's inputs. `targets_C` are the responses' tokens, row by row; `places_C` are theirs in [N, R].

    Segments and `predicts_LT`, True where the next token is a response's, stay in the CPU's memory, where counting does
    not wait for a GPU. `tokens_N` counts each response's tokens.
    """

    tokens_LT: Tensor
    segments_LT: Tensor
    predicts_LT: Tensor
    sequence_LT: IntArray
    targets_C: Tensor
    places_C: Tensor
    tokens_N: Tensor
    num_columns: int

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], response_tokens: Sequence[int], device: torch.device) -> Self:
        """The sequences are prompts with their responses, the last `response_tokens` of each."""
        held = Sequences.of(
            (tokens, [False] * (len(tokens) - num) + [True] * num)
            for tokens, num in zip(sequences, response_tokens, strict=True)
        )
        rows = packed_rows(held, device)
        sequence_LT, counted_LT = rows.sequence_of_tokens(), rows.counted
        owners_C = sequence_LT[counted_LT]
        tokens_N = held.num_counted.astype(np.int64)
        # A row holds a response's tokens in order, one response after another.
        starts = np.flatnonzero(np.diff(owners_C, prepend=-1))
        number_in_response_C = np.arange(len(owners_C)) - np.repeat(starts, np.diff(starts, append=len(owners_C)))
        num_columns = max(1, int(tokens_N.max(initial=0)))  # R
        return cls(
            upload(torch.from_numpy(rows.tokens[:, :-1].copy()), device),
            torch.from_numpy(rows.segments[:, :-1]),
            torch.from_numpy(counted_LT[:, 1:]),
            sequence_LT[:, :-1],
            upload(torch.from_numpy(rows.tokens[counted_LT]), device),
            upload(torch.from_numpy(owners_C * num_columns + number_in_response_C), device),
            upload(torch.from_numpy(tokens_N), device),
            num_columns,
        )

    def keys(self, seed: int, numbers_N: IntArray) -> Tensor:
        """Keys for dropout [L, T], from the number of each response in the data set."""
        return sequence_keys(seed, numbers_N[self.sequence_LT], self.tokens_LT.device)

    def logprobs(self, model: PolicyLearner, keys_LT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """log π(response | prompt), [N] nats, a sum over its tokens in fp32; and log ν, None where it is not learned.

        A response is a row of a table, so its sum has the same order of additions wherever it was packed.
        """
        logits_CV, log_nu = model(self.tokens_LT, self.segments_LT, self.predicts_LT, keys_LT)
        logprobs_C = token_logprobs(logits_CV, self.targets_C)
        N, R = len(self.tokens_N), self.num_columns
        return logprobs_C.new_zeros(N * R).scatter(0, self.places_C, logprobs_C).view(N, R).sum(dim=1), log_nu
