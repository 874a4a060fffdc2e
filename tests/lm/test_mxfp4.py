"""Published gpt-oss checkpoints, whose experts are in MXFP4: their numbers, and models that are read from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.parity import TOKENS, YARN, Case, their_logits
from lm.model import LanguageModel
from lm.tensor_files import Checkpoint, from_mxfp4
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, load_model, save_model

# OCP Microscaling Formats 1.0, table 6: a sign, two bits of exponent (bias 1), one of mantissa.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERTS, WIDTH = 4, 32
WEIGHTS = "model.safetensors"


def drawn(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_the_numbers_of_a_group_by_hand() -> None:
    """Sixteen bytes hold the 16 codes twice, the lower half of a byte first, at three scales."""
    codes = [*range(16), *reversed(range(16))]
    blocks = torch.tensor([low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)])
    scales = torch.tensor([[127, 130, 120]], dtype=torch.uint8)
    found = from_mxfp4(blocks.to(torch.uint8).expand(1, 3, 16), scales)
    expected = [E2M1[code] * factor for factor in (1, 8, 1 / 128) for code in codes]
    assert found.dtype == torch.float32
    assert found[0].tolist() == expected


def test_any_bytes_are_what_transformers_reads() -> None:
    blocks, scales = drawn(3, 6, 2, 16), drawn(3, 6, 2, low=100, high=140)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # (in, out)
    ours = torch.stack([from_mxfp4(*expert) for expert in zip(blocks, scales, strict=True)])
    assert torch.equal(ours.transpose(1, 2), theirs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model with its experts in MXFP4, in the published layout, and with the same numbers in fp32."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("packed", "plain"))
    changes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "sliding_window": 7,
    }
    changes |= {"num_experts_per_tok": 2, "rope_parameters": {**YARN, "truncate": False}}
    Case("GptOss", changes).random_model().save_pretrained(plain)
    tensors = load_file(plain / WEIGHTS)
    unpacked = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).shape[2]
        parts = drawn(EXPERTS, rows, WIDTH // 32, 16), drawn(EXPERTS, rows, WIDTH // 32, low=120, high=125)
        tensors |= {f"{name}_blocks": parts[0], f"{name}_scales": parts[1]}
        unpacked[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    save_file(unpacked, plain / WEIGHTS, metadata={"format": "pt"})
    save_file(tensors, packed / WEIGHTS, metadata={"format": "pt"})
    fields = json.loads((plain / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "experts_per_token": 2, "initial_context_length": 40, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
        },
    }  # fmt: skip
    (packed / "config.json").write_text(json.dumps(fields))
    return packed, plain


@torch.no_grad()
def test_a_published_checkpoint_has_the_logits_of_transformers_and_is_written_plainly(
    folders: tuple[Path, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    packed, plain = folders
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    model = load_model(packed, LanguageModel).eval()
    expected = their_logits(theirs)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-4, rtol=1e-4)
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    written, read = load_file(tmp_path / WEIGHTS), load_file(plain / WEIGHTS)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_shard_reads_only_the_experts_that_it_has_rows_of(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, part = list[tuple[Any, ...]](), Checkpoint.part
    monkeypatch.setattr(Checkpoint, "part", lambda *args: (read.append(args[1:]), part(*args))[1])
    name, rows = "decoder.blocks.1.mlp.experts.up.weight", range(2 * WIDTH + 5, 6 * WIDTH)
    for folder in folders:
        whole = dict(ModelFolder(folder, LanguageModel).tensors())[name]
        read.clear()
        (found,) = ModelFolder(folder, LanguageModel).tensors({name: rows})
        assert found[0] == name
        assert torch.equal(found[1], whole[rows.start : rows.stop])
        assert {(first, end) for _, first, end, _ in read} == {(1, 2), (2, 3)}


@pytest.mark.parametrize("missing", ["_scales", "_blocks"])
def test_half_of_a_tensor_is_named(folders: tuple[Path, Path], missing: str, tmp_path: Path) -> None:
    tensors = load_file(folders[0] / WEIGHTS)
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[name + missing]
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(
        ValueError, match=rf"{WEIGHTS}: 2 tensors do not fit the config: {name}: expected \[4, 32, 32\], missing"
    ):
        ModelFolder(tmp_path, LanguageModel).check()


def test_parts_of_different_shapes_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[0] / WEIGHTS)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, 1:].contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"{name}: expected \[4, 32, 32\], found \[4, 32, 1, 16\]"):
        ModelFolder(tmp_path, LanguageModel).check()
