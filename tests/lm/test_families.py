"""Parity with `transformers`: every family, in unusual shapes, in both directions, with every head that it has."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.parity import (
    CASES,
    CONTEXT,
    GEMMA_ROPE,
    LINEAR,
    LLAMA3,
    TOKENS,
    YARN,
    Case,
    measure,
    our_logits,
    same_tokens,
    shuffled,
    their_logits,
)
from heed.jobs.models import built_in_shape
from lm.config import ModelConfig, RopeScaling
from lm.encoder import EncoderModel, MaskedLanguageModel, SequenceClassifier
from lm.families import FAMILIES, family_of
from lm.inspection import cache_bytes_per_token, parameter_table
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import PURPOSES, config_from_hf, load_any, load_model, save_model, to_stored
from reward.stage import network_source
from tests import examples
from tests.models import load_language_model, load_scalar_model

EXACT = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_we_compute_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    theirs = case.random_model()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, case.our_class).eval()
    assert {key: getattr(ours.config, key) for key in case.ours} == case.ours
    if hasattr(ours, "head"):
        table = (ours.encoder if hasattr(ours, "encoder") else ours.decoder).embedding.weight
        assert (ours.head.weight is table) == ours.config.tie_word_embeddings
    expected = their_logits(theirs)
    spread = expected.flatten(0, -2).std(dim=0)
    assert float(spread.mean()) > 0.05, "all tokens get the same, so mistakes would not show"
    torch.testing.assert_close(our_logits(ours), expected, **EXACT)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_transformers_computes_our_logits(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    case = CASES[name]
    case.random_model().save_pretrained(tmp_path / "theirs")
    model = shuffled(load_model(tmp_path / "theirs", case.our_class))
    save_model(tmp_path / "ours", model, model.state_dict(), tokenizer)
    theirs, report = case.their_class.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert type(theirs).__name__.startswith(case.written_as or case.prefix)
    unused = set() if model.config.tie_word_embeddings else {"cls.predictions.bias"}
    assert report["missing_keys"] <= unused
    assert not report["unexpected_keys"]
    torch.testing.assert_close(our_logits(model), their_logits(theirs.eval()), **EXACT)
    again = load_model(tmp_path / "ours", case.our_class).eval()
    assert again.config == model.config
    rounding = 1e-6 if name == "t5" else 0  # T5's tied head has a scale that Heed multiplies into the norm before it
    torch.testing.assert_close(our_logits(again), our_logits(model), atol=rounding, rtol=rounding)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama, biases",
        "mistral, window",
        "qwen2",
        "qwen3",
        "olmo2",
        "phi3, partial rotary, window",
        "smollm3",
        "olmo3, yarn",
        "ministral3",
        "exaone4",
        "glm4",
        "gemma2",
        "gemma3",
        "qwen3 moe, a plain layer",
        "mixtral, window",
        "deepseek v3",
        "deepseek v2",
        "gpt-oss",
        "qwen3-next",
    ],
)
@torch.no_grad()
def test_a_reward_model_is_the_familys_classifier(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    case = CASES[name]
    config = case.config()
    config.num_labels = 1
    theirs = shuffled(getattr(transformers, f"{case.prefix}ForSequenceClassification")(config))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_scalar_model(tmp_path / "theirs").eval()
    expected = theirs(TOKENS).logits[:, 0]
    torch.testing.assert_close(ours(TOKENS)[:, -1], expected, **EXACT)
    save_model(tmp_path / "ours", ours, ours.state_dict(), tokenizer)
    again = getattr(transformers, f"{case.prefix}ForSequenceClassification").from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(TOKENS).logits[:, 0], expected, **EXACT)


def rotary_shape(draw: random.Random) -> dict[str, Any]:
    # A stream of fewer than 8 numbers may be almost 0, and a norm of it then amplifies rounding.
    kv_heads, head_dim = draw.randint(1, 3), 4 * draw.randint(2, 6)
    heads = kv_heads * draw.randint(1, 3)
    return {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim,
        "num_hidden_layers": draw.randint(1, 4), "intermediate_size": draw.randint(5, 40),
        "rms_norm_eps": 10 ** -draw.uniform(2, 6), "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10 ** draw.uniform(1, 5)},
    }  # fmt: skip


def mixture_shape(draw: random.Random) -> dict[str, Any]:
    shape, experts = rotary_shape(draw), draw.randint(2, 9)
    return {
        **shape, "hidden_size": shape["num_attention_heads"] * draw.choice([8, 16]), "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts), "intermediate_size": 8 * draw.randint(1, 5),
        "num_hidden_layers": draw.randint(2, 4),
    }  # fmt: skip


def latent_shape(draw: random.Random) -> dict[str, Any]:
    shape, groups = mixture_shape(draw), draw.randint(1, 3)
    experts, plain = groups * draw.randint(2, 3), 2 * draw.randint(1, 4)
    chosen, turned = draw.randint(1, groups), draw.choice([4, 6, 8])
    return {
        **shape,
        "num_key_value_heads": shape["num_attention_heads"],
        **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), experts),
        "num_experts_per_tok": draw.randint(1, chosen * experts // groups),
        "n_group": groups,
        "topk_group": chosen,
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "n_shared_experts": draw.randint(1, 3),
        "routed_scaling_factor": draw.uniform(0.5, 3),
        "first_k_dense_replace": draw.randint(0, 1),
        "q_lora_rank": draw.choice([None, draw.randint(4, 20)]),
        "kv_lora_rank": 2 * draw.randint(2, 10),  # transformers needs an even number in DeepSeek-V2
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "v_head_dim": draw.randint(2, plain + 4),
        "attention_bias": draw.random() < 0.3,
        "rope_parameters": draw.choice(
            [
                {"rope_type": "default", "rope_theta": 500.0},
                {**YARN, **draw.choice([{}, {"mscale": draw.uniform(0.3, 2), "mscale_all_dim": draw.uniform(0.3, 2)}])},
            ]
        ),
    }


def linear_shape(draw: random.Random) -> dict[str, Any]:
    keys, layers = draw.randint(1, 3), draw.randint(2, 4)
    kinds = [draw.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    return {
        "num_hidden_layers": layers,
        "head_dim": 8 * draw.randint(1, 2),
        "attention_bias": draw.random() < 0.3,
        "layer_types": [*kinds[:-1], "full_attention"],  # their cache needs a layer with keys
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.randint(1, 3),
        "linear_key_head_dim": draw.randint(3, 12),
        "linear_value_head_dim": draw.randint(3, 12),
        "linear_conv_kernel_dim": draw.randint(2, 5),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
    }  # fmt: skip


# What `transformers` lets a shape of the family vary. Its cache computes something else than its own pass over whole
# rows for windows of one token, and has no place for a T5's decoder that is deeper than the encoder.
DRAWN: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "Olmo2": lambda draw: {
        **rotary_shape(draw),
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": draw.choice([LINEAR, LLAMA3, YARN, {"rope_type": "default", "rope_theta": 500.0}]),
    },
    "Phi3": lambda draw: {
        **rotary_shape(draw),
        "head_dim": 8 * draw.randint(1, 3),
        "sliding_window": draw.choice([None, draw.randint(2, 30)]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": draw.choice([0.25, 0.5, 0.75]),
        },
    },
    "Gemma3Text": lambda draw: {
        **rotary_shape(draw),
        "head_dim": 2 * draw.randint(2, 9),
        "attention_bias": draw.random() < 0.5,
        "sliding_window": draw.randint(2, 30),
        "sliding_window_pattern": draw.randint(1, 4),
        "query_pre_attn_scalar": draw.randint(4, 24),
        "rope_parameters": {
            **GEMMA_ROPE,
            "full_attention": draw.choice([LINEAR, LLAMA3, YARN, GEMMA_ROPE["full_attention"]]),
        },
    },
    "Gemma2": lambda draw: {
        **rotary_shape(draw),
        "head_dim": 2 * draw.randint(2, 9),
        "attention_bias": draw.random() < 0.5,
        "sliding_window": draw.randint(2, 30),
        "query_pre_attn_scalar": draw.randint(4, 24),
        "attn_logit_softcapping": draw.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": draw.choice([None, 3.0, 30.0]),
    },
    "SmolLM3": lambda draw: {
        **rotary_shape(draw),
        "no_rope_layers": [0, *(draw.randint(0, 1) for _ in range(4))],
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "use_sliding_window": draw.random() < 0.5,
        "sliding_window": draw.randint(2, 30),
        "rope_parameters": draw.choice([LINEAR, LLAMA3, YARN, {"rope_type": "default", "rope_theta": 500.0}]),
    },
    "Olmo3": lambda draw: {
        **rotary_shape(draw),
        "attention_bias": draw.random() < 0.5,
        "sliding_window": draw.randint(2, 30),
        "rope_parameters": draw.choice([
            {**GEMMA_ROPE, "full_attention": draw.choice([LINEAR, LLAMA3, YARN, {**YARN, "attention_factor": 1.4}])},
            {"full_attention": LINEAR, "sliding_attention": LINEAR},
        ]),
    },
    "Granite": lambda draw: {
        **rotary_shape(draw),
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "embedding_multiplier": draw.uniform(0.5, 6),
        "residual_multiplier": draw.uniform(0.2, 1.5),
        "attention_multiplier": draw.choice([1 / 8, draw.uniform(0.1, 0.5)]),
        "logits_scaling": draw.uniform(0.5, 4),
        "rope_parameters": draw.choice([LINEAR, LLAMA3, {"rope_type": "default", "rope_theta": 500.0}]),
    },
    "GraniteMoeShared": lambda draw: {
        **mixture_shape(draw),
        "attention_bias": draw.random() < 0.5,
        "embedding_multiplier": draw.uniform(0.5, 6),
        "residual_multiplier": draw.uniform(0.2, 1.5),
        "attention_multiplier": draw.choice([1 / 8, draw.uniform(0.1, 0.5)]),
        "logits_scaling": draw.uniform(0.5, 4),
        "shared_intermediate_size": draw.randint(3, 40),
    },
    "Ministral3": lambda draw: {
        **rotary_shape(draw),
        "head_dim": 2 * draw.randint(2, 9),
        "sliding_window": draw.choice([None, draw.randint(2, 30)]),
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": draw.randint(5, 30),
            "llama_4_scaling_beta": draw.uniform(0.1, 0.6),
            **draw.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.3}]),
        },
    },
    "Exaone4": lambda draw: {
        **rotary_shape(draw),
        "sliding_window": draw.randint(2, 30),
        "sliding_window_pattern": draw.randint(1, 4),
        "rope_parameters": draw.choice([LINEAR, LLAMA3, YARN, {"rope_type": "default", "rope_theta": 500.0}]),
    },
    "Glm4": lambda draw: {
        **rotary_shape(draw),
        "head_dim": 8 * draw.randint(1, 3),
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": {
            **draw.choice([YARN, LLAMA3, {"rope_type": "default", "rope_theta": 500.0}]),
            "partial_rotary_factor": draw.choice([0.25, 0.5, 0.75, 1.0]),
        },
    },
    "Qwen3Moe": lambda draw: {
        **mixture_shape(draw),
        "head_dim": 2 * draw.randint(4, 10),
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "decoder_sparse_step": draw.randint(1, 2),
    },
    "Qwen2Moe": lambda draw: {
        **mixture_shape(draw),
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "shared_expert_intermediate_size": draw.randint(3, 40),
        "qkv_bias": draw.random() < 0.5,
    },
    "Qwen3Next": lambda draw: {
        **mixture_shape(draw),
        **linear_shape(draw),
        "intermediate_size": draw.randint(10, 30) * 2 + 1,  # with a mixture's width, it may be a Qwen3.5
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "shared_expert_intermediate_size": draw.randint(3, 40),
        "decoder_sparse_step": draw.randint(1, 2),
    },
    "Qwen3_5Text": lambda draw: {**rotary_shape(draw), **linear_shape(draw)},
    "Qwen3_5MoeText": lambda draw: {
        **mixture_shape(draw),
        **linear_shape(draw),
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "shared_expert_intermediate_size": draw.randint(3, 40),
    },
    "Glm4Moe": lambda draw: {
        **mixture_shape(draw),
        "head_dim": 4 * draw.randint(2, 5),
        "num_local_experts": draw.randint(4, 9),
        "num_experts_per_tok": draw.randint(1, 4),
        "norm_topk_prob": draw.random() < 0.5,
        "moe_intermediate_size": 8 * draw.randint(1, 4),
        "n_shared_experts": draw.randint(1, 3),
        "routed_scaling_factor": draw.uniform(0.5, 3),
        "first_k_dense_replace": draw.randint(0, 1),
        "use_qk_norm": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5,
    },
    "DeepseekV3": lambda draw: {
        **latent_shape(draw),
        "norm_topk_prob": draw.random() < 0.5,
        "rope_interleave": draw.random() < 0.5,
    },
    "DeepseekV2": lambda draw: {
        **latent_shape(draw),
        "topk_method": draw.choice(["greedy", "group_limited_greedy"]),
    },
    "Olmoe": lambda draw: {**mixture_shape(draw), "norm_topk_prob": draw.random() < 0.5, "num_hidden_layers": 2},
    "GptOss": lambda draw: {
        **mixture_shape(draw),
        "head_dim": 2 * draw.randint(2, 9),
        "sliding_window": draw.randint(2, 30),
        "layer_types": None,
        "attention_bias": draw.random() < 0.8,
        "rope_parameters": draw.choice([YARN, {**YARN, "truncate": False}, LINEAR]),
    },
    "Mixtral": lambda draw: {**mixture_shape(draw), "sliding_window": draw.choice([None, draw.randint(2, 30)])},
    "T5": lambda draw: {
        "d_model": draw.randint(8, 40), "d_kv": draw.randint(2, 12), "d_ff": draw.randint(5, 40),
        "num_layers": 3, "num_decoder_layers": draw.randint(1, 3), "num_heads": draw.randint(1, 4),
        "relative_attention_num_buckets": draw.choice([4, 7, 8, 32]),
        "relative_attention_max_distance": draw.randint(17, 60),
        "feed_forward_proj": draw.choice(["relu", "gelu", "gelu_new", "gated-gelu", "gated-silu"]),
        "layer_norm_epsilon": 10 ** -draw.uniform(2, 6),
        "tie_word_embeddings": draw.random() < 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("prefix", DRAWN)
def test_drawn_shapes_have_the_logits_tokens_and_gradients_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer, prefix: str
) -> None:
    for seed in range(round(20 * examples.share)):
        case = Case(prefix, DRAWN[prefix](random.Random(seed)), purpose="translate" if prefix == "T5" else "language")
        theirs = case.random_model()
        theirs.save_pretrained(tmp_path / "theirs")
        ours = load_model(tmp_path / "theirs", case.our_class).eval()
        expected, found = their_logits(theirs), our_logits(ours)
        if (found - expected).abs().max() >= 1e-4:  # float32 may round logits of 11 by 2e-4
            exact = our_logits(ours.double()) - their_logits(theirs.double())
            assert exact.abs().max() < 1e-4, f"seed {seed}"
            ours, theirs = ours.float(), theirs.float()
        save_model(tmp_path / "ours", ours, ours.state_dict(), tokenizer)
        again = case.their_class.from_pretrained(tmp_path / "ours").eval()
        assert type(again) is type(theirs), f"seed {seed}"
        with torch.no_grad():
            assert (their_logits(again) - expected).abs().max() < 1e-4, f"seed {seed}"
        same, num_tokens = same_tokens(ours, theirs)
        assert same == num_tokens, f"seed {seed}"
        if seed < 3:
            compare_gradients(ours, theirs, found, expected, tmp_path / "gradients")


def compare_gradients(ours: Any, theirs: Any, found: Tensor, expected: Tensor, folder: Path) -> None:
    """Compares the gradients of every tensor under the checkpoint's names; the loss is the mean NLL of fixed tokens.
    `theirs` gets its gradients as weights, so that `transformers` writes them under these names.
    """
    for logits in (found, expected):
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    family = family_of(ours.config, PURPOSES[type(ours)])
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(folder)
    wanted = load_file(folder / "model.safetensors")
    for name, parameter in ours.named_parameters():
        place = family.stored(ours.config, name)
        gradient = parameter.grad * place.factor  # by the chain rule: ours = theirs · factor + added
        for theirs_name, part in to_stored(replace(place, factor=1.0, added=0.0), gradient):
            torch.testing.assert_close(part, wanted[theirs_name], atol=1e-5, rtol=1e-3, msg=theirs_name)


GPT3_BANDED = ModelConfig(
    vocab_size=288, max_position_embeddings=CONTEXT, hidden_size=20, num_hidden_layers=4, num_attention_heads=5,
    num_key_value_heads=5, intermediate_size=28,
    mlp="gelu_tanh", mlp_bias=True, attention_bias="all", positions="learned", norm="layer", sliding_window=(0, 8),
)  # fmt: skip
VASWANI = GPT3_BANDED.model_copy(update={"positions": "sinusoidal", "norm_place": "post", "sliding_window": (0,)})


@pytest.mark.parametrize("config", [GPT3_BANDED, VASWANI])
@torch.no_grad()
def test_a_shape_of_no_family_is_written_in_our_own_words(
    tmp_path: Path, tokenizer: Tokenizer, config: ModelConfig
) -> None:
    assert family_of(config, "language").model_type == "heed"
    for model, read in ((LanguageModel(config), load_language_model), (ScalarModel(config), load_scalar_model)):
        save_model(tmp_path, shuffled(model), model.state_dict(), tokenizer)
        again = read(tmp_path).eval()
        assert again.config == config
        assert torch.equal(again(TOKENS), model(TOKENS))


LINEAR_LAYERS = {
    "qk_norm": True, "attn_output_gate": True, "layer_types": ("linear_attention", "full_attention"),
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS, "shared_expert_intermediate_size": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 8, "num_key_value_heads": 4, "rope_interleave": True,
}  # fmt: skip


def test_the_first_family_that_holds_a_shape_writes_it(tiny_config: ModelConfig) -> None:
    changes: dict[str, dict[str, Any]] = {
        "llama": {},
        "arcee": {"mlp": "relu2"},
        "mistral": {"sliding_window": (8,)},
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": {"qk_norm": True},
        "olmo2": {"qk_norm": True, "qk_norm_over": "projection", "norm_place": "output"},
        "olmo3": {"qk_norm": True, "qk_norm_over": "projection", "norm_place": "output", "sliding_window": (8, 0)},
        "phi3": {"partial_rotary_factor": 0.5},
        "smollm3": {"layers_without_positions": (1,)},
        "granite": {"residual_multiplier": 0.5},
        "granitemoe": {**EXPERTS, "intermediate_size": 16, "norm_topk_prob": True, "residual_multiplier": 0.5},
        "granitemoeshared": {
            **EXPERTS, "intermediate_size": 16, "norm_topk_prob": True, "shared_expert_intermediate_size": 24,
        },
        "ministral3": {
            "rope_scaling": RopeScaling(
                rope_type="yarn", factor=2, original_max_position_embeddings=8, llama_4_scaling_beta=0.1
            )
        },
        "exaone4": {"qk_norm": True, "norm_place": "output"},
        "glm4": {"norm_place": "sandwich", "attention_bias": "qkv", "rope_interleave": True},
        "gemma2": {"norm_place": "sandwich", "mlp": "geglu", "scale_embedding": True, "attn_logit_softcapping": 50.0},
        "gemma3_text": {"qk_norm": True, "norm_place": "sandwich", "mlp": "geglu", "scale_embedding": True},
        "qwen3_moe": {**EXPERTS, "qk_norm": True},
        "qwen2_moe": {
            **EXPERTS, "attention_bias": "qkv", "shared_expert_intermediate_size": 24, "shared_expert_gate": True,
        },
        "qwen3_5_text": LINEAR_LAYERS,
        "qwen3_next": {
            **LINEAR_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 24, "shared_expert_gate": True,
        },
        "qwen3_5_moe_text": {
            **LINEAR_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 24, "shared_expert_gate": True,
            "norm_topk_prob": True, "intermediate_size": 16,
        },
        "glm4_moe": {
            **EXPERTS, "scoring_func": "sigmoid", "router_bias": True, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 16,
        },
        "deepseek_v3": {**LATENT, "scoring_func": "sigmoid", "router_bias": True},
        "deepseek_v2": LATENT,
        "olmoe": {**EXPERTS, "intermediate_size": 16, "qk_norm": True, "qk_norm_over": "projection"},
        "mixtral": {**EXPERTS, "intermediate_size": 16, "norm_topk_prob": True},
        "gpt_oss": {
            **EXPERTS, "intermediate_size": 16, "norm_topk_prob": True, "mlp": "clamped_swiglu", "mlp_bias": True,
            "attention_bias": "all", "attention_sinks": True,
        },
        "heed": {"norm_place": "post"},
    }  # fmt: skip
    for name, change in changes.items():
        assert family_of(tiny_config.model_copy(update=change), "language").model_type == name
    towers = {"qwen3_5", "qwen3_5_moe"}  # which are read only
    assert {"gpt2", "bert", "bart", "t5", *towers, *changes} == {family.model_type for family in FAMILIES}
    for family in FAMILIES:  # what Heed writes, `transformers` has a class for
        if family.model_type != "heed":
            assert all(hasattr(transformers, name) for name in family.classes.values()), family.model_type


GEMMA_1B = {  # as google/gemma-3-1b-it is published, with another size
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 20, "num_hidden_layers": 7, "num_attention_heads": 5,
    "intermediate_size": 30, "vocab_size": 288, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256, "head_dim": 256,
    "num_key_value_heads": 1, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rope_scaling": None,
    "sliding_window": 512, "sliding_window_pattern": 6, "attention_bias": False,
}  # fmt: skip
PHI_4K = {
    "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 30, "vocab_size": 288,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0, "rope_scaling": None, "sliding_window": 2047, "hidden_act": "silu",
}  # fmt: skip


GPT_OSS_20B = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


def test_gpt_oss_is_read_as_it_is_published() -> None:
    found = config_from_hf(GPT_OSS_20B, "config.json")
    assert found == ModelConfig.model_validate(built_in_shape("openai/gpt-oss-20b"))
    defaults = transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32).to_dict()
    assert config_from_hf(defaults, "config.json") == found
    for field, value in (("swiglu_limit", 6.0), ("swiglu_alpha", 1.0)):
        with pytest.raises(ValueError, match=rf"config\.json: {field} is {value}; [\d.]+ was expected"):
            config_from_hf({**GPT_OSS_20B, field: value}, "config.json")


MOONLIGHT = {  # as moonshotai/Moonlight-16B-A3B-Instruct is published
    "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11264, "kv_lora_rank": 512,
    "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
V2_LITE = {  # what deepseek-ai/DeepSeek-V2-Lite-Chat has in addition or instead
    "model_type": "deepseek_v2", "intermediate_size": 10944, "max_position_embeddings": 163840, "norm_topk_prob": False,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "topk_method": "greedy", "vocab_size": 102400,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip


def test_moonlight_and_deepseek_are_read_as_they_are_published() -> None:
    moonlight = config_from_hf(MOONLIGHT, "config.json")
    assert (moonlight.head_dim, moonlight.rotary_dim, moonlight.value_dim, moonlight.q_lora_rank) == (192, 64, 128, 0)
    assert (moonlight.rope_theta, moonlight.query_factor, moonlight.rope_interleave) == (50_000, 1, True)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**MOONLIGHT))
    num_parameters = sum(part.num_parameters for part in parameter_table(moonlight))
    assert num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert cache_bytes_per_token(moonlight) == 27 * (2 * 16 * 192 * 2 + 6)
    found = config_from_hf({**MOONLIGHT, **V2_LITE}, "config.json")
    assert found.rope_scaling is not None
    assert found.rope_scaling.attention_factor == 1
    assert found.query_factor == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2, rel=1e-9)
    fields = family_of(found, "language").to_hf(found)
    assert fields["rope_parameters"]["mscale_all_dim"] == pytest.approx(0.707, rel=1e-8)
    assert (found.scoring_func, found.router_bias, found.n_group) == ("softmax", False, 1)
    for field, value in (("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_layer_freq", 2)):
        with pytest.raises(ValueError, match=rf"config\.json: {field} is '?{value}'?; .* was expected"):
            config_from_hf({**MOONLIGHT, field: value}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_head_dim": 0}, "model.v_head_dim is 0, and model.kv_lora_rank 8; 1 to 8 was expected"),
        ({"v_head_dim": 9}, "model.v_head_dim is 9, and model.kv_lora_rank 8; 1 to 8 was expected"),
        ({"head_dim": 6}, "model.head_dim is 6; 8 was expected with kv_lora_rank"),
        ({"num_key_value_heads": 2}, "model.num_key_value_heads is 2; 4 was expected with kv_lora_rank"),
        ({"qk_norm": True}, "model.qk_norm is True; False was expected with kv_lora_rank"),
        ({"kv_lora_rank": 0}, "model.qk_nope_head_dim is 4, and model.kv_lora_rank 0; 0 to 0 was expected"),
        ({"qk_rope_head_dim": 3, "qk_nope_head_dim": 5}, "positions turn 3 of 8 dimensions; an even number"),
    ],
)
def test_latent_attention_without_a_meaning_is_refused(
    tiny_config: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate({**tiny_config.model_dump(), **LATENT, **changes})


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    CASES["deepseek v3"].random_model().save_pretrained(tmp_path)
    expected, tensors = load_language_model(tmp_path)(TOKENS), load_file(tmp_path / "model.safetensors")
    further = {f"model.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "mlp.gate", "enorm")}
    save_file(tensors | further, tmp_path / "model.safetensors")
    assert torch.equal(load_language_model(tmp_path)(TOKENS), expected)
    save_file(tensors | {"model.layers.3.enorm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.3\.enorm\.weight: found, not expected"):
        load_language_model(tmp_path)


def test_gemma_and_phi_are_read_as_they_are_published() -> None:
    gemma = config_from_hf({**GEMMA_1B, "model_type": "gemma3_text"}, "config.json")
    assert gemma.sliding_window == (512, 512, 512, 512, 512, 0)
    assert (gemma.rope_theta, gemma.rope_local_base_freq, gemma.rope_scaling) == (1_000_000, 10_000, None)
    assert (gemma.query_pre_attn_scalar, gemma.tie_word_embeddings) == (0, True)
    full = transformers.Gemma3TextConfig(**GEMMA_1B).to_dict()
    assert config_from_hf(full, "config.json") == gemma
    phi = config_from_hf({**PHI_4K, "model_type": "phi3"}, "config.json")
    assert (phi.sliding_window, phi.partial_rotary_factor, phi.num_key_value_heads) == ((2047,), 1, 5)
    assert config_from_hf(transformers.Phi3Config(**PHI_4K).to_dict(), "config.json") == phi


OLMO3_ROPE = {  # as allenai/Olmo-3-7B-Instruct spells it: only layers that attend to all tokens are stretched
    "rope_theta": 500_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                     "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
}  # fmt: skip
MINISTRAL_ROPE = {
    "rope_parameters": {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                        "llama_4_scaling_beta": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "published", "found"),
    [
        ("SmolLM3", {}, {"layers_without_positions": (3, 7), "rope_theta": 2e6, "tie_word_embeddings": True}),
        ("Olmo3", OLMO3_ROPE, {"sliding_window": (4096, 4096, 4096, 0), "rope_local_base_freq": 500_000}),
        ("Ministral3", MINISTRAL_ROPE, {"head_dim": 128, "num_key_value_heads": 8}),
        ("Exaone4", {}, {"sliding_window": (4096, 4096, 4096, 0), "layers_without_positions": (3, 7)}),
        ("Gemma2", {}, {"attn_logit_softcapping": 50, "final_logit_softcapping": 30, "sliding_window": (4096, 0)}),
        ("Glm4", {}, {"partial_rotary_factor": 0.5, "attention_bias": "qkv", "num_key_value_heads": 2}),
        ("Granite", {"attention_multiplier": 0.0078125}, {"query_pre_attn_scalar": 16384, "logits_scaling": 1}),
    ],
)
def test_what_newer_families_leave_out_is_what_the_library_takes_for_it(
    prefix: str, published: dict[str, Any], found: dict[str, Any]
) -> None:
    shape = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 32, "intermediate_size": 48,
        "vocab_size": 288, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6, **published,
    }  # fmt: skip
    brief = config_from_hf({**shape, "model_type": prefix.lower()}, "config.json")
    full = getattr(transformers, f"{prefix}Config")(**shape).to_dict()
    assert brief == config_from_hf(full, "config.json")
    assert {name: getattr(brief, name) for name in found} == found
    if brief.rope_scaling is not None:  # YaRN's own factor, and DeepSeek's two scales
        assert brief.rope_scaling.attention_factor == (1 if prefix == "Ministral3" else 0)


QWEN35_27B = {  # as Qwen/Qwen3.5-27B is published, around `text_config` as a smaller one has it
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
    "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_5", "depth": 27},
    "text_config": {
        "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 96, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "num_attention_heads": 24, "num_hidden_layers": 8, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "vocab_size": 288,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
    },
}  # fmt: skip


def test_qwen35_is_read_as_it_is_published() -> None:
    found = config_from_hf(QWEN35_27B, "config.json")
    assert found.layer_types == (*["linear_attention"] * 3, "full_attention")
    assert (found.rotary_dim, found.rope_theta, found.linear_num_value_heads) == (64, 1e7, 48)
    text = QWEN35_27B["text_config"]
    assert isinstance(text, dict)
    assert config_from_hf(transformers.Qwen3_5TextConfig(**text).to_dict(), "config.json") == found
    for prefix, shape in (("Qwen3Next", {}), ("Qwen3_5Text", {}), ("Qwen3_5MoeText", {})):  # fields left out
        brief = {"num_hidden_layers": 8, "num_attention_heads": 16, "max_position_embeddings": 64, **shape}
        full = getattr(transformers, f"{prefix}Config")(**brief).to_dict()
        sizes = {name: full[name] for name in ("hidden_size", "vocab_size", "rms_norm_eps")}
        sizes["rope_theta"] = 10_000.0
        found = config_from_hf({**brief, **sizes, "model_type": full["model_type"]}, "config.json")
        assert found == config_from_hf(full, "config.json")


@pytest.mark.parametrize("stacks_experts", [None, False, True])
@torch.no_grad()
def test_qwen35_is_read_next_to_its_vision_tower(
    tmp_path: Path, tokenizer: Tokenizer, stacks_experts: bool | None
) -> None:
    """As it is published: with layers that predict further tokens, and perhaps all experts of a layer in one tensor."""
    case = CASES["qwen3.5" if stacks_experts is None else "qwen3.5 moe"]
    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24,
        "num_position_embeddings": 16,
    }  # fmt: skip
    kind = case.prefix.removesuffix("Text")
    config = getattr(transformers, f"{kind}Config")(text_config=case.config().to_dict(), vision_config=tower)
    theirs = shuffled(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    stored = {**load_file(path), "mtp.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}
    if stacks_experts:
        for layer in range(3):
            each = f"model.language_model.layers.{layer}.mlp.experts"
            maps = [{n: stored.pop(f"{each}.{e}.{n}_proj.weight") for n in ("gate", "up", "down")} for e in range(5)]
            stored[f"{each}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in maps])
            stored[f"{each}.down_proj"] = torch.stack([one["down"] for one in maps])
    save_file(stored, path)
    ours = load_any(tmp_path / "theirs").eval()
    torch.testing.assert_close(our_logits(ours), theirs(TOKENS).logits, **EXACT)
    save_model(tmp_path / "ours", ours, ours.state_dict(), tokenizer)
    again = case.their_class.from_pretrained(tmp_path / "ours").eval()
    assert type(again).__name__ == f"{case.written_as}ForCausalLM"
    torch.testing.assert_close(again(TOKENS).logits, our_logits(ours), **EXACT)


T5_SMALL = {  # as google-t5/t5-small is published, with another size
    "d_ff": 30, "d_kv": 4, "d_model": 20, "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "n_positions": 512,
    "num_heads": 5, "num_layers": 2, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "vocab_size": 288,
}  # fmt: skip
FLAN_T5 = {
    **T5_SMALL, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3, "tie_word_embeddings": False,
    "relative_attention_max_distance": 128,
}  # fmt: skip


def test_t5_and_flan_are_read_as_they_are_published() -> None:
    t5 = config_from_hf({**T5_SMALL, "model_type": "t5"}, "config.json")
    assert (t5.mlp, t5.tie_word_embeddings, t5.relative_attention_max_distance) == ("relu", True, 128)
    assert (t5.num_encoder_layers, t5.num_hidden_layers, t5.query_pre_attn_scalar) == (2, 2, 1)
    flan = config_from_hf({**FLAN_T5, "model_type": "t5"}, "config.json")
    assert (flan.mlp, flan.tie_word_embeddings, flan.num_encoder_layers, flan.num_hidden_layers) == (
        "geglu",
        False,
        2,
        3,
    )
    for published, ours in ((T5_SMALL, t5), (FLAN_T5, flan)):
        assert config_from_hf(transformers.T5Config(**published).to_dict(), "config.json") == ours


@torch.no_grad()
def test_older_t5s_have_another_class_and_tables_that_nothing_uses(tmp_path: Path) -> None:
    theirs = CASES["t5"].random_model()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {f"{stack}.embed_tokens.weight": tensors["shared.weight"].clone() for stack in ("encoder", "decoder")}
    save_file({**tensors, **copies, unused: torch.ones(8, 3)}, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["T5WithLMHeadModel"]}))
    ours = load_any(tmp_path).eval()
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), **EXACT)


@torch.no_grad()
def test_a_t5_whose_unscaled_head_is_the_embedding_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """transformers 5 makes every T5 with such a head, which it does not store, and leaves the states unscaled with
    tie_word_embeddings = false.
    """
    torch.manual_seed(3)
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**FLAN_T5))
    made.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    ours = load_any(tmp_path).eval()
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), **EXACT)


LONG = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}


@pytest.mark.parametrize(
    ("family", "published", "change", "words"),
    [
        ("gemma3_text", GEMMA_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; False"),
        ("gemma3_text", GEMMA_1B, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; 'gelu_pytorch_tanh'"),
        ("phi3", PHI_4K, {"rope_scaling": LONG}, "rope_type is 'longrope'; 'default' was expected"),
        ("phi3", PHI_4K, {"rope_parameters": {**LINEAR}}, "rope_type is 'linear'; 'default' was expected"),
        ("phi3", PHI_4K, {"partial_rotary_factor": 0.3}, "1 of 4 dimensions; an even number, at least 2, was expected"),
        ("olmo2", PHI_4K, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; 'silu' was expected"),
        ("mistral3", PHI_4K, {}, "model_type is 'mistral3', which has a vision tower"),
        ("gemma3", GEMMA_1B, {}, "model_type is 'gemma3', which has a vision tower"),
        ("qwen3_5", PHI_4K, {}, "field 'text_config' is missing"),
        ("t5", T5_SMALL, {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'; 'relu' or"),
        ("t5", FLAN_T5, {"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'; 'gelu_new' was expected"),
        ("falcon", PHI_4K, {}, "model_type is 'falcon'; one of"),
    ],
)
def test_what_a_family_does_not_cover_is_refused(
    family: str, published: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"^config.json: .*{words}"):
        config_from_hf({**published, **change, "model_type": family}, "config.json")


@torch.no_grad()
def test_the_published_gpt2_has_no_prefix_and_carries_its_mask(tmp_path: Path) -> None:
    theirs = shuffled(transformers.GPT2LMHeadModel(CASES["gpt2"].config()))
    bare = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    del bare["lm_head.weight"]
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril() for layer in range(3)}
    theirs.config.save_pretrained(tmp_path)
    fields = tmp_path / "config.json"
    fields.write_text(fields.read_text().replace("{", '{"architectures": ["GPT2LMHeadModel"],', 1))
    save_file({name: tensor.contiguous() for name, tensor in bare.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(load_language_model(tmp_path).eval()(TOKENS), theirs(TOKENS).logits, **EXACT)


@torch.no_grad()
def test_large_weights_are_cut_into_shards_and_read_from_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = ModelConfig(
        vocab_size=288,
        max_position_embeddings=CONTEXT,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
    )
    model = LanguageModel(config)
    init_weights(model, 1)
    save_model(tmp_path, model.eval(), model.state_dict(), tokenizer, max_file_bytes=10_000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) >= 3
    assert torch.equal(load_language_model(tmp_path).eval()(TOKENS), model(TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), **EXACT)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ValueError, match=rf"{shards[1]}: no such file, though .*index.json names it"):
        load_language_model(tmp_path)


def test_older_spellings_of_rope_are_read() -> None:
    llama = next(family for family in FAMILIES if family.model_type == "llama")
    fields = llama.to_hf(ModelConfig(
        vocab_size=288, max_position_embeddings=CONTEXT, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=24
    ))  # fmt: skip
    del fields["rope_parameters"]
    older = {"type": "linear", "factor": 2.0}
    found = ModelConfig.model_validate(llama.from_hf({**fields, "rope_theta": 123.0, "rope_scaling": older}))
    assert (found.rope_theta, found.rope_scaling) == (123.0, RopeScaling(rope_type="linear", factor=2))
    plain = ModelConfig.model_validate(llama.from_hf({**fields, "rope_theta": 123.0, "rope_scaling": None}))
    assert (plain.rope_theta, plain.rope_scaling) == (123.0, None)


@pytest.mark.parametrize(
    ("name", "family"), [("mistral, window", "mistral"), ("bart", "bart"), ("bert, spans", "bert")]
)
def test_the_published_table_measures_what_is_tested_here(tokenizer: Tokenizer, name: str, family: str) -> None:
    found = measure(name, tokenizer)
    assert found.written_as == family
    assert 0 <= found.reading < 1e-4
    assert 0 <= found.writing < 1e-4
    assert found.same_tokens == found.num_tokens
    assert (found.num_tokens == 0) == (family == "bert")


def wide(**changes: Any) -> ModelConfig:
    """A hidden size of 18 with 5 heads of 4, as rotary families write it."""
    shape = {
        "vocab_size": 288,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": 2,
        "num_key_value_heads": 5,
        "intermediate_size": 24,
    }
    return ModelConfig.model_validate({**shape, "hidden_size": 18, "num_attention_heads": 5, "head_dim": 4, **changes})


@torch.no_grad()
def test_a_width_that_llama_refuses_is_written_as_what_transformers_loads(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Llama and Arcee need a hidden size divisible by the heads; Mistral, otherwise the same model, does not."""
    model = shuffled(LanguageModel(wide()))
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "MistralForCausalLM"
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), **EXACT)
    with pytest.raises(Exception, match="not a multiple of the number of attention"):
        transformers.LlamaConfig(hidden_size=18, num_attention_heads=5, head_dim=4)
    assert family_of(wide(hidden_size=20), "language").model_type == "llama"
    assert family_of(wide(hidden_size=20, mlp="relu2"), "language").model_type == "arcee"
    assert family_of(wide(mlp="relu2"), "language").model_type == "heed"  # no published family is possible


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("Mistral", ("sliding_window", "num_key_value_heads")),
        ("Qwen2", ("sliding_window", "max_window_layers", "num_key_value_heads")),
        ("Qwen3", ("sliding_window", "max_window_layers", "num_key_value_heads", "head_dim")),
        ("Llama", ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings")),
    ],
)
def test_what_config_json_leaves_out_is_what_the_library_takes_for_it(name: str, left_out: tuple[str, ...]) -> None:
    kind = getattr(transformers, f"{name}Config")
    given = {
        "vocab_size": 288, "max_position_embeddings": CONTEXT, "hidden_size": 64, "num_attention_heads": 32,
        "num_hidden_layers": 30, "intermediate_size": 48, "rms_norm_eps": 1e-5, "use_sliding_window": True,
    }  # fmt: skip
    family = next(family for family in FAMILIES if family.model_type == name.lower())
    assert not set(left_out) & set(given)
    brief = ModelConfig.model_validate(family.from_hf(given))
    full = ModelConfig.model_validate(family.from_hf(kind(**given).to_dict()))
    assert brief == full
    if name != "Llama":
        assert max(brief.sliding_window) == 4096
        none = ModelConfig.model_validate(family.from_hf({**given, "sliding_window": None}))
        assert none.sliding_window == (0,)


