"""Algorithms with several runs each: by hand, against simpler intervals, and coverage."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy

from benchmarks.compare_coverage import coverage
from benchmarks.dependent_worlds import preferences, skewed_seeds, wide_seeds
from evaluation.compare.report.answer import answer_of
from evaluation.statistics.algorithms import AlgorithmTest
from evaluation.statistics.results import Conclusion
from evaluation.statistics.significance import ALPHA, EqualityTest, GainTest
from evaluation.statistics.summary import summarise
from evaluation.verdicts import Verdict
from files.records import as_json
from stages.reports.text import styles_of


def test_without_prompt_effects_it_is_welchs_interval_with_the_fewest_degrees_of_freedom() -> None:
    """If every prompt of a run has the same value, only the runs vary."""
    a_S, b_S = np.array([1.0, 1.4, 1.2]), np.array([0.2, 0.7, 0.1, 0.4])
    found = AlgorithmTest.of_values(np.tile(a_S[:, None], 50), np.tile(b_S[:, None], 50), np.arange(50), seed=0)
    effect, error = a_S.mean() - b_S.mean(), math.sqrt(a_S.var(ddof=1) / 3 + b_S.var(ddof=1) / 4)
    half = scipy.stats.t.ppf(0.975, 2) * error
    over_prompts = GainTest(np.full(50, effect), seed=0).interval()
    ends = effect - math.hypot(half, effect - over_prompts.low), effect + math.hypot(half, over_prompts.high - effect)
    assert (found.mean, found.interval().low, found.interval().high) == pytest.approx((effect, *ends))
    welch = scipy.stats.ttest_ind(a_S, b_S, equal_var=False)
    assert found.p > welch.pvalue


def test_runs_that_are_alike_give_the_interval_over_prompts() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(0.3, 1.0, size=60)
    found = AlgorithmTest.of_values(np.tile(values, (2, 1)), np.zeros((3, 60)), np.arange(60), seed=0)
    expected = GainTest(values, seed=0).interval()
    assert (found.interval().low, found.interval().high) == pytest.approx((expected.low, expected.high))
    won = (generator.random(40) < 0.7).astype(float)
    alike = AlgorithmTest.of_preferences(np.tile(won, (2, 2, 1)), np.arange(40), seed=0).interval()
    assert (alike.low, alike.high) == pytest.approx(EqualityTest(won, seed=0).interval())


def test_by_hand() -> None:
    """Two runs of A, two of B, four prompts; every number of the formula worked by hand."""
    a_AP, b_BP = (
        np.array([[3.0, 1.0, 2.0, 2.0], [5.0, 3.0, 3.0, 5.0]]),
        np.array([[1.0, 0.0, 1.0, 2.0], [2.0, 1.0, 0.0, 1.0]]),
    )
    found = AlgorithmTest.of_values(a_AP, b_BP, np.arange(4), seed=0)
    # Means of runs: 2 and 4; 1 and 1. Of prompts: A 4, 2, 2.5, 3.5; B 1.5, .5, .5, 1.5; differences 2.5, 1.5, 2, 2.
    assert found.mean == 2.0
    v_a = 2.0 / 2  # ((2 - 3)² + (4 - 3)²)/(2 - 1) / 2
    v_ap = 2 * (4 / 3) * (2 * (0.25 + 0.25)) / (2 * 4) ** 2  # residuals are 0, 0, ½ and -½ in one run
    v_bp = 2 * (4 / 3) * (2 * 4 * 0.25) / (2 * 4) ** 2  # residuals ±½ on all prompts; B's runs are alike, so v_b = v_bp
    t_runs, t_prompts = scipy.special.stdtrit(1, 0.975), scipy.special.stdtrit(3, 0.975)
    over_prompts = GainTest(np.array([2.5, 1.5, 2.0, 2.0]), seed=0).interval()
    added = t_runs**2 * (v_a + v_bp) - min(t_runs, t_prompts) ** 2 * (v_ap + v_bp)
    half = math.sqrt((2.0 - over_prompts.low) ** 2 + added)
    assert (found.interval().low, found.interval().high) == pytest.approx((2 - half, 2 + half))


def test_interval_and_p_are_one_and_contain_the_interval_over_prompts() -> None:
    shown = 0
    for seed in range(16):
        generator = np.random.default_rng(seed)
        runs = generator.integers(2, 6, size=2)
        lead = generator.normal(0.5 + 0.02 * seed, 0.1, size=runs)[:, :, None]
        x_ABP = (generator.random((*runs, 30)) < np.clip(lead, 0, 1)).astype(float)
        cluster_P = np.arange(30) // int(generator.integers(1, 4))
        test = AlgorithmTest.of_preferences(x_ABP, cluster_P, seed=0)
        over_prompts = EqualityTest(x_ABP.mean(axis=(0, 1)), cluster_P, seed=0).interval()
        found = test.interval()
        assert found.low <= over_prompts[0] + 1e-9
        assert found.high >= over_prompts[1] - 1e-9
        assert 0 <= found.low <= found.high <= 1
        for alpha in (ALPHA, 0.3, test.p, test.p * 1.001):
            ends = test.interval(alpha)
            assert (ends.low > 0.5 or ends.high < 0.5) == (test.p < alpha)
        mirrored = AlgorithmTest.of_preferences(1 - x_ABP.swapaxes(0, 1), cluster_P, seed=0)
        assert mirrored.p == pytest.approx(test.p, rel=1e-3)
        shown += test.p < ALPHA
    assert 0 < shown < 16


def test_a_single_run_is_refused() -> None:
    with pytest.raises(ValueError, match="1 and 3 runs; at least two of each were expected"):
        AlgorithmTest.of_values(np.zeros((1, 5)), np.zeros((3, 5)), np.arange(5), seed=0)


def test_algorithms_of_a_comparison() -> None:
    """Two algorithms with two runs each; a prompt without a verdict on one pair of runs is left out."""
    generator = np.random.default_rng(0)
    runs = {"ppo": ["ppo/1", "ppo/2"], "dpo": ["dpo/1", "dpo/2"]}
    names = [name for own in runs.values() for name in own]
    score = {(name, p): generator.normal(name.startswith("ppo"), 1) for name in names for p in range(30)}
    rows = [
        Verdict(
            f"p{p}", a, b, 0, 0, "judge", "judge", float(score[a, p] > score[b, p]),
            score_a=score[a, p], score_b=score[b, p],
        )
        for p in range(30)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]  # fmt: skip
    rows = [row for row in rows if not (row.prompt_id == "p7" and row.policy_a == "ppo/2" and row.policy_b == "dpo/1")]
    judge = summarise(rows, names, runs=runs, seed=0).judges[0]
    (pair,) = judge.algorithms
    kept = [p for p in range(30) if p != 7]
    x_ABP = np.array([[[float(score[a, p] > score[b, p]) for p in kept] for b in runs["dpo"]] for a in runs["ppo"]])
    values = [np.array([[score[name, p] for p in kept] for name in own]) for own in runs.values()]
    expected = AlgorithmTest.of_preferences(x_ABP, np.arange(29), seed=0)
    assert (pair.algorithm_a, pair.algorithm_b, pair.num_prompts, pair.num_prompts_missing) == ("ppo", "dpo", 29, 1)
    gain = AlgorithmTest.of_values(*values, np.arange(29), seed=0).interval()
    assert (pair.win_rate.low, pair.p, pair.holm_p) == pytest.approx((expected.interval().low, expected.p, expected.p))
    assert (pair.score_difference.low, pair.score_difference.high) == pytest.approx((gain.low, gain.high))
    clustered = summarise(rows, names, {f"p{p}": f"p{p % 5}" for p in range(30)}, runs, seed=0).judges[0].algorithms[0]
    assert (clustered.num_clusters, clustered.win_rate.mean) == (5, pair.win_rate.mean)
    assert summarise(rows, names, seed=0).judges[0].algorithms == ()


def test_holm_widens_a_difference_of_algorithms_that_it_takes_back() -> None:
    """Three algorithms: the smallest p of three pairs is multiplied by three."""
    for seed in range(60):
        generator = np.random.default_rng(seed)
        runs = {name: [f"{name}/{n}" for n in range(3)] for name in ("a", "b", "c")}
        names = [name for own in runs.values() for name in own]
        rows = [
            Verdict(
                f"p{p}", one, two, 0, 0, "j", "j", float(generator.random() < 0.5 + 0.2 * (one[0] == "a" != two[0]))
            )
            for p in range(25)
            for i, one in enumerate(names)
            for two in names[i + 1 :]
        ]
        pairs = summarise(rows, names, runs=runs, seed=0).judges[0].algorithms
        assert len(pairs) == 3
        for pair in pairs:
            assert (pair.win_rate.low > 0.5 or pair.win_rate.high < 0.5) == (pair.holm_p < ALPHA) == pair.different
        if any(pair.p < ALPHA <= pair.holm_p for pair in pairs):
            return
    pytest.fail("no world had a difference that the correction takes back")


def test_a_judge_that_follows_position_tells_no_algorithms_apart() -> None:
    """It takes the first response in 95%, and a's runs were mostly shown first."""
    runs = {name: [f"{name}/{n}" for n in range(3)] for name in ("a", "b")}
    rows = [
        Verdict(f"p{p}", one, two, 0, 0, "j", "j", float((first == "a") == (p % 20 > 0)), first)
        for one in runs["a"]
        for two in runs["b"]
        for p, first in enumerate(["a", "a", "a", "b"] * 20)
    ]
    summary = summarise(rows, runs=runs, seed=0)
    (pair,) = summary.judges[0].algorithms
    assert (pair.win_rate.low > 0.5, pair.different) == (True, False)
    answer = answer_of(summary, styles_of([*runs["a"], *runs["b"]]), {})
    assert answer.text.startswith("Cannot tell which of the algorithms a and b is better: the judge j follows position")


