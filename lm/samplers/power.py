"""What the test of draws would find: the evidence to expect from faulty samplers, computed at the tested contexts.

Shape letters: C tested tokens, V vocabulary, T tokens of a text, N bets.
"""

import math
from collections.abc import Collection, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.samplers.draws import ALARM, Draws, Evidence, Fault

# Evidence varies by about the root of twice its expectation, so 19 of 20 seeds reach the alarm with this expectation.
ENOUGH = 2 * ALARM
MOST_TIMES = 1000  # a fault that needs so many times as many draws is one that no bet is on


def power_row(fault: str, expected: Evidence, num_draws: int) -> str:
    """Returns a line: the fault, the nats of evidence to expect of so many draws, and whether they would find it."""
    gains_N = (expected.sums_3N[0] / (ENOUGH - expected.shares_N.log())).clamp(min=1e-9)
    times = 1 / float(gains_N.max())
    needed = f"needs --draws {math.ceil(times * num_draws):,}" if times < MOST_TIMES else "not found by any number"
    return f"{fault:<41} {expected.nats:>8,.1f}  {'found' if expected.nats >= ENOUGH else needed}"


def faults(end_ids: Collection[int], size: int) -> Mapping[str, Fault]:
    """Returns the faults whose power is stated, for a vocabulary of `size` tokens."""
    ends = sorted(end_ids)
    exchanged = list(range(size))
    exchanged[ends[0]], exchanged[ends[0] - 1] = exchanged[ends[0] - 1], exchanged[ends[0]]
    return {
        "temperature x 1.05": lambda logits_CV, _: (logits_CV / 1.05).softmax(dim=1),
        "temperature x .97": lambda logits_CV, _: (logits_CV / 0.97).softmax(dim=1),
        "top_k 50": partial(_top_k, 50),
        f"top_k {size // 4:,}": partial(_top_k, size // 4),
        "top_p .95": partial(_top_p, 0.95),
        "top_p .99": partial(_top_p, 0.99),
        "the end token is never drawn": partial(_shifted, ends, -math.inf),
        "the end token's logit + 1": partial(_shifted, ends, 1.0),
        "the end token and its neighbour exchanged": lambda logits_CV, _: logits_CV.softmax(dim=1)[:, exchanged],
        "repetition penalty 1.02": partial(_repetition_penalty, 1.02),
        "every 50th token greedy": partial(_greedy, 1 / 50),
        "random numbers shared by pairs of rows": _in_pairs,
    }


def _shifted(tokens: list[int], by: float, logits_CV: Tensor, _draws: Draws) -> Tensor:
    shifted_CV = logits_CV.clone()
    shifted_CV[:, tokens] += by
    return shifted_CV.softmax(dim=1)


def _top_k(k: int, logits_CV: Tensor, _draws: Draws) -> Tensor:
    least_C1 = logits_CV.topk(min(k, logits_CV.shape[1]), dim=1).values[:, -1:]
    return logits_CV.masked_fill(logits_CV < least_C1, -math.inf).softmax(dim=1)


def _top_p(p: float, logits_CV: Tensor, _draws: Draws) -> Tensor:
    ranked_CV, order_CV = logits_CV.softmax(dim=1).sort(dim=1, descending=True)
    ranked_CV = ranked_CV.where(ranked_CV.cumsum(dim=1) - ranked_CV < p, 0.0)
    return torch.zeros_like(ranked_CV).scatter(1, order_CV, ranked_CV / ranked_CV.sum(dim=1, keepdim=True))


def _repetition_penalty(penalty: float, logits_CV: Tensor, draws: Draws) -> Tensor:
    """Positive logits of tokens that the text has are divided by it, negative ones multiplied (arXiv 1909.05858)."""
    seen_CV = torch.zeros_like(logits_CV).scatter_add(1, draws.text_CT.clamp(min=0), (draws.text_CT >= 0).float())
    penalised_CV = torch.where(logits_CV > 0, logits_CV / penalty, logits_CV * penalty)
    return torch.where(seen_CV > 0, penalised_CV, logits_CV).softmax(dim=1)


def _greedy(share: float, logits_CV: Tensor, _draws: Draws) -> Tensor:
    best_CV = torch.zeros_like(logits_CV).scatter(1, logits_CV.argmax(dim=1, keepdim=True), share)
    return logits_CV.softmax(dim=1) * (1 - share) + best_CV


def _in_pairs(logits_CV: Tensor, draws: Draws) -> Tensor:
    """Every second row draws the token of the row before if both have the same text; others are drawn as usual."""
    is_same_C = F.pad((draws.text_CT[1:] == draws.text_CT[:-1]).all(dim=1), (1, 0))
    is_copy_C = is_same_C & (torch.arange(len(is_same_C), device=is_same_C.device) % 2 == 1)
    copied_CV = torch.zeros_like(logits_CV).scatter(1, draws.before_C.clamp(min=0)[:, None], 1.0)
    return torch.where(is_copy_C[:, None], copied_CV, logits_CV.softmax(dim=1))
