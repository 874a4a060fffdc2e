"""The transformer: embeddings, blocks, final norm. What sits on it is in `lm.model`, `lm.encoder` and others.

Shape letters: B batch, T query tokens, S key tokens, D model width.
"""

import math

import torch
from torch import Tensor, nn

import lm.gpu_norms
import lm.native.install  # noqa: F401 - puts the CPU's kernels in place
from lm.attention import Mask, attention_mask, with_window
from lm.block import Block, BlockInputs, PostNormBlock, run_blocks
from lm.cache import CrossAttentionCache, PassCache
from lm.compiled import run_compiled_blocks
from lm.config import ModelConfig
from lm.dropout import Dropout, token_keys
from lm.gpu_attention import is_on_gpu, packed_mask, takes_packed_rows, whole_rows
from lm.grouped_attention import grouped_mask
from lm.norms import compute_dtype, make_norm
from lm.positions import Rotary, rotary_tables, sinusoids
from lm.upload import upload

ENCODES, DECODES, HEAD = 0, 1, 2  # parts of a model, whose dropout differs at equal positions


class Transformer(nn.Module):
    """Tokens to hidden states: embeddings, blocks, and a final norm in pre-norm models.

    A decoder's tokens attend to earlier ones; with `causal` False, an encoder's attend to their whole sequence. With
    `cross_attention` every block also attends to an encoder. `embedding` shares another transformer's table.
    """

    def __init__(
        self,
        config: ModelConfig,
        dropout: float = 0.0,
        *,
        causal: bool = True,
        cross_attention: bool = False,
        embedding: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.recomputes = self.compiles = False  # set by `checkpoint_activations` and `compile_blocks`
        self.embedding = embedding or nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.embedding_norm = make_norm(config, config.hidden_size) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(dropout)
        num_layers = config.num_hidden_layers if causal or not config.num_encoder_layers else config.num_encoder_layers
        block = Block if config.norm_place == "pre" else PostNormBlock
        self.blocks = nn.ModuleList(block(config, dropout, cross_attention=cross_attention) for _ in range(num_layers))
        # In a post-norm model the last block ends with a norm.
        self.norm = make_norm(config, config.hidden_size) if config.norm_place == "pre" else nn.Identity()

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask: Mask,
        cache: PassCache | None = None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D]. `mask` [B, T, T]: True = may attend; None = causal, or everything for an encoder.

        Training with dropout needs `sequence_keys_BT` (or [B, 1]); see `lm.dropout`.
        """
        keys_BT = None
        if sequence_keys_BT is not None and self.dropout.is_active:
            keys_BT = token_keys(sequence_keys_BT, positions_BT, DECODES if self.causal else ENCODES)
        x_BTD = self.embed(tokens_BT, positions_BT, token_types_BT, keys_BT)
        T, packs = tokens_BT.shape[1], self.packs_rows()
        if mask is None and not self.causal:
            everything = torch.ones(1, T, T, dtype=torch.bool, device=tokens_BT.device)
            mask = whole_rows(tokens_BT, causal=False) if packs else everything
        by_window = {window: with_window(mask, window, tokens_BT, packs=packs) for window in self.config.sliding_window}
        masks = [by_window[self.config.window(layer)] for layer in range(len(self.blocks))]
        rotary = self.rotary(positions_BT, compute_dtype(x_BTD))
        inputs = BlockInputs(masks, rotary, cache, cross_cache, keys_BT)
        recompute = self.recomputes and torch.is_grad_enabled()
        if self.compiles and cache is None and cross_cache is None:
            return self.norm(run_compiled_blocks(self.blocks, x_BTD, inputs, recompute=recompute))
        return run_blocks(self.blocks, self.norm, x_BTD, inputs, recompute)

    def embed(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        token_types_BT: Tensor | None = None,
        keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings [B, T, D] plus those of positions and token types (default: 0)."""
        x_BTD = self.embedding(tokens_BT)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.hidden_size)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoids(positions_BT, self.config.hidden_size).to(x_BTD.dtype)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(torch.zeros_like(tokens_BT) if token_types_BT is None else token_types_BT)
        return self.dropout(self.embedding_norm(x_BTD), keys_BT, 0)

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary | None:
        config = self.config
        if config.positions != "rotary":
            return None
        return rotary_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, dtype)

    def hidden(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None,
        cross_cache: CrossAttentionCache | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole rows. `segments_BT` numbers the sequences packed in a row from 1; 0 = padding.

        Positions restart at 0 in every segment and no token attends across segments, so a sequence in a packed row has
        the hidden states that it has alone. Segments may stay in the CPU's memory (`packed_mask`). None means one
        sequence per row; then padding on the right is harmless to a decoder, and an encoder's rows must have none.
        `sequence_keys_BT` as for `forward`.
        """
        T = tokens_BT.shape[1]
        if segments_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(tokens_BT.shape)
            return self(tokens_BT, positions_BT, None, None, cross_cache, token_types_BT, sequence_keys_BT)
        mask = self.mask_of(segments_BT, tokens_BT.device)
        positions_BT = upload(segment_positions(segments_BT), tokens_BT.device)
        return self(tokens_BT, positions_BT, mask, None, cross_cache, token_types_BT, sequence_keys_BT)

    def mask_of(self, segments_BT: Tensor, device: torch.device) -> Mask:
        """The mask of packed rows on `device`, where the segments need not be."""
        # A GPU is not asked what is in its memory.
        is_plain = segments_BT.is_cpu and one_per_row(segments_BT)
        if is_plain and self.causal:
            return None
        if self.packs_rows():
            return packed_mask(segments_BT, device, causal=self.causal)
        # A graph would be compiled for each number of groups.
        if not is_plain and not is_on_gpu(self._table()) and not self.compiles:
            return grouped_mask(segments_BT, causal=self.causal)
        return attention_mask(segments_BT.to(device), causal=self.causal)

    def packs_rows(self) -> bool:
        """Whether variable-length attention serves this model as it is."""
        return takes_packed_rows(self._table(), self.config.head_dim)

    def _table(self) -> Tensor:
        """The embedding's matrix, of which only type and device may be asked.

        Under ZeRO-3, reading `embedding.weight` in a pass gathers it. That is a collective call, but whether it is made
        here depends on a rank's own rows.
        """
        return next(self.embedding.parameters(recurse=False))

    def cross_attention_cache(self, states_BSD: Tensor, real_BS: Tensor) -> CrossAttentionCache:
        """An encoder's states as this decoder's blocks attend to them; `real_BS` is False at padding."""
        pairs = [block.cross.keys_and_values(states_BSD) for block in self.blocks]  # type: ignore[union-attr, operator]
        return CrossAttentionCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), real_BS)


def one_per_row(segments_BT: Tensor) -> bool:
    """Whether each row has one sequence, numbered 1, and padding on the right at most."""
    return bool((segments_BT <= 1).all() and (segments_BT[:, 1:] <= segments_BT[:, :-1]).all())


def segment_positions(segments_BT: Tensor) -> Tensor:
    """Position of each token in its segment, and 0 at padding: (1, 1, 2, 2, 2, 0, 0) gives (0, 1, 0, 1, 2, 0, 0)."""
    T = segments_BT.shape[1]
    index_BT = torch.arange(T, device=segments_BT.device).expand(segments_BT.shape)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    positions_BT = index_BT - torch.where(starts_BT, index_BT, 0).cummax(dim=1).values
    return positions_BT * (segments_BT > 0)  # a row may be wider than the context
