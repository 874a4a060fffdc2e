"""PPO's equations against numbers worked by hand and against loops over tokens."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo.algorithm import (
    KLController,
    KLTarget,
    generalised_advantages,
    importance_weights,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)
from tests.examples import examples


def ragged_mask(lengths: list[int], width: int) -> Tensor:
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rewards_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-1.0, -1.0, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, -9.0], [-1.0, -2.0, -4.0]])
    mask = ragged_mask([2, 3], 3)
    rewards, kl = token_rewards(torch.tensor([10.0, 20.0]), logprobs, ref_logprobs, mask, 0.5)
    # log ratios: 0.5, -1 | 0, 1, 3; the third token of the first response is no token.
    expected = torch.tensor([[-0.25, 10.5, 0.0], [0.0, -0.5, 20 - 1.5]])
    torch.testing.assert_close(rewards, expected)
    torch.testing.assert_close(kl, torch.tensor([-0.5, 4.0]))


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    kl_coef=st.floats(0, 3),
    seed=st.integers(0, 10_000),
)
@examples(60)
def test_score_sits_on_the_last_token_and_the_kl_logged_is_the_kl_penalised(
    lengths: list[int], kl_coef: float, seed: int
) -> None:
    shape = (len(lengths), 7)
    logprobs, ref_logprobs = noise(*shape, seed=seed), noise(*shape, seed=seed + 1)
    scores, mask = noise(len(lengths), seed=seed + 2), ragged_mask(lengths, 7)
    rewards, kl = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef)
    without, _ = token_rewards(torch.zeros_like(scores), logprobs, ref_logprobs, mask, kl_coef)
    for row, length in enumerate(lengths):
        # The last token gets the score; a response without counted tokens (its score failed) gets none.
        placed = (rewards - without)[row]
        expected = [float(scores[row]) if t == length - 1 else 0.0 for t in range(7)]
        assert placed.tolist() == pytest.approx(expected, abs=1e-12)
        assert float(without[row].sum()) == pytest.approx(-kl_coef * float(kl[row]), abs=1e-9)
        ratios = [float(logprobs[row, t] - ref_logprobs[row, t]) for t in range(length)]
        assert float(kl[row]) == pytest.approx(sum(ratios), abs=1e-9)


def test_a_mask_whose_true_part_is_not_a_prefix_still_gets_one_score() -> None:
    mask = torch.tensor([[False, True, False, True, False]])
    rewards, _ = token_rewards(torch.tensor([7.0]), torch.zeros(1, 5), torch.zeros(1, 5), mask, 1.0)
    assert rewards.tolist() == [[0, 0, 0, 7, 0]]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    gamma=st.floats(0.1, 1),
    gae_lambda=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
@examples(80)
def test_advantages_equal_the_double_loop(lengths: list[int], gamma: float, gae_lambda: float, seed: int) -> None:
    width = 9
    rewards = noise(len(lengths), width, seed=seed) * ragged_mask(lengths, width)
    values = noise(len(lengths), width, seed=seed + 1)  # what stands past the end must not be read
    advantages, returns = generalised_advantages(rewards, values, ragged_mask(lengths, width), gamma, gae_lambda)
    for row, length in enumerate(lengths):
        r, v = rewards[row].tolist(), values[row].tolist()
        for t in range(width):
            # A_t = sum over k >= t of (gamma · lambda)^(k - t) · delta_k, eq. 16 of arXiv 1506.02438.
            expected = 0.0
            for k in range(t, length):
                following = v[k + 1] if k + 1 < length else 0.0
                expected += (gamma * gae_lambda) ** (k - t) * (r[k] + gamma * following - v[k])
            assert float(advantages[row, t]) == pytest.approx(expected, abs=1e-9)
            assert float(returns[row, t]) == pytest.approx(expected + v[t] if t < length else 0.0, abs=1e-9)


def test_with_lambda_one_a_return_is_the_sum_of_the_rewards_to_come() -> None:
    mask = ragged_mask([3], 4)
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 0.0]]), torch.tensor([[9.0, -3.0, 5.0, 100.0]])
    _, returns = generalised_advantages(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[7.0, 6.0, 4.0, 0.0]]))


@given(
    written=st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4),
    gamma=st.floats(0.1, 1),
    gae_lambda=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
@examples(40)
def test_an_environments_tokens_change_no_advantage_of_the_policys(
    written: list[list[bool]], gamma: float, gae_lambda: float, seed: int
) -> None:
    """Rewards, advantages and returns are those of the same tokens without the environment's between them."""
    mask, shape = torch.tensor(written), (len(written), 7)
    logprobs, ref, values, turns = (noise(*shape, seed=seed + place) for place in range(4))
    scores = noise(len(written), seed=seed + 4)
    rewards, kl = token_rewards(scores, logprobs, ref, mask, 0.3, turns)
    advantages, returns = generalised_advantages(rewards, values, mask, gamma, gae_lambda)
    assert (rewards[~mask] == 0).all()
    assert (advantages[~mask] == 0).all()
    for row, own in enumerate(mask):
        if not own.any():
            continue
        alone = [tensor[row][own][None] for tensor in (logprobs, ref, values, turns)]
        everything = torch.ones_like(alone[0], dtype=torch.bool)
        own_rewards, own_kl = token_rewards(scores[row, None], *alone[:2], everything, 0.3, alone[3])
        own_advantages, own_returns = generalised_advantages(own_rewards, alone[2], everything, gamma, gae_lambda)
        torch.testing.assert_close(rewards[row][own], own_rewards[0])
        torch.testing.assert_close(kl[row], own_kl[0])
        torch.testing.assert_close(advantages[row][own], own_advantages[0])
        torch.testing.assert_close(returns[row][own], own_returns[0])


