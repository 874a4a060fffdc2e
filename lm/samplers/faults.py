"""Known faults of samplers: what the test of draws would find of each, computed at the tested contexts; and whether the
routes that a sampler records are the policy's, and which fault explains them if they are not.

Shape letters: B rows, C tested tokens, V vocabulary, T tokens of a text, N bets or tokens of all rows, L layers with
experts, K experts per token.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import ModelConfig, Precision
from lm.experts import PassRoutes
from lm.model import LanguageModel
from lm.samplers.draws import ALARM, Draws, Evidence, Fault
from lm.transfer import pad_right

# Evidence varies by about the root of twice its expectation, so 19 of 20 seeds reach the alarm with this expectation.
ENOUGH = 2 * ALARM
MOST_TIMES = 1000  # a fault that needs so many times as many draws is one that no bet is on

# Share of routes that rounding may change, where two experts are about equally likely.
MAX_CHANGED: dict[Precision, float] = {"fp32": 0.01, "bf16": 0.3}
EXPLAINED = 0.5  # a fault explains routes if at most this share of the differences is left
AT_ONCE = 8  # rows per pass

SHIFTED = "routes of another layer: they are shifted by one"
OTHER_ROW = "routes of other rows"
OLD_ROUTERS = "routers that are older than the other weights"
MISSING = "an expert is missing"
UNKNOWN = "other routes, for no reason that this test knows"


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


class _Chosen(PassRoutes):
    """Keeps what the routers of a pass choose, by layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        self.by_layer[layer] = experts_NK
        return experts_NK


@torch.inference_mode()
def own_routes(policy: LanguageModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns the routes [T, L, K] of each text in passes over whole texts, each token's experts in ascending order."""
    found = list[Tensor]()
    for first in range(0, len(texts), AT_ONCE):
        part, chosen = texts[first : first + AT_ONCE], _Chosen()
        tokens_BT, _ = pad_right(part, policy.head.weight.device)
        policy.decoder.hidden(tokens_BT, None, routes=chosen)
        routes_NLK = torch.stack([*chosen.by_layer.values()], dim=1).sort(dim=-1).values.cpu()
        found += [row[: len(text)] for row, text in zip(routes_NLK.unflatten(0, (len(part), -1)), part, strict=True)]
    return found


def malformed(
    config: ModelConfig, layers: Sequence[int], routes: Sequence[Tensor], texts: Sequence[Sequence[int]]
) -> str:
    """Returns what is wrong with the form of routes; "" if each token has K different experts in all `layers`."""
    K = config.num_experts_per_tok
    for row, (own, text) in enumerate(zip(routes, texts, strict=True)):
        if own.shape != (expected := (len(text), config.num_hidden_layers, K)):
            return f"routes of row {row} have the shape {tuple(own.shape)}; {expected} was expected"
        sorted_TLK = own[:, layers].long().sort(dim=-1).values
        is_wrong_TL = (sorted_TLK >= config.num_experts).any(-1) | (sorted_TLK.diff(dim=-1) == 0).any(-1)
        for token, layer in is_wrong_TL.nonzero()[:1].tolist():
            where = f"token {token} of row {row} has {own[token, layers[layer]].tolist()} in layer {layers[layer]}"
            return f"{MISSING}: {where}; {K} different ones below {config.num_experts} were expected"
    return ""


def changed_share(routes: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Returns the share of routes with other sets of experts."""
    return float((torch.cat([*routes]) != torch.cat([*others])).any(dim=-1).float().mean())


def explanations(
    own: Sequence[Tensor], older: Mapping[str, Sequence[Tensor]], routes: Sequence[Tensor]
) -> Iterator[tuple[str, float]]:
    """Yields known faults, and the share of routes that each leaves unexplained. `older` has routes of policies
    with older weights, by the fault's name.
    """
    for name, others in older.items():
        yield name, changed_share(routes, others)
    for shift in (1, -1):
        yield SHIFTED, changed_share([row.roll(shift, dims=1) for row in routes], own)
    best = list[float]()
    for row, found in enumerate(routes):
        lengths = [min(len(found), len(other)) for other in own]
        known = [n for n in range(len(own)) if n != row and 2 * lengths[n] >= len(found)]
        best.append(min((changed_share([found[: lengths[n]]], [own[n][: lengths[n]]]) for n in known), default=1.0))
    yield OTHER_ROW, sum(best) / len(best)


def judge_routes(
    policy: LanguageModel,
    older: Mapping[str, LanguageModel],
    texts: Sequence[Sequence[int]],
    routes: Sequence[Tensor],
    precision: Precision,
) -> tuple[str, str]:
    """Returns what is wrong with the recorded routes of `texts` ("" if nothing is), and what was measured. `older` are
    policies with some older weights, by the fault's name.
    """
    config = policy.config
    layers = [layer for layer in range(config.num_hidden_layers) if config.has_experts(layer)]
    if wrong := malformed(config, layers, routes, texts):
        return wrong, ""
    own = own_routes(policy, texts)
    found = [row[:, layers].long().sort(dim=-1).values for row in routes]
    changed = changed_share(found, own)
    measured = f"{changed:.2%} of the routes differ from those of whole passes"
    known = explanations(own, {name: own_routes(model, texts) for name, model in older.items()}, found)
    name, left = min(known, key=lambda item: item[1])
    if left < EXPLAINED * changed:
        return f"{name} ({measured})", measured
    return f"{UNKNOWN} ({measured})" if changed > MAX_CHANGED[precision] else "", measured
