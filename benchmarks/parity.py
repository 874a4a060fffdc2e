"""Compares with `transformers` on random models of unusual shapes: `python -m benchmarks.parity FILE` writes the table.

It covers every family in `lm.families`, in both directions. `tests/lm/test_families.py` requires 1e-4 on these cases.
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lm.config import RopeScaling
from lm.encoder import EncoderDecoder, NextSentenceModel
from lm.families import family_of
from lm.generation import generate
from lm.model import LanguageModel
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import PURPOSES, load_model, save_model

CONTEXT = 40
START = 1  # a target's first token

# Inputs: rows (encoders see LENGTHS tokens of each, with two token types), and targets of an encoder-decoder.
TOKENS, TARGETS = (
    torch.randint(2, 288, (3, CONTEXT), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)
TARGETS[:, 0] = START
LENGTHS = (CONTEXT, 17, 26)
SEGMENTS = torch.tensor([[1] * length + [0] * (CONTEXT - length) for length in LENGTHS])
TYPES = torch.tensor([[0] * 5 + [1] * (CONTEXT - 5)] * 3)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.5}

GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": CONTEXT, "layer_norm_epsilon": 1e-3},
    "Olmoe": {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
    "Bert": {
        "hidden_size": 21, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 28,
        "max_position_embeddings": CONTEXT, "type_vocab_size": 2, "layer_norm_eps": 1e-3,
    },
    "Bart": {
        "d_model": 21, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 28, "decoder_ffn_dim": 28, "max_position_embeddings": CONTEXT,
        "decoder_start_token_id": START, "forced_eos_token_id": None,
    },
    "T5": {
        "d_model": 21, "d_kv": 5, "d_ff": 28, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "layer_norm_epsilon": 1e-3,
        "decoder_start_token_id": START, "n_positions": CONTEXT,
    },
}  # fmt: skip
ROTARY_SHAPE: dict[str, Any] = {
    "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 28, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
EXPERTS: dict[str, Any] = {"hidden_size": 24, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 6, "moe_intermediate_size": 16, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR_LAYERS: dict[str, Any] = {
    "hidden_size": 24, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
AUTO_MODELS = {
    "language": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "next": "AutoModelForPreTraining",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
    "translate": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True)
class Case:
    """A shape as `transformers` writes it, and the ModelConfig fields it must map to."""

    prefix: str
    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    written_as: str | None = None  # the family that Heed writes, if one that is tried earlier has the same shape
    purpose: str = "language"  # as in `lm.families`

    @property
    def our_class(self) -> Any:
        return next(kind for kind, purpose in PURPOSES.items() if purpose == self.purpose)

    @property
    def their_class(self) -> Any:
        return getattr(transformers, AUTO_MODELS[self.purpose])

    def config(self) -> Any:
        fixed = {"vocab_size": 288, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        values = {**fixed, **SHAPES.get(self.prefix, ROTARY_SHAPE), **self.theirs}
        return getattr(transformers, f"{self.prefix}Config")(**copy.deepcopy(values))  # some add to the tables

    def random_model(self) -> Any:
        """Returns a model of `transformers` with random weights."""
        model = self.their_class.from_config(self.config(), attn_implementation="eager")
        if not getattr(model.config, "scale_decoder_outputs", True):  # of T5 1.1, which transformers ties nonetheless
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return shuffled(model)


CASES = {
    "gpt2": Case("GPT2", {}, {"positions": "learned", "norm": "layer", "mlp": "gelu_tanh", "intermediate_size": 80}),
    "gpt2, n_inner, untied, relu": Case(
        "GPT2",
        {"n_inner": 28, "tie_word_embeddings": False, "activation_function": "relu"},
        {"mlp": "relu", "intermediate_size": 28, "tie_word_embeddings": False},
    ),
    "llama": Case("Llama", {}, {"head_dim": 6, "num_key_value_heads": 2, "attention_bias": "none"}),
    "llama, tied, one key head": Case(
        "Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"tie_word_embeddings": True,
        "num_key_value_heads": 1}
    ),
    "llama, biases": Case(
        "Llama", {"attention_bias": True, "mlp_bias": True}, {"attention_bias": "all", "mlp_bias": True}
    ),
    "llama 3": Case(
        "Llama",
        {"rope_parameters": LLAMA3},
        {"rope_scaling": RopeScaling(rope_type="llama3", factor=4, original_max_position_embeddings=16,
        high_freq_factor=3)},
    ),
    "llama, linear": Case(
        "Llama", {"rope_parameters": LINEAR}, {"rope_scaling": RopeScaling(rope_type="linear", factor=2.5)}
    ),
    "arcee": Case("Arcee", {"mlp_bias": True}, {"mlp": "relu2", "mlp_bias": True}),
    "qwen3 moe, a plain layer": Case(
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
         "mlp_only_layers": (1,), "intermediate_size": 28, "qk_norm": True},
    ),
    "qwen3 moe, every second layer": Case(
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 8, "norm_topk_prob": False, "decoder_sparse_step": 2},
        {"num_experts": 5, "norm_topk_prob": False, "mlp_only_layers": (0, 2)},
    ),
    "qwen2 moe": Case(
        "Qwen2Moe",
        {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20},
        {"num_experts": 5, "shared_expert_intermediate_size": 20, "shared_expert_gate": True, "attention_bias": "qkv"},
    ),
    "qwen3-next": Case(
        "Qwen3Next",
        {**EXPERTS, **LINEAR_LAYERS, "num_experts": 6, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
        {"layer_types": ("linear_attention", "full_attention"), "linear_num_value_heads": 4, "attn_output_gate": True,
         "linear_conv_kernel_dim": 4, "num_experts": 6, "shared_expert_gate": True, "partial_rotary_factor": 0.5},
    ),
    "qwen3.5": Case(
        "Qwen3_5Text", {**LINEAR_LAYERS, "attention_bias": True, "linear_conv_kernel_dim": 3},
        {"layer_types": ("linear_attention", "full_attention"), "linear_conv_kernel_dim": 3, "attention_bias": "all"},
        written_as="Qwen3_5",
    ),
    "qwen3.5 moe": Case(
        "Qwen3_5MoeText",
        {**EXPERTS, **LINEAR_LAYERS, "num_experts": 5, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 12},
        {"num_experts": 5, "norm_topk_prob": True, "linear_num_key_heads": 2, "linear_key_head_dim": 6},
        written_as="Qwen3_5Moe",
    ),
    "glm-4.5": Case(
        "Glm4Moe",
        {**EXPERTS, "n_routed_experts": 6, "moe_intermediate_size": 16, "n_shared_experts": 2, "head_dim": 8,
         "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
        {"num_experts": 6, "shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.5, "router_bias": True,
         "scoring_func": "sigmoid", "mlp_only_layers": (0,), "partial_rotary_factor": 0.5, "qk_norm": True},
    ),
    "deepseek v3": Case(
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 10, "n_group": 3, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 0.7,
         "mscale_all_dim": 1.2}},
        {"kv_lora_rank": 12, "q_lora_rank": 10, "head_dim": 10, "v_head_dim": 8, "rope_interleave": True,
         "n_group": 3, "topk_group": 2, "router_bias": True, "scoring_func": "sigmoid"},
    ),
    "moonlight": Case(
        "DeepseekV3", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True},
        {"kv_lora_rank": 12, "q_lora_rank": 0, "n_group": 1, "attention_bias": "all", "mlp_only_layers": (0,)},
    ),
    "deepseek v2": Case(
        "DeepseekV2",
        {**LATENT, "q_lora_rank": 10, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy",
         "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {"n_group": 3, "router_bias": False, "scoring_func": "softmax", "shared_expert_intermediate_size": 32},
    ),
    "olmoe": Case(
        "Olmoe", {**EXPERTS, "num_experts": 7, "intermediate_size": 24},
        {"num_experts": 7, "moe_intermediate_size": 24, "qk_norm_over": "projection", "head_dim": 6},
    ),
    "mixtral, window": Case(
        "Mixtral", {**EXPERTS, "num_local_experts": 4, "intermediate_size": 24, "sliding_window": 7},
        {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True, "sliding_window": (7,)},
    ),
    "gpt-oss": Case(
        "GptOss",
        {**EXPERTS, "num_local_experts": 6, "intermediate_size": 24, "sliding_window": 7,
         "rope_parameters": {**YARN, "truncate": False}},
        {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, "sliding_window": (7, 0),
         "mlp": "clamped_swiglu", "mlp_bias": True, "attention_bias": "all", "attention_sinks": True},
    ),
    "mistral, window": Case("Mistral", {"sliding_window": 7}, {"sliding_window": (7,)}),
    "mistral, no window": Case("Mistral", {"sliding_window": None}, {"sliding_window": (0,)}, written_as="Llama"),
    "qwen2": Case("Qwen2", {}, {"attention_bias": "qkv", "sliding_window": (0,)}),
    "qwen2, yarn, late windows": Case(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_parameters": YARN},
        {"sliding_window": (0, 5, 5), "rope_scaling": RopeScaling(rope_type="yarn", factor=4,
        original_max_position_embeddings=12)},
    ),
    "qwen3": Case("Qwen3", {"attention_bias": True}, {"qk_norm": True, "attention_bias": "all"}),
    "qwen3, alternating": Case(
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        {"sliding_window": (0, 9), "qk_norm": True, "attention_bias": "none"},
    ),
    "olmo2": Case(
        "Olmo2", {}, {"norm_place": "output", "qk_norm": True, "qk_norm_over": "projection", "attention_bias": "none"}
    ),
    "olmo2, biases, tied": Case(
        "Olmo2", {"attention_bias": True, "tie_word_embeddings": True}, {"attention_bias": "all"}
    ),
    "phi3": Case("Phi3", {}, {"partial_rotary_factor": 1.0}, written_as="Llama"),
    "phi3, partial rotary, window": Case(
        "Phi3",
        {
            "head_dim": 8, "sliding_window": 7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
        {"partial_rotary_factor": 0.5, "sliding_window": (7,)},
    ),
    "gemma3": Case(
        "Gemma3Text",
        {"sliding_window": 7, "layer_types": GEMMA_LAYERS, "rope_parameters": GEMMA_ROPE, "query_pre_attn_scalar": 11},
        {"mlp": "geglu", "norm_place": "sandwich", "scale_embedding": True, "sliding_window": (7, 7, 0),
         "rope_local_base_freq": 30.0, "query_pre_attn_scalar": 11, "tie_word_embeddings": True},
        written_as="Gemma3",
    ),
    "gemma3, linear, untied, no window": Case(
        "Gemma3Text",
        {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": False,
         "rope_parameters": {**GEMMA_ROPE, "full_attention": LINEAR}, "query_pre_attn_scalar": 6},
        {"rope_scaling": RopeScaling(rope_type="linear", factor=2.5), "query_pre_attn_scalar": 0,
         "rope_local_base_freq": 0},
        written_as="Gemma3",
    ),
    "gemma2": Case(
        "Gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0,
         "query_pre_attn_scalar": 11, "attention_bias": True},
        {"mlp": "geglu", "norm_place": "sandwich", "scale_embedding": True, "sliding_window": (7, 0),
         "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "attention_bias": "all"},
    ),
    "smollm3": Case(
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "attention_bias": True, "use_sliding_window": True, "sliding_window": 7},
        {"layers_without_positions": (1,), "sliding_window": (0, 7), "tie_word_embeddings": True},
    ),
    "olmo3, yarn": Case(
        "Olmo3",
        {"sliding_window": 7, "layer_types": GEMMA_LAYERS,
         "rope_parameters": {**GEMMA_ROPE, "full_attention": {**YARN, "attention_factor": 1.3}}},
        {"norm_place": "output", "qk_norm_over": "projection", "sliding_window": (7, 7, 0),
         "rope_local_base_freq": 30.0, "rope_scaling": RopeScaling(rope_type="yarn", factor=4,
         original_max_position_embeddings=12, attention_factor=1.3)},
    ),
    "granite": Case(
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15, "logits_scaling": 2.5},
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5,
         "query_pre_attn_scalar": 44.4444444444},
    ),
    "granite moe": Case(
        "GraniteMoe",
        {**EXPERTS, "num_local_experts": 5, "intermediate_size": 16, "attention_multiplier": 0.15,
         "logits_scaling": 2.5},
        {"num_experts": 5, "moe_intermediate_size": 16, "norm_topk_prob": True, "logits_scaling": 2.5},
    ),
    "granite moe, shared": Case(
        "GraniteMoeShared",
        {**EXPERTS, "num_local_experts": 5, "intermediate_size": 16, "shared_intermediate_size": 12},
        {"num_experts": 5, "shared_expert_intermediate_size": 12},
    ),
    "ministral3": Case(
        "Ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}},
        {"rope_scaling": RopeScaling(rope_type="yarn", factor=4, original_max_position_embeddings=12,
         attention_factor=1.0, llama_4_scaling_beta=0.4)},
    ),
    "exaone4": Case(
        "Exaone4",
        {"sliding_window": 7, "layer_types": GEMMA_LAYERS, "rope_parameters": LLAMA3},
        {"norm_place": "output", "qk_norm_over": "head", "sliding_window": (7, 7, 0), "layers_without_positions": (2,)},
    ),
    "glm4": Case(
        "Glm4",
        {"head_dim": 8, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
        {"norm_place": "sandwich", "attention_bias": "qkv", "partial_rotary_factor": 0.5, "rope_interleave": True},
    ),
    "bert, masked words": Case("Bert", {}, {"type_vocab_size": 2, "mlp": "gelu", "norm_eps": 1e-3}, purpose="masked"),
    "bert, masked words, untied, relu": Case(
        "Bert",
        {"tie_word_embeddings": False, "hidden_act": "relu"},
        {"tie_word_embeddings": False, "mlp": "relu"},
        purpose="masked",
    ),
    "bert, masked words and the next sentence": Case("Bert", {}, {"type_vocab_size": 2}, purpose="next"),
    "bert, sequences, three types": Case(
        "Bert", {"num_labels": 3, "type_vocab_size": 3}, {"type_vocab_size": 3}, purpose="sequence"
    ),
    "bert, sequences, one score": Case("Bert", {"num_labels": 1}, {}, purpose="sequence"),
    "bert, tokens": Case("Bert", {"num_labels": 4, "hidden_act": "gelu_new"}, {"mlp": "gelu_tanh"}, purpose="token"),
    "bert, spans": Case("Bert", {}, {"tie_word_embeddings": True}, purpose="span"),
    "bart": Case(
        "Bart", {}, {"num_encoder_layers": 3, "num_hidden_layers": 2, "embedding_norm": True}, purpose="translate"
    ),
    "bart, scaled embeddings, relu": Case(
        "Bart",
        {"scale_embedding": True, "activation_function": "relu"},
        {"scale_embedding": True, "mlp": "relu"},
        purpose="translate",
    ),
    "t5": Case(
        "T5",
        {},
        {"mlp": "relu", "positions": "relative", "num_encoder_layers": 3, "num_hidden_layers": 2, "head_dim": 5,
         "tie_word_embeddings": True, "max_position_embeddings": CONTEXT},
        purpose="translate",
    ),
    "t5 1.1": Case(
        "T5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"mlp": "geglu", "tie_word_embeddings": False},
        purpose="translate",
    ),
}  # fmt: skip


def shuffled(model: Any) -> Any:
    """Moves every weight away from its default, so that a norm or bias in the wrong place shows.

    Biases are small and position embeddings large, because otherwise post-norm stacks soon make all tokens alike.
    """
    generator = torch.Generator().manual_seed(4)
    has_sums = type(model).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))  # norms multiply by 1 + weight
    default = 0.0 if has_sums else 1.0
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("position", "wpe", "relative")):
            parameter.data.normal_(0, 1, generator=generator)
        elif parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
        elif name.endswith("weight"):
            parameter.data.uniform_(default - 0.5, default + 0.5, generator=generator)
        else:
            parameter.data.uniform_(-0.2, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(("choice_bias", "e_score_correction_bias")):  # of a mixture's router
            buffer.uniform_(-0.2, 0.2, generator=generator)
    return model.eval()


def our_logits(model: Any) -> Tensor:
    """Returns the outputs to compare: logits of every token, label or span end."""
    if isinstance(model, LanguageModel):
        return model(TOKENS)
    if isinstance(model, EncoderDecoder):
        return model(TOKENS, TARGETS, SEGMENTS)
    found = model(TOKENS, SEGMENTS, token_types_BT=TYPES)
    if isinstance(model, NextSentenceModel):
        return _without_padding(_joined(*found))
    return _without_padding(torch.stack(found, dim=-1) if isinstance(found, tuple) else found)


def their_logits(model: Any) -> Tensor:
    """Returns the same outputs as `our_logits`, by `transformers`."""
    if model.config.is_encoder_decoder:
        logits: Tensor = model(TOKENS, attention_mask=SEGMENTS, decoder_input_ids=TARGETS).logits
        return logits
    if model.config.model_type != "bert":
        return model(TOKENS).logits
    found = model(TOKENS, attention_mask=SEGMENTS, token_type_ids=TYPES)
    if "seq_relationship_logits" in found:
        return _without_padding(_joined(found.prediction_logits, found.seq_relationship_logits))
    ends = "start_logits" in found
    return _without_padding(torch.stack([found.start_logits, found.end_logits], dim=-1) if ends else found.logits)


def _joined(words_BTV: Tensor, next_B2: Tensor) -> Tensor:
    """Returns each word's logits with those of its row's pair, [B, T, V + 2]."""
    return torch.cat([words_BTV, next_B2[:, None].expand(-1, words_BTV.shape[1], -1)], dim=-1)


def _without_padding(logits: Tensor) -> Tensor:
    """Drops padding, where the libraries differ and nothing reads the output; whole-sequence logits have none."""
    return logits[SEGMENTS > 0] if logits.dim() == 3 else logits


@dataclass(frozen=True)
class Parity:
    """Largest absolute difference of logits when Heed reads their checkpoint, and when they read Heed's.

    `same_tokens` of `num_tokens` greedy tokens equal those of their `generate`; an encoder generates none.
    """

    name: str
    written_as: str
    reading: float
    writing: float
    same_tokens: int
    num_tokens: int


@torch.no_grad()
def measure(name: str, tokenizer: Tokenizer) -> Parity:
    """Compares one case in both directions."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        theirs = case.random_model()
        theirs.save_pretrained(Path(folder) / "theirs")
        ours = load_model(Path(folder) / "theirs", case.our_class).eval()
        reading = float((our_logits(ours) - their_logits(theirs)).abs().max())
        own = shuffled(copy.deepcopy(ours))
        save_model(Path(folder) / "ours", own, own.state_dict(), tokenizer)
        again = case.their_class.from_pretrained(Path(folder) / "ours", attn_implementation="eager").eval()
        writing = float((our_logits(own) - their_logits(again)).abs().max())
    same, total = (0, 0) if ours.config.kind == "encoder" else same_tokens(ours, theirs)
    family = family_of(ours.config, case.purpose).model_type
    return Parity(name, family, reading, writing, same, total)


