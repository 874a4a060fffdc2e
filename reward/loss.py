"""The ranking loss. Shape letters: B comparisons, K responses of a comparison (padded to the largest)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def ranking_loss(scores_BK: Tensor, ranks_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of each comparison, [B] both; `ranks` from 1 = best, 0 = padding.

    loss = 1/C(K,2) · Σ_{i<j} BCE(σ(s_i - s_j), P(i beats j)), with P = 1, ½ (a tie) or 0. For a strict order this is
    InstructGPT's -1/C(K,2) · Σ log σ(s_w - s_l) (arXiv 2203.02155, eq. 1): all pairs of one prompt are one batch
    element, and each completion takes one forward pass.
    accuracy = share of the untied pairs that the scores order like the ranks; ½ where all are tied.
    """
    K = scores_BK.shape[1]
    first, second = torch.triu_indices(K, K, offset=1, device=scores_BK.device)
    difference_BP = scores_BK[:, first] - scores_BK[:, second]
    ahead_BP = (ranks_BK[:, second] - ranks_BK[:, first]).sign()  # 1 = the first is better, 0 = a tie
    real_BP = (ranks_BK[:, first] > 0) & (ranks_BK[:, second] > 0)
    target_BP = (ahead_BP + 1) / 2
    loss_BP = F.binary_cross_entropy_with_logits(difference_BP, target_BP.to(difference_BP.dtype), reduction="none")
    loss_B = (loss_BP * real_BP).sum(dim=1) / real_BP.sum(dim=1)
    untied_BP = real_BP & (ahead_BP != 0)
    right_BP = untied_BP & (difference_BP.sign() == ahead_BP)
    num_untied_B = untied_BP.sum(dim=1)
    accuracy_B = torch.where(num_untied_B > 0, right_BP.sum(dim=1) / num_untied_B.clamp(min=1), 0.5)
    return loss_B, accuracy_B
