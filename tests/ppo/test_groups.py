"""Advantages without a value function, and weights of tokens, against numbers worked by hand and against loops."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from ppo.algorithm import (
    Estimate,
    GroupMean,
    LeaveOneOut,
    NoBaseline,
    policy_loss,
    response_kl_loss,
    token_rewards,
    token_weights,
)
from ppo.config import PPOConfig
from ppo.groups import group_advantages, informative_groups
from ppo.placement import VLLM
from tests.examples import examples

YES = torch.ones(4, dtype=torch.bool)


def ragged_mask(lengths: list[int], width: int) -> Tensor:
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages(
    returns: list[float], scored: Tensor, K: int, kind: str = "group_mean", scale: Literal["group", "none"] = "none"
) -> tuple[list[float], list[bool]]:
    """Returns advantages without a KL penalty in the reward, so that returns are scores."""
    scores = torch.tensor(returns)
    found, counted = group_advantages(scores, scores, scored, K, leave_one_out=kind == "leave_one_out", scale=scale)
    return found.tolist(), counted.tolist()


def test_baselines_by_hand() -> None:
    returns = [1.0, 2.0, 6.0, 7.0]
    assert advantages(returns, YES, 4) == ([-3, -2, 2, 3], [True] * 4)
    # Less the mean of the others: 1 - 15/3, 2 - 14/3, 6 - 10/3, 7 - 9/3.
    assert advantages(returns, YES, 4, "leave_one_out")[0] == pytest.approx([-4, -8 / 3, 8 / 3, 4])
    # The sum of squares is 9 + 4 + 4 + 9 = 26, over n - 1 = 3.
    assert advantages(returns, YES, 4, scale="group")[0] == pytest.approx(
        [x / math.sqrt(26 / 3) for x in (-3, -2, 2, 3)]
    )
    # Two groups of two.
    assert advantages(returns, YES, 2)[0] == [-0.5, 0.5, -0.5, 0.5]
    assert advantages(returns, YES, 2, "leave_one_out")[0] == [-1, 1, -1, 1]


@pytest.mark.parametrize("kind", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_failed_score_leaves_the_baseline_and_the_deviation(kind: str, scale: Literal["group", "none"]) -> None:
    """The result is the same as if the response had not been sampled, whatever its score is."""
    without = advantages([1.0, 2.0, 6.0], YES[:3], 3, kind, scale)[0]
    for junk in (0.0, -50.0, math.nan, math.inf):
        found, informative = advantages([1.0, junk, 2.0, 6.0], torch.tensor([1, 0, 1, 1]).bool(), 4, kind, scale)
        assert [found[0], *found[2:]] == pytest.approx(without)
        assert (found[1], informative) == (0, [True, False, True, True])


def test_a_group_with_one_scored_response_has_no_advantage() -> None:
    """verl and others use a mean of 0 for it, so its advantage is the raw score."""
    for kind, scale in itertools.product(("group_mean", "leave_one_out"), ("group", "none")):
        found = advantages([9.0, 5.0, 1.0, 3.0], torch.tensor([0, 1, 1, 1]).bool(), 2, kind, scale)  # type: ignore[arg-type]
        assert found[0][:2] == [0, 0]
        assert found[1] == [False, False, True, True]
        assert advantages([9.0, 5.0], torch.tensor([False, False]), 2, kind)[0] == [0, 0]


@pytest.mark.parametrize("rounding", [0.0, 1e-6])
def test_a_group_of_equal_rewards_has_no_advantage_for_rounding_to_blow_up(rounding: float) -> None:
    returns = [3.0, 3.0 + rounding, 0.0, 1.0]
    for scale in ("group", "none"):
        found, informative = advantages(returns, YES, 2, scale=scale)  # type: ignore[arg-type]
        assert found[:2] == [0, 0]
        assert informative == [False, False, True, True]


@given(
    scores=st.lists(st.floats(-5, 5), min_size=6, max_size=6),
    scored=st.lists(st.booleans(), min_size=6, max_size=6),
    K=st.sampled_from([2, 3, 6]),
)
@examples(60)
def test_advantages_equal_the_published_formulas(scores: list[float], scored: list[bool], K: int) -> None:
    """RLOO: r_i - 1/(n-1) Σ_{j≠i} r_j; GRPO: (r_i - mean) / std, with n - 1 as TRL and verl have it, but no ε."""
    returns, is_scored = torch.tensor(scores, dtype=torch.float64), torch.tensor(scored)
    found = {
        (leave_one_out, scale): group_advantages(
            returns, returns, is_scored, K, leave_one_out=leave_one_out, scale=scale
        )[0]
        for leave_one_out, scale in itertools.product((True, False), ("group", "none"))  # type: ignore[misc]
    }
    for row in range(6):
        first = row - row % K
        group = [scores[other] for other in range(first, first + K) if scored[other]]
        if not scored[row] or len(group) < 2 or max(group) - min(group) < 1.1e-4:
            if not scored[row] or len(group) < 2 or max(group) - min(group) < 0.9e-4:
                assert all(float(values[row]) == 0 for values in found.values())
            continue
        others = [scores[other] for other in range(first, first + K) if scored[other] and other != row]
        alone, above = scores[row] - statistics.mean(others), scores[row] - statistics.mean(group)
        deviation = statistics.stdev(group)
        assert float(found[True, "none"][row]) == pytest.approx(alone, abs=1e-9)
        assert float(found[False, "none"][row]) == pytest.approx(above, abs=1e-9)
        assert float(found[False, "group"][row]) == pytest.approx(above / deviation, rel=1e-6, abs=1e-6)
        assert float(found[True, "group"][row]) == pytest.approx(alone / deviation, rel=1e-6, abs=1e-6)


def groups(**changes: object) -> dict[str, object]:
    return {"advantage": {"kind": "group_mean", "samples_per_prompt": 4, **changes}}


def estimate(
    advantage: GroupMean | LeaveOneOut | NoBaseline, rewards: Tensor, mask: Tensor, scores: Tensor | None = None
) -> Estimate:
    """Returns the estimate of an advantage that reads no values. Without `scores`, rewards have no KL penalty."""
    scores = rewards.sum(dim=1) if scores is None else scores
    return advantage.estimate(scores, rewards, torch.full_like(rewards, math.nan), mask)


def test_the_kl_is_inside_the_baseline() -> None:
    """The whole response is one action: its reward, less its whole KL, is compared with those of the others."""
    logprobs, ref_logprobs = noise(2, 3, seed=1), noise(2, 3, seed=2)
    mask = ragged_mask([3, 2], 3)
    scores = torch.tensor([2.0, 1.0]).double()
    rewards, kl = token_rewards(scores, logprobs, ref_logprobs, mask, 0.3)
    found = estimate(LeaveOneOut(samples_per_prompt=2, scale="none"), rewards, mask, scores)
    difference = (2 - 0.3 * float(kl[0])) - (1 - 0.3 * float(kl[1]))
    expected = torch.tensor([[difference] * 3, [-difference, -difference, 0]]).double()
    torch.testing.assert_close(found.advantages_BR, expected)
    assert found.metrics == {"zero_variance_groups": 0, "informative_share": 1}


@pytest.mark.parametrize("kind", [GroupMean, LeaveOneOut])
def test_the_group_scale_divides_scores_and_not_their_kl_penalty(kind: type[GroupMean | LeaveOneOut]) -> None:
    """Groups with equal scores get the KL's own small advantages, whatever its noise. The others get score / std minus
    KL, computed by hand.
    """
    scores = torch.tensor([2.0, 2.0, 2.0, 2.0, 1.0, 4.0, 1.0, 2.0]).double()
    logprobs, ref_logprobs, mask = 0.06 * noise(8, 3, seed=1), torch.zeros(8, 3).double(), torch.ones(8, 3).bool()
    factor = 4 / 3 if kind is LeaveOneOut else 1.0
    for kl_coef in (0.2, 0.05, 0.0):
        rewards, kl = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef)
        found = estimate(kind(samples_per_prompt=4, scale="group"), rewards, mask, scores)
        for first in (0, 4):
            group, kls = scores[first : first + 4].tolist(), kl[first : first + 4].tolist()
            deviation = statistics.stdev(group) or math.inf
            expected = [
                factor * ((s - statistics.mean(group)) / deviation - kl_coef * (nats - statistics.mean(kls)))
                for s, nats in zip(group, kls, strict=True)
            ]
            assert found.advantages_BR[first : first + 4, 0].tolist() == pytest.approx(expected, abs=1e-9)
        assert found.metrics == {"zero_variance_groups": 1, "informative_share": 0.5}
        assert bool(found.counted_BR[:4].all()) == (kl_coef > 0), "a KL in the reward has a gradient; nothing has none"


def test_equal_groups_leave_the_gradient_of_gspo_where_trl_has_it() -> None:
    """One of five groups has equal scores. TRL 1.16 computes A = (s - mean) / (std + 1e-4), here without a KL."""
    scores = noise(20, seed=4)
    scores[:4] = scores[0]
    logprobs, mask = 0.06 * noise(20, 6, seed=5), torch.ones(20, 6).bool()
    old = logprobs - 0.02 * noise(20, 6, seed=6)
    rewards, _ = token_rewards(scores, old, torch.zeros_like(old), mask, 0.05)
    found = estimate(GroupMean(samples_per_prompt=4, scale="group"), rewards, mask, scores)
    grouped = scores.view(5, 4)
    trl = ((grouped - grouped.mean(dim=1, keepdim=True)) / (grouped.std(dim=1, keepdim=True) + 1e-4)).view(20, 1)
    gradients = []
    for advantages_BR in (found.advantages_BR, trl.expand(20, 6)):
        new = logprobs.clone().requires_grad_()
        loss, _ = policy_loss(new, old, advantages_BR, torch.ones_like(old) / 120, 0.2, by_response=True)
        gradients.append(torch.autograd.grad(loss, new)[0].flatten())
    ours, theirs = gradients
    assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.999
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, rel=0.01)


def test_without_a_baseline_a_token_has_the_rewards_from_it_on() -> None:
    """And with the batch's scale, REINFORCE++: (A - mean) / std over all tokens of the iteration."""
    rewards, mask = torch.tensor([[1.0, 2.0, 4.0], [0.5, 8.0, 99.0]]), ragged_mask([3, 2], 3)
    plain = torch.tensor([[7.0, 6.0, 4.0], [8.5, 8.0, 0.0]])
    found = estimate(NoBaseline(scale="none"), rewards, mask)
    torch.testing.assert_close(found.advantages_BR, plain)
    assert torch.equal(found.counted_BR, mask)
    counted = [7.0, 6.0, 4.0, 8.5, 8.0]
    white = estimate(NoBaseline(), rewards, mask).advantages_BR
    for row, t in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        expected = (float(plain[row, t]) - statistics.mean(counted)) / statistics.pstdev(counted)
        assert float(white[row, t]) == pytest.approx(expected, rel=1e-5)


