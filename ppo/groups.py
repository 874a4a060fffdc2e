"""Baselines of groups: what the rewards of a prompt's responses make of each other (docs/algorithms.md).

Shape letters: B responses, where each K adjacent ones answer the same prompt; G prompts.
"""

from typing import Literal

import torch
from torch import Tensor

# In units of the standard deviation of the initial policy's scores. Scores of a group that differ by less than this are
# equal up to rounding: dividing by their standard deviation would turn rounding errors into advantages.
MIN_SPREAD = 1e-4


def group_advantages(
    scores_B: Tensor,
    returns_B: Tensor,
    scored_B: Tensor,
    samples_per_prompt: int,
    *,
    leave_one_out: bool,
    scale: Literal["group", "none"],
) -> tuple[Tensor, Tensor]:
    """Returns the responses' advantages [B], and which responses are counted [B]: those that have a score, in a group
    whose advantages differ.

    A return R is a response's score s minus its KL penalty, or the score alone if the KL is in the loss. The baseline
    is the mean return of the group's n scored responses (arXiv 2402.03300) or, with `leave_one_out`, of the n - 1
    others (arXiv 2402.14740), which multiplies the advantage by n / (n - 1).

    With `scale` "group", the advantage is (s - mean s) / std s - (penalty - mean penalty), where the standard deviation
    has n - 1 in its denominator. Only scores are divided, as in GRPO and GSPO. If the penalties were divided too, they
    would become full-size advantages wherever scores hardly differ, whatever the KL coefficient. Undivided, their mean
    gradient in every group is the coefficient times that of the KL, just as with the KL in the loss. Equal scores add
    nothing.

    A response without a score is left out of means, deviations and n; the advantage of a lone scored response is 0.
    """
    scored_GK = scored_B.view(-1, samples_per_prompt)
    advantages_GK, others_G1 = _centred(returns_B, scored_GK), (scored_GK.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    if scale == "group":
        scores_GK = _centred(scores_B, scored_GK)
        differ_G1 = _spread(scores_GK) >= MIN_SPREAD
        deviation_G1 = (scores_GK.square().sum(dim=1, keepdim=True) / others_G1).sqrt()
        scaled_GK = torch.where(differ_G1, scores_GK / torch.where(differ_G1, deviation_G1, 1.0), 0.0)
        advantages_GK = advantages_GK - scores_GK + scaled_GK
    counted_GK = scored_GK & (_spread(advantages_GK) >= MIN_SPREAD)
    if leave_one_out:
        advantages_GK = advantages_GK * scored_GK.sum(dim=1, keepdim=True) / others_G1
    return torch.where(counted_GK, advantages_GK, 0.0).flatten(), counted_GK.flatten()


def _centred(values_B: Tensor, scored_GK: Tensor) -> Tensor:
    """Returns values minus the mean of the scored ones in their group [G, K]; 0 where not scored."""
    values_GK = torch.where(scored_GK, values_B.view(scored_GK.shape), 0.0)
    mean_G1 = values_GK.sum(dim=1, keepdim=True) / scored_GK.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(scored_GK, values_GK - mean_G1, 0.0)


def _spread(centred_GK: Tensor) -> Tensor:
    """Returns the largest minus the smallest value of each group [G, 1]. The zeros of unscored responses lie between
    the two, so they change nothing.
    """
    return centred_GK.amax(dim=1, keepdim=True) - centred_GK.amin(dim=1, keepdim=True)


def _is_informative(scores_B: Tensor, scored_B: Tensor, samples_per_prompt: int) -> Tensor:
    """Returns which groups have scores that differ [G]."""
    return _spread(_centred(scores_B, scored_B.view(-1, samples_per_prompt)))[:, 0] >= MIN_SPREAD


def informative_groups(
    scores_B: Tensor, scored_B: Tensor, samples_per_prompt: int, num_groups: int
) -> tuple[Tensor, float]:
    """Returns the rows of the first `num_groups` groups with differing scores, and the share of such groups among all.

    If there are too few such groups, the first of the other groups are added. Groups without any score are added last,
    so at least one score is kept if there is one. Groups stay in order.
    """
    informative_G = _is_informative(scores_B, scored_B, samples_per_prompt)
    has_score_G = scored_B.view(-1, samples_per_prompt).any(dim=1)
    preferred_G = (informative_G.int() + has_score_G.int()).argsort(stable=True, descending=True)
    kept_G1 = preferred_G[:num_groups].sort().values[:, None]
    rows = (kept_G1 * samples_per_prompt + torch.arange(samples_per_prompt)).flatten()
    return rows, float(informative_G.float().mean())


def group_metrics(scores_B: Tensor, scored_B: Tensor, samples_per_prompt: int) -> dict[str, float]:
    """Returns the number of groups with at least two scored responses whose scores are all equal, and the share of all
    groups whose scores differ.
    """
    informative_G = _is_informative(scores_B, scored_B, samples_per_prompt)
    comparable_G = scored_B.view(-1, samples_per_prompt).sum(dim=1) > 1
    return {
        "zero_variance_groups": float((comparable_G & ~informative_G).sum()),
        "informative_share": float(informative_G.float().mean()),
    }
