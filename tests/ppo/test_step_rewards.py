"""Rewards of steps in PPO: where they are paid, what the advantages make of them, and a failed step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from files.atomic import write_json
from lm.tokenizer import read_json
from ppo.algorithm import GAE, GroupMean, LeaveOneOut, token_rewards
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.groups import StepRewards, step_advantages
from ppo.rank import InitialModels, ScoreScale
from reward.scoring import STEP_SEPARATOR, RewardModel
from reward.steps import step_ends
from tests.models import load_scalar_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig, OptimizerConfig

REWARDS = """
def lengths(prompts, responses):
    return [[float(len(step)) for step in steps] for steps in responses]

def partly(prompts, responses):
    found = lengths(prompts, responses)
    for prompt, scores in zip(prompts, found):
        if prompt[-1]["content"].endswith(" 3"):
            scores[-1] = None
    return found
"""
ASKED = [[{"role": "user", "content": f"the cat sat {i}"}] for i in range(16)]
SEPARATOR = "t"  # which random responses have
Build = Callable[..., tuple[PPOController, OneRank]]


@pytest.fixture
def build(models: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path) -> Build:
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(function: str, **changes: object) -> tuple[PPOController, OneRank]:
        reward = {
            "kind": "function",
            "function": f"{tmp_path / 'rewards.py'}:{function}",
            "steps": {"form": "sum", "separator": SEPARATOR},
        }
        config = ppo_config(
            ptx=None, reward=reward, max_failed_share=0.125, max_new_tokens=24, kl={"coef": 0.0}, **changes
        )
        own = replace(models, reward=config.external_reward, scale=ScoreScale(10.0, 4.0), pretraining=None)
        worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own, ASKED)
        prompts = [worker.tokenizer.encode_prompt(asked) for asked in ASKED]
        return PPOController(config, worker.roles, prompts, own.scale, num_pretraining_rows=0, seed=5), worker

    return make


def test_each_step_is_paid_at_its_last_token(build: Build) -> None:
    controller, worker = build("lengths")
    controller.step(0)
    batch = controller.batch
    assert batch is not None
    num_steps = 0
    for row, response in enumerate(batch.rollout.token_lists()[1]):
        texts = [text for text in worker.tokenizer.decode(response).strip().split(SEPARATOR) if text.strip()] or [""]
        expected = torch.zeros(24)
        for end, text in zip(step_ends(worker.tokenizer, response, SEPARATOR), texts, strict=True):
            expected[end] += len(text) / 4.0  # in standard deviations
        expected[len(response) - 1] -= 1.0 * (not batch.rollout.finished_B[row])
        torch.testing.assert_close(batch.rewards_BR[row], expected)
        assert float(batch.scores_B[row]) == pytest.approx(sum(map(len, texts)))
        num_steps += len(texts)
    assert num_steps > 20, "no response has several steps"
    worker.close()


def test_a_failed_step_takes_the_whole_response_out(build: Build) -> None:
    controller, worker = build("partly")
    metrics = controller.step(0)
    batch = controller.batch
    assert batch is not None
    failed = [row for row, number in enumerate(batch.rollout.prompt_rows_B.tolist()) if number == 3]
    assert metrics["failed_scores"] == len(failed) == 1
    assert not batch.rewards_BR[failed].any()
    assert not batch.counted_BR[failed].any()
    assert batch.scores_B[failed].isnan().all()
    assert batch.counted_BR.any(dim=1).sum() == 15
    worker.close()


def test_a_step_wise_model_is_read_at_the_ends_of_steps(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path, prompts: list[list[int]]
) -> None:
    folder = stepwise(models, tmp_path)
    config = ppo_config(ptx=None, reward={"steps": {"form": "product"}}, max_new_tokens=24)
    own = replace(models, reward=folder, scale=ScoreScale(0.5, 2.0), pretraining=None)
    worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own)
    rollout = worker.sample(prompts, range(16))
    paid_BR, network = worker.scores(rollout), load_scalar_model(folder)
    totals = RewardModel.load(folder, steps=config.steps).score(worker.tokenizer, [], *rollout.token_lists())
    several = 0
    for row, (prompt, response) in enumerate(zip(*rollout.token_lists(), strict=True)):
        ending = [] if rollout.finished_B[row] else [worker.tokenizer.end_id]
        with torch.no_grad():
            chance_T = network(torch.tensor([[*prompt, *response, *ending]]))[0].sigmoid()
        ends = [*dict.fromkeys(step_ends(worker.tokenizer, [*response, *ending], SEPARATOR))]
        products = torch.cat([torch.zeros(1), chance_T[len(prompt) + torch.tensor(ends)].cumprod(0)])
        places = paid_BR[row].isfinite().nonzero()[:, 0].tolist()
        assert places == [min(end, len(response) - 1) for end in ends]
        torch.testing.assert_close(paid_BR[row, places], products.diff(), atol=1e-5, rtol=1e-5)
        assert totals[row] == pytest.approx(float(products[-1]), abs=1e-5)
        several += len(ends) > 1
    assert several > 5
    assert not worker.values(rollout).any()  # the model does not predict what later steps are paid
    worker.close()


def stepwise(models: InitialModels, tmp_path: Path) -> Path:
    """Returns a copy of the reward model that scores steps."""
    assert isinstance(models.reward, Path)
    folder = tmp_path / "stepwise"
    folder.mkdir()
    for path in models.reward.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    write_json(folder / "config.json", {**read_json(folder / "config.json"), STEP_SEPARATOR: SEPARATOR})
    return folder


def test_a_model_of_steps_is_not_read_as_one_of_responses(models: InitialModels, tmp_path: Path) -> None:
    folder = stepwise(models, tmp_path)
    with pytest.raises(ValueError, match="this reward model scores the steps of a response"):
        RewardModel.load(folder).score_sequences([[1, 2]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantage": {"kind": "group_mean", "samples_per_prompt": 4}, "loss": {"kind": "response"}}, "step to step"),
        ({"lora": {"rank": 2, "shared_body": True}}, "scores whole responses only"),
    ],
)
def test_what_does_not_go_with_steps_is_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ppo_config(ptx=None, reward={"steps": {}}, **changes)


# Two prompts with three responses of up to four tokens. The last response of the second prompt has no score.
REWARDS_BR = torch.tensor(
    [[1.0, 0, 2, 0], [0, 3, 0, 0], [-1, 1, 0, 4], [2, 0, 0, 0], [0, 0, 5, 0], [9, 9, 9, 9]], dtype=torch.float64
)
ENDS_BR = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
LENGTHS = (3, 2, 4, 1, 3, 4)
SCORED_B = torch.tensor([True] * 5 + [False])


def by_hand(*, leave_one_out: bool, scale: str) -> Tensor:
    """Advantages by loops over responses and steps."""
    found = torch.zeros(6, 4, dtype=torch.float64)
    for group in ([0, 1, 2], [3, 4]):
        steps = {row: [(t, float(REWARDS_BR[row, t])) for t in range(4) if ENDS_BR[row, t]] for row in group}
        everything = torch.tensor([reward for own in steps.values() for _, reward in own], dtype=torch.float64)
        std = float(everything.std()) if scale == "group" else 1.0
        for row in group:
            for t in range(4):
                number = sum(end < t for end, _ in steps[row])
                following = [reward for end, reward in steps[row] if end >= t]
                if leave_one_out:
                    others = [sum(r for _, r in steps[other][number:]) for other in group if other != row]
                    found[row, t] = (sum(following) - sum(others) / len(others)) / std
                else:
                    found[row, t] = sum((reward - float(everything.mean())) / std for reward in following)
    return found


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantages_of_steps_are_those_computed_by_hand(leave_one_out: bool, scale: str) -> None:
    steps = StepRewards(REWARDS_BR, ENDS_BR)
    found, counted = step_advantages(steps, SCORED_B, 3, leave_one_out=leave_one_out, scale=scale)  # type: ignore[arg-type]
    assert counted.tolist() == [True] * 5 + [False]
    torch.testing.assert_close(found, by_hand(leave_one_out=leave_one_out, scale=scale))


def test_a_single_step_per_response_is_an_outcome() -> None:
    """Then both baselines are those of whole responses."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(4) < torch.tensor([4, 2, 3, 1, 4, 3])[:, None]
    scores, last = torch.randn(6, generator=generator), mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    zeros = torch.zeros(6, 4)
    rewards, _ = token_rewards(scores, zeros, 0.1 * torch.randn(6, 4, generator=generator), mask, 0.5)
    steps = StepRewards(torch.where(last, scores[:, None], 0.0), last)
    for kind in (GroupMean, LeaveOneOut):
        for scale in ("none", "group"):
            baseline = kind(samples_per_prompt=3, scale=scale)  # type: ignore[arg-type]
            as_outcome = baseline.estimate(scores, rewards, zeros, mask)
            as_step = baseline.estimate(scores, rewards, zeros, mask, steps=steps)
            torch.testing.assert_close(as_step.advantages_BR, as_outcome.advantages_BR)
            assert torch.equal(as_step.counted_BR, as_outcome.counted_BR)


def test_gae_sees_steps_as_rewards_of_their_tokens() -> None:
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    zeros = torch.zeros(6, 4, dtype=torch.float64)
    rewards, _ = token_rewards(zeros[:, 0], zeros, zeros, mask, 0.0, torch.where(ENDS_BR, REWARDS_BR, 0.0))
    gae = GAE(value_optimizer=OptimizerConfig(learning_rate=1.0), scale="none", gae_lambda=1.0)
    found = gae.estimate(zeros[:, 0], rewards, zeros, mask)
    assert found.advantages_BR[2].tolist() == [4.0, 5.0, 4.0, 4.0]
