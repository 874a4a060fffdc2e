"""A policy in training, with the tie parameter ν that its loss may also learn; and its log-probs of whole responses,
which are packed with their prompts into few rows.

Shape letters: N responses, R response tokens, L rows, T tokens of a row, C tokens of all responses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from lm.layers import sequence_keys
from lm.model import LanguageModel
from lm.source import ModelSource
from lm.transfer import upload
from reward.objective import NETWORK
from training.packing import IntArray, packed_rows
from training.tokens import Sequences


class PolicyLearner(nn.Module):
    """Log-probs and log ν from one forward pass, so that every backend gathers what it shards.

    log ν = start + hidden_size · θ, where θ starts at 0, as in a reward model's training (`reward.objective`).
    """

    def __init__(self, network: LanguageModel, starting_log_nu: float | None) -> None:
        super().__init__()
        self.network, self.starting_log_nu = network, starting_log_nu
        self.nu = nn.Parameter(torch.zeros(1)) if starting_log_nu is not None else None

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the policy's config says so (`lm.source.load`)."""
        self.network.tie()

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor,
        selected_BT: Tensor,
        sequence_keys_BT: Tensor | None,
        targets_C: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the targets' log-probs [C], nats, at the positions where `selected_BT` is True, and log ν, None if it
        is not learned.
        """
        logprobs_C = self.network(tokens_BT, segments_BT, selected_BT, sequence_keys_BT, targets_C)
        if self.nu is None or self.starting_log_nu is None:
            return logprobs_C, None
        return logprobs_C, self.starting_log_nu + self.network.config.hidden_size * self.nu.float()


@dataclass(frozen=True)
class PolicySource:
    """A source of a `PolicyLearner`, from a source of its network."""

    network: ModelSource[LanguageModel]
    starting_log_nu: float | None = None

    def build(self) -> PolicyLearner:
        return PolicyLearner(self.network.build(), self.starting_log_nu)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.starting_log_nu is not None:
            yield "nu", torch.zeros(1)
        for name, tensor in self.network.tensors():
            yield NETWORK + name, tensor


@dataclass(frozen=True)
class PackedResponses:
    """A policy's inputs. `targets_C` are the responses' tokens, row by row; `places_C` are their indices in a flat
    [N, R].

    `predicts_LT` is True where the next token is a response's. It and the segments stay in CPU memory, where counting
    does not wait for a GPU. `tokens_N` counts each response's tokens.
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
        """Pack sequences. Each is a prompt with its response, which is the last `response_tokens` of it."""
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
        """Returns dropout keys [L, T], derived from each response's number in the data set."""
        return sequence_keys(seed, numbers_N[self.sequence_LT], self.tokens_LT.device)

    def logprobs(self, model: PolicyLearner, keys_LT: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns log π(response | prompt), [N] nats, summed over its tokens in fp32; and log ν, None if not learned.

        Log-probs are first arranged as [N, R], so a response's sum adds in the same order wherever it was packed.
        """
        logprobs_C, log_nu = model(self.tokens_LT, self.segments_LT, self.predicts_LT, keys_LT, self.targets_C)
        N, R = len(self.tokens_N), self.num_columns
        return logprobs_C.new_zeros(N * R).scatter(0, self.places_C, logprobs_C).view(N, R).sum(dim=1), log_nu
