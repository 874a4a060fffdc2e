"""BERT's weight names; padding, packing, masked words and span search by hand. The encoder-decoder's generation against
naive twins, and learning. Logits of BERT and BART are in `test_families.py`.
"""

import bisect
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.models.t5.modeling_t5 import T5Attention

from benchmarks.parity import CASES, our_logits, their_logits
from lm.config import ModelConfig
from lm.encoder import (
    EncoderDecoder,
    MaskedLanguageModel,
    TokenClassifier,
    best_span,
    masked_tokens_loss,
)
from lm.families import family_of
from lm.generation import generate
from lm.model import LanguageModel, init_weights
from lm.positions import relative_buckets
from lm.sampling import Choice
from lm.search import beam_search
from lm.tokenizer import Tokenizer
from lm.weights import load_model, save_model

T = 13
TOKENS = torch.randint(5, 288, (3, T), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.tensor([[1] * length + [0] * (T - length) for length in (T, 6, 9)])


def bert(**changes: Any) -> ModelConfig:
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
    model = MaskedLanguageModel(bert())
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
    model = MaskedLanguageModel(bert(mlp="swiglu"))
    init_weights(model, 1)
    hidden = model.transform(model.encoder.hidden(TOKENS, SEGMENTS))
    expected = model.head(model.transform_norm(hidden * torch.sigmoid(hidden)))
    torch.testing.assert_close(model(TOKENS, SEGMENTS), expected, atol=1e-5, rtol=1e-4)


def test_masked_words_are_learned() -> None:
    """Two sentences differ in one word and are told apart by a later one: the encoder fills the gap from its right
    context."""
    torch.manual_seed(0)
    model = MaskedLanguageModel(
        bert(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
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
    first = torch.tensor([[5.0, 0.0, 4.0, 0.0, 0.0], [9.0, 1.0, 0.0, 0.0, 0.0]])
    last = torch.tensor([[0.0, 0.0, 0.0, 3.0, 6.0], [8.0, 0.0, 0.0, 2.0, 0.0]])
    allowed = torch.tensor([[True] * 5, [False, True, True, True, True]])
    assert best_span(first, last, allowed, max_tokens=5) == [(0, 4), (1, 3)]
    assert best_span(first, last, allowed, max_tokens=3) == [(2, 4), (1, 3)]
    assert best_span(first, last, allowed, max_tokens=1) == [(4, 4), (3, 3)]


def test_another_kind_of_shape_is_refused(tmp_path: Path, tiny_config: ModelConfig, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model.kind is 'decoder'; 'encoder' was expected"):
        MaskedLanguageModel(tiny_config)
    with pytest.raises(ValueError, match=r"model.kind is 'encoder'; 'decoder' was expected"):
        LanguageModel(bert())
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
    assert family_of(bert(), "masked").model_type == "bert"
    assert family_of(bert(type_vocab_size=0), "masked").model_type == "heed"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_encoder_layers": 2}, "num_encoder_layers is 2, but model.kind is 'encoder'"),
        (
            {"kind": "encoder-decoder", "type_vocab_size": 0},
            "num_encoder_layers is 0, but model.kind is 'encoder-decoder'",
        ),
        ({"kind": "decoder"}, "type_vocab_size is 2, but model.kind is 'decoder'"),
        ({"sliding_window": (4,)}, "not 'decoder'"),
        ({"positions": "relative"}, "positions is 'relative', but model.kind is 'encoder', not 'encoder-decoder'"),
    ],
)
def test_shapes_that_contradict_their_kind_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bert(**change)


def test_a_relative_distance_beyond_the_exact_buckets_is_expected() -> None:
    with pytest.raises(ValueError, match=r"max_distance is 16; more than half of model.* 32, was expected"):
        vaswani(positions="relative", relative_attention_max_distance=16)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (4, 3), (7, 20), (18, 10)])
