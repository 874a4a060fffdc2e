"""The equations of PPO for language models (arXiv 1707.06347, 1909.08593, 2203.02155), as functions of tensors.

They follow the order of an iteration: rewards, advantages (from a value function, or by comparing the responses to one
prompt with each other; docs/algorithms.md), importance weights, losses, the KL coefficient. Each choice that a job has
among them is a class, which holds its settings and applies its equation; `Advantage`, `Importance` and `PolicyLoss`
list these classes.

Shape letters: B responses, where each K adjacent ones answer the same prompt; G prompts; R response tokens; C counted
tokens; M teachers. Masks: True = counted.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, Tag
from torch import Tensor

from ppo.groups import MIN_SPREAD, group_advantages, group_metrics
from training.config import Config, OptimizerConfig, by_kind

NO_TERMS = torch.zeros(())  # terms [B, R] of a token's own advantage, if there are none


def token_rewards(
    scores_B: Tensor,
    logprobs_BR: Tensor,
    ref_logprobs_BR: Tensor,
    mask_BR: Tensor,
    kl_coef: float,
    turn_rewards_BR: Tensor = NO_TERMS,
) -> tuple[Tensor, Tensor]:
    """Returns rewards [B, R], and the KL [B] that they penalise, in nats.

    r_t = -kl_coef · (log π - log π_ref) at every token, plus the response's score at its last token, plus what an
    environment pays at the token itself (`turn_rewards_BR`).
    The KL is the unclamped sum of the log ratios (k1): times kl_coef, exactly what the rewards subtract.
    """
    log_ratio_BR = _counted(logprobs_BR - ref_logprobs_BR, mask_BR)
    last_BR = mask_BR & (mask_BR.cumsum(dim=1) == mask_BR.sum(dim=1, keepdim=True))
    assert bool((last_BR.sum(dim=1) == mask_BR.any(dim=1)).all()), "a score must sit on exactly one token per response"
    rewards_BR = torch.where(last_BR, scores_B[:, None], 0.0) - kl_coef * log_ratio_BR
    return rewards_BR + _counted(turn_rewards_BR, mask_BR), log_ratio_BR.sum(dim=1)


class TeacherConfig(Config):
    """A frozen model that the policy learns from on its own samples (docs/distillation.md)."""

    model_config = ConfigDict(title="Teacher")

    model: str = Field(
        pattern=r"^.+$",
        description="Model directory, .gguf file or hub id of the teacher; it has the policy's tokenizer.",
    )
    name: str = Field(default="", description="What metrics call it, if there are several; empty = its number.")
    weight: float = Field(default=1.0, gt=0, description="Weight of log π_T - log π, in units of the reward per nat.")
    kind: Literal["reward", "token"] = Field(
        default="token",
        description="Where log π_T - log π is added. `token`: to the token's own advantage, as most systems do; biased,"
        " with little variance. `reward`: to the token's reward, so that a token also answers for the tokens that"
        " follow it; unbiased (docs/distillation.md).",
    )


def teacher_terms(logprobs_BR: Tensor, teacher_logprobs_BMR: Tensor, weight_M: Tensor, mask_BR: Tensor) -> Tensor:
    """Returns Σ_M w (log π_T - log π) [B, R] at counted tokens, 0 elsewhere; higher is better.

    On samples of π its mean over a response is -Σ_M w KL(π, π_T) (arXiv 2306.08543, eq. 2).
    """
    log_ratio_BMR = teacher_logprobs_BMR - logprobs_BR[:, None]
    return _counted((weight_M[:, None] * log_ratio_BMR).sum(dim=1), mask_BR)


def generalised_advantages(
    rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns [B, R] (arXiv 1506.02438, eq. 16); the state after the last token has value 0.

    δ_t = r_t + γ V_{t+1} - V_t;  A_t = δ_t + γ λ A_{t+1};  return_t = A_t + V_t. Here t counts only the tokens of the
    mask: those of an environment between two turns are no steps, so they neither discount nor end anything.
    """
    values_BR, rewards_BR = _counted(values_BR, mask_BR), _counted(rewards_BR, mask_BR)
    advantages_BR = torch.zeros_like(rewards_BR)
    following_B = torch.zeros_like(rewards_BR[:, 0])
    next_value_B = torch.zeros_like(following_B)
    for t in reversed(range(rewards_BR.shape[1])):
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        following_B = torch.where(mask_BR[:, t], delta_B + gamma * gae_lambda * following_B, following_B)
        advantages_BR[:, t] = following_B
        next_value_B = torch.where(mask_BR[:, t], values_BR[:, t], next_value_B)
    advantages_BR = _counted(advantages_BR, mask_BR)
    return advantages_BR, _counted(advantages_BR + values_BR, mask_BR)


