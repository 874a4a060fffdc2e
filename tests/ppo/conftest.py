"""A tiny world for PPO: an SFT policy, a reward model and a pretraining stream, all with random weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.adapters import save_trained
from lm.config import ModelConfig
from lm.lora import LoRAConfig, WithAdapters, adapted_maps
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.source import load, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, read_config, save_model
from ppo.config import PPOConfig
from ppo.rank import InitialModels, ScoreScale, TokenStream
from tests.ppo.one_rank import OneRank
from tests.training.conftest import start_two_ranks
from training.config import BatchConfig, EngineConfig, OptimizerConfig
from training.data import DataConfig

__all__ = ["start_two_ranks"]

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "bird", "fly", "over", "green", "hills"]


@pytest.fixture(scope="session")
def one_objective(tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    folder = tmp_path_factory.mktemp("models")
    config = ModelConfig(
        vocab_size=300,
        max_position_embeddings=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
    )
    texts = [" ".join(WORDS[i % 5 :] + WORDS[: i % 7]) for i in range(40)]
    tokenizer = Tokenizer.train(texts, config.vocab_size, "chat")
    policy, reward = LanguageModel(config), ScalarModel(config)
    init_weights(policy, 1)
    init_weights(reward, 2)
    reward.bias.fill_(0.25)
    # All hidden states share a direction that raises EOS's logit, so about half the responses end.
    with torch.no_grad():
        policy.decoder.embedding.weight[:, 0] = 0.5
        policy.decoder.embedding.weight[tokenizer.end_id, 0] = 1.8
    save_model(folder / "sft", policy, policy.state_dict(), tokenizer)
    save_model(folder / "reward", reward, reward.state_dict(), tokenizer)
    stream = [token for text in tokenizer.encode_plain(texts) for token in (*text, tokenizer.end_id)]
    np.array(stream, dtype=np.int32).tofile(folder / "train.bin")
    return InitialModels(folder / "sft", folder / "reward", ScoreScale(0.5, 2.0), TokenStream(folder / "train.bin", 9))


@pytest.fixture(scope="session")
def models(one_objective: InitialModels) -> InitialModels:
    return one_objective


@pytest.fixture(scope="session")
def two_objectives(one_objective: InitialModels, tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    """A reward model with the heads "kind" and "brief" instead of a single one."""
    assert isinstance(one_objective.reward, Path)
    model = ScalarModel(read_config(one_objective.reward, "score")[0], labels=("kind", "brief"))
    init_weights(model, 8)
    model.bias.copy_(torch.tensor([0.25, -1.0]))
    folder = tmp_path_factory.mktemp("reward")
    save_model(folder, model, model.state_dict(), Tokenizer.load(one_objective.reward))
    return replace(one_objective, reward=folder)


@pytest.fixture(scope="session")
def adapted(one_objective: InitialModels, tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    """The reward model is an adapter of the SFT model, of another rank than the policy's, with a head."""
    folder = tmp_path_factory.mktemp("adapted")
    body = WithNewHead(one_objective.sft, LanguageModel, ScalarModel, seed=4)
    config = LoRAConfig(rank=2, alpha=5.0, targets="attention")
    network = load(WithAdapters(body, config, 7))
    generator = torch.Generator().manual_seed(8)
    for module in adapted_maps(network).values():
        module.lora_b.data.normal_(generator=generator)
    network.bias.fill_(0.25)
    weights = [*network.named_parameters(), *network.named_buffers()]
    tokenizer = Tokenizer.load(one_objective.sft)
    save_trained(folder, on_meta(body.build), network, weights, tokenizer, config, one_objective.sft)
    return replace(one_objective, reward=folder / "model", adapter_seed=3)


@pytest.fixture(scope="session")
def teachers(one_objective: InitialModels, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two language models with the policy's tokenizer: one of its shape, and a wider one."""
    shape, tokenizer = read_config(one_objective.sft, "language")[0], Tokenizer.load(one_objective.sft)
    folder = tmp_path_factory.mktemp("teachers")
    for seed, (name, width) in enumerate({"first": 16, "wide": 24}.items(), 11):
        model = LanguageModel(shape.model_copy(update={"hidden_size": width}))
        init_weights(model, seed)
        save_model(folder / name, model, model.state_dict(), tokenizer)
    return folder / "first", folder / "wide"


@pytest.fixture(scope="session")
def prompts(one_objective: InitialModels) -> list[list[int]]:
    """Sixteen prompts of different lengths."""
    tokenizer = Tokenizer.load(one_objective.sft)
    return [tokenizer.encode_prompt([{"role": "user", "content": " ".join(WORDS[: 1 + i % 9])}]) for i in range(16)]


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section with changes. Tables that both have are merged, unless the change is of another kind."""
    both = {
        key: changed(values[key], change)
        for key, change in changes.items()
        if isinstance(change, Mapping) and isinstance(values.get(key), Mapping)
        if change.get("kind", values[key].get("kind")) == values[key].get("kind", change.get("kind"))
    }
    return {**values, **changes, **both}


@pytest.fixture(scope="session")
def ppo_config() -> Callable[..., PPOConfig]:
    """A small config with some keys changed, also of tables; `micro` and `minibatch` set the batch."""

    def build(*, minibatch: int = 8, micro: int = 4, learning_rate: float = 1e-3, **changes: object) -> PPOConfig:
        # With a large eps, Adam's first step is not just a sign, which rounding could flip.
        optimizer = OptimizerConfig(learning_rate=learning_rate, schedule="linear", eps=1e-3)
        values = {
            "prompts": DataConfig(source="unread.jsonl"),
            "num_iterations": 3,
            "rollout_batch_size": 16,
            "num_epochs": 2,
            "minibatch": BatchConfig(batch_size=minibatch, micro_batch_size=micro),
            "max_new_tokens": 6,
            "temperature": 0.7,
            "policy_optimizer": optimizer,
            "advantage": {"kind": "gae", "value_optimizer": optimizer},
            "kl": {"coef": 0.1},
            "missing_eos_penalty": 1.0,
            "ptx": {"coef": 0.3, "rows": 4},
            "ema": {"decay": 0.75},
            "save_every_iterations": 1,
        }
        return PPOConfig.model_validate(changed(values, changes))

    return build


@pytest.fixture
def start(models: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Callable[..., OneRank]]:
    """Makes ranks with all roles in this process; they are closed when the test ends."""
    workers: list[OneRank] = []

    def build(precision: str = "fp32", **changes: object) -> OneRank:
        engine = EngineConfig.model_validate({"precision": precision, "trackers": ()})
        workers.append(OneRank(ppo_config(**changes), engine, models))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()
