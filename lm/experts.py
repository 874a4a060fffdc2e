"""A mixture of experts: the MLP of a token is a weighted sum of a few out of many small ones (arXiv 1701.06538).

Which experts a token uses is its route. Routes can be recorded by one pass and replayed by another (arXiv 2510.11370),
whose router then only weighs the recorded experts.

Shape letters: B batch, T tokens of a row, N tokens of a pass, L layers, D model width, M width of an expert, E experts,
K experts per token, S pairs of a token and one of its experts: N · K, F outputs.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.layers import GATED, ExpertMaps, Fp32Linear


class PassRoutes(Protocol):
    """What knows or decides the routes of a pass besides the routers: it records them or replaces them."""

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        """Returns the experts that a layer's tokens use, given the router's choice."""


def route_dtype(num_experts: int) -> torch.dtype:
    """Returns the type of recorded routes, whose largest number is no expert's."""
    return torch.uint8 if num_experts <= 255 else torch.int16


def no_route(routes: Tensor) -> int:
    """Returns the number in place of the experts of a token without a recorded route."""
    return torch.iinfo(routes.dtype).max


def no_routes(config: ModelConfig, *sizes: int, like: Tensor) -> Tensor:
    """Returns routes [*sizes, K] of tokens that have none."""
    routes = torch.empty(*sizes, config.num_experts_per_tok, dtype=route_dtype(config.num_experts), device=like.device)
    return routes.fill_(no_route(routes))


def has_route(routes: Tensor) -> Tensor:
    """Returns whether routes [..., K] are recorded, [...]."""
    return (routes != no_route(routes)).any(dim=-1)


class Replay(PassRoutes):
    """Replays recorded routes. A token without one, such as padding, takes the router's choice.

    `differs_LN` says where the router would have chosen another set of experts than the recorded one.
    """

    def __init__(self, routes_BTLK: Tensor) -> None:
        self.routes_LNK = routes_BTLK.flatten(0, 1).transpose(0, 1)
        self.is_recorded_LN = has_route(self.routes_LNK)
        self.differs_LN = torch.zeros_like(self.is_recorded_LN)

    def choose(self, layer: int, experts_NK: Tensor) -> Tensor:
        recorded_NK = self.routes_LNK[layer].to(experts_NK.dtype)
        is_recorded_N1 = self.is_recorded_LN[layer].unsqueeze(1)
        used_NK = torch.where(is_recorded_N1, recorded_NK, experts_NK)
        # Recomputed blocks write the same again.
        self.differs_LN[layer] = (used_NK.sort(dim=1).values != experts_NK.sort(dim=1).values).any(dim=1)
        return used_NK

    def of_first(self, num_tokens: int) -> "Replay":
        """Returns the same for the first tokens of the pass."""
        first = Replay(self.routes_LNK[:, :num_tokens].transpose(0, 1)[None])
        first.differs_LN = self.differs_LN[:, :num_tokens]
        return first


class Mixture(nn.Module):
    """y = Σ w_e · down_e(activation(up_e x)) over the K experts e of largest probability, p = softmax(W x) in fp32.
    With `mlp_bias`, W x and both maps of an expert have biases.

    Weights are these probabilities, divided by their sum if `norm_topk_prob` (Qwen3-MoE, Mixtral). An expert takes
    every token that chooses it: none is dropped, so what a token gets does not depend on the rest of the batch.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_chosen, self.divides_by_sum = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Fp32Linear(config.hidden_size, config.num_experts, bias=config.mlp_bias)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor, routes: PassRoutes | None = None, layer: int = 0) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        p_NE = self.router(x_ND).softmax(dim=-1)
        experts_NK = self.choose(p_NE)
        if routes is not None:
            experts_NK = routes.choose(layer, experts_NK)
        weights_NK, y_NKD = self.weights(p_NE, experts_NK), self.experts(x_ND, experts_NK)
        return (y_NKD * weights_NK.unsqueeze(-1).to(y_NKD.dtype)).sum(dim=1).view_as(x_BTD)

    def choose(self, p_NE: Tensor) -> Tensor:
        """Returns the numbers [N, K] of each token's experts, largest probability first."""
        return p_NE.topk(self.num_chosen).indices

    def weights(self, p_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Returns the weights [N, K] of given experts, in fp32. The router gets its gradient through them."""
        p_NK = p_NE.gather(1, experts_NK)
        return p_NK / p_NK.sum(dim=-1, keepdim=True) if self.divides_by_sum else p_NK


class Experts(nn.Module):
    """The experts of a layer. `up` [E · 2M, D] and `down` [E · D, M] hold their matrices below one another, `up` with
    the gate's rows first, as in `lm.layers.MLP`.
    """

    def __init__(self, config: ModelConfig, num_ranks: int = 1, rank: int = 0) -> None:
        """With `num_ranks`, this rank has an equal share of the experts, and only they take part in the sum."""
        super().__init__()
        E, D, M = config.num_experts // num_ranks, config.hidden_size, config.moe_intermediate_size
        self.first, self.is_share, self.activation = rank * E, num_ranks > 1, GATED[config.mlp]
        self.up = ExpertMaps(E, D, 2 * M, bias=config.mlp_bias)
        self.down = ExpertMaps(E, M, D, bias=config.mlp_bias)

    def forward(self, x_ND: Tensor, experts_NK: Tensor) -> Tensor:
        """Returns what each of a token's experts makes of it, [N, K, D]."""
        # The CPU waits for no GPU with direct products of groups (`lm.decoding.fixed_steps`). Each pair has a row
        # of its own, so gradients add up in a fixed order.
        E, own_S = self.up.num_experts, experts_NK.flatten() - self.first
        experts_S, order_S = torch.where((own_S >= 0) & (own_S < E), own_S, E).sort(stable=True)
        every_E = torch.arange(E, device=x_ND.device)
        ends_E = torch.searchsorted(experts_S, every_E, right=True, out_int32=True)
        K = experts_NK.shape[1]
        x_SD = x_ND.unsqueeze(1).expand(-1, K, -1).flatten(0, 1)[order_S]
        y_SD = self.down(self.activation(self.up(x_SD, ends_E)), ends_E)
        if self.is_share:  # rows after the last expert's are undefined
            y_SD = torch.where((experts_S < E).unsqueeze(1), y_SD, 0.0)
        return y_SD[order_S.argsort()].unflatten(0, (-1, K))