@torch.no_grad()
def same_tokens(ours: LanguageModel | EncoderDecoder, theirs: Any) -> tuple[int, int]:
    """Counts equal and all greedy tokens up to the end of the context; ours in a batch, theirs one by one."""
    reads = isinstance(ours, EncoderDecoder)
    sources = [row[:length].tolist() for row, length in zip(TOKENS, LENGTHS, strict=True)] if reads else None
    prompts = [row[: 5 + 4 * place].tolist() for place, row in enumerate(TARGETS if reads else TOKENS)]
    num_new = CONTEXT - max(map(len, prompts))
    found = generate(
        ours, prompts, max_new_tokens=num_new, end_ids=(), choice=Choice(0), seeds=[0] * len(prompts), max_rows=2,
        sources=sources,
    )  # fmt: skip
    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = None  # neither library stops early
    same = 0
    for row, (prompt, response) in enumerate(zip(prompts, found.responses, strict=True)):
        begun = torch.tensor([prompt])
        inputs = {"input_ids": begun} if sources is None else {
            "input_ids": torch.tensor([sources[row]]), "decoder_input_ids": begun
        }  # fmt: skip
        expected: Tensor = theirs.generate(**inputs, max_new_tokens=num_new, do_sample=False)
        same += sum(a == b for a, b in zip(response, expected[0, len(prompt) :].tolist(), strict=True))
    return same, num_new * len(prompts)


