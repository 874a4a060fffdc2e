"""The equations of PPO for language models (arXiv 1707.06347, 1909.08593, 2203.02155), as functions of tensors.

Shape letters: B responses, R response tokens. Masks: True = counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo.config import PPOConfig


def token_rewards(
    scores_B: Tensor, logprobs_BR: Tensor, ref_logprobs_BR: Tensor, mask_BR: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Rewards [B, R] and the KL [B] that they penalise, in nats.

    r_t = -kl_coef · (log π - log π_ref) at every token, plus the response's score at its last token.
    KL is the unclamped sum of the log ratios (k1), exactly what the reward subtracts.
    """
    log_ratio_BR = (logprobs_BR - ref_logprobs_BR) * mask_BR
    last_BR = mask_BR & (mask_BR.cumsum(dim=1) == mask_BR.sum(dim=1, keepdim=True))
    assert bool((last_BR.sum(dim=1) == mask_BR.any(dim=1)).all()), "a score must sit on exactly one token a response"
    rewards_BR = torch.where(last_BR, scores_B[:, None], 0.0) - kl_coef * log_ratio_BR
    return rewards_BR, log_ratio_BR.sum(dim=1)


def generalised_advantages(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] (arXiv 1506.02438, eq. 16); the state after the last token has value 0.

    δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γ λ A_{t+1};  return_t = A_t + V_t.
    """
    values_BR = values_BR * mask_BR
    advantages_BR = torch.zeros_like(rewards_BR)
    following_B = torch.zeros_like(rewards_BR[:, 0])
    next_value_B = torch.zeros_like(following_B)
    for t in reversed(range(rewards_BR.shape[1])):
        delta_B = rewards_BR[:, t] + discount * next_value_B - values_BR[:, t]
        following_B = (delta_B + discount * gae_lambda * following_B) * mask_BR[:, t]
        advantages_BR[:, t] = following_B
        next_value_B = values_BR[:, t]
    return advantages_BR, (advantages_BR + values_BR) * mask_BR


def whiten(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """(x - mean) / std over the counted tokens; 0 elsewhere."""
    counted = values_BR[mask_BR]
    return torch.where(mask_BR, (values_BR - counted.mean()) / (counted.std(correction=0) + 1e-8), 0.0)


def policy_loss(
    logprobs_BR: Tensor, old_logprobs_BR: Tensor, advantages_BR: Tensor, mask_BR: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-Σ min(ρ A, clip(ρ, 1 ± c) A) over counted tokens (arXiv 1707.06347, eq. 7), and sums to report. Lower is better.

    ρ = π / π_old. `approx_kl` is Σ (ρ - 1 - log ρ), never negative (k3).
    """
    log_ratio_BR = (logprobs_BR - old_logprobs_BR) * mask_BR
    ratio_BR = log_ratio_BR.exp()
    clipped_BR = ratio_BR.clamp(1 - clip, 1 + clip)
    gain_BR = torch.minimum(ratio_BR * advantages_BR, clipped_BR * advantages_BR)
    with torch.no_grad():
        figures = {
            "clip_share": ((ratio_BR - 1).abs() > clip)[mask_BR].float().sum(),
            "approx_kl": (ratio_BR - 1 - log_ratio_BR).sum(),
            "ratio_error": ((ratio_BR - 1).abs() * mask_BR).sum(),
        }
    return -(gain_BR * mask_BR).sum(), figures


def value_loss(
    values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """½ Σ max((V - G)², (clip(V, V_old ± c) - G)²) over counted tokens, and sums to report. Lower is better."""
    clipped_BR = old_values_BR + (values_BR - old_values_BR).clamp(-clip, clip)
    error_BR = torch.maximum((values_BR - returns_BR) ** 2, (clipped_BR - returns_BR) ** 2)
    with torch.no_grad():
        figures = {"value_error": (((values_BR - returns_BR) ** 2) * mask_BR).sum()}
    return 0.5 * (error_BR * mask_BR).sum(), figures


@dataclass
class KLController:
    """The KL coefficient: fixed, or moved toward a target (arXiv 1909.08593, section 2.2)."""

    config: PPOConfig
    coef: float

    def update(self, kl_nats: float, num_responses: int) -> None:
        """coef *= 1 + clip(KL/target - 1, ±0.2) · n / horizon."""
        if self.config.kl_control == "fixed":
            return
        error = min(0.2, max(-0.2, kl_nats / self.config.kl_target_nats - 1))
        self.coef *= 1 + error * num_responses / self.config.kl_horizon
