"""The encoder-decoder against `transformers`' BART, both ways; its generation against naive twins; learning."""

import bisect
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.parity import shuffled
from lm.beam import beam_search
from lm.config import ModelConfig
from lm.encoder_decoder import EncoderDecoder
from lm.generation import generate
from lm.model import initialise
from lm.sampling import Choice
from lm.tokenizer import Tokenizer
from lm.weights import load_model, save_model

EXACT = {"atol": 1e-4, "rtol": 1e-4}
START, END = 2, 3


def config(**changes: Any) -> ModelConfig:
    """Vaswani et al.: sinusoids, norms behind, ReLU, embeddings times the root of the width."""
    values: dict[str, Any] = {
        "kind": "encoder-decoder", "vocab_size": 12, "context_tokens": 24, "width": 16, "num_layers": 2,
        "num_encoder_layers": 3, "num_heads": 4, "num_kv_heads": 4, "mlp_width": 24, "mlp": "relu", "mlp_bias": True,
        "attention_bias": "all", "positions": "sinusoidal", "norm": "layer", "norm_place": "post",
        "embedding_scale": True,
    }  # fmt: skip
    return ModelConfig.model_validate({**values, **changes})


BART: dict[str, Any] = {
    "vocab_size": 288, "width": 20, "num_heads": 5, "num_kv_heads": 5, "mlp": "gelu", "mlp_width": 28,
    "positions": "learned", "embedding_norm": True, "embedding_scale": False,
}  # fmt: skip


def their_config(**changes: Any) -> Any:
    shape = {
        "vocab_size": 288, "d_model": 20, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 5,
        "decoder_attention_heads": 5, "encoder_ffn_dim": 28, "decoder_ffn_dim": 28, "max_position_embeddings": 24,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    }  # fmt: skip
    return transformers.BartConfig(**{**shape, **changes})


SOURCES = torch.randint(5, 288, (3, 11), generator=torch.Generator().manual_seed(0))
SEGMENTS = torch.tensor([[1] * length + [0] * (11 - length) for length in (11, 4, 8)])
TARGETS = torch.randint(5, 288, (3, 9), generator=torch.Generator().manual_seed(1))


def their_logits(model: Any) -> Tensor:
    logits: Tensor = model(SOURCES, attention_mask=(SEGMENTS > 0).long(), decoder_input_ids=TARGETS).logits
    return logits


@pytest.mark.parametrize("scale", [False, True])
@torch.no_grad()
def test_we_compute_the_logits_of_transformers(tmp_path: Path, scale: bool) -> None:
    theirs = shuffled(transformers.BartForConditionalGeneration(their_config(scale_embedding=scale)))
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, EncoderDecoder).eval()
    assert ours.config == config(**{**BART, "embedding_scale": scale})
    assert ours.head.weight is ours.encoder.embedding.weight is ours.decoder.embedding.weight
    expected = their_logits(theirs)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(ours(SOURCES, TARGETS, SEGMENTS), expected, **EXACT)


@torch.no_grad()
def test_transformers_computes_our_logits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ours = shuffled(EncoderDecoder(config(**BART)))
    save_model(tmp_path, ours, ours.state_dict(), tokenizer)
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "BartForConditionalGeneration"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(ours(SOURCES, TARGETS, SEGMENTS), their_logits(theirs.eval()), **EXACT)


SHAPES = {
    "vaswani": config(),
    "bart": config(**{**BART, "vocab_size": 12}),
    "pre-norm, rotary, grouped": config(
        positions="rotary", norm_place="pre", norm="rms", num_kv_heads=2, tie_embeddings=False, attention_bias="none"
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    model = EncoderDecoder(SHAPES[request.param])
    initialise(model, 4)
    return model.eval()


@torch.no_grad()
def test_what_is_written_comes_back(model: EncoderDecoder, tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    again = load_model(tmp_path, EncoderDecoder).eval()
    assert again.config == model.config
    assert torch.equal(again(TEXTS, WRITTEN), model(TEXTS, WRITTEN))


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


@torch.no_grad()
def naive(model: EncoderDecoder, source: list[int], num_new: int, choice: Choice, seed: int) -> list[int]:
    """One sequence, everything computed again for every token."""
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
        model, [[START]] * 5, max_new_tokens=12, end_id=END, choice=choice, seeds=seeds, max_rows=max_rows, sources=READ
    )
    expected = [naive(model, source, 12, choice, seed) for source, seed in zip(READ, seeds, strict=True)]
    assert found.responses == expected


@torch.no_grad()
def test_beam_search_reads_the_source(model: EncoderDecoder) -> None:
    for source in READ[:3]:
        found = beam_search(model, [START], num_beams=3, max_new_tokens=5, end_id=END, source=source)
        for hypothesis in found:
            target = torch.tensor([[START, *hypothesis.response]])
            logprobs = torch.log_softmax(model(torch.tensor([source]), target[:, :-1])[0].double(), dim=-1)
            expected = sum(float(logprobs[i, token]) for i, token in enumerate(hypothesis.response))
            assert hypothesis.logprob == pytest.approx(expected, abs=1e-4)


def test_a_source_belongs_to_an_encoder_decoder_alone(model: EncoderDecoder, llama: Any) -> None:
    common: dict[str, Any] = {"max_new_tokens": 2, "end_id": END, "choice": Choice(), "seeds": [0]}
    for wrong, sources in ((model, None), (llama, [[5]]), (model, [[5], [6]])):
        with pytest.raises(ValueError, match="an encoder-decoder needs a source for every prompt"):
            generate(wrong, [[START]], sources=sources, **common)
    for wrong, source in ((model, None), (llama, [5])):
        with pytest.raises(ValueError, match="an encoder-decoder needs a source for every prompt"):
            beam_search(wrong, [START], num_beams=2, max_new_tokens=2, end_id=END, source=source)


@pytest.mark.parametrize("length", [0, 25])
def test_a_source_that_is_empty_or_does_not_fit_is_refused(model: EncoderDecoder, length: int) -> None:
    with pytest.raises(ValueError, match=rf"source 1 has {length} tokens; 1 to 24 were expected"):
        generate(
            model, [[START]] * 2, max_new_tokens=2, end_id=END, choice=Choice(), seeds=[0, 1],
            sources=[[5], [6] * length],
        )  # fmt: skip
    with pytest.raises(ValueError, match=rf"source 0 has {length} tokens; 1 to 24 were expected"):
        beam_search(model, [START], num_beams=2, max_new_tokens=2, end_id=END, source=[6] * length)


def test_it_learns_to_turn_a_sequence_around() -> None:
    """Teacher forcing on reversal, which cannot be done without looking at the source."""
    torch.manual_seed(0)
    model = EncoderDecoder(config(num_layers=1, num_encoder_layers=1, width=32, mlp_width=64))
    initialise(model, 1)
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
        model.eval(), [[START]] * 50, max_new_tokens=6, end_id=END, choice=Choice(0), seeds=[0] * 50, sources=sources
    )
    right = [response == [*reversed(source), END] for response, source in zip(found.responses, sources, strict=True)]
    assert sum(right) >= 48
