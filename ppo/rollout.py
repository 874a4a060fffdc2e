"""Sampled responses, the batches that updates learn from, and how both are split among ranks and passes.

Shape letters: B responses, T tokens of prompt and response, R response tokens, C counted positions, L layers, K experts
per token.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from cluster.remote import Arguments, Handle, Kept, Pending, Result
from files.hashes import derive_seed
from files.rows import Row
from lm.config import exact_div
from lm.experts import no_route
from lm.tokenizer import Messages
from training.config import BatchConfig
from training.packing import pass_tokens, split_passes

ALIGNMENT = 16  # bytes, of the tensors in a buffer


def sample_seed(seed: int, batch: int, place: int) -> int:
    """Returns the seed that draws a response: the one at this place of the batch of responses with this number."""
    return derive_seed(seed, "ppo", "sample", batch, place)


@dataclass(frozen=True)
class Asked:
    """What a reward that reads texts, or an environment, knows of prompts: their messages and, if it reads them, fields
    of their rows of data. Both are empty if the reward reads tokens.
    """

    conversations: Sequence[Messages] = ()
    rows: Sequence[Row] = ()

    def of(self, numbers: Sequence[int]) -> "Asked":
        """Returns these prompts, by their row numbers. They are sent with each rollout, instead of all the job's."""
        conversations = [self.conversations[number] for number in numbers] if self.conversations else []
        return Asked(conversations, [self.rows[number] for number in numbers] if self.rows else [])


@dataclass(frozen=True)
class Share:
    """One rank's share of a batch: its row numbers, pass after pass, and how many rows each pass has."""

    rows: Tensor
    pass_sizes: tuple[int, ...]

    @classmethod
    def of(cls, passes: Sequence[Sequence[int]]) -> Self:
        rows = [row for own in passes for row in own]
        return cls(torch.tensor(rows, dtype=torch.int64), tuple(map(len, passes)))

    def and_then(self, rows: Tensor, other: "Share") -> "Share":
        """Append the passes of `other`, whose row numbers index into `rows` of the batch."""
        return Share(torch.cat([self.rows, rows[other.rows]]), self.pass_sizes + other.pass_sizes)


def shares_of(num_tokens_B: Tensor, num_ranks: int, batch: BatchConfig, *, with_gradients: bool) -> list[Share]:
    """Split sequences of these lengths among ranks and passes (`training.packing`)."""
    units = [[length] for length in num_tokens_B.tolist()]
    ranks = split_passes(units, num_ranks, pass_tokens(batch, units, with_gradients=with_gradients))
    return [Share.of(passes) for passes in ranks]


def shares_by_update(
    num_tokens_B: Tensor, num_ranks: int, batch: BatchConfig, minibatches: Sequence[Tensor]
) -> list[Share]:
    """Split a batch among ranks into the same passes as the updates on `minibatches` will use. With the same shapes,
    the same policy gives the same log-probs to the last bit.
    """
    shares = [Share.of([]) for _ in range(num_ranks)]
    for rows in minibatches:
        own = shares_of(num_tokens_B[rows], num_ranks, batch, with_gradients=True)
        shares = [share.and_then(rows, other) for share, other in zip(shares, own, strict=True)]
    return shares


def start_on_groups(
    ranks: Handle[Kept], method: Callable[[Kept, *Arguments], Result], args_of_share: Sequence[tuple[*Arguments]]
) -> Pending[list[Result]]:
    """Start a method on each share of a batch. If there are P times as many ranks as shares, each P adjacent ranks are
    a sequence group: all get the same share, and the result is that of the first.
    """
    size = exact_div(ranks.num_ranks, len(args_of_share), "ranks over shares of a batch")
    found = ranks.start_split(method, [args for args in args_of_share for _ in range(size)])
    return lambda: found()[::size]


def pass_slices(pass_sizes: Sequence[int]) -> list[slice]:
    """Returns the rows of each pass. A pass without rows gets the first row of all, which is not counted."""
    ends = list(itertools.accumulate(pass_sizes))
    return [slice(end - size, end) if size else slice(0, 1) for end, size in zip(ends, pass_sizes, strict=True)]


