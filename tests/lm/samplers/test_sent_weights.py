"""Sending weights: bytes survive pickling, chunks, and weights that do not arrive."""

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.samplers.engine import SentWeights, chunks, digests_of, held_tensors, take


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = LanguageModel(ModelConfig.model_validate({"vocab_size": 1000, "max_position_embeddings": 64, **sizes}))
    init_weights(model, 3)
    return model


def sent(weights: dict[str, Tensor], chunk_bytes: int) -> list[SentWeights]:
    return list(map(SentWeights.of, chunks(weights.items(), chunk_bytes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_bytes_of_the_weights_stay_out_of_the_pickle(model: LanguageModel, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in held_tensors(model).items()}
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(SentWeights.of(weights), protocol=5, buffer_callback=buffers.append)
    size = sum(tensor.nbytes for tensor in weights.values())
    assert size > 100_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == size
    assert len(pickled) < 200 * len(weights)
    stored = [torch.frombuffer(buffer.raw(), dtype=torch.uint8).numpy() for buffer in buffers]
    for array in stored:
        array.flags.writeable = False  # as in Ray's store
    found = pickle.loads(pickled, buffers=stored)
    assert {tensor.data_ptr() for tensor in found.weights.values()} == {array.ctypes.data for array in stored}
    assert all(tensor.dtype == dtype and torch.equal(tensor, weights[name]) for name, tensor in found.weights.items())


def test_chunks_hold_every_tensor_once_in_order_and_end_when_they_are_full(model: LanguageModel) -> None:
    held = held_tensors(model)
    assert "head.weight" not in held  # tied to the embedding
    found = list(chunks(held.items(), 50_000))
    assert [name for chunk in found for name in chunk] == list(held)
    assert len(found) > 3
    for chunk in found[:-1]:
        sizes = [tensor.nbytes for tensor in chunk.values()]
        assert sum(sizes) >= 50_000 > sum(sizes[:-1])


@pytest.mark.parametrize("chunk_bytes", [1, 50_000, 1 << 28])
def test_a_model_takes_the_weights_sent(model: LanguageModel, chunk_bytes: int) -> None:
    other = LanguageModel(model.config)
    take(other, sent(held_tensors(model), chunk_bytes))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def _changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"decoder.norm.weight": weights["decoder.norm.weight"].nextafter(torch.tensor(2.0))}


def _exchanged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two layers' weights of one shape in each other's place: a plain sum over both would not see it."""
    name = next(name for name in weights if ".0.mlp." in name)
    other = name.replace(".0.mlp.", ".1.mlp.")
    return weights | {name: weights[other], other: weights[name]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_sees_every_bit_and_every_exchange_of_places(dtype: torch.dtype) -> None:
    whole = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    digest = digests_of({"a": whole})["a"]
    assert digests_of({"a": whole.clone(), "b": whole[:, :4]})["a"] == digest
    integers = {4: torch.int32, 2: torch.int16}[whole.element_size()]
    for place in range(whole.numel()):
        for bit in range(8 * whole.element_size() - 1):
            flipped = whole.clone()
            flipped.view(-1).view(integers)[place] ^= 1 << bit
            assert digests_of({"a": flipped})["a"] != digest, (place, bit)
    for place in range(1, whole.numel()):
        order = list(range(whole.numel()))
        order[0], order[place] = place, 0
        assert digests_of({"a": whole.view(-1)[order]})["a"] != digest, place


def test_a_digest_taken_in_parts_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.randn(1001), "b": torch.randn(5, 3).bfloat16()}
    whole = digests_of(weights)
    monkeypatch.setattr("lm.samplers.engine.DIGESTED_AT_ONCE", 100)
    assert digests_of(weights) == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda found: [SentWeights(_changed(dict(found[0].weights)), found[0].digests), *found[1:]],
            r"generator's decoder.norm.weight has digest .* 1 of \d+ tensors differ: decoder.norm.weight$",
        ),
        (
            lambda found: [SentWeights(_exchanged(dict(found[0].weights)), found[0].digests), *found[1:]],
            r"2 of \d+ tensors differ: decoder.blocks.0.mlp.\S+, decoder.blocks.1.mlp.\S+$",
        ),
        (lambda found: found[:-1], "no weights of .*decoder.norm.weight.* have arrived"),
    ],
)
def test_weights_that_do_not_arrive_are_found_out(
    model: LanguageModel, damage: Callable[[list[SentWeights]], list[SentWeights]], message: str
) -> None:
    weights = dict(sorted(held_tensors(model).items(), key=lambda pair: "decoder.norm" in pair[0]))
    chunk_bytes = 1 << 28 if "differ" in message else 1
    with pytest.raises(AssertionError, match=message):
        take(LanguageModel(model.config), damage(sent(weights, chunk_bytes)))