def test_the_batch_scale_does_not_blow_up_rounding() -> None:
    """Scores of a whole iteration that differ by 5e-7 are equal."""
    scores, mask = torch.tensor([3.0, 3.0 + 2.4e-7, 3.0, 3.0 + 4.8e-7]), torch.ones(4, 1, dtype=torch.bool)
    assert float(estimate(NoBaseline(), scores[:, None], mask).advantages_BR.abs().max()) < 0.01


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_of_equal_rewards_dilute_no_others(scale: Literal["group", "batch", "none"]) -> None:
    """Their tokens leave the loss and its denominator, so the others have the same weights as without them."""
    advantage = GroupMean(samples_per_prompt=2, scale=scale)
    rewards = torch.zeros(6, 4)
    rewards[:, 0] = torch.tensor([1.0, 3.0, 5.0, 5.0, 0.0, 7.0])
    mask = ragged_mask([1, 4, 3, 3, 2, 2], 4)
    found = estimate(advantage, rewards, mask)
    assert found.counted_BR[2:4].sum() == 0
    assert found.metrics == {"zero_variance_groups": 1, "informative_share": pytest.approx(2 / 3)}
    rest = torch.tensor([0, 1, 4, 5])
    alone = estimate(advantage, rewards[rest], mask[rest])
    torch.testing.assert_close(found.advantages_BR[rest], alone.advantages_BR)
    for kind in ("per_token", "per_response", "constant"):
        whole, num_tokens = token_weights(found.counted_BR, kind, 4)  # type: ignore[arg-type]
        part, num_part = token_weights(alone.counted_BR, kind, 4)  # type: ignore[arg-type]
        torch.testing.assert_close(whole[rest] / num_tokens, part / num_part)
        assert whole[2:4].sum() == 0
    nothing = estimate(advantage, rewards[2:4], mask[2:4])  # an iteration without any information
    assert (nothing.advantages_BR.abs().sum(), nothing.metrics["informative_share"]) == (0, 0)
    assert token_weights(nothing.counted_BR, "per_token", 4)[1] == 1


