"""A reward of several objectives: heads of one reward model, weighted, in one process and in groups of workers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale, value_source
from tests.models import load_scalar_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

ENGINE = EngineConfig(precision="fp32", trackers=())
WEIGHTS = {"brief": -0.5, "kind": 2.0}  # in another order than the heads'
Prompts = list[list[int]]
Start = Callable[..., OneRank]


@pytest.fixture
def start(two_objectives: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Start]:
    """Makes workers that are closed when the test ends; `models` replaces some of their models."""
    workers: list[OneRank] = []

    def build(weights: dict[str, float], models: dict[str, object], **changes: object) -> OneRank:
        config = ppo_config(reward={"objective_weights": weights}, ptx=None, **changes)
        given = replace(two_objectives, pretraining=None, **models)  # type: ignore[arg-type]
        workers.append(OneRank(config, ENGINE, given))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def controlled(worker: OneRank, prompts: Prompts) -> PPOController:
    return PPOController(worker.config, worker.roles, prompts, worker.models.scale, num_pretraining_rows=0, seed=5)


def test_scores_are_each_heads_and_first_values_their_weighted_sum(start: Start, prompts: Prompts) -> None:
    worker = start(WEIGHTS, {})
    rollout = worker.sample(prompts, range(16))
    scores_BO, values_BR = worker.scores(rollout), worker.values(rollout)
    model = load_scalar_model(worker.models.reward)  # type: ignore[arg-type]
    assert scores_BO.shape == (16, 2)
    for row, (prompt, response) in enumerate(zip(*rollout.token_lists(), strict=True)):
        ending = [] if rollout.finished_B[row] else [worker.tokenizer.end_id]
        with torch.no_grad():
            kind_T, brief_T = model(torch.tensor([[*prompt, *response, *ending]]))[0].T
        assert scores_BO[row].tolist() == pytest.approx([float(brief_T[-1]), float(kind_T[-1])], abs=1e-5)
        reward_T = (2 * kind_T - 0.5 * brief_T - 0.5) / 2.0  # in units of (score - mean) / std
        states = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        assert values_BR[row, : len(response)].tolist() == pytest.approx(reward_T[states].tolist(), abs=1e-5)


def test_the_reward_is_the_weighted_sum_and_each_score_is_logged(start: Start, prompts: Prompts) -> None:
    worker = start(WEIGHTS, {})
    controller = controlled(worker, prompts)
    controller.start_sampling(0)
    brief, kind = worker.scores(controller.in_flight[0]()).mean(dim=0).tolist()
    metrics = controller.step(0)
    assert metrics["score/brief"] == pytest.approx(brief, abs=1e-5)
    assert metrics["score/kind"] == pytest.approx(kind, abs=1e-5)
    assert metrics["score"] == pytest.approx(2 * kind - 0.5 * brief, abs=1e-5)
    assert metrics["scaled_score"] == pytest.approx((metrics["score"] - 0.5) / 2.0, abs=1e-5)
    assert worker.learner.value.module.labels == ("score",)  # one number, whatever the reward model has


@pytest.mark.parametrize(("weights", "sign"), [({"kind": 1.0, "brief": 0.25}, 1), ({"kind": 0.25, "brief": 1.0}, -1)])
def test_weights_decide_which_of_two_conflicting_objectives_is_climbed(
    start: Start, two_objectives: InitialModels, prompts: Prompts, tmp_path: Path, weights: dict[str, float], sign: int
) -> None:
    assert isinstance(two_objectives.reward, Path)
    model = load_scalar_model(two_objectives.reward)
    with torch.no_grad():
        model.score.weight[1] = -model.score.weight[0]
    save_model(tmp_path, model, model.state_dict(), Tokenizer.load(two_objectives.reward))
    models = {"reward": tmp_path, "scale": ScoreScale(0.0, 0.5)}
    worker = start(weights, models, learning_rate=2e-2, num_iterations=10, kl={"coef": 0.0}, missing_eos_penalty=0.0)
    controller = controlled(worker, prompts)
    metrics = [controller.step(iteration) for iteration in range(10)]
    kind, brief = (metrics[-1][f"score/{name}"] - metrics[0][f"score/{name}"] for name in ("kind", "brief"))
    assert sign * kind > 0.3
    assert sign * brief < -0.3


def test_a_text_that_does_not_fit_fails_by_every_objective(start: Start, prompts: Prompts) -> None:
    worker = start(WEIGHTS, {})
    too_long = [prompts[0][0]] * 60
    rollout = worker.sample([too_long[:58], prompts[0]], [0, 1])
    worker.scorer.judge.network.config = worker.scorer.judge.network.config.model_copy(
        update={"max_position_embeddings": 40}
    )  # type: ignore[union-attr]
    assert worker.scores(rollout).isnan().tolist() == [[True, True], [False, False]]
    assert "it has 65 tokens; the reward model reads at most 41" in worker.scorer.first_failure()


def test_a_number_that_is_no_token_of_the_reward_model_fails(start: Start, prompts: Prompts) -> None:
    """The policy's embeddings may be padded to more rows than the reward model's."""
    worker = start(WEIGHTS, {})
    rollout = worker.sample([prompts[0], prompts[1]], [0, 1])
    highest = max(map(max, rollout.token_lists()[1]))
    encoded = worker.scorer.judge.encoded(worker.tokenizer, [], *rollout.token_lists())
    has_it = [max(tokens) >= highest for tokens in encoded]
    worker.scorer.judge.network.config = worker.scorer.judge.network.config.model_copy(update={"vocab_size": highest})
    assert [all(row) for row in worker.scores(rollout).isnan().tolist()] == has_it
    assert "; the reward model knows those below " in worker.scorer.first_failure()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            {},
            r"this reward model has the objectives kind, brief, but weights are set for none; a weight for each of",
        ),
        ({"kind": 1.0, "terse": 1.0}, r"weights are set for kind, terse; a weight for each of kind, brief was"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    two_objectives: InitialModels, weights: dict[str, float], words: str
) -> None:
    models = two_objectives
    with pytest.raises(ValueError, match=words):
        value_source(models.sft, models.reward, weights, models.scale)


def test_one_objective_takes_no_weights(models: InitialModels) -> None:
    with pytest.raises(ValueError, match=r"reward model has one objective, but weights are set for kind; no weights"):
        value_source(models.sft, models.reward, {"kind": 1.0}, models.scale)
    value = load(value_source(models.sft, models.reward, {}, ScoreScale(0.0, 1.0)))
    assert isinstance(models.reward, Path)
    plain = load_scalar_model(models.reward)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(value.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"objective_weights": {"kind": float("inf")}}, r"objective_weights.kind\n.*finite number"),
        ({"objective_weights": {"kind": "much"}}, r"objective_weights.kind\n.*valid number"),
        (
            {"kind": "function", "function": "rewards.py:score", "objective_weights": {"kind": 1.0}},
            r"reward.function.objective_weights\n.*not permitted",
        ),
    ],
)
def test_a_config_of_other_weights_is_refused(
    ppo_config: Callable[..., PPOConfig], reward: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ppo_config(reward=reward)
