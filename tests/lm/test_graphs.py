"""Steps of fixed shape against the eager ones, token by token, and recorded by what is as deaf as a CUDA graph."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm import graphs
from lm.cache import KVCache
from lm.config import ModelConfig
from lm.encoder_decoder import EncoderDecoder
from lm.generation import Batch, Generated, generate
from lm.graphs import FixedSteps, Step, StepKind, fixed_steps
from lm.model import LanguageModel, init_weights
from lm.native import operators
from lm.sampling import Choice

PROMPTS = [[5], [1, 2, 4, 6, 7], [9, 9], [0, 11, 10]]
FED = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3], [2, 3, 8, 4], [6, 2, 6, 4], [3, 3, 8, 3]]


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: the kernels that ran, with the tensors they read and wrote, and nothing of Python."""

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
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():  # else a view, or in place
                    kept.copy_(new)


def taped(step: Step, _device: torch.device) -> tuple[Tensor, Step]:
    result, tape = step(), Tape()
    with tape:
        buffer = step()

    def replay() -> Tensor:
        tape.replay()
        return buffer

    return result, replay


@pytest.fixture(params=["called again", "taped"])
def _recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "taped":
        monkeypatch.setattr(graphs, "record", taped)
        monkeypatch.setattr(operators, "library", lambda: None)  # a tape hears of PyTorch's operations only


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
    # Nothing may come from what was never written.
    fixed.cache.keys[:, :, :, fixed.cache.length :] = torch.nan
    fixed.cache.values[:, :, :, fixed.cache.length :] = torch.nan
    steps = FixedSteps(decoder)
    for tokens in FED:
        eager.feed(decoder, torch.tensor(tokens))
        fixed.feed(decoder, torch.tensor(tokens), steps)
        torch.testing.assert_close(fixed.logits_BV, eager.logits_BV, atol=1e-5, rtol=1e-5)
        assert fixed.cache.length == eager.cache.length
    length = fixed.cache.length
    torch.testing.assert_close(fixed.cache.keys[:, :, :, :length], eager.cache.keys[:, :, :, :length])
    # Columns 5 to 11 were written: each of its own, in lots that end before 8 and 12, or all in one.
    assert steps.num_recordings == {1: 7, 4: 2, 64: 1}[columns]


@pytest.mark.usefixtures("_recorder")
def test_rows_that_leave_and_enter_are_recorded_anew(llama: LanguageModel) -> None:
    eager, fixed = batches(llama)
    steps = FixedSteps(llama)

    def feed(tokens: list[int]) -> None:
        eager.feed(llama, torch.tensor(tokens))
        fixed.feed(llama, torch.tensor(tokens), steps)
        torch.testing.assert_close(fixed.logits_BV, eager.logits_BV, atol=1e-5, rtol=1e-5)

    feed([3, 1, 4, 1])
    for batch in (eager, fixed):
        batch.keep(torch.tensor([3, 1]))
    feed([5, 9])
    feed([2, 6])
    entering = [Batch.start(llama, [7], [[8, 8, 2]], 12) for _ in range(2)]
    eager, fixed = eager.join(entering[0], 12), fixed.join(entering[1], 12)
    feed([5, 3, 5])
    feed([8, 9, 7])
    assert steps.num_recordings == 3


def sample(model: LanguageModel, steps: StepKind, max_rows: int) -> Generated:
    return generate(
        model, PROMPTS * 3, max_new_tokens=14, end_id=3, choice=Choice(), seeds=range(12), max_rows=max_rows,
        steps=steps,
    )  # fmt: skip


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("max_rows", [1, 5, 128])
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


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("steps", ["eager", "fixed"])
def test_a_batch_that_is_over_keeps_no_cache(
    llama: LanguageModel, steps: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, so that each batch begins when the one before is over: there is room for one cache."""
    caches: list[weakref.ref[Tensor]] = []
    empty = KVCache.empty

    def watched(*arguments: Any, **named: Any) -> KVCache:
        assert not any(cache() is not None for cache in caches)
        made = empty(*arguments, **named)
        caches.append(weakref.ref(made.keys))
        return made

    monkeypatch.setattr(KVCache, "empty", watched)
    sample(llama, steps, max_rows=1)
    assert len(caches) == 12


def test_a_replay_reads_the_recorded_buffers(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of Python's that a step depended on would be that of the recording for ever: the tape shows it does."""
    monkeypatch.setattr(graphs, "record", taped)
    position, buffer = [1], torch.zeros(4)

    def deaf() -> Tensor:
        return buffer + position[0]

    result, replay = graphs.record(deaf, torch.device("cpu"))
    buffer.fill_(10)
    position[0] = 5
    assert result.tolist() == [1] * 4
    assert replay().tolist() == [11] * 4
    _, batch = batches(llama)
    steps = FixedSteps(llama)
    outputs = []
    for tokens in FED[:4]:
        batch.feed(llama, torch.tensor(tokens), steps)
        outputs.append(batch.logits_BV.data_ptr())
    assert len(set(outputs[1:])) == 1
    assert steps.num_recordings == 1


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
