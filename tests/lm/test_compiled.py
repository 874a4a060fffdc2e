"""Compiled blocks against eager ones: bits, gradients, and the number of compilations."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm import block as compiled
from lm import dropout, layers
from lm.config import ModelConfig
from lm.dropout import sequence_keys
from lm.layers import Replaceable
from lm.lora import LoRAConfig, add_adapters
from lm.model import LanguageModel, checkpoint_activations, compile_blocks, freeze_all_but_last
from lm.source import RandomInit, load
from tests.gpu.models import CPU, SHAPES, distance, tokens
from training.config import EngineConfig


class Counted:
    """A compiler that runs the graph's operations unchanged, and counts graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        found: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    backend = Counted()
    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield backend
    assert not torch._dynamo.utils.counters["graph_break"]


def passed(model: LanguageModel, length: int) -> dict[str, Tensor]:
    """Returns the logits and gradients of packed rows with two sequences."""
    rows = tokens(2, length).astype(np.int64)
    segments_BT = torch.ones(2, length, dtype=torch.int64)
    segments_BT[:, length // 2 :] = 2
    keys_BT = sequence_keys(1, np.arange(2)[:, None], CPU).expand(2, length)
    logits = model(torch.from_numpy(rows), segments_BT, None, keys_BT)
    model.zero_grad()
    logits.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


@pytest.mark.parametrize(
    ("name", "dropout", "recompute", "num_graphs"),
    [
        ("llama", 0.1, False, 2),
        pytest.param("mistral", 0.0, True, 2, marks=pytest.mark.nightly),
        pytest.param("gpt2", 0.1, True, 2, marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_give_the_same_bits_from_few_graphs(
    name: str, dropout: float, recompute: bool, num_graphs: int, counted: Counted
) -> None:
    """One graph serves three blocks, with dropout too, and at most one more serves all other lengths."""
    config: ModelConfig = SHAPES[name].model_copy(update={"num_hidden_layers": 3})
    model = load(RandomInit(partial(LanguageModel, config, dropout), seed=0)).train()
    compile_blocks(model)
    if recompute:
        checkpoint_activations(model)
    for length in (32, 40, 48):
        found = passed(model, length)
        with torch.compiler.set_stance("force_eager"):
            expected = passed(model, length)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert 1 <= counted.num_graphs <= num_graphs


@pytest.mark.parametrize(
    ("freeze", "num_graphs"),
    [
        pytest.param(lambda model: add_adapters(model, LoRAConfig(rank=4)), 2, marks=pytest.mark.long),
        (lambda model: freeze_all_but_last(model, 2), 3),
    ],
    ids=["adapters", "last blocks"],
)
def test_frozen_weights_compile_one_more_graph_per_kind_of_block(
    freeze: Callable[[LanguageModel], object], num_graphs: int, counted: Counted
) -> None:
    """The first trained block's input needs no gradient, so its graph computes none; frozen blocks need none at all."""
    config: ModelConfig = SHAPES["llama"].model_copy(update={"num_hidden_layers": 4})
    model, plain = (load(RandomInit(partial(LanguageModel, config), seed=0)).train() for _ in range(2))
    for frozen in (model, plain):
        torch.manual_seed(0)
        freeze(frozen)
        for parameter in frozen.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    compile_blocks(model)
    found, expected = passed(model, 16), passed(plain, 16)
    assert counted.num_graphs == num_graphs
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_compiled_blocks_get_positions_in_every_layer(counted: Counted) -> None:
    changes = {"num_hidden_layers": 3, "positions": "learned", "positions_every_layer": True}
    config: ModelConfig = SHAPES["llama"].model_copy(update=changes)
    model, plain = (load(RandomInit(partial(LanguageModel, config), seed=0)).train() for _ in range(2))
    compile_blocks(model)
    found, expected = passed(model, 32), passed(plain, 32)
    assert counted.num_graphs == 1
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-4, rtol=1e-4)


def test_blocks_that_autocast_share_a_graph(counted: Counted) -> None:
    """Also with cached casts of weights: looking one up by its weight would compile every block on its own."""
    config: ModelConfig = SHAPES["llama"].model_copy(update={"num_hidden_layers": 3})
    model, plain = (load(RandomInit(partial(LanguageModel, config), seed=0)).train() for _ in range(2))
    compile_blocks(model)
    with layers.cache_weight_casts(), torch.autocast("cpu", torch.bfloat16):
        found, expected = passed(model, 32), passed(plain, 32)
    assert counted.num_graphs == 1
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_soft_caps_compile(counted: Counted) -> None:
    changes = {"num_hidden_layers": 2, "attn_logit_softcapping": 5.0}
    config: ModelConfig = SHAPES["llama"].model_copy(update=changes)
    model = load(RandomInit(partial(LanguageModel, config), seed=0)).train()
    compile_blocks(model)
    found = passed(model, 16)
    with torch.compiler.set_stance("force_eager"):
        expected = passed(model, 16)
    assert counted.num_graphs == 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def bodies(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """Yields the forward of each autograd Function in a graph."""
    yield from (body for name, body in graph.named_children() if name.startswith("fwd_body"))  # type: ignore[misc]


def results_made_twice(body: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Returns the results of a Function's forward that an earlier operation returned too."""
    found = []
    *_, output = body.graph.nodes
    operations = [node for node in body.graph.nodes if node.op.startswith("call")]
    for result in output.args[0][0]:
        made = [node for node in operations if node.meta.get("example_value") is result.meta["example_value"]]
        found += [result] if len(made) > 1 else []
    return found


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"mlp": "relu2"}], ids=["swiglu", "relu2"])
def test_no_function_of_a_block_loses_its_gradient(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain functions, which GPUs compile, have eager gradients; none returns a tensor that two operations made.

    torch 2.11 gives such a Function a gradient of 0, so there the first half fails too.
    """
    for replaceable in (layers.rms_norm, layers.swiglu, dropout.drop):
        assert isinstance(replaceable, Replaceable)
        monkeypatch.setattr(replaceable, "_replacements", [])
    functions: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        functions.extend(bodies(graph))
        found: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)
        return found

    monkeypatch.setattr(compiled, "BACKEND", backend)
    torch._dynamo.reset()
    config: ModelConfig = SHAPES["llama"].model_copy(update={"num_hidden_layers": 1, **changes})
    model = load(RandomInit(partial(LanguageModel, config, 0.1), seed=0)).train()
    compile_blocks(model)
    found = passed(model, 16)
    with torch.compiler.set_stance("force_eager"):
        expected = passed(model, 16)
    for key, value in expected.items():
        assert distance(found[key], value) < 1e-4, key
    assert len(functions) >= 4  # norms and dropout, at least
    assert not [node for body in functions for node in results_made_twice(body)]


def test_sequence_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exchanges between ranks are not compiled; only one of the two was expected"):
        EngineConfig(compile_blocks=True, sequence_parallel_size=2)


def test_zero_3_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zero_stage 0 to 2 was expected"):
        EngineConfig(compile_blocks=True, zero_stage=3)