def whiten(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Returns (x - mean) / max(std, MIN_SPREAD) over the counted tokens, at least one, and 0 elsewhere."""
    assert bool(mask_BR.any()), f"none of {mask_BR.numel()} tokens is counted; at least one was expected"
    counted = values_BR[mask_BR]
    return torch.where(mask_BR, (values_BR - counted.mean()) / counted.std(correction=0).clamp(min=MIN_SPREAD), 0.0)


@dataclass(frozen=True)
class Estimate:
    """Advantages, what the value function learns, and metrics."""

    advantages_BR: Tensor  # 0 where not counted
    counted_BR: Tensor  # True = counted: its response is scored and, with a group baseline, its group's differ
    returns_BR: Tensor  # 0 without a value function
    metrics: dict[str, float]


class TokenAdvantage(Config):
    """What the advantages have in common that differ from token to token."""

    is_per_response: ClassVar[bool] = False  # whether all tokens of a response have the same advantage
    oversample: ClassVar[float] = 1.0

    scale: Literal["batch", "none"] = Field(
        default="batch",
        description="How advantages are scaled. `batch`: to mean 0 and standard deviation 1 over the iteration's"
        " tokens; `none`: not at all.",
    )
    samples_per_prompt: int = Field(default=1, ge=1, description="Responses sampled per prompt.")


class GAE(TokenAdvantage):
    """Compares each token with a value function, which is trained along with the policy (arXiv 1506.02438)."""

    model_config = ConfigDict(title="Advantage gae")
    algorithm: ClassVar[str] = "PPO"  # what reports call it

    kind: Literal["gae"] = Field(default="gae", description="The kind of this table.")
    value_optimizer: OptimizerConfig = Field(description="Optimizer of the value function.")
    value_clip_range: float = Field(
        default=0.2, gt=0, description="Values are clipped to ± this around the values at sampling time."
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount factor per token.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="λ of generalised advantage estimation.")

    def estimate(
        self,
        _scores_B: Tensor,
        rewards_BR: Tensor,
        values_BR: Tensor,
        mask_BR: Tensor,
        own_BR: Tensor = NO_TERMS,
    ) -> Estimate:
        """Estimate advantages from the responses' scores, their token rewards (`token_rewards`, which include the
        scores) and values. `mask_BR` is True at the tokens of scored responses. `own_BR` is added to each token's own
        advantage, before advantages are scaled.
        """
        advantages_BR, returns_BR = generalised_advantages(rewards_BR, values_BR, mask_BR, self.gamma, self.gae_lambda)
        explained = explained_variance(values_BR[mask_BR], returns_BR[mask_BR])
        advantages_BR = advantages_BR + _counted(own_BR, mask_BR)
        if self.scale == "batch":
            advantages_BR = whiten(advantages_BR, mask_BR)
        return Estimate(advantages_BR, mask_BR, returns_BR, {"value_explained": explained})


class NoBaseline(TokenAdvantage):
    """Compares a token with nothing: its advantage is its return, the sum of the rewards from it to the end
    (REINFORCE++, arXiv 2501.03262).
    """

    model_config = ConfigDict(title="Advantage none")
    algorithm: ClassVar[str] = "REINFORCE"

    kind: Literal["none"] = Field(default="none", description="The kind of this table.")

    def estimate(
        self,
        _scores_B: Tensor,
        rewards_BR: Tensor,
        _values_BR: Tensor,
        mask_BR: Tensor,
        own_BR: Tensor = NO_TERMS,
    ) -> Estimate:
        """As `GAE.estimate`, without values."""
        advantages_BR, _ = generalised_advantages(rewards_BR, torch.zeros_like(rewards_BR), mask_BR, 1.0, 1.0)
        advantages_BR = advantages_BR + _counted(own_BR, mask_BR)
        if self.scale == "batch" and bool(mask_BR.any()):
            advantages_BR = whiten(advantages_BR, mask_BR)
        return Estimate(advantages_BR, mask_BR, torch.zeros_like(rewards_BR), {})


class GroupBaseline(Config):
    """Compares a response with the others to its prompt. The response is a single action: each of its tokens has the
    same advantage, that of its summed rewards, including the KL penalty (arXiv 2402.14740).
    """

    is_per_response: ClassVar[bool] = True
    leaves_one_out: ClassVar[bool]

    samples_per_prompt: int = Field(ge=2, description="Responses sampled per prompt.")
    scale: Literal["batch", "group", "none"] = Field(
        default="batch",
        description="How advantages are scaled. `batch`: to mean 0 and standard deviation 1 over the iteration's"
        " tokens; `group`: the score is divided by the standard deviation of the scores of the prompt's responses, and"
        " a KL penalty in the reward is not scaled; `none`: not at all.",
    )
    oversample: float = Field(
        default=1.0,
        ge=1,
        description="Sample and score this many times as many prompts, and keep the first whose responses' scores"
        " differ (DAPO's dynamic sampling, arXiv 2503.14476). 1 = off.",
    )

    def estimate(
        self,
        scores_B: Tensor,
        rewards_BR: Tensor,
        _values_BR: Tensor,
        mask_BR: Tensor,
        own_BR: Tensor = NO_TERMS,
    ) -> Estimate:
        """As `GAE.estimate`, without values. A response with terms of its own counts whatever its group's scores."""
        returns_B, scored_B = torch.where(mask_BR, rewards_BR, 0.0).sum(dim=1), mask_BR.any(dim=1)
        advantages_B, counted_B = group_advantages(
            scores_B,
            returns_B,
            scored_B,
            self.samples_per_prompt,
            leave_one_out=self.leaves_one_out,
            scale="group" if self.scale == "group" else "none",
        )
        advantages_BR = advantages_B[:, None].expand_as(mask_BR)
        own_BR = _counted(own_BR, mask_BR)
        counted_BR = mask_BR & (counted_B | (own_BR != 0).any(dim=1))[:, None]
        advantages_BR = torch.where(counted_BR, advantages_BR + own_BR, 0.0)
        if self.scale == "batch" and bool(counted_BR.any()):
            advantages_BR = whiten(advantages_BR, counted_BR)
        metrics = group_metrics(scores_B, scored_B, self.samples_per_prompt)
        return Estimate(advantages_BR, counted_BR, torch.zeros_like(rewards_BR), metrics)


