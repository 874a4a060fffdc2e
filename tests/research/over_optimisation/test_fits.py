"""Gao et al.'s forms on planted curves: the fit recovers them, intervals contain them, and the advice is right."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.measures_coverage import gao_coverage, planted_curve
from evaluation.measures.best_of_n import best_of_n_expected, best_of_n_kl
from research.over_optimisation.curves import Curve, best_of_n_curve, mean_lead, points
from research.over_optimisation.fits import fit_curve, gain_at, gold_tops, top


def smooth_curve(kind: str, alpha: float, beta: float, distances: list[float], num_prompts: int = 5) -> Curve:
    """A curve without noise."""
    d_K = np.array(distances)
    gold_K = alpha * d_K - beta * (d_K**2 if kind == "best_of_n" else d_K * np.log(d_K))
    start_P = np.arange(num_prompts, dtype=float)
    kl_KP = np.tile(d_K[:, None] ** 2, (1, num_prompts))
    names = tuple(f"d{d:g}" for d in distances)
    gold_KP = gold_K[:, None] + start_P
    proxy_KP = 2 * d_K[:, None] + np.zeros(num_prompts)
    return Curve(kind, names, kl_KP, gold_KP, proxy_KP, start_P, np.zeros(num_prompts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "alpha", "beta", "best"), [("best_of_n", 0.9, 0.25, 1.8), ("rl", 0.8, 0.5, math.exp(0.6))]
)
def test_a_planted_curve_comes_back(kind: str, alpha: float, beta: float, best: float) -> None:
    curve = smooth_curve(kind, alpha, beta, [0.5, 1.0, 2.0, 3.0])
    found = fit_curve(curve, seed=0)
    assert found.gold.alpha.mean == pytest.approx(alpha)
    assert found.gold.beta.mean == pytest.approx(beta)
    assert found.optimum.d.mean == pytest.approx(best)
    # The maximum over a fine grid, and its height, by the paper's equation.
    grid = np.linspace(0.01, 3, 30_000)
    heights = grid * (alpha - beta * grid) if kind == "best_of_n" else grid * (alpha - beta * np.log(grid))
    assert grid[heights.argmax()] == pytest.approx(best, abs=1e-3)
    assert found.optimum.gain.mean == pytest.approx(heights.max(), abs=1e-6)
    assert found.optimum.kl_nats.mean == pytest.approx(best**2)
    np.testing.assert_allclose(gain_at(kind, alpha, beta, grid), heights)  # type: ignore[arg-type]
    assert gain_at(kind, alpha, beta, np.zeros(1))[0] == 0.0  # type: ignore[arg-type]
    assert found.gold.misfit < 1e-6
    assert found.proxy.beta.mean == pytest.approx(0.0, abs=1e-9)  # the planted proxy score is linear


def test_the_fit_is_weighted_least_squares() -> None:
    curve = planted_curve("rl", 0.8, 0.5, num_prompts=200, noise=1.0, generator=np.random.default_rng(3))
    gain_KP = curve.gold_KP - curve.start_gold_P
    error_K = gain_KP.std(axis=1, ddof=1)

    d_K = np.sqrt(curve.kl_KP.mean(axis=1))
    rows = np.stack([d_K, -d_K * np.log(d_K)], axis=1) / error_K[:, None]
    expected = np.linalg.lstsq(rows, gain_KP.mean(axis=1) / error_K, rcond=None)[0]
    found = fit_curve(curve, seed=1).gold
    assert [found.alpha.mean, found.beta.mean] == pytest.approx(expected.tolist())


def test_intervals_hold_what_was_planted() -> None:
    """`python -m benchmarks.measures_coverage` draws 2,000 worlds; docs/measures.md has the table."""
    for kind in ("best_of_n", "rl"):
        found = gao_coverage(kind, num_worlds=120, num_prompts=100, seed=0)
        assert found.keys() == {"alpha", "beta", "optimum's d", "gain at the optimum"}
        for what, covered in found.items():
            assert 0.90 <= covered.share <= 0.995, (kind, what, covered)


def test_advice_separates_what_was_seen_from_extrapolation() -> None:
    inside = fit_curve(smooth_curve("best_of_n", 0.9, 0.25, [0.5, 1.0, 2.0, 3.0]), seed=0)
    assert inside.advice.startswith("Stop at d = 1.80 (1.80 to 1.80), a KL of 3.24 nats; d2 is nearest")
    beyond = fit_curve(smooth_curve("rl", 2.0, 0.5, [0.5, 1.0, 2.0]), seed=0)
    assert "still rises at the furthest policy measured (d = 2.00" in beyond.advice
    assert "optimum at d = 20.09, which is extrapolation" in beyond.advice
    rising = fit_curve(smooth_curve("rl", 0.3, -0.2, [0.5, 1.0, 2.0]), seed=0)
    assert "has no optimum" in rising.advice
    assert math.isnan(rising.optimum.d.mean)
    assert rising.optimum.share_without == 1.0
    falling = fit_curve(smooth_curve("best_of_n", -0.3, 0.2, [0.5, 1.0, 2.0]), seed=0)
    assert falling.advice.startswith("The gold score does not rise along these policies")
    assert falling.optimum.d.mean == 0.0
    flat = fit_curve(smooth_curve("rl", 0.0, 0.0, [0.5, 1.0, 2.0]), seed=0)
    assert flat.advice.startswith("The gold score does not rise along these policies")


def test_an_optimum_that_noise_hides_has_no_upper_end() -> None:
    generator = np.random.default_rng(0)
    curve = planted_curve("best_of_n", 0.9, 0.15, num_prompts=25, noise=3.0, generator=generator)
    found = fit_curve(curve, seed=0)
    assert found.optimum.share_without > 0.025
    assert math.isnan(found.optimum.d.high)
    assert "Stop at" not in found.advice


def test_another_form_is_called_a_misfit() -> None:
    d_K = np.array([0.5, 1.0, 1.5, 2.0, 2.5])
    generator = np.random.default_rng(0)
    start_P = generator.normal(size=400)
    gold_KP = np.sin(3 * d_K)[:, None] + start_P + 0.3 * generator.normal(size=(5, 400))
    kl_KP = np.tile(d_K[:, None] ** 2, (1, 400))
    curve = Curve("rl", tuple("abcde"), kl_KP, gold_KP, gold_KP, start_P, start_P)
    found = fit_curve(curve, seed=0)
    assert found.gold.misfit > 10
    assert "does not describe these data" in found.advice


def test_the_curve_of_best_of_n_is_that_of_the_estimator() -> None:
    generator = np.random.default_rng(5)
    gold = generator.normal(size=(30, 20))
    proxy = gold + generator.normal(size=gold.shape)
    curve = best_of_n_curve(gold, proxy)
    assert curve.names == ("best of 2", "best of 4", "best of 8", "best of 16")
    np.testing.assert_allclose(curve.gold_KP, best_of_n_expected(gold, proxy)[:, [1, 3, 7, 15]].T)
    np.testing.assert_allclose(curve.d_K**2, [best_of_n_kl(n) for n in (2, 4, 8, 16)])
    drawn = points(curve)
    assert [point.name for point in drawn] == list(curve.names)
    gain = best_of_n_expected(gold, proxy)[:, 3].mean() - gold.mean()
    assert drawn[1].gold.mean == pytest.approx(gain)
    assert drawn[1].gold.low < gain < drawn[1].gold.high
    assert drawn[1].kl_nats.high - drawn[1].kl_nats.low < 1e-12  # an upper bound, not an estimate


def test_the_lead_at_equal_kl_by_hand() -> None:
    rl = smooth_curve("rl", 1.0, 0.5, [1.0, 2.0])
    best = smooth_curve("best_of_n", 1.0, 0.25, [1.0, 1.5])
    # In √KL, RL passes (1, 1) and (2, 2 - log 2); best-of-n (1, 0.75) and (1.5, 0.9375). Both are straight in between.
    middle = (1.5 - 1) / 2
    expected = 1 + (1 - math.log(2)) * middle - (0.75 + 0.9375) / 2
    assert mean_lead(rl, best, seed=0).mean == pytest.approx(expected)


def test_the_lead_is_paired_and_its_interval_holds_the_truth() -> None:
    """Both curves share their prompts' difficulty, which cancels; the planted lead is recovered."""
    hits = []
    (D, one), (_, other) = _planted_pair()
    places = np.linspace(D[0], D[-1], 8)
    true = np.mean(np.interp(places, D, one) - np.interp(places, D, other))
    for world in range(60):
        generator = np.random.default_rng([7, world])
        rl = planted_curve("rl", 1.0, 0.3, num_prompts=80, noise=0.5, generator=generator)
        best = planted_curve("rl", 0.8, 0.3, num_prompts=80, noise=0.5, generator=generator)
        lead = mean_lead(rl, best, seed=world)
        hits.append(lead.low <= true <= lead.high)
        assert lead.high - lead.low < 0.6
    assert 0.88 <= np.mean(hits) <= 1
    backwards = replace(best, kl_KP=-best.kl_KP)
    assert math.isnan(mean_lead(rl, backwards, seed=0).mean)  # no range that both reach


