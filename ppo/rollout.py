"""Sampled responses and the batches made of them.

Shape letters: B responses, T tokens of prompt and response, R response tokens, C counted positions.
"""

import itertools
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
from training.config import BatchConfig
from training.packing import pass_tokens, split_passes


@dataclass(frozen=True)
class Share:
    """What one rank reads of a batch: which rows, pass after pass, and how many in each pass."""

    rows: Tensor
    pass_sizes: tuple[int, ...]

    @classmethod
    def of(cls, passes: Sequence[Sequence[int]]) -> Self:
        rows = [row for own in passes for row in own]
        return cls(torch.tensor(rows, dtype=torch.int64), tuple(map(len, passes)))

    def and_then(self, rows: Tensor, other: "Share") -> "Share":
        """These passes, then the other's, whose rows count within `rows` of the batch."""
        return Share(torch.cat([self.rows, rows[other.rows]]), self.pass_sizes + other.pass_sizes)


def shares_of(num_tokens_B: Tensor, num_ranks: int, batch: BatchConfig, *, with_gradients: bool) -> list[Share]:
    """How ranks share sequences of these lengths (`training.packing`)."""
    units = [[length] for length in num_tokens_B.tolist()]
    ranks = split_passes(units, num_ranks, pass_tokens(batch, units, with_gradients=with_gradients))
    return [Share.of(passes) for passes in ranks]


def shares_by_update(
    num_tokens_B: Tensor, num_ranks: int, batch: BatchConfig, minibatches: Sequence[Tensor]
) -> list[Share]:
    """How ranks share a batch so that its rows are in the passes in which the updates on `minibatches` will read them:
    in the same shapes, so the same policy gives the same log-probabilities to the last bit.
    """
    found = [Share.of([]) for _ in range(num_ranks)]
    for rows in minibatches:
        own = shares_of(num_tokens_B[rows], num_ranks, batch, with_gradients=True)
        found = [share.and_then(rows, other) for share, other in zip(found, own, strict=True)]
    return found


def pass_slices(pass_sizes: Sequence[int]) -> list[slice]:
    """The rows of each pass; the first one of all for a pass that has none."""
    ends = list(itertools.accumulate(pass_sizes))
    return [slice(end - size, end) if size else slice(0, 1) for end, size in zip(ends, pass_sizes, strict=True)]


