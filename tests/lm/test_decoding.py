"""The native decoding step against the model's own modules, in double precision and in its own.

Steps of fixed shape against eager ones, token by token, recorded by a stand-in that sees no more than a CUDA graph
does.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm import decoding
from lm.cache import KVCache
from lm.config import ModelConfig
from lm.decoding import FixedSteps, Step, StepKind, decoding_steps, fixed_steps, rounded_up, rows_in
from lm.encoder import EncoderDecoder
from lm.generation import Batch, Generated, generate
from lm.model import LanguageModel, init_weights
from lm.native import operators
from lm.native.decoder import NativeSteps
from lm.native.kernels import library
from lm.sampling import Choice, token_logprobs

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
@pytest.mark.parametrize("num_rows", [1, pytest.param(5, marks=pytest.mark.nightly), 40])
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
        ({"norm_place": "sandwich"}, 'norm_place "pre"'),
        ({"qk_norm": True, "qk_norm_over": "projection"}, 'qk_norm_over "head"'),
        ({"query_pre_attn_scalar": 7}, "query_pre_attn_scalar 0"),
        ({"rope_local_base_freq": 9, "sliding_window": (4, 0)}, "rope_local_base_freq 0.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 1.0"),
        ({"rope_interleave": True}, "rope_interleave false"),
        (
            {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16},
            "kv_lora_rank 0",
        ),
        ({"layers_without_positions": (1,)}, r"layers_without_positions \(\)|layers_without_positions \[\]"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 0.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 0.0"),
        ({"residual_multiplier": 0.5}, "residual_multiplier 1.0"),
        ({"logits_scaling": 2.0}, "logits_scaling 1.0"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": 8,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            "llama_4_scaling_beta 0.0",
        ),
        ({"mlp": "geglu"}, "mlp of"),
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


PROMPTS = [[5], [1, 2, 4, 6, 7], [9, 9], [0, 11, 10]]
FED = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3], [2, 3, 8, 4], [6, 2, 6, 4], [3, 3, 8, 3]]


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: records the kernels with the tensors that they read and wrote, and nothing of
    Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for function, args, kwargs, before in self.calls:
            again = function(*args, **kwargs)
            for kept, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():  # otherwise a view, or in place
                    kept.copy_(new)


def taped(step: Step, _device: torch.device, pool: Any) -> tuple[Step, Any]:
    tape = Tape()
    with tape:  # unlike a capture, this also computes, and a step moves the states of linear layers on
        step()
    return tape.replay, pool


@pytest.fixture(params=["called again", "taped"])
def _recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "taped":
        monkeypatch.setattr(decoding, "record", taped)
        monkeypatch.setattr(operators, "library", lambda: None)  # a tape sees only PyTorch's operations


def batches(model: LanguageModel) -> tuple[Batch, Batch]:
    return tuple(Batch.start(model, [0, 1, 2, 3], PROMPTS, 12) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("columns", [1, 4, 64])
def test_fixed_steps_give_what_eager_ones_do(
    decoder: LanguageModel, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "COLUMNS", columns)
    eager, fixed = batches(decoder)
    # Nothing may depend on memory that was never written.
    for slot, length in enumerate(fixed.lengths):
        fixed.cache.keys[:, slot, :, length:] = 1e6
        fixed.cache.values[:, slot, :, length:] = 1e6
    steps = FixedSteps(decoder)
    for tokens in FED:
        eager.feed(torch.tensor(tokens))
        fixed.feed(torch.tensor(tokens), steps)
        torch.testing.assert_close(fixed.logits_BV, eager.logits_BV, atol=1e-5, rtol=1e-5)
        assert fixed.lengths == eager.lengths
    for slot, length in enumerate(fixed.lengths):
        torch.testing.assert_close(fixed.cache.keys[:, slot, :, :length], eager.cache.keys[:, slot, :, :length])
    # Up to 6 to 12 columns were read: 6, 7, 8, 10 and 12 after rounding; 8 and 12; or always all 17.
    assert steps.num_recordings == {1: 5, 4: 2, 64: 1}[columns]


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize(("rows", "num_recordings"), [(1, 3), (8, 1)])
def test_rows_that_leave_and_enter_are_not_recorded_again(
    llama: LanguageModel, rows: int, num_recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "ROWS", rows)
    eager, fixed = batches(llama)
    steps = FixedSteps(llama)

    def feed(tokens: list[int]) -> None:
        eager.feed(torch.tensor(tokens))
        fixed.feed(torch.tensor(tokens), steps)
        torch.testing.assert_close(fixed.logits_BV, eager.logits_BV, atol=1e-5, rtol=1e-5)

    for _ in range(2):
        feed([3, 1, 4, 1])
        for batch in (eager, fixed):
            batch.keep([3, 1])
        feed([5, 9])
        feed([2, 6])
        for batch in (eager, fixed):
            batch.admit([7], [[8, 8, 2]])
        feed([5, 3, 5])
        feed([8, 9, 7])
        for batch in (eager, fixed):
            batch.admit([8], [[1]])
    assert steps.num_recordings == num_recordings  # with 4, 2 and 3 rows, or always 4, the number of slots


def test_sizes_are_few_and_at_most_a_quarter_more_than_needed() -> None:
    sizes = [rounded_up(count, 64, 4096) for count in range(1, 4097)]
    assert all(count <= size <= max(count + 63, 1.25 * count) for count, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [
        64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096
    ]  # fmt: skip
    assert rounded_up(5, 8, 6) == 6


def test_a_gpu_runs_as_many_rows_as_its_memory_holds() -> None:
    """Llama-3-8B: 128 KiB per token in bf16, so 1.125 GiB for 9,216; logits take 2.5 MB per row, prompts 1.5 GiB."""
    shape = ModelConfig(
        vocab_size=128256, max_position_embeddings=16384, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    )  # fmt: skip
    rows = [rows_in(free << 30, shape, 2, 128, 9216) for free in (200, 120, 60, 12, 1)]
    assert rows == [128, 88, 40, 8, 1]
    assert rows_in(120 << 30, shape, 2, 128, 2048) == 128


@pytest.mark.usefixtures("_recorder")
def test_steps_that_are_kept_are_not_recorded_again(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are not reused in the next call of `generate`, nor for other weights at the same address."""
    monkeypatch.setattr(decoding, "COLUMNS", 8)
    model = copy.deepcopy(llama)
    steps = FixedSteps(model)
    options: dict[str, Any] = {"max_new_tokens": 14, "end_ids": [3], "choice": Choice(), "max_rows": 5}
    recorded = []
    for seed in range(3):
        model.head.weight.mul_(1.1)
        seeds = range(12 * seed, 12 * seed + 12)
        found = generate(model, PROMPTS * 3, seeds=seeds, steps=steps, **options)
        assert found.responses == generate(model, PROMPTS * 3, seeds=seeds, steps="eager", **options).responses
        recorded.append(steps.num_recordings)
    assert recorded[2] == recorded[1]
    cache = steps.cache_for(5, 8)
    assert steps.cache_for(4, 22) is cache
    assert steps.cache_for(6, 22) is not cache
    steps.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "rows_that_fit", lambda *_: 2)
        assert steps.cache_for(6, 22).num_slots == 2
        assert steps.cache_for(6, 22).num_slots == 2
    assert len(generate(model, PROMPTS, seeds=range(4), steps=steps, **options).responses) == 4


