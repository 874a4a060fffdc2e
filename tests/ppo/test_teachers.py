"""On-policy distillation: teachers' terms by hand, what teachers do to rewards and advantages, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels, ScoreScale, value_source
from ppo.rollout import PPOBatch, Rollout
from tests.models import load_language_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

Start = Callable[..., tuple[PPOController, OneRank]]
PLAIN = {"kind": "none", "scale": "none"}
ALONE: dict[str, object] = {"reward": {"kind": "none"}, "kl": {"coef": 0.0}, "missing_eos_penalty": 0.0, "ptx": None}


@pytest.fixture
def start_with(
    models: InitialModels, teachers: tuple[Path, ...], prompts: list[list[int]], ppo_config: Callable[..., PPOConfig]
) -> Start:
    """A controller on one rank that learns from `teachers` of these weights and kinds, and from nothing else."""

    def build(
        *given: tuple[float, str], folders: tuple[Path, ...] = teachers, precision: str = "fp32", **changes: object
    ) -> tuple[PPOController, OneRank]:
        folders = folders[: len(given)]
        tables = [
            {"model": str(folder), "weight": weight, "kind": kind, "name": folder.name}
            for folder, (weight, kind) in zip(folders, given, strict=True)
        ]
        config = ppo_config(**{**ALONE, "advantage": PLAIN, "teachers": tables, **changes})
        judge = config.external_reward or models.reward
        own = replace(models, reward=judge, scale=ScoreScale(0.0, 1.0), teachers=folders)
        engine = EngineConfig.model_validate({"precision": precision, "trackers": ()})
        worker = OneRank(config, engine, own, [[{"role": "user", "content": "the cat"}]] * len(prompts))
        return PPOController(config, worker.roles, prompts, own.scale, num_pretraining_rows=0, seed=5), worker

    return build


def log_ratio(folder: Path, worker: OneRank, batch: PPOBatch) -> Tensor:
    """log π_T - log π of each response token [B, R], one sequence at a time without a cache; 0 at padding."""
    model, rollout = load_language_model(folder), batch.rollout
    found = torch.zeros_like(batch.logprobs_BR)
    for row, (prompt, response) in enumerate(zip(*rollout.token_lists(), strict=True)):
        with torch.no_grad():
            logprobs = (model(torch.tensor([[*prompt, *response]]))[0] / worker.config.temperature).log_softmax(-1)
        for place, token in enumerate(response):
            found[row, place] = logprobs[len(prompt) + place - 1, token] - batch.logprobs_BR[row, place]
    return found


def step_of(controller: PPOController) -> tuple[PPOBatch, dict[str, float]]:
    metrics = controller.step(0)
    assert controller.batch is not None
    return controller.batch, metrics


@pytest.mark.parametrize("kind", ["token", "reward"])
def test_without_a_score_advantages_are_the_teachers_terms(
    start_with: Start, teachers: tuple[Path, ...], kind: str
) -> None:
    controller, worker = start_with((0.5, kind))
    batch, metrics = step_of(controller)
    ratio_BR = log_ratio(teachers[0], worker, batch)
    expected_BR = 0.5 * ratio_BR
    if kind == "reward":  # the sum from the token to the end of the response
        expected_BR = torch.stack([expected_BR[:, t:].sum(dim=1) for t in range(expected_BR.shape[1])], dim=1)
    mask_BR = batch.rollout.response_mask_BR
    torch.testing.assert_close(batch.advantages_BR, torch.where(mask_BR, expected_BR, 0.0), atol=2e-5, rtol=1e-5)
    assert batch.rewards_BR.any() == (kind == "reward")
    assert metrics["teacher_kl_nats"] == pytest.approx(-float(ratio_BR.sum(dim=1).mean()), rel=1e-4)
    assert metrics["teacher_kl_nats"] > 0.1
    assert not {"score", "scaled_score"} & metrics.keys()
    worker.close()


@pytest.mark.parametrize("kind", ["token", "reward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_teacher_equal_to_the_policy_teaches_nothing(
    start_with: Start, models: InitialModels, kind: str, precision: str
) -> None:
    controller, worker = start_with((1.0, kind), folders=(models.sft,), precision=precision, num_epochs=1, minibatch=16)
    before = {name: weight.clone() for name, weight in worker.learner.policy.module.state_dict().items()}
    batch, metrics = step_of(controller)
    assert metrics["teacher_kl_nats"] == 0.0
    assert not batch.advantages_BR.any()
    assert all(torch.equal(weight, before[name]) for name, weight in worker.learner.policy.module.state_dict().items())
    worker.close()


def test_several_teachers_add_up_and_have_metrics_of_their_own(start_with: Start, teachers: tuple[Path, ...]) -> None:
    controller, worker = start_with((0.5, "token"), (2.0, "reward"))
    batch, metrics = step_of(controller)
    first_BR, second_BR = (log_ratio(folder, worker, batch) for folder in teachers)
    torch.testing.assert_close(batch.teacher_BR, 0.5 * first_BR + 2 * second_BR, atol=5e-5, rtol=1e-5)
    later_BR = 2 * torch.stack([second_BR[:, t:].sum(dim=1) for t in range(second_BR.shape[1])], dim=1)
    expected_BR = torch.where(batch.rollout.response_mask_BR, 0.5 * first_BR + later_BR, 0.0)
    torch.testing.assert_close(batch.advantages_BR, expected_BR, atol=1e-4, rtol=1e-5)
    for folder, ratio_BR in zip(teachers, (first_BR, second_BR), strict=True):
        assert metrics[f"teacher_kl_nats/{folder.name}"] == pytest.approx(-float(ratio_BR.sum(dim=1).mean()), rel=1e-4)
    assert "teacher_kl_nats" not in metrics
    worker.close()


def test_the_kl_from_the_teacher_falls_per_token_or_per_response(start_with: Start) -> None:
    """The kind "reward" lowers the KL of whole responses, at first by ending them early. The kind "token" ignores what
    follows, so it lowers the KL of each token (docs/distillation.md).
    """
    for kind in ("token", "reward"):
        scaled = {"kind": "none", "scale": "batch"}
        sizes = {"num_iterations": 8, "rollout_batch_size": 64, "minibatch": 32}
        controller, worker = start_with((1.0, kind), advantage=scaled, learning_rate=1e-2, **sizes)
        found = [controller.step(iteration) for iteration in range(8)]
        lengths = [line["response_tokens"] for line in found]
        kls = [line["teacher_kl_nats"] for line in found]
        if kind == "token":
            kls = [kl / length for kl, length in zip(kls, lengths, strict=True)]
        assert kls[-1] < 0.7 * kls[0], (kind, kls)
        assert (lengths[-1] < 0.5 * lengths[0]) == (kind == "reward"), (kind, lengths)
        worker.close()


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_of_equal_scores_learn_from_a_teacher(start_with: Start, teachers: tuple[Path, ...], scale: str) -> None:
    """The term of the kind "token" has no baseline. Scaling by the batch covers it, as it covers scores."""
    advantage = {"kind": "leave_one_out", "samples_per_prompt": 2, "scale": scale}
    controller, worker = start_with((1.0, "token"), advantage=advantage)
    batch, metrics = step_of(controller)
    mask_BR = batch.rollout.response_mask_BR
    assert metrics["zero_variance_groups"] == 8
    assert torch.equal(batch.counted_BR, mask_BR)
    expected_BR = log_ratio(teachers[0], worker, batch)
    if scale == "batch":
        counted_C = expected_BR[mask_BR]
        expected_BR = torch.where(mask_BR, (expected_BR - counted_C.mean()) / counted_C.std(correction=0), 0.0)
    torch.testing.assert_close(batch.advantages_BR, expected_BR, atol=5e-5, rtol=1e-4)
    worker.close()


def test_the_score_has_the_weight_of_score_coef(start_with: Start, models: InitialModels) -> None:
    """In rewards and in the initial value function, which predicts them."""
    batches = {}
    for coef in (1.0, 0.25, 0.0):
        controller, worker = start_with((1.0, "token"), reward={"kind": "model"}, score_coef=coef)
        controller.scale = replace(models.scale, coef=coef)
        batches[coef], metrics = step_of(controller)
        expected = coef * (metrics["score"] - models.scale.mean) / models.scale.std
        assert metrics["scaled_score"] == pytest.approx(expected, rel=1e-5, abs=1e-9)
        worker.close()
    torch.testing.assert_close(batches[0.25].rewards_BR, 0.25 * batches[1.0].rewards_BR)
    assert not batches[0.0].rewards_BR.any()
    assert batches[0.0].scores_B.any()
    heads = {
        coef: dict(value_source(models.sft, models.reward, {}, replace(models.scale, coef=coef)).tensors())
        for coef in (1.0, 0.25)
    }
    for name in ("score.weight", "bias"):
        torch.testing.assert_close(heads[0.25][name], 0.25 * heads[1.0][name])


def rollout_of(worker: OneRank, prompts: list[list[int]]) -> tuple[Rollout, list[Tensor]]:
    rollout = worker.sample(prompts, range(16))
    return rollout, [torch.arange(16)]


def test_memory_modes_and_adapters_change_no_bit_of_a_teachers_log_probs(
    start_with: Start, prompts: list[list[int]]
) -> None:
    found = []
    kinds = ((1.0, "token"), (1.0, "token"))
    for changes in ({}, {"memory": "balanced"}, {"memory": "small"}, {"lora": {"rank": 3, "alpha": 6.0}}):
        _, worker = start_with(*kinds, **changes)
        found.append(worker.roles.start_forward_passes(*rollout_of(worker, prompts))().teacher_logprobs_BMR)
        worker.close()
    assert found[0].shape == (16, 2, 6)
    assert all(torch.equal(found[0], other) for other in found)
    assert not torch.equal(found[0][:, 0], found[0][:, 1])


def test_a_policy_with_adapters_learns_from_a_teacher(start_with: Start) -> None:
    controller, worker = start_with(
        (1.0, "reward"), lora={"rank": 3, "alpha": 6.0}, learning_rate=3e-2, advantage={"kind": "none"}
    )
    kls = [controller.step(iteration)["teacher_kl_nats"] for iteration in range(3)]
    assert kls[-1] < 0.8 * kls[0], kls
    worker.close()


TEACHER = {"model": "somewhere"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teachers": [{"model": "x", "weight": -1.0}]}, r"teachers.0.weight\n.*greater than 0"),
        ({"teachers": [{"model": ""}]}, r"teachers.0.model\n.*pattern"),
        ({"teachers": [{"model": "x", "kind": "loss"}]}, r"teachers.0.kind\n.*'reward' or 'token'"),
        ({"score_coef": -1.0}, r"score_coef\n.*greater than or equal to 0"),
        ({"score_coef": 0.0}, "score_coef 0 leaves nothing to learn from; `teachers`, or more than 0, was expected"),
        ({"reward": {"kind": "none"}}, 'reward.kind "none" leaves nothing to learn from; `teachers`, or another kind'),
        ({"teachers": [{"model": "x", "name": "2"}, {"model": "y"}]}, "teachers are called 2, 2; a different `name`"),
        (
            {"teachers": [TEACHER], "lora": {"rank": 1, "shared_body": True}},
            "lora.shared_body holds one body, but teachers have bodies of their own",
        ),
        (
            {
                "teachers": [TEACHER],
                "loss": {"kind": "response"},
                "advantage": {"kind": "group_mean", "samples_per_prompt": 2},
            },
            "loss.kind 'response' has one ratio per response, but a teacher of kind \"token\"",
        ),
        (
            {"score_coef": 0.5, "advantage": {"kind": "group_mean", "samples_per_prompt": 2, "scale": "group"}},
            'score_coef 0.5 with advantage.scale "group", which divides scores by their spread',
        ),
        (
            {
                "teachers": [TEACHER],
                "reward": {"kind": "none"},
                "advantage": {"kind": "group_mean", "samples_per_prompt": 2, "oversample": 2},
            },
            "advantage.oversample 2.0 keeps prompts whose responses' scores differ, but the score has no weight",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ppo_config(**changes)
