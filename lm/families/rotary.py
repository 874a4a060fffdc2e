"""Llama and its descendants without experts, each with options or a class; the base of families in other files."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from lm.config import ModelConfig, yarn_factor
from lm.families.family import SIZES, Fields, Stored, expect, read, written

_ROPE_FIELDS_OF = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def rope_to_hf(config: ModelConfig) -> Fields:
    """Returns `rope_parameters` of `config.json`."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {name: getattr(scaling, name) for name in _ROPE_FIELDS_OF[scaling.rope_type]}
    sharpening = {"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}
    return {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta, **values, **sharpening}


def rope_from_hf(raw: Mapping[str, Any], kinds: Collection[str] = tuple(_ROPE_FIELDS_OF)) -> Fields:
    """Returns `rope_theta` and `rope_scaling`, from `rope_parameters` or from the two fields of older checkpoints.

    Raises: ValueError for a scaling that is not one of `kinds`.
    """
    rope = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10_000.0),
        **(raw.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    expect({"rope_type": kind}, "rope_type", "default", *kinds)
    expect(rope, "partial_rotary_factor", 1.0)
    if kind != "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            expect(rope, name, None)
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}
    found = {name: rope[name] for name in _ROPE_FIELDS_OF[kind] if rope.get(name) is not None}
    if kind == "yarn":
        found["attention_factor"] = _attention_factor(rope)
    return {"rope_theta": rope["rope_theta"], "rope_scaling": {"rope_type": kind, **found}}


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Returns YaRN's factor on queries and keys: as given, or from two scales as in DeepSeek-V2; 0 = YaRN's own."""
    given, scales = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if given is None and all(scales):
        ours, of_scores = (yarn_factor(rope["factor"], scale) for scale in scales if scale)
        return ours / of_scores
    return given or 0.0


def _ropes_to_hf(config: ModelConfig) -> Fields:
    """Returns `rope_parameters` where layers with a sliding window have some of their own."""
    every, theta = rope_to_hf(config), config.rope_local_base_freq
    local = {"rope_type": "default", "rope_theta": theta} if theta else every
    return {"full_attention": every, "sliding_attention": local}


def _ropes_from_hf(raw: Mapping[str, Any], theta: float, local_theta: float) -> Fields:
    """Returns what `rope_from_hf` does, and `rope_local_base_freq`; the bases are for fields that are missing.

    Raises: ValueError for layers with a sliding window whose frequencies are stretched in a way of their own.
    """
    ropes = raw.get("rope_parameters") or {}
    scaled = {**(ropes.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    every = rope_from_hf({"rope_parameters": {"rope_theta": theta, **scaled}})
    of_windows = {"rope_theta": local_theta, **(ropes.get("sliding_attention") or {})}
    if rope_from_hf({"rope_parameters": of_windows}) == every:
        return {**every, "rope_local_base_freq": 0.0}
    return {**every, "rope_local_base_freq": rope_from_hf({"rope_parameters": of_windows}, kinds=())["rope_theta"]}


def _layer_types(config: ModelConfig) -> list[str]:
    """Returns `layer_types` of `config.json`."""
    layers = range(config.num_hidden_layers)
    return ["sliding_attention" if config.window(layer) else "full_attention" for layer in layers]


def _windows_in_turn(raw: Mapping[str, Any]) -> list[int]:
    """Returns each layer's window; without `layer_types`, all layers have one but each n-th, as
    `sliding_window_pattern` says: n, or a word of n letters.
    """
    pattern = raw["sliding_window_pattern"]
    every = len(pattern) if isinstance(pattern, str) else pattern or 1
    default = [
        "full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in range(raw["num_hidden_layers"])
    ]
    window = raw["sliding_window"] or 0
    return [window if kind == "sliding_attention" else 0 for kind in raw.get("layer_types") or default]


_FLAGGED = {"flag": "all", "qkv flag": "qkv"}


@dataclass(frozen=True)
class RotaryFamily:
    """Llama and its descendants: RMSNorm before each branch, rotary positions, grouped queries.

    `attention_bias`: which products have biases: "none", "qkv", or if the config's flag is set, with "flag" all four
    and with "qkv flag" those.
    `windows`: which layers have a sliding window: none, all, those that `layer_types` names, or all but each n-th.
    `local_rope`: whether layers with a window have rotary positions of their own.
    `partial_rotary`: whether rotary positions may turn a part of each head.
    `score_prefix`: that of the classifier's name, if it is another; None: transformers has no classifier of the family.
    `even_heads`: transformers refuses a width that is not a multiple of the heads, even if `head_dim` is given.
    `defaults`: the values of transformers for fields missing from config.json; a field that is null is not missing.
    """

    model_type: str
    class_prefix: str
    mlp: Literal["swiglu", "clamped_swiglu", "geglu", "relu2"] = "swiglu"
    attention_bias: Literal["none", "qkv", "flag", "qkv flag"] = "none"
    mlp_bias_flag: bool = False
    windows: Literal["none", "all", "by layer", "in turn"] = "none"
    local_rope: bool = False
    qk_norm: bool = False
    partial_rotary: bool = False
    even_heads: bool = False
    score_prefix: str | None = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> Mapping[str, str]:
        names = {"language": f"{self.class_prefix}ForCausalLM"}
        if self.score_prefix is not None:
            names["score"] = f"{self.score_prefix or self.class_prefix}ForSequenceClassification"
        return names

    @property
    def hidden_act(self) -> str:
        return {"geglu": "gelu_pytorch_tanh", "relu2": "relu2"}.get(self.mlp, "silu")

    def to_hf(self, config: ModelConfig) -> Fields:
        """Returns the shape's fields. Raises: ValueError for a width that transformers refuses."""
        if self.even_heads and config.hidden_size % config.num_attention_heads:
            raise ValueError(f"a width of {config.hidden_size} is not a multiple of {config.num_attention_heads} heads")
        fields = {
            **written(config, SIZES),
            "hidden_act": self.hidden_act,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": self._rope_to(config),
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        if self.attention_bias in _FLAGGED:
            fields["attention_bias"] = config.attention_bias == _FLAGGED[self.attention_bias]
        if self.mlp_bias_flag:
            fields["mlp_bias"] = config.mlp_bias
        window = max(config.sliding_window)
        if self.windows == "all":
            fields["sliding_window"] = window or None
        elif self.windows == "in turn":  # transformers makes a mask for windows in any case
            fields["sliding_window"] = window or self.defaults["sliding_window"]
            fields["layer_types"] = _layer_types(config)
        elif self.windows == "by layer":
            kinds = _layer_types(config)
            fields |= {
                "use_sliding_window": window > 0,
                "sliding_window": window or None,
                "max_window_layers": kinds.index("sliding_attention") if window else len(kinds),
                "layer_types": kinds,
            }
        return fields

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        expect(raw, "hidden_act", self.hidden_act)
        if not self.mlp_bias_flag:
            expect(raw, "mlp_bias", False)
        if self.attention_bias not in _FLAGGED:
            expect(raw, "attention_bias", False, *([True] if self.attention_bias == "qkv" else []))
        flagged = _FLAGGED.get(self.attention_bias)
        bias = self.attention_bias if flagged is None else flagged if raw.get("attention_bias") else "none"
        heads, windows, rope = raw["num_attention_heads"], self._windows_from(raw), self._rope_from(raw)
        if self.local_rope and not any(windows):
            rope["rope_local_base_freq"] = 0.0
        return {
            **read({"head_dim": None, **raw, "num_key_value_heads": raw.get("num_key_value_heads") or heads}, SIZES),
            "mlp": self.mlp,
            "mlp_bias": bool(raw.get("mlp_bias")),
            "attention_bias": bias,
            "qk_norm": self.qk_norm,
            "sliding_window": windows,
            "norm_eps": raw["rms_norm_eps"],
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            **rope,
        }

    def _rope_to(self, config: ModelConfig) -> Fields:
        if self.local_rope:
            return _ropes_to_hf(config)
        rope = rope_to_hf(config)
        expect(rope, "rope_type", "default", *self._SCALINGS)
        return {**rope, "partial_rotary_factor": config.partial_rotary_factor} if self.partial_rotary else rope

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        if self.local_rope:
            return _ropes_from_hf(raw, raw["rope_theta"], raw["rope_local_base_freq"])
        if not self.partial_rotary:
            return rope_from_hf(raw, self._SCALINGS)
        rope = dict(raw.get("rope_parameters") or {})
        part = rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        return {**rope_from_hf({**raw, "rope_parameters": rope}, self._SCALINGS), "partial_rotary_factor": part}

    def _windows_from(self, raw: Mapping[str, Any]) -> list[int]:
        window, num_layers = raw.get("sliding_window") or 0, raw["num_hidden_layers"]
        if self.windows == "in turn":
            return _windows_in_turn(raw)
        if self.windows == "all":
            return [window]
        if self.windows == "none" or not raw.get("use_sliding_window"):
            return [0]
        first = raw.get("max_window_layers", num_layers)
        by_default = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
        kinds = raw.get("layer_types") or by_default
        return [window if kind == "sliding_attention" else 0 for kind in kinds]

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        query *= 1 + config.attn_output_gate
        stacked = {
            "attention.qkv": {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key},
            "mlp.up": {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size},
        }
        module, _, kind = ours.rpartition(".")
        if not module.startswith("decoder.blocks."):
            return Stored({f"{self._OUTER[module]}.{kind}": None})
        _, _, layer, inner = module.split(".", 3)
        if inner in stacked and inner not in self._WHOLE and (config.is_gated or inner != "mlp.up"):
            return Stored({f"model.layers.{layer}.{part}.{kind}": rows for part, rows in stacked[inner].items()})
        return Stored({f"model.layers.{layer}.{self._INNER[inner]}.{kind}": None})

    _OUTER: ClassVar = {
        "decoder.embedding": "model.embed_tokens",
        "decoder.norm": "model.norm",
        "head": "lm_head",
        "score": "score",
    }
    _SCALINGS: ClassVar[tuple[str, ...]] = tuple(_ROPE_FIELDS_OF)
    _WHOLE: ClassVar[tuple[str, ...]] = ()  # the stacked maps that a checkpoint stores as one tensor
    _INNER: ClassVar = {
        "attention_norm": "input_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }


OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


class Olmo2Family(RotaryFamily):
    """OLMo 2 (arXiv 2501.00656): RMSNorm of each branch's output instead of its input, and of all heads' queries or
    keys together.
    """

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {**super().from_hf(raw), "norm_place": "output", "qk_norm": True, "qk_norm_over": "projection"}

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS}


class Phi3Family(RotaryFamily):
    """Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): one tensor for Q, K and V and one for gate and up, and rotary
    positions for a part of each head.

    The long contexts of Phi-3 (128k) and Phi-4-mini are refused: their rope_type, "longrope", has other frequencies for
    rows that are longer than the original context.
    """

    _SCALINGS: ClassVar = ()  # others are refused by transformers
    _WHOLE: ClassVar = ("attention.qkv", "mlp.up")
    _INNER: ClassVar = {
        **RotaryFamily._INNER, "attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj",
    }  # fmt: skip


_SMOLLM3 = {"num_key_value_heads": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "rope_theta": 2e6}


class SmolLM3Family(RotaryFamily):
    """SmolLM3 (Hugging Face, 2025): Llama without positions in every fourth layer (arXiv 2501.18795)."""

    def to_hf(self, config: ModelConfig) -> Fields:
        fields, bare = super().to_hf(config), config.layers_without_positions
        del fields["max_window_layers"]
        return {**fields, "no_rope_layers": [int(n not in bare) for n in range(config.num_hidden_layers)]}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**_SMOLLM3, **raw}
        every, layers = raw["no_rope_layer_interval"], range(raw["num_hidden_layers"])
        turned = raw.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        bare = [layer for layer in layers if not turned[layer]]
        kinds = raw.get("layer_types") or ["sliding_attention" if n in bare else "full_attention" for n in layers]
        return {**super().from_hf({**raw, "layer_types": kinds}), "layers_without_positions": bare}


