"""Adapters in PEFT's files, both ways: PEFT's by Heed, and Heed's by PEFT, with the logits of both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lm.adapters import AdapterFolder, FromAdapter, adapted_folder, save_trained
from lm.encoder import MaskedLanguageModel, SequenceClassifier
from lm.lora import LoRAConfig, WithAdapters, adapted_maps, merged
from lm.model import LanguageModel, ScalarModel
from lm.source import ModelSource, load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, WithNewHead, any_folder, save_model

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False}  # fmt: skip
ROTARY = {**SIZES, "num_key_value_heads": 2}
LINEAR = {**ROTARY, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
          "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
LATENT = "deepseek_v3"  # its experts have no adapters
BASES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**ROTARY),
    "qwen2": lambda: transformers.Qwen2Config(**ROTARY),
    "qwen3": lambda: transformers.Qwen3Config(**ROTARY, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**ROTARY, sliding_window=None),
    "olmo2": lambda: transformers.Olmo2Config(**ROTARY),
    "phi3": lambda: transformers.Phi3Config(
        **ROTARY,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**ROTARY, head_dim=8, query_pre_attn_scalar=5),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**LINEAR),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
EXPERTS = {**ROTARY, "num_experts_per_tok": 2}
MIXTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, head_dim=8, num_experts=5, moe_intermediate_size=24),
    "olmoe": lambda: transformers.OlmoeConfig(**EXPERTS, num_experts=5),
    "mixtral": lambda: transformers.MixtralConfig(**EXPERTS, num_local_experts=5),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **EXPERTS, num_experts=5, moe_intermediate_size=24, shared_expert_intermediate_size=16
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **EXPERTS, n_routed_experts=5, moe_intermediate_size=24, first_k_dense_replace=1, head_dim=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**EXPERTS, head_dim=8, num_local_experts=5),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **LINEAR, num_experts_per_tok=2, num_experts=5, moe_intermediate_size=24, shared_expert_intermediate_size=16
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**EXPERTS, num_local_experts=5),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear maps": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "queries and values": {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "rank and alpha patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": "all-linear",
        "rank_pattern": {"k_proj": 5, r"layers\.1\.mlp\.(up|gate)_proj": 3},
        "alpha_pattern": {"k_proj": 7, "layers.0.self_attn.q_proj": 1},
    },
    "rank-stabilised": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "o_proj"], "layers_to_transform": [1]},
    "a whole head": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole tables, norms and a part of a fused map": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "norm", "input_layernorm", "k_proj"],
    },
    "whole norms": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["q_proj"],
        "modules_to_save": ["norm", "q_norm", "post_feedforward_layernorm"],
    },
    "an expression": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": r"model\.layers\.[01]\.(self_attn\.[kv]|mlp\.up)_proj",
    },
    "some excluded": {"r": 2, "lora_alpha": 2, "target_modules": "all-linear", "exclude_modules": ["0.mlp.up_proj"]},
    "a layer of a pattern": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["v_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "latent attention": {"r": 2, "lora_alpha": 4, "target_modules": r".*\.self_attn\.[a-z_]*proj(_with_mqa)?"},
    "weights as parameters": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "target_parameters": ["0.mlp.up_proj.weight"],
        "rank_pattern": {"up_proj.weight": 3},
    },
    "eva": {"r": 2, "lora_alpha": 2, "target_modules": ["v_proj"], "init_lora_weights": "eva"},
    "mica": {"r": 2, "lora_alpha": 2, "target_modules": ["v_proj"], "init_lora_weights": "mica"},
}
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts and queries": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": STACKED},
    "one layer's experts": {
        "r": 2, "lora_alpha": 4, "target_modules": [], "target_parameters": ["layers.1.mlp." + name for name in STACKED]
    },
    "experts' last maps": {"r": 8, "lora_alpha": 80, "target_modules": [], "target_parameters": STACKED[1:]},
    "experts' first maps, rank-stabilised": {
        "r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "target_parameters": STACKED[:1], "use_rslora": True
    },
    "ranks of experts' maps": {
        "r": 2, "lora_alpha": 4, "target_modules": ["k_proj"], "target_parameters": STACKED,
        "rank_pattern": {"down_proj": 5}, "alpha_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 9},
    },
}  # fmt: skip
OF_GPT2 = {"r": 2, "lora_alpha": 2, "target_modules": ["c_attn"], "modules_to_save": ["c_fc", "ln_1"]}  # transposed
CASES = [("llama", name) for name in ADAPTERS if name not in ("whole norms", "latent attention")] + [
    (base, "all linear maps") for base in BASES if base not in ("llama", LATENT)
]
CASES += [("gpt2", "whole transposed maps"), ("gemma3", "whole norms"), (LATENT, "latent attention")]
CASES += [("qwen3_moe", name) for name in OF_EXPERTS]
CASES += [(base, "experts and queries") for base in MIXTURES if base != "qwen3_moe"]
TOKENS = torch.arange(10, 34).view(2, 12)
LORA = LoRAConfig(rank=3, alpha=6.0)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a cat sat on a mat and saw one red bird"] * 9, 300, "chat")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Callable[[str], Path]:
    """A model of a family with random weights, as `transformers` saves it."""
    root = tmp_path_factory.mktemp("bases")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            torch.manual_seed(3)
            config = (BASES | MIXTURES)[family]()
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save(folder)
        return folder

    return make


def adapt(folder: Path, output: Path, **options: Any) -> Tensor:
    """Let PEFT put random adapters on a model and save them. Returns the logits."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            scale = 0.2 if "lora" in name else 0.05
            parameter.data += scale * torch.randn_like(parameter)
    adapted.save_pretrained(output)
    with torch.no_grad():
        logits: Tensor = adapted(TOKENS).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
    assert float((logits - plain).abs().max()) > 0.1
    return logits


