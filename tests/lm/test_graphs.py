"""Steps of fixed shape against eager ones, token by token, recorded by a stand-in that sees no more than a CUDA
graph does."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm import graphs
from lm.batch import Batch
from lm.config import ModelConfig
from lm.encoder_decoder import EncoderDecoder
from lm.generation import Generated, generate
from lm.graphs import FixedSteps, Step, StepKind, fixed_steps, rounded_up, rows_in
from lm.model import LanguageModel, init_weights
from lm.native import operators
from lm.sampling import Choice

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
    step()
    tape = Tape()
    with tape:
        step()
    return tape.replay, pool


@pytest.fixture(params=["called again", "taped"])
def _recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "taped":
        monkeypatch.setattr(graphs, "record", taped)
        monkeypatch.setattr(operators, "library", lambda: None)  # a tape sees only PyTorch's operations


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def batches(model: LanguageModel) -> tuple[Batch, Batch]:
    return tuple(Batch.start(model, [0, 1, 2, 3], PROMPTS, 12) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("columns", [1, 4, 64])
def test_fixed_steps_give_what_eager_ones_do(
    decoder: LanguageModel, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "COLUMNS", columns)
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
    monkeypatch.setattr(graphs, "ROWS", rows)
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
    monkeypatch.setattr(graphs, "COLUMNS", 8)
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
        patch.setattr(graphs, "rows_that_fit", lambda *_: 2)
        assert steps.cache_for(6, 22).num_slots == 2
        assert steps.cache_for(6, 22).num_slots == 2
    assert len(generate(model, PROMPTS, seeds=range(4), steps=steps, **options).responses) == 4


def sample(model: LanguageModel, steps: StepKind, max_rows: int) -> Generated:
    return generate(
        model, PROMPTS * 3, max_new_tokens=14, end_ids=[3], choice=Choice(), seeds=range(12), max_rows=max_rows,
        steps=steps,
    )  # fmt: skip


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("max_rows", [*(pytest.param(rows, marks=pytest.mark.long) for rows in (1, 128)), 5])
def test_generation_in_fixed_steps_gives_the_same_samples(
    decoder: LanguageModel, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "COLUMNS", 8)
    eager, fixed = (sample(decoder, kind, max_rows) for kind in ("eager", "fixed"))
    assert fixed.responses == eager.responses
    assert fixed.finished == eager.finished
    for found, expected in zip(fixed.logprobs, eager.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert len({len(response) for response in fixed.responses}) > 2  # rows have left at different steps


def test_a_replay_reads_the_recorded_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python value that a step depends on would stay as it was when recorded; the tape would show that."""
    monkeypatch.setattr(graphs, "record", taped)
    position, buffer, result = [1], torch.zeros(4), torch.zeros(4)

    def deaf() -> None:
        result.copy_(buffer + position[0])

    replay, _ = graphs.record(deaf, torch.device("cpu"), None)
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
    monkeypatch.setattr(graphs, "_is_on_gpu", on_gpu)
    assert fixed_steps(llama, "auto") is not None
    assert fixed_steps(sequence, "auto") is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fixed_steps(llama, "auto") is None
