"""BERT's weight names; padding, packing, masked words and span search by hand. Logits are in `test_families.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity import CASES, our_logits, their_logits
from lm.config import ModelConfig
from lm.encoder import MaskedLanguageModel, SpanPredictor, TokenClassifier, masked_tokens_loss
from lm.families import family_of
from lm.model import LanguageModel, init_weights
from lm.weights import load_model

T = 13
TOKENS = torch.randint(5, 288, (3, T), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.tensor([[1] * length + [0] * (T - length) for length in (T, 6, 9)])


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "kind": "encoder", "vocab_size": 288, "max_position_embeddings": 16, "hidden_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 5,
        "num_key_value_heads": 5, "intermediate_size": 28, "mlp": "gelu", "mlp_bias": True, "attention_bias": "all",
        "positions": "learned", "type_vocab_size": 2, "embedding_norm": True, "norm": "layer", "norm_place": "post",
        "norm_eps": 1e-3,
    }  # fmt: skip
    return ModelConfig.model_validate({**values, **changes})


@torch.no_grad()
def test_the_published_bert_names_its_norms_as_tensorflow_did(tmp_path: Path) -> None:
    theirs = CASES["bert, masked words"].random_model()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    renamed |= {"cls.seq_relationship.weight": torch.zeros(2, 21), "bert.pooler.dense.bias": torch.zeros(21)}
    save_file(renamed, tmp_path / "model.safetensors")
    ours = load_model(tmp_path, MaskedLanguageModel).eval()
    torch.testing.assert_close(our_logits(ours), their_logits(theirs), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_tokens_see_both_ways_and_never_padding_or_another_sequence() -> None:
    model = MaskedLanguageModel(config())
    init_weights(model, 1)
    model.eval()
    alone = [model(TOKENS[row : row + 1, :length])[0] for row, length in enumerate((4, 5, 3))]
    last_changed = TOKENS[:1, :4].clone()
    last_changed[0, 3] += 1
    assert not torch.equal(model(last_changed)[0, 0], alone[0][0])
    packed = torch.cat([TOKENS[row, :length] for row, length in enumerate((4, 5, 3))] + [torch.tensor([0])])[None]
    segments = torch.tensor([[1] * 4 + [2] * 5 + [3] * 3 + [0]])
    torch.testing.assert_close(model(packed, segments)[0, :12], torch.cat(alone), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_masked_head_of_a_swiglu_encoder_uses_its_gates_activation() -> None:
    model = MaskedLanguageModel(config(mlp="swiglu"))
    init_weights(model, 1)
    hidden = model.transform(model.encoder.hidden(TOKENS, SEGMENTS))
    expected = model.head(model.transform_norm(hidden * torch.sigmoid(hidden)))
    torch.testing.assert_close(model(TOKENS, SEGMENTS), expected, atol=1e-5, rtol=1e-4)


def test_masked_words_are_learned() -> None:
    """Two sentences differ in one word and are told apart by a later one: the encoder fills the gap from its right
    context."""
    torch.manual_seed(0)
    model = MaskedLanguageModel(
        config(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
    )
    init_weights(model, 1)
    whole = torch.tensor([[10, 11, 12, 20], [10, 13, 12, 21]])
    masked = whole.clone()
    masked[:, 1] = 4
    selected = torch.zeros_like(whole, dtype=torch.bool)
    selected[:, 1] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = masked_tokens_loss(model(masked, None, selected), whole[selected])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 4
    assert losses[-1] < 0.2
    assert model(masked, None, selected).argmax(dim=-1).tolist() == [11, 13]


def test_the_best_span_is_in_order_allowed_and_short() -> None:
    model = SpanPredictor(config())
    first = torch.tensor([[5.0, 0.0, 4.0, 0.0, 0.0], [9.0, 1.0, 0.0, 0.0, 0.0]])
    last = torch.tensor([[0.0, 0.0, 0.0, 3.0, 6.0], [8.0, 0.0, 0.0, 2.0, 0.0]])
    allowed = torch.tensor([[True] * 5, [False, True, True, True, True]])
    assert model.best_span(first, last, allowed, max_tokens=5) == [(0, 4), (1, 3)]
    assert model.best_span(first, last, allowed, max_tokens=3) == [(2, 4), (1, 3)]
    assert model.best_span(first, last, allowed, max_tokens=1) == [(4, 4), (3, 3)]


def test_another_kind_of_shape_is_refused(tmp_path: Path, tiny_config: ModelConfig, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model.kind is 'decoder'; 'encoder' was expected"):
        MaskedLanguageModel(tiny_config)
    with pytest.raises(ValueError, match=r"model.kind is 'encoder'; 'decoder' was expected"):
        LanguageModel(config())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*a family with a model for the purpose 'masked'"):
        load_model(model_folder, MaskedLanguageModel)
    CASES["bert, masked words"].random_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*BertForTokenClassification.* was expected"):
        load_model(tmp_path, TokenClassifier)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "is_decoder": True}))
    with pytest.raises(ValueError, match=r"config.json: is_decoder is True; False was expected"):
        load_model(tmp_path, MaskedLanguageModel)


def test_an_encoder_without_token_types_is_not_written_as_bert() -> None:
    """BERT adds a token type to every token."""
    assert family_of(config(), "masked").model_type == "bert"
    assert family_of(config(type_vocab_size=0), "masked").model_type == "heed"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_encoder_layers": 2}, "num_encoder_layers is 2, but model.kind is 'encoder'"),
        (
            {"kind": "encoder-decoder", "type_vocab_size": 0},
            "num_encoder_layers is 0, but model.kind is 'encoder-decoder'",
        ),
        ({"kind": "decoder"}, "type_vocab_size is 2, but model.kind is 'decoder'"),
        ({"sliding_window": (4,)}, "bands are a decoder's"),
    ],
)
def test_shapes_that_contradict_their_kind_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**change)
