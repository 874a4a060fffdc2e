"""The shape of a transformer."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


def exact_div(numerator: int, denominator: int, what: str) -> int:
    """`numerator / denominator`, refused with ValueError naming `what` unless it is whole."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not a multiple of {denominator}")
    return numerator // denominator


class ModelConfig(BaseModel):
    """A decoder: token embedding, `num_layers` pre-norm blocks of rotary attention and an MLP, a final RMSNorm.

    `mlp = "swiglu"` is Llama's block (arXiv 2302.13971), `mlp = "relu2"` the ungated squared ReLU of Primer
    (arXiv 2109.08668) as Arcee ships it; the second needs fewer passes over memory, which is what a CPU lacks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(ge=8)
    context_tokens: int = Field(ge=2)
    width: int = Field(ge=2)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    mlp_width: int = Field(ge=1)
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact_div(self.width, self.num_heads, "model.width over model.num_heads")
        exact_div(self.num_heads, self.num_kv_heads, "model.num_heads over model.num_kv_heads")
        if self.head_dim % 2:
            raise ValueError(f"model.width / model.num_heads is {self.head_dim}; rotary positions need an even number")
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads
