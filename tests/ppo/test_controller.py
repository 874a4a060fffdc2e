"""The controller with toy roles: a policy with two tokens and one probability, scored by how often it says GOOD."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cluster.remote import Pending
from lm.samplers.draws import NO_EVIDENCE, Evidence
from ppo.config import PPOConfig
from ppo.controller import MissingScoresError, PPOController
from ppo.rank import ScoreScale
from ppo.roles import ModelOutputs
from ppo.rollout import PolicyBatch, Rollout, ValueBatch
from training.checkpoint import changed_files
from training.notices import RunError

GOOD, R = 1, 4  # the other token is 0
SCALE = ScoreScale(0.5, 0.25)
PROMPTS = [[7] * (1 + i % 3) for i in range(24)]


class ToyRoles:
    """Stands for `ppo.roles.Roles` and each role in it: log odds of GOOD, the same at every token, and one constant as
    the value.
    """

    def __init__(self, *, rate: float = 0.1) -> None:
        self.odds, self.value = torch.zeros(2), torch.zeros(())
        self.sent_odds, self.rate = self.odds, rate
        self.policy_batches: list[PolicyBatch] = []
        self.value_batches: list[ValueBatch] = []
        self.rollouts: list[Rollout] = []
        self.kept: list[bool] = []  # whether passes were to be kept for the first update, by iteration
        self.learning_rates: list[float] = []
        self.num_syncs, self.syncs_before_rollout = 0, list[int]()
        self.learners = self.generators = self.scorers = self

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> Pending[Rollout]:
        """Like a generator with a queue: a rollout begun now uses the weights sent last, whenever it is fetched."""
        chance = float(self.sent_odds.softmax(0)[GOOD])
        draws = [np.random.default_rng(seed).random(R) < chance for seed in seeds]
        # Even seeds give short responses that end with EOS, odd ones responses that are truncated.
        lengths = [R - 1 if seed % 2 == 0 else R for seed in seeds]
        responses = [draw[:length].astype(int).tolist() for draw, length in zip(draws, lengths, strict=True)]
        finished = [seed % 2 == 0 for seed in seeds]
        logprobs = [self.sent_odds.log_softmax(0)[response].tolist() for response in responses]
        rollout = Rollout.of(rows, prompts, responses, finished, logprobs, max_new_tokens=R, pad_id=9)
        self.rollouts.append(rollout)
        self.syncs_before_rollout.append(self.num_syncs)
        return lambda: rollout

    def sent_digests(self) -> dict[str, int]:
        return {}

    def mend(self) -> None:
        """Has nothing that may be lost."""

    def take_evidence(self) -> Evidence:
        return NO_EVIDENCE

    def first_failure(self) -> str:
        return "the endpoint is asleep"

    def scores(self, rollout: Rollout) -> Tensor:
        mask = rollout.response_mask_BR
        return (((rollout.response_BR == GOOD) & mask).sum(dim=1) / mask.sum(dim=1))[:, None]

    def _logprobs(self, odds: Tensor, rollout: Rollout) -> Tensor:
        tokens = torch.where(rollout.response_mask_BR, rollout.response_BR, 0)
        return odds.log_softmax(0)[tokens] * rollout.response_mask_BR

    def start_scores(self, rollout: Rollout) -> Pending[Tensor]:
        return lambda: self.scores(rollout)

    def start_reference_logprobs(self, rollout: Rollout, _minibatches: Sequence[Tensor]) -> Pending[Tensor]:
        return lambda: self.reference_logprobs(rollout)

    def start_policy_logprobs(
        self, rollout: Rollout, _minibatches: Sequence[Tensor], *, tests_draws: bool = False
    ) -> Pending[Tensor]:
        del tests_draws
        return lambda: self.policy_logprobs(rollout)

    def start_forward_passes(
        self, rollout: Rollout, _minibatches: Sequence[Tensor], *, keeps: bool, tests_draws: bool
    ) -> Pending[ModelOutputs]:
        del tests_draws  # toy models have no logits
        self.kept.append(keeps)
        found = self.policy_logprobs(rollout), self.reference_logprobs(rollout), self.values(rollout)
        return lambda: ModelOutputs(*found, teacher_logprobs_BMR=torch.zeros(len(rollout), 0, R))

    def values(self, rollout: Rollout) -> Tensor:
        return self.value * rollout.response_mask_BR

    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        return self._logprobs(torch.zeros(2), rollout)

    def policy_logprobs(self, rollout: Rollout) -> Tensor:
        return self._logprobs(self.odds, rollout)

    def update(
        self,
        method: Callable[..., Mapping[str, float]],
        batch: PolicyBatch | ValueBatch,
        learning_rate: float,
        update: int,
    ) -> Mapping[str, float]:
        own: Mapping[str, float] = getattr(self, method.__name__)(batch, learning_rate, update)
        return own

    def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
        assert update == len(self.policy_batches)
        self.policy_batches.append(batch)
        self.learning_rates.append(learning_rate)
        odds = self.odds.clone().requires_grad_()
        ratio = (self._logprobs(odds, batch.rollout) - batch.logprobs_BR).exp()
        (-(ratio * batch.advantages_BR * batch.weight_BR).sum() / batch.num_tokens).backward()
        assert odds.grad is not None
        self.odds = self.odds - self.rate * odds.grad
        error = ((ratio - 1).abs() * (batch.weight_BR > 0)).sum() / batch.num_tokens
        return {"ratio_error": error.item(), "policy_loss": float(update)}

    def update_value(self, batch: ValueBatch, _learning_rate: float, update: int) -> Mapping[str, float]:
        assert update == len(self.value_batches)
        self.value_batches.append(batch)
        self.value = self.value + 0.1 * (batch.returns_BR[batch.mask_BR].mean() - self.value)
        return {"value_loss": 0.0}

    def sync_weights(self) -> None:
        self.num_syncs += 1
        self.sent_odds = self.odds

    def export_policy(self, folder: Path) -> None:
        raise NotImplementedError

    def save(
        self, checkpoints: Path, _iteration: int, _progress: Mapping[str, float], _files: Mapping[str, bytes]
    ) -> None:
        (checkpoints / "toy.json").write_text(
            json.dumps([self.odds.tolist(), float(self.value), len(self.policy_batches)])
        )

    def finish_saving(self) -> None:
        pass

    def changed_files(self, folder: Path, sha256: Mapping[str, str]) -> list[str]:
        return changed_files(folder, sha256)

    def load(self, folder: Path) -> None:
        odds, value, updates = json.loads((folder / "toy.json").read_text())
        self.odds, self.value = torch.tensor(odds), torch.tensor(value)
        self.sent_odds = self.odds
        self.policy_batches, self.value_batches = [None] * updates, [None] * updates  # type: ignore[list-item]


class FailingScores(ToyRoles):
    """The first `num_failing` responses of every batch have no score."""

    def __init__(self, num_failing: int, *, failure: float = math.nan) -> None:
        super().__init__()
        self.num_failing, self.failure = num_failing, failure

    def scores(self, rollout: Rollout) -> Tensor:
        scores = super().scores(rollout)
        scores[: self.num_failing] = self.failure
        return scores


@pytest.fixture
def start(ppo_config: Callable[..., PPOConfig]) -> Callable[..., PPOController]:
    def build(roles: ToyRoles, *, seed: int = 3, scale: ScoreScale = SCALE, **changes: object) -> PPOController:
        values = {"ptx": None, "max_new_tokens": R, "missing_eos_penalty": 0.0, **changes}
        return PPOController(ppo_config(**values), roles, PROMPTS, scale, num_pretraining_rows=7, seed=seed)

    return build


def test_the_score_rises(start: Callable[..., PPOController]) -> None:
    roles = ToyRoles(rate=0.5)
    controller = start(roles, num_iterations=15, kl={"coef": 0.01})
    scores, kls = [], []
    for iteration in range(15):
        metrics = controller.step(iteration)
        scores.append(metrics["score"])
        kls.append(metrics["kl_nats"])
    assert scores[0] == pytest.approx(0.5, abs=0.15)
    assert np.mean(scores[-3:]) > 0.9
    assert kls[0] == 0.0
    assert np.mean(kls[-3:]) > 0.5
    assert roles.num_syncs == 15


def test_the_first_iteration_and_every_16th_after_it_measure_twice(start: Callable[..., PPOController]) -> None:
    """What an iteration does depends on its number alone, so a resumed run does the same."""
    roles = ToyRoles()
    controller = start(roles, num_iterations=33)
    for iteration in range(33):
        controller.step(iteration)
    assert [iteration for iteration, keeps in enumerate(roles.kept) if not keeps] == [0, 16, 32]


def test_a_large_kl_coefficient_holds_the_policy_back(start: Callable[..., PPOController]) -> None:
    free, held = ToyRoles(rate=0.5), ToyRoles(rate=0.5)
    for roles, kl_coef in ((free, 0.0), (held, 50.0)):
        controller = start(roles, num_iterations=8, kl={"coef": kl_coef})
        for iteration in range(8):
            controller.step(iteration)
    chance = [float(roles.odds.softmax(0)[GOOD]) for roles in (free, held)]
    assert chance[0] > chance[1] + 0.1


@pytest.mark.parametrize("failure", [math.nan, math.inf])
def test_failed_scores_are_masked_and_counted(start: Callable[..., PPOController], failure: float) -> None:
    roles = FailingScores(3, failure=failure)
    controller = start(roles, max_failed_share=0.25, num_epochs=1, minibatch=16, micro=16, kl={"coef": 0.2})
    metrics = controller.step(0)
    rollout, batch, values = roles.rollouts[0], roles.policy_batches[0], roles.value_batches[0]
    assert metrics["failed_scores"] == 3
    good = ToyRoles().scores(rollout)[3:]
    assert metrics["score"] == pytest.approx(float(good.mean()))
    assert metrics["scaled_score"] == pytest.approx(float((good.mean() - 0.5) / 0.25), rel=1e-5)
    # The minibatch is a shuffle of the rollout; the failed responses are the ones whose mask is empty.
    masked = [row for row in range(16) if not bool(batch.weight_BR[row].any())]
    assert len(masked) == 3
    assert batch.num_tokens == int(rollout.response_tokens_B[3:].sum()) == int(batch.weight_BR.sum())
    assert not values.mask_BR[masked].any()
    # With a value of 0, a discount of 1 and no KL yet, the last token's return is the scaled score itself.
    for row in set(range(16)) - set(masked):
        tokens = batch.rollout.response_BR[row][values.mask_BR[row]].tolist()
        last = len(tokens) - 1
        assert float(values.returns_BR[row, last]) == pytest.approx((np.mean(tokens) - 0.5) / 0.25, rel=1e-5)
    counted = batch.advantages_BR[values.mask_BR]
    assert float(counted.mean()) == pytest.approx(0, abs=1e-5)
    assert float(counted.std(correction=0)) == pytest.approx(1, rel=1e-4)
    assert all(bool(torch.isfinite(t).all()) for t in (batch.advantages_BR, values.returns_BR, roles.odds))


def test_a_failed_score_is_not_a_score_of_zero(start: Callable[..., PPOController]) -> None:
    # With a mean score far from 0, a failure that counted as 0 would move the policy a lot.
    class Shifted(FailingScores):
        def scores(self, rollout: Rollout) -> Tensor:
            return super().scores(rollout) + 100

    updated = []
    for failure in (math.nan, -100.0):  # the second is finite: a score of 0 after the shift
        roles = Shifted(1, failure=failure)
        metrics = start(roles, scale=ScoreScale(100.5, 0.25)).step(0)
        updated.append((metrics["score"], roles.odds.tolist()))
    assert updated[0][0] > 100
    assert updated[1][0] < 95
    assert updated[0][1] != updated[1][1]


def test_too_many_failed_scores_stop_the_run(start: Callable[..., PPOController]) -> None:
    roles = FailingScores(5)
    controller = start(roles, max_failed_share=0.25)
    evidence = controller.evidence
    said = r"5 of 16 responses .* allows 25%. The same command continues after iteration 0. The first: the endpoint is"
    with pytest.raises(MissingScoresError, match=said):
        controller.step(0)
    assert roles.policy_batches == []  # before any weight changed
    assert (controller.evidence, [*controller.in_flight]) == (evidence, [0])  # as a checkpoint needs them
    start(FailingScores(4), max_failed_share=0.25).step(0)


@pytest.mark.parametrize("shift", [0.1, -0.1, math.nan])
def test_an_update_that_finds_another_policy_is_found_out(start: Callable[..., PPOController], shift: float) -> None:
    class Lying(ToyRoles):
        def update_policy(self, batch: PolicyBatch, learning_rate: float, update: int) -> Mapping[str, float]:
            moved = batch.logprobs_BR + shift * batch.rollout.response_mask_BR
            return super().update_policy(replace(batch, logprobs_BR=moved), learning_rate, update)

    with pytest.raises(RunError, match=r"iteration 1: \|ratio - 1\| is .* before the policy has changed"):
        start(Lying()).step(0)


def test_rewards_subtract_the_kl_and_the_missing_end(start: Callable[..., PPOController]) -> None:
    class Moved(ToyRoles):
        def reference_logprobs(self, rollout: Rollout) -> Tensor:
            return super().reference_logprobs(rollout) - 0.5 * rollout.response_mask_BR

    roles = Moved()
    controller = start(
        roles, kl={"coef": 0.4}, advantage={"gae_lambda": 1.0}, missing_eos_penalty=1.5, num_epochs=1,
        minibatch=16, micro=16,
    )  # fmt: skip
    metrics = controller.step(0)
    batch = roles.value_batches[0]
    finished = batch.rollout.finished_B.tolist()
    assert len(set(finished)) == 2, "both kinds of response are needed here"
    for row in range(16):
        tokens = batch.rollout.response_BR[row][batch.mask_BR[row]].tolist()
        final = (np.mean(tokens) - 0.5) / 0.25 - (0.0 if finished[row] else 1.5)
        # Every token's log-ratio is 0.5; with lambda = 1 the return of a token is all reward from it on.
        expected = [final - 0.4 * 0.5 * (len(tokens) - t) for t in range(len(tokens))]
        assert batch.returns_BR[row, : len(tokens)].tolist() == pytest.approx(expected, abs=1e-5)
    # The reported score excludes the penalty, and the KL is summed over each response's tokens.
    assert metrics["score"] == pytest.approx(float(roles.scores(batch.rollout).mean()))
    assert metrics["kl_nats"] == pytest.approx(0.5 * float(batch.rollout.response_tokens_B.float().mean()))
    assert metrics["eos_rate"] == pytest.approx(np.mean(finished))
    assert metrics["entropy_estimate"] == pytest.approx(math.log(2), rel=1e-5)


def test_every_epoch_visits_every_response_once_and_rates_fall_to_the_end(
    start: Callable[..., PPOController],
) -> None:
    roles = ToyRoles()
    controller = start(roles, num_iterations=2, num_epochs=2, minibatch=4, micro=4, learning_rate=0.8)
    for iteration in range(2):
        metrics = controller.step(iteration)
        # Toy losses are the update's number, so the mean tells which updates were averaged.
        assert metrics["policy_loss"] == pytest.approx(np.mean(range(iteration * 8, iteration * 8 + 8)))
        for epoch in range(2):
            first = iteration * 8 + epoch * 4
            parts = roles.policy_batches[first : first + 4]
            seen = sorted(tuple(row.tolist()) for part in parts for row in part.rollout.response_BR[:, :3])
            assert seen == sorted(tuple(row.tolist()) for row in roles.rollouts[iteration].response_BR[:, :3])
        orders = [
            [part.rollout.response_BR[:, :3].tolist() for part in roles.policy_batches[at : at + 4]]
            for at in (iteration * 8, iteration * 8 + 4)
        ]
        assert orders[0] != orders[1]
    # Linear from 0.8 over 16 updates.
    assert roles.learning_rates == pytest.approx([0.8 * (1 - update / 16) for update in range(16)])


def test_pretraining_rows_are_dealt_from_one_stream(start: Callable[..., PPOController]) -> None:
    roles = ToyRoles()
    controller = start(roles, ptx={"coef": 0.1, "rows": 2}, num_iterations=2, num_epochs=1)
    for iteration in range(2):
        controller.step(iteration)
    dealt = [batch.ptx_rows.tolist() for batch in roles.policy_batches]
    assert [len(rows) for rows in dealt] == [2] * 4
    assert all(batch.num_ptx_rows == 2 for batch in roles.policy_batches)
    # Seven rows: the first six dealt are distinct.
    assert len({row for rows in dealt[:3] for row in rows}) == 6


def test_adaptive_coefficient_moves_after_the_iteration_that_measured_it(
    start: Callable[..., PPOController],
) -> None:
    controller = start(ToyRoles(), kl={"coef": 0.5, "target": {"nats": 2.0, "horizon": 100}})
    metrics = controller.step(0)
    assert metrics["kl_coef"] == 0.5  # the one that was used
    # A KL of 0 against a target of 2: the error is clipped at -0.2; 16 responses of a horizon of 100.
    assert controller.kl.coef == pytest.approx(0.5 * (1 - 0.2 * 0.16))


def test_a_resumed_run_ends_with_the_same_weights(start: Callable[..., PPOController], tmp_path: Path) -> None:
    whole = ToyRoles()
    controller = start(whole, num_iterations=4)
    for iteration in range(4):
        controller.step(iteration)
        if iteration == 1:
            whole.save(tmp_path, 2, {}, {})
    resumed = ToyRoles()
    resumed.load(tmp_path)
    again = start(resumed, num_iterations=4)
    for iteration in (2, 3):
        again.step(iteration)
    assert resumed.odds.tolist() == whole.odds.tolist()
    assert float(resumed.value) == float(whole.value)
    other = ToyRoles()
    different = start(other, num_iterations=4, seed=4)
    for iteration in range(4):
        different.step(iteration)
    assert other.odds.tolist() != whole.odds.tolist()


def ahead(staleness: int) -> dict[str, object]:
    """Generators of their own, whose weights are some iterations old."""
    if not staleness:
        return {"placement": {"kind": "disaggregated"}}
    return {"placement": {"kind": "asynchronous", "max_staleness": staleness}}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_weights_of_a_fixed_age_sample_every_rollout(start: Callable[..., PPOController], staleness: int) -> None:
    roles = ToyRoles()
    controller = start(roles, num_iterations=6, **ahead(staleness))
    for iteration in range(6):
        metrics = controller.step(iteration)
        assert metrics["staleness"] == min(iteration, staleness)
        # Rollouts for the learner's next weights are not begun before it has sent them.
        assert len(roles.rollouts) == min(6, iteration + 1 + staleness)
        learned = [row for batch in roles.policy_batches[-4:] for row in batch.rollout.token_lists()[1]]
        assert sorted(learned) == sorted(roles.rollouts[iteration].token_lists()[1] * 2)  # in two epochs
    assert roles.syncs_before_rollout == [max(0, iteration - staleness) for iteration in range(6)]
    assert controller.in_flight == {}
    on_policy = ToyRoles(rate=0.0)  # the prompts of an iteration are the same at every staleness
    controller = start(on_policy, num_iterations=6)
    for iteration in range(6):
        controller.step(iteration)
    for ours, theirs in zip(roles.rollouts, on_policy.rollouts, strict=True):
        assert ours.prompt_tokens_B.tolist() == theirs.prompt_tokens_B.tolist()
        assert ours.finished_B.tolist() == theirs.finished_B.tolist()


class Rounded(ToyRoles):
    """The generator computes in lower precision than the learner."""

    def start_sampling(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> Pending[Rollout]:
        rollout = super().start_sampling(rows, prompts, seeds)()
        return lambda: replace(rollout, behaviour_logprobs_BR=rollout.behaviour_logprobs_BR.bfloat16().float() * 1.01)


def test_on_policy_weights_do_not_hang_on_the_generators_logprobs(start: Callable[..., PPOController]) -> None:
    exact, rounded = ToyRoles(), Rounded()
    cuts = []
    for roles in (exact, rounded):
        controller = start(roles, num_iterations=3, importance={"cap": 1.0})
        cuts.append([controller.step(iteration)["importance_cut_share"] for iteration in range(3)])
    assert cuts[0] != cuts[1]
    assert exact.odds.tolist() == rounded.odds.tolist()
    for roles in (exact, rounded):  # stale weights do
        controller = start(roles, num_iterations=6, importance={"cap": 1.0}, **ahead(1))
        roles.policy_batches, roles.value_batches = [], []
        for iteration in range(3):
            controller.step(iteration)
    assert exact.odds.tolist() != rounded.odds.tolist()


def test_advantages_of_stale_rollouts_carry_their_weights(start: Callable[..., PPOController]) -> None:
    roles = ToyRoles(rate=0.5)
    controller = start(
        roles, num_iterations=4, importance={"cap": 1.1}, num_epochs=1, minibatch=16, micro=16, **ahead(2)
    )
    sampled_with, learned_with = [], []
    for iteration in range(4):
        learned_with.append(roles.odds.log_softmax(0))
        metrics = controller.step(iteration)
        sampled_with.append(learned_with[max(0, iteration - 2)])
        batch = roles.policy_batches[iteration]
        weights, counted = [], []
        for row in range(16):
            for t in range(R):
                if batch.weight_BR[row, t]:
                    token = int(batch.rollout.response_BR[row, t])
                    weight = math.exp(learned_with[iteration][token] - sampled_with[iteration][token])
                    weights.append(weight)
                    counted.append(float(batch.advantages_BR[row, t]) / (min(weight, 1.1) if iteration else 1.0))
        # Undoing that leaves whitened advantages.
        assert np.mean(counted) == pytest.approx(0, abs=1e-5)
        assert np.std(counted) == pytest.approx(1, rel=1e-4)
        assert metrics["importance_mean"] == pytest.approx(np.mean(weights), rel=1e-5)
        assert metrics["importance_max"] == pytest.approx(max(weights), rel=1e-5)
        assert metrics["importance_cut_share"] == pytest.approx(np.mean([weight > 1.1 for weight in weights]))
        # Clipping is relative to the current policy, so the first minibatch's ratio is 1 for stale rollouts too.
        assert metrics["ratio_error"] == pytest.approx(0, abs=1e-6)
    assert metrics["importance_max"] > 1.1


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_score_rises_from_stale_rollouts(start: Callable[..., PPOController], staleness: int) -> None:
    for seed in (1, 2, 3):
        controller = start(ToyRoles(rate=0.5), num_iterations=15, kl={"coef": 0.01}, seed=seed, **ahead(staleness))
        scores = [controller.step(iteration)["score"] for iteration in range(15)]
        assert scores[0] == pytest.approx(0.5, abs=0.2)
        assert np.mean(scores[-3:]) > 0.85


def test_rollouts_in_flight_are_part_of_the_state(start: Callable[..., PPOController], tmp_path: Path) -> None:
    changes = {"num_iterations": 5, **ahead(2)}
    whole = ToyRoles()
    controller = start(whole, **changes)
    for iteration in range(5):
        controller.step(iteration)
        if iteration == 1:
            whole.save(tmp_path, 2, {}, {})
            held = controller.stale_rollouts(2)
    assert list(held) == [2, 3]
    final = []
    for in_flight in (held, {}):
        resumed = ToyRoles()
        resumed.load(tmp_path)
        again = start(resumed, **changes)
        again.in_flight = {number: partial(Rollout.join, [rollout]) for number, rollout in in_flight.items()}
        for iteration in (2, 3, 4):
            again.step(iteration)
        final.append(resumed.odds.tolist())
    assert final[0] == whole.odds.tolist()
    assert final[1] != whole.odds.tolist()  # sampled again by newer weights they are others


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"placement": {"max_staleness": 1}}, r"placement.colocated.max_staleness\n.*not permitted"),
        (
            {"placement": {"kind": "disaggregated", "max_staleness": 1}},
            r"placement.disaggregated.max_staleness\n.*not permitted",
        ),
        (
            {"placement": {"kind": "asynchronous", "max_staleness": 1, "weight_transport": "broadcast"}},
            r"placement.asynchronous.weight_transport\n.*not permitted",
        ),
        (ahead(3), "placement.max_staleness 3 with num_iterations 3"),
        ({"placement": {"kind": "asynchronous", "max_staleness": 0}}, "greater than or equal to 1"),
        (
            {"placement": {"kind": "continuous", "num_generators": 2, "num_rows": 1}},
            "placement.num_rows 1 with 2 generators: some would have no row; at least 2 was expected",
        ),
        (
            {"placement": {"kind": "continuous", "max_age": 1}},
            "placement.max_age 1 with placement.max_staleness 1: every response is that old; more than max_staleness",
        ),
        (
            {"placement": {"kind": "continuous"}, "sampler": {"max_rows": 4}},
            "sampler.max_rows 4 with placement.kind 'continuous', which samples placement.num_rows responses at once",
        ),
        (
            {"placement": {"kind": "continuous"}, "sampler": {"kind": "vllm"}},
            "placement.kind 'continuous' continues responses with new weights, which sampler.kind 'vllm' cannot",
        ),
        ({"importance": {"cap": 0.9}}, "greater than or equal to 1"),
        (
            {"importance": {"kind": "drop_tokens"}},
            "importance.kind 'drop_tokens' drops tokens, but here the current policy samples, which needs no",
        ),
        ({"importance": {"floor": 0.5}}, r"importance.cut.floor\n.*not permitted"),
        ({"sampler": {"python": "python"}}, r"sampler.heed.python\n.*not permitted"),
    ],
)
def test_staleness_that_cannot_be_is_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        ppo_config(**changes)
