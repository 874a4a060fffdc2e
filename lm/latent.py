"""Queries, keys and values of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shape letters: B batch, T tokens, D model width, N heads, H head dim of queries and keys, P of its dimensions without
positions and R with them, V head dim of values, C width of the latent vector, E = 3 N H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.layers import Linear, RMSNorm
from lm.positions import neighbours_apart

EPS = 1e-6  # in the latents' norms, whatever `norm_eps` is: the published code fixes it


class LatentHeads(nn.Module):
    """Makes each head's keys and values from one latent vector c per token, and the keys' part r with positions, which
    all heads share; queries from a vector u:

        c, r = W x                  u = norm(A x), or x without `q_lora_rank`
        q_n = [Rot_n u, Q_n u]      k_n = [r, K_n norm(c)]      v_n = [V_n norm(c), 0]

    `lm.attention` then rotates the first R dimensions of q and k. Values are padded with zeros to the keys' size, so
    that one cache, and every kernel, mask and exchange between ranks takes them like those of other models. (With c and
    r in the cache instead, a decoding step would multiply K_n and V_n in another order than a learner does.)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        N, D, C, has_bias = config.num_attention_heads, config.hidden_size, config.kv_lora_rank, config.attention_bias
        self.num_heads, self.interleaves = N, config.rope_interleave
        self.sizes = P, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        width, bias = config.q_lora_rank, has_bias != "none"
        self.query_latent = Linear(D, width, bias=bias) if width else None
        self.query_norm = RMSNorm(width, EPS) if width else nn.Identity()
        self.query = Linear(width or D, N * (P + R), bias=False)
        self.latent = Linear(D, C + R, bias=bias)
        self.latent_norm = RMSNorm(C, EPS)
        self.key_value = Linear(C, N * (P + V), bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns q, k and v [B, T, E], with what is turned together half of R apart."""
        P, R, V = self.sizes
        u = x_BTD if self.query_latent is None else self.query_norm(self.query_latent(x_BTD))
        q_BTNP, q_BTNR = self.query(u).unflatten(-1, (self.num_heads, -1)).split([P, R], dim=-1)
        latent_BTC, k_BTR = self.latent(x_BTD).split([self.key_value.in_features, R], dim=-1)
        kv_BTNs = self.key_value(self.latent_norm(latent_BTC)).unflatten(-1, (self.num_heads, -1))
        k_BTNP, v_BTNV = kv_BTNs.split([P, V], dim=-1)
        if self.interleaves:
            q_BTNR, k_BTR = neighbours_apart(q_BTNR), neighbours_apart(k_BTR)
        q_BTNH = torch.cat([q_BTNR, q_BTNP], dim=-1)
        k_BTNH = torch.cat([k_BTR.unsqueeze(-2).expand_as(q_BTNR), k_BTNP], dim=-1)
        return torch.cat([q_BTNH, k_BTNH, F.pad(v_BTNV, (0, P + R - V))], dim=-2).flatten(-2)
