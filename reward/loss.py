"""The losses of rankings and ratings.

Shape letters: B judgments of a comparison, K responses of a comparison (padded to the largest), P pairs of responses.
Ranks count from 1 = best; 0 = padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ranking_loss(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns loss and accuracy per comparison, both [B]; a tie counts as half a win.

    loss = 1/C(K,2) · Σ_{i<j} BCE(σ(s_i - s_j), P(i beats j)), with P = 1, ½ (a tie) or 0. For a strict order this is
    InstructGPT's -1/C(K,2) · Σ log σ(s_w - s_l) (arXiv 2203.02155, eq. 1): all pairs of one prompt are one batch
    element, and each completion takes one forward pass.
    accuracy = share of the untied pairs that the scores order as the ranks do; ½ if all are tied.
    A comparison of one response has no pairs, and a loss of 0.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    target_BP = (ahead_BP + 1) / 2
    loss_BP = F.binary_cross_entropy_with_logits(difference_BP, target_BP.to(difference_BP.dtype), reduction="none")
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_loss(scores_BK: Tensor, ranks_BK: Tensor, log_nu_B: Tensor) -> tuple[Tensor, Tensor]:
    """As `ranking_loss`, but with a tie as a separate outcome (Davidson 1970, eq. 2.3).

    P(i beats j) = π_i / Z, P(tie) = ν √(π_i π_j) / Z, with π = e^s and Z = π_i + π_j + ν √(π_i π_j): a softmax over
    (d/2, log ν, -d/2) where d = s_i - s_j. ν is learned: for equal responses, it is the odds of a tie against a win of
    one of them. ν = 0 gives the Bradley-Terry model. Counting a tie as half a win for each side corresponds to the
    likelihood of a tie at ν = 1 without Z: it also pulls tied responses together, but does not model how often they
    tie.
    loss = -1/C(K,2) · Σ_{i<j} log P(observed outcome), nats.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    loss_BP = -davidson_log_likelihood(difference_BP, ahead_BP, log_nu_B[:, None])
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_log_likelihood(difference_P: Tensor, ahead_P: Tensor, log_nu: Tensor) -> Tensor:
    """Returns log P of each pair's outcome, nats. `ahead_P`: 1 = the first is better, 0 = a tie, -1 = the second is."""
    half_P = difference_P / 2
    tie_P = log_nu.expand_as(half_P)
    normaliser_P = torch.stack([half_P, tie_P, -half_P]).logsumexp(dim=0)
    return torch.where(ahead_P == 0, tie_P, half_P * ahead_P) - normaliser_P


def rating_loss(scores_BK: Tensor, ratings_BK: Tensor, scale_B: Tensor) -> Tensor:
    """Returns ½ mean_k (r̃_k - a · s̃_k)² [B]; r̃ and s̃ are ratings and scores minus their mean over the comparison's
    responses.

    r̃ does not change if a labeler rates everything a point higher, or if every response to a prompt is good. So offsets
    of labelers and prompts cancel, as they do in the ranking loss, and need not be learned. Only a scale is learned:
    a = `scale_B`, in rating points per unit of score. Ratings are NaN at padding; a judgment with only NaN has no
    ratings and a loss of 0.
    """
    real_BK = ratings_BK.isfinite()
    num_B = real_BK.sum(dim=1).clamp(min=1)
    error_BK = _centred(ratings_BK, real_BK) - scale_B[:, None] * _centred(scores_BK, real_BK)
    return 0.5 * (error_BK**2).sum(dim=1) / num_B


def _centred(values_BK: Tensor, real_BK: Tensor) -> Tensor:
    """Subtract from each row the mean over its real entries; 0 elsewhere."""
    held_BK = torch.where(real_BK, values_BK, 0.0)
    mean_B1 = held_BK.sum(dim=1, keepdim=True) / real_BK.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(real_BK, held_BK - mean_B1, 0.0)


def pairs_of(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three [B, P] for the pairs of columns i < j: s_i - s_j; 1 if i is better, 0 for a tie, -1 if j is; and a
    mask, True = neither is padding.
    """
    K = scores_BK.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=scores_BK.device)
    real_BP = (ranks_BK[:, first] > 0) & (ranks_BK[:, second] > 0)
    # Padding, even if it is NaN, must not reach the sums or the gradient.
    difference_BP = torch.where(real_BP, scores_BK[:, first] - scores_BK[:, second], 0.0)
    ahead_BP = (ranks_BK[:, second] - ranks_BK[:, first]).sign()
    return difference_BP, ahead_BP, real_BP


def mean_over_pairs(loss_BP: Tensor, real_BP: Tensor) -> Tensor:
    """Returns the mean over each comparison's pairs [B]; 0 if it has none."""
    return (loss_BP * real_BP).sum(dim=1) / real_BP.sum(dim=1).clamp(min=1)


def accuracy_of(difference_BP: Tensor, ahead_BP: Tensor, real_BP: Tensor) -> Tensor:
    untied_BP = real_BP & (ahead_BP != 0)
    right_BP = untied_BP & (difference_BP.sign() == ahead_BP)
    num_untied_B = untied_BP.sum(dim=1)
    return torch.where(num_untied_B > 0, right_BP.sum(dim=1) / num_untied_B.clamp(min=1), 0.5)
