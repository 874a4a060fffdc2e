"""The losses of direct preference optimisation, on the log-ratios of K responses to one prompt.

A response's log-ratio is log π(y|x) - log π_ref(y|x), nats: a sum over its tokens, the end token included. β times it
is the response's implicit reward (arXiv 2305.18290, eq. 5), up to a constant of the prompt that no difference has.

Shape letters: B judgments of a comparison, K responses of a comparison (padded to the largest), P pairs of responses.
Ranks count from 1 = best; 0 = padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reward.loss import accuracy_of, davidson_loss, mean_over_pairs, pairs_of, ranking_loss


def ipo_loss(log_ratios_BK: Tensor, ranks_BK: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each comparison, [B] both (arXiv 2310.12036, eq. 17, with its τ = β).

    loss = 1/C(K,2) · Σ_{i<j} (Δ_ij - t_ij)², where Δ is the difference of log-ratios, and t is 1/(2β) if i is better,
    -1/(2β) if j is, and 0 for a tie, a preference with probability ½. DPO's gradient of a pair never ends; this one
    ends at a difference of 1/(2β) nats. As in the paper, a log-ratio is a sum over the response. Some implementations
    divide it by the response's tokens, and need another β.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(log_ratios_BK, ranks_BK)
    loss_BP = (difference_BP - ahead_BP / (2 * beta)) ** 2
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def preference_loss(
    loss: str, log_ratios_BK: Tensor, tokens_BK: Tensor, ranks_BK: Tensor, beta: float, log_nu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each comparison, [B] both; lower loss is better.

    "sigmoid" is -log σ(β Δ) of each pair, DPO's eq. 7, by `ranking_loss`: the mean over the C(K,2) pairs, ties as half
    a win each. "length_normalised" is the same of log-ratios per token (Tülu 3, arXiv 2411.15124).
    With `log_nu` a tie is an outcome of its own (`davidson_loss`). `tokens_BK` counts each response's tokens.

    Raises: ValueError for another name of a loss.
    """
    if loss == "ipo":
        return ipo_loss(log_ratios_BK, ranks_BK, beta)
    if loss not in ("sigmoid", "length_normalised"):
        raise ValueError(f"loss {loss!r}; sigmoid, ipo or length_normalised was expected")
    scores_BK = implicit_rewards(loss, log_ratios_BK, tokens_BK, beta)
    if log_nu is not None:
        return davidson_loss(scores_BK, ranks_BK, log_nu.expand(len(ranks_BK)))
    return ranking_loss(scores_BK, ranks_BK)


def implicit_rewards(loss: str, log_ratios: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """β times the log-ratio, or with `length_normalised` times the log-ratio per token; higher is better."""
    return beta * (log_ratios / tokens.clamp(min=1) if loss == "length_normalised" else log_ratios)


def sft_loss(logprobs_BK: Tensor, tokens_BK: Tensor, ranks_BK: Tensor) -> Tensor:
    """-log π per token of each comparison's best response, [B] nats; the mean over several that tie for it."""
    real_BK = ranks_BK > 0
    best_B1 = ranks_BK.masked_fill(~real_BK, torch.iinfo(ranks_BK.dtype).max).min(dim=1, keepdim=True).values
    is_best_BK = real_BK & (ranks_BK == best_B1)
    per_token_BK = torch.where(is_best_BK, logprobs_BK / tokens_BK.clamp(min=1), 0.0)
    return -per_token_BK.sum(dim=1) / is_best_BK.sum(dim=1)


@dataclass(frozen=True)
class UntiedPairs:
    """The untied pairs of each comparison [B, P], to average values of their better and worse responses."""

    first_P: Tensor
    second_P: Tensor
    ahead_BP: Tensor  # 1 = the first is better, -1 = the second is, 0 = a tie or padding

    @classmethod
    def of(cls, ranks_BK: Tensor) -> "UntiedPairs":
        K = ranks_BK.shape[1]
        first_P, second_P = torch.triu_indices(K, K, offset=1, device=ranks_BK.device)
        _, ahead_BP, real_BP = pairs_of(ranks_BK, ranks_BK)
        return cls(first_P, second_P, torch.where(real_BP, ahead_BP, 0))

    @property
    def exist_B(self) -> Tensor:
        """1 where a comparison has an untied pair, else 0."""
        return (self.ahead_BP != 0).any(dim=1).float()

    def means(self, values_BK: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over a comparison's untied pairs of the better's value, and of the worse's, [B] both; 0 without."""
        first_BP, second_BP = values_BK[:, self.first_P], values_BK[:, self.second_P]
        num_B = (self.ahead_BP != 0).sum(dim=1).clamp(min=1)
        better_BP = torch.where(self.ahead_BP > 0, first_BP, second_BP) * (self.ahead_BP != 0)
        worse_BP = torch.where(self.ahead_BP > 0, second_BP, first_BP) * (self.ahead_BP != 0)
        return better_BP.sum(dim=1) / num_B, worse_BP.sum(dim=1) / num_B
