"""The losses of rankings and ratings.

Shape letters: B judgments of a comparison, K responses of a comparison (padded to the largest), P pairs of responses.
Ranks count from 1 = best; 0 = padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ranking_loss(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each comparison, [B] both; a tie counts as half a win.

    loss = 1/C(K,2) · Σ_{i<j} BCE(σ(s_i - s_j), P(i beats j)), with P = 1, ½ (a tie) or 0. For a strict order this is
    InstructGPT's -1/C(K,2) · Σ log σ(s_w - s_l) (arXiv 2203.02155, eq. 1): all pairs of one prompt are one batch
    element, and each completion takes one forward pass.
    accuracy = share of the untied pairs that the scores order like the ranks; ½ where all are tied.
    A comparison of one response has no pairs, and a loss of 0.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    target_BP = (ahead_BP + 1) / 2
    loss_BP = F.binary_cross_entropy_with_logits(difference_BP, target_BP.to(difference_BP.dtype), reduction="none")
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_loss(scores_BK: Tensor, ranks_BK: Tensor, log_nu_B: Tensor) -> tuple[Tensor, Tensor]:
    """As `ranking_loss`, with a tie as an outcome of its own (Davidson 1970, eq. 2.3).

    P(i beats j) = π_i / Z, P(tie) = ν √(π_i π_j) / Z, with π = e^s and Z = π_i + π_j + ν √(π_i π_j): a softmax over
    (d/2, log ν, -d/2) where d = s_i - s_j. ν, the odds of a tie of equals against a win of one of them, is learned. At
    ν = 0 this is Bradley and Terry's model. Half a win for each side is what is left of a tie's likelihood at ν = 1
    without Z: it pulls equals together as this does, and says nothing of how often they tie.
    loss = -1/C(K,2) · Σ_{i<j} log P(what was seen), nats.
    """
    difference_BP, ahead_BP, real_BP = pairs_of(scores_BK, ranks_BK)
    loss_BP = -davidson_log_likelihood(difference_BP, ahead_BP, log_nu_B[:, None])
    return mean_over_pairs(loss_BP, real_BP), accuracy_of(difference_BP, ahead_BP, real_BP)


def davidson_log_likelihood(difference_P: Tensor, ahead_P: Tensor, log_nu: Tensor) -> Tensor:
    """log P of each pair's outcome, nats. `ahead`: 1 = the first is better, 0 = a tie, -1 = the second is."""
    half_P = difference_P / 2
    tie_P = log_nu.expand_as(half_P)
    normaliser_P = torch.stack([half_P, tie_P, -half_P]).logsumexp(dim=0)
    return torch.where(ahead_P == 0, tie_P, half_P * ahead_P) - normaliser_P


def rating_loss(scores_BK: Tensor, ratings_BK: Tensor, scale_B: Tensor) -> Tensor:
    """½ mean_k (r̃_k - a · s̃_k)², [B]; r̃ and s̃ are ratings and scores less their mean over the comparison's responses.

    A labeler who rates everything a point higher, and a prompt to which every response is good, change no r̃: offsets of
    labelers and of prompts leave together, as they leave the ranking loss, and none has to be learned. What is left to
    learn is one scale, a = `scale`, in ratings a unit of score. Ratings are NaN at padding; a judgment of NaN alone has
    no ratings and a loss of 0.
    """
    real_BK = ratings_BK.isfinite()
    num_B = real_BK.sum(dim=1).clamp(min=1)
    error_BK = _centred(ratings_BK, real_BK) - scale_B[:, None] * _centred(scores_BK, real_BK)
    return 0.5 * (error_BK**2).sum(dim=1) / num_B


def _centred(values_BK: Tensor, real_BK: Tensor) -> Tensor:
    """Less the mean of each row's real places; 0 elsewhere."""
    held_BK = torch.where(real_BK, values_BK, 0.0)
    mean_B1 = held_BK.sum(dim=1, keepdim=True) / real_BK.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(real_BK, held_BK - mean_B1, 0.0)


def pairs_of(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every pair i < j of places [B, P]: s_i - s_j, the sign of i's lead (0 = a tie), and True = no padding."""
    K = scores_BK.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=scores_BK.device)
    real_BP = (ranks_BK[:, first] > 0) & (ranks_BK[:, second] > 0)
    # Whatever is computed of padding stays out of the sums and of the gradient, be it NaN.
    difference_BP = torch.where(real_BP, scores_BK[:, first] - scores_BK[:, second], 0.0)
    ahead_BP = (ranks_BK[:, second] - ranks_BK[:, first]).sign()
    return difference_BP, ahead_BP, real_BP


def mean_over_pairs(loss_BP: Tensor, real_BP: Tensor) -> Tensor:
    """Over each comparison's pairs; 0 where it has none."""
    return (loss_BP * real_BP).sum(dim=1) / real_BP.sum(dim=1).clamp(min=1)


def accuracy_of(difference_BP: Tensor, ahead_BP: Tensor, real_BP: Tensor) -> Tensor:
    untied_BP = real_BP & (ahead_BP != 0)
    right_BP = untied_BP & (difference_BP.sign() == ahead_BP)
    num_untied_B = untied_BP.sum(dim=1)
    return torch.where(num_untied_B > 0, right_BP.sum(dim=1) / num_untied_B.clamp(min=1), 0.5)
