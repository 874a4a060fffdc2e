"""Policies during a run, really sampled: the report equals what each part measures separately."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation.measures.best_of_n import best_of_n_kl
from evaluation.measures.kl import Policy, draw, measure_kl
from lm.config import ModelConfig
from lm.model import LanguageModel, ScalarModel, init_weights
from lm.tokenizer import Messages, Tokenizer
from lm.weights import save_model
from research.over_optimisation.policies import Spec, over_optimisation
from reward.scoring import RewardModel
from tests.models import load_language_model
from training.data import Prompt

SPEC = Spec(num_samples=2, pool_samples=4, max_new_tokens=6, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, tiny_config: ModelConfig) -> Path:
    model = ScalarModel(tiny_config)
    init_weights(model, seed=5)
    folder = tmp_path_factory.mktemp("reward")
    save_model(folder, model, model.state_dict(), tokenizer)
    return folder


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tokenizer: Tokenizer) -> dict[str, Path]:
    """Copies of the reference, each further away than the last."""
    folders = {}
    for step in (1, 2, 3):
        model = load_language_model(model_folder)
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.03 * step * torch.randn(weight.shape, generator=generator)
        folders[f"iteration {step}"] = tmp_path_factory.mktemp("policy")
        save_model(folders[f"iteration {step}"], model, model.state_dict(), tokenizer)
    return folders


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    words = ["fox", "dog", "bird", "bush", "hand"]
    return [Prompt(prompt_id=w, messages=({"role": "user", "content": w},), kind="") for w in words]


def length(_conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def test_points_are_what_each_policy_measures_alone(
    policies: dict[str, Path], model_folder: Path, reward_folder: Path, prompts: list[Prompt]
) -> None:
    seen: list[str] = []
    found = over_optimisation(policies, model_folder, reward_folder, length, prompts, SPEC, seen.append)
    assert seen == ["the reference", *policies, "fits"]
    assert (found.num_prompts, found.num_dropped, found.first_failure) == (5, 0, "")
    reference, judge = Policy.load(model_folder), RewardModel.load(reward_folder)
    how = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    pool = draw(reference, prompts, num_samples=4, **how)
    pool_gold = np.reshape([len(text) for text in pool.texts], (5, 4)).mean(axis=1)
    for point, (name, folder) in zip(found.rl_points, policies.items(), strict=True):
        policy = Policy.load(folder)
        drawn = draw(policy, prompts, num_samples=2, **how)
        kl = measure_kl(policy, reference, drawn)
        assert found.rl_kl[name] == kl
        assert point.name == name
        assert point.kl_nats.mean == pytest.approx(kl.full.mean)
        assert point.d == pytest.approx(math.sqrt(kl.full.mean))
        gold = np.reshape([len(text) for text in drawn.texts], (5, 2)).mean(axis=1)
        assert point.gold.mean == pytest.approx(float((gold - pool_gold).mean()))
        scores = judge.score(policy.tokenizer, drawn.conversations, drawn.queries, drawn.responses)
        start = judge.score(policy.tokenizer, pool.conversations, pool.queries, pool.responses)
        assert point.proxy.mean == pytest.approx(np.mean(scores) - np.mean(start), abs=1e-5)
    distances = [point.d for point in found.rl_points]
    assert distances == sorted(distances)
    assert [point.kl_nats.mean for point in found.best_of_n_points] == pytest.approx([best_of_n_kl(2), best_of_n_kl(4)])
    assert found.best_of_n_points[1].proxy.mean > found.best_of_n_points[0].proxy.mean > 0
    assert found.rl is not None
    assert found.best_of_n is None  # two sizes are too few to fit


def test_prompts_whose_scores_fail_are_left_out_and_counted(
    policies: dict[str, Path], model_folder: Path, reward_folder: Path, prompts: list[Prompt]
) -> None:
    def fails(conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
        turns = [messages[-1]["content"] for messages in conversations]
        return [math.nan if turn == "bird" else float(len(text)) for turn, text in zip(turns, responses, strict=True)]

    found = over_optimisation(policies, model_folder, reward_folder, fails, prompts, SPEC)
    assert (found.num_prompts, found.num_dropped) == (4, 1)
    assert found.first_failure == "the gold score of the reference on prompt 2 is not a number"
    others = [prompt for prompt in prompts if prompt.prompt_id != "bird"]
    alone = over_optimisation(policies, model_folder, reward_folder, length, others, SPEC)
    assert found.rl_points[0].gold.mean == pytest.approx(alone.rl_points[0].gold.mean)
    with pytest.raises(ValueError, match="3 policies, 1 prompts; at least one and two were expected"):
        over_optimisation(policies, model_folder, reward_folder, fails, prompts[2:3], SPEC)
    nothing = [prompt for prompt in prompts if prompt.prompt_id in ("bird", "dog")]
    with pytest.raises(ValueError, match=r"failed on 1 of 2 prompts; at least two .* the gold score of the ref"):
        over_optimisation(policies, model_folder, reward_folder, fails, nothing, SPEC)


def test_another_vocabulary_is_refused(
    tmp_path: Path, model_folder: Path, reward_folder: Path, tiny_config: ModelConfig, prompts: list[Prompt]
) -> None:
    model = LanguageModel(tiny_config)
    init_weights(model, 1)
    save_model(tmp_path, model, model.state_dict(), Tokenizer.train(["other words"], 270, "chat"))
    with pytest.raises(ValueError, match="have different vocabularies"):
        over_optimisation({"a": tmp_path}, model_folder, reward_folder, length, prompts, SPEC)
