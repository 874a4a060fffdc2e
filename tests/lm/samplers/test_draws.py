"""The test of draws: no bet gains on average on real draws, planted faults are found, and evidence adds up."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import Tensor

from benchmarks.draw_power import gained, planted
from lm.samplers.draws import ALARM, NO_EVIDENCE, PARTS, Draws, Evidence, evidence
from lm.samplers.faults import ENOUGH, faults, power_row
from lm.samplers.verify import Trial, more_draws
from tests.tiers import in_ci

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
    clean = [gained(Trial(untied, "fp32", seed), "nothing") for seed in range(2)]
    assert mean(torch.tensor([found.nats for found in clean]).exp().tolist()) < 20
    assert not any(found.is_alarm for found in clean)


def test_expected_evidence_is_the_mean_over_the_tokens_that_a_fault_draws() -> None:
    """The mean is exact, because it is summed over the whole vocabulary."""
    found = faults(ENDS, VOCABULARY)
    assert len(found) == 12
    draws = [a_draw(token) for token in range(VOCABULARY)]
    by_token = [evidence(logits(), draw, 0.7, ENDS).sums_3N for draw in draws]
    for name, fault in found.items():
        drawn_V = fault(logits() / 0.7, draws[0])[0].double()
        assert float(drawn_V.sum()) == pytest.approx(1, abs=1e-5)
        expected = evidence(logits(), draws[0], 0.7, ENDS, fault=fault)
        average_3N = sum(chance * sums for chance, sums in zip(drawn_V.tolist(), by_token, strict=True))
        torch.testing.assert_close(expected.sums_3N, average_3N, atol=1e-4, rtol=1e-4, msg=name)


def test_faults_by_hand() -> None:
    """Logits log 4, log 3, log 2 and log 1; the last token ends, and the text has tokens 0 and 1."""
    four, nothing = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log(), torch.tensor([[0, 1]])
    draw = replace(a_draw(0, before=2), text_CT=nothing)
    found = faults((3,), 4)
    drawn = {name: fault(four, draw)[0].tolist() for name, fault in found.items()}
    assert drawn["the end token is never drawn"] == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert drawn["the end token's logit + 1"] == pytest.approx([x / (9 + 2.718282) for x in (4, 3, 2, 2.718282)])
    assert drawn["the end token and its neighbour exchanged"] == pytest.approx([0.4, 0.3, 0.1, 0.2])
    assert drawn["top_k 1"] == pytest.approx([1, 0, 0, 0])
    assert drawn["top_p .95"] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert drawn["every 50th token greedy"] == pytest.approx([0.412, 0.294, 0.196, 0.098])
    less = [4 ** (1 / 1.02), 3 ** (1 / 1.02), 2, 1]
    assert drawn["repetition penalty 1.02"] == pytest.approx([x / sum(less) for x in less])
    twice = Draws.cat([draw, draw])
    pair = found["random numbers shared by pairs of rows"](four.repeat(2, 1), twice)
    assert pair.flatten().tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1, 0, 0, 1, 0])


def test_the_draws_that_a_fault_needs_by_hand() -> None:
    """With two bets of equal stakes, of which one gains 5 nats, log 2 more must be gained."""
    expected = Evidence(("a", "b"), torch.tensor([0.5, 0.5]), torch.tensor([[5.0, -9.0], [0, 0], [0, 0]]))
    assert power_row("a fault", expected, 512).endswith("4.3  needs --draws 2,429")  # 512 (ENOUGH + log 2) / 5
    assert power_row("a fault", expected * 10, 512).endswith("49.3  found")
    none = replace(expected, sums_3N=expected.sums_3N.clamp(max=0))
    assert power_row("a fault", none, 512).endswith("not found by any number")


# Each of these passed a check on the sum of log-probs, whose expectation they leave alone, or hides in rare end tokens.
FOUND = (
    "never the end token",
    "end token's logit + 1",
    "end token exchanged with its neighbour",
    "likeliest token banned",
    "every tenth token greedy",
    "repetition penalty 1.1",
    "rows share random numbers in pairs",
    "last eighth of the rows: temperature / 1.2",
)


@pytest.mark.parametrize("seed", in_ci(range(2), [0]))
# Three that other kinds of bets find than those of the table of power below; every bet's formula is tested above.
@pytest.mark.parametrize("name", in_ci(FOUND, FOUND[-3:]))
def test_wrong_draws_with_right_logprobs_are_found(untied: Path, name: str, seed: int) -> None:
    found = gained(Trial(untied, "fp32", seed), name)
    assert found.nats > ALARM, f"{name}: {found.nats:.1f} nats; {found}"


def test_planted_faults_have_the_evidence_that_the_table_of_power_states(untied: Path) -> None:
    """The end token is rare there: its probability is below .001 on average."""
    trial = Trial(untied, "fp32")
    usual, last = more_draws(planted(trial, "nothing"), trial)
    stated, of_last = usual.expected(), last.expected()
    named = {"top_p .95": "top_p .95", "the end token is never drawn": "never the end token"}
    for name, plant in named.items():
        expected = (stated[name] + of_last[name]).nats
        assert expected > ENOUGH
        assert 0.6 < gained(trial, plant).nats / expected < 1.6, name


def test_trials_of_neighbouring_seeds_share_no_random_stream() -> None:
    seeds = [set(Trial(Path(), "fp32", seed).draw_seeds("draws", 512)) for seed in range(4)]
    assert len(set.union(*seeds)) == 4 * 512
