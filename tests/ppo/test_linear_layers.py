"""A tiny Qwen3-Next as a policy: its sampler agrees with its learner, and GRPO trains it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig
from lm.families import family_of
from lm.model import LanguageModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import read_config, save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels
from tests.models import full_weights
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

NEXT = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "qk_norm": True, "attn_output_gate": True, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "norm_topk_prob": True, "shared_expert_intermediate_size": 8, "shared_expert_gate": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(one_objective: InitialModels, tmp_path_factory: pytest.TempPathFactory) -> InitialModels:
    shape = read_config(one_objective.sft, "language")[0]
    model = LanguageModel(ModelConfig.model_validate({**shape.model_dump(), **NEXT}))
    assert family_of(model.config, "language").model_type == "qwen3_next"
    init_weights(model, 3)
    folder: Path = tmp_path_factory.mktemp("next")
    save_model(folder, model, model.state_dict(), Tokenizer.load(one_objective.sft))
    return replace(one_objective, sft=folder)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["full", "adapters"])
def test_an_iteration_of_grpo(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], prompts: list[list[int]], changes: dict[str, object]
) -> None:
    """Log-probs of tokens that were drawn one by one, from states, are those of packed rows, read in chunks."""
    config = ppo_config(ptx=None, advantage={"kind": "group_mean", "samples_per_prompt": 4}, **changes)
    worker = OneRank(config, EngineConfig.model_validate({"precision": "fp32", "trackers": ()}), models)
    before = {name: tensor.clone() for name, tensor in full_weights(worker.learner.policy).items()}
    controller = PPOController(worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=7, seed=5)
    metrics = controller.step(0)
    assert metrics["sampler_difference"] < 1e-4
    assert metrics["routes_changed"] == 0
    after = full_weights(worker.learner.policy)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    linear = "decoder.blocks.0.attention"
    own = {f"{linear}.{name}" for name in ("conv", "a_log", "dt_bias", "norm", "qkvz.weight", "out.weight")}
    assert {f"{linear}.qkvz.lora_b", f"{linear}.gates.lora_b"} <= moved if changes else own <= moved
    worker.close()
