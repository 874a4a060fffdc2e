"""PPO on a reward that is not a model: it learns, failed scores are masked and counted, and too many stop the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from reward.external import RewardFunction
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig, values_at

REWARDS = """
def lengths(prompts, responses):
    return [None if prompt[-1]["content"].endswith("3") else len(text) for prompt, text in zip(prompts, responses)]

def nothing(prompts, responses):
    raise RuntimeError("the machine is off")
"""
ASKED = [[{"role": "user", "content": f"the cat sat {i}"}] for i in range(16)]


@pytest.fixture
def build(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> Callable[[str], tuple[PPOController, OneRank]]:
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(function: str) -> tuple[PPOController, OneRank]:
        name = f"{tmp_path / 'rewards.py'}:{function}"
        config = ppo_config(ptx=None, reward={"kind": "function", "function": name}, max_failed_share=0.125)
        own = replace(models, reward=config.external_reward or Path(), scale=ScoreScale(10.0, 4.0), pretraining=None)
        assert own.reward == RewardFunction(function=name)
        worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own, ASKED)
        prompts = [worker.tokenizer.encode_prompt(asked) for asked in ASKED]
        return PPOController(config, worker.roles, prompts, own.scale, num_pretraining_rows=0, seed=5), worker

    return make


def test_scores_are_the_functions_and_failures_are_masked(
    build: Callable[[str], tuple[PPOController, OneRank]],
) -> None:
    controller, worker = build("lengths")
    rollout = worker.sample(controller.prompts, range(16))
    scores, values = worker.scores(rollout), worker.values(rollout)
    _, responses = rollout.token_lists()
    for row, response in enumerate(responses):
        if row % 10 == 3:  # questions 3 and 13
            assert scores[row].isnan()
        else:
            assert float(scores[row]) == len(worker.tokenizer.decode(response).strip())
    why, place = worker.scorer.first_failure().splitlines()
    assert why.endswith("rewards.py:lengths returned None; a finite number was expected")
    assert place.endswith('rewards.py", line 2, in lengths')
    assert not values.any()  # the mean of the rewards: nothing is known of a half-written response
    metrics = [controller.step(iteration) for iteration in range(2)]
    assert [f["failed_scores"] for f in metrics] == [2.0, 2.0]
    assert metrics[0]["scaled_score"] == pytest.approx((metrics[0]["score"] - 10) / 4)
    assert worker.values(rollout).any()  # learned
    worker.close()


def test_too_many_failures_stop_the_run_and_name_the_first_cause(
    build: Callable[[str], tuple[PPOController, OneRank]],
) -> None:
    controller, worker = build("nothing")
    before = {name: weight.clone() for name, weight in worker.learner.policy.module.state_dict().items()}
    with pytest.raises(ValueError, match=r"16 of 16 .*:nothing raised RuntimeError: the machine is off"):
        controller.step(0)
    assert all(torch.equal(weight, before[name]) for name, weight in worker.learner.policy.module.state_dict().items())
    worker.close()


def test_sources_of_a_sum_are_logged_one_by_one(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    """Their scores are summed by their weights. A failure of a source with weight 0 is counted, and costs nothing."""
    (tmp_path / "rewards.py").write_text(
        REWARDS + "def count(prompts, responses, rows):\n    return [r['n'] for r in rows]"
    )
    sources = {name: {"kind": "function", "function": f"{tmp_path}/rewards.py:{name}"} for name in ("lengths", "count")}
    weights, rows = {"lengths": 0.0, "count": 0.5}, [{"n": number} for number in range(16)]
    config = ppo_config(ptx=None, reward={"kind": "sum", "sources": sources, "objective_weights": weights})
    assert config.external_reward is not None
    own = replace(models, reward=config.external_reward, scale=ScoreScale(0.0, 1.0), pretraining=None)
    worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own, ASKED, rows)
    prompts = [worker.tokenizer.encode_prompt(asked) for asked in ASKED]
    scores_BO = worker.roles.scorers.start_scores(worker.sample(prompts, range(16)))()
    assert scores_BO[:, 1].tolist() == list(range(16))
    assert scores_BO[:, 0].isnan().nonzero()[:, 0].tolist() == [3, 13]
    metrics = PPOController(config, worker.roles, prompts, own.scale, num_pretraining_rows=0, seed=5).step(0)
    assert metrics["failed_scores"] == 0.0
    assert (metrics["failed/lengths"], metrics["failed/count"]) == (pytest.approx(2 / 16), 0.0)
    assert metrics["score"] == pytest.approx(0.5 * metrics["score/count"])
    assert metrics["score/count"] == pytest.approx(7.5)
    worker.close()


def test_functions_of_sources_are_found_by_their_key(ppo_config: Callable[..., PPOConfig]) -> None:
    """For the lineage, `heed submit` and the checks before a run."""
    sources = {"a": {"kind": "function", "function": "f.py:a"}, "b": {"kind": "verifier"}}
    both = ppo_config(ptx=None, reward={"kind": "sum", "sources": sources, "objective_weights": {"a": 1.0, "b": 1.0}})
    assert values_at(both, "reward.sources.*.function") == ["f.py:a"]
    one = ppo_config(ptx=None, reward={"kind": "function", "function": "a:b"})
    assert values_at(one, "reward.sources.*.function") == []
    assert values_at(one, "reward.function") == ["a:b"]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"model": "x", "url": "http://h/"}, r"reward.model.url\n.*not permitted"),
        ({"kind": "url", "url": "http://h/", "model": "x"}, r"reward.url.model\n.*not permitted"),
        ({"kind": "function", "function": ""}, r"reward.function.function\n.*pattern"),
        ({"kind": "function"}, r"reward.function.function\n.*required"),
        ({"kind": "url", "url": "ftp://host/"}, r"reward.url.url\n.*pattern"),
        (
            {"kind": "people"},
            'a table with kind "model", "function", "url", "none", "verifier" or "sum" was expected',
        ),
    ],
)
def test_one_source_of_reward(ppo_config: Callable[..., PPOConfig], reward: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ppo_config(reward=reward)
