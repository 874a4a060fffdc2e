"""The Hugging Face layout: the same logits in transformers, in both directions; errors that name what does not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights, initial_weight
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, save_model
from tests.models import load_language_model, load_scalar_model

TOKENS = torch.randint(2, 288, (3, 11), generator=torch.Generator().manual_seed(0))


def shape(mlp: str, num_kv_heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=288, max_position_embeddings=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        intermediate_size=24, mlp=mlp, rope_theta=777.0, norm_eps=1e-3, tie_word_embeddings=tied,
    )  # fmt: skip


def saved(folder: Path, model: LanguageModel | ScalarModel, tokenizer: Tokenizer) -> Path:
    init_weights(model, 3)
    # Norms start at 1; other values show a norm that took another's place.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    save_model(folder, model.eval(), model.state_dict(), tokenizer)
    return folder


SHAPES = [
    ("swiglu", 2, True), ("swiglu", 4, False), ("swiglu", 1, False),
    ("relu2", 2, True), ("relu2", 4, False), ("relu2", 1, True),
]  # fmt: skip


@pytest.mark.parametrize(("mlp", "num_kv_heads", "tied"), SHAPES)
@torch.no_grad()
def test_transformers_computes_our_logits(
    tokenizer: Tokenizer, tmp_path: Path, mlp: str, num_kv_heads: int, tied: bool
) -> None:
    model = LanguageModel(shape(mlp, num_kv_heads, tied))
    folder = saved(tmp_path, model, tokenizer)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == {"swiglu": "LlamaForCausalLM", "relu2": "ArceeForCausalLM"}[mlp]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(model(TOKENS), theirs.eval()(TOKENS).logits, atol=1e-4, rtol=1e-4)
    again = load_language_model(folder)
    assert again.config == model.config
    assert torch.equal(again.eval()(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("mlp", "num_kv_heads", "tied"), SHAPES)
@torch.no_grad()
def test_we_compute_the_logits_of_transformers(tmp_path: Path, mlp: str, num_kv_heads: int, tied: bool) -> None:
    family = {"swiglu": "Llama", "relu2": "Arcee"}[mlp]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=288, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=num_kv_heads,
        intermediate_size=24, max_position_embeddings=32, rms_norm_eps=1e-3, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0}, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(4)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_language_model(tmp_path).eval()
    assert ours.config == shape(mlp, num_kv_heads, tied)
    assert (ours.head.weight is ours.decoder.embedding.weight) == tied
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
@torch.no_grad()
def test_a_scalar_model_is_a_sequence_classifier_and_a_bias(tokenizer: Tokenizer, tmp_path: Path, mlp: str) -> None:
    model = ScalarModel(shape(mlp, 2, True))
    model.bias.fill_(-1.75)
    folder = saved(tmp_path, model, tokenizer)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    lengths = [11, 4, 7]
    tokens = TOKENS.clone()
    for row, length in enumerate(lengths):
        tokens[row, length:] = tokenizer.pad_id
    scores = [float(model(tokens)[row, length - 1]) for row, length in enumerate(lengths)]
    mask = (tokens != tokenizer.pad_id).long()
    classified = theirs(tokens, attention_mask=mask).logits
    assert classified.shape == (3, 1)
    assert [float(x) - 1.75 for x in classified[:, 0]] == pytest.approx(scores, abs=1e-4)
    assert json.loads((folder / "config.json").read_text())["score_bias"] == -1.75
    again = load_scalar_model(folder).eval()
    assert torch.equal(again(tokens), model(tokens))


@torch.no_grad()
def test_several_scores_are_a_sequence_classifiers_labels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = ScalarModel(shape("swiglu", 2, True), labels=("helpful", "harmless"))
    model.bias.copy_(torch.tensor([-1.75, 0.5]))
    folder = saved(tmp_path, model, tokenizer)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert theirs.config.num_labels == 2
    assert theirs.config.id2label == {0: "helpful", 1: "harmless"}
    assert theirs.config.label2id == {"helpful": 0, "harmless": 1}
    tokens = TOKENS.where(tokenizer.pad_id != TOKENS, 5)
    torch.testing.assert_close(theirs(tokens).logits + model.bias, model(tokens)[:, -1], atol=1e-4, rtol=1e-4)
    assert json.loads((folder / "config.json").read_text())["score_bias"] == [-1.75, 0.5]
    again = load_scalar_model(folder).eval()
    assert again.labels == model.labels
    assert torch.equal(again(tokens), model(tokens))


@torch.no_grad()
def test_a_classifier_of_transformers_is_read_with_its_labels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=288, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=32, pad_token_id=tokenizer.pad_id, initializer_range=0.3,
        id2label={0: "kind", 1: "true"}, label2id={"kind": 0, "true": 1},
    )  # fmt: skip
    torch.manual_seed(4)
    theirs = transformers.LlamaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_scalar_model(tmp_path).eval()
    assert ours.labels == ("kind", "true")
    tokens = TOKENS.where(tokenizer.pad_id != TOKENS, 5)
    torch.testing.assert_close(ours(tokens)[:, -1], theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_labels": 3}, r"config.json: id2label is {.*} and num_labels 3; a name of its own for each .* 0 to 2"),
        ({"id2label": {"0": "kind", "1": "kind"}}, r"id2label is .* and num_labels 2; a name of its own"),
        ({"id2label": {"1": "kind", "2": "true"}}, r"id2label is .* and num_labels 2; a name of its own"),
        ({"score_bias": 0.5}, r"config.json: score_bias is 0.5; a list of 2 numbers was expected"),
        ({"score_bias": [0.5, 1, 2]}, r"score_bias is \[0.5, 1, 2\]; a list of 2 numbers was expected"),
        ({"num_labels": 1, "id2label": {"0": "a"}}, r"score.weight: expected \[1, 16\], found \[2, 16\]"),
    ],
)
def test_labels_that_do_not_fit_are_named(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = saved(tmp_path, ScalarModel(shape("swiglu", 2, True), labels=("helpful", "harmless")), tokenizer)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=words):
        load_scalar_model(folder)


@torch.no_grad()
def test_a_new_head_sits_on_the_language_models_body(model_folder: Path) -> None:
    source = WithNewHead(model_folder, LanguageModel, ScalarModel, seed=5)
    scalar, language = load(source).eval(), load_language_model(model_folder).eval()
    assert torch.equal(scalar.decoder.hidden(TOKENS, None), language.decoder.hidden(TOKENS, None))
    drawn = initial_weight("score.weight", (1, 16), language.config, torch.Generator().manual_seed(5))
    assert torch.equal(scalar.score.weight, drawn)
    assert float(scalar.bias) == 0


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return saved(tmp_path / "m", LanguageModel(shape("swiglu", 2, True)), tokenizer)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    merged = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in merged.items() if value is not ...}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; one of .*llama.*gpt2.* was expected"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; 'silu' was expected"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification.*'LlamaForCausalLM'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type is 'dynamic'; 'default' or"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "is 0.5; 1.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is None; 'mxfp4' was expected"),
        ({"hidden_size": ...}, "field 'hidden_size' is missing"),
        (
            {"num_key_value_heads": 3},
            "model.num_attention_heads over model.num_key_value_heads: 4 is not a multiple of 3",
        ),
    ],
)
def test_another_architecture_is_refused_by_name(folder: Path, fields: dict[str, Any], words: str) -> None:
    change(folder, **fields)
    with pytest.raises(ValueError, match=rf"config.json: .*{words}"):
        load_language_model(folder)


def test_a_language_model_is_no_scalar_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*LlamaForSequenceClassification"):
        load_scalar_model(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=rf"{missing}: no such file"):
        load_language_model(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 200, -1])
def test_a_file_that_was_cut_short_is_named(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors: incomplete or damaged: .*; write or download it again"):
        load_language_model(folder)


def test_tensors_that_do_not_fit_are_named_with_their_shapes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    tensors["model.norm.weight"] = torch.ones(17)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"3 tensors do not fit the config") as refusal:
        load_language_model(folder)
    words = str(refusal.value)
    assert "model.layers.1.mlp.up_proj.weight: expected [24, 16], missing" in words
    assert "model.layers.0.self_attn.q_proj.bias: found, not expected" in words
    assert "model.norm.weight: expected [16], found [17]" in words
    assert str(folder / "model.safetensors") in words


def test_weights_that_end_early_leave_the_model_that_was_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = saved(tmp_path, LanguageModel(shape("swiglu", 2, tied=False)), tokenizer)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = LanguageModel(shape("swiglu", 2, tied=False))
    weights = list(other.named_parameters())

    def lost() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:-3]
        raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="a rank was lost"):
        save_model(folder, other, lost(), tokenizer, max_file_bytes=4000)
    with pytest.raises(AssertionError, match=r"no weights of \['decoder.norm.weight', 'head.weight'\] were given"):
        save_model(folder, other, weights[:-2], tokenizer)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_model(folder, other, weights, tokenizer, max_file_bytes=4000)  # a complete one replaces it
    names = {path.name for path in folder.iterdir()}
    assert "model.safetensors" not in names
    again = load_language_model(folder)
    assert all(torch.equal(tensor, again.get_parameter(name)) for name, tensor in weights)
