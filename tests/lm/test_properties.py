"""What holds for every shape that the config allows, drawn by hypothesis."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config import ModelConfig, RopeScaling
from lm.generation import Batch
from lm.model import LanguageModel, ScalarModel, initialise
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, load_scalar_model, save_model

CONTEXT = 24
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALINGS = [
    None,
    RopeScaling(kind="linear", factor=3),
    RopeScaling(kind="llama3", factor=4, original_context_tokens=10),
    RopeScaling(kind="yarn", factor=2, original_context_tokens=12),
]


@st.composite
def configs(draw: st.DrawFn, vocab_size: int = 11) -> ModelConfig:
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = draw(st.sampled_from(["rotary", "learned", "sinusoidal"]))
    num_layers = draw(st.integers(1, 3))
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "context_tokens": CONTEXT,
        "width": 2 * draw(st.integers(2, 8)),
        "num_layers": num_layers,
        "num_heads": kv_heads * groups,
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 4)),
        "mlp_width": draw(st.integers(1, 20)),
        "mlp": draw(st.sampled_from(["swiglu", "relu2", "gelu", "gelu_tanh", "relu"])),
        "mlp_bias": draw(st.booleans()),
        "attention_bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "qk_norm": draw(st.booleans()),
        "windows": draw(st.lists(st.integers(0, CONTEXT), min_size=1, max_size=num_layers)),
        "positions": positions,
        "rope_scaling": draw(st.sampled_from(SCALINGS)) if positions == "rotary" else None,
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "norm_place": draw(st.sampled_from(["pre", "post"])),
        "tie_embeddings": draw(st.booleans()),
    }
    return ModelConfig.model_validate(values)


def random_model(config: ModelConfig, kind: Any = LanguageModel) -> Any:
    """Every weight away from its default."""
    model = kind(config)
    initialise(model, 1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


tokens_of = st.lists(st.integers(0, 10), min_size=2, max_size=CONTEXT)


@EXAMPLES
@given(config=configs(), tokens=tokens_of, data=st.data())
@torch.no_grad()
def test_a_cache_changes_nothing(config: ModelConfig, tokens: list[int], data: st.DataObject) -> None:
    """Read in two parts and then token by token, beside a longer and a shorter sequence."""
    model = random_model(config)
    first = data.draw(st.integers(1, len(tokens) - 1))
    mates = [[7] * data.draw(st.integers(1, CONTEXT - len(tokens) + first)) for _ in range(2)]
    batch = Batch.start(model, [0, 1, 2], [mates[0], tokens[:first], mates[1]], len(tokens) - first)
    for step, token in enumerate(tokens[first:], start=first):
        expected = model(torch.tensor([tokens[:step]]))[0, -1]
        torch.testing.assert_close(batch.logits_BV[1], expected, atol=2e-4, rtol=1e-4)
        batch.feed(model, torch.tensor([3, token, 3]))


@EXAMPLES
@given(config=configs(), tokens=tokens_of, data=st.data())
@torch.no_grad()
def test_no_token_changes_what_comes_before_it(config: ModelConfig, tokens: list[int], data: st.DataObject) -> None:
    model = random_model(config)
    place = data.draw(st.integers(1, len(tokens) - 1))
    changed = [*tokens[:place], (tokens[place] + 1) % 11, *tokens[place + 1 :]]
    before, after = model(torch.tensor([tokens])), model(torch.tensor([changed]))
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])


@EXAMPLES
@given(config=configs(), rows=st.lists(tokens_of, min_size=2, max_size=4))
@torch.no_grad()
def test_a_sequence_gets_the_same_packed_padded_and_alone(config: ModelConfig, rows: list[list[int]]) -> None:
    model = random_model(config)
    alone = [model(torch.tensor([row]))[0] for row in rows]
    packed = torch.tensor([[token for row in rows for token in row] + [0, 0]])
    segments = torch.tensor([[index for index, row in enumerate(rows, start=1) for _ in row] + [0, 0]])
    together = model(packed, segments)[0]
    torch.testing.assert_close(together[:-2], torch.cat(alone), atol=2e-4, rtol=1e-4)
    widest = max(map(len, rows))
    padded = model(torch.tensor([[*row, *[0] * (widest - len(row))] for row in rows]))
    for row, expected in zip(padded, alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, atol=2e-4, rtol=1e-4)


@EXAMPLES
@given(config=configs(vocab_size=288), scalar=st.booleans(), shards=st.booleans())
@torch.no_grad()
def test_what_is_written_comes_back(tokenizer: Tokenizer, config: ModelConfig, scalar: bool, shards: bool) -> None:
    model = random_model(config, ScalarModel if scalar else LanguageModel)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), model, model.state_dict(), tokenizer, max_shard="4KB" if shards else "5GB")
        assert len(list(Path(name).glob("*.safetensors"))) > 1 or not shards
        again = (load_scalar_model if scalar else load_language_model)(Path(name))
    assert again.config == model.config
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"windows": (-1,)}, "negative entry"),
        ({"windows": (0, 3, 4)}, "3 entries for 2 layers"),
        ({"windows": ()}, "windows"),
        ({"positions": "learned", "rope_scaling": SCALINGS[1]}, "but model.positions is 'learned'"),
        ({"positions": "sinusoidal", "width": 17, "head_dim": 4}, "width is 17; sinusoidal positions need an even"),
        ({"head_dim": 5}, "head_dim is 5; rotary positions need an even number"),
        ({"num_heads": 0}, "num_heads"),
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused(tiny_config: ModelConfig, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({**tiny_config.model_dump(exclude={"head_dim"}), **change})


def test_equal_shapes_are_equal_configs(tiny_config: ModelConfig) -> None:
    values = {**tiny_config.model_dump(), "num_layers": 4}
    one, other = (ModelConfig.model_validate({**values, "windows": windows}) for windows in ((0, 8), (0, 8, 0, 8)))
    assert one == other
    assert ModelConfig.model_validate({**values, "windows": (0, 8, 0)}) != one
