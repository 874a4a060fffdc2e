"""LoRA: the equation, what trains, and what is written."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lm.adapters import save_adapter
from lm.config import ModelConfig
from lm.lora import LoRAConfig, LoRALinear, WithAdapters, kept_adapters, merged, without_adapters
from lm.model import LanguageModel
from lm.source import RandomInit, load, on_meta

SHAPE = ModelConfig(
    vocab_size=50,
    max_position_embeddings=32,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
)
GPT2 = SHAPE.model_copy(
    update={
        "norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "num_key_value_heads": 4, "mlp_bias": True,
        "attention_bias": "all",
    }
)  # fmt: skip
BASE = RandomInit(lambda: LanguageModel(SHAPE), 1)
TOKENS = torch.arange(20).view(2, 10)
CONFIG = LoRAConfig(rank=3, alpha=6.0)


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapted(config: LoRAConfig = CONFIG, *, has_learned: bool = True) -> LanguageModel:
    model = load(WithAdapters(BASE, config, 2))
    if has_learned:
        generator = torch.Generator().manual_seed(3)
        for name, parameter in learned(model).items():
            if name.endswith("lora_b"):
                parameter.data.normal_(generator=generator)
    return model


def test_neither_a_new_adapter_nor_one_that_is_off_changes_a_bit() -> None:
    base = load(BASE)(TOKENS)
    assert torch.equal(adapted(has_learned=False)(TOKENS), base)
    model = adapted()
    assert float((model(TOKENS) - base).detach().abs().max()) > 0.1
    with without_adapters(model):
        assert torch.equal(model(TOKENS), base)
    assert not torch.equal(model(TOKENS), base)


def test_the_equation_of_a_fused_map_part_by_part() -> None:
    module = adapted().decoder.blocks[0].attention.qkv
    assert isinstance(module, LoRALinear)
    assert module.part_rows == (16, 8, 8)  # q, k, v
    x, first = torch.randn(5, 16), 0
    found = module(x)
    for part, rows in enumerate(module.part_rows):
        low = x @ module.lora_a[3 * part : 3 * part + 3].T
        here = slice(first, first + rows)
        expected = x @ module.weight[here].T + 2.0 * low @ module.lora_b[here].T
        torch.testing.assert_close(found[:, here], expected)
        first += rows


@pytest.mark.parametrize(
    ("targets", "maps"),
    [
        ("all", ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]),
        ("attention", ["attention.qkv", "attention.out"]),
        ("mlp", ["mlp.up", "mlp.down"]),
    ],
)
def test_only_the_adapters_of_the_targets_learn(targets: str, maps: list[str]) -> None:
    model = adapted(LoRAConfig.model_validate({"rank": 3, "alpha": 6, "targets": targets}))
    names = {
        f"decoder.blocks.{layer}.{name}.{kind}" for layer in (0, 1) for name in maps for kind in ("lora_a", "lora_b")
    }
    assert set(learned(model)) == names
    F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    for name, parameter in learned(model).items():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule() -> None:
    model, plain = adapted(), load(BASE)
    plain.load_state_dict(dict(merged(model, model.named_parameters())), strict=False)
    for one in (model, plain):
        F.cross_entropy(one(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    for name, module in model.named_modules():
        if not isinstance(module, LoRALinear):
            continue
        whole = plain.get_submodule(name).weight.grad
        assert isinstance(whole, Tensor)
        first = 0
        for part, rows in enumerate(module.part_rows):
            ranks, here = slice(3 * part, 3 * part + 3), slice(first, first + rows)
            a, b = module.lora_a[ranks], module.lora_b[here]
            torch.testing.assert_close(module.lora_a.grad[ranks], 2.0 * b.T @ whole[here], atol=2e-5, rtol=1e-3)  # type: ignore[index]
            torch.testing.assert_close(module.lora_b.grad[here], 2.0 * whole[here] @ a.T, atol=2e-5, rtol=1e-3)  # type: ignore[index]
            first += rows


def test_merged_weights_give_the_same_logits_and_have_the_names_of_the_base() -> None:
    model, plain = adapted(), load(BASE)
    found = dict(merged(model, model.named_parameters()))
    assert list(found) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(found, strict=False)
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), atol=3e-5, rtol=1e-5)
    untouched = dict(merged(plain, plain.named_parameters()))
    assert all(torch.equal(untouched[name], found[name]) for name in found)


@pytest.mark.parametrize(("shape", "transposed"), [(SHAPE, False), (GPT2, True)])
def test_files_are_named_and_shaped_as_peft_has_them(tmp_path: Path, shape: ModelConfig, *, transposed: bool) -> None:
    model = load(WithAdapters(RandomInit(lambda: LanguageModel(shape), 1), CONFIG, 2))
    kept: dict[str, Tensor] = {}
    assert len(dict(kept_adapters(model.named_parameters(), kept))) == len([*model.named_parameters()])
    plain = on_meta(lambda: LanguageModel(shape))
    save_adapter(tmp_path / "adapter", plain, model, kept, CONFIG, Path("base/model"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    assert config["base_model_name_or_path"] == "base/model"
    assert config["fan_in_fan_out"] is transposed
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if transposed:
        narrow = LoRAConfig(rank=3, alpha=6.0, targets="attention")
        model = load(WithAdapters(RandomInit(lambda: LanguageModel(shape), 1), narrow, 2))
        save_adapter(tmp_path / "narrow", plain, model, learned(model), narrow, Path("base/model"))
        found = json.loads((tmp_path / "narrow" / "adapter_config.json").read_text())
        assert found["target_modules"] == ["attn.c_proj", "c_attn"]  # the MLP has a c_proj too
        assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]
        layer = "base_model.model.transformer.h.1"
        assert tensors[f"{layer}.attn.c_attn.lora_A.weight"].shape == (3, 16)
        assert tensors[f"{layer}.attn.c_attn.lora_B.weight"].shape == (48, 3)
        return
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    layer = "base_model.model.model.layers.1"
    qkv = model.decoder.blocks[1].attention.qkv
    assert torch.equal(tensors[f"{layer}.self_attn.k_proj.lora_A.weight"], qkv.lora_a[3:6])
    assert torch.equal(tensors[f"{layer}.self_attn.k_proj.lora_B.weight"], qkv.lora_b[16:24])
    assert len(tensors) == 2 * 7 * 2
