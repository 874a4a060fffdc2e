"""Intervals and tests over clusters of prompts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.compare_coverage import coverage
from benchmarks.compare_worlds import Held, comparisons
from benchmarks.dependent_worlds import both_intervals, verdicts_of
from evaluation.measures.policies import measure_policies
from evaluation.statistics.significance import ALPHA, EqualityTest, GainTest
from evaluation.statistics.summary import flips, position_bias, summarise
from evaluation.statistics.win_rates import interval_over_labelers, length_controlled, pair_test
from evaluation.verdicts import Response, Verdict
from preferences.statistics.intervals import score_interval, share_interval, wilson


def drawn_verdicts(num_prompts: int, num_policies: int = 2, seed: int = 0) -> list[Verdict]:
    """Two labelers' verdicts in both orders, with scores and lengths; some of the verdicts are ties."""
    generator = np.random.default_rng(seed)
    names = [f"policy{number}" for number in range(num_policies)]
    return [
        Verdict(
            f"p{prompt}", a, b, 0, 0, "judge", labeler, float(generator.choice([0.0, 0.5, 1.0], p=[0.3, 0.2, 0.5])),
            first=first, score_a=float(generator.normal()), score_b=float(generator.normal()),
            length_a=int(generator.integers(1, 90)), length_b=int(generator.integers(1, 90)), category=f"c{prompt % 2}",
        )
        for prompt in range(num_prompts)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for labeler in ("ada", "bob")
        for first in ("a", "b")
    ]  # fmt: skip


def copied(verdicts: list[Verdict], times: int) -> tuple[list[Verdict], dict[str, str]]:
    """Copies every prompt, with its verdicts, and makes the copies one cluster."""
    rows = [replace(row, prompt_id=f"{row.prompt_id}-{copy}") for copy in range(times) for row in verdicts]
    return rows, {row.prompt_id: row.prompt_id[: row.prompt_id.rindex("-")] + "-0" for row in rows}


def test_one_cluster_per_prompt_changes_no_bit() -> None:
    verdicts = drawn_verdicts(30, 3)
    single = {f"p{prompt}": f"p{prompt}" for prompt in range(30)}
    assert repr(summarise(verdicts, seed=1)) == repr(summarise(verdicts, clusters=single, seed=1))
    responses = [Response(name, f"p{n}", 0, f"text {n} {name}") for name in ("x", "y") for n in range(30)]
    assert repr(measure_policies(responses, seed=1)) == repr(measure_policies(responses, clusters=single, seed=1))


def test_copies_of_a_prompt_are_no_further_evidence() -> None:
    verdicts = drawn_verdicts(25, 3)
    rows, clusters = copied(verdicts, 3)
    once, thrice = summarise(verdicts, seed=1), summarise(rows, clusters=clusters, seed=1)
    assert (thrice.num_prompts, thrice.num_clusters, once.num_clusters) == (75, 25, 25)
    for one, three in zip(once.judges[0].pairs, thrice.judges[0].pairs, strict=True):
        assert (three.significance.p, three.significance.holm_p) == pytest.approx(
            (one.significance.p, one.significance.holm_p)
        )
        for place in ("low", "high"):
            assert getattr(three.win_rate, place) == pytest.approx(getattr(one.win_rate, place), abs=1e-8)
            assert getattr(three.win_rate.over_labelers, place) == pytest.approx(
                getattr(one.win_rate.over_labelers, place), abs=1e-8
            )
            assert getattr(three.length_controlled, place) == pytest.approx(
                getattr(one.length_controlled, place), abs=1e-6
            )
            assert getattr(three.position_bias, place) == pytest.approx(getattr(one.position_bias, place), abs=1e-8)
            assert getattr(three.flips.changed, place) == pytest.approx(getattr(one.flips.changed, place), abs=1e-8)
        assert three.power.detectable == pytest.approx(one.power.detectable)
        assert three.power.num_prompts_needed == pytest.approx(3 * one.power.num_prompts_needed, abs=3)
        assert [found.win_rate.low for found in three.categories] == pytest.approx(
            [found.win_rate.low for found in one.categories], abs=1e-8
        )
    one, three = once.judges[0].ratings, thrice.judges[0].ratings
    assert one is not None
    assert three is not None
    assert [found.low for found in three.policies] == pytest.approx([found.low for found in one.policies], abs=1e-6)
    unclustered = summarise(rows, seed=1).judges[0].pairs[0]
    assert unclustered.win_rate.high - unclustered.win_rate.low < 0.7 * (
        once.judges[0].pairs[0].win_rate.high - once.judges[0].pairs[0].win_rate.low
    )


def test_measures_and_agreement_are_over_clusters() -> None:
    verdicts = drawn_verdicts(20)
    rows, clusters = copied(verdicts, 4)

    def responses(given: list[Verdict]) -> list[Response]:
        prompts = dict.fromkeys(row.prompt_id for row in given)
        return [
            Response(name, prompt, 0, "a text", log_ratio=sum(map(ord, prompt.split("-")[0])) % 7)
            for name in ("policy0", "policy1")
            for prompt in prompts
        ]

    once = measure_policies(responses(verdicts), verdicts, seed=0)["policy0"]
    many = measure_policies(responses(rows), rows, clusters, seed=0)["policy0"]
    naive = measure_policies(responses(rows), rows, seed=0)["policy0"]
    assert many.kl_nats.low == pytest.approx(once.kl_nats.low)
    assert many.scores["judge"].mean.low == pytest.approx(once.scores["judge"].mean.low)
    assert naive.kl_nats.low > many.kl_nats.low
    agreed, agreed_naive = (summarise(rows, clusters=of, seed=0).judges[0].labelers for of in (clusters, {}))
    assert agreed.share.high - agreed.share.low > 1.3 * (agreed_naive.share.high - agreed_naive.share.low)