@torch.no_grad()
def test_berts_body_alone_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As all-MiniLM-L6-v2 is published: without a head, and without `bert.` before the names."""
    theirs = shuffled(transformers.BertModel(CASES["bert, masked words"].config()))
    theirs.save_pretrained(tmp_path)
    segments = torch.ones_like(TOKENS)
    segments[0, 30:] = 0
    expected = theirs(TOKENS, attention_mask=segments)
    assert type(load_any(tmp_path)) is EncoderModel
    network = load(network_source(tmp_path, 0.0, 4)).eval()
    assert isinstance(network, SequenceClassifier)
    hidden = network.encoder.hidden(TOKENS, segments)
    torch.testing.assert_close(hidden[segments > 0], expected.last_hidden_state[segments > 0], **EXACT)
    torch.testing.assert_close(network.pooler(hidden[:, 0]).tanh(), expected.pooler_output, **EXACT)
    save_model(tmp_path / "scores", network, network.state_dict(), tokenizer)
    scores = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores").eval()
    torch.testing.assert_close(scores(TOKENS, attention_mask=segments).logits, network(TOKENS, segments), **EXACT)


@torch.no_grad()
def test_bert_as_it_was_pretrained_finds_masked_words(tmp_path: Path) -> None:
    theirs = shuffled(transformers.BertForPreTraining(CASES["bert, masked words"].config()))
    theirs.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    ours = load_any(tmp_path)
    assert isinstance(ours, MaskedLanguageModel)
    torch.testing.assert_close(ours.eval()(TOKENS), theirs(TOKENS).prediction_logits, **EXACT)
