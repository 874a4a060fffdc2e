"""PPO's controller and learner without a value function: groups of samples, the KL in the loss, resuming."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.learner import Learner
from ppo.rank import InitialModels
from ppo.rollout import PolicyBatch, Rollout
from ppo.scorer import Asked
from tests.models import full_weights, load_language_model
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

Prompts = list[list[int]]
Start = Callable[..., tuple[OneRank, PPOController]]
Tables = dict[str, dict[str, object]]
RLOO: Tables = {"advantage": {"kind": "leave_one_out", "scale": "none", "samples_per_prompt": 4}}
OVERSAMPLED: Tables = {"advantage": {**RLOO["advantage"], "oversample": 2}}
GRPO: Tables = {
    "advantage": {"kind": "group_mean", "scale": "group", "samples_per_prompt": 4},
    "loss": {"token_weight": "per_response"},
    "kl": {"coef": 0.1, "kind": "loss"},
}
GSPO: Tables = {"advantage": GRPO["advantage"], "loss": {"kind": "response", "clip_range_high": 0.3}}
REINFORCE: Tables = {"advantage": {"kind": "none"}}


@pytest.fixture
def start(models: InitialModels, prompts: Prompts, ppo_config: Callable[..., PPOConfig]) -> Iterator[Start]:
    """Makes one rank with all roles and its controller, closed when the test ends."""
    workers: list[OneRank] = []

    def build(**changes: object) -> tuple[OneRank, PPOController]:
        config = ppo_config(**changes)
        engine = EngineConfig.model_validate({"precision": "fp32", "trackers": ()})
        workers.append(OneRank(config, engine, models))
        controller = PPOController(config, workers[-1].roles, prompts, models.scale, num_pretraining_rows=7, seed=5)
        return workers[-1], controller

    yield build
    for worker in workers:
        worker.close()


def recorded(worker: OneRank) -> list[PolicyBatch]:
    """Records the batches of the policy's updates from now on."""
    batches, update = list[PolicyBatch](), worker.roles.learners.update

    def record(method: object, batch: PolicyBatch, learning_rate: float, number: int) -> dict[str, float]:
        assert method is Learner.update_policy
        batches.append(batch)
        return update(Learner.update_policy, batch, learning_rate, number)

    worker.roles.learners.update = record  # type: ignore[assignment, method-assign]
    return batches


@pytest.mark.parametrize("changes", [RLOO, GRPO, GSPO, REINFORCE], ids=["rloo", "grpo", "gspo", "reinforce"])
def test_a_resumed_run_continues_with_the_same_bits(start: Start, tmp_path: Path, changes: dict[str, object]) -> None:
    """No value function is built, saved or reported, and the first ratio of an iteration is exactly 1."""
    whole, controller = start(**changes, num_epochs=1, minibatch=16)
    assert list(whole.learner.engines) == ["policy"]
    metrics = controller.step(0)
    assert metrics["ratio_error"] == 0
    assert not [name for name in metrics if "value" in name]
    assert ("informative_share" in metrics) == (changes is not REINFORCE)
    assert ("kl_loss" in metrics) == (changes is GRPO)
    whole.learner.save(tmp_path, 1, {}, {})
    whole.learner.finish_saving()
    evidence = controller.evidence
    assert sorted(path.name for path in (tmp_path / "step-000001").iterdir() if path.is_dir()) == ["average", "policy"]
    expected = controller.step(1)
    resumed, again = start(**changes, num_epochs=1, minibatch=16)
    resumed.roles.load(tmp_path / "step-000001")
    again.evidence = evidence
    assert again.step(1) == expected
    before = load_language_model(whole.models.sft).state_dict()
    for name, weight in full_weights(whole.learner.policy).items():
        assert torch.equal(full_weights(resumed.learner.policy)[name], weight)
        assert not torch.equal(weight, before[name])


