"""Sampled responses and the batches made of them.

Shape letters: B responses, T tokens of prompt and response, R response tokens, C counted positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

from cluster.remote import Pending
from lm.config import exact_div
from lm.upload import spread


@dataclass(frozen=True)
class Rollout:
    """Prompts with one sampled response each, padded on the right. R is the longest response allowed, of any batch."""

    tokens_BT: Tensor
    prompt_rows_B: Tensor  # which of the job's prompts each is
    prompt_tokens_B: Tensor  # length of each prompt
    response_tokens_B: Tensor  # length of each response, its end token included
    finished_B: Tensor  # True = the response ends with the end token
    behaviour_logprobs_BR: Tensor  # nats, as the policy sampled them, at its temperature; 0 where there is no token

    @classmethod
    def of(
        cls,
        prompt_rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        finished: Sequence[bool],
        logprobs: Sequence[Sequence[float]],
        *,
        max_new_tokens: int,
        pad_id: int,
    ) -> Self:
        width = max(len(prompt) for prompt in prompts) + max_new_tokens
        tokens_BT = torch.full((len(prompts), width), pad_id)
        logprobs_BR = torch.zeros(len(prompts), max_new_tokens)
        for row, (prompt, response, found) in enumerate(zip(prompts, responses, logprobs, strict=True)):
            tokens_BT[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            logprobs_BR[row, : len(response)] = torch.tensor(found)
        return cls(
            tokens_BT,
            torch.tensor(list(prompt_rows)),
            torch.tensor([len(prompt) for prompt in prompts]),
            torch.tensor([len(response) for response in responses]),
            torch.tensor(list(finished)),
            logprobs_BR,
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rollouts in order; rows are padded to the width of the widest part."""
        width = max(part.tokens_BT.shape[1] for part in parts)
        # Padding is never read, so any token works.
        tokens = [F.pad(part.tokens_BT, (0, width - part.tokens_BT.shape[1])) for part in parts]
        return cls(
            torch.cat(tokens),
            torch.cat([part.prompt_rows_B for part in parts]),
            torch.cat([part.prompt_tokens_B for part in parts]),
            torch.cat([part.response_tokens_B for part in parts]),
            torch.cat([part.finished_B for part in parts]),
            torch.cat([part.behaviour_logprobs_BR for part in parts]),
        )

    def as_bytes(self) -> bytes:
        """A safetensors file."""
        return save({field.name: getattr(self, field.name).contiguous() for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**load_file(path))

    def __len__(self) -> int:
        return len(self.tokens_BT)

    @property
    def max_new_tokens(self) -> int:
        return self.behaviour_logprobs_BR.shape[1]

    @property
    def response_mask_BR(self) -> Tensor:
        """True = a token of the response."""
        return torch.arange(self.max_new_tokens)[None] < self.response_tokens_B[:, None]

    @property
    def response_BR(self) -> Tensor:
        """The response's tokens; anything where the mask is False."""
        columns_BR = self.prompt_tokens_B[:, None] + torch.arange(self.max_new_tokens)[None]
        return self.tokens_BT.gather(1, columns_BR.clamp(max=self.tokens_BT.shape[1] - 1))

    @property
    def states_BT(self) -> Tensor:
        """True = the position predicts a token of the response; each row has as many as its response has tokens."""
        columns_T = torch.arange(self.tokens_BT.shape[1])[None]
        first_B1 = self.prompt_tokens_B[:, None] - 1
        return (columns_T >= first_B1) & (columns_T < first_B1 + self.response_tokens_B[:, None])

    def token_lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses without padding."""
        lengths = zip(self.prompt_tokens_B.tolist(), self.response_tokens_B.tolist(), strict=True)
        rows = [
            (row[:prompt], row[prompt : prompt + response])
            for row, (prompt, response) in zip(self.tokens_BT.tolist(), lengths, strict=True)
        ]
        return [prompt for prompt, _ in rows], [response for _, response in rows]

    def spread(self, flat_C: Tensor) -> Tensor:
        """[B, R] from one number per counted position, row by row; 0 elsewhere."""
        return spread(flat_C, self.response_mask_BR)

    def rows(self, index: slice | Tensor) -> Self:
        """Select responses. Rows are cut to the longest of them; R stays."""
        part = replace(self, **_rows_of(self, index))
        width = int((part.prompt_tokens_B + part.response_tokens_B).max())
        return replace(part, tokens_BT=part.tokens_BT[:, :width].clone())

    def shares(self, num_ranks: int) -> list[Self]:
        """Each rank's contiguous part. Raises ValueError where the rows do not divide."""
        return [self.rows(rows) for rows in equal_slices(len(self), num_ranks)]


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy update learns from; `num_tokens` counts the response tokens of the minibatch, on all ranks."""

    rollout: Rollout
    logprobs_BR: Tensor  # nats, under the policy before this iteration's updates, at the sampling temperature
    advantages_BR: Tensor  # times the importance weights where the rollout is stale
    mask_BR: Tensor  # True = counted in the loss
    num_tokens: int
    ptx_rows: Tensor  # this rank's row numbers in the pretraining stream
    num_ptx_rows: int  # on all ranks

    def rows(self, index: slice, ptx: slice) -> Self:
        return replace(
            self, **_rows_of(self, index), rollout=self.rollout.rows(index), ptx_rows=self.ptx_rows[ptx].clone()
        )

    def shares(self, num_ranks: int) -> list[Self]:
        """As `Rollout.shares`; the pretraining rows are split likewise."""
        rows, ptx = equal_slices(len(self.rollout), num_ranks), equal_slices(len(self.ptx_rows), num_ranks)
        return [self.rows(*share) for share in zip(rows, ptx, strict=True)]


@dataclass(frozen=True)
class ValueBatch:
    """What a value update learns from; `num_tokens` as for the policy."""

    rollout: Rollout
    values_BR: Tensor  # from the value function before this iteration's updates
    returns_BR: Tensor
    mask_BR: Tensor  # True = counted in the loss
    num_tokens: int

    def rows(self, index: slice) -> Self:
        return replace(self, **_rows_of(self, index), rollout=self.rollout.rows(index))

    def shares(self, num_ranks: int) -> list[Self]:
        """As `Rollout.shares`."""
        return [self.rows(rows) for rows in equal_slices(len(self.rollout), num_ranks)]


def equal_slices(num_rows: int, num_ranks: int) -> list[slice]:
    """One slice of the rows for each rank. Raises ValueError where they do not divide."""
    share = exact_div(num_rows, num_ranks, "rows of a PPO batch over workers")
    return [slice(rank * share, (rank + 1) * share) for rank in range(num_ranks)]


def joined(parts: Pending[list[Tensor]]) -> Pending[Tensor]:
    """The ranks' rows as one tensor, once they are there."""
    return lambda: torch.cat(parts())


def _rows_of(batch: object, index: slice | Tensor) -> dict[str, Any]:
    """Selected rows of a dataclass's [B, ...] tensors, which are those whose name's suffix starts with B.

    Returns copies: pickling a view sends the whole tensor behind it.
    """
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}  # type: ignore[arg-type]
    return {name: value[index].clone() for name, value in values.items() if isinstance(value, Tensor) and "_B" in name}
