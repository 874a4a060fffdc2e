"""Sharded models: every kind of model gives the same outputs, and each byte is on one rank."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.encoder import SequenceClassifier
from lm.families.family import CLASSIC
from lm.model import LanguageModel, ScalarModel
from lm.source import PartialSource, RandomInit, load
from lm.tensor_files import Checkpoint
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model
from ppo.config import PPOConfig
from ppo.rank import InitialModels
from ppo.scorer import Scorer, ShardedModel
from training.config import EngineConfig

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CPU = torch.device("cpu")


def config(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": 60, "max_position_embeddings": 16, **SIZES, **changes})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": partial(LanguageModel, config(tie_word_embeddings=True)),
    "untied": partial(LanguageModel, config(tie_word_embeddings=False)),
    "learned positions": partial(LanguageModel, config(positions="learned", norm="layer")),
    "experts": partial(
        LanguageModel, config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=(0,))
    ),
    "scores": partial(ScalarModel, config(), labels=("kind", "brief")),
    "encoder": partial(SequenceClassifier, config(kind="encoder", positions="learned", norm="layer"), ("score",)),
}


def source_of(name: str) -> PartialSource[nn.Module]:
    return RandomInit(MODELS[name], seed=3)


def held(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_shards_gives_the_bits_of_the_whole_one(name: str, by_layer: bool) -> None:
    tokens_BT = torch.randint(0, 60, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load(source_of(name)).eval()(tokens_BT)
        sharded = ShardedModel(source_of(name), lambda _: None, CPU, 60.0, by_layer=by_layer)
        for _ in range(2):
            assert all(tensor.is_meta for tensor in held(sharded.module).values())
            with sharded.in_use():
                in_blocks = [tensor for name, tensor in held(sharded.module).items() if ".blocks." in name]
                assert all(tensor.is_meta for tensor in in_blocks if tensor.dim() > 1) == by_layer
                assert torch.equal(sharded.module(tokens_BT), expected)
    assert all(tensor.is_meta for tensor in held(sharded.module).values())


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_bf16_rounds_weights_as_the_learner_does_and_no_bias_of_a_score(
    zero_stage: int, models: InitialModels, ppo_config: Callable[..., PPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast rounds only matrix products; under ZeRO all weights are bf16. A bias of 6.01 would become 6.0."""
    engine = EngineConfig.model_validate({"precision": "bf16", "zero_stage": zero_stage})
    given = ModelFolder.tensors
    monkeypatch.setattr(
        ModelFolder,
        "tensors",
        lambda self, rows=None: ((n, t + 5.76 if n == "bias" else t) for n, t in given(self, rows)),
    )
    for memory in ("fast", "small"):
        network = Scorer(ppo_config(memory=memory), engine, models).network
        with network.in_use():
            tensors = held(network.module)
        rounded, score = tensors["decoder.blocks.0.mlp.up.weight"], tensors["score.weight"]
        assert rounded.dtype == torch.bfloat16
        assert score.dtype == (torch.float32 if zero_stage == 0 else torch.bfloat16)
        assert tensors["bias"].dtype == torch.float32
        assert float(tensors["bias"]) == pytest.approx(6.01, abs=1e-6)


def _fail(_module: nn.Module, _args: object) -> None:
    raise RuntimeError("out of memory")


def test_a_pass_that_fails_leaves_no_layer_behind() -> None:
    sharded = ShardedModel(source_of("tied"), lambda _: None, CPU, 60.0, by_layer=True)
    sharded.module.get_submodule("decoder.blocks.1.mlp.down").register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="out of memory"), sharded.in_use():
        sharded.module(torch.tensor([[5, 6]]))
    assert all(tensor.is_meta for tensor in held(sharded.module).values())


@pytest.mark.parametrize("by_layer", [False, True])
def test_ranks_hold_equal_parts_which_are_the_whole(by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(num_ranks: int) -> list[list[Tensor]]:
        found = []
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
            sharded = ShardedModel(source_of("tied"), nn.Module.bfloat16, CPU, 60.0, by_layer=by_layer)
            found.append([bundle.share for bundle in sharded.bundles])
        return found

    (whole,), parts = shares(1), shares(7)
    size = sum(2 * tensor.numel() for tensor in held(load(source_of("tied"))).values())
    assert size <= sum(len(share) for share in whole) <= 1.2 * size
    for number, share in enumerate(whole):
        gathered = torch.cat([own[number] for own in parts])
        assert len({len(own[number]) for own in parts}) == 1
        assert torch.equal(gathered[: len(share)], share)
        assert not gathered[len(share) :].any()


FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "gpt2": {**CLASSIC, "mlp": "gelu_tanh", "tie_word_embeddings": True},  # stores matrices transposed
}


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_together_the_ranks_read_the_files_once(
    family: str, by_layer: bool, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = config(num_hidden_layers=8, **FAMILIES[family])
    model = load(RandomInit(lambda: LanguageModel(shape), seed=3))
    save_model(tmp_path, model, model.state_dict(), tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    num_read = 0

    def counted(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def reading(*arguments: object) -> Tensor:
            nonlocal num_read
            tensor = read(*arguments)
            num_read += tensor.nbytes
            return tensor

        return reading

    for method in ("tensor", "part"):
        monkeypatch.setattr(Checkpoint, method, counted(getattr(Checkpoint, method)))

    def shares(num_ranks: int) -> list[list[Tensor]]:
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        found = []
        for rank in range(num_ranks):
            monkeypatch.setenv("RANK", str(rank))
            source = ModelFolder(tmp_path, LanguageModel)
            sharded = ShardedModel(source, lambda _: None, CPU, 60.0, by_layer=by_layer)
            found.append([bundle.share for bundle in sharded.bundles])
        return found

    parts = shares(5)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    # Both ranks read a row that they share: at most 4 rows in the whole model, or in each attention and MLP.
    longest = max(p.nbytes // len(p) for p in model.parameters())
    assert whole <= num_read <= whole + 4 * longest * (1 + 2 * 8 * by_layer)
    (alone,) = shares(1)
    for number, share in enumerate(alone):
        assert torch.equal(torch.cat([part[number] for part in parts])[: len(share)], share)