class Sendable:
    """A dataclass with tensors that is pickled as one buffer with only its own rows.

    Torch would pickle each tensor separately, at a tenth of a millisecond per tensor, and a view with its whole
    storage.
    """

    def __reduce__(self) -> tuple[Callable[..., "Sendable"], tuple[object, ...]]:
        tensors = list[Tensor]()
        described = _described(self, tensors)
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        buffer = torch.empty(sum(sizes) + ALIGNMENT, dtype=torch.uint8)  # never empty: that has no view of another type
        for part, tensor in zip(buffer.split([*sizes, ALIGNMENT]), tensors, strict=False):
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return _received, (described, buffer.numpy())


@dataclass(frozen=True)
class Described:
    """A `Sendable` without its tensors: its class, and (dtype, shape) in place of each tensor."""

    kind: type[Sendable]
    values: tuple[Any, ...]


def _described(sent: Sendable, tensors: list[Tensor]) -> Described:
    values = list[Any]()
    for field in fields(sent):  # type: ignore[arg-type]
        value = getattr(sent, field.name)
        if isinstance(value, Tensor):
            tensors.append(value)
            value = (value.dtype, tuple(value.shape))
        values.append(_described(value, tensors) if isinstance(value, Sendable) else value)
    return Described(type(sent), tuple(values))


def _received(described: Described, buffer: NDArray[np.uint8]) -> Sendable:
    """Restore what `Sendable.__reduce__` described. The tensors share a copy, because the buffer may be read-only."""
    whole, start = torch.from_numpy(buffer.copy()), 0

    def restored(of: Described) -> Sendable:
        nonlocal start
        values = list[Any]()
        for value in of.values:
            if isinstance(value, tuple) and value and isinstance(value[0], torch.dtype):
                dtype, shape = value
                num_bytes = math.prod(shape) * dtype.itemsize
                value = whole[start : start + num_bytes].view(dtype).view(shape)
                start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            values.append(restored(value) if isinstance(value, Described) else value)
        return of.kind(*values)

    return restored(described)


# Why an environment gave a response no score (`Rollout.failure_B`); the first entry stands for none.
FAILURES = ("", "deadline", "error", "invalid", "too_long", "no_score")


@dataclass(frozen=True)
class Dialogue:
    """Who wrote the tokens of a response, and what each earned; `failure` is one of FAILURES."""

    written: Sequence[bool]  # True = by the policy
    rewards: Sequence[float]
    failure: str = ""