def test_failed_verdicts_bound_a_difference_of_algorithms() -> None:
    """A judge fails on up to 8% of all verdicts, each a loss of a. The bound holds what all verdicts would have shown;
    a and b are equal in the first three worlds, and a is better in the last.
    """
    runs = {name: [f"{name}/{n}" for n in range(2)] for name in ("a", "b")}
    shown = []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        advantage = 0.45 if seed >= 3 else 0.0
        won_ABP = generator.random((2, 2, 100)) < 0.5 + advantage
        rows = [
            Verdict(f"p{p}", one, two, 0, 0, "j", "j", float(won_ABP[i, j, p]))
            for i, one in enumerate(runs["a"])
            for j, two in enumerate(runs["b"])
            for p in range(100)
        ]
        lost = [row for row in rows if not row.preference_a][:32]
        failed = [replace(row, failure="no verdict", preference_a=math.nan) if row in lost else row for row in rows]
        (whole,), (bound,), (few,) = (
            summarise(some, runs=runs, seed=0).judges[0].algorithms
            for some in (rows, failed, [row for row in rows if row not in lost])
        )
        assert (bound.conclusion.kind, bound.conclusion.reason) == (
            "bound", f"{len(lost)} of 400 verdicts of the judge failed",
        )  # fmt: skip
        assert bound.win_rate.low < whole.win_rate.mean < bound.win_rate.high
        assert bound.conclusion.shown in ("", whole.conclusion.shown)
        assert few.win_rate.mean > whole.win_rate.mean + 0.01
        shown.append(bound.conclusion.shown)
        answer = answer_of(summarise(failed, runs=runs, seed=0), styles_of([*runs["a"], *runs["b"]]), {})
        assert "verdicts of the judge j failed, and the interval holds whatever they would have been" in answer.text
    assert shown == ["", "", "", "better"]
    many = [replace(row, failure="no", preference_a=math.nan) if n % 9 == 0 else row for n, row in enumerate(rows)]
    (pair,) = summarise(many, runs=runs, seed=0).judges[0].algorithms
    assert (pair.conclusion.kind, pair.different) == ("none", False)