def test_whiten_by_hand() -> None:
    # Counted: 1, 3, 5, 7; mean 4, variance (9 + 1 + 1 + 9) / 4 = 5.
    values = torch.tensor([[1.0, 3.0, 99.0], [5.0, 7.0, -99.0]])
    whitened = whiten(values, ragged_mask([2, 2], 3))
    root = math.sqrt(5)
    torch.testing.assert_close(whitened, torch.tensor([[-3 / root, -1 / root, 0], [1 / root, 3 / root, 0]]))


def test_whiten_of_equal_values_is_zero() -> None:
    assert whiten(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


def test_policy_loss_by_hand() -> None:
    ratios = [1.5, 1.5, 0.5, 0.5, 1.1, 8.0]
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 5.0]])
    old = torch.full((1, 6), -2.0)
    logprobs = (old + torch.tensor([ratios]).log()).requires_grad_()
    mask = ragged_mask([5], 6)
    loss, metrics = policy_loss(logprobs, old, advantages, mask, 0.2)
    # min(ratio·A, clipped·A): 1.2, -1.5, 0.5, -0.8, 2.2; the last is not counted.
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.2))
    loss.backward()
    # d ratio / d logprob = ratio, and nothing flows where the clipped side is the smaller.
    assert logprobs.grad is not None
    expected = torch.tensor([[0.0, 1.5, -0.5, 0.0, -2.2, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)
    assert float(metrics["clip_share"]) == 4
    assert float(metrics["ratio_error"]) == pytest.approx(0.5 * 4 + 0.1)
    assert float(metrics["approx_kl"]) == pytest.approx(sum(x - 1 - math.log(x) for x in ratios[:5]), rel=1e-5)
    assert not any(figure.requires_grad for figure in metrics.values())


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    clip_range=st.floats(0.05, 0.9),
    seed=st.integers(0, 999),
)
@examples(40)
def test_losses_equal_loops(lengths: list[int], clip_range: float, seed: int) -> None:
    shape = (len(lengths), 6)
    new, old, third = (noise(*shape, seed=seed + i) for i in range(3))
    mask = ragged_mask(lengths, 6)
    policy = value = squared = 0.0
    for row, length in enumerate(lengths):
        for t in range(length):
            x, y, z = float(new[row, t]), float(old[row, t]), float(third[row, t])
            ratio = math.exp(x - y)
            policy -= min(ratio * z, max(1 - clip_range, min(1 + clip_range, ratio)) * z)
            clipped = y + max(-clip_range, min(clip_range, x - y))
            value += 0.5 * max((x - z) ** 2, (clipped - z) ** 2)
            squared += (x - z) ** 2
    assert float(policy_loss(new, old, third, mask, clip_range)[0]) == pytest.approx(policy, abs=1e-8)
    loss, metrics = value_loss(new, old, third, mask, clip_range)
    assert float(loss) == pytest.approx(value, abs=1e-8)
    assert float(metrics["value_error"]) == pytest.approx(squared, abs=1e-8)


def test_importance_weights_by_hand() -> None:
    ratios = torch.tensor([[0.5, 1.0, 9.0], [3.0, 1.5, 1.0]])
    behaviour = torch.full((2, 3), -2.0)
    weights, metrics = importance_weights(behaviour + ratios.log(), behaviour, ragged_mask([2, 3], 3), 2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.0, 0.0], [2.0, 1.5, 1.0]]))
    assert metrics["importance_mean"] == pytest.approx((0.5 + 1 + 3 + 1.5 + 1) / 5)
    assert metrics["importance_max"] == pytest.approx(3)
    assert metrics["importance_cut_share"] == pytest.approx(1 / 5)
    assert metrics["effective_share"] == pytest.approx(6**2 / (5 * (0.25 + 1 + 4 + 2.25 + 1)))


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    clip_range=st.floats(0.05, 0.9),
    cap=st.floats(1, 4),
    seed=st.integers(0, 999),
)
@examples(40)
def test_weighted_advantages_make_the_decoupled_objective(
    lengths: list[int], clip_range: float, cap: float, seed: int
) -> None:
    shape = (len(lengths), 6)
    new, proximal, behaviour, advantages = (noise(*shape, seed=seed + i) for i in range(4))
    mask = ragged_mask(lengths, 6)
    loss, gradient = 0.0, torch.zeros(shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        for t in range(length):
            ratio = math.exp(float(new[row, t] - proximal[row, t]))
            weight = min(cap, math.exp(float(proximal[row, t] - behaviour[row, t])))
            advantage = float(advantages[row, t])
            clipped = max(1 - clip_range, min(1 + clip_range, ratio))
            loss -= weight * min(ratio * advantage, clipped * advantage)
            if ratio * advantage <= clipped * advantage:  # d ratio / d log π = ratio
                gradient[row, t] = -weight * ratio * advantage
    new.requires_grad_()
    weights, _ = importance_weights(proximal, behaviour, mask, cap)
    found, _ = policy_loss(new, proximal, weights * advantages, mask, clip_range)
    assert found.item() == pytest.approx(loss, abs=1e-8)
    torch.testing.assert_close(torch.autograd.grad(found, new)[0], gradient, atol=1e-9, rtol=1e-9)


def learn_from(behaviour: Tensor, rewards: Tensor, *, is_corrected: bool) -> Tensor:
    """Chances of some tokens after 150 iterations of two updates, each on the mean over all that a policy which never
    learns would sample: every token once, its advantage times the chance that it is drawn.
    """
    logits, every = torch.zeros(1, len(rewards), dtype=torch.float64), torch.ones(1, len(rewards), dtype=torch.bool)
    for _ in range(150):
        proximal = logits.log_softmax(-1)
        weights, _ = importance_weights(proximal, behaviour.log(), every, 2.0)
        advantages = behaviour * (rewards - 1.0) * (weights if is_corrected else 1.0)
        for _ in range(2):
            logits.requires_grad_()
            loss, _ = policy_loss(logits.log_softmax(-1), proximal, advantages, every, 0.2)
            logits = (logits - 0.5 * torch.autograd.grad(loss, logits)[0]).detach()
    return logits.softmax(-1)[0]


def test_from_a_stale_policy_the_corrected_objective_finds_the_best_token_and_the_other_does_not() -> None:
    behaviour, rewards = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([3.0, 2.0, 2.0]).double()
    assert float(learn_from(behaviour, rewards, is_corrected=True)[0]) > 0.97
    # If all advantages are positive, each sampled token gets likelier, in proportion to probability times advantage.
    biased = learn_from(behaviour, rewards, is_corrected=False)
    torch.testing.assert_close(biased, torch.tensor([1.0, 0.3, 0.2]).double() / 1.5, atol=0.01, rtol=0)


def test_value_loss_by_hand() -> None:
    # old 0, clip 0.2. Value 1 of return 2: clipped to 0.2, and the clipped error is larger, so nothing flows.
    # Value 1 of return 0: the unclipped error is larger. The third is not counted.
    values = torch.tensor([[1.0, 1.0, 50.0]], requires_grad=True)
    loss, metrics = value_loss(values, torch.zeros(1, 3), torch.tensor([[2.0, 0.0, 0.0]]), ragged_mask([2], 3), 0.2)
    assert loss.item() == pytest.approx(0.5 * (1.8**2 + 1.0))
    assert float(metrics["value_error"]) == pytest.approx(1 + 1)
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1.0, 0.0]]))


