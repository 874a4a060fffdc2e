"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): P ranks read the same rows, each a slice of their tokens.

Everything but attention works on single tokens, so a rank computes it for its T/P tokens only. Around attention, one
all-to-all exchanges slices for heads: each rank then has all T tokens of N/P query heads, and masks stay whole. A
second one exchanges the outputs back. Where there are fewer key-value heads than ranks, several ranks get a copy of the
same one. The last slice is padded; attention never sees the padding.

A model's few numbers per token (log-probs, scores) are summed into whole tensors on all ranks of the group, so losses
need not know about slices: every rank computes the same loss.

Shape letters: B rows, T tokens, N heads, G key-value heads, H head dim, C selected positions, P ranks of the group,
t = ⌈T/P⌉ tokens and E heads of one rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lm.config import ModelConfig
from lm.sampling import token_logprobs
from lm.transfer import upload


def check_sequence_split(config: ModelConfig, size: int) -> None:
    """Check that sequences of a model of this shape can be split among `size` ranks. Raises: ValueError if not."""
    if size == 1:
        return
    N, G = config.num_attention_heads, config.num_key_value_heads
    if config.kind != "decoder":
        raise ValueError(f"engine.sequence_parallel_size is {size}, but the model is an {config.kind}; 1 was expected")
    if config.num_linear_layers:
        raise ValueError(
            f"engine.sequence_parallel_size is {size}, but the model has layers of linear_attention, which read whole"
            " rows; 1 was expected"
        )
    if N % size or (G % size and size % G):
        raise ValueError(
            f"engine.sequence_parallel_size is {size}, but the model has {N} attention heads and {G} key-value heads; a"
            " divisor of the former that divides, or is a multiple of, the latter was expected"
        )


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share rows, including this one. The process group orders ranks by their slices."""

    processes: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.processes.size()

    def columns(self, num_tokens: int) -> range:
        """Returns the columns of this rank's slice; those from `num_tokens` on are padding."""
        width = -(-num_tokens // self.size)
        return range(self.processes.rank() * width, (self.processes.rank() + 1) * width)

    def slice_of(self, x_BT: Tensor, padding: int = 0) -> Tensor:
        """Returns this rank's slice [B, t, ...] of numbers per token; `padding` beyond the row."""
        columns = self.columns(x_BT.shape[1])
        own = x_BT[:, columns.start : columns.stop]
        return F.pad(own, (0, 0) * (x_BT.dim() - 2) + (0, len(columns) - own.shape[1]), value=padding)

    def own(self, selected_BT: Tensor) -> Tensor:
        """Returns the indices, into the selected positions [C], of those in this rank's slice."""
        columns = self.columns(selected_BT.shape[1])
        is_own_BT = torch.zeros_like(selected_BT)
        is_own_BT[:, columns.start : columns.stop] = True
        return is_own_BT[selected_BT].nonzero()[:, 0]

    def whole(self, own: Tensor, selected_BT: Tensor) -> Tensor:
        """Returns the values [C, ...] of all selected positions on every rank, given those of this rank's slice."""
        places = upload(self.own(selected_BT), own.device)
        whole: Tensor = _Whole.apply(own, places, int(selected_BT.sum()), self)  # type: ignore[no-untyped-call]
        return whole

    def logprobs(
        self, own_logits_CV: Tensor, targets_C: Tensor, selected_BT: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Returns `token_logprobs` of all selected positions [C], given the logits of this rank's slice."""
        places = upload(self.own(selected_BT), targets_C.device)
        return self.whole(token_logprobs(own_logits_CV, targets_C[places], temperature), selected_BT)


class _Whole(torch.autograd.Function):
    """Sums over the group: each rank contributes a tensor with its own values at their places, and 0 elsewhere.

    Every rank computes the same loss from the result, and the engine averages gradients over all ranks, P of them per
    group. A value has a gradient on its own rank only, hence the factor P.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, num_selected: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = group.size
        whole = own.new_zeros(num_selected, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(whole, group=group.processes)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.size * gradient.index_select(0, places), None, None, None


@dataclass(frozen=True)
class SplitRows:
    """Sliced rows of `num_tokens` tokens, with the two exchanges that a model's blocks make around attention."""

    group: SequenceGroup
    num_tokens: int

    def to_heads(self, q_BNtH: Tensor, k_BGtH: Tensor, v_BGtH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices of all heads for all tokens of this rank's heads: q [B, N/P, T, H], k and v likewise."""
        P, G = self.group.size, k_BGtH.shape[1]
        if G < P:
            k_BGtH, v_BGtH = (part.repeat_interleave(P // G, dim=1) for part in (k_BGtH, v_BGtH))
        parts = [part.transpose(1, 2).unflatten(2, (P, -1)) for part in (q_BNtH, k_BGtH, v_BGtH)]
        sent = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4)  # [P, B, t, E, H], by receiver
        whole = self._exchange(sent).transpose(0, 1).flatten(1, 2)[:, : self.num_tokens]  # [B, T, E, H]
        q, k, v = whole.split([part.shape[3] for part in parts], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def own_heads(self, x_N: Tensor) -> Tensor:
        """Returns the numbers of this rank's heads, [E], of one number per query head."""
        return x_N.chunk(self.group.size)[self.group.processes.rank()]

    def to_tokens(self, y_BETH: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads for its slice of all heads, [B, N, t, H]."""
        P, y_BTEH = self.group.size, y_BETH.transpose(1, 2)
        padded = F.pad(y_BTEH, (0, 0, 0, 0, 0, -self.num_tokens % P))
        sent = padded.unflatten(1, (P, -1)).transpose(0, 1)  # [P, B, t, E, H], by receiver
        return self._exchange(sent).permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _exchange(self, sent: Tensor) -> Tensor:
        received: Tensor = _Exchange.apply(sent, self.group)  # type: ignore[no-untyped-call]
        return received


class _Exchange(torch.autograd.Function):
    """An all-to-all: entry i of the first dimension goes to rank i, which stores it at its sender's index. Gradients
    return by the same exchange.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=group.processes)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradient, ctx.group), None