class GroupMean(GroupBaseline):
    """Compares a response with the mean reward of all responses to its prompt (GRPO, arXiv 2402.03300)."""

    model_config = ConfigDict(title="Advantage group_mean")
    algorithm: ClassVar[str] = "GRPO"
    leaves_one_out: ClassVar[bool] = False

    kind: Literal["group_mean"] = Field(default="group_mean", description="The kind of this table.")


class LeaveOneOut(GroupBaseline):
    """Compares a response with the mean reward of the other responses to its prompt (RLOO, arXiv 2402.14740)."""

    model_config = ConfigDict(title="Advantage leave_one_out")
    algorithm: ClassVar[str] = "RLOO"
    leaves_one_out: ClassVar[bool] = True

    kind: Literal["leave_one_out"] = Field(default="leave_one_out", description="The kind of this table.")


Advantage = Annotated[
    Annotated[GAE, Tag("gae")]
    | Annotated[GroupMean, Tag("group_mean")]
    | Annotated[LeaveOneOut, Tag("leave_one_out")]
    | Annotated[NoBaseline, Tag("none")],
    by_kind("gae", "group_mean", "leave_one_out", "none"),
]


def explained_variance(values_C: Tensor, returns_C: Tensor) -> float:
    """Returns the share of the returns' variance that the values explain: 1 is best, < 0 is worse than a constant."""
    variance = returns_C.var(correction=0)
    return float(1 - (returns_C - values_C).var(correction=0) / variance) if variance > 0 else float("nan")


