"""Qwen3-Next and Qwen3.5: most layers have linear attention by the gated delta rule (`lm.delta`), the others a gate."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lm.config import ModelConfig
from lm.families.family import Fields, Stored
from lm.families.mixtures import Qwen2MoeFamily
from lm.families.rotary import RotaryFamily

_SIZES = {  # of linear layers, and what transformers takes for missing ones
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_INNER = {  # the other tensors of a linear layer
    "conv": "conv1d.weight", "a_log": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight",
    "out.weight": "out_proj.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Qwen35Family(RotaryFamily):
    """Qwen3.5 without experts. Norms but those in linear layers multiply by 1 + weight, as Gemma's do."""

    attention_bias: Literal["none", "qkv", "flag", "qkv flag"] = "flag"
    qk_norm: bool = True
    partial_rotary: bool = True

    def to_hf(self, config: ModelConfig) -> Fields:
        kinds = [
            "linear_attention" if config.is_linear(n) else "full_attention" for n in range(config.num_hidden_layers)
        ]
        sizes = {name: getattr(config, name) for name in _SIZES} if config.num_linear_layers else {}
        return {**super().to_hf(config), **sizes, "layer_types": kinds}

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**_SIZES, **self.defaults, **raw}
        num_layers, every = raw["num_hidden_layers"], raw.get("full_attention_interval", 4)
        in_turn = ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(num_layers)]
        kinds = raw.get("layer_types") or in_turn
        has_linear = "linear_attention" in kinds
        return {
            **super().from_hf(raw),
            "attention_bias": "all" if raw.get("attention_bias") else "none",
            "attn_output_gate": True,
            "layer_types": kinds,
            **({name: raw[name] for name in _SIZES} if has_linear else {}),
        }

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        before, _, inner = ours.partition(".attention.")
        layer = before.rpartition(".")[2]
        if not inner or not config.is_linear(int(layer)):
            place = super().stored(config, ours)
            return replace(place, added=1.0) if ours.endswith("norm.weight") else place
        module = f"model.layers.{layer}.linear_attn"
        return Stored({f"{module}.{_INNER[inner]}": None}) if inner in _INNER else self._products(config, module, inner)

    def _products(self, config: ModelConfig, module: str, inner: str) -> Stored:
        """Returns where the products of a linear layer's input are."""
        N, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        sizes = {"qkvz.weight": {"qkv": 2 * keys + values, "z": values}, "gates.weight": {"b": N, "a": N}}[inner]
        return Stored({f"{module}.in_proj_{name}.weight": rows for name, rows in sizes.items()})


class Qwen35MoeFamily(Qwen35Family, Qwen2MoeFamily):
    """Qwen3.5 with experts in every layer, whose weights are divided by their sum, and a shared one with a gate."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        raw = {**self.defaults, **raw}
        # Its configs have no width of plain layers. This one tells it from Qwen3-Next, whose tensors differ.
        return super().from_hf({**raw, "intermediate_size": raw["moe_intermediate_size"], "norm_topk_prob": True})

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        before, _, inner = ours.partition(".mlp.experts.")
        place = super().stored(config, ours)
        if not inner:
            return place
        name = {"up.weight": "gate_up_proj", "down.weight": "down_proj"}[inner]
        stacked = f"model.layers.{before.rpartition('.')[2]}.mlp.experts.{name}"
        return replace(place, otherwise=Stored({stacked: None}, experts=config.num_experts))


class Qwen3NextFamily(Qwen35Family, Qwen2MoeFamily):
    """Qwen3-Next. A checkpoint's products of a linear layer have all rows of a key head next to each other."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        if raw.get("mlp_only_layers") and raw.get("intermediate_size") == raw.get("moe_intermediate_size"):
            raise ValueError("mlp_only_layers with MLPs as wide as experts; experts in all layers were expected")
        return super().from_hf(raw)

    def _products(self, config: ModelConfig, module: str, inner: str) -> Stored:
        of_key = config.linear_num_value_heads // config.linear_num_key_heads
        K, values = config.linear_key_head_dim, of_key * config.linear_value_head_dim
        groups = {"qkvz.weight": (K, K, values, values), "gates.weight": (of_key, of_key)}[inner]
        name = {"qkvz.weight": "qkvz", "gates.weight": "ba"}[inner]
        return Stored({f"{module}.in_proj_{name}.weight": None}, groups=groups)


@dataclass(frozen=True)
class WithTower:
    """The language model of a checkpoint with a vision tower, as Qwen3.5 is published. The tower is not read, since
    texts do not pass through it, and what is trained is written as `family`.
    """

    family: Qwen35Family
    model_type: str
    classes: Mapping[str, str]

    def to_hf(self, _config: ModelConfig) -> Fields:
        raise ValueError("a vision tower is not written")

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        return self.family.from_hf({"tie_word_embeddings": raw.get("tie_word_embeddings", False), **raw["text_config"]})

    def stored(self, config: ModelConfig, ours: str) -> Stored:
        return _below(self.family.stored(config, ours))


def _below(place: Stored) -> Stored:
    """Returns the place of a tensor next to a vision tower."""
    parts = {re.sub(r"^model\.", "model.language_model.", name): rows for name, rows in place.parts.items()}
    return replace(place, parts=parts, otherwise=None if place.otherwise is None else _below(place.otherwise))