@dataclass(frozen=True)
class Rollout(Sendable):
    """Prompts with one sampled response each, padded on the right. R is `max_new_tokens`, the same in every batch.

    In a conversation with an environment (`ppo.environments`), a response is everything after the prompt: the policy's
    turns and, between them, the environment's tokens, which are read but never learned from.
    """

    tokens_BT: Tensor
    prompt_rows_B: Tensor  # row of each prompt in the job's prompts
    prompt_tokens_B: Tensor  # length of each prompt
    response_tokens_B: Tensor  # length of each response, with its end token and the environment's tokens
    finished_B: Tensor  # True = the response ends with the end token, and no room ran out
    sampled_by_BR: Tensor  # digest of the weights that sampled the token (`lm.samplers.engine.whole_digest`); 0 = none
    behaviour_logprobs_BR: Tensor  # nats, from the sampler, at the sampling temperature; 0 where not written
    written_BR: Tensor  # True = a token of the response that the policy wrote
    turn_rewards_BR: Tensor  # from the environment, at the last token of the turn that earned them; higher is better
    failure_B: Tensor  # why the environment gave the response no score: a place in FAILURES; 0 = it gave one
    environment_seconds_B: Tensor  # time for which the rank that sampled the response waited for environments
    routes_BTLK: Tensor  # the sampler's experts for each token (`lm.experts`); L = K = 0 if none are replayed

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
        sampled_by: Sequence[Sequence[int]] = (),
        dialogues: Sequence["Dialogue"] = (),
        environment_seconds: float = 0.0,
        routes: Sequence[Tensor] = (),
    ) -> Self:
        """`sampled_by` has the digest of the weights that sampled each token. `dialogues` says which tokens the policy
        wrote and what they earned; without it, it wrote all of them. `routes` are those of each row's first tokens,
        [tokens, L, K].
        """
        num_rows, width = len(prompts), max(len(prompt) for prompt in prompts) + max_new_tokens
        tokens_BT = torch.full((num_rows, width), pad_id)
        logprobs_BR, rewards_BR = torch.zeros(num_rows, max_new_tokens), torch.zeros(num_rows, max_new_tokens)
        written_BR, failure_B = torch.zeros(num_rows, max_new_tokens, dtype=torch.bool), torch.zeros(num_rows)
        sampled_by_BR = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64)
        for row, (prompt, response, token_logprobs) in enumerate(zip(prompts, responses, logprobs, strict=True)):
            tokens_BT[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            logprobs_BR[row, : len(response)] = torch.tensor(token_logprobs)
            written_BR[row, : len(response)] = True
        for row, digests in enumerate(sampled_by):
            sampled_by_BR[row, : len(digests)] = torch.tensor(digests)
        for row, dialogue in enumerate(dialogues):
            written_BR[row, : len(dialogue.written)] = torch.tensor(dialogue.written)
            rewards_BR[row, : len(dialogue.rewards)] = torch.tensor(dialogue.rewards)
            failure_B[row] = FAILURES.index(dialogue.failure)
        return cls(
            tokens_BT,
            torch.tensor(list(prompt_rows)),
            torch.tensor([len(prompt) for prompt in prompts]),
            torch.tensor([len(response) for response in responses]),
            torch.tensor(list(finished)),
            sampled_by_BR,
            logprobs_BR,
            written_BR,
            rewards_BR,
            failure_B.to(torch.int64),
            torch.full((num_rows,), environment_seconds),
            joined_routes(routes, width) if routes else torch.zeros(num_rows, width, 0, 0, dtype=torch.uint8),
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rollouts in order; rows are padded to the width of the widest part."""
        width = max(part.tokens_BT.shape[1] for part in parts)
        # Padding is never read, so any token works.
        padded = [
            replace(
                part,
                tokens_BT=F.pad(part.tokens_BT, (0, width - part.tokens_BT.shape[1])),
                routes_BTLK=joined_routes([*part.routes_BTLK], width),
            )
            for part in parts
        ]
        return cls(*(torch.cat([getattr(part, field.name) for part in padded]) for field in fields(cls)))

    def sampled_with(self, digest: int) -> Self:
        """Returns the rollout with the digest of the weights that sampled all that the policy wrote."""
        return replace(self, sampled_by_BR=torch.where(self.written_BR, digest, 0))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name, as a safetensors file takes them."""
        return {field.name: getattr(self, field.name).contiguous() for field in fields(self)}

    def as_bytes(self) -> bytes:
        """Returns the rollout as a safetensors file."""
        return save(self.tensors())

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
        """True = a token that the policy wrote, the only tokens that count anywhere."""
        return self.written_BR

    @property
    def num_written_B(self) -> Tensor:
        """Number of tokens of each response that the policy wrote."""
        return self.written_BR.sum(dim=1)

    @property
    def num_turns_B(self) -> Tensor:
        """Number of the policy's turns in each response."""
        return (self.written_BR & ~F.pad(self.written_BR, (1, -1))).sum(dim=1)

    @property
    def response_BR(self) -> Tensor:
        """The response's tokens, the environment's among them; arbitrary beyond its length."""
        columns_BR = self.prompt_tokens_B[:, None] + torch.arange(self.max_new_tokens)[None]
        return self.tokens_BT.gather(1, columns_BR.clamp(max=self.tokens_BT.shape[1] - 1))

    def turns(self, row: int) -> list[tuple[bool, list[int]]]:
        """Returns a response as runs of tokens by the same writer, in order; True = the policy's."""
        length, tokens = int(self.response_tokens_B[row]), self.response_BR[row].tolist()
        runs = itertools.groupby(range(length), key=self.written_BR[row].tolist().__getitem__)
        return [(is_written, [tokens[place] for place in run]) for is_written, run in runs]

    def token_lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns prompts and responses as lists of tokens, without padding."""
        lengths = zip(self.prompt_tokens_B.tolist(), self.response_tokens_B.tolist(), strict=True)
        rows = [
            (row[:prompt], row[prompt : prompt + response])
            for row, (prompt, response) in zip(self.tokens_BT.tolist(), lengths, strict=True)
        ]
        return [prompt for prompt, _ in rows], [response for _, response in rows]

    def rows(self, index: slice | Tensor) -> Self:
        """Select responses. T shrinks to the longest of them; R stays."""
        part = replace(self, **_rows_of(self, index))
        width = int((part.prompt_tokens_B + part.response_tokens_B).max())
        return replace(part, tokens_BT=part.tokens_BT[:, :width], routes_BTLK=part.routes_BTLK[:, :width])

    @property
    def without_routes(self) -> Self:
        """The same responses, for a model whose routers choose."""
        return replace(self, routes_BTLK=self.routes_BTLK[:, :, :0])

    @property
    def num_tokens_B(self) -> Tensor:
        """Number of tokens of each prompt with its response."""
        return self.prompt_tokens_B + self.response_tokens_B

    def shares(self, shares: Sequence[Share]) -> list[Self]:
        """Returns each rank's part."""
        ordered = self.rows(torch.cat([share.rows for share in shares]))
        return [ordered.rows(own) for own in pass_slices([len(share.rows) for share in shares])]

    def parts(self, pass_sizes: Sequence[int]) -> list[Self]:
        """Returns the responses of each pass, which are adjacent. A pass without any reads the first, uncounted."""
        return [self.rows(part) for part in pass_slices(pass_sizes)]


def joined_routes(routes: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Returns the routes of several rows, [rows, num_tokens, L, K], given those of each one's first tokens."""
    first = routes[0]
    whole = torch.full((len(routes), num_tokens, *first.shape[1:]), no_route(first), dtype=first.dtype)
    for row, own in enumerate(routes):
        whole[row, : len(own)] = own
    return whole


@dataclass(frozen=True)
class Drawn(Sendable):
    """What the test of draws (`lm.samplers.draws`) needs to know about rows of a rollout in addition to the rows."""

    rows_B: Tensor  # numbers of the rows in the whole rollout
    before_BR: Tensor  # response tokens of the previous row in the whole rollout; -1 = none
    num_rows: int  # in the whole rollout

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        tokens_BR = torch.where(rollout.response_mask_BR, rollout.response_BR, -1).to(torch.int32)
        before_BR = torch.cat([torch.full_like(tokens_BR[:1], -1), tokens_BR[:-1]])
        return cls(torch.arange(len(rollout)), before_BR, len(rollout))

    def rows(self, index: slice | Tensor) -> Self:
        return replace(self, **_rows_of(self, index))

    def parts(self, pass_sizes: Sequence[int]) -> list[Self | None]:
        """Returns the rows of each pass; None for a pass without any."""
        return [
            self.rows(part) if size else None for part, size in zip(pass_slices(pass_sizes), pass_sizes, strict=True)
        ]


@dataclass(frozen=True)
class PPOBatch:
    """What an iteration's updates learn from."""

    rollout: Rollout
    scores_B: Tensor  # before scaling and penalties, higher is better; NaN where scoring failed
    kl_B: Tensor  # KL from the reference, nats
    rewards_BR: Tensor  # the scaled score at the last token, minus the KL penalty at each, plus teachers' terms
    scored_BR: Tensor  # True = a token of a response with a score
    counted_BR: Tensor  # True = counted in the policy loss
    logprobs_BR: Tensor  # nats, under the policy before the updates, at the sampling temperature
    ref_logprobs_BR: Tensor
    teacher_BR: Tensor  # Σ over teachers of weight · (log π_T - log π), in units of the reward; 0 without teachers
    advantages_BR: Tensor  # times the importance weights where the rollout is stale
    values_BR: Tensor  # 0 where there is no value function
    returns_BR: Tensor  # likewise

    def rows(self, index: slice | Tensor) -> Self:
        """Select responses, as for a minibatch."""
        return replace(self, **_rows_of(self, index), rollout=self.rollout.rows(index))


@dataclass(frozen=True)
class ResponseKL(Sendable):
    """The KL term of a policy's loss: half the square of log π/π_ref, times `weight_B`, which includes the
    coefficient.
    """

    ref_logprob_B: Tensor  # nats of the whole response, under the reference
    weight_B: Tensor

    def rows(self, index: slice | Tensor) -> Self:
        return replace(self, **_rows_of(self, index))


@dataclass(frozen=True)
class PolicyBatch(Sendable):
    """What a policy update learns from. `num_tokens` counts the minibatch's response tokens over all ranks."""

    rollout: Rollout
    logprobs_BR: Tensor  # nats, under the policy before this iteration's updates, at the sampling temperature
    advantages_BR: Tensor  # times the importance weights where the rollout is stale
    weight_BR: Tensor  # of a token's loss (`ppo.algorithm.token_weights`); 0 = not counted
    num_tokens: int
    ptx_rows: Tensor  # this rank's row numbers in the pretraining stream
    num_ptx_rows: int  # on all ranks
    pass_sizes: tuple[int, ...] = ()  # in a rank's share: number of responses in each pass
    kl: ResponseKL | None = None  # if the KL penalty is in the loss

    def rows(self, index: slice | Tensor, ptx: slice) -> Self:
        return replace(
            self,
            **_rows_of(self, index),
            rollout=self.rollout.rows(index),
            ptx_rows=self.ptx_rows[ptx],
            kl=self.kl and self.kl.rows(index),
        )

    def shares(self, shares: Sequence[Share]) -> list[Self]:
        """Returns each rank's part. Raises ValueError if the pretraining rows do not divide evenly."""
        ptx = equal_slices(len(self.ptx_rows), len(shares))
        ordered = self.rows(torch.cat([share.rows for share in shares]), slice(None))
        places = pass_slices([len(share.rows) for share in shares])
        return [
            replace(ordered.rows(rows, own), pass_sizes=share.pass_sizes)
            for rows, own, share in zip(places, ptx, shares, strict=True)
        ]

    def parts(self) -> list[Self]:
        """Returns a rank's passes; its pretraining rows are spread evenly over them."""
        size = -(-len(self.ptx_rows) // len(self.pass_sizes))
        parts = [
            self.rows(own, slice(number * size, (number + 1) * size))
            for number, own in enumerate(pass_slices(self.pass_sizes))
        ]
        return [part if n else part._without_counts() for part, n in zip(parts, self.pass_sizes, strict=True)]

    def _without_counts(self) -> Self:
        """Returns the same pass with all weights 0, for a pass that has no responses of its own."""
        kl = self.kl and replace(self.kl, weight_B=torch.zeros_like(self.kl.weight_B))
        return replace(self, weight_BR=torch.zeros_like(self.weight_BR), kl=kl)


@dataclass(frozen=True)
class ValueBatch(Sendable):
    """What a value update learns from. `num_tokens` is as in `PolicyBatch`."""

    rollout: Rollout
    values_BR: Tensor  # from the value function before this iteration's updates
    returns_BR: Tensor
    mask_BR: Tensor  # True = counted in the loss
    num_tokens: int
    pass_sizes: tuple[int, ...] = ()  # in a rank's share: number of responses in each pass

    def rows(self, index: slice | Tensor) -> Self:
        return replace(self, **_rows_of(self, index), rollout=self.rollout.rows(index))

    def shares(self, shares: Sequence[Share]) -> list[Self]:
        """Returns each rank's part."""
        ordered = self.rows(torch.cat([share.rows for share in shares]))
        places = pass_slices([len(share.rows) for share in shares])
        return [
            replace(ordered.rows(rows), pass_sizes=share.pass_sizes) for rows, share in zip(places, shares, strict=True)
        ]

    def parts(self) -> list[Self]:
        """Returns a rank's passes."""
        parts = map(self.rows, pass_slices(self.pass_sizes))
        nothing = torch.zeros_like(self.mask_BR[:1])  # for a pass that has no responses of its own
        return [part if n else replace(part, mask_BR=nothing) for part, n in zip(parts, self.pass_sizes, strict=True)]


def equal_slices(num_rows: int, num_ranks: int) -> list[slice]:
    """Returns one slice of the rows per rank. Raises ValueError if the rows do not divide evenly."""
    share = exact_div(num_rows, num_ranks, "rows of a PPO batch over workers")
    return [slice(rank * share, (rank + 1) * share) for rank in range(num_ranks)]


def joined(parts: Pending[list[Tensor]], shares: Sequence[Share]) -> Pending[Tensor]:
    """Join the ranks' rows, once they have arrived, into one tensor in the order of the whole batch."""
    order_B = torch.cat([share.rows for share in shares]).argsort()
    return lambda: torch.cat(parts())[order_B]


def _rows_of(batch: object, index: slice | Tensor) -> dict[str, Any]:
    """Select rows of a dataclass's [B, ...] tensors, recognised by a shape suffix that starts with B."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}  # type: ignore[arg-type]
    return {name: value[index] for name, value in values.items() if isinstance(value, Tensor) and "_B" in name}