def test_seeds_are_covered_over_runs_and_not_by_one_run_of_each() -> None:
    found = coverage(lambda generator, num: preferences(generator, num, 0.3, 0.0, num_templates=0), 3, 40, seed=0)
    ours, one_run = found.values()
    assert ours.share >= 0.9
    assert one_run.share < 0.75


@pytest.mark.parametrize("num_runs", [2, 3])
def test_equal_algorithms_whose_seeds_differ_much_seldom_show_a_difference(num_runs: int, monkeypatch) -> None:
    """Runs that differ as much as verdicts do; by Welch's degrees of freedom, 4% to 15% of verdicts were false."""
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 400)
    monkeypatch.setattr("evaluation.statistics.significance._DRAWS_PER_CHUNK", 400)
    found = coverage(wide_seeds, num_runs, 80, seed=0)
    assert min(covered.share for covered in found.values()) >= 0.9


def test_what_runs_could_have_shown_is_beyond_an_effect_that_they_did_not_show() -> None:
    hidden = 0
    for seed in range(12):
        generator = np.random.default_rng(seed)
        lead = generator.normal(0.5 + 0.02 * seed, 0.1, size=(3, 3))[:, :, None]
        test = AlgorithmTest.of_preferences(
            (generator.random((3, 3, 30)) < np.clip(lead, 0, 1)).astype(float), np.arange(30), seed=0
        )
        for alpha in (ALPHA, ALPHA / 10):
            if test.p >= alpha:
                assert test.detectable(alpha) > abs(test.mean - 0.5)
                hidden += 1
        assert test.detectable(ALPHA / 10) > test.detectable(ALPHA)
    assert hidden > 5


