"""Models with an encoder: BERT (arXiv 1810.04805) with its heads, and the encoder-decoder of Vaswani et al. (arXiv
1706.03762).

`segments_BT` numbers the sequences of a row from 1 as for a decoder, 0 = padding; an encoder needs it for rows with
padding. `token_types_BT` defaults to 0.

Shape letters: B batch, T tokens (of an encoder-decoder, target tokens), S source tokens, D width, V vocabulary,
C selected positions, K labels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lm.cache import CrossAttentionCache
from lm.config import ModelConfig
from lm.dropout import Dropout, token_keys
from lm.layers import ACTIVATIONS, Fp32Linear, Head, Linear, make_norm
from lm.model import HEAD, Transformer
from lm.sampling import token_logprobs
from lm.transfer import at_positions, first_tokens


class EncoderModel(nn.Module):
    """An encoder without a head."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        config.require_kind("encoder")
        super().__init__()
        self.config = config
        self.encoder = Transformer(config, dropout, causal=False)

    def hidden(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None,
        token_types_BT: Tensor | None,
        sequence_keys_BT: Tensor | None,
    ) -> Tensor:
        """Returns the encoder's states [B, T, D]."""
        return self.encoder.hidden(
            tokens_BT, segments_BT, token_types_BT=token_types_BT, sequence_keys_BT=sequence_keys_BT
        )


class MaskedLanguageModel(EncoderModel):
    """BERT's masked language model: logits of every token. The head's matrix may be the embedding's."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.transform = Linear(config.hidden_size, config.hidden_size)
        self.transform_norm = make_norm(config, config.hidden_size)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.mlp]
        self.head = Head(config.hidden_size, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's matrix with the head if the config says so."""
        if self.config.tie_word_embeddings:
            self.head.weight = self.encoder.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        selected_BT: Tensor | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [C, V] at the positions where `selected_BT` is True, row by row; [B, T, V] if it is None."""
        return self.words(self.hidden(tokens_BT, segments_BT, token_types_BT, sequence_keys_BT), selected_BT)

    def words(self, hidden_BTD: Tensor, selected_BT: Tensor | None) -> Tensor:
        """Computes the words' logits from the encoder's states."""
        chosen = hidden_BTD if selected_BT is None else hidden_BTD[selected_BT]
        return self.head(self.transform_norm(self.activation(self.transform(chosen))))


class NextSentenceModel(MaskedLanguageModel):
    """BERT as it was pretrained: logits of hidden words, and whether the second text of a pair follows the first.

    The pooler reads the pair's first token, as in `SequenceClassifier`, which takes it over.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.next_sentence = nn.Linear(config.hidden_size, 2)

    def forward(  # type: ignore[override]
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        selected_BT: Tensor | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the words' logits as `MaskedLanguageModel` does, and logits [B, 2] in fp32 of each row's pair: that
        the second text follows the first, and that it is a random one.
        """
        hidden_BTD = self.hidden(tokens_BT, segments_BT, token_types_BT, sequence_keys_BT)
        return self.words(hidden_BTD, selected_BT), self.next_sentence(self.pooler(hidden_BTD[:, 0]).tanh()).float()


def _head_keys(sequence_keys_BT: Tensor, tokens_BT: Tensor) -> Tensor:
    """Returns keys for a head's dropout [B, T], from the tokens' places in their rows."""
    places_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)
    return token_keys(sequence_keys_BT[:, : tokens_BT.shape[1]], places_BT, HEAD)


class SequenceClassifier(EncoderModel):
    """Logits of each sequence's labels, from its first token. As a reward model: scores, one label per objective."""

    def __init__(self, config: ModelConfig, labels: Sequence[str], dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.labels = tuple(labels)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(dropout)
        self.classifier = Fp32Linear(config.hidden_size, len(self.labels))

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [sequences, K] in fp32, row by row; without segments each row is a sequence."""
        hidden_BTD = self.hidden(tokens_BT, segments_BT, token_types_BT, sequence_keys_BT)
        firsts_BT = first_tokens(torch.ones(tokens_BT.shape) if segments_BT is None else segments_BT)
        pooled_CD = self.pooler(at_positions(hidden_BTD, firsts_BT)).tanh()
        keys_C = None
        if sequence_keys_BT is not None:
            own_C1 = at_positions(sequence_keys_BT.expand(tokens_BT.shape)[..., None], firsts_BT)
            keys_C = token_keys(own_C1[:, 0], torch.zeros_like(own_C1[:, 0]), HEAD)
        return self.classifier(self.dropout(pooled_CD, keys_C, 0))


class TokenClassifier(EncoderModel):
    """Logits of every token's labels."""

    def __init__(self, config: ModelConfig, labels: Sequence[str], dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.labels = tuple(labels)
        self.dropout = Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, len(self.labels))

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [B, T, K] in fp32."""
        hidden_BTD = self.hidden(tokens_BT, segments_BT, token_types_BT, sequence_keys_BT)
        keys_BT = None if sequence_keys_BT is None else _head_keys(sequence_keys_BT, tokens_BT)
        return self.classifier(self.dropout(hidden_BTD, keys_BT, 0)).float()


class SpanPredictor(EncoderModel):
    """Predicts where an answer begins and ends in the text, with two logits per token (BERT for SQuAD)."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__(config, dropout)
        self.ends = nn.Linear(config.hidden_size, 2)

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        token_types_BT: Tensor | None = None,
        sequence_keys_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [B, T] of the first and of the last token of the answer, in fp32."""
        hidden_BTD = self.hidden(tokens_BT, segments_BT, token_types_BT, sequence_keys_BT)
        first_BT, last_BT = self.ends(hidden_BTD).float().unbind(dim=-1)
        return first_BT, last_BT


def best_span(first_BT: Tensor, last_BT: Tensor, allowed_BT: Tensor, max_tokens: int) -> list[tuple[int, int]]:
    """Returns the likeliest (first, last) of each row: both allowed, in order, at most `max_tokens` long."""
    outside_BT = ~allowed_BT
    first_BT, last_BT = (logits_BT.masked_fill(outside_BT, -torch.inf) for logits_BT in (first_BT, last_BT))
    T = first_BT.shape[1]
    in_order_TT = allowed_BT.new_ones(T, T).triu().tril(max_tokens - 1)
    scores_BTT = (first_BT[:, :, None] + last_BT[:, None, :]).masked_fill(~in_order_TT, -torch.inf)
    return [divmod(place, T) for place in scores_BTT.flatten(1).argmax(dim=1).tolist()]


def masked_tokens_loss(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Returns -Σ log p of the masked tokens, in nats."""
    return -token_logprobs(logits_CV, targets_C).sum()


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
        """Encode the sources for the decoder to attend to; `segments_BS` is 1 for tokens and 0 for padding."""
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

        Targets begin with a start token and are padded on the right. Each pair has one key for dropout
        (`lm.dropout.Dropout`).
        """
        cross_cache = self.read(sources_BS, source_segments_BS, sequence_keys_B1)
        hidden_BTD = self.decoder.hidden(targets_BT, None, cross_cache, sequence_keys_BT=sequence_keys_B1)
        return self.head(hidden_BTD if selected_BT is None else hidden_BTD[selected_BT])