def test_the_first_groups_whose_rewards_differ_are_kept() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0])
    scored = torch.ones(12, dtype=torch.bool)
    for num_groups, rows in ((2, [2, 3, 6, 7]), (3, [2, 3, 6, 7, 8, 9]), (5, [0, 1, 2, 3, 6, 7, 8, 9, 10, 11])):
        found, share = informative_groups(rewards, scored, 2, num_groups)
        assert found.tolist() == rows
        assert share == pytest.approx(4 / 6)
    scored[3] = False  # the second group has one score left, which is compared with nothing
    assert informative_groups(rewards, scored, 2, 2)[0].tolist() == [6, 7, 8, 9]
    scored[:2] = False  # the first group has no scores left, and comes last
    assert informative_groups(rewards, scored, 2, 5)[0].tolist() == [2, 3, *range(4, 12)]


@pytest.mark.parametrize("width", [4, 7])
def test_weights_of_tokens_by_hand_at_any_padded_width(width: int) -> None:
    """verl's default divides by the padded width, so the loss depends on the longest response of the batch."""
    counted = ragged_mask([4, 1, 0, 3], width)
    expected = {"per_token": [1 / 8] * 3, "per_response": [1 / 12, 1 / 3, 1 / 9], "constant": [1 / 30] * 3}
    for kind, weights in expected.items():
        found, num_tokens = token_weights(counted, kind, 10)  # type: ignore[arg-type]
        assert num_tokens == 8
        for row, length, weight in zip((0, 1, 3), (4, 1, 3), weights, strict=True):
            assert (found[row] / num_tokens).tolist() == pytest.approx([weight] * length + [0] * (width - length))
        assert found[2].sum() == 0
    assert torch.equal(token_weights(counted, "per_token", 10)[0], counted.float()), "PPO's weights are exactly 1"