def importance_weights(
    logprobs_BR: Tensor,
    behaviour_logprobs_BR: Tensor,
    mask_BR: Tensor,
    cap: float,
    floor: float = 0.0,
    beyond: Literal["cut", "drop_tokens", "drop_responses"] = "cut",
) -> tuple[Tensor, dict[str, float]]:
    """Returns w = min(π_prox / π_behave, cap) [B, R] at counted tokens, 0 elsewhere, and metrics; for decoupled PPO.

    With `beyond` "drop_tokens", w is 0 where the ratio is not in [floor, cap] (IcePop, arXiv 2510.18855, 3.2). With
    "drop_responses", w is 0 throughout a response whose geometric mean of ratios is not in [floor, cap], and as above
    in other responses: a response counts as a whole or not at all.

    Three policies: π_behave sampled the responses, π_prox is the policy before this iteration's updates, π is being
    updated. The decoupled objective (Hilton et al., arXiv 2110.00641; for language models AReaL, arXiv 2505.24298) is
    Σ π_prox/π_behave · min(ρ A, clip(ρ, 1 ± c) A) with ρ = π / π_prox: clipping is measured from the current policy,
    and the weight turns the mean over sampled tokens into one over π_prox's, E_behave[w f] = E_prox[f]. As w >= 0,
    w min(ρ A, clip(ρ) A) = min(ρ wA, clip(ρ) wA): PPO's loss with advantages times w is that objective.

    What stays uncorrected, and why:
    - A token's weight does not correct for the tokens before it. The product over a response would, but its variance
      grows with every token. So prefixes and returns remain those of a policy a few iterations old.
    - The KL penalty is that of π_prox. E_π[∇ log π] = 0, so ∇ E_π[-β log(π/π_ref)] = E_π[-β log(π/π_ref) ∇ log π]: the
      reward contains the log ratio of the policy being updated, and w takes its mean over that policy's tokens. The
      reported KL is unweighted; its expectation is KL(π_behave, π_ref) - KL(π_behave, π_prox).
    - Whitening subtracts a constant, which w makes harmless, as E_behave[w ∇ log π_prox] = 0, and divides by another.
    - The value function learns the returns as they are; the weight of its first token would not turn a return into
      π_prox's.
    - Where the cap binds, it bounds the variance and moves the gradient towards π_behave (truncated importance
      sampling, as in arXiv 1802.01561). Dropped tokens have no gradient, but still count in the loss's denominator.

    Metrics: mean and largest weight before the cap (a mean far from 1 shows that the policies are far apart), the share
    of tokens that the limits affect, and the effective sample share (Σw)² / (n Σw²) after the limits.
    """
    assert bool(mask_BR.any()), f"none of {mask_BR.numel()} tokens is counted; at least one was expected"
    ratio_C = (logprobs_BR - behaviour_logprobs_BR)[mask_BR].exp()
    weight_C = ratio_C.clamp(max=cap)
    affected_C = ratio_C > cap
    if beyond == "drop_tokens":
        affected_C = affected_C | (ratio_C < floor)
        weight_C = torch.where(affected_C, 0.0, ratio_C)
    elif beyond == "drop_responses":
        log_ratio_BR = _counted(logprobs_BR - behaviour_logprobs_BR, mask_BR)
        mean_B1 = (log_ratio_BR.sum(dim=1, keepdim=True) / mask_BR.sum(dim=1, keepdim=True).clamp(min=1)).exp()
        dropped_C = ((mean_B1 < floor) | (mean_B1 > cap)).expand_as(mask_BR)[mask_BR]
        affected_C = affected_C | dropped_C
        weight_C = torch.where(dropped_C, 0.0, weight_C)
    metrics = {
        "importance_mean": float(ratio_C.mean()),
        "importance_max": float(ratio_C.max()),
        "importance_cut_share": float(affected_C.float().mean()),
        "effective_share": float(weight_C.sum() ** 2 / (weight_C.numel() * (weight_C**2).sum().clamp(min=1e-30))),
    }
    return torch.zeros_like(logprobs_BR).masked_scatter(mask_BR, weight_C), metrics


class CutImportance(Config):
    """Larger importance weights become `cap` (truncated importance sampling)."""

    model_config = ConfigDict(title="Importance cut")
    drops: ClassVar[Literal["", "tokens", "responses"]] = ""
    floor: ClassVar[float] = 0.0

    kind: Literal["cut"] = Field(default="cut", description="The kind of this table.")
    cap: float = Field(default=2.0, ge=1, description="Upper limit of a token's importance weight π / π_behave.")


class DropTokens(Config):
    """A token whose importance weight is beyond the limits gets weight 0 (IcePop, arXiv 2510.18855)."""

    model_config = ConfigDict(title="Importance drop_tokens")
    drops: ClassVar[Literal["", "tokens", "responses"]] = "tokens"

    kind: Literal["drop_tokens"] = Field(default="drop_tokens", description="The kind of this table.")
    cap: float = Field(default=2.0, ge=1, description="Upper limit of a token's importance weight π / π_behave.")
    floor: float = Field(default=0.0, ge=0, le=1, description="Lower limit of importance weights; 0 = none.")


