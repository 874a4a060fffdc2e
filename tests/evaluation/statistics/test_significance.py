"""Tests, Holm and power against statsmodels, scipy, enumeration and simulation.

Numbers of statsmodels 0.15.0: `mcnemar([[5, 14], [4, 9]], exact=True)`, `multipletests(p, method="holm")`.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evaluation.statistics.significance import EqualityTest, GainTest, holm, holm_level, holm_levels
from preferences.statistics.intervals import clustered_mean, mean_is_zero, score_interval
from tests.examples import examples


def equality(x_P, *, seed=0):
    return EqualityTest(x_P, seed=seed)


def prompts(wins, ties, losses):
    return np.repeat([1.0, 0.5, 0.0], [wins, ties, losses])


def test_one_verdict_per_prompt_gives_mcnemars_exact_test():
    assert equality(prompts(14, 14, 4)).p == pytest.approx(0.0308837890625)
    assert equality(prompts(0, 9, 0)).p == 1.0


def test_few_prompts_are_enumerated():
    x_P = np.array([1.0, 0.7, 0.5, 0.2, 0.9, 1.0])
    d = x_P - 0.5
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([1, -1], repeat=len(d))]
    expected = np.mean(np.array(sums) >= abs(d.sum()) - 1e-9)
    found = equality(x_P)
    assert (found.p, found.num_draws) == (pytest.approx(expected), 0)


def test_many_prompts_of_few_values_are_enumerated_too():
    """With verdicts of 0, ½ or 1 it is the binomial test; with preferences in thirds, it is what random signs
    approximate."""
    assert equality(prompts(30, 5, 14)).p == pytest.approx(stats.binomtest(30, 44).pvalue)
    x_P = np.random.default_rng(3).integers(0, 4, size=100) / 3
    exact = equality(x_P)
    assert exact.num_draws == 0
    sign_DP = np.random.default_rng(1).choice([-1.0, 1.0], size=(40_000, 100))
    drawn = np.abs(sign_DP @ (x_P - 0.5)) >= abs((x_P - 0.5).sum()) - 1e-9
    assert exact.flipped_p == pytest.approx(drawn.mean(), abs=0.01)


def test_it_agrees_with_scipys_permutation_test():
    x_P = np.random.default_rng(2).beta(3, 2, size=60)
    expected = stats.permutation_test(
        (x_P - 0.5,), np.mean, permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(0)
    ).pvalue
    found = equality(x_P)
    assert found.num_draws == 10_000
    assert found.flipped_p == pytest.approx(expected, abs=0.01)


def test_a_random_p_is_never_0_and_ties_change_nothing():
    found = equality(np.linspace(0.6, 1.0, 50))
    assert (found.p, found.num_draws) == (1 / 10_001, 10_000)
    assert equality(prompts(9, 500, 2)).p == pytest.approx(equality(prompts(9, 0, 2)).p)
    assert equality(np.full(30, 0.5)).p == 1.0


@pytest.mark.parametrize("num", [15, 80])
def test_swapping_policies_gives_the_same_p_and_mirrors_the_interval(num):
    x_P = np.random.default_rng(num).random(num)
    one, other = equality(x_P, seed=3), equality(1 - x_P, seed=3)
    assert one.p == pytest.approx(other.p)
    low, high = one.interval()
    assert other.interval() == pytest.approx((1 - high, 1 - low), abs=1e-9)


values = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0.0, 1.0, width=16)
)


@examples(400)
@given(st.lists(values, min_size=1, max_size=40), st.sampled_from([0.2, 0.05, 0.05 / 3, 0.01]))
def test_the_interval_excludes_one_half_exactly_if_p_is_below_alpha(x_P, alpha):
    found = equality(np.array(x_P))
    low, high = found.interval(alpha)
    assert (low > 0.5 or high < 0.5) == (found.p < alpha)
    # It is never narrower than the score interval, so it covers the truth at least as often.
    plain = score_interval(np.array(x_P), quantile=stats.norm.isf(alpha / 2))
    assert low <= plain[0] + 1e-9
    assert plain[1] - 1e-9 <= high


@examples(100)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 30))
def test_wins_losses_and_ties_decide_alike(wins, losses, ties):
    """At every split that one verdict per prompt can give, among them 12 to 4: Wilson's interval is 50.5% to 89.8%,
    and the exact test's p is .0768."""
    if wins + losses + ties:
        found = equality(prompts(wins, ties, losses))
        low, high = found.interval()
        assert (low > 0.5 or high < 0.5) == (found.p < 0.05)


def test_a_close_call_reaches_one_half():
    found = equality(prompts(12, 0, 4))
    assert found.p == pytest.approx(0.0768, abs=1e-4)
    assert found.interval() == pytest.approx((0.5, 0.9), abs=1e-3)  # Wilson's with z = 2: (0.5, 0.9)


