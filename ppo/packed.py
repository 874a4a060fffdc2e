"""Prompts with their responses packed into few rows, as the models of PPO read them.

Shape letters: B responses, R response tokens, L rows, T tokens of a row, C tokens of all responses.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.transfer import upload
from ppo.rollout import Rollout
from training.packing import packed_rows
from training.tokens import Sequences


@dataclass(frozen=True)
class PackedRollout:
    """A model's inputs: tokens on the device; segments and states, which are True where a token of a response is
    predicted, in the CPU's memory. `targets_C` are the tokens predicted, row by row, and `places_C` are theirs in
    [B, R].
    """

    tokens_LT: Tensor
    segments_LT: Tensor
    states_LT: Tensor
    targets_C: Tensor
    places_C: Tensor
    num_responses: int
    max_new_tokens: int

    @classmethod
    def of(cls, rollout: Rollout, device: torch.device) -> Self:
        lengths_B, responses_B = rollout.num_tokens_B, rollout.response_tokens_B
        columns = torch.arange(rollout.tokens_BT.shape[1])
        real_BT = columns < lengths_B[:, None]
        counted = (columns >= rollout.prompt_tokens_B[:, None])[real_BT]
        tokens, ends = rollout.tokens_BT[real_BT].to(torch.int32), lengths_B.cumsum(0)
        num_counted = responses_B.to(torch.int32)
        sequences = Sequences(tokens.numpy(), counted.numpy(), ends.numpy(), num_counted.numpy())
        rows = packed_rows(sequences, device)
        counted_LT, tokens_LT = torch.from_numpy(rows.counted), torch.from_numpy(rows.tokens)
        order = torch.from_numpy(rows.numbers[rows.numbers >= 0])  # the responses, row by row
        R = rollout.max_new_tokens
        numbers_BR = torch.arange(len(rollout) * R).view(-1, R)[order]
        places_C = numbers_BR[torch.arange(R) < responses_B[order, None]]
        assert len(places_C) == np.count_nonzero(rows.counted), "every prompt has a token that predicts the first one"
        return cls(
            upload(tokens_LT, device),
            torch.from_numpy(rows.segments),
            F.pad(counted_LT, (0, 1))[:, 1:],  # a token is predicted from the one before it
            upload(tokens_LT[counted_LT], device),
            upload(places_C, device),
            len(rollout),
            R,
        )

    def spread(self, flat_C: Tensor) -> Tensor:
        """[B, R] from one number per counted position, row by row; 0 elsewhere."""
        shape = self.num_responses, self.max_new_tokens
        return flat_C.new_zeros(shape).flatten().scatter(0, self.places_C, flat_C).view(shape)
