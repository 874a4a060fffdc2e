"""The transformer of Vaswani et al. (arXiv 1706.03762): an encoder reads, and a decoder attends to it and writes.

Shape letters: B batch, S source tokens, T target tokens, V vocabulary, C selected positions.
"""

import torch
from torch import Tensor, nn

from lm.cache import CrossAttentionCache
from lm.config import ModelConfig
from lm.head import Head
from lm.transformer import Transformer


class EncoderDecoder(nn.Module):
    """Next-token logits of a target, given a source. One table embeds both; the head's matrix may be that table."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        config.require_kind("encoder-decoder")
        super().__init__()
        self.config = config
        self.encoder = Transformer(config, dropout, causal=False)
        self.decoder = Transformer(config, dropout, cross_attention=True, embedding=self.encoder.embedding)
        self.head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share one embedding between encoder and decoder, and with the head if the config says so."""
        self.decoder.embedding = self.encoder.embedding
        if self.config.tie_word_embeddings:
            self.head.weight = self.encoder.embedding.weight

    def read(
        self, sources_BS: Tensor, segments_BS: Tensor | None = None, sequence_keys_B1: Tensor | None = None
    ) -> CrossAttentionCache:
        """The sources as the decoder attends to them; `segments_BS` is 1 for tokens and 0 for padding."""
        real_BS = torch.ones_like(sources_BS, dtype=torch.bool) if segments_BS is None else segments_BS > 0
        return self.decoder.cross_attention_cache(
            self.encoder.hidden(sources_BS, segments_BS, sequence_keys_BT=sequence_keys_B1), real_BS
        )

    def forward(
        self,
        sources_BS: Tensor,
        targets_BT: Tensor,
        source_segments_BS: Tensor | None = None,
        selected_BT: Tensor | None = None,
        sequence_keys_B1: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: logits [B, T, V] of the token after each target token, or [C, V] of the selected ones.

        Targets begin with a start token and are padded on the right. Each pair has one key for dropout (`lm.dropout`).
        """
        cross_cache = self.read(sources_BS, source_segments_BS, sequence_keys_B1)
        hidden_BTD = self.decoder.hidden(targets_BT, None, cross_cache, sequence_keys_BT=sequence_keys_B1)
        return self.head(hidden_BTD if selected_BT is None else hidden_BTD[selected_BT])