def test_a_mean_per_response_favours_short_right_and_long_wrong_responses() -> None:
    """Dr. GRPO's finding: with 1/length, tokens of short responses weigh more; with a constant, all weigh the same."""
    counted = ragged_mask([2, 8], 8)
    per_response, constant = (token_weights(counted, kind, 8)[0] for kind in ("per_response", "constant"))  # type: ignore[arg-type]
    assert float(per_response[0, 0] / per_response[1, 0]) == pytest.approx(4)
    assert float(constant[0, 0] / constant[1, 0]) == pytest.approx(1)


def test_a_wider_upper_clip_lets_a_likelier_token_grow_further() -> None:
    ratios, gains = torch.tensor([[1.25, 1.5, 0.7, 0.7]]), torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    old = torch.full((1, 4), -2.0)
    for high, expected in ((0.0, 1.2 + 1.2 + 0.7 - 0.8), (0.28, 1.25 + 1.28 + 0.7 - 0.8)):
        logprobs = (old + ratios.log()).requires_grad_()
        loss, metrics = policy_loss(logprobs, old, gains, torch.ones(1, 4), 0.2, high)
        assert loss.item() == pytest.approx(-expected)
        assert float(metrics["clip_share"]) == (3 if high else 4)
        loss.backward()
        assert logprobs.grad is not None
        assert logprobs.grad[0].tolist() == pytest.approx([-1.25 if high else 0, 0, -0.7, 0])


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 999))
@examples(40)
def test_the_ratio_of_a_response_is_its_tokens_geometric_mean(lengths: list[int], seed: int) -> None:
    """GSPO (arXiv 2507.18071): the mean over responses of min(s A, clip(s) A), s = exp(Σ_t log ρ_t / length)."""
    new, old = 0.3 * noise(len(lengths), 6, seed=seed), 0.3 * noise(len(lengths), 6, seed=seed + 1)
    gains, mask = noise(len(lengths), seed=seed + 2), ragged_mask(lengths, 6)
    weights, num_tokens = token_weights(mask, "per_response", 6)
    new.requires_grad_()
    loss, _ = policy_loss(new, old, gains[:, None].expand(-1, 6), weights.double(), 0.1, 0.15, by_response=True)
    expected, gradient = 0.0, torch.zeros_like(new)
    for row, length in enumerate(lengths):
        s = math.exp(sum(float(new[row, t].detach() - old[row, t]) for t in range(length)) / length)
        gain, clipped = float(gains[row]), min(1.15, max(0.9, s))
        expected -= min(s * gain, clipped * gain) / len(lengths)
        if s * gain <= clipped * gain:
            gradient[row, :length] = -gain * s / length / len(lengths)
    assert loss.item() / num_tokens == pytest.approx(expected, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0] / num_tokens, gradient, atol=1e-6, rtol=1e-5)


