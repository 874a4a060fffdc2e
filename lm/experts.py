"""A mixture of experts: the MLP of a token is a weighted sum of a few out of many small ones (arXiv 1701.06538).

Which experts a token uses is its route. Routes can be recorded by one pass and replayed by another (arXiv 2510.11370),
whose router then only weighs the recorded experts.

Shape letters: B batch, T tokens of a row, N tokens of a pass, L layers, D model width, M width of an expert, E experts,
K experts per token, S pairs of a token and one of its experts: N · K, F outputs, G groups of e experts.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.layers import GATED, MLP, ExpertMaps, Fp32Linear, Linear

TOKENS, ENTROPY, BALANCE, Z = range(4)  # sums over a layer's tokens, after its experts' loads


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
    """y = c · Σ w_e · down_e(activation(up_e x)) over the K chosen experts e, plus shared(x). With `mlp_bias`, W x and
    both maps of an expert have biases.

    Scores s are softmax(W x) or sigmoid(W x), in fp32. The experts of largest s + `choice_bias` are chosen; the bias
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) has no gradient. With groups (DeepSeek-V2, arXiv 2405.04434, section
    2.2.2), experts of the `topk_group` best of G are chosen, by their largest score, or by the sum of their two largest
    with a bias. Their weights are s, divided by their sum if `norm_topk_prob`; with softmax this is the softmax of the
    chosen logits alone. c is `routed_scaling_factor`. The shared expert is a plain MLP, times sigmoid(v x) with
    `shared_expert_gate` (Qwen2-MoE).

    An expert takes every token that chooses it: none is dropped, so what a token gets does not depend on the rest of
    the batch.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, D, width = config.num_experts, config.hidden_size, config.shared_expert_intermediate_size
        self.num_chosen, self.divides_by_sum = config.num_experts_per_tok, config.norm_topk_prob
        self.has_sigmoid, self.factor = config.scoring_func == "sigmoid", config.routed_scaling_factor
        self.num_groups, self.topk_group = config.n_group, config.topk_group
        self.router = Fp32Linear(D, E, bias=config.mlp_bias)
        self.choice_bias: Tensor | None
        self.register_buffer("choice_bias", torch.zeros(E) if config.router_bias else None)
        self.experts = Experts(config)
        self.shared = MLP(config, width) if width else None
        self.shared_gate = Linear(D, 1, bias=False) if config.shared_expert_gate else None

    def forward(
        self, x_BTD: Tensor, layer: int = 0, seen: "Seen | None" = None, routes: PassRoutes | None = None
    ) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        logits_NE = self.router(x_ND)
        scores_NE = logits_NE.sigmoid() if self.has_sigmoid else logits_NE.softmax(dim=-1)
        experts_NK = self.choose(scores_NE)
        if routes is not None:
            experts_NK = routes.choose(layer, experts_NK)
        weights_NK = self.weigh(scores_NE, experts_NK)
        y_NKD = self.experts(x_ND, experts_NK)
        y_ND = (y_NKD * weights_NK.unsqueeze(-1).to(y_NKD.dtype)).sum(dim=1)
        if self.shared is not None:
            shared_ND = self.shared(x_ND)
            y_ND = y_ND + (shared_ND if self.shared_gate is None else self.shared_gate(x_ND).sigmoid() * shared_ND)
        if seen is not None:
            y_ND = seen.record(y_ND, logits_NE, scores_NE, experts_NK, layer)
        return y_ND.view_as(x_BTD)

    def choose(self, scores_NE: Tensor) -> Tensor:
        """Returns the numbers [N, K] of each token's experts, largest score first."""
        ranked_NE = scores_NE.detach() if self.choice_bias is None else scores_NE.detach() + self.choice_bias
        return self._in_best_groups(ranked_NE).topk(self.num_chosen).indices

    def _in_best_groups(self, ranked_NE: Tensor) -> Tensor:
        """Returns the scores, -∞ outside of each token's `topk_group` best groups."""
        if self.num_groups == 1:
            return ranked_NE
        grouped_NGe = ranked_NE.unflatten(1, (self.num_groups, -1))
        best_NG = grouped_NGe.topk(1 if self.choice_bias is None else 2).values.sum(dim=-1)
        is_best_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter_(
            1, best_NG.topk(self.topk_group).indices, True
        )
        return grouped_NGe.masked_fill(~is_best_NG.unsqueeze(-1), -torch.inf).flatten(1)

    def weigh(self, scores_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Returns the weights [N, K] of given experts, in fp32. The router gets its gradient through them."""
        weights_NK = scores_NE.gather(1, experts_NK)
        if self.divides_by_sum:
            total_N1 = weights_NK.sum(dim=-1, keepdim=True)
            weights_NK = weights_NK / (total_N1 + 1e-20 if self.has_sigmoid else total_N1)
        return weights_NK if self.factor == 1 else weights_NK * self.factor


class Routers:
    """Adds the losses of a model's routers to its gradients, and counts how its routers choose.

    Both happen in the backward pass of each mixture, so they cover the passes that a step learns from, once each,
    whatever the loss: recomputed blocks, passes that are kept for an update, and passes without gradients change
    nothing. A layer's losses per token, averaged over the batch's tokens (without padding) and the L mixture layers:

        balance = E Σ_e f_e p_e    f_e: pairs of the token's sequence that are of expert e / its tokens (no gradient)
        z       = (ln Σ_e exp(logit_e))²                                   arXiv 2202.08906, eq. 5

    with p the scores, divided by their sum. `balance` is Switch's loss (arXiv 2101.03961, eq. 4 to 6) of each sequence,
    weighted by its length; it is K if the load is even. A loss of the batch's f would depend on how the batch is split.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, balance_coef: float = 0.0, z_coef: float = 0.0
    ) -> None:
        self.num_experts, self.num_chosen = config.num_experts, config.num_experts_per_tok
        self.num_layers = config.num_hidden_layers - len(config.mlp_only_layers)
        self.coefs = {BALANCE: balance_coef, Z: z_coef}
        self.scale = 0.0  # of the gradients of the losses' sums over tokens and layers
        self.counts_batch = True  # False: a pass whose loss does not count
        # Counts are exact in fp64, in whatever order they are added.
        self.sums = torch.zeros(config.num_hidden_layers, self.num_experts + 4, dtype=torch.float64, device=device)

    def take(self) -> Tensor:
        """Returns the sums [L, E + 4] of this rank's passes since the last call: each expert's load, in tokens, then
        the numbers of tokens, their routers' entropies in nats, and the two losses.
        """
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Returns what `take` gave, summed over all ranks, in a few numbers."""
        E, found = self.num_experts, sums.cpu()
        found = found[found[:, E + TOKENS] > 0]  # frozen layers have no backward pass
        if not len(found):
            return {}
        loads_LE, sums_L4 = found.split([E, 4], dim=1)
        means_4 = (sums_L4.sum(dim=0) / sums_L4[:, TOKENS].sum()).tolist()
        names = {BALANCE: "router_aux_loss", Z: "router_z_loss"}
        return {
            "router_max_load": float((loads_LE.amax(dim=1) / loads_LE.mean(dim=1)).max()),
            "router_dead_experts": float((loads_LE == 0).sum()),
            "router_entropy": means_4[ENTROPY],
            **{names[kind]: means_4[kind] for kind, coef in self.coefs.items() if coef},
        }


@torch.no_grad()
def balance_biases(model: nn.Module, sums: Tensor, speed: float) -> None:
    """Raise each `choice_bias` by `speed` where an expert's load is below the layer's mean, and lower it above.

    `sums` are those of `Routers.take` over all ranks. Those of frozen routers stay (arXiv 2412.19437, section 2.1.2).
    """
    for name, module in model.named_modules():
        if isinstance(module, Mixture) and module.choice_bias is not None and module.router.weight.requires_grad:
            load_E = sums[int(name.split(".")[-2]), : len(module.choice_bias)]
            module.choice_bias += speed * (load_E.mean() - load_E).sign().float()


@dataclass(frozen=True)
class Seen:
    """The tokens of a pass that a model learns from: where each one's sequence starts, as the index of its first token,
    and whether it counts (False = padding).
    """

    routers: Routers
    starts_N: Tensor
    counted_N: Tensor

    def record(self, y_ND: Tensor, logits_NE: Tensor, scores_NE: Tensor, experts_NK: Tensor, layer: int) -> Tensor:
        """Returns y. Its backward pass does what `Routers` says."""
        p_NE, counted_N = scores_NE / scores_NE.sum(dim=-1, keepdim=True), self.counted_N.float()
        with torch.no_grad():
            chosen_NE = torch.zeros_like(p_NE).scatter_(1, experts_NK, 1.0) * counted_N.unsqueeze(-1)
            entropy = torch.special.entr(p_NE).sum(dim=-1) @ counted_N
            found = [chosen_NE.sum(dim=0), counted_N.sum().view(1), entropy.view(1)]
        losses = [self._loss(kind, logits_NE, p_NE, chosen_NE) for kind in (BALANCE, Z)]
        found += [loss.detach().view(1) for loss in losses]
        loss = sum(coef * loss for coef, loss in zip(self.routers.coefs.values(), losses, strict=True))
        recorded: Tensor = _Recorded.apply(y_ND, loss, torch.cat(found), self.routers, layer)  # type: ignore[no-untyped-call]
        return recorded

    def _loss(self, kind: int, logits_NE: Tensor, p_NE: Tensor, chosen_NE: Tensor) -> Tensor:
        """Returns a loss, summed over the counted tokens; 0 if it has no weight."""
        counted_N = self.counted_N.float()
        if not self.routers.coefs[kind]:
            return counted_N.new_zeros(())
        if kind == Z:
            return logits_NE.logsumexp(dim=-1).square() @ counted_N
        loads_NE = torch.zeros_like(chosen_NE).index_add_(0, self.starts_N, chosen_NE)[self.starts_N]
        lengths_N = torch.zeros_like(counted_N).index_add_(0, self.starts_N, counted_N)[self.starts_N]
        shares_NE = loads_NE / lengths_N.clamp(min=1).unsqueeze(-1)
        return self.routers.num_experts * ((shares_NE * p_NE).sum(dim=-1) @ counted_N)


class _Recorded(torch.autograd.Function):
    """y; the backward pass gives `loss` its gradient, and adds `found` to the sums."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, _loss: Tensor, found: Tensor, routers: Routers, layer: int) -> Tensor:
        ctx.save_for_backward(found)
        ctx.routers, ctx.layer = routers, layer
        return y_ND.view_as(y_ND)

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (found,) = ctx.saved_tensors
        ctx.routers.sums[ctx.layer] += found
        # `torch.full` is a kernel; a copy from the CPU would wait for the GPU.
        return gradient_ND, torch.full((), ctx.routers.scale, device=found.device), None, None, None


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
        y_SD = self.down(self.activation(self.up(x_SD, ends_E, order_S)), ends_E, order_S)
        if self.is_share:  # rows after the last expert's are undefined
            y_SD = torch.where((experts_S < E).unsqueeze(1), y_SD, 0.0)
        return y_SD[order_S.argsort()].unflatten(0, (-1, K))
