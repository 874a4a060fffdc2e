"""Conversations in placement `continuous`, in this process: how fast an environment is, a kill and new sessions change
no bit, and what is learned from is what a plain pass reads.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.model import LanguageModel
from lm.sampling import token_logprobs
from lm.source import load
from lm.weights import ModelFolder
from ppo import loop
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.roles import Roles
from ppo.rollout import FAILURES, Rollout
from ppo.rounds import Unfinished
from reward.external import NoReward
from stages.data import Fitting
from tests.ppo.environments.test_runs import ASKED, ENGINE
from tests.ppo.test_ppo_stage import Killed, make_mortal, same_weights_and_log
from training.config import EngineConfig
from training.data import Prompt
from training.engine import StageContext

# A session counts its turns, begins every third conversation with a message, and breaks in the second turn of every
# fifth. The slow tool takes longer in every other turn.
CLASS = """
import time
from ppo.environments.environment import Environment, Episode, Reply

class Counter(Environment):
    seconds: float = 0.0

    def open(self, conversation, row, seed):
        return Counting(self.seconds, seed)

class Counting(Episode):
    def __init__(self, seconds, seed):
        self.seconds, self.seed, self.turns = seconds, seed, 0

    async def begin(self):
        return [{"role": "user", "content": "the hills"}] if self.seed % 3 == 0 else ()

    async def reply(self, message):
        self.turns += 1
        time.sleep(self.seconds * ((self.seed + self.turns) % 2))
        if self.seed % 5 == 0 and self.turns == 2:
            raise RuntimeError("the counter is gone")
        vowels = sum(message.text.count(vowel) for vowel in "aeiou")
        said = " ".join(["cat", "bird"][: 1 + (vowels + self.turns) % 2])
        return Reply([{"role": "user", "content": said}], reward=vowels / 4, is_over=vowels > 6)

    async def score(self):
        return self.turns / 2
"""


@pytest.fixture
def setup(
    one_objective: InitialModels, ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> Callable[..., tuple[PPOConfig, InitialModels]]:
    (tmp_path / "counter.py").write_text(CLASS)

    def build(seconds: float = 0.0, **changes: Any) -> tuple[PPOConfig, InitialModels]:
        own = {"kind": "class", "class_name": f"{tmp_path}/counter.py:Counter", "max_turns": 3}
        values = {
            "environment": {**own, "settings": {"seconds": seconds}},
            "reward": {"kind": "none"},
            "max_new_tokens": 30,
            "max_failed_share": 0.9,
            "num_epochs": 1,
            "num_iterations": 4,
            "placement": {"kind": "continuous", "num_rows": 10, "round_tokens": 3},
        }
        config = ppo_config(**{**values, **changes})
        return config, replace(one_objective, reward=NoReward(), scale=ScoreScale(0.0, 1.0, config.score_coef))

    return build


def trained(
    config: PPOConfig, models: InitialModels, prompts: list[list[int]]
) -> list[tuple[Rollout, dict[str, float]]]:
    roles = Roles.in_process(config, ENGINE, models, ASKED)
    controller = PPOController(config, roles, prompts, models.scale, num_pretraining_rows=5, seed=3)
    found = list[tuple[Rollout, dict[str, float]]]()
    for iteration in range(config.num_iterations):
        metrics = controller.step(iteration)
        assert controller.batch is not None
        found.append((controller.batch.rollout, metrics))
    roles.close()
    return found


@pytest.mark.long
def test_slow_tools_change_no_bit(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]]
) -> None:
    (config, models), (slow, _) = setup(num_iterations=3), setup(seconds=0.02, num_iterations=3)
    fast = trained(config, models, prompts)
    for (rollout, metrics), (other, other_metrics) in zip(fast, trained(slow, models, prompts), strict=True):
        for name, tensor in rollout.tensors().items():
            assert name == "environment_seconds_B" or torch.equal(tensor, other.tensors()[name]), name
        del metrics["environment_seconds"], other_metrics["environment_seconds"]
        assert metrics == other_metrics
    failed = [float((rollout.failure_B == FAILURES.index("error")).float().mean()) for rollout, _ in fast]
    assert 0 < sum(failed) < len(failed)
    assert fast[-1][1]["continued_share"] > 0
    assert fast[-1][1]["turns"] > 1


def test_only_tokens_of_the_policy_are_learned_from_and_each_is_its_weights(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]]
) -> None:
    """The first batch is all of the initial weights: each token against a plain pass over its conversation."""
    config, models = setup(num_iterations=2)
    rollout, _ = trained(config, models, prompts)[0]
    model = load(ModelFolder(models.sft, LanguageModel))
    between_BR = ~rollout.written_BR & (torch.arange(30) < rollout.response_tokens_B[:, None])
    assert int(between_BR.sum()) > 0
    assert (rollout.sampled_by_BR[rollout.written_BR] != 0).all()
    for values_BR in (rollout.sampled_by_BR, rollout.behaviour_logprobs_BR, rollout.turn_rewards_BR):
        assert (values_BR[~rollout.written_BR] == 0).all()
    for row in range(len(rollout)):
        length, prompt = int(rollout.num_tokens_B[row]), int(rollout.prompt_tokens_B[row])
        with torch.no_grad():
            logits_TV = model(rollout.tokens_BT[row : row + 1, :length])[0]
        expected = token_logprobs(logits_TV[:-1], rollout.tokens_BT[row, 1:length], config.temperature)[prompt - 1 :]
        own, found = rollout.written_BR[row, : length - prompt], rollout.behaviour_logprobs_BR[row, : length - prompt]
        torch.testing.assert_close(found[own], expected[own], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_killed_run_ends_like_an_uninterrupted_run(
    setup: Callable[..., tuple[PPOConfig, InitialModels]], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Its checkpoint has conversations that wait for answers; new sessions get their turns again."""
    config, models = setup(save_every_iterations=1)
    asked = [Prompt(prompt_id=str(i), messages=tuple(messages), kind="") for i, messages in enumerate(ASKED)]

    def run(name: str, change: Callable[[Roles], None] = lambda _roles: None) -> None:
        roles = Roles.in_process(config, ENGINE, models, ASKED)
        change(roles)
        context = StageContext(tmp_path / name, 11, 1, EngineConfig.model_validate(ENGINE.model_dump()))
        try:
            loop.train(context, config, roles, models, Fitting(asked, prompts))
        finally:
            roles.close()

    run("whole")
    with pytest.raises(Killed):
        run("killed", make_mortal)
    saved = (tmp_path / "killed" / "checkpoints" / "step-000002" / loop.UNFINISHED).read_bytes()
    left, waiting = Unfinished.from_bytes(saved), set[int]()
    waiting.update(*left.schedule.answered)
    assert max(len(one.end_turn().parts()) for one in left.responses if one.number in waiting) > 1
    run("killed")
    same_weights_and_log(tmp_path / "whole", tmp_path / "killed", num_iterations=4)
    whole, killed = ((tmp_path / name / "rollouts.jsonl").read_text() for name in ("whole", "killed"))
    assert whole == killed
    assert any("@" in digest for line in whole.splitlines() for digest in json.loads(line)["sampled_by"])