@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_adapter_of_pefts_gives_pefts_logits_apart_and_merged(
    base: Callable[[str], Path], tmp_path: Path, family: str, name: str
) -> None:
    expected = adapt(base(family), tmp_path / "adapter", **(ADAPTERS | OF_EXPERTS).get(name, OF_GPT2))
    source = FromAdapter(ModelFolder(base(family), LanguageModel), tmp_path / "adapter")
    model, plain = load(source), load(ModelFolder(base(family), LanguageModel))
    assert adapted_maps(model)
    weights = dict(merged(model, model.named_parameters()))
    plain.load_state_dict(weights, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(plain(TOKENS), expected, atol=2e-5, rtol=1e-5)


def test_zeros_after_a_lower_rank_stay_zeros_in_training(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapt(base("llama"), tmp_path / "adapter", **ADAPTERS["rank and alpha patterns"])
    model = load(FromAdapter(ModelFolder(base("llama"), LanguageModel), tmp_path / "adapter"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    before = {name: module.lora_b.detach().clone() for name, module in adapted_maps(model).items()}
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
    for name, module in adapted_maps(model).items():
        assert torch.equal(module.lora_b == 0, before[name] == 0)
    qkv = model.decoder.blocks[0].attention.qkv
    assert (qkv.lora_b[:32, 2:] == 0).all()  # q has rank 2, k has 5
    assert (qkv.lora_b[32:48] != 0).all()


@pytest.mark.parametrize(
    ("family", "targets"),
    [(base, targets) for base in BASES for targets in ("all", "attention", "mlp")]
    + [(family, "experts") for family in MIXTURES]
    + [("glm4_moe", "mlp"), ("qwen3_next", "all")],
)
def test_peft_loads_an_adapter_of_ours_with_the_same_logits(
    base: Callable[[str], Path], tmp_path: Path, tokenizer: Tokenizer, family: str, targets: str
) -> None:
    frozen = ModelFolder(base(family), LanguageModel)
    config = LoRAConfig.model_validate({"rank": 3, "alpha": 6, "targets": targets})
    model = trained(frozen, config)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, config, base(family))
    found = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base(family)), tmp_path / "adapter"
    ).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        expected = model(TOKENS)
        torch.testing.assert_close(found(TOKENS).logits, expected, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(whole(TOKENS).logits, expected, atol=2e-5, rtol=1e-5)
        again = load(FromAdapter(frozen, tmp_path / "adapter"))
        assert torch.equal(again(TOKENS), expected)


def trained(frozen: ModelSource[Any], config: LoRAConfig) -> Any:
    """A model with adapters that have learned something."""
    model, generator = load(WithAdapters(frozen, config, 5)), torch.Generator().manual_seed(6)
    for module in adapted_maps(model).values():
        module.lora_b.data.normal_(std=0.3, generator=generator)
    return model.eval()


def state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_peft_loads_a_reward_models_adapter_with_its_head(
    base: Callable[[str], Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    frozen = WithNewHead(base("llama"), LanguageModel, ScalarModel, seed=7)
    model = trained(frozen, LORA)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, LORA, base("llama"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    body = transformers.AutoModelForSequenceClassification.from_pretrained(
        base("llama"), num_labels=1, pad_token_id=tokenizer.pad_id
    )
    found = peft.PeftModel.from_pretrained(body, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(TOKENS).logits[:, 0], model(TOKENS)[:, -1], atol=2e-5, rtol=1e-5)
        again = load(FromAdapter(WithNewHead(base("llama"), LanguageModel, ScalarModel, seed=8), tmp_path / "adapter"))
        assert torch.equal(again(TOKENS), model(TOKENS))


def test_an_encoders_adapter_loads_in_peft_with_pooler_and_classifier(tmp_path: Path, tokenizer: Tokenizer) -> None:
    torch.manual_seed(9)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    frozen = WithNewHead(tmp_path / "base", MaskedLanguageModel, lambda shape: SequenceClassifier(shape, ["a", "b"]), 7)
    model = trained(frozen, LORA)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, LORA, tmp_path / "base")
    body = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    found = peft.PeftModel.from_pretrained(body, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model(TOKENS, torch.ones_like(TOKENS))
        torch.testing.assert_close(found(TOKENS).logits, expected, atol=2e-5, rtol=1e-5)
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(TOKENS).logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "cross_attention"),
    [
        (
            transformers.BartConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, forced_eos_token_id=None,
            ),
            "encoder_attn",
        ),
        (
            transformers.T5Config(
                d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, n_positions=64, feed_forward_proj="gated-gelu",
            ),
            "EncDecAttention",
        ),
    ],
)  # fmt: skip
def test_an_encoder_decoders_adapter_loads_in_peft(
    tmp_path: Path, tokenizer: Tokenizer, config: transformers.PretrainedConfig, cross_attention: str
) -> None:
    torch.manual_seed(9)
    config.update(
        {
            "vocab_size": 300, "pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.end_id,
            "bos_token_id": tokenizer.end_id, "decoder_start_token_id": tokenizer.end_id,
        }
    )  # fmt: skip
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save(tmp_path / "base")
    frozen = any_folder(tmp_path / "base")
    model = trained(frozen, LORA)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, LORA, tmp_path / "base")
    found = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        one, other = (m(input_ids=TOKENS, decoder_input_ids=TOKENS).logits for m in (found, whole))
    torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert sum(cross_attention in name for name in names) == 2 * 4 * 2  # layers, maps, A and B


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; 'LORA' was expected"),
    ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'"),
    ({"peft_type": None}, "peft_type is None; 'LORA' was expected"),
    ({"use_dora": True}, "use_dora is True, which Heed does not support"),
    ({"bias": "all"}, "bias is 'all'; Input should be 'none'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
    ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    ({"from_the_future": {"x": 1}}, "from_the_future is"),
    ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'; True or False or None or 'gaussian'"),
    ({"r": 5}, r"28 tensors do not fit.*down_proj.lora_A.weight: expected \[5, 48\], found \[4, 48\]"),
    ({"rank_pattern": {"k_proj": 3}}, r"k_proj.lora_B.weight: expected \[16, 3\], found \[16, 4\]"),
    ({"r": 0}, "r is 0; Input should be greater than or equal to 1"),
    ({"r": True}, "r is True; Input should be a valid integer"),
    ({"lora_alpha": None}, "lora_alpha is None; Input should be a valid number"),
    ({"rank_pattern": ["k_proj"]}, r"rank_pattern is \['k_proj'\]; Input should be a valid dictionary"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern is .*'\(' is no regular expression"),
    ({"target_modules": ["q_proj"]}, r"24 tensors .*down_proj.lora_A.weight: found, but adapter_config.json does not"),
    ({"exclude_modules": ["q_proj"]}, "q_proj.lora_A.weight: found, but adapter_config.json does not target it"),
    ({"layers_to_transform": [0]}, "layers.1.mlp.down_proj.lora_A.weight: found, but"),
    ({"modules_to_save": ["lm_head"]}, r"1 tensors .*lm_head.weight: expected \[300, 32\], missing"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_what_heed_does_not_compute_is_refused_by_name(
    base: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    adapt(base("llama"), tmp_path / "adapter", **ADAPTERS["all linear maps"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message) as caught:
        on_meta(FromAdapter(ModelFolder(base("llama"), LanguageModel), tmp_path / "adapter").build)
    assert str(tmp_path / "adapter") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", (4, 300), "embed_tokens.lora_embedding_A: found, not expected"),
        ("lm_head.lora_A.weight", (4, 32), "lm_head.lora_A.weight: found, not expected"),
        ("model.layers.7.mlp.up_proj.lora_A.weight", (4, 32), r"layers.7.mlp.up_proj.lora_A.weight: found, not"),
        ("model.layers.0.mlp.up_proj.lora_magnitude_vector", (48,), "lora_magnitude_vector: found, not expected"),
        ("model.layers.0.mlp.up_proj.lora_A.weight", (4, 31), r"expected \[4, 32\], found \[4, 31\]"),
        ("model.layers.0.mlp.up_proj.lora_B.weight", (0,), r"expected \[48, 4\], found \[0\]"),
        ("lm_head.weight", (301, 32), r"lm_head.weight: expected \[300, 32\], found \[301, 32\]"),
        ("model.embed_tokens.weight", (301, 32), r"weight: expected \[300, 32\], found \[301, 32\]"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(
    base: Callable[[str], Path], tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    adapt(base("llama"), tmp_path / "adapter", **ADAPTERS["all linear maps"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(path), f"base_model.model.{name}": torch.zeros(shape)}, path)
    with pytest.raises(ValueError, match=message):
        [*FromAdapter(ModelFolder(base("llama"), LanguageModel), tmp_path / "adapter").tensors()]


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("lora_A", r"14 tensors .*down_proj.lora_A.weight: expected \[4, 48\], missing"),
        ("lora", r"no adapter; tensors named \*.lora_A.weight and \*.lora_B.weight were expected"),
    ],
)
def test_adapters_that_are_not_whole_are_refused(
    base: Callable[[str], Path], tmp_path: Path, removed: str, message: str
) -> None:
    adapt(base("llama"), tmp_path / "adapter", **ADAPTERS["all linear maps"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if removed not in name}, path)
    with pytest.raises(ValueError, match=message):
        on_meta(FromAdapter(ModelFolder(base("llama"), LanguageModel), tmp_path / "adapter").build)


def test_pickled_weights_damaged_files_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": []}'
    )
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: no such file; weights as PEFT saves them"):
        _ = AdapterFolder(tmp_path).shapes
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: incomplete or damaged"):
        _ = AdapterFolder(tmp_path).shapes
    save_file({"transformer.x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"a tensor 'transformer.x'; names that start with base_model.model. were"):
        _ = AdapterFolder(tmp_path).shapes


def test_a_whole_head_of_a_tied_model_is_refused(
    base: Callable[[str], Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """It would untie the model."""
    shape = on_meta(ModelFolder(base("llama"), LanguageModel).build).config
    model = LanguageModel(shape.model_copy(update={"tie_word_embeddings": True}))
    save_model(tmp_path / "tied", model, model.state_dict(), tokenizer)
    adapt(base("llama"), tmp_path / "adapter", **ADAPTERS["a whole head"])
    with pytest.raises(ValueError, match=r"lm_head\.weight: found, not expected"):
        on_meta(FromAdapter(ModelFolder(tmp_path / "tied", LanguageModel), tmp_path / "adapter").build)
    adapt(base("llama"), tmp_path / "table", **{**ADAPTERS["a whole head"], "modules_to_save": ["embed_tokens"]})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: found, not expected"):
        on_meta(FromAdapter(ModelFolder(tmp_path / "tied", LanguageModel), tmp_path / "table").build)


def bert_folder(folder: Path, tokenizer: Tokenizer) -> Path:
    """A BERT as published: with a pooler, and a head for masked words."""
    torch.manual_seed(9)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForPreTraining(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize(
    ("task", "kind", "options"),
    [
        ("SEQ_CLS", "AutoModelForSequenceClassification", {"target_modules": ["query", "pooler.dense"]}),
        ("TOKEN_CLS", "AutoModelForTokenClassification", {"target_modules": ["query", "output.dense"]}),
        ("QUESTION_ANS", "AutoModelForQuestionAnswering", {"target_modules": ["key", "intermediate.dense"]}),
        ("FEATURE_EXTRACTION", "AutoModel", {"target_modules": ["query", "value"]}),
        (None, "AutoModelForMaskedLM", {"target_modules": ["query", "cls.predictions.transform.dense"]}),
    ],
)
def test_an_encoders_adapter_brings_its_head(
    tmp_path: Path, tokenizer: Tokenizer, task: str | None, kind: str, options: dict[str, Any]
) -> None:
    folder = bert_folder(tmp_path / "base", tokenizer)
    sizes = {"num_labels": 3} if "Classification" in kind else {}
    if task == "FEATURE_EXTRACTION":  # without a head, names have no prefix
        transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).save_pretrained(folder)
    theirs = getattr(transformers, kind).from_pretrained(folder, **sizes)
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(task_type=task, r=3, lora_alpha=5, **options)).eval()
    for parameter in filter(lambda parameter: parameter.requires_grad, adapted.parameters()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    source = adapted_folder(folder, AdapterFolder(tmp_path / "adapter"))
    model: Any = load(source).eval()
    with torch.no_grad():
        found = adapted(TOKENS)
        ours = model.hidden(TOKENS, None, None, None) if task == "FEATURE_EXTRACTION" else model(TOKENS)
        ours = ours if isinstance(ours, tuple) else (ours,)
        for one, other in zip(ours, found.to_tuple(), strict=False):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


def test_a_classifier_without_its_head_and_a_base_for_another_task_are_refused(
    base: Callable[[str], Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    frozen = WithNewHead(base("llama"), LanguageModel, ScalarModel, seed=7)
    model = trained(frozen, LORA)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, LORA, base("llama"))
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "score" not in name}, path)
    with pytest.raises(ValueError, match=r"score.weight: expected \[1, 32\], missing"):
        on_meta(adapted_folder(base("llama"), AdapterFolder(tmp_path / "adapter")).build)
    adapt(base("llama"), tmp_path / "language", **ADAPTERS["queries and values"])
    with pytest.raises(ValueError, match=r"task_type is 'CAUSAL_LM', and .*model is a ScalarModel; a model for that"):
        adapted_folder(tmp_path / "model", AdapterFolder(tmp_path / "language"))


@pytest.mark.parametrize("targets", ["all", "attention", "mlp"])
def test_peft_finds_the_adapted_maps_of_an_encoder_and_no_others(
    tmp_path: Path, tokenizer: Tokenizer, targets: str
) -> None:
    """An attention's output, a block's output and the pooler are all called dense."""
    folder = bert_folder(tmp_path / "base", tokenizer)
    frozen = WithNewHead(folder, MaskedLanguageModel, lambda shape: SequenceClassifier(shape, ["a", "b"]), 7)
    config = LoRAConfig.model_validate({"rank": 3, "alpha": 6, "targets": targets})
    model = trained(frozen, config)
    save_trained(tmp_path, on_meta(frozen.build), model, state(model), tokenizer, config, folder)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    found = peft.PeftModel.from_pretrained(body, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(found(TOKENS).logits, model(TOKENS), atol=2e-5, rtol=1e-5)
    adapted = {name.partition(".lora_A")[0] for name, _ in found.named_parameters() if "lora_A" in name}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapted == {name.partition(".lora_A")[0] for name in stored if "lora_A" in name}