def test_samples_of_a_prompt_are_neighbours_with_seeds_of_their_own(start: Start, prompts: Prompts) -> None:
    worker, controller = start(**RLOO, num_epochs=1)
    asked: list[tuple[list[int], list[int]]] = []
    sample = worker.roles.generators.start_sampling

    def record(rows: list[int], given: Prompts, seeds: list[int], *, again: bool = False) -> object:
        asked.append((rows, seeds))
        assert given == [prompts[row] for row in rows]
        return sample(rows, given, seeds, again=again)

    worker.roles.generators.start_sampling = record  # type: ignore[assignment, method-assign]
    for iteration in range(3):
        controller.step(iteration)
    rows = [row for found, _ in asked for row in found]
    assert len(rows) == 48
    assert all(len({*rows[at : at + 4]}) == 1 for at in range(0, 48, 4))
    assert len({*rows[::4]}) == 12, "an epoch visits every prompt once"
    seeds = [seed for _, found in asked for seed in found]
    assert len({*seeds}) == 48


def test_oversampling_keeps_the_first_groups_whose_scores_differ(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second prompt's responses have equal scores; with oversampling by 2, PPO learns from the other half."""

    def alike_for_even_prompts(rollout: Rollout) -> Callable[[], Tensor]:
        places = torch.arange(len(rollout))
        scores_B = torch.where(rollout.prompt_rows_B % 2 == 0, 1.0, 1.0 * places)
        return lambda: scores_B[:, None]

    found = []
    for _ in range(2):
        worker, controller = start(**OVERSAMPLED, num_epochs=1, minibatch=16, missing_eos_penalty=0.0)
        monkeypatch.setattr(worker.roles.scorers, "start_scores", alike_for_even_prompts)
        batches = recorded(worker)
        metrics = controller.step(0)
        (batch,) = batches
        found.append(batch.rollout.prompt_rows_B.tolist())
    expected = [row for row in controller.prompt_order.batch(0).tolist() if row % 2]
    num_odd = len(expected)
    assert metrics["sampled_informative_share"] == num_odd / 8
    assert metrics["informative_share"] == min(4, num_odd) / 4
    assert len(found[0]) == 16
    assert {*found[0]} >= {*expected[:4]}
    assert found[0] == found[1], "a function of the seeds"


def test_oversampling_checks_the_failures_among_all_that_are_sampled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of 32 are few enough; that both are among the 16 kept, where no group differs, stops nothing."""

    def failing(num_failed: int) -> Callable[[Rollout], Callable[[], Tensor]]:
        scores_B = torch.ones(32)
        scores_B[:num_failed] = torch.nan
        return lambda _rollout: lambda: scores_B[:, None]

    changes = {**OVERSAMPLED, "num_epochs": 1, "missing_eos_penalty": 0.0, "max_failed_share": 0.1}
    worker, controller = start(**changes)
    monkeypatch.setattr(worker.roles.scorers, "start_scores", failing(2))
    metrics = controller.step(0)
    assert (metrics["failed_scores"], metrics["sampled_informative_share"], metrics["policy_loss"]) == (2, 0, 0)
    monkeypatch.setattr(worker.roles.scorers, "start_scores", failing(4))
    with pytest.raises(ValueError, match="4 of 32 responses have no finite score"):
        controller.step(1)


def test_oversampling_keeps_scores_where_there_are_any(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring failed for the first half of the responses, and the scores of each group in the other half are equal: the
    other half is kept, not the first. If scoring failed for all, one line says so.
    """
    changes = {**OVERSAMPLED, "num_epochs": 1, "missing_eos_penalty": 0.0, "max_failed_share": 0.5}
    worker, controller = start(**changes)
    scores_B = torch.ones(32)
    scores_B[:16] = torch.nan
    monkeypatch.setattr(worker.roles.scorers, "start_scores", lambda _rollout: lambda: scores_B[:, None])
    metrics = controller.step(0)
    assert (metrics["failed_scores"], metrics["score"], metrics["policy_loss"]) == (0, 1, 0)
    scores_B[:] = torch.nan
    with pytest.raises(ValueError, match=r"32 of 32 responses have no finite score; ppo.max_failed_share allows 50%"):
        controller.step(1)


def test_a_group_is_compared_with_itself_whatever_the_minibatches_are(start: Start) -> None:
    """Advantages of each prompt's responses sum to 0, also where a minibatch has only some of them."""
    worker, controller = start(**RLOO, num_epochs=1, minibatch=8)
    batches = recorded(worker)
    metrics = controller.step(0)
    by_prompt: dict[int, list[float]] = {}
    truncated = [~batch.rollout.finished_B for batch in batches]
    assert any(bool(found_B.any()) for found_B in truncated)
    # A truncated response pays its penalty and is not masked as well.
    assert all(bool((batch.weight_BR[rows_B, 0] > 0).all()) for batch, rows_B in zip(batches, truncated, strict=True))
    for batch in batches:
        assert batch.num_tokens == int((batch.weight_BR > 0).sum())
        for row, advantage in zip(
            batch.rollout.prompt_rows_B.tolist(), batch.advantages_BR[:, 0].tolist(), strict=True
        ):
            by_prompt.setdefault(row, []).append(advantage)
    assert [len(found) for found in by_prompt.values()] == [4] * 4
    assert all(sum(found) == pytest.approx(0, abs=1e-5) for found in by_prompt.values())
    assert metrics["informative_share"] == 1
    # Advantages differ between groups, so no other group would match.
    assert any(abs(value) > 0.01 for found in by_prompt.values() for value in found)


def test_the_group_scale_divides_scaled_scores_and_not_the_kl(start: Start) -> None:
    """In the batch that PPO learns from: (s - mean) / std - β (KL - mean), s with the penalty for a missing EOS."""
    worker, controller = start(**GSPO, num_epochs=1, minibatch=16, learning_rate=1e-2, kl={"coef": 0.2})
    controller.step(0)
    metrics = controller.step(1)
    batch, penalty = controller.batch, worker.config.missing_eos_penalty
    assert batch is not None
    assert metrics["kl_nats"] > 0.01
    assert penalty > 0
    scores_GK = (worker.models.scale.apply(batch.scores_B) - penalty * ~batch.rollout.finished_B).view(-1, 4)
    kl_GK = batch.kl_B.view(-1, 4)
    above_GK = (scores_GK - scores_GK.mean(dim=1, keepdim=True)) / scores_GK.std(dim=1, keepdim=True)
    expected = above_GK - 0.2 * (kl_GK - kl_GK.mean(dim=1, keepdim=True))
    torch.testing.assert_close(batch.advantages_BR[:, 0], expected.flatten(), atol=1e-4, rtol=1e-4)


def test_failed_scores_count_nowhere(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group lost three of four responses and has no advantage; another one, whose baseline is of three."""
    worker, controller = start(**RLOO, num_epochs=1, minibatch=16, max_failed_share=0.5)
    score, failed = worker.scorer.scores, [0, 1, 2, 7]

    def failing(*given: object) -> Tensor:
        scores_BO = score(*given)  # type: ignore[arg-type]
        scores_BO[failed] = torch.nan
        return scores_BO

    batches = recorded(worker)
    # The rollout has the order of the passes; with one pass per rank that is the controller's order.
    monkeypatch.setattr(worker.roles.scorers, "start_scores", lambda rollout: lambda: failing(rollout, Asked()))
    metrics = controller.step(0)
    (batch,) = batches
    counted_B = (batch.weight_BR > 0).any(dim=1)
    assert (metrics["failed_scores"], int(counted_B.sum())) == (4, 16 - 4 - 1)
    assert metrics["informative_share"] == 0.75
    assert metrics["zero_variance_groups"] == 0
    by_prompt: dict[int, float] = {}
    for row, advantage in zip(batch.rollout.prompt_rows_B.tolist(), batch.advantages_BR[:, 0].tolist(), strict=True):
        by_prompt[row] = by_prompt.get(row, 0.0) + advantage
    assert list(by_prompt.values()) == pytest.approx([0] * 4, abs=1e-5)


def test_the_kl_in_the_loss_counts_groups_of_equal_scores(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no policy gradient, but their KL has one."""
    worker, controller = start(
        **{**GRPO, "kl": {"coef": 5.0, "kind": "loss"}}, num_epochs=1, minibatch=16, ptx=None, missing_eos_penalty=0.0
    )
    monkeypatch.setattr(worker.roles.scorers, "start_scores", lambda rollout: lambda: torch.ones(len(rollout), 1))
    with torch.no_grad():
        for parameter in worker.learner.policy.module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    worker.roles.sync_weights()
    batches = recorded(worker)
    metrics = controller.step(0)
    assert (metrics["zero_variance_groups"], metrics["policy_loss"]) == (4, 0)
    assert metrics["policy_gradient_norm"] > 0.1
    (batch,) = batches
    assert batch.kl is not None
    lengths_B = batch.rollout.response_tokens_B
    torch.testing.assert_close(batch.kl.weight_B, 5.0 / 16 / lengths_B)
    log_ratios_B = batch.logprobs_BR.sum(dim=1) - batch.kl.ref_logprob_B
    assert float(log_ratios_B.mean()) == pytest.approx(metrics["kl_nats"], rel=1e-4)
    assert metrics["kl_loss"] == pytest.approx(float((5.0 / 16 / lengths_B * log_ratios_B**2 / 2).sum()), rel=1e-4)


@pytest.mark.parametrize("micro", [1, 2, 16])
def test_an_update_equals_the_naive_one(start: Start, micro: int) -> None:
    """Gradients of GSPO with its upper clip and of the KL in the loss, sequence by sequence."""
    for changes in (GSPO, GRPO):
        worker, controller = start(**changes, minibatch=16, micro=micro, num_epochs=1, ptx=None, learning_rate=1e-2)
        controller.step(0)  # so that the KL is not 0
        kept: list[PolicyBatch] = []
        learners = worker.roles.learners
        update = learners.update

        def record(_method: object, batch: PolicyBatch, *_: object, kept: list[PolicyBatch] = kept) -> dict[str, float]:
            kept.append(batch)
            return {"ratio_error": 0.0, "policy_gradient_norm": 0.0}

        learners.update = record  # type: ignore[assignment, method-assign]
        controller.step(1)
        learners.update = update  # type: ignore[method-assign]
        (batch,) = kept
        # Old log-probabilities a little off, so that some ratios are clipped.
        shift_BR = 0.3 * torch.randn(batch.logprobs_BR.shape, generator=torch.Generator().manual_seed(2))
        batch = PolicyBatch(
            batch.rollout, batch.logprobs_BR + shift_BR, batch.advantages_BR, batch.weight_BR, batch.num_tokens,
            batch.ptx_rows, 0, kl=batch.kl,
        )  # fmt: skip
        naive = worker.learner.policy.module
        loss = naive_loss(worker.config, naive, batch)
        gradients = torch.autograd.grad(loss, list(naive.parameters()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        metrics = learners.update(Learner.update_policy, batch, 1e-2, 9)
        assert metrics["policy_loss"] + metrics.get("kl_loss", 0.0) == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["policy_gradient_norm"] == pytest.approx(float(norm), rel=1e-4)


def naive_loss(config: PPOConfig, model: torch.nn.Module, batch: PolicyBatch) -> Tensor:
    """The mean over counted responses of their gains, each a mean over its tokens, and of half their squared ratios."""
    losses, num_counted = [], int((batch.weight_BR > 0).any(dim=1).sum())
    prompts, responses = batch.rollout.token_lists()
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        logits_TV = model(torch.tensor([[*prompt, *response]]))[0] / config.temperature
        logprobs = [logits_TV[len(prompt) - 1 + t].log_softmax(-1)[token] for t, token in enumerate(response)]
        if batch.weight_BR[row, 0] > 0:
            log_ratios = [new - old for new, old in zip(logprobs, batch.logprobs_BR[row].tolist(), strict=False)]
            if config.loss.is_per_response:
                log_ratios = [sum(log_ratios, torch.zeros(())) / len(response)] * len(response)
            for log_ratio in log_ratios:
                ratio, advantage = log_ratio.exp(), batch.advantages_BR[row, 0]
                high = config.loss.clip_range_high or config.loss.clip_range
                clipped = ratio.clamp(1 - config.loss.clip_range, 1 + high)
                gain = torch.minimum(ratio * advantage, clipped * advantage)
                losses.append(-gain / len(response) / num_counted)
        if batch.kl is not None:
            log_ratio = sum(logprobs, torch.zeros(())) - batch.kl.ref_logprob_B[row]
            losses.append(config.kl.coef * log_ratio**2 / 2 / len(response) / len(batch.rollout))
    return torch.stack(losses).sum()