def sample(model: LanguageModel, steps: StepKind, max_rows: int) -> Generated:
    return generate(
        model, PROMPTS * 3, max_new_tokens=14, end_ids=[3], choice=Choice(), seeds=range(12), max_rows=max_rows,
        steps=steps,
    )  # fmt: skip


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("max_rows", [*(pytest.param(rows, marks=pytest.mark.nightly) for rows in (1, 128)), 5])
def test_generation_in_fixed_steps_gives_the_same_samples(
    decoder: LanguageModel, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "COLUMNS", 8)
    eager, fixed = (sample(decoder, kind, max_rows) for kind in ("eager", "fixed"))
    assert fixed.responses == eager.responses
    assert fixed.finished == eager.finished
    for found, expected in zip(fixed.logprobs, eager.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert len({len(response) for response in fixed.responses}) > 2  # rows have left at different steps


def test_a_replay_reads_the_recorded_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python value that a step depends on would stay as it was when recorded; the tape would show that."""
    monkeypatch.setattr(decoding, "record", taped)
    position, buffer, result = [1], torch.zeros(4), torch.zeros(4)

    def deaf() -> None:
        result.copy_(buffer + position[0])

    replay, _ = decoding.record(deaf, torch.device("cpu"), None)
    assert result.tolist() == [1] * 4
    buffer.fill_(10)
    position[0] = 5
    replay()
    assert result.tolist() == [11] * 4


def test_steps_are_chosen_by_device_and_kind_of_model(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelConfig(
        kind="encoder-decoder", vocab_size=12, max_position_embeddings=16, hidden_size=16, num_hidden_layers=1,
        num_encoder_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
    )  # fmt: skip
    sequence = EncoderDecoder(shape)
    init_weights(sequence, 0)
    assert fixed_steps(llama, "auto") is None
    assert fixed_steps(llama, "eager") is None
    assert fixed_steps(llama, "fixed") is not None
    assert fixed_steps(sequence, "auto") is None
    with pytest.raises(ValueError, match='"auto" or "eager" was expected'):
        fixed_steps(sequence, "fixed")
    on_gpu: Callable[..., bool] = lambda *_: True  # noqa: E731
    monkeypatch.setattr(decoding, "_is_on_gpu", on_gpu)
    assert fixed_steps(llama, "auto") is not None
    assert fixed_steps(sequence, "auto") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fixed_steps(llama, "auto") is None