class Exaone4Family(RotaryFamily):
    """EXAONE 4 (arXiv 2507.11407): RMSNorm of each branch's output, and of queries and keys. In its hybrid form, three
    of four layers have a sliding window, and the others no positions.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        is_hybrid = any(config.sliding_window) or config.layers_without_positions
        return {**super().to_hf(config), **({} if is_hybrid else {"sliding_window": None})}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        fields = {**super().from_hf(raw), "norm_place": "output"}
        if {**self.defaults, **raw}["sliding_window"] is None:
            return fields
        bare = [layer for layer, window in enumerate(fields["sliding_window"]) if not window]
        return {**fields, "layers_without_positions": bare}

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS}


_GLM4 = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}


class Glm4Family(RotaryFamily):
    """GLM-4 of 2025, such as GLM-4-9B-0414 (arXiv 2406.12793 and its model card): RMSNorm before and after each branch;
    rotary positions turn neighbouring dimensions of half of each head.
    """

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return {**super().from_hf({**_GLM4, **raw}), "norm_place": "sandwich", "rope_interleave": True}

    _WHOLE: ClassVar = ("mlp.up",)
    _INNER: ClassVar = {
        **RotaryFamily._INNER,
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp.up": "mlp.gate_up_proj",
        "mlp_output_norm": "post_mlp_layernorm",
    }


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma2Family(RotaryFamily):
    """Gemma 2 (arXiv 2408.00118): RMSNorm before and after each branch, a sliding window in every second layer, and
    caps of scores and logits. Gemma 3 without its vision tower (arXiv 2503.19786) has RMSNorm of queries and keys
    instead of caps, and windows in five of six layers, with a rotary base of their own.

    Norms multiply by 1 + weight. Heed's weights are those sums, so that norms are the same in all families.
    """

    def to_hf(self, config: ModelConfig) -> Fields:
        fields, divisor = super().to_hf(config), config.query_pre_attn_scalar or config.head_dim
        fields["hidden_activation"] = fields.pop("hidden_act")
        if divisor % 1:
            raise ValueError(f"query_pre_attn_scalar is {divisor}; transformers expects a whole number")
        return {
            **fields,
            "query_pre_attn_scalar": int(divisor),
            **{name: getattr(config, name) or None for name in _CAPS},
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        expect(raw, "use_bidirectional_attention", False, None)
        expect(raw, "hidden_activation", self.hidden_act)
        return {
            **super().from_hf(raw),
            "norm_place": "sandwich",
            "scale_embedding": True,
            "query_pre_attn_scalar": raw["query_pre_attn_scalar"],
            **{name: raw[name] or 0.0 for name in _CAPS},
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        place = super().stored(config, ours)
        return replace(place, added=1.0) if ours.endswith("norm.weight") else place

    _INNER: ClassVar = {**RotaryFamily._INNER, **OUTPUT_NORMS, "mlp_norm": "pre_feedforward_layernorm"}


_BETA = "llama_4_scaling_beta"


class Ministral3Family(RotaryFamily):
    """Ministral 3 without its vision tower (Mistral AI, 2025): Mistral with YaRN, whose queries grow with each length
    of the original context.
    """

    def _rope_to(self, config: ModelConfig) -> Fields:
        rope, scaling = super()._rope_to(config), config.rope_scaling
        if scaling is None:
            raise ValueError("transformers expects YaRN in this family")
        if rope.get("attention_factor") == 1:  # as it is published
            del rope["attention_factor"]
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
        return {**rope, _BETA: scaling.llama_4_scaling_beta}

    def _rope_from(self, raw: Mapping[str, Any]) -> Fields:
        fields, rope = super()._rope_from(raw), raw["rope_parameters"]
        expect({"rope_type": rope.get("rope_type", rope.get("type"))}, "rope_type", *self._SCALINGS)
        return {**fields, "rope_scaling": {**fields["rope_scaling"], _BETA: rope[_BETA]}}

    _SCALINGS: ClassVar = ("yarn",)


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


class GraniteFamily(RotaryFamily):
    """Granite 3 (IBM, 2024): Llama with factors on embeddings, scores, branches and logits (µP, arXiv 2203.03466)."""

    def to_hf(self, config: ModelConfig) -> Fields:
        return {
            **super().to_hf(config),
            "attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
            **{name: getattr(config, name) for name in _MULTIPLIERS},
        }

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        # Rounded, so that a number that is written and read again is the same.
        divisor = float(f"{raw.get('attention_multiplier', 1.0) ** -2:.12g}")
        factors = {name: raw.get(name, 1.0) for name in _MULTIPLIERS}
        return {**super().from_hf(raw), "query_pre_attn_scalar": divisor, **factors}
