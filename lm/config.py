"""The shape of a transformer."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Precision = Literal["fp32", "bf16"]  # of matrix products; sums and master weights are fp32


_OF_EXPERTS = (  # fields that mean nothing without experts
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "scoring_func", "router_bias",
    "routed_scaling_factor", "shared_expert_intermediate_size", "shared_expert_gate", "mlp_only_layers", "n_group",
    "topk_group",
)  # fmt: skip
_OF_LINEAR = (  # and without linear layers
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # and without latent attention


def exact_div(numerator: int, denominator: int, what: str) -> int:
    """Divide without a remainder. Raises: ValueError naming `what` if there is one."""
    if denominator <= 0 or numerator % denominator:
        raise ValueError(f"{what}: {numerator} is not a multiple of {denominator}")
    return numerator // denominator


def yarn_factor(factor: float, scale: float = 1.0) -> float:
    """Returns 0.1 · scale · ln(factor) + 1, with which YaRN sharpens attention (arXiv 2309.00071, eq. 22)."""
    return 0.1 * scale * math.log(factor) + 1


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched for a context longer than pretraining's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["linear", "llama3", "yarn"] = Field(
        description="`linear` divides all frequencies by `factor` (arXiv 2306.15595). `llama3` divides those whose"
        " wavelength exceeds original / `low_freq_factor`, keeps those below original / `high_freq_factor`, and blends"
        " in between. `yarn` blends over the number of turns in the original context, from `beta_slow` to `beta_fast`,"
        " and sharpens attention (arXiv 2309.00071, eq. 17 to 22)."
    )
    factor: float = Field(ge=1, description="How many times longer the new context is than the original.")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=1, description="Context of pretraining, in tokens; needed by llama3 and yarn."
    )
    low_freq_factor: float = Field(default=1.0, gt=0, description="llama3: see `rope_type`.")
    high_freq_factor: float = Field(default=4.0, gt=0, description="llama3: see `rope_type`.")
    beta_fast: float = Field(default=32.0, gt=0, description="yarn: turns above which a frequency is kept.")
    beta_slow: float = Field(default=1.0, gt=0, description="yarn: turns below which a frequency is divided.")
    truncate: bool = Field(
        default=True,
        description="yarn: whether the blend starts and ends at whole pairs of dimensions (not in gpt-oss).",
    )
    attention_factor: float = Field(
        default=0.0, ge=0, description="yarn: factor on queries and keys; 0 = 0.1 ln(`factor`) + 1 (its eq. 22)."
    )
    llama_4_scaling_beta: float = Field(
        default=0.0,
        ge=0,
        description="b in a query's factor 1 + b ln(1 + ⌊position / original_max_position_embeddings⌋) (Ministral 3).",
    )

    @field_validator("attention_factor")
    @classmethod
    def _zero_for_yarns_own(cls, value: float, info: ValidationInfo) -> float:
        return 0.0 if math.isclose(value, yarn_factor(info.data.get("factor", 1.0)), rel_tol=1e-9) else value

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
        if self.attention_factor and self.rope_type != "yarn":
            raise ValueError(
                f"model.rope_scaling.attention_factor is {self.attention_factor}, but rope_type is {self.rope_type!r}"
            )
        if self.llama_4_scaling_beta and self.original_max_position_embeddings is None:
            raise ValueError(
                "model.rope_scaling.original_max_position_embeddings is missing; llama_4_scaling_beta needs it"
            )
        return self


class ModelConfig(BaseModel):
    """Embeddings, blocks of self-attention and an MLP, and a final norm for pre-norm models.

    Fields have the names of a Hugging Face config.json where that has one for the same thing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["decoder", "encoder", "encoder-decoder"] = Field(
        default="decoder",
        description="`decoder` (GPT), `encoder` (BERT, arXiv 1810.04805: tokens attend in both directions) or"
        " `encoder-decoder` (arXiv 1706.03762).",
    )
    vocab_size: int = Field(ge=8, description="Tokens in the vocabulary.")
    max_position_embeddings: int = Field(ge=2, description="Context length, in tokens.")
    hidden_size: int = Field(ge=2, description="Width of the residual stream.")
    num_hidden_layers: int = Field(ge=1, description="Number of blocks, or of decoder blocks in an encoder-decoder.")
    num_encoder_layers: int = Field(default=0, ge=0, description="Blocks of the encoder in an encoder-decoder.")
    num_attention_heads: int = Field(ge=1, description="Query heads per block.")
    num_key_value_heads: int = Field(
        default=0,
        ge=1,
        description="Key-value heads per block (grouped-query attention); num_attention_heads if absent.",
    )
    head_dim: int = Field(
        default=0,
        ge=1,
        description="Size of a head; if absent, hidden_size / num_attention_heads, or with `kv_lora_rank`"
        " qk_nope_head_dim + qk_rope_head_dim.",
    )
    kv_lora_rank: int = Field(
        default=0,
        ge=0,
        description="Width of the vector from which a token's keys and values are made (latent attention, DeepSeek-V2,"
        " arXiv 2405.04434); 0 = they are made from the residual stream.",
    )
    q_lora_rank: int = Field(default=0, ge=0, description="The same for queries; 0 = from the residual stream.")
    qk_nope_head_dim: int = Field(
        default=0, ge=0, description="With `kv_lora_rank`: dimensions of queries and keys without positions."
    )
    qk_rope_head_dim: int = Field(
        default=0, ge=0, description="With `kv_lora_rank`: those with positions; all heads share their keys."
    )
    v_head_dim: int = Field(default=0, ge=0, description="With `kv_lora_rank`: size of a head's values.")
    intermediate_size: int = Field(ge=1, description="Width of the MLP.")
    mlp: Literal["swiglu", "clamped_swiglu", "geglu", "relu2", "gelu", "gelu_tanh", "relu"] = Field(
        default="swiglu",
        description="`swiglu` (Llama), `clamped_swiglu` (gpt-oss), `geglu` (a gate with `gelu_tanh`; Gemma), `relu2`"
        " (Primer, arXiv 2109.08668: fewest passes over memory), `gelu`, `gelu_tanh` (GPT-2) or `relu`.",
    )
    mlp_bias: bool = Field(
        default=False, description="Whether the linear layers of the MLP, or of experts and their router, have a bias."
    )
    num_experts: int = Field(
        default=0,
        ge=0,
        description="Experts per mixture layer (arXiv 1701.06538): small MLPs, of which each token uses"
        " `num_experts_per_tok`; 0 = every layer has a plain MLP.",
    )
    num_experts_per_tok: int = Field(default=0, ge=0, description="Experts that a token uses.")
    moe_intermediate_size: int = Field(default=0, ge=0, description="Width of an expert.")
    norm_topk_prob: bool = Field(
        default=False,
        description="Whether the weights of a token's experts are divided by their sum (Qwen3-MoE): the softmax of"
        " these experts alone.",
    )
    scoring_func: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="What makes a router's scores of its products (`sigmoid`: DeepSeek-V3, GLM-4.5)."
    )
    router_bias: bool = Field(
        default=False,
        description="Whether each expert has a bias that counts only in choosing experts (DeepSeek-V3, arXiv"
        " 2412.19437); `engine.router_bias_speed` moves it towards an even load.",
    )
    n_group: int = Field(default=1, ge=1, description="Groups of consecutive experts, of which a token uses a few.")
    topk_group: int = Field(
        default=1,
        ge=1,
        description="The groups that a token uses: those with the best expert or, with `router_bias`, the largest sum"
        " of two (DeepSeek-V2 and V3).",
    )
    routed_scaling_factor: float = Field(
        default=1.0, gt=0, description="What the sum over a token's experts is multiplied by."
    )
    shared_expert_intermediate_size: int = Field(
        default=0, ge=0, description="Width of an MLP that every token uses in addition to its experts; 0 = none."
    )
    shared_expert_gate: bool = Field(
        default=False, description="Whether each token multiplies it by the sigmoid of a product (Qwen2-MoE)."
    )
    mlp_only_layers: tuple[int, ...] = Field(
        default=(), description="Numbers of the layers of a mixture, from 0, that have a plain MLP."
    )
    attention_bias: Literal["none", "qkv", "all"] = Field(
        default="none",
        description="Attention's linear layers with a bias: none, Q, K and V (Qwen2), or all four (GPT-2).",
    )
    attn_output_gate: bool = Field(
        default=False,
        description="Whether what attention reads is multiplied by the sigmoid of a product, per head and dimension"
        " (Qwen3-Next, arXiv 2505.06708).",
    )
    attention_sinks: bool = Field(
        default=False,
        description="Whether the softmax of each head has one more score, which is learned and has no value (gpt-oss,"
        " arXiv 2508.10925).",
    )
    qk_norm: bool = Field(
        default=False, description="RMSNorm of every query and key before rotary positions are applied (Qwen3)."
    )
    qk_norm_over: Literal["head", "projection"] = Field(
        default="head", description="`head`: `qk_norm` is of each head; `projection`: of all heads together (OLMo 2)."
    )
    query_pre_attn_scalar: float = Field(
        default=0.0,
        ge=0,
        description="Products of queries and keys are divided by the root of this number (Gemma 3); 0 = head_dim.",
    )
    attn_logit_softcapping: float = Field(
        default=0.0, ge=0, description="c in scores of c tanh(s / c) instead of s (Gemma 2, arXiv 2408.00118); 0 = s."
    )
    sliding_window: tuple[int, ...] = Field(
        default=(0,),
        min_length=1,
        description="How many tokens back each layer attends, the token itself included; 0 = all. Layer i has entry"
        " i modulo the length: [0, 256] alternates as in GPT-3. One number counts for all layers.",
    )
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = Field(
        default=("full_attention",),
        min_length=1,
        description="`linear_attention` layers keep a state of fixed size per sequence instead of keys and values"
        " (Gated DeltaNet, arXiv 2412.06464; Qwen3-Next). Layer i has entry i modulo the length.",
    )
    linear_num_key_heads: int = Field(default=0, ge=0, description="Linear layers: heads of queries and keys.")
    linear_num_value_heads: int = Field(
        default=0, ge=0, description="Linear layers: heads of values; a multiple of `linear_num_key_heads`."
    )
    linear_key_head_dim: int = Field(default=0, ge=0, description="Linear layers: size of a query or key.")
    linear_value_head_dim: int = Field(default=0, ge=0, description="Linear layers: size of a value.")
    linear_conv_kernel_dim: int = Field(
        default=0, ge=0, description="Linear layers: how many tokens the convolution of queries, keys and values reads."
    )
    positions: Literal["rotary", "learned", "sinusoidal", "relative"] = Field(
        default="rotary",
        description="`rotary` (arXiv 2104.09864), `learned` or `sinusoidal` (arXiv 1706.03762) embeddings added to the"
        " tokens', or `relative`: a number per head and distance added to the scores (T5, arXiv 1910.10683).",
    )
    relative_attention_num_buckets: int = Field(
        default=32,
        ge=4,
        description="Groups of distances that `relative` positions tell apart; an encoder uses half per direction.",
    )
    relative_attention_max_distance: int = Field(
        default=128, ge=2, description="Distance in tokens from which on `relative` positions tell none apart."
    )
    positions_every_layer: bool = Field(
        default=False,
        description="Whether `learned` or `sinusoidal` positions are added to the input of every layer, not only of the"
        " first. `rotary` ones already act in every layer, on queries and keys alone.",
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(default=None, description="Stretched rotary frequencies; absent = none.")
    rope_local_base_freq: float = Field(
        default=0.0,
        ge=0,
        description="Base of the rotary frequencies, unstretched, in layers with a sliding window (Gemma 3); 0 = as in"
        " the other layers.",
    )
    partial_rotary_factor: float = Field(
        default=1.0, gt=0, le=1, description="The part of each head that rotary positions turn, from its start (Phi-4)."
    )
    rope_interleave: bool = Field(
        default=False,
        description="Whether rotary positions turn neighbouring dimensions (GLM-4), not those half apart.",
    )
    layers_without_positions: tuple[int, ...] = Field(
        default=(), description="Numbers of the layers, from 0, without `rotary` positions (SmolLM3, EXAONE 4)."
    )
    norm: Literal["rms", "layer"] = Field(
        default="rms", description="`rms` (RMSNorm, arXiv 1910.07467) or `layer` (LayerNorm, arXiv 1607.06450)."
    )
    norm_place: Literal["pre", "post", "output", "sandwich"] = Field(
        default="pre",
        description="`pre`: x + f(norm(x)), as from GPT-2 on; `post`: norm(x + f(x)), as Vaswani et al.; `output`:"
        " x + norm(f(x)) (OLMo 2, arXiv 2501.00656); `sandwich`: x + norm(f(norm(x))) (Gemma 3, arXiv 2503.19786).",
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="ε in the norms.")
    type_vocab_size: int = Field(
        default=0, ge=0, description="Token types (segments) that an encoder distinguishes; BERT has 2, 0 = none."
    )
    embedding_norm: bool = Field(default=False, description="A norm after the embeddings (BERT, BART).")
    scale_embedding: bool = Field(default=False, description="Embeddings times √hidden_size (Vaswani et al.).")
    embedding_multiplier: float = Field(default=1.0, gt=0, description="Factor on the tokens' embeddings (Granite).")
    residual_multiplier: float = Field(
        default=1.0, gt=0, description="Factor on what each branch adds to the residual stream (Granite)."
    )
    logits_scaling: float = Field(default=1.0, gt=0, description="What a decoder's logits are divided by (Granite).")
    final_logit_softcapping: float = Field(
        default=0.0, ge=0, description="c in a decoder's logits of c tanh(z / c) instead of z (Gemma 2); 0 = z."
    )
    tie_word_embeddings: bool = Field(
        default=True, description="Whether the output layer shares the weights of the token embeddings."
    )

    @field_validator("query_pre_attn_scalar")
    @classmethod
    def _zero_for_head_dim(cls, divisor: float, info: ValidationInfo) -> float:
        return 0 if divisor == info.data.get("head_dim") else divisor

    @field_validator("sliding_window", mode="before")
    @classmethod
    def _one_window(cls, pattern: Any) -> Any:
        return (pattern,) if isinstance(pattern, int) else pattern

    @field_validator("sliding_window")
    @classmethod
    def _no_negative_window(cls, pattern: tuple[int, ...]) -> tuple[int, ...]:
        if min(pattern) < 0:
            raise ValueError(f"{pattern} has a negative entry; numbers of tokens were expected, 0 for all")
        return pattern

    @field_validator("sliding_window", "layer_types")
    @classmethod
    def _shortest_pattern(cls, pattern: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        """Make equal shapes equal configs: (0, 8, 0, 8) becomes (0, 8), and in three layers so does (0, 8, 0)."""
        num_hidden_layers = info.data.get("num_hidden_layers", len(pattern))
        if len(pattern) > num_hidden_layers:
            raise ValueError(f"{len(pattern)} entries for {num_hidden_layers} layers")
        layers = [pattern[layer % len(pattern)] for layer in range(num_hidden_layers)]
        lengths = range(1, num_hidden_layers + 1)
        return next(tuple(layers[:n]) for n in lengths if all(w == layers[i % n] for i, w in enumerate(layers)))

    @model_validator(mode="before")
    @classmethod
    def _divide_heads(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        hidden_size, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if not (isinstance(hidden_size, int) and isinstance(heads, int) and heads > 0):
            return values  # the fields' own checks say what is wrong
        unknown = [name for name in ("head_dim", "num_key_value_heads") if values.get(name) is None]
        given = {name: value for name, value in values.items() if name not in unknown}
        if "head_dim" not in given:
            latent = values.get("kv_lora_rank") and [values.get(name) for name in _OF_LATENT[1:3]]
            if latent and all(isinstance(size, int) for size in latent):
                given["head_dim"] = sum(latent)
            else:
                given["head_dim"] = exact_div(hidden_size, heads, "model.hidden_size over model.num_attention_heads")
        return {"num_key_value_heads": heads, **given}

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact_div(
            self.num_attention_heads,
            self.num_key_value_heads,
            "model.num_attention_heads over model.num_key_value_heads",
        )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise ValueError(f"model.qk_norm_over is {self.qk_norm_over!r}, but model.qk_norm is false")
        if (self.kind == "encoder-decoder") != (self.num_encoder_layers > 0):
            raise ValueError(f"model.num_encoder_layers is {self.num_encoder_layers}, but model.kind is {self.kind!r}")
        if self.kind != "encoder" and self.type_vocab_size:
            raise ValueError(f"model.type_vocab_size is {self.type_vocab_size}, but model.kind is {self.kind!r}")
        if self.kind != "decoder" and self.sliding_window != (0,):
            raise ValueError(
                f"model.sliding_window is {self.sliding_window}, but model.kind is {self.kind!r}, not 'decoder'"
            )
        if self.attention_sinks and self.kind != "decoder":
            raise ValueError(f"model.attention_sinks is true, but model.kind is {self.kind!r}, not 'decoder'")
        if self.kind == "encoder-decoder" and self.norm_place not in ("pre", "post"):
            raise ValueError(f"model.norm_place is {self.norm_place!r}, but model.kind is {self.kind!r}")
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"):
            if self.kind != "decoder" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name} is {getattr(self, name)}, but model.kind is {self.kind!r}")
        return self

    @model_validator(mode="after")
    def _check_linear(self) -> Self:
        has_linear = "linear_attention" in self.layer_types
        if (has_linear or self.attn_output_gate) and self.kind != "decoder":
            what = "layer_types has linear_attention" if has_linear else "attn_output_gate is true"
            raise ValueError(f"model.{what}, but model.kind is {self.kind!r}, not 'decoder'")
        if self.attn_output_gate and self.kv_lora_rank:
            raise ValueError("model.attn_output_gate is true, with kv_lora_rank; at most one of them was expected")
        for name in _OF_LINEAR:
            if (getattr(self, name) > 0) != has_linear:
                raise ValueError(
                    f"model.{name} is {getattr(self, name)}, but model.layer_types is {list(self.layer_types)};"
                    f" {'a positive number' if has_linear else '0, without linear_attention,'} was expected"
                )
        if has_linear:
            heads = "model.linear_num_value_heads over model.linear_num_key_heads"
            exact_div(self.linear_num_value_heads, self.linear_num_key_heads, heads)
        return self

    @model_validator(mode="after")
    def _check_latent(self) -> Self:
        expected = {
            "head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim, "num_key_value_heads": self.num_attention_heads,
            "kind": "decoder", "positions": "rotary", "qk_norm": False, "partial_rotary_factor": 1.0,
        }  # fmt: skip
        for name, value in expected.items() if self.kv_lora_rank else ():
            if getattr(self, name) != value:
                raise ValueError(f"model.{name} is {getattr(self, name)!r}; {value!r} was expected with kv_lora_rank")
        for name in _OF_LATENT:
            least = int(self.kv_lora_rank > 0 and name != "q_lora_rank")
            most = self.head_dim if self.kv_lora_rank and name != "q_lora_rank" else self.kv_lora_rank and math.inf
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"model.{name} is {getattr(self, name)}, and model.kv_lora_rank {self.kv_lora_rank};"
                    f" {least} to {most} was expected"
                )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if not self.num_experts:
            for name in _OF_EXPERTS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"model.{name} is {getattr(self, name)}, but model.num_experts is 0")
            return self
        if self.kind != "decoder" or not self.is_gated:
            raise ValueError(
                f"model.num_experts is {self.num_experts}, but experts are gated MLPs in a decoder;"
                f" found model.kind {self.kind!r}, model.mlp {self.mlp!r}"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok is {self.num_experts_per_tok}; 1 to {self.num_experts}, the number of"
                " experts, was expected"
            )
        group = exact_div(self.num_experts, self.n_group, "model.num_experts over model.n_group")
        fewest = max(1, -(-self.num_experts_per_tok // group))
        if not fewest <= self.topk_group <= self.n_group or (self.router_bias and self.n_group > 1 == group):
            raise ValueError(
                f"model.topk_group is {self.topk_group}, of {self.n_group} groups of {group} experts; {fewest} to"
                f" {self.n_group} groups, with router_bias of at least two experts, were expected"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError(
                "model.shared_expert_gate is true, but model.shared_expert_intermediate_size is 0; the width of the"
                " expert that is gated was expected"
            )
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, name) % 8 or not getattr(self, name):
                raise ValueError(
                    f"model.{name} is {getattr(self, name)}, in a mixture of experts; a multiple of 8 was expected, as"
                    " PyTorch's grouped products need it"
                )
        layers = range(self.num_hidden_layers)
        plain = self.mlp_only_layers
        if list(plain) != sorted({*plain} & {*layers}) or len(plain) == len(layers):
            raise ValueError(
                f"model.mlp_only_layers is {list(plain)}; different numbers from 0 to {len(layers) - 1},"
                " in order, and not all of them were expected"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary positions need an even number")
        for name in ("partial_rotary_factor", "rope_interleave", "layers_without_positions", "rope_scaling"):
            if self.positions != "rotary" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"model.{name} is {getattr(self, name)}, but model.positions is {self.positions!r}")
        if self.rope_interleave and self.qk_norm:
            raise ValueError("model.rope_interleave and model.qk_norm are true; at most one of them was expected")
        bare = self.layers_without_positions
        if list(bare) != sorted({*bare} & {*range(self.num_hidden_layers)}):
            raise ValueError(
                f"model.layers_without_positions is {list(bare)}; different numbers from 0 to"
                f" {self.num_hidden_layers - 1}, in order, were expected"
            )
        if self.positions == "rotary" and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ValueError(
                f"model.partial_rotary_factor is {self.partial_rotary_factor}: positions turn {self.rotary_dim} of"
                f" {self.head_dim} dimensions; an even number, at least 2, was expected"
            )
        if self.rope_local_base_freq and (self.positions != "rotary" or not any(self.sliding_window)):
            raise ValueError(
                f"model.rope_local_base_freq is {self.rope_local_base_freq}, but no layer has rotary positions and a"
                " sliding window"
            )
        if self.positions == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"model.hidden_size is {self.hidden_size}; sinusoidal positions need an even number")
        if self.positions_every_layer and not self.adds_positions:
            raise ValueError(
                f"model.positions_every_layer is true, but model.positions is {self.positions!r}, which every layer"
                " applies to its queries and keys; 'learned' or 'sinusoidal' was expected"
            )
        if self.positions == "relative" and self.kind != "encoder-decoder":
            raise ValueError(f"model.positions is 'relative', but model.kind is {self.kind!r}, not 'encoder-decoder'")
        buckets, farthest = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if self.positions == "relative" and farthest <= buckets // 2:
            raise ValueError(
                f"model.relative_attention_max_distance is {farthest}; more than half of"
                f" model.relative_attention_num_buckets, {buckets}, was expected"
            )
        return self

    def with_blocks(self, dropped: int, added: int) -> Self:
        """Returns the shape without its last `dropped` blocks, and then with `added` new ones. They are the decoder's
        if the model has an encoder too.

        Raises: ValueError if no block is left.
        """
        kept = self.num_hidden_layers - dropped
        if kept < 0 or not kept + added:
            raise ValueError(
                f"dropped_layers is {dropped} and added_layers {added}; the model has {self.num_hidden_layers} blocks,"
                " and at least one was expected to be left"
            )
        changed = {
            "num_hidden_layers": kept + added,
            "sliding_window": [self.window(layer) for layer in range(kept + added)],
            "layer_types": [self.layer_types[layer % len(self.layer_types)] for layer in range(kept + added)],
            "mlp_only_layers": [layer for layer in self.mlp_only_layers if layer < kept],
            "layers_without_positions": [layer for layer in self.layers_without_positions if layer < kept],
        }
        return type(self).model_validate(self.model_dump() | changed)

    def require_kind(self, kind: str) -> None:
        """Check the model's kind. Raises: ValueError for another kind."""
        if self.kind != kind:
            raise ValueError(f"model.kind is {self.kind!r}; {kind!r} was expected")

    @property
    def num_linear_layers(self) -> int:
        """How many layers have linear attention."""
        return sum(map(self.is_linear, range(self.num_hidden_layers)))

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by: attention divides scores by √head_dim, whatever the config's root."""
        return math.sqrt(self.head_dim / self.query_pre_attn_scalar) if self.query_pre_attn_scalar else 1.0

    @property
    def adds_positions(self) -> bool:
        """Whether vectors of positions are added to the tokens'."""
        return self.positions in ("learned", "sinusoidal")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP multiplies by the activation of a gate."""
        return self.mlp in ("swiglu", "clamped_swiglu", "geglu")

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of each head rotary positions turn."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def norms_outputs(self) -> bool:
        """Whether the outputs of attention and MLP are normed before they are added to the residual stream."""
        return self.norm_place in ("output", "sandwich")

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.mlp_only_layers

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.layer_types[layer % len(self.layer_types)] == "linear_attention"

    def window(self, layer: int) -> int:
        """Returns how many tokens back a layer attends, the token itself included; 0 = all."""
        return self.sliding_window[layer % len(self.sliding_window)]
