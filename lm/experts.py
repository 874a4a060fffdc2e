"""A mixture of experts: the MLP of a token is a weighted sum of a few out of many small ones (arXiv 1701.06538).

Shape letters: B batch, T tokens of a row, N tokens of a pass, D model width, M width of an expert, E experts, K experts
per token, S pairs of a token and one of its experts: N · K, F outputs.
"""

import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.layers import GATED, ExpertMaps, Fp32Linear


class Mixture(nn.Module):
    """y = Σ w_e · down_e(activation(up_e x)) over the K experts e of largest probability, p = softmax(W x) in fp32.

    Weights are these probabilities, divided by their sum if `norm_topk_prob` (Qwen3-MoE, Mixtral). An expert takes
    every token that chooses it: none is dropped, so what a token gets does not depend on the rest of the batch.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_chosen, self.divides_by_sum = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Fp32Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        scores_NE = self.router(x_ND).softmax(dim=-1)
        experts_NK = self.choose(scores_NE)
        weights_NK = self.weigh(scores_NE, experts_NK)
        y_NKD = self.experts(x_ND, experts_NK)
        return (y_NKD * weights_NK.unsqueeze(-1).to(y_NKD.dtype)).sum(dim=1).view_as(x_BTD)

    def choose(self, scores_NE: Tensor) -> Tensor:
        """Returns the numbers [N, K] of each token's experts, largest score first."""
        return scores_NE.detach().topk(self.num_chosen).indices

    def weigh(self, scores_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Returns the weights [N, K] of these experts, in fp32."""
        weights_NK = scores_NE.gather(1, experts_NK)
        return weights_NK / weights_NK.sum(dim=-1, keepdim=True) if self.divides_by_sum else weights_NK


class Experts(nn.Module):
    """The experts of a layer. `up` [E · 2M, D] and `down` [E · D, M] hold their matrices below one another, `up` with
    the gate's rows first, as in `lm.layers.MLP`.
    """

    def __init__(self, config: ModelConfig, num_ranks: int = 1, rank: int = 0) -> None:
        """With `num_ranks`, this rank has an equal share of the experts, and only they take part in the sum."""
        super().__init__()
        E, D, M = config.num_experts // num_ranks, config.hidden_size, config.moe_intermediate_size
        self.first, self.is_share, self.activation = rank * E, num_ranks > 1, GATED[config.mlp]
        self.up, self.down = ExpertMaps(E, D, 2 * M), ExpertMaps(E, M, D)

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