class DropResponses(Config):
    """A response's tokens get weight 0 if the geometric mean of their importance weights is beyond the limits; larger
    weights in other responses become `cap`.
    """

    model_config = ConfigDict(title="Importance drop_responses")
    drops: ClassVar[Literal["", "tokens", "responses"]] = "responses"

    kind: Literal["drop_responses"] = Field(default="drop_responses", description="The kind of this table.")
    cap: float = Field(default=2.0, ge=1, description="Upper limit of importance weights π / π_behave.")
    floor: float = Field(default=0.0, ge=0, le=1, description="Lower limit of a response's weights; 0 = none.")


Importance = Annotated[
    Annotated[CutImportance, Tag("cut")]
    | Annotated[DropTokens, Tag("drop_tokens")]
    | Annotated[DropResponses, Tag("drop_responses")],
    by_kind("cut", "drop_tokens", "drop_responses"),
]


def token_weights(
    counted_BR: Tensor, kind: Literal["per_token", "per_response", "constant"], max_new_tokens: int
) -> tuple[Tensor, int]:
    """Returns the weight of each token of a minibatch [B, R], and the number N of counted tokens, at least 1. The loss
    is Σ weight · loss / N over the minibatch. Uncounted tokens have weight 0, and padding changes no weight.

    With N counted tokens in B' responses, a token of a response of n tokens has this weight after dividing by N:
    "per_token" 1/N; "per_response" 1/(B' n) (arXiv 2402.03300, eq. 3); "constant" 1/(B' `max_new_tokens`) (arXiv
    2503.20783).
    """
    num_tokens_B = counted_BR.sum(dim=1, keepdim=True)
    num_tokens = max(1, int(num_tokens_B.sum()))
    share = num_tokens / max(1, int((num_tokens_B > 0).sum()))  # tokens per counted response
    weight_BR = counted_BR.float()
    if kind == "per_response":
        weight_BR = weight_BR * share / num_tokens_B.clamp(min=1)
    elif kind == "constant":
        weight_BR = weight_BR * share / max_new_tokens
    return weight_BR, num_tokens


