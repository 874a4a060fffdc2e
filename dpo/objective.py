"""What the training loop minimises: the preference loss over comparisons, from log-ratios to a fixed reference.

Shape letters: N responses of all comparisons, B comparisons, K responses of one, J verdicts of all comparisons.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpo.config import DPOConfig
from dpo.learner import PolicyLearner
from dpo.loss import UntiedPairs, implicit_rewards, preference_loss, sft_loss
from dpo.responses import PackedResponses
from lm.transfer import spread, upload
from reward.comparisons import Comparison
from reward.objective import MAX_RESPONSES, ComparisonObjective
from training.packing import IntArray

Floats = NDArray[np.float32]


def packed_comparisons(comparisons: Sequence[Comparison], device: torch.device) -> PackedResponses:
    """All responses of the comparisons, in order."""
    return PackedResponses.of(
        [sequence for comparison in comparisons for sequence in comparison.sequences],
        [num for comparison in comparisons for num in comparison.response_tokens],
        device,
    )


@dataclass(frozen=True)
class PreferenceObjective(ComparisonObjective):
    """The loss summed over comparisons, each the weighted mean over its labelers; batches count comparisons.

    Each response is read once, whatever the number of its pairs and labelers. `reference` has log π_ref of each
    comparison's responses, nats.
    """

    comparisons: Sequence[Comparison]
    reference: Sequence[Floats]
    config: DPOConfig

    def loss(
        self, model: PolicyLearner, rows: IntArray, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        chosen, config = [self.comparisons[row] for row in rows], self.config
        packed = packed_comparisons(chosen, device)
        # A comparison's row and the place in it name a sequence, whatever else is in the batch.
        numbers_N = np.array([r * MAX_RESPONSES + k for r, c in zip(rows, chosen, strict=True) for k in range(_num(c))])
        logprobs_N, log_nu = packed.logprobs(model, packed.keys(seed, numbers_N))
        reference_N = upload(torch.from_numpy(np.concatenate([self.reference[row] for row in rows])), device)
        lengths = torch.tensor([_num(c) for c in chosen])
        real_BK = torch.arange(int(lengths.max())) < lengths[:, None]
        logprobs_BK, log_ratios_BK, tokens_BK = (
            spread(values_N, real_BK) for values_N in (logprobs_N, logprobs_N - reference_N, packed.tokens_N)
        )
        weighted = [
            (row, verdict, verdict.weight / len(c.verdicts)) for row, c in enumerate(chosen) for verdict in c.verdicts
        ]
        rows_J, verdicts_J, shares_J = zip(*weighted, strict=True)
        share_J, K = upload(torch.tensor(shares_J), device), real_BK.shape[1]
        places_J = upload(torch.tensor(rows_J), device)
        logprobs_JK, log_ratios_JK, tokens_JK = (of_BK[places_J] for of_BK in (logprobs_BK, log_ratios_BK, tokens_BK))
        ranks_JK = upload(torch.tensor([[*v.ranks, *[0] * (K - len(v.ranks))] for v in verdicts_J]), device)
        loss_J, accuracy_J = preference_loss(config.loss, log_ratios_JK, tokens_JK, ranks_JK, config.beta, log_nu)
        loss, metrics = (share_J * loss_J).sum(), {"accuracy": (share_J * accuracy_J).sum()}
        if config.sft_coef:
            metrics["sft_loss"] = (share_J * sft_loss(logprobs_JK, tokens_JK, ranks_JK)).sum()
            loss = loss + config.sft_coef * metrics["sft_loss"]
        pairs = UntiedPairs.of(ranks_JK)
        rewards_JK = implicit_rewards(config.loss, log_ratios_JK, tokens_JK, config.beta)
        weight_J = share_J * pairs.exist_B
        for name, values_JK in (("logprob", logprobs_JK), ("reward", rewards_JK)):
            for side, mean_J in zip(("chosen", "rejected"), pairs.means(values_JK), strict=True):
                metrics[f"{side}_{name}"] = torch.stack([(weight_J * mean_J).sum(), weight_J.sum()])
        metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
        metrics["margin"][1] = weight_J.sum()
        return loss, {name: metric.detach() for name, metric in metrics.items()}


def _num(comparison: Comparison) -> int:
    return len(comparison.sequences)
