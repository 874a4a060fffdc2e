"""Whether the routes that a sampler records are the policy's, and which known fault explains them if they are not.

Shape letters: B rows, T tokens of a row, N tokens of all rows, L layers with experts, K experts
per token.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lm.config import ModelConfig, Precision
from lm.experts import PassRoutes
from lm.model import LanguageModel
from lm.transfer import pad_right

# Share of routes that rounding may change, where two experts are about equally likely.
MAX_CHANGED: dict[Precision, float] = {"fp32": 0.01, "bf16": 0.3}
EXPLAINED = 0.5  # a fault explains routes if at most this share of the differences is left
AT_ONCE = 8  # rows per pass

SHIFTED = "routes of another layer: they are shifted by one"
OTHER_ROW = "routes of other rows"
OLD_ROUTERS = "routers that are older than the other weights"
MISSING = "an expert is missing"
UNKNOWN = "other routes, for no reason that this test knows"


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
