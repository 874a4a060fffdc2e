"""Mean gradients of the estimators over every group against the exact gradient, and the docs' table of them."""

import itertools
import math

import pytest
import torch

from benchmarks.gradient_bias import (
    BEGIN,
    END,
    KL_COEF,
    LENGTH,
    PAGE,
    Toy,
    config_of,
    heeds_loss,
    kl_loss,
    mean_gradient,
    rows,
    with_table,
)


def test_each_estimator_has_the_bias_that_is_known_of_it() -> None:
    """Exact up to rounding of fp32 weights, exact but for a known length, or at an angle."""
    for row in rows():
        along, angle = row.measured
        if row.scale:
            assert along == pytest.approx(row.scale, rel=1e-6), row.name
            assert angle < 1e-3, row.name
        else:
            assert math.isnan(angle) or angle > 1.0, row.name
    assert sum(row.scale == 1.0 for row in rows()) >= 7
    assert all((row.known == "none") == (row.scale == 1.0) for row in rows())


def test_the_docs_show_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m benchmarks.gradient_bias"
    assert page.count(BEGIN) == page.count(END) == 1


def test_the_exact_gradient_is_that_of_finite_differences() -> None:
    toy, step = Toy.draw(has_end=True), 1e-6
    everything = torch.arange(7)
    exact = toy.exact_gradient(1.0, 0.3)

    def value(logits: torch.Tensor) -> float:
        total = 0.0
        for row in everything.tolist():
            length = int(toy.mask_BR[row].sum())
            logprob = log_ratio = 0.0
            for t in range(length):
                state = 0 if t == 0 else 1 + int(toy.tokens_BR[row, 0])
                token = int(toy.tokens_BR[row, t])
                mine, ref = (float(of[state].log_softmax(0)[token]) for of in (logits, toy.ref_logits_SV))
                logprob, log_ratio = logprob + mine, log_ratio + mine - ref
            total += math.exp(logprob) * (float(toy.scores_B[row]) - 0.3 * log_ratio)
        return total

    for state, token in ((0, 0), (1, 2), (3, 1)):
        moved = [toy.logits_SV.detach().clone() for _ in range(2)]
        moved[0][state, token] += step
        moved[1][state, token] -= step
        slope = (value(moved[0]) - value(moved[1])) / (2 * step)
        assert float(exact[state, token]) == pytest.approx(slope, abs=1e-8)


def test_the_games_exact_gradient_is_that_of_finite_differences() -> None:
    """The value is summed over the three numbers and the guesses, by the rules of the game, without its tensors."""
    toy, step, coef = Toy.game(), 1e-6, 0.3
    exact = toy.exact_gradient(1.0, coef)
    states = {(1, "higher"): 1, (2, "lower"): 2, (2, "higher"): 3, (3, "lower"): 4}

    def value(logits: torch.Tensor) -> float:
        mine, ref = logits.log_softmax(1), toy.ref_logits_SV.log_softmax(1)

        def after(state: int, guess: int, reward: float) -> tuple[float, float]:
            """Returns the guess's probability, and its reward minus its KL penalty."""
            logprob = float(mine[state, guess - 1])
            return math.exp(logprob), reward - coef * (logprob - float(ref[state, guess - 1]))

        total = 0.0
        for number, first in itertools.product((1, 2, 3), repeat=2):
            chance, gain = after(0, first, float(first == number))
            if first != number:
                state = states[first, "higher" if first < number else "lower"]
                seconds = [after(state, second, 0.5 * (second == number)) for second in (1, 2, 3)]
                gain += sum(probability * own for probability, own in seconds)
            total += chance * gain / 3
        return total

    for state, token in itertools.product(range(5), range(3)):
        moved = [toy.logits_SV.detach().clone() for _ in range(2)]
        moved[0][state, token] += step
        moved[1][state, token] -= step
        slope = (value(moved[0]) - value(moved[1])) / (2 * step)
        assert float(exact[state, token]) == pytest.approx(slope, abs=1e-8)


def test_k3_in_the_loss_has_the_gradient_of_the_other_divergence() -> None:
    toy = Toy.draw(has_end=True)
    everything = torch.arange(7)
    logprob_B = toy.logprobs(toy.logits_SV, everything).sum(dim=1)
    ref_B = toy.logprobs(toy.ref_logits_SV, everything).sum(dim=1)
    reverse = torch.autograd.grad((ref_B.exp() * (ref_B - logprob_B)).sum(), toy.logits_SV)[0]
    k3 = mean_gradient(toy, kl_loss(lambda x: (-x).exp() - 1 + x, by_response=True))
    torch.testing.assert_close(LENGTH * k3, -reverse)


def test_on_policy_the_kl_in_the_loss_moves_as_the_kl_in_the_reward() -> None:
    """Without a baseline both have the mean gradient of the KL; a coefficient means the same in both places."""
    toy = Toy.draw(has_end=True)
    nothing = {"kind": "none", "scale": "none"}
    found = [
        mean_gradient(
            toy,
            heeds_loss(
                config_of(advantage=nothing, loss={"token_weight": "constant"}, kl={"coef": KL_COEF, "kind": place})
            ),
        )
        for place in ("reward", "loss")
    ]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(("kind", "share"), [("group_mean", 0.5), ("leave_one_out", 1.0)])
def test_the_kl_in_the_reward_keeps_its_gradient_beside_scores_in_group_units(kind: str, share: float) -> None:
    """The KL's part of the gradient is that of -β KL, whatever the spread of scores; group_mean has (K - 1)/K of it."""
    toy = Toy.draw(has_end=True)
    advantage = {"kind": kind, "scale": "group", "samples_per_prompt": 2}
    with_kl, without = (
        mean_gradient(
            toy, heeds_loss(config_of(advantage=advantage, loss={"token_weight": "constant"}, kl={"coef": coef}))
        )
        for coef in (KL_COEF, 0.0)
    )
    torch.testing.assert_close(LENGTH * (with_kl - without), share * toy.exact_gradient(0.0, KL_COEF))