def table(rows: Sequence[Parity]) -> str:
    """Formats the results as Markdown."""
    lines = [
        "| case | written as | we read theirs | they read ours | same greedy tokens |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        tokens = f"{row.same_tokens}/{row.num_tokens}" if row.num_tokens else "none"
        lines.append(f"| {row.name} | {row.written_as} | {row.reading:.1e} | {row.writing:.1e} | {tokens} |")
    return "\n".join(lines)


INTRODUCTION = """# Parity with transformers

Largest absolute difference between Heed's logits and those of `transformers` {version} in fp32, on randomly
initialised models: weights far from their defaults, 3 rows of {context} tokens, unusual shapes. For BERT
and the encoder of BART and T5, two rows are padded, after {lengths} tokens; outputs at padding are not compared.
"Written as" is the family in which Heed saves the shape. Greedy tokens compare Heed's batch of ragged prompts, two at a
time, with `generate` on each; prompts of BART and T5 begin their targets.

`python -m benchmarks.parity docs/parity.md` writes this file; `tests/lm/test_families.py` requires every difference
to be below 1e-4. For the families from OLMo 2 on, mixtures and T5 it also draws 20 shapes each, and compares logits in
both directions, greedy tokens, and three gradients. `tests/lm/test_conversations.py` compares the tokens of
conversations, in 17 kinds of vocabulary under 6 templates.

Gemma 2's capped scores are written out, and GPUs do not pack its rows.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file for the table: docs/parity.md")
    file: Path = parser.parse_args().file
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = [f"{number} and some words" for number in range(50)]
    tokenizer = Tokenizer.train(text, 288, "chat")
    introduction = INTRODUCTION.format(
        version=transformers.__version__, context=CONTEXT, lengths=" and ".join(map(str, LENGTHS[1:]))
    )
    rows = table([measure(name, tokenizer) for name in CASES])
    file.write_text(f"{introduction}\n{rows}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
