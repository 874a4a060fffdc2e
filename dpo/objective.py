"""The DPO stage's training objective: the config's loss (`dpo.losses`) over comparisons, with KTO's baseline; and the
check that policy and reference agree before the first step.

Shape letters: N responses of all comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpo.config import DPOConfig
from dpo.losses import PolicyBatch
from dpo.policy import REFERENCE, Floats, PolicyLearner, logprobs_on_all_ranks, packed_comparisons
from lm.progress import note_progress
from lm.transfer import upload
from reward.comparisons import Comparison
from reward.objective import ComparisonObjective, response_numbers
from training.config import BatchConfig
from training.engine import Engine
from training.packing import IntArray

# How far a log-ratio before the first step may be from 0: nats per square root of the response's tokens, since the
# rounding of tokens adds up like independent errors.
ROUNDING = {"fp32": 1e-4, "bf16": 0.03}


@dataclass
class Baseline:
    """z₀ of the batch that is being read, in nats (`dpo.losses.KTO`)."""

    value: float = 0.0


@dataclass(frozen=True)
class PreferenceObjective(ComparisonObjective):
    """The loss that `config` names, over comparisons.

    Each response takes one forward pass, however many pairs and labelers it has. `reference` has log π_ref of each
    comparison's responses, in nats; it is None for a loss without a reference. For a loss with a baseline, `others` are
    the comparisons' prompts with responses to other prompts (`mismatched`), and `others_reference` log π_ref of these.
    """

    comparisons: Sequence[Comparison]
    reference: Sequence[Floats] | None
    config: DPOConfig
    others: Sequence[Comparison] = ()
    others_reference: Sequence[Floats] = ()
    baseline: Baseline = field(default_factory=Baseline)

    def count(self, rows: IntArray) -> float:
        return sum(self.config.preference_loss.weight(self.comparisons[row], self.config) for row in rows)

    def prepare(self, engine: Engine[PolicyLearner], rows: IntArray, batch: BatchConfig) -> None:
        """Estimate KTO's z₀ on the whole batch, without a gradient: the mean log-ratio of its prompts with responses to
        other prompts, and at least 0. A collective call.

        It is one number for the whole batch over all ranks, so no split of the batch changes the loss.
        """
        if self.others:
            after = logprobs_on_all_ranks(engine, [self.others[row] for row in rows], batch)
            before = [self.others_reference[row] for row in rows]
            self.baseline.value = max(0.0, float((np.concatenate(after) - np.concatenate(before)).mean()))

    def loss(
        self, model: PolicyLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, config = [self.comparisons[row] for row in rows], self.config
        packed = packed_comparisons(chosen, device)
        logprobs_N, log_nu = packed.logprobs(model, packed.keys(seed, response_numbers(rows, chosen)))
        log_ratios_N = logprobs_N - self._reference(rows, device)
        batch = PolicyBatch(chosen, logprobs_N, log_ratios_N, packed.tokens_N, log_nu, self.baseline.value)
        loss, metrics = config.preference_loss.of_batch(batch, config)
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _reference(self, rows: IntArray, device: torch.device) -> Tensor | float:
        """Returns log π_ref of the rows' responses [N], or 0."""
        if self.reference is None:
            return 0.0
        return upload(torch.from_numpy(np.concatenate([self.reference[row] for row in rows])), device)


def mismatched(comparisons: Sequence[Comparison], seed: int, max_tokens: int) -> list[Comparison]:
    """Returns each comparison's prompt with the first response of one with another prompt, drawn by `seed`.

    A response is cut where prompt and response have more than `max_tokens` tokens. If more than half of the comparisons
    have the same prompt, some get another response to it.
    """
    prompts, order = (
        [_prompt(comparison) for comparison in comparisons],
        np.random.default_rng(seed).permutation(len(comparisons)),
    )
    same: dict[bytes, list[int]] = {}
    for place in order.tolist():
        same.setdefault(prompts[place].tobytes(), []).append(place)
    # With equal prompts next to each other, a turn by the largest group takes each response to another group.
    turned = [place for group in same.values() for place in group]
    other = dict(zip(turned, np.roll(turned, max(map(len, same.values())) % len(turned) or 1).tolist(), strict=True))
    pairs = []
    for place, (comparison, prompt) in enumerate(zip(comparisons, prompts, strict=True)):
        donor = comparisons[other[place]]
        response = donor.sequences[0][len(donor.sequences[0]) - donor.response_tokens[0] :][: max_tokens - len(prompt)]
        sequence = cast(Sequence[int], np.concatenate([prompt, np.asarray(response, dtype=np.int32)]))
        pairs.append(replace(comparison, sequences=(sequence,), response_tokens=(len(response),)))
    return pairs


def _prompt(comparison: Comparison) -> NDArray[np.int32]:
    sequence = np.asarray(comparison.sequences[0], dtype=np.int32)
    return sequence[: len(sequence) - comparison.response_tokens[0]]


@torch.no_grad()
def check_first_loss(
    engine: Engine[PolicyLearner], objective: PreferenceObjective, rows: IntArray, batch: BatchConfig
) -> None:
    """Check that policy and reference agree before the first step, on the first batch; a collective call.

    Every log-ratio is then 0 up to rounding, so the loss of an untied pair is log 2. A reference from another model,
    another template, dropout, counted padding or a truncated row would change that.
    Raises: ValueError naming the loss that it measured.
    """
    reference = objective.reference
    assert reference is not None, f"loss {objective.config.loss} has no reference"
    engine.model.eval()
    ratios, tokens = list[Tensor](), list[Tensor]()
    with engine.cache_weight_casts():
        shares = objective.rank_passes(rows, batch, engine.data_parallel_size, with_gradients=True)
        for mine in shares[engine.data_rank]:
            note_progress()
            taken = mine if len(mine) else rows[:1]
            packed = packed_comparisons([objective.comparisons[row] for row in taken], engine.device)
            policy_logprobs, _ = packed.logprobs(engine.model)
            if len(mine):
                ratios.append(policy_logprobs.cpu() - torch.from_numpy(np.concatenate([reference[r] for r in mine])))
                tokens.append(packed.tokens_N.cpu())
    everything = [pair for of_rank in engine.gather((ratios, tokens)) for pair in zip(*of_rank, strict=True)]
    ratios_N, tokens_N = (torch.cat(part) for part in zip(*everything, strict=True))
    refuse_wrong_reference(ratios_N, tokens_N, objective.config.beta, engine.config.resolved_precision())


def refuse_wrong_reference(log_ratios_N: Tensor, tokens_N: Tensor, beta: float, precision: str) -> None:
    """Check that log-ratios are 0 up to the rounding of this precision. Raises: ValueError if they are not."""
    error = float((log_ratios_N.abs() / tokens_N.clamp(min=1).sqrt()).mean())
    if not error <= ROUNDING[precision]:
        worst = float(log_ratios_N.abs().max())
        loss = float(torch.nn.functional.softplus(beta * log_ratios_N.abs()).mean())
        raise ValueError(
            f"before the first step, policy and reference differ by up to {worst:.3g} nats per response: DPO's loss"
            f" would start near {loss:.4f} per untied pair; log 2 = {math.log(2):.4f} was expected. {REFERENCE} in the"
            " stage's folder belongs to another model; delete it and run the same command again"
        )