def test_fixed_kl_coefficient_stays() -> None:
    controller = KLController(None, 0.3)
    controller.update(1000.0, 64)
    assert controller.coef == 0.3


@pytest.mark.parametrize(
    ("kl_nats", "factor"),
    [
        (6.6, 1 + 0.1 * 0.05),  # a tenth above the target, 50 of a horizon of 1,000 responses
        (12.0, 1 + 0.2 * 0.05),  # clipped at a fifth
        (3.0, 1 - 0.2 * 0.05),
        (5.4, 1 - 0.1 * 0.05),
        (6.0, 1.0),
        (-40.0, 1 - 0.2 * 0.05),
    ],
)
def test_adaptive_kl_coefficient(kl_nats: float, factor: float) -> None:
    controller = KLController(KLTarget(nats=6.0, horizon=1000), 0.5)
    controller.update(kl_nats, 50)
    assert controller.coef == pytest.approx(0.5 * factor)
    controller.update(kl_nats, 50)
    assert controller.coef == pytest.approx(0.5 * factor**2)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_stands_at_padding_reaches_no_sum_and_no_gradient(junk: float) -> None:
    """0 times infinity is NaN, so what is not counted is left out, not multiplied by 0."""
    mask = ragged_mask([2, 0, 4], 4)
    scores = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)

    def everything(elsewhere: float) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [torch.where(mask, noise(3, 4, seed=seed), elsewhere).requires_grad_() for seed in range(6)]
        logprobs, old_logprobs, ref_logprobs, values, old_values, returns = inputs
        with torch.no_grad():
            rewards, kl = token_rewards(scores, logprobs, ref_logprobs, mask, 0.1)
            advantages, targets = generalised_advantages(rewards, values, mask, 1.0, 0.95)
            white, (weights, metrics) = whiten(advantages, mask), importance_weights(logprobs, old_logprobs, mask, 2.0)
        policy, policy_metrics = policy_loss(logprobs, old_logprobs, white + torch.where(mask, 0, elsewhere), mask, 0.2)
        value, value_metrics = value_loss(values, old_values, returns, mask, 0.2)
        (policy + value).backward()  # type: ignore[no-untyped-call]
        found = [rewards, kl, advantages, targets, white, weights, policy, value, *policy_metrics.values()]
        found += [*value_metrics.values(), torch.tensor(list(metrics.values()))]
        gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
        return [tensor.detach() for tensor in found], gradients

    for found, expected in zip(everything(junk), everything(0.0), strict=True):
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_batch_of_which_nothing_is_counted_is_refused() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for compute in (
        lambda: whiten(torch.ones(2, 3), nothing),
        lambda: importance_weights(torch.zeros(2, 3), torch.zeros(2, 3), nothing, 2.0),
    ):
        with pytest.raises(AssertionError, match="none of 6 tokens is counted"):
            compute()


