"""Memory of the forward passes that a learner keeps from when it measures an iteration's tokens until the first update
(`ppo.kept_passes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.inspection import Pass
from lm.native.kernels import library
from stages.planning.memory import Counts, Layout, casts_of
from stages.planning.training import activation_bytes, training_phases

KEPT_BYTES = 4 << 30  # of a rank's memory, for passes of policy and value function together


def keeps_passes(layout: Layout, mode: str, *, has_ptx: bool, shares_body: bool) -> bool:
    """Returns whether learners keep passes: on CPUs, without ZeRO, if `ppo.memory` is "fast".

    A GPU has little memory for activations of more than one micro-batch. DeepSpeed pairs each forward with the next
    backward, and recomputed blocks would keep little and save nothing. On a shared body, other passes measure than
    learn. Without Heed's kernels, autocast adds up the gradients of the policy loss and of a pretraining loss in bf16
    if both passes use one bf16 copy of a weight, so passes apart would give other bits.
    """
    is_possible = layout.zero_stage == 0 and not layout.recomputes and not shares_body
    adds_up_in_bf16 = layout.is_autocast and has_ptx and library() is None
    return is_possible and mode == "fast" and not layout.is_gpu and not adds_up_in_bf16


@dataclass(frozen=True)
class KeptPass:
    """The pass of one micro-batch through a trained model; `num_logits` as in `training_phases`, 0 for a scalar one."""

    config: ModelConfig
    counts: Counts
    layout: Layout
    of: Pass
    num_logits: int

    @property
    def num_bytes(self) -> int:
        """What the pass keeps for its backward pass, without weights in bf16, which all passes share."""
        kept = activation_bytes(self.config, self.of, self.counts, self.layout) - casts_of(self.counts, self.layout)
        return kept + self.layout.compute_bytes * self.num_logits

    def num_kept(self, num_passes: int, free_bytes: int) -> int:
        """Returns how many of the passes are kept in so much memory."""
        return min(num_passes, free_bytes // self.num_bytes)


@dataclass(frozen=True)
class KeptPasses:
    """The passes that a model keeps: `num_kept` of an update's `num_passes`."""

    each: KeptPass
    num_kept: int
    num_passes: int

    @property
    def num_bytes(self) -> int:
        """Of all, and of the weights in bf16 that they share."""
        casts = casts_of(self.each.counts, self.each.layout) if self.num_kept else 0
        return self.num_kept * self.each.num_bytes + casts

    def phases(self, of: Pass, num_logits: int, others: int) -> dict[str, Mapping[str, int]]:
        """Returns the phases of the update that takes them; a micro-batch's `of` and `num_logits` are as in other
        updates, and `others` are the bytes of passes that another model keeps meanwhile.

        In the first backward pass all are there; in the second one is gone, and there are gradients.
        """
        shape = self.each.config, self.each.counts, self.each.layout, of, num_logits
        first, second = training_phases(*shape, 1), training_phases(*shape, 2)
        kept = [max(0, self.num_kept - taken) * self.each.num_bytes + others for taken in (1, 2)]
        phases: dict[str, Mapping[str, int]] = {
            "backward, passes kept": {**first["backward"], "passes kept": kept[0]},
            "step, passes kept": {**first["step"], "passes kept": others},
        }
        if self.num_passes > 1:
            phases["second backward, passes kept"] = {**second["backward"], "passes kept": kept[1]}
        return phases
