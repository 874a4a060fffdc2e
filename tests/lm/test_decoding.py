"""The native decoding step against the model's own modules, in double precision and in its own."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.batch import Batch
from lm.cache import KVCache
from lm.config import ModelConfig
from lm.decoding import decoding_steps
from lm.encoder_decoder import EncoderDecoder
from lm.generation import generate
from lm.logprobs import token_logprobs
from lm.model import LanguageModel, init_weights
from lm.native.build import library
from lm.native.decoder import NativeSteps
from lm.sampling import Choice

SHAPE = {
    "vocab_size": 100, "max_position_embeddings": 64, "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped heads": {"num_attention_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "normed queries": {"qk_norm": True},
    "relu2": {"mlp": "relu2"},
    "gpt-2": {"mlp": "gelu_tanh", "norm": "layer", "positions": "learned", "attention_bias": "all", "mlp_bias": True},
    "sinusoidal": {"mlp": "relu", "attention_bias": "qkv", "positions": "sinusoidal"},
    "sliding_window": {"sliding_window": (0, 4)},
    "heads of 16": {"head_dim": 16, "num_attention_heads": 4},
    "heads of 40": {"head_dim": 40, "num_attention_heads": 4},
    "heads of 40, normed": {"head_dim": 40, "num_attention_heads": 4, "qk_norm": True},
    "heads of 34": {"head_dim": 34, "num_attention_heads": 16, "num_key_value_heads": 4},
    "heads of 64": {"head_dim": 64},
    "heads of 96": {"head_dim": 96},
    "heads of 128": {"head_dim": 128},
    "heads of 160": {"head_dim": 160, "num_key_value_heads": 1},
    "heads of 256": {"head_dim": 256},
    "embeddings": {"scale_embedding": True, "embedding_norm": True},
    "untied": {"tie_word_embeddings": False, "vocab_size": 203},
}


TYPES = [torch.float32, torch.bfloat16]


def drawn_model(dtype: torch.dtype = TYPES[-1], **fields: Any) -> LanguageModel:
    """With norms and biases far from their initial values."""
    model = LanguageModel(ModelConfig(**{**SHAPE, **fields}))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()


needs_compiler = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ragged_prompts(count: int) -> list[list[int]]:
    return [[(7 * row + 3 * place) % 90 for place in range(1 + (3 * row) % 7)] for row in range(count)]


def started(model: LanguageModel, num_rows: int) -> Batch:
    return Batch.start(model, list(range(num_rows)), ragged_prompts(num_rows), 12)


@needs_compiler
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("num_rows", [1, pytest.param(5, marks=pytest.mark.long), 40])
@pytest.mark.parametrize("dtype", TYPES)
def test_steps_are_as_close_to_double_precision_as_the_modules_are(
    fields: dict[str, Any], num_rows: int, dtype: torch.dtype
) -> None:
    model = drawn_model(dtype, **fields)
    floor, close = (1e-6, 1e-5) if dtype == torch.float32 else (1e-3, 0.02)
    exact = copy.deepcopy(model).double()
    native, eager, expected = started(model, num_rows), started(model, num_rows), started(exact, num_rows)
    steps, generator = NativeSteps(model), torch.Generator().manual_seed(2)
    squares: list[list[Tensor]] = []  # of errors in each step: native, eager
    for _ in range(10):
        tokens_B = torch.randint(0, 90, (num_rows,), generator=generator)
        native.feed(tokens_B, steps)
        eager.feed(tokens_B)
        expected.feed(tokens_B)
        squares.append([(batch.logits_BV.double() - expected.logits_BV).square().mean() for batch in (native, eager)])
    errors = torch.tensor(squares).mean(dim=0).sqrt().tolist()
    assert errors[0] < 1.5 * errors[1] + floor, errors
    for ours, theirs in ((native.cache.keys, eager.cache.keys), (native.cache.values, eager.cache.values)):
        torch.testing.assert_close(ours[0], theirs[0], rtol=close, atol=close)


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
def test_steps_do_not_depend_on_threads_or_on_other_rows(dtype: torch.dtype) -> None:
    model, before, logits = drawn_model(dtype, num_attention_heads=4), torch.get_num_threads(), []
    steps, generator = NativeSteps(model), torch.Generator().manual_seed(2)
    past = torch.randn(2, 3, 40, 2, 12, 32, generator=generator).to(dtype)  # keys and values that were read before
    try:
        for threads, num_rows in ((1, 40), (2, 40), (3, 40), (2, 3)):
            torch.set_num_threads(threads)
            cache = KVCache(*(part[:, :num_rows].contiguous() for part in past))
            for step in range(5):
                columns_B = torch.arange(num_rows) % 4 + step
                found = steps.next_logits(torch.full((num_rows,), 7 * step), columns_B, cache, 12)
            logits.append(found)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[0][:3], logits[3])


@needs_compiler
def test_generation_by_native_steps_reports_the_model_s_own_logprobs() -> None:
    """Rows end at different lengths and leave, and others enter."""
    model = drawn_model(mlp="relu2", num_attention_heads=4)
    prompts = ragged_prompts(23)
    sampled = generate(
        model, prompts, max_new_tokens=20, end_ids=[5], choice=Choice(), seeds=range(23), max_rows=6, steps="native"
    )
    lengths = {len(response) for response in sampled.responses}
    assert len(lengths) > 3
    assert any(sampled.finished)
    for prompt, response, logprobs in zip(prompts, sampled.responses, sampled.logprobs, strict=True):
        logits = model(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
        expected = token_logprobs(logits, torch.tensor(response))
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0.02, atol=0.06)


@needs_compiler
def test_samples_are_those_of_eager_steps_but_for_rounding() -> None:
    model, prompts = drawn_model(), ragged_prompts(64)
    native, eager = (
        generate(model, prompts, max_new_tokens=2, end_ids=(), choice=Choice(), seeds=range(64), steps=steps).responses
        for steps in ("native", "eager")
    )
    assert sum(a == b for a, b in zip(native, eager, strict=True)) >= 52


@needs_compiler
def test_auto_takes_native_steps_where_they_compute_the_same() -> None:
    assert isinstance(decoding_steps(drawn_model(), "auto"), NativeSteps)
    assert decoding_steps(drawn_model(), "eager") is None
    for other in (drawn_model(norm_place="post"), drawn_model(mlp="gelu"), drawn_model().double()):
        assert decoding_steps(other, "auto") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert decoding_steps(drawn_model(), "auto") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 288}, "an even head_dim of at most 256"),
        ({"head_dim": 24}, "widths that are multiples of 32"),
        ({"intermediate_size": 100}, "widths that are multiples of 32"),
        ({"norm_place": "post"}, 'norm_place "pre"'),
        ({"mlp": "gelu"}, "mlp of .'swiglu', 'relu2', 'gelu_tanh', 'relu'."),
    ],
)
def test_asked_for_in_vain_native_steps_say_what_they_need(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoding_steps(drawn_model(**fields), "native")


def test_native_steps_need_a_type_that_they_multiply_and_a_decoder() -> None:
    with pytest.raises(ValueError, match="weights in fp32 or bf16"):
        decoding_steps(drawn_model().double(), "native")
    sequence = EncoderDecoder(ModelConfig(**SHAPE, kind="encoder-decoder", num_encoder_layers=1))
    with pytest.raises(ValueError, match="needs a decoder"):
        decoding_steps(sequence, "native")
