"""The test of draws: no bet gains on average on real draws, planted faults are found, and evidence adds up."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from benchmarks.draw_power import planted
from lm.samplers.draws import ALARM, NO_EVIDENCE, PARTS, Draws, Evidence, evidence
from lm.samplers.verify import Trial, more_draws

VOCABULARY, ENDS = 70, (3, 65)


def a_draw(token: int, *, weight: float = 1.0, step: int = 0, part: int = 0, before: int = 5) -> Draws:
    """Returns a token drawn after the text 5 7 5. In its vocabulary, 68 and 7 are in the same class."""
    numbers = ([token], [weight], [step], [part], [[5, 7, 5, -1]], [before])
    return Draws(*map(torch.tensor, numbers))


def stakes(found: Evidence) -> Tensor:
    return found.sums_3N[0].exp()


def logits() -> Tensor:
    """Returns logits with which some tokens are likely and most are rare."""
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(1, VOCABULARY, generator=generator)


@pytest.mark.parametrize(("step", "part", "before"), [(0, 0, 5), (4, 7, -1), (0, 3, 69)])
def test_each_stake_is_1_on_average_over_draws_from_the_policy(step: int, part: int, before: int) -> None:
    """The average is exact, because it is summed over the whole vocabulary. No bet gains or loses."""
    policy_V = torch.softmax(logits()[0].double() / 0.7, dim=0)
    by_token = [
        stakes(evidence(logits(), a_draw(token, step=step, part=part, before=before), 0.7, ENDS))
        for token in range(VOCABULARY)
    ]
    average_N = (torch.stack(by_token) * policy_V[:, None]).sum(dim=0)
    assert torch.allclose(average_N, torch.ones_like(average_N), atol=2e-6)


def test_a_sampler_that_rounds_differently_gains_nothing_either() -> None:
    """The weights π / π_sampler correct for the rounding."""
    sampler_logits = logits() + 0.1 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    learner_V, sampler_V = (torch.softmax(of[0].double(), dim=0) for of in (logits(), sampler_logits))
    by_token = [
        stakes(evidence(logits(), a_draw(token, weight=float(learner_V[token] / sampler_V[token])), 1.0, ENDS))
        for token in range(VOCABULARY)
    ]
    average_N = (torch.stack(by_token) * sampler_V[:, None]).sum(dim=0)
    assert torch.allclose(average_N, torch.ones_like(average_N), atol=2e-6)


def test_stakes_by_hand() -> None:
    """Two tokens have the probabilities .75 and .25, and the second is the end token. For the bet that it is never
    drawn, q(v) / π(v) is 4/3 and 0.
    """
    two, nothing = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[-1]])
    goes_on, ends = (evidence(two, replace(a_draw(token, before=-1), text_CT=nothing), 1.0, (1,)) for token in (0, 1))
    assert goes_on.names[0] == "end tokens"
    assert float(stakes(goes_on)[0]) == pytest.approx(1 + (4 / 3 - 1) / 2)
    assert float(stakes(ends)[0]) == pytest.approx(1 / 2)
    assert goes_on.sums_3N[1:, 0].tolist() == pytest.approx([0, 0.25])
    # Three of four tokens are end tokens, where one was expected: the bet on λ = 1 gains a factor of
    # (e / (1 + (e - 1) / 4) + 1) / 2 from each of them.
    thrice = ends + ends + ends + goes_on
    gains = [(2.718282 / 1.429570 + 1) / 2, (1 / 1.429570 + 1) / 2]
    assert float(stakes(thrice)[4]) == pytest.approx(gains[0] ** 3 * gains[1], rel=1e-5)
    assert str(thrice) == "the likeliest token: 1.0, where draws from the policy have 3.0"
    assert float(goes_on.shares_N.sum()) == pytest.approx(1)


def test_evidence_adds_up_in_any_order_and_is_kept_to_the_last_bit(tmp_path: Path) -> None:
    draws = [a_draw(token, part=token % PARTS) for token in (5, 3, 69)]
    parts = [evidence(logits(), draw, 1.0, ENDS) for draw in draws]
    forward, backward = sum(parts, NO_EVIDENCE), parts[2] + (parts[1] + parts[0])
    assert forward.nats == pytest.approx(backward.nats, abs=1e-12)
    (tmp_path / "draws.json").write_bytes(forward.as_bytes())
    kept = Evidence.load(tmp_path / "draws.json")
    assert kept.names == forward.names
    assert torch.equal(kept.sums_3N, forward.sums_3N)
    assert evidence(logits().repeat(3, 1), Draws.cat(draws), 1.0, ENDS).nats == pytest.approx(forward.nats, abs=1e-6)


def test_evidence_of_other_bets_is_not_continued() -> None:
    """As in a checkpoint that an older version wrote."""
    now = evidence(logits(), a_draw(5), 1.0, ENDS)
    older = replace(now, names=now.names[:-1], shares_N=now.shares_N[:-1], sums_3N=now.sums_3N[:, :-1])
    assert (older + now).nats == now.nats


def test_without_tokens_there_is_no_evidence_and_nan_is_an_alarm() -> None:
    assert NO_EVIDENCE.nats == 0
    assert not NO_EVIDENCE.is_alarm
    assert evidence(torch.full((1, VOCABULARY), torch.nan), a_draw(5), 1.0, ENDS).is_alarm


def test_draws_rarely_have_much_evidence(untied: Path) -> None:
    """The mean stake is at most 1 on average, so with 95% or more, its mean over some tests is below 20."""
    trials = [Trial(untied, "fp32", seed) for seed in range(4)]
    gained = [more_draws(planted(trial, "nothing"), trial) for trial in trials]
    assert mean(torch.tensor([found.nats for found in gained]).exp().tolist()) < 20
    assert not any(found.is_alarm for found in gained)


# Each of these passed a check on the sum of log-probs, whose expectation they leave alone.
FOUND = (
    "likeliest token banned",
    "every tenth token greedy",
    "repetition penalty 1.1",
    "rows share random numbers in pairs",
    "last eighth of the rows: temperature / 1.2",
)


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, 0) for name in FOUND] + [pytest.param(name, 1, marks=pytest.mark.nightly) for name in FOUND],
)
def test_wrong_draws_with_right_logprobs_are_found(untied: Path, name: str, seed: int) -> None:
    trial = Trial(untied, "fp32", seed)
    found = more_draws(planted(trial, name), trial)
    assert found.nats > ALARM, f"{name}: {found.nats:.1f} nats; {found}"


def test_trials_of_neighbouring_seeds_share_no_random_stream() -> None:
    seeds = [set(Trial(Path(), "fp32", seed).draw_seeds("draws", 512)) for seed in range(4)]
    assert len(set.union(*seeds)) == 4 * 512