def test_the_clustered_test_is_the_share_of_all_sign_vectors() -> None:
    """Eight clusters of unequal size, by counting all 256 sign vectors of the clusters' sums."""
    size_C = [1, 5, 2, 4, 3, 5, 1, 2]
    cluster_P = np.repeat(range(8), size_C)
    x_P = np.random.default_rng(1).beta(3, 2, len(cluster_P))
    sums_C = np.array([(x_P[cluster_P == c] - 0.5).sum() for c in range(8)])
    reached = [abs(np.dot(signs, sums_C)) >= abs(sums_C.sum()) - 1e-9 for signs in product((-1, 1), repeat=8)]
    test = EqualityTest(x_P, cluster_P, seed=0)
    assert test.flipped_p == pytest.approx(np.mean(reached))
    assert (test.num_draws, test.num_clusters) == (0, 8)
    low, high = test.interval()
    assert low < x_P.mean() < high


def test_interval_and_test_are_one_over_clusters() -> None:
    generator = np.random.default_rng(3)
    shown = 0
    for _ in range(100):
        size_C = generator.integers(1, 7, int(generator.integers(1, 14)))
        cluster_P = np.repeat(np.arange(len(size_C)), size_C)
        test = EqualityTest(generator.beta(3, 2, len(cluster_P)), cluster_P, seed=0)
        for alpha in (ALPHA, 0.2):
            low, high = test.interval(alpha)
            assert (low > 0.5 or high < 0.5) == (test.p < alpha)
        shown += test.p < ALPHA
    assert 10 < shown < 90


def test_verdicts_that_are_alike_within_clusters_count_once() -> None:
    """Wilson's interval over clusters, worked by its own formula; also if all clusters came out alike."""
    for won_C in (np.array([1.0] * 9 + [0.0] * 3), np.ones(12)):
        won_P, cluster_P = np.repeat(won_C, 5), np.repeat(range(12), 5)
        low, high = wilson(np.array([won_C.mean()]), np.array([12.0]))
        assert score_interval(won_P, cluster_P) == pytest.approx((low[0], high[0]), abs=1e-6)
        found = share_interval(won_P, cluster_P)
        assert (found.mean, found.low) == (won_P.mean(), pytest.approx(low[0], abs=1e-6))


def test_clusters_that_are_no_more_alike_than_others_cost_nothing() -> None:
    """Each cluster has the same share of wins, which independent prompts would hardly have: the effect is held at 1."""
    won_P = np.tile([1.0, 1.0, 1.0, 0.0, 0.0], 20)
    assert score_interval(won_P, np.repeat(range(20), 5)) == pytest.approx(score_interval(won_P), abs=1e-8)


def test_a_single_cluster_shows_nothing() -> None:
    one = EqualityTest(np.full(40, 0.9), np.zeros(40, dtype=np.int64), seed=0)
    assert one.p == 1.0
    assert one.interval()[0] <= 0.5
    assert np.isnan(one.power().detectable)
    assert GainTest(np.array([2.0, 3.0, 2.5]), np.zeros(3, dtype=np.int64), seed=0).p == 1.0


def test_gains_are_tested_over_clusters() -> None:
    gains = np.array([1.0, 1.2, 0.9, 1.1, 0.8, 1.3])
    spread = GainTest(np.repeat(gains, 4), seed=0)
    clustered = GainTest(np.repeat(gains, 4), np.repeat(range(6), 4), seed=0)
    assert clustered.p == GainTest(gains, seed=0).p == pytest.approx(2 / 64)
    assert spread.p < 0.001
    assert clustered.interval().low == pytest.approx(GainTest(gains, seed=0).interval().low)


def test_other_labelers_and_equal_length_take_clusters() -> None:
    prompt_V = np.arange(40)
    won_V = np.repeat([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0], 5)
    pair = comparisons(won_V, prompt_V, labeler_V=prompt_V % 2, cluster_V=prompt_V // 5)
    test = pair_test(pair, seed=0)
    assert interval_over_labelers(pair, test).low <= test.interval()[0]
    assert length_controlled(replace(pair, cluster_V=prompt_V // 10)).reason.startswith("4 clusters; at least 5")


def test_position_bias_flips_and_ratings_take_clusters() -> None:
    verdicts = drawn_verdicts(20)
    rows, clusters = copied(verdicts, 2)
    assert flips(rows, clusters).changed.low == pytest.approx(flips(verdicts).changed.low, abs=1e-8)
    prompt_V = np.arange(60)
    one = comparisons((prompt_V % 3 > 0).astype(float), prompt_V, first_V=np.where(prompt_V % 2, 1, -1))
    clustered = position_bias(replace(one, cluster_V=prompt_V // 6))
    assert clustered.mean == position_bias(one).mean


def test_templates_are_covered_only_if_they_are_clusters() -> None:
    found = coverage(_templates, 20, 60, seed=0)
    assert found["win rate 0.5, ρ = 0.5: clustered"].share >= 0.9
    assert found["win rate 0.5, ρ = 0.5: as if independent"].share < 0.88


def _templates(generator: np.random.Generator, num_templates: int) -> Iterator[Held]:
    template_V = np.repeat(np.arange(num_templates), 5)
    won_V = verdicts_of(generator, template_V, 0.5, 0.5)
    yield from both_intervals("win rate 0.5, ρ = 0.5", won_V, template_V, 0.5)