def policy_loss(
    logprobs_BR: Tensor,
    old_logprobs_BR: Tensor,
    advantages_BR: Tensor,
    weight_BR: Tensor,
    clip_range: float,
    clip_range_high: float = 0.0,
    *,
    by_response: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns -Σ w min(ρ A, clip(ρ, 1 - c, 1 + c_high) A) over tokens of weight w > 0 (arXiv 1707.06347, eq. 7), and
    metrics summed over these tokens. Lower is better. A `clip_range_high` of 0 means `clip_range`.

    ρ = π / π_old, where π_old is the policy before the iteration's updates. With `by_response`, ρ is the geometric mean
    over the response's tokens, the same at each of them (arXiv 2507.18071). `approx_kl` is Σ (ρ - 1 - log ρ), never
    negative (k3).
    """
    mask_BR, upper = weight_BR > 0, clip_range_high or clip_range
    log_ratio_BR = _counted(logprobs_BR - old_logprobs_BR, mask_BR)
    if by_response:
        mean_B1 = log_ratio_BR.sum(dim=1, keepdim=True) / mask_BR.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BR = _counted(mean_B1, mask_BR)
    advantages_BR = _counted(advantages_BR, mask_BR)
    ratio_BR = log_ratio_BR.exp()
    clipped_BR = ratio_BR.clamp(1 - clip_range, 1 + upper)
    gain_BR = weight_BR * torch.minimum(ratio_BR * advantages_BR, clipped_BR * advantages_BR)
    with torch.no_grad():
        change_BR = ratio_BR - 1
        metrics = {
            "clip_share": (((change_BR > upper) | (-change_BR > clip_range)) & mask_BR).float().sum(),
            "approx_kl": (ratio_BR - 1 - log_ratio_BR).sum(),
            "ratio_error": change_BR.abs().sum(),
        }
    return -gain_BR.sum(), metrics


class TokenLoss(Config):
    """Clips each token's probability ratio (arXiv 1707.06347, eq. 7)."""

    model_config = ConfigDict(title="Loss token")
    is_per_response: ClassVar[bool] = False

    kind: Literal["token"] = Field(default="token", description="The kind of this table.")
    clip_range: float = Field(default=0.2, gt=0, description="The policy's probability ratio is clipped to 1 ± this.")
    clip_range_high: float = Field(
        default=0.0,
        ge=0,
        description="The ratio's upper limit is 1 + this (DAPO, arXiv 2503.14476); 0 = the same as `clip_range`.",
    )
    token_weight: Literal["per_token", "per_response", "constant"] = Field(
        default="per_token",
        description="A token's weight in a minibatch's loss. `per_token`: 1 / tokens of the minibatch; `per_response`:"
        " 1 / (responses x tokens of the response); `constant`: 1 / (responses x `max_new_tokens`).",
    )


class ResponseLoss(Config):
    """Clips each response's probability ratio, the geometric mean of its tokens' (GSPO, arXiv 2507.18071). Responses
    weigh the same.
    """

    model_config = ConfigDict(title="Loss response")
    is_per_response: ClassVar[bool] = True
    token_weight: ClassVar[Literal["per_response"]] = "per_response"

    kind: Literal["response"] = Field(default="response", description="The kind of this table.")
    clip_range: float = Field(default=0.2, gt=0, description="The response's ratio is clipped to 1 ± this.")
    clip_range_high: float = Field(
        default=0.0, ge=0, description="The ratio's upper limit is 1 + this; 0 = the same as `clip_range`."
    )


PolicyLoss = Annotated[
    Annotated[TokenLoss, Tag("token")] | Annotated[ResponseLoss, Tag("response")], by_kind("token", "response")
]


def response_kl_loss(logprobs_BR: Tensor, ref_logprob_B: Tensor, weight_B: Tensor) -> Tensor:
    """Returns Σ w ½ (log π - log π_ref)² over whole responses; log π is 0 where there is no token. Lower is better.

    On samples of π, its gradient (log π/π_ref) ∇ log π has the mean ∇ KL(π, π_ref), as E[∇ log π] = 0. The gradient of
    the log ratio itself (k1) has mean 0, and that of π_ref/π - 1 - log(π_ref/π) (k3) has mean ∇ KL(π_ref, π). Squares
    per token would ignore how a token changes the KL of later tokens (docs/algorithms.md).
    """
    return 0.5 * (weight_B * (logprobs_BR.sum(dim=1) - ref_logprob_B) ** 2).sum()


def value_loss(
    values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns ½ Σ max((V - G)², (clip(V, V_old ± c) - G)²) over counted tokens, and summed metrics. Lower is better."""
    values_BR, old_values_BR = _counted(values_BR, mask_BR), _counted(old_values_BR, mask_BR)
    returns_BR = _counted(returns_BR, mask_BR)
    clipped_BR = old_values_BR + (values_BR - old_values_BR).clamp(-clip_range, clip_range)
    error_BR = torch.maximum((values_BR - returns_BR) ** 2, (clipped_BR - returns_BR) ** 2)
    with torch.no_grad():
        metrics = {"value_error": ((values_BR - returns_BR) ** 2).sum()}
    return 0.5 * error_BR.sum(), metrics


def _counted(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Returns the values of counted tokens, and 0 elsewhere, even for NaN and infinity, which a product would keep.

    Apply it before any computation, so that gradients of uncounted tokens are never NaN either.
    """
    return torch.where(mask_BR, values_BR, 0.0)


class KLTarget(Config):
    """Moves the KL coefficient so that the KL approaches a target (arXiv 1909.08593, section 2.2)."""

    model_config = ConfigDict(title="KL target")

    nats: float = Field(default=6.0, gt=0, description="KL to aim for, in nats per response.")
    horizon: int = Field(default=10_000, ge=1, description="How slowly the coefficient adapts, in responses.")


class KLConfig(Config):
    """The penalty on the KL from the initial policy."""

    model_config = ConfigDict(title="KL")

    coef: float = Field(
        default=0.05, ge=0, description="Weight of the penalty, per nat; with a `target`, its initial value."
    )
    kind: Literal["reward", "loss"] = Field(
        default="reward",
        description="Where the penalty is added. `reward`: -log(π/π_ref) to the reward of each token. `loss`: half the"
        " square of each response's log(π/π_ref) to the loss; its gradient is the KL's on samples of the policy itself"
        " (docs/algorithms.md).",
    )
    target: KLTarget | None = Field(
        default=None, description="Adapts `coef` to reach a target KL; by default `coef` is fixed."
    )


@dataclass
class KLController:
    """The KL coefficient during a run: fixed, or moved toward a target."""

    target: KLTarget | None
    coef: float

    def update(self, kl_nats: float, num_responses: int) -> None:
        """Adapt the coefficient, unless it is fixed: coef *= 1 + clip(KL/target - 1, ±0.2) · n / horizon."""
        if self.target is None:
            return
        error = min(0.2, max(-0.2, kl_nats / self.target.nats - 1))
        self.coef *= 1 + error * num_responses / self.target.horizon