def test_the_kl_loss_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, -0.5, -1.0]], requires_grad=True)
    loss = response_kl_loss(logprobs, torch.tensor([-4.0, -1.0]), torch.tensor([0.5, 2.0]))
    # Log ratios of the responses: -3 + 4 = 1 and -2 + 1 = -1.
    assert loss.item() == pytest.approx(0.5 * (0.5 * 1 + 2.0 * 1))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.5] * 3, [-2.0] * 3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (groups(samples_per_prompt=1), r"advantage.group_mean.samples_per_prompt\n.*greater than or equal to 2"),
        ({"advantage": {"kind": "leave_one_out"}}, r"advantage.leave_one_out.samples_per_prompt\n.*Field required"),
        (groups(samples_per_prompt=3), "rollout_batch_size over advantage.samples_per_prompt: 16"),
        ({"advantage": {"kind": "gaee"}}, 'a table with kind "gae", "group_mean", "leave_one_out" or "none"'),
        ({"advantage": "gae"}, 'a table with kind "gae", "group_mean", "leave_one_out" or "none" was expected'),
        ({"advantage": {"kind": "none", "gae_lambda": 0.9}}, r"advantage.none.gae_lambda\n.*not permitted"),
        (groups(value_clip_range=0.1), r"advantage.group_mean.value_clip_range\n.*not permitted"),
        ({"advantage": {"kind": "none", "value_optimizer": {}}}, r"advantage.none.value_optimizer\n.*not permitted"),
        ({"advantage": {"scale": "group"}}, r"advantage.gae.scale\n.*'batch' or 'none'"),
        ({"loss": {"kind": "response", "token_weight": "per_token"}}, r"loss.response.token_weight\n.*not permitted"),
        (
            {"loss": {"kind": "response"}},
            "has one ratio per response, but with advantage.kind 'gae' advantages differ from token to token",
        ),
        (
            {"kl": {"kind": "loss"}, "placement": {"kind": "asynchronous", "max_staleness": 1}},
            'max_staleness 1 older weights sample; "reward" was expected, which importance weights correct',
        ),
        (
            {**groups(), "loss": {"kind": "response"}, "placement": {"kind": "asynchronous", "max_staleness": 1}},
            "clips a ratio per response, but with placement.max_staleness 1 importance weights are per token",
        ),
        (
            {**groups(), "loss": {"kind": "response"}, "importance": {"kind": "drop_tokens"}, "sampler": VLLM()},
            "loss.kind 'response' needs whole responses, but importance.kind 'drop_tokens' drops some of their tokens",
        ),
        ({"advantage": {"oversample": 2.0}}, r"advantage.gae.oversample\n.*not permitted"),
        (groups(oversample=1.1), "oversample 1.1 x 4 prompts per iteration is 4.4; a whole number"),
        ({"kl": {"kind": "k3"}}, "'reward' or 'loss'"),
    ],
)  # fmt: skip
def test_choices_that_contradict_each_other_are_refused(
    ppo_config: Callable[..., PPOConfig], changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        ppo_config(**changes)


def test_a_config_with_its_defaults_written_out_is_the_same(ppo_config: Callable[..., PPOConfig]) -> None:
    config = ppo_config(**groups())
    assert PPOConfig.model_validate(config.model_dump()) == config