@dataclass(frozen=True)
class Rollout:
    """Prompts with one sampled response each, padded on the right. R is the longest response allowed, of any batch."""

    tokens_BT: Tensor
    prompt_rows_B: Tensor  # which of the job's prompts each is
    prompt_tokens_B: Tensor  # length of each prompt
    response_tokens_B: Tensor  # length of each response, its end token included
    finished_B: Tensor  # True = the response ends with the end token
    sampled_by_B: Tensor  # digest of the weights that sampled the response (`lm.samplers.sent_weights.whole_digest`)
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
        sampled_by: int = 0,
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
            torch.full((len(prompts),), sampled_by, dtype=torch.int64),
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
            torch.cat([part.sampled_by_B for part in parts]),
            torch.cat([part.behaviour_logprobs_BR for part in parts]),
        )

    def as_bytes(self) -> bytes:
        """A safetensors file."""
        return save({field.name: getattr(self, field.name).contiguous() for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        tensors = load_file(path)
        tensors.setdefault("sampled_by_B", torch.zeros_like(tensors["prompt_rows_B"]))  # files from before it
        return cls(**tensors)

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

    def token_lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses without padding."""
        lengths = zip(self.prompt_tokens_B.tolist(), self.response_tokens_B.tolist(), strict=True)
        rows = [
            (row[:prompt], row[prompt : prompt + response])
            for row, (prompt, response) in zip(self.tokens_BT.tolist(), lengths, strict=True)
        ]
        return [prompt for prompt, _ in rows], [response for _, response in rows]

    def rows(self, index: slice | Tensor) -> Self:
        """Select responses. Rows are cut to the longest of them; R stays."""
        part = replace(self, **_rows_of(self, index))
        width = int((part.prompt_tokens_B + part.response_tokens_B).max())
        return replace(part, tokens_BT=part.tokens_BT[:, :width].clone())

    @property
    def num_tokens_B(self) -> Tensor:
        """Tokens of each prompt and response."""
        return self.prompt_tokens_B + self.response_tokens_B

    def shares(self, num_ranks: int) -> list[Self]:
        """Each rank's contiguous part. Raises ValueError where the rows do not divide."""
        return [self.rows(rows) for rows in equal_slices(len(self), num_ranks)]

    def parts(self, pass_sizes: Sequence[int]) -> list[Self]:
        """The responses of each pass, which are neighbours; a pass without any reads the first, for nothing."""
        return [self.rows(part) for part in pass_slices(pass_sizes)]


@dataclass(frozen=True)
class PPOBatch:
    """What an iteration's updates learn from."""

    rollout: Rollout
    scores_B: Tensor  # of the reward; NaN where it failed
    kl_B: Tensor  # nats from the reference
    rewards_BR: Tensor  # the scaled score at the last token, less the KL penalty at each
    scored_BR: Tensor  # True = a token of a response with a score
    counted_BR: Tensor  # True = counted in the policy loss
    logprobs_BR: Tensor  # nats, under the policy before the updates, at the sampling temperature
    ref_logprobs_BR: Tensor
    advantages_BR: Tensor  # times the importance weights where the rollout is stale
    values_BR: Tensor  # 0 where there is no value function
    returns_BR: Tensor  # likewise

    def rows(self, index: slice | Tensor) -> Self:
        """Select responses, as for a minibatch."""
        return replace(self, **_rows_of(self, index), rollout=self.rollout.rows(index))


@dataclass(frozen=True)
class ResponseKL:
    """The KL term of a policy's loss: `weight_B`, coefficient included, times half the square of log π/π_ref."""

    ref_logprob_B: Tensor  # nats of the whole response, under the reference
    weight_B: Tensor

    def rows(self, index: slice | Tensor) -> Self:
        return replace(self, **_rows_of(self, index))


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy update learns from; `num_tokens` counts the response tokens of the minibatch, on all ranks."""

    rollout: Rollout
    logprobs_BR: Tensor  # nats, under the policy before this iteration's updates, at the sampling temperature
    advantages_BR: Tensor  # times the importance weights where the rollout is stale
    weight_BR: Tensor  # of a token's loss (`ppo.algorithm.token_weights`); 0 = not counted
    num_tokens: int
    ptx_rows: Tensor  # this rank's row numbers in the pretraining stream
    num_ptx_rows: int  # on all ranks
    pass_sizes: tuple[int, ...] = ()  # of a rank's share, responses in each pass
    kl: ResponseKL | None = None  # where the KL penalty is in the loss

    def rows(self, index: slice | Tensor, ptx: slice) -> Self:
        return replace(
            self,
            **_rows_of(self, index),
            rollout=self.rollout.rows(index),
            ptx_rows=self.ptx_rows[ptx].clone(),
            kl=self.kl and self.kl.rows(index),
        )

    def shares(self, shares: Sequence[Share]) -> list[Self]:
        """The ranks' parts. Raises ValueError where the pretraining rows do not divide."""
        ptx = equal_slices(len(self.ptx_rows), len(shares))
        return [
            replace(self.rows(share.rows, own), pass_sizes=share.pass_sizes)
            for share, own in zip(shares, ptx, strict=True)
        ]

    def parts(self) -> list[Self]:
        """A rank's passes, over which its pretraining rows are spread evenly."""
        size = -(-len(self.ptx_rows) // len(self.pass_sizes))
        parts = [
            self.rows(own, slice(number * size, (number + 1) * size))
            for number, own in enumerate(pass_slices(self.pass_sizes))
        ]
        return [part if n else part._without_counts() for part, n in zip(parts, self.pass_sizes, strict=True)]

    def _without_counts(self) -> Self:
        """Of the responses that a pass without any reads, nothing counts."""
        kl = self.kl and replace(self.kl, weight_B=torch.zeros_like(self.kl.weight_B))
        return replace(self, weight_BR=torch.zeros_like(self.weight_BR), kl=kl)


@dataclass(frozen=True)
class ValueBatch:
    """What a value update learns from; `num_tokens` as for the policy."""

    rollout: Rollout
    values_BR: Tensor  # from the value function before this iteration's updates
    returns_BR: Tensor
    mask_BR: Tensor  # True = counted in the loss
    num_tokens: int
    pass_sizes: tuple[int, ...] = ()  # of a rank's share, responses in each pass

    def rows(self, index: slice | Tensor) -> Self:
        return replace(self, **_rows_of(self, index), rollout=self.rollout.rows(index))

    def shares(self, shares: Sequence[Share]) -> list[Self]:
        """The ranks' parts."""
        return [replace(self.rows(share.rows), pass_sizes=share.pass_sizes) for share in shares]

    def parts(self) -> list[Self]:
        """A rank's passes."""
        parts = map(self.rows, pass_slices(self.pass_sizes))
        nothing = torch.zeros_like(self.mask_BR[:1])  # counts of the responses that a pass without any reads
        return [part if n else replace(part, mask_BR=nothing) for part, n in zip(parts, self.pass_sizes, strict=True)]


def equal_slices(num_rows: int, num_ranks: int) -> list[slice]:
    """One slice of the rows for each rank. Raises ValueError where they do not divide."""
    share = exact_div(num_rows, num_ranks, "rows of a PPO batch over workers")
    return [slice(rank * share, (rank + 1) * share) for rank in range(num_ranks)]


def joined(parts: Pending[list[Tensor]], shares: Sequence[Share]) -> Pending[Tensor]:
    """The ranks' rows as one tensor in the order of the whole batch, once they are there."""
    order_B = torch.cat([share.rows for share in shares]).argsort()
    return lambda: torch.cat(parts())[order_B]


def _rows_of(batch: object, index: slice | Tensor) -> dict[str, Any]:
    """Selected rows of a dataclass's [B, ...] tensors, which are those whose name's suffix starts with B.

    Returns copies: pickling a view sends the whole tensor behind it.
    """
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}  # type: ignore[arg-type]
    return {name: value[index].clone() for name, value in values.items() if isinstance(value, Tensor) and "_B" in name}
