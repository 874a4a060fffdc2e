"""The shape of a transformer."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator


def exact_div(numerator: int, denominator: int, what: str) -> int:
    """`numerator / denominator`, refused with ValueError naming `what` unless it is whole."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not a multiple of {denominator}")
    return numerator // denominator


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched past the `original_max_position_embeddings` tokens of pretraining.

    `linear` divides all of them by `factor` (arXiv 2306.15595). `llama3` divides those whose wavelength exceeds
    original / `low_freq_factor`, keeps those below original / `high_freq_factor`, and blends between the two. `yarn`
    blends over the number of turns in the original context, from `beta_slow` to `beta_fast`, and sharpens attention
    (arXiv 2309.00071, eq. 17 to 22).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float = Field(ge=1)
    original_max_position_embeddings: int | None = Field(default=None, ge=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rope_type != "linear" and self.original_max_position_embeddings is None:
            raise ValueError(
                f"model.rope_scaling.original_max_position_embeddings is missing; {self.rope_type!r} scaling needs it"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor {self.low_freq_factor} is not below"
                f" high_freq_factor {self.high_freq_factor}"
            )
        return self


class ModelConfig(BaseModel):
    """Embeddings, `num_hidden_layers` blocks of self-attention and an MLP, and a final norm where norms come first.

    | field | choices |
    |---|---|
    | kind | "decoder" (GPT); "encoder" (BERT, arXiv 1810.04805): tokens see both ways; "encoder-decoder" (arXiv 1706.03762) |
    | num_encoder_layers | the encoder's, of an encoder-decoder; `num_hidden_layers` are the decoder's |
    | type_vocab_size | how many kinds of token an encoder tells apart, beside their words (BERT: 2); 0 = none |
    | embedding_norm, scale_embedding | a norm behind the embeddings (BERT, BART); embeddings times √hidden_size (Vaswani et al.) |
    | positions | "rotary" (arXiv 2104.09864), "learned", or "sinusoidal" (arXiv 1706.03762), added to the embeddings |
    | norm | "rms" (arXiv 1910.07467) or "layer" (arXiv 1607.06450) |
    | norm_place | "pre": x + f(norm(x)), as from GPT-2 on; "post": norm(x + f(x)), as Vaswani et al. |
    | mlp | "swiglu" (Llama), "relu2" (Primer, arXiv 2109.08668: fewest passes over memory), "gelu", "gelu_tanh" (GPT-2), "relu" |
    | attention_bias | on no product, on Q, K and V (Qwen2), or on "all" four (GPT-2) |
    | qk_norm | RMSNorm of every query and key before they are rotated (Qwen3) |
    | sliding_window | how many tokens back layer i sees, itself included: entry i modulo their number; 0 = all. GPT-3 alternates (0, w) |
    | head_dim | hidden_size / num_attention_heads unless given |
    """  # noqa: E501 - a table

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    vocab_size: int = Field(ge=8)
    max_position_embeddings: int = Field(ge=2)
    hidden_size: int = Field(ge=2)
    num_hidden_layers: int = Field(ge=1)
    num_encoder_layers: int = Field(default=0, ge=0)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    mlp: Literal["swiglu", "relu2", "gelu", "gelu_tanh", "relu"] = "swiglu"
    mlp_bias: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    qk_norm: bool = False
    sliding_window: tuple[int, ...] = Field(default=(0,), min_length=1)
    positions: Literal["rotary", "learned", "sinusoidal"] = "rotary"
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_place: Literal["pre", "post"] = "pre"
    norm_eps: float = Field(default=1e-5, gt=0)
    type_vocab_size: int = Field(default=0, ge=0)
    embedding_norm: bool = False
    scale_embedding: bool = False
    tie_word_embeddings: bool = True

    @field_validator("sliding_window")
    @classmethod
    def _shortest_pattern(cls, pattern: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        """So that equal shapes are equal configs: (0, 8, 0, 8) is (0, 8), and in three layers so is (0, 8, 0)."""
        num_hidden_layers = info.data.get("num_hidden_layers", len(pattern))
        if min(pattern) < 0:
            raise ValueError(f"{pattern} has a negative entry; numbers of tokens were expected, 0 for all")
        if len(pattern) > num_hidden_layers:
            raise ValueError(f"{len(pattern)} entries for {num_hidden_layers} layers")
        layers = [pattern[layer % len(pattern)] for layer in range(num_hidden_layers)]
        lengths = range(1, num_hidden_layers + 1)
        return next(tuple(layers[:n]) for n in lengths if all(w == layers[i % n] for i, w in enumerate(layers)))

    @model_validator(mode="before")
    @classmethod
    def _divide_heads(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("head_dim") is not None:
            return values
        hidden_size, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if not (isinstance(hidden_size, int) and isinstance(heads, int) and heads > 0):
            return values  # the fields' own checks say what is wrong
        return {**values, "head_dim": exact_div(hidden_size, heads, "model.hidden_size over model.num_attention_heads")}

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact_div(
            self.num_attention_heads,
            self.num_key_value_heads,
            "model.num_attention_heads over model.num_key_value_heads",
        )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary positions need an even number")
        if self.positions == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"model.hidden_size is {self.hidden_size}; sinusoidal positions need an even number")
        if (self.kind == "encoder-decoder") != (self.num_encoder_layers > 0):
            raise ValueError(f"model.num_encoder_layers is {self.num_encoder_layers}, but model.kind is {self.kind!r}")
        if self.kind != "encoder" and self.type_vocab_size:
            raise ValueError(f"model.type_vocab_size is {self.type_vocab_size}, but model.kind is {self.kind!r}")
        if self.kind != "decoder" and self.sliding_window != (0,):
            raise ValueError(
                f"model.sliding_window is {self.sliding_window}, but model.kind is {self.kind!r}; bands are a decoder's"
            )
        if self.positions != "rotary" and self.rope_scaling is not None:
            raise ValueError(f"model.rope_scaling is given, but model.positions is {self.positions!r}")
        return self

    def require_kind(self, kind: str) -> None:
        """Errors: ValueError for a shape of another kind."""
        if self.kind != kind:
            raise ValueError(f"model.kind is {self.kind!r}; {kind!r} was expected")

    def window(self, layer: int) -> int:
        """How many tokens back the layer sees, itself included; 0 = all."""
        return self.sliding_window[layer % len(self.sliding_window)]
