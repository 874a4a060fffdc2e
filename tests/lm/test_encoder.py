"""BERT's heads against `transformers`, both ways; padding, packing and span search by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity import shuffled
from lm.config import ModelConfig
from lm.encoder import MaskedLanguageModel, SequenceClassifier, SpanPredictor, TokenClassifier, masked_tokens_loss
from lm.model import LanguageModel, initialise
from lm.tokenizer import Tokenizer
from lm.weights import load_model, save_model

EXACT = {"atol": 1e-4, "rtol": 1e-4}
T = 13
TOKENS = torch.randint(5, 288, (3, T), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.tensor([[1] * length + [0] * (T - length) for length in (T, 6, 9)])
TYPES = torch.tensor([[0] * 4 + [1] * (T - 4)] * 3)

Heads = type[MaskedLanguageModel] | type[SequenceClassifier] | type[TokenClassifier] | type[SpanPredictor]
CASES: list[tuple[str, Heads, int]] = [
    ("BertForMaskedLM", MaskedLanguageModel, 0),
    ("BertForSequenceClassification", SequenceClassifier, 3),
    ("BertForSequenceClassification", SequenceClassifier, 1),
    ("BertForTokenClassification", TokenClassifier, 4),
    ("BertForQuestionAnswering", SpanPredictor, 2),
]


def their_config(num_labels: int, **changes: Any) -> Any:
    shape = {
        "vocab_size": 288, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 28,
        "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-3, "pad_token_id": 0,
    }  # fmt: skip
    labels = {"num_labels": num_labels} if num_labels else {}
    return transformers.BertConfig(**{**shape, **labels, **changes})


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "kind": "encoder", "vocab_size": 288, "context_tokens": 16, "width": 20, "num_layers": 2, "num_heads": 5,
        "num_kv_heads": 5, "mlp_width": 28, "mlp": "gelu", "mlp_bias": True, "attention_bias": "all",
        "positions": "learned", "token_types": 2, "embedding_norm": True, "norm": "layer", "norm_place": "post",
        "norm_eps": 1e-3,
    }  # fmt: skip
    return ModelConfig.model_validate({**values, **changes})


def their_output(model: Any, tokens: Tensor = TOKENS) -> tuple[Tensor, ...]:
    found = model(tokens, attention_mask=(SEGMENTS > 0).long(), token_type_ids=TYPES)
    return (found.start_logits, found.end_logits) if "start_logits" in found else (found.logits,)


def our_output(model: Any) -> tuple[Tensor, ...]:
    found = model(TOKENS, SEGMENTS, token_types_BT=TYPES)
    return found if isinstance(found, tuple) else (found,)


def at_tokens(output: Tensor) -> Tensor:
    """What belongs to real tokens: at padding the two libraries differ, and nothing reads it."""
    return output[SEGMENTS > 0] if output.shape[1:2] == (T,) else output


@pytest.mark.parametrize(("name", "head", "num_labels"), CASES)
@torch.no_grad()
def test_we_compute_the_logits_of_transformers(tmp_path: Path, name: str, head: Heads, num_labels: int) -> None:
    theirs = shuffled(getattr(transformers, name)(their_config(num_labels)))
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, head).eval()
    assert ours.config == config()
    for found, expected in zip(our_output(ours), their_output(theirs), strict=True):
        assert float(expected.abs().max()) > 0.05
        torch.testing.assert_close(at_tokens(found), at_tokens(expected), **EXACT)


@pytest.mark.parametrize(("name", "head", "num_labels"), CASES)
@torch.no_grad()
def test_transformers_computes_our_logits(
    tmp_path: Path, tokenizer: Tokenizer, name: str, head: Heads, num_labels: int
) -> None:
    labels = (num_labels,) if head in (SequenceClassifier, TokenClassifier) else ()
    ours = shuffled(head(config(mlp="gelu_tanh"), *labels))
    save_model(tmp_path, ours, ours.state_dict(), tokenizer)
    theirs, report = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for found, expected in zip(our_output(ours), their_output(theirs.eval()), strict=True):
        torch.testing.assert_close(at_tokens(found), at_tokens(expected), **EXACT)
    again = load_model(tmp_path, head).eval()
    for found, expected in zip(our_output(again), our_output(ours), strict=True):
        assert torch.equal(found, expected)


@torch.no_grad()
def test_the_published_bert_names_its_norms_as_tensorflow_did(tmp_path: Path) -> None:
    theirs = shuffled(transformers.BertForMaskedLM(their_config(0)))
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    renamed |= {"cls.seq_relationship.weight": torch.zeros(2, 20), "bert.pooler.dense.bias": torch.zeros(20)}
    save_file(renamed, tmp_path / "model.safetensors")
    ours = load_model(tmp_path, MaskedLanguageModel).eval()
    torch.testing.assert_close(at_tokens(our_output(ours)[0]), at_tokens(their_output(theirs)[0]), **EXACT)


@torch.no_grad()
def test_tokens_see_both_ways_and_never_padding_or_another_sequence() -> None:
    model = MaskedLanguageModel(config())
    initialise(model, 1)
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
    initialise(model, 1)
    hidden = model.transform(model.encoder.hidden(TOKENS, SEGMENTS))
    expected = model.head(model.transform_norm(hidden * torch.sigmoid(hidden)))
    torch.testing.assert_close(model(TOKENS, SEGMENTS), expected, atol=1e-5, rtol=1e-4)


def test_masked_words_are_learned() -> None:
    """Two sentences that differ in one word, each told apart by another: the encoder fills the gap from behind."""
    torch.manual_seed(0)
    model = MaskedLanguageModel(config(width=32, num_heads=4, num_kv_heads=4, mlp_width=64))
    initialise(model, 1)
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
    transformers.BertForMaskedLM(their_config(0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertForMaskedLM.*BertForTokenClassification.* was expected"):
        load_model(tmp_path, TokenClassifier)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "is_decoder": True}))
    with pytest.raises(ValueError, match=r"config.json: is_decoder is True; False was expected"):
        load_model(tmp_path, MaskedLanguageModel)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_encoder_layers": 2}, "num_encoder_layers is 2, but model.kind is 'encoder'"),
        ({"kind": "encoder-decoder", "token_types": 0}, "num_encoder_layers is 0, but model.kind is 'encoder-decoder'"),
        ({"kind": "decoder"}, "token_types is 2, but model.kind is 'decoder'"),
        ({"windows": (4,)}, "bands are a decoder's"),
    ],
)
def test_shapes_that_contradict_their_kind_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**change)