@examples(200)
@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=8))
def test_an_interval_at_holms_level_excludes_the_null_exactly_if_holms_p_is_below_alpha(p_M):
    for p, holm_p in zip(p_M, holm(np.array(p_M)).tolist(), strict=True):
        level = holm_level(p, holm_p)
        assert (p < level) == (holm_p < 0.05)
        assert level <= 0.05
    assert holm_level(0.02, 0.06) == pytest.approx(0.05 / 3)
    assert holm_level(0.3, 0.9) == holm_level(0.01, 0.03) == 0.05


def test_holm():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.5, 0.9])).tolist() == [1.0, 1.0]


def test_prompts_needed_by_hand():
    """Connor 1987 with 40% discordant and a difference of 0.2: (1.95996·√0.4 + 0.84162·√0.36)²/0.04 = 76.02."""
    assert equality(prompts(30, 60, 10)).power().num_prompts_needed == 76 + 1
    assert equality(prompts(7, 3, 7)).power().num_prompts_needed is None


def test_the_detectable_difference_solves_the_same_formula():
    x_P = np.random.default_rng(0).random(100)
    found = equality(x_P).power().detectable
    m = ((x_P - 0.5) ** 2).mean()  # nearly the variance under ½, and 1.96 nearly the critical value of the draws
    needed = (1.959964 * math.sqrt(m) + 0.841621 * math.sqrt(m - found**2)) ** 2 / found**2
    assert needed == pytest.approx(100, rel=0.03)


def test_the_exact_detectable_difference_nears_the_formula_with_many_prompts():
    found = equality(prompts(500, 100, 400)).power().detectable
    m = 0.9 / 4
    needed = (1.959964 * math.sqrt(m) + 0.841621 * math.sqrt(m - found**2)) ** 2 / found**2
    assert needed == pytest.approx(1_000, rel=0.05)


@pytest.mark.parametrize(("num", "tie"), [(20, 0.0), (60, 0.3), (400, 0.6)])
def test_a_detectable_difference_is_detected_four_times_in_five(num, tie):
    decided = round(num * (1 - tie))
    detectable = equality(prompts(decided, num - decided, 0)).power().detectable
    generator = np.random.default_rng(0)
    found = 0
    for world in range(300):
        u_P = generator.random(num)
        x_P = np.where(u_P < (1 - tie) / 2 + detectable, 1.0, np.where(u_P < 1 - tie, 0.0, 0.5))
        found += equality(x_P, seed=world).p < 0.05
    assert 0.72 <= found / 300 <= 0.87