@pytest.mark.parametrize("num_runs", [2, 3])
def test_a_difference_of_few_runs_says_how_often_such_ones_are_false(num_runs: int) -> None:
    """The caution stands in report.json (`as_json`) and in the sentence on the terminal and the page."""
    runs = {name: [f"{name}/{n}" for n in range(num_runs)] for name in ("a", "b")}
    rows = [
        Verdict(f"p{p}", one, two, 0, 0, "j", "j", float(p % 10 > 0))
        for p in range(60)
        for one in runs["a"]
        for two in runs["b"]
    ]
    summary = summarise(rows, runs=runs, seed=0)
    (pair,) = summary.judges[0].algorithms
    said = "With fewer than 20 runs, up to 18% of such verdicts are false if runs are skewed."
    assert pair.different
    assert as_json(pair)["conclusion"]["caution"] == said
    answer = answer_of(summary, styles_of([*runs["a"], *runs["b"]]), {})
    assert answer.text.endswith(f"60 prompts). {said}")
    better, undecided = Conclusion("better", 0.1, 0.3), Conclusion("undecided", -0.1, 0.1)
    assert better.with_caution(19, 60, bounded=True).caution == said
    assert better.with_caution(20, 60, bounded=True).caution == ""
    assert undecided.with_caution(num_runs, 60, bounded=True).caution == said


def test_runs_whose_scatter_is_skewed_mislead_as_often_as_the_caution_says(monkeypatch) -> None:
    """One algorithm's runs are lognormal: no interval of five runs covers in 95%, but the caution holds."""
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 200)
    monkeypatch.setattr("evaluation.statistics.significance._DRAWS_PER_CHUNK", 200)
    found = coverage(skewed_seeds, 5, 60, seed=0)
    assert found["normal, both vary"].share >= 0.93
    assert 0.75 <= found["lognormal, one varies"].share <= 0.93
