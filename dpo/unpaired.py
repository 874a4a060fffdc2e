"""KTO: a policy from labels of single responses, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306).

With r = log π(y|x) - log π_ref(y|x) in nats and the baseline z₀ = max(0, KL(π ‖ π_ref)), the loss of a response is

    w_D · (1 - σ(β (r - z₀)))   if it is desirable,
    w_U · (1 - σ(β (z₀ - r)))   if it is undesirable.

z₀ is estimated before each step, without a gradient, as the mean log-ratio of the batch's prompts with responses to
other prompts. It is one number for the whole batch over all ranks, so no split of the batch changes the loss.

Shape letters: N responses of all comparisons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpo.objective import (
    DPOConfig,
    Floats,
    KTOConfig,
    PolicyLearner,
    PreferenceObjective,
    numbers_of,
    packed_comparisons,
)
from dpo.reference import logprobs_on_all_ranks
from lm.transfer import upload
from preferences.records import Ranking
from reward.comparisons import Comparison, Verdict
from reward.prepared import Split
from training.config import BatchConfig
from training.engine import Engine
from training.packing import IntArray


def labels_of(judged: Verdict | Ranking, config: KTOConfig) -> tuple[int, ...]:
    """Returns 1 for each desirable response and -1 for each undesirable one; 0 if neither a rating nor a flag decides.

    A flag of `undesirable_flags` decides before the rating does.
    """
    num = len(judged.ranks)
    is_flagged = [any(flag in config.undesirable_flags for flag in flags) for flags in judged.flags or [()] * num]
    by_rating = [1 if rating > config.desirable_above else -1 for rating in judged.ratings] or [0] * num
    return tuple(-1 if flagged else label for flagged, label in zip(is_flagged, by_rating, strict=True))


def require_labels(split: Split, config: DPOConfig) -> None:
    """Raises: ValueError unless some responses to learn from are desirable and some undesirable, and labelled responses
    to at least two prompts are learned from and held out: the baseline needs responses to other prompts.
    """
    rankings = split.train
    labels = [label for ranking in rankings for label in labels_of(ranking, config.kto)]
    if not {1, -1} <= set(labels):
        ratings = [rating for ranking in rankings for rating in ranking.ratings]
        flags = sorted({flag for ranking in rankings for response_flags in ranking.flags for flag in response_flags})
        raise ValueError(
            f'dpo.loss "kto": of {len(labels):,} responses to learn from in {config.rankings.source},'
            f" {labels.count(1):,} are desirable and {labels.count(-1):,} undesirable; both kinds were expected."
            f" Ratings are {f'{min(ratings):g} to {max(ratings):g}' if ratings else 'missing'}, flags"
            f" {', '.join(flags) or 'missing'}; dpo.kto.desirable_above is {config.kto.desirable_above:g}, and"
            f" dpo.kto.undesirable_flags {list(config.kto.undesirable_flags)}"
        )
    for name, part in (("training", split.train), ("held-out", split.heldout)):
        num_prompts = len({ranking.prompt for ranking in part if any(labels_of(ranking, config.kto))})
        if num_prompts < 2:
            raise ValueError(
                f'dpo.loss "kto": {num_prompts} of the {name} prompts of {config.rankings.source} have a response with'
                " a rating, or with a flag of dpo.kto.undesirable_flags; at least two were expected, since the baseline"
                " needs responses to other prompts"
            )


def flags_without_effect(split: Split, config: KTOConfig) -> list[str]:
    """Returns the configured flags that no response has."""
    flags = {
        flag
        for ranking in (*split.train, *split.heldout)
        for response_flags in ranking.flags
        for flag in response_flags
    }
    return [flag for flag in config.undesirable_flags if flag not in flags]


def labelled(comparisons: Sequence[Comparison], config: KTOConfig) -> list[Comparison]:
    """Returns the comparisons with the verdicts that label a response; those without any are left out."""
    kept = []
    for comparison in comparisons:
        verdicts = tuple(verdict for verdict in comparison.verdicts if any(labels_of(verdict, config)))
        if verdicts:
            kept.append(replace(comparison, verdicts=verdicts))
    return kept


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


@dataclass
class Baseline:
    """z₀ of the batch that is being read, in nats."""

    value: float = 0.0


@dataclass(frozen=True)
class UnpairedObjective(PreferenceObjective):
    """The loss of labelled responses: the mean over a verdict's labelled responses.

    `others` are the comparisons' prompts with responses to other prompts, and `others_reference` log π_ref of these.
    """

    others: Sequence[Comparison] = ()
    others_reference: Sequence[Floats] = ()
    baseline: Baseline = field(default_factory=Baseline)

    def prepare(self, engine: Engine[PolicyLearner], rows: IntArray, batch: BatchConfig) -> None:
        """Estimate z₀ on the whole batch, a collective call."""
        after = logprobs_on_all_ranks(engine, [self.others[row] for row in rows], batch)
        before = [self.others_reference[row] for row in rows]
        self.baseline.value = max(0.0, float((np.concatenate(after) - np.concatenate(before)).mean()))

    def loss(
        self, model: PolicyLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, config = [self.comparisons[row] for row in rows], self.config
        packed = packed_comparisons(chosen, device)
        logprobs_N, _ = packed.logprobs(model, packed.keys(seed, numbers_of(rows, chosen)))
        log_ratios_N = logprobs_N - self._reference(rows, device)
        desirable_N, undesirable_N = (
            upload(torch.tensor(shares), device) for shares in zip(*self._shares(chosen), strict=True)
        )
        lead_N = config.beta * (log_ratios_N - self.baseline.value)
        share_N = desirable_N + undesirable_N
        kto = config.kto
        loss = (kto.desirable_weight * desirable_N * (1 - lead_N.sigmoid())).sum()
        loss = loss + (kto.undesirable_weight * undesirable_N * (1 - (-lead_N).sigmoid())).sum()
        right_N = torch.where(lead_N > 0, desirable_N, undesirable_N * (lead_N < 0))
        metrics = {
            "accuracy": torch.stack([right_N.sum(), share_N.sum()]),
            "baseline": torch.stack([self.baseline.value * share_N.sum(), share_N.sum()]),
        }
        for side, own_N in (("chosen", desirable_N), ("rejected", undesirable_N)):
            metrics[f"{side}_logprob"] = torch.stack([(own_N * logprobs_N).sum(), own_N.sum()])
            metrics[f"{side}_reward"] = torch.stack([(own_N * config.beta * log_ratios_N).sum(), own_N.sum()])
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _shares(self, chosen: Sequence[Comparison]) -> list[tuple[float, float]]:
        """Returns how much of a comparison's weight each response has as a desirable and as an undesirable one, [N]."""
        shares = []
        for comparison in chosen:
            of_K = np.zeros((len(comparison.sequences), 2))
            for verdict in comparison.verdicts:
                labels = labels_of(verdict, self.config.kto)
                share = verdict.weight / len(comparison.verdicts) / max(1, sum(map(abs, labels)))
                for k, label in enumerate(labels):
                    if label:
                        of_K[k, 0 if label > 0 else 1] += share
            shares += [(float(desirable), float(undesirable)) for desirable, undesirable in of_K]
        return shares