def test_a_curve_that_starts_late_is_not_behind_one_that_starts_early() -> None:
    """Both curves are d - d²/4. Gold rises like √KL, so straight lines in KL would be too low."""
    leads = []
    for world in range(30):
        generator = np.random.default_rng([11, world])
        curves = []
        for distances in (np.sqrt(np.arange(1, 9) / 1.5 + 0.35), np.sqrt([0.19, 0.64, 1.2, 1.84, 2.5, 3.2, 3.86])):
            gain_KP = (distances - distances**2 / 4)[:, None] + generator.normal(0, 0.3, (len(distances), 200))
            kl_KP = np.tile(distances[:, None] ** 2, (1, 200))
            start_P, names = np.zeros(200), tuple(f"d{number}" for number in range(len(distances)))
            curves.append(Curve("rl", names, kl_KP, gain_KP, gain_KP, start_P, start_P))
        leads.append(mean_lead(*curves, seed=world).mean)
    assert abs(np.mean(leads)) < 0.01


def test_the_tops_of_resamples_are_those_of_the_fit() -> None:
    curve = planted_curve("rl", 0.8, 0.5, num_prompts=200, noise=0.5, generator=np.random.default_rng(3))
    optimum = fit_curve(curve, seed=4).optimum
    found, tops_S = gold_tops(curve, seed=4)
    assert found == optimum.d.mean
    assert optimum.d.low < np.median(tops_S) < optimum.d.high
    assert np.isinf(tops_S).mean() == optimum.share_without
    with pytest.raises(ValueError, match="2 distances above 0"):
        gold_tops(smooth_curve("rl", 0.8, 0.5, [1.0, 2.0]), seed=0)