@examples(150)
@given(
    st.lists(
        st.tuples(st.lists(values, min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_what_could_have_been_shown_never_contradicts_what_was(pairs):
    """With Holm's correction, and clusters of different sizes: what was seen and not shown is below what could be."""
    tests = [
        EqualityTest(np.concatenate([x_P, [x_P[0]] * more]), np.arange(len(x_P) + more) // size, seed=0)
        for x_P, size, more in pairs
    ]
    p_M = np.array([test.p for test in tests])
    for test, holm_p, level in zip(tests, holm(p_M), holm_levels(p_M), strict=True):
        assert (test.p < level) == (holm_p < 0.05)
        power, observed = test.power(level), abs(float(test.x_P.mean()) - 0.5)
        if holm_p >= 0.05 and not math.isnan(power.detectable):
            assert power.detectable > observed
            assert power.num_prompts_needed is None or power.num_prompts_needed > len(test.x_P)


def test_what_could_have_been_shown_is_what_holm_would_have_accepted():
    """64 of 100 prompts, p = .0066, are a difference alone, and none among ten pairs with nine that show nothing."""
    x_P = prompts(64, 0, 36)
    test, others = equality(x_P), np.full(9, 0.9)
    p_M = np.append(test.p, others)
    assert test.p < 0.05 <= holm(p_M)[0]
    level = holm_levels(p_M)[0]
    assert level == pytest.approx(0.005)
    assert test.power().detectable < 0.146 < 0.17 < test.power(level).detectable
    assert test.power().num_prompts_needed < 102 < test.power(level).num_prompts_needed
    # Two others that are rejected leave eight pairs to correct for.
    assert holm_levels(np.append(1e-9, np.append(1e-9, p_M)))[2] == pytest.approx(0.005)


def test_five_decided_prompts_can_show_nothing():
    assert math.isnan(equality(prompts(5, 100, 0)).power().detectable)
    # If all six are won, p = 2/64; with q = 0.8^(1/6) that happens in 80% (and the reverse almost never).
    assert equality(prompts(6, 0, 0)).power().detectable == pytest.approx(0.8 ** (1 / 6) - 0.5, abs=1e-4)


def ends(found, alpha=0.05):
    interval = found.interval(alpha)
    return interval.low, interval.high


def test_equal_gains_are_no_certainty():
    """Student's standard error is 0, and so is its p. Equal gains cannot show the event that happens on one prompt in
    20, and that may reverse their mean: 58 prompts miss it with probability .051, 59 with .048."""
    few, many = (GainTest(np.full(num, -1.0), seed=0) for num in (58, 59))
    assert few.p == pytest.approx(0.95**58)
    assert ends(few) == (-2.0, 0.0)
    assert many.p == pytest.approx(0.95**59)
    assert ends(many) == (-1.0, -1.0)
    assert ends(many, 0.01) == (-2.0, 0.0)
    # So does a rounding error between them, in any unit.
    assert GainTest(-1e-12 * np.array([1, 1 + 1e-12, 1, 1, 1]), seed=0).p == pytest.approx(0.95**5)
    # Nor is one whose resamples have no spread that `studentised_ratios` sees.
    assert GainTest(np.array([1.0] * 30 + [1.000001]), seed=0).p == pytest.approx(0.95**31)
    none = GainTest(np.zeros(5), seed=0)
    assert (none.p, ends(none)) == (1.0, (0.0, 0.0))


def test_gains_are_tested_by_students_t_and_by_sign_flips():
    x_P = np.array([1.0, 0.7, 0.4, -0.2, 1.5])
    sums = [abs(np.dot(signs, x_P)) for signs in itertools.product([1, -1], repeat=len(x_P))]
    flipped, student = np.mean(np.array(sums) >= abs(x_P.sum()) - 1e-9), stats.ttest_1samp(x_P, 0.0)
    assert GainTest(x_P, seed=0).p == pytest.approx(max(flipped, student.pvalue))
    expected = student.confidence_interval(0.99)
    assert ends(GainTest(x_P, seed=0), 0.01) == pytest.approx((expected.low, expected.high))
    alike = np.array([1.0, 1.1, 0.9, 1.2, 0.8])
    assert stats.ttest_1samp(alike, 0.0).pvalue < 1e-3
    assert GainTest(alike, seed=0).p == pytest.approx(2 / 32)
    many = np.random.default_rng(0).normal(0.3, 1.0, size=60)
    found = stats.ttest_1samp(many, 0.0).pvalue
    assert GainTest(many, seed=0).p == pytest.approx(found, abs=0.01)


def test_skewed_gains_are_tested_by_the_bootstrap_t():
    """Mostly small losses and a rare large win: Student's test sees a loss, where a mean of 0 is as likely."""
    x_P = np.exp(np.random.default_rng(0).normal(size=25)) - 1.8
    assert stats.ttest_1samp(x_P, 0.0).pvalue < 0.05
    found = GainTest(x_P, seed=0)
    loops = np.random.default_rng(5)
    t = []
    for _ in range(3_000):
        drawn = loops.choice(x_P, size=len(x_P))
        t.append((drawn.mean() - x_P.mean()) / drawn.std() * 5)
    mean, error = x_P.mean(), x_P.std() / 5
    assert found.p == pytest.approx(2 * np.mean(np.array(t) <= mean / error), abs=0.02)
    assert ends(found)[1] == pytest.approx(mean - np.quantile(t, 0.025) * error, abs=0.05)
    one_event = np.append(np.full(19, -0.05), 0.95)  # a third of all resamples lack it
    assert GainTest(one_event - 0.2, seed=0).p > 0.5  # Student: .0007
    assert ends(GainTest(one_event - 0.2, seed=0))[1] == math.inf


@pytest.mark.parametrize(("num", "most"), [(25, 0.08), (50, 0.08)])
def test_skewed_gains_whose_mean_is_0_seldom_show_a_difference(num, most, monkeypatch):
    """Student's test is false in 13% and 10% of these lognormal worlds, and in 35% and 8% of those with rare events."""
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 1_000)
    generator, false = np.random.default_rng(1), np.zeros(2)
    for _ in range(150):
        lognormal = np.exp(generator.normal(size=num)) - math.exp(0.5)
        rare = (generator.random(num) < 0.05) - 0.05
        false += [GainTest(x_P, seed=0).p < 0.05 for x_P in (lognormal, rare)]
    assert (false / 150 <= most).all(), false


@examples(300)
@given(
    st.lists(st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-3, 3, width=16)), min_size=1, max_size=30),
    st.sampled_from([0.2, 0.05, 0.05 / 3, 0.01]),
)
def test_the_interval_of_a_gain_excludes_0_exactly_if_p_is_below_alpha(x_P, alpha):
    x_P = np.array(x_P)
    found = GainTest(x_P, seed=0)
    low, high = ends(found, alpha)
    assert (low > 0 or high < 0) == (found.p < alpha)
    plain = clustered_mean(x_P, np.arange(len(x_P)), alpha=alpha)
    assert found.p >= mean_is_zero(x_P, np.arange(len(x_P)))
    if len(x_P) == 1:
        assert math.isnan(low)
        assert math.isnan(high)
    else:  # never narrower than Student's, so it covers the truth at least as often
        assert low <= plain.low + 1e-9
        assert plain.high - 1e-9 <= high


def test_a_gain_of_no_prompts_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        GainTest(np.zeros(0), seed=0)
