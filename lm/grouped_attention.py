"""Attention of packed rows on a CPU: sequences of like length side by side, so that no score between two of them is
computed. (A GPU has a kernel for such rows: `lm.gpu_attention`.)

Shape letters: B rows, T tokens of a row, N heads, G key-value heads, H head dim, M places of all groups, n sequences of
a group, L tokens of its longest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MOST_PADDING = 1.5  # a group's longest sequence over its shortest, at most: fewer groups for less padding


@dataclass(frozen=True)
class Group:
    """`num_sequences` of at most `longest` tokens, padded on the right. The mask [n or 1, L, L] is True where a query
    may attend, None = causal.
    """

    num_sequences: int
    longest: int
    mask: Tensor | None


@dataclass(frozen=True)
class GroupedMask:
    """Tokens attend within their sequence. Groups lie one after another, in M places.

    `places_M` has the token [B * T] at each place, any at padding, where `is_padding_M` is True. `back` [B * T] has the
    place of each token, any at the rows' padding, where `is_padding` is True.
    """

    groups: tuple[Group, ...]
    places_M: Tensor
    is_padding_M: Tensor
    back: Tensor
    is_padding: Tensor

    def with_masks(self, change: Callable[[Tensor | None, int], Tensor | None]) -> "GroupedMask":
        """`change` gets each group's mask and its number of tokens."""
        return replace(self, groups=tuple(replace(g, mask=change(g.mask, g.longest)) for g in self.groups))


def grouped_mask(segments_BT: Tensor, *, causal: bool) -> GroupedMask:
    """For rows in which runs of equal numbers are sequences; 0 = padding."""
    flat = segments_BT.flatten()
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = begins_BT.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([len(flat)]))
    is_real = flat[starts] > 0
    starts, lengths = starts[is_real], lengths[is_real]
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    groups, places, paddings, first = [], [], [], 0
    while first < len(lengths):
        L = int(lengths[first])
        n = int((lengths[first:] * MOST_PADDING >= L).sum())
        lengths_n1, offsets_L = lengths[first : first + n, None], torch.arange(L)
        is_padding_nL = offsets_L >= lengths_n1
        places.append((starts[first : first + n, None] + offsets_L.clamp(max=lengths_n1 - 1)).flatten())
        paddings.append(is_padding_nL.flatten())
        # Padding attends to padding, so that no row of the softmax is empty.
        same_nLL = is_padding_nL[:, :, None] == is_padding_nL[:, None, :]
        groups.append(Group(n, L, None if causal else same_nLL))
        first += n
    places_M, is_padding_M = torch.cat(places), torch.cat(paddings)
    back = torch.zeros_like(flat, dtype=torch.int64)
    back[places_M[~is_padding_M]] = (~is_padding_M).nonzero()[:, 0]
    return GroupedMask(tuple(groups), places_M, is_padding_M, back, flat == 0)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_in_groups(q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask: GroupedMask, attend: Attend) -> Tensor:
    """`attend` [B, N, T, H] group by group; 0 at the rows' padding."""
    B, _, T, _ = q_BNTH.shape
    sizes = [group.num_sequences * group.longest for group in mask.groups]
    parts = [
        _Rearranged.apply(x.transpose(1, 2).flatten(0, 1), mask.places_M, mask.back, mask.is_padding).split(sizes)  # type: ignore[no-untyped-call]
        for x in (q_BNTH, k_BGTH, v_BGTH)
    ]
    found = []
    for group, *qkv in zip(mask.groups, *parts, strict=True):
        q, k, v = (x.unflatten(0, (group.num_sequences, group.longest)).transpose(1, 2) for x in qkv)
        found.append(attend(q, k, v, group.mask).transpose(1, 2).flatten(0, 1))
    y = _Rearranged.apply(torch.cat(found), mask.back, mask.places_M, mask.is_padding_M)  # type: ignore[no-untyped-call]
    return y.unflatten(0, (B, T)).transpose(1, 2)


class _Rearranged(torch.autograd.Function):
    """x[places]. Where x is not padding, `back` says which place has it, so the gradient is no sum but is moved back
    alike. Padding gets none: no token that counts attends to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, back: Tensor, is_padding: Tensor) -> Tensor:
        ctx.save_for_backward(back, is_padding)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, is_padding = ctx.saved_tensors
        moved = gradient.index_select(0, back)
        moved[is_padding] = 0
        return moved, None, None, None