def _planted_pair() -> list[tuple[np.ndarray, np.ndarray]]:
    from benchmarks.measures_coverage import DISTANCES

    D = np.array(DISTANCES)
    return [(D, D * (alpha - 0.3 * np.log(D))) for alpha in (1.0, 0.8)]


def test_refusals_name_policy_and_prompt() -> None:
    good = smooth_curve("rl", 1.0, 0.5, [1.0, 2.0, 3.0])
    bad = good.gold_KP.copy()
    bad[1, 3] = math.nan
    with pytest.raises(ValueError, match="gold_KP of policy 'd2' on prompt 3 is nan"):
        Curve("rl", good.names, good.kl_KP, bad, good.proxy_KP, good.start_gold_P, good.start_proxy_P)
    with pytest.raises(ValueError, match=r"kl_KP has shape \(3, 4\)"):
        Curve("rl", good.names, good.kl_KP[:, 1:], good.gold_KP, good.proxy_KP, good.start_gold_P, good.start_proxy_P)
    with pytest.raises(ValueError, match="2 distances above 0"):
        fit_curve(smooth_curve("rl", 1.0, 0.5, [1.0, 2.0]), seed=0)
    with pytest.raises(ValueError, match="the same prompts were expected"):
        mean_lead(good, smooth_curve("rl", 1.0, 0.5, [1.0, 2.0], num_prompts=6), seed=0)
    assert top("rl", np.array([1.0]), np.array([0.0]))[0] == math.inf