LIMITS = {"cut": (0.0, 1.2), "drop_tokens": (0.8, 1.2), "drop_responses": (0.8, 1.2)}


@pytest.mark.parametrize("beyond", LIMITS)
def test_corrections_of_another_sampler_are_the_finite_sums_that_they_should_be(
    beyond: Literal["cut", "drop_tokens", "drop_responses"],
) -> None:
    """Over all nine responses of two of three tokens, weighted by the sampler's chances: Σ π_s(y) w f is computed token
    by token from the definitions, for any f.
    """
    generator = torch.Generator().manual_seed(4)
    responses = torch.tensor([[first, second] for first in range(3) for second in range(3)])
    tables = [torch.randn(4, 3, generator=generator).log_softmax(-1) for _ in range(2)]
    tables[1] = (tables[0] + 0.4 * torch.randn(4, 3, generator=generator)).log_softmax(-1)
    states = torch.stack([torch.zeros(9, dtype=torch.int64), 1 + responses[:, 0]], dim=1)
    logprobs, behaviour = (table[states, responses] for table in tables)
    of_token = torch.randn(9, 2, generator=generator)
    floor, cap = LIMITS[beyond]
    mask = torch.ones(9, 2, dtype=torch.bool)
    weights, metrics = importance_weights(logprobs, behaviour, mask, cap, floor, beyond)
    found = float((behaviour.sum(dim=1, keepdim=True).exp() * weights * of_token).sum())

    expected, num_affected, num_dropped = 0.0, 0, 0
    for row in range(9):
        chance = math.exp(float(behaviour[row, 0]) + float(behaviour[row, 1]))
        ratios = [math.exp(float(logprobs[row, t]) - float(behaviour[row, t])) for t in range(2)]
        mean = math.sqrt(ratios[0] * ratios[1])
        for t in range(2):
            is_dropped = {
                "cut": False,
                "drop_tokens": not floor <= ratios[t] <= cap,
                "drop_responses": not floor <= mean <= cap,
            }[beyond]
            num_dropped += is_dropped
            num_affected += is_dropped or ratios[t] > cap
            expected += 0.0 if is_dropped else chance * min(ratios[t], cap) * float(of_token[row, t])
    assert found == pytest.approx(expected, abs=1e-6)
    assert metrics["importance_cut_share"] == pytest.approx(num_affected / 18)
    assert (num_dropped > 0) == (beyond != "cut")
    assert 0 < num_affected < 18
    # One policy on both sides is left as it is, whatever the limits.
    same, _ = importance_weights(logprobs, logprobs, mask, cap, floor, beyond)
    assert torch.equal(same, torch.ones(9, 2))


def test_where_every_token_is_dropped_nothing_is_nan() -> None:
    far = torch.full((2, 2), 3.0)
    weights, metrics = importance_weights(far, torch.zeros(2, 2), far > 0, 2.0, 0.5, "drop_tokens")
    assert float(weights.sum()) == 0
    assert metrics["effective_share"] == 0
    assert metrics["importance_cut_share"] == 1