@pytest.mark.parametrize("causal", [True, False])
def test_distances_have_the_buckets_of_transformers(num_buckets: int, max_distance: int, causal: bool) -> None:
    ahead = torch.arange(-300, 300)
    theirs = T5Attention._relative_position_bucket(
        ahead, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(relative_buckets(ahead, num_buckets, max_distance, causal=causal), theirs)


START, END = 2, 3


def vaswani(**changes: Any) -> ModelConfig:
    """Vaswani et al.: sinusoids, post-norm, ReLU, embeddings times the root of the hidden size."""
    values: dict[str, Any] = {
        "kind": "encoder-decoder", "vocab_size": 12, "max_position_embeddings": 24, "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_encoder_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24,
        "mlp": "relu", "mlp_bias": True,
        "attention_bias": "all", "positions": "sinusoidal", "norm": "layer", "norm_place": "post",
        "scale_embedding": True,
    }  # fmt: skip
    return ModelConfig.model_validate({**values, **changes})


BART: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 20, "num_attention_heads": 5, "num_key_value_heads": 5, "mlp": "gelu",
    "intermediate_size": 28, "positions": "learned", "embedding_norm": True, "scale_embedding": False,
}  # fmt: skip
SHAPES = {
    "vaswani": vaswani(),
    "bart": vaswani(**{**BART, "vocab_size": 12}),
    "positions in every layer": vaswani(positions_every_layer=True),
    "t5 1.1": vaswani(
        positions="relative", relative_attention_num_buckets=6, relative_attention_max_distance=9, norm_place="pre",
        norm="rms", mlp="geglu", mlp_bias=False, attention_bias="none", scale_embedding=False, head_dim=5,
        query_pre_attn_scalar=1, tie_word_embeddings=False,
    ),
    "pre-norm, rotary, grouped": vaswani(
        positions="rotary",
        norm_place="pre",
        norm="rms",
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attention_bias="none",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    model = EncoderDecoder(SHAPES[request.param])
    init_weights(model, 4)
    return model.eval()


@torch.no_grad()
def test_what_is_written_comes_back(model: EncoderDecoder, tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    again = load_model(tmp_path, EncoderDecoder).eval()
    assert again.config == model.config
    assert torch.equal(again(TEXTS, WRITTEN), model(TEXTS, WRITTEN))


def test_barts_tables_are_shared_and_its_bias_is_zero(tmp_path: Path) -> None:
    """Without tying, `transformers` gives each stack its own table, so Heed does not write such a shape as BART."""
    assert family_of(vaswani(**BART), "translate").model_type == "bart"
    assert family_of(vaswani(**BART, tie_word_embeddings=False), "translate").model_type == "heed"
    theirs = CASES["bart"].random_model()
    theirs.config.tie_word_embeddings = False
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tie_word_embeddings is False; True was expected"):
        load_model(tmp_path, EncoderDecoder)
    theirs.config.tie_word_embeddings = True
    theirs.final_logits_bias[0, 5] = 1.0
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="final_logits_bias: expected zeros, found others"):
        load_model(tmp_path, EncoderDecoder)


TEXTS = torch.tensor([[5, 7, 9, 4], [8, 8, 1, 0]])
WRITTEN = torch.tensor([[START, 6, 7], [START, 9, 9]])


@torch.no_grad()
def test_padding_of_a_source_changes_nothing_and_its_words_do(model: EncoderDecoder) -> None:
    alone = model(TEXTS[1:, :3], WRITTEN[1:])
    padded = model(TEXTS, WRITTEN, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    torch.testing.assert_close(padded[1:], alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model(TEXTS[:1], WRITTEN[:1]), model(TEXTS[1:], WRITTEN[:1]))


@torch.no_grad()
def test_a_target_token_changes_nothing_before_it(model: EncoderDecoder) -> None:
    changed = WRITTEN.clone()
    changed[:, 2] = 11
    assert torch.equal(model(TEXTS, WRITTEN)[:, :2], model(TEXTS, changed)[:, :2])


@functools.cache
@torch.no_grad()
def naive(model: EncoderDecoder, source: tuple[int, ...], num_new: int, choice: Choice, seed: int) -> list[int]:
    """One sequence; everything is recomputed for every token."""
    target = [START]
    for uniform in np.random.Generator(np.random.Philox(key=seed)).random(num_new, dtype=np.float32):
        logits = model(torch.tensor([source]), torch.tensor([target]))[0, -1].double()
        if choice.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = ((logits - logits.max()) / choice.temperature).exp().tolist()
            token = bisect.bisect_right(list(itertools.accumulate(weights)), float(uniform) * sum(weights))
        target.append(token)
        if token == END:
            break
    return target[1:]


READ = [[5], [4, 6, 7, 8, 9, 10], [9, 9], [0, 11, 10], [7, 1, 0, 2, 5, 5, 6, 4]]


@pytest.mark.parametrize("max_rows", [1, 2, 128])
@pytest.mark.parametrize("choice", [Choice(), Choice(0)], ids=str)
def test_generation_equals_its_naive_twin(model: EncoderDecoder, choice: Choice, max_rows: int) -> None:
    seeds = range(30, 35)
    found = generate(
        model,
        [[START]] * 5,
        max_new_tokens=12,
        end_ids=[END],
        choice=choice,
        seeds=seeds,
        max_rows=max_rows,
        sources=READ,
    )
    expected = [naive(model, tuple(source), 12, choice, seed) for source, seed in zip(READ, seeds, strict=True)]
    assert found.responses == expected


@pytest.mark.parametrize(("max_rows", "num_read"), [(4, None), (128, 3)])
def test_samples_of_one_source_share_its_reading(model: EncoderDecoder, max_rows: int, num_read: int | None) -> None:
    sources, seeds = [source for source in READ[1:4] for _ in range(4)], range(60, 72)
    counts: list[int] = []
    hook = model.encoder.register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    found = generate(
        model, [[START]] * 12, max_new_tokens=12, end_ids=[END], choice=Choice(), seeds=seeds, max_rows=max_rows,
        sources=sources,
    )  # fmt: skip
    hook.remove()
    expected = [naive(model, tuple(source), 12, Choice(), seed) for source, seed in zip(sources, seeds, strict=True)]
    assert found.responses == expected
    assert num_read is None or sum(counts) == num_read


def test_one_source_with_two_beginnings_is_two_sequences(model: EncoderDecoder) -> None:
    common: dict[str, Any] = {"max_new_tokens": 6, "end_ids": [END], "choice": Choice()}
    beginnings, sources = [[START], [START, 5], [START], [START, 5]], [READ[1], READ[1], READ[2], READ[1]]
    found = generate(model, beginnings, seeds=[1, 2, 3, 4], sources=sources, **common)
    for row in range(4):
        alone = generate(model, beginnings[row : row + 1], seeds=[row + 1], sources=sources[row : row + 1], **common)
        assert found.responses[row] == alone.responses[0]


@torch.no_grad()
def test_beam_search_reads_the_source(model: EncoderDecoder) -> None:
    for source in READ[:3]:
        found = beam_search(model, source, num_beams=3, max_new_tokens=5, start_id=START, end_ids=[END])
        for hypothesis in found:
            target = torch.tensor([[START, *hypothesis.response]])
            logprobs = torch.log_softmax(model(torch.tensor([source]), target[:, :-1])[0].double(), dim=-1)
            expected = sum(float(logprobs[i, token]) for i, token in enumerate(hypothesis.response))
            assert hypothesis.logprob == pytest.approx(expected, abs=1e-4)


def test_a_source_belongs_to_an_encoder_decoder_alone(model: EncoderDecoder, llama: Any) -> None:
    common: dict[str, Any] = {"max_new_tokens": 2, "end_ids": [END], "choice": Choice(), "seeds": [0]}
    for wrong, sources in ((model, None), (llama, [[5]]), (model, [[5], [6]])):
        with pytest.raises(ValueError, match="an encoder-decoder needs a source for every prompt"):
            generate(wrong, [[START]], sources=sources, **common)


@pytest.mark.parametrize("length", [0, 25])
def test_a_source_that_is_empty_or_does_not_fit_is_refused(model: EncoderDecoder, length: int) -> None:
    with pytest.raises(ValueError, match=rf"source 1 has {length} tokens; 1 to 24 were expected"):
        generate(
            model, [[START]] * 2, max_new_tokens=2, end_ids=[END], choice=Choice(), seeds=[0, 1],
            sources=[[5], [6] * length],
        )  # fmt: skip
    with pytest.raises(ValueError, match=rf"source 0 has {length} tokens; 1 to 24 were expected"):
        beam_search(model, [6] * length, num_beams=2, max_new_tokens=2, start_id=START, end_ids=[END])


@pytest.mark.long
def test_it_learns_to_turn_a_sequence_around() -> None:
    """Teacher forcing on reversal, which is impossible without reading the source."""
    torch.manual_seed(0)
    model = EncoderDecoder(vaswani(num_hidden_layers=1, num_encoder_layers=1, hidden_size=32, intermediate_size=64))
    init_weights(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(350):
        sources = torch.randint(4, 12, (64, 4), generator=generator)
        whole = torch.cat([torch.full((64, 1), START), sources.flip(1), torch.full((64, 1), END)], dim=1)
        loss = cross_entropy(model(sources, whole[:, :-1]).flatten(0, 1), whole[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sources = torch.randint(4, 12, (50, 4), generator=generator).tolist()
    found = generate(
        model.eval(), [[START]] * 50, max_new_tokens=6, end_ids=[END], choice=Choice(0), seeds=[0] * 50, sources=sources
    )
    right = [response == [*reversed(source), END] for response, source in zip(found.responses, sources, strict=True)]
    assert sum(right) >= 48
