"""Tensor parallelism of a decoder that samples: a team of ranks computes one model (arXiv 1909.08053, section 3).

Rank r of t holds the query, key and value rows of its heads, and a share of the MLP's rows:

    attention(x) = Σ_r attend(x Q_rᵀ, x K_rᵀ, x V_rᵀ) O_rᵀ + b    O_r: the columns of `out` that belong to its heads
    mlp(x)       = Σ_r activation(x U_rᵀ) D_rᵀ + b                D_r: the columns of `down` that belong to the rows U_r
    logits(x)    = [x E_0ᵀ, ..., x E_{t-1}ᵀ]                      E_r: rows of the head

Each sum is one all-reduce, and the logits are one all-gather. So all ranks have the same logits to the last bit, and
with the same random numbers they draw the same tokens. Embeddings and norms are whole on every rank. If there are more
ranks than key-value heads, several ranks hold the same key-value head.

Shape letters: M rows, F outputs of a rank's part of the head, V vocabulary.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import gcd
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lm.block import Block
from lm.config import ModelConfig, exact_div
from lm.experts import Experts, Mixture
from lm.layers import MLP
from lm.model import LanguageModel, count_parameters, language_head
from lm.source import inference_device, on_meta


@dataclass(frozen=True)
class Rendezvous:
    """Where ranks find each other to form teams of `size` consecutive ranks: a port on rank 0's machine, free or of a
    store in rank 0's process.
    """

    host: str
    port: int
    size: int
    timeout_seconds: float


def process_group(meeting: Rendezvous, rank: int, num_ranks: int, device: torch.device, name: str = "group") -> Any:
    """Returns this rank's group of `meeting.size` ranks, separate from the one that learners train in. It uses NCCL
    between GPUs, and gloo otherwise. All `num_ranks` ranks must call this at the same time. Groups of other names may
    share the port.

    Raises: RuntimeError if a peer is missing after `meeting.timeout_seconds`.
    """
    timeout, size = timedelta(seconds=meeting.timeout_seconds), meeting.size
    shared = dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host, meeting.port, num_ranks, is_master=rank == 0, timeout=timeout, multi_tenant=True
    )
    store = dist.PrefixStore(f"{name} {rank // size}", shared)  # type: ignore[attr-defined]
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank % size, size, options)
    return dist.ProcessGroupGloo(store, rank % size, size, timeout)


class Team:
    """The ranks that compute one model together. All of them make the same calls in the same order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size  # PyTorch's stubs leave out the methods of backends

    @classmethod
    def join(cls, meeting: Rendezvous) -> Self:
        """Form the teams. RANK and WORLD_SIZE identify the ranks, which must call this at the same time."""
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        exact_div(num_ranks, meeting.size, "ranks over tensor_parallel_size")
        group = process_group(meeting, rank, num_ranks, inference_device())
        return cls(group, rank % meeting.size, meeting.size)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors, in place."""
        x = x.contiguous()
        self._group.allreduce(x).wait()
        return x

    def least(self, number: int, device: torch.device) -> int:
        """Returns the smallest of the ranks' numbers."""
        found, options = torch.tensor([number], device=device), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._group.allreduce([found], options).wait()
        return int(found)

    def gather_columns(self, x_MF: Tensor, num_columns: int) -> Tensor:
        """Returns the ranks' columns side by side, [M, V] for V = `num_columns`; see `own_columns`."""
        width = -(-num_columns // self.size)
        padded_MF = F.pad(x_MF, (0, width - x_MF.shape[1])).contiguous()
        parts = padded_MF.new_empty(self.size * len(padded_MF), width)
        self._group._allgather_base(parts, padded_MF).wait()
        return parts.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)[:, :num_columns]

    def own_columns(self, num_columns: int) -> slice:
        """Returns this rank's share of columns. If they do not divide evenly, the last ranks have fewer."""
        width = -(-num_columns // self.size)
        return slice(*(min(number * width, num_columns) for number in (self.rank, self.rank + 1)))


def require_divisible(config: ModelConfig, size: int, what: str = "tensor_parallel_size") -> None:
    """Check that a team of `size` ranks can share a model. Raises: ValueError naming `what` and what does not allow it.

    A team with more ranks than key-value heads repeats each head on the same number of ranks.
    """
    if size > 1 and config.qk_norm_over != "head":
        raise ValueError(f"{what} is {size}, but the model norms the queries of all heads together; 1 was expected")
    if size > 1 and (config.num_linear_layers or config.attn_output_gate):
        raise ValueError(
            f"{what} is {size}, but the model has layers of linear_attention or an output gate; 1 was expected"
        )
    kv_heads = config.num_key_value_heads
    for name, number in (
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", size if kv_heads < size and size % kv_heads == 0 else kv_heads),
        ("intermediate_size", config.intermediate_size),
        ("shared_expert_intermediate_size", config.shared_expert_intermediate_size),
        ("num_experts", config.num_experts),
    ):
        if number % size:
            raise ValueError(f"{what} is {size}; a divisor of the model's {name} = {number} was expected")


def largest_team(config: ModelConfig, size: int, num_ranks: int) -> int:
    """Returns the largest size of teams that divides `num_ranks` and `size` and that can share the model."""
    common = gcd(size, num_ranks)
    for divisor in (number for number in range(common, 1, -1) if common % number == 0):
        with suppress(ValueError):
            require_divisible(config, divisor)
            return divisor
    return 1


def config_of_part(config: ModelConfig, size: int) -> ModelConfig:
    """Returns the shape of one rank's part of a model; `vocab_size` and all widths outside of blocks stay whole.

    Raises: as `require_divisible`.
    """
    require_divisible(config, size)
    return config.model_copy(
        update={
            "num_attention_heads": config.num_attention_heads // size,
            "num_key_value_heads": max(1, config.num_key_value_heads // size),
            "intermediate_size": config.intermediate_size // size,
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size // size,
        }
    )


class LanguageModelPart(LanguageModel):
    """One rank's part of a language model. All ranks of the team call it together, and it returns whole logits.

    `config` is the shape of the part, so a key-value cache made for it has this rank's heads.
    Raises: ValueError as `require_divisible`.
    """

    def __init__(self, whole: ModelConfig, team: Team) -> None:
        self.whole, self.team, self._rows = whole, team, team.own_columns(whole.vocab_size)
        super().__init__(config_of_part(whole, team.size))
        if not whole.tie_word_embeddings:
            self.head = language_head(whole, self._rows.stop - self._rows.start)
        # Hooks do not refer to the model: a cycle would keep its weights until Python's garbage collection.
        self.head.register_forward_hook(partial(_gathered, team, whole.vocab_size))
        for block in self.decoder.blocks:
            assert isinstance(block, Block), type(block)
            if isinstance(block.mlp, Mixture):  # all ranks have the router, and each its share of whole experts
                block.mlp.experts = Experts(whole, team.size, team.rank)
            for module in (block.attention.out, block.mlp.down if isinstance(block.mlp, MLP) else block.mlp):
                module.register_forward_hook(lambda _module, _inputs, part: team.sum(part))

    def tie(self) -> None:
        """Use this rank's rows of the embedding's matrix as the head, if the config says so. They are not a separate
        parameter.
        """
        if self.config.tie_word_embeddings:
            del self.head.weight
            self.head.weight = self.decoder.embedding.weight.detach()[self._rows]

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a copy of this rank's part of the whole model's tensor `name`, or the tensor if it is not split."""
        return cut(self.whole, self.team, name, tensor)


def _gathered(team: Team, num_columns: int, _head: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
    whole = team.gather_columns(logits.flatten(0, -2), num_columns)
    return whole.view(*logits.shape[:-1], num_columns)


def parameters_of_part(whole: ModelConfig, size: int) -> int:
    """Returns how many parameters one rank of a team holds."""
    return count_parameters([on_meta(lambda: LanguageModelPart(whole, Team(None, 0, size)))])


def cut(whole: ModelConfig, team: Team, name: str, tensor: Tensor) -> Tensor:
    """Compute `LanguageModelPart.cut`."""
    N, G, H = whole.num_attention_heads, whole.num_key_value_heads, whole.head_dim
    layer, rank, size = ".".join(name.split(".")[-3:-1]), team.rank, team.size
    if name == "head.weight":
        return tensor[team.own_columns(len(tensor))].clone()
    if layer == "attention.qkv":
        q, k, v = tensor.split([N * H, G * H, G * H])
        first, heads = rank * G // size, max(1, G // size)
        return torch.cat([q.chunk(size)[rank], *(part[first * H : (first + heads) * H] for part in (k, v))])
    if ".mlp.experts." in name or name.endswith(".attention.sinks") or layer in ("qkv.query", "qkv.key_value"):
        return tensor.chunk(size)[rank].clone()
    if layer in ("mlp.up", "shared.up"):  # SwiGLU's gate is split separately
        return torch.cat([part.chunk(size)[rank] for part in tensor.chunk(2 if whole.is_gated else 1)])
    if layer in ("attention.out", "mlp.down", "shared.down"):
        if name.endswith(".bias"):  # only one rank adds it
            return tensor if rank == 0 else torch.zeros_like(tensor)
        return tensor.chunk(size, dim=1)[rank].contiguous()
    return tensor
