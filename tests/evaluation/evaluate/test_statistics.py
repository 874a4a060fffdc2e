"""Statistics of an evaluation: by hand, and the coverage of intervals over clustered items."""

import math

import numpy as np
import pytest

from evaluation.evaluate import statistics
from evaluation.evaluate.statistics import mean_interval, suite_statistics
from evaluation.suites.suite import Item, Measure, Scored
from preferences.statistics.intervals import wilson

RIGHT = Measure("right", "Share of right answers.")
EDGE = 1.4  # of a normal value, above which an answer is right
LOSS = Measure("loss", "Nats.", higher_is_better=False)


def items_of(num: int, *, per_cluster: int = 1, group: str = "") -> list[Item]:
    return [Item(f"q{n}", (), group, f"c{n // per_cluster}" if per_cluster > 1 else "") for n in range(num)]


def rows_of(measure: str, values: list[float]) -> dict[str, Scored]:
    return {f"q{n}": Scored(f"q{n}", {measure: value}) for n, value in enumerate(values)}


def test_a_planted_difference_by_hand() -> None:
    # 16 items; a is right on all, b on the last 6. McNemar: 10 discordant items, all for a: p = 2/2^10.
    scored = {"a": rows_of("right", [1.0] * 16), "b": rows_of("right", [0.0] * 10 + [1.0] * 6)}
    found = suite_statistics("s", [RIGHT], items_of(16), scored, seed=0)
    a = found.of("a", "right")
    assert a is not None
    low, high = (float(end[0]) for end in wilson(np.array([1.0]), np.array([16.0])))
    assert (a.value.mean, a.value.low, a.value.high) == (1.0, pytest.approx(low), high)
    (difference,) = found.differences
    assert difference.difference.mean == 10 / 16
    assert difference.p == pytest.approx(max(2 / 2**10, 2 * (1 - _phi(math.sqrt(10)))))
    assert (difference.holm_p, difference.better, difference.num_items) == (difference.p, "a", 16)
    assert difference.difference.low > 0


def _phi(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def test_the_lower_loss_is_better_and_holm_corrects_for_all_pairs() -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(size=40)
    scored = {
        "a": rows_of("loss", list(base)),
        "b": rows_of("loss", list(base + 1 + 0.1 * generator.normal(size=40))),
        "c": rows_of("loss", list(base + 0.05 * generator.normal(size=40))),
    }
    found = suite_statistics("s", [LOSS], items_of(40), scored, seed=0)
    by_pair = {(row.model_a, row.model_b): row for row in found.differences}
    assert (by_pair["a", "b"].better, by_pair["b", "c"].better, by_pair["a", "c"].better) == ("a", "c", "")
    smallest = min(row.p for row in found.differences)
    assert min(row.holm_p for row in found.differences) == pytest.approx(3 * smallest)
    for row in found.differences:  # the interval and the test are one
        assert (row.difference.low > 0 or row.difference.high < 0) == (row.holm_p < 0.05)


def test_items_without_a_value_are_left_out_of_the_pair_and_counted() -> None:
    failed = {"q3": Scored("q3", {}, failures={"right": "no number in 'x'"})}
    also = {"q4": Scored("q4", {}, failures={"right": "no number in 'yy'"})}
    scored = {
        "a": rows_of("right", [1.0, 0.0, 1.0]) | failed | also,
        "b": rows_of("right", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    }
    found = suite_statistics("s", [RIGHT, LOSS], items_of(6), scored, seed=0)
    value = found.of("a", "right")
    assert value is not None
    assert (value.value.mean, value.num_items, value.num_failed) == (pytest.approx(2 / 3), 3, 2)
    assert found.differences[0].num_items == 3
    assert found.of("a", "loss") is None  # it applies to no item
    (failure,) = found.failures
    assert (failure.reason, failure.num_items, failure.item_id) == ("no number in 'x'", 2, "q3")


def test_an_aggregate_and_its_difference_are_resampled_by_cluster() -> None:
    def ratio(rows: list[Scored]) -> float:
        return sum(row.values["hits"] for row in rows) / sum(row.values["length"] for row in rows)

    measure = Measure("ratio", "Hits per length.", aggregate=ratio)
    generator = np.random.default_rng(1)
    length = generator.integers(1, 9, size=60).astype(float)
    better, worse = (length * share + generator.normal(size=60) * 0.3 for share in (0.8, 0.4))
    scored = {
        name: {f"q{n}": Scored(f"q{n}", {"hits": float(hits[n]), "length": float(length[n])}) for n in range(60)}
        for name, hits in (("a", better), ("b", worse))
    }
    items = items_of(60, per_cluster=3)
    found = suite_statistics("s", [measure], items, scored, seed=0)
    a = found.of("a", "ratio")
    assert a is not None
    assert a.value.mean == pytest.approx(better.sum() / length.sum())
    # The delta method's interval over the 20 clusters.
    residual = (better - a.value.mean * length).reshape(20, 3).sum(axis=1)
    half = 1.96 * math.sqrt(20 / 19 * (residual**2).sum()) / length.sum()
    assert (a.value.high - a.value.low) / 2 == pytest.approx(half, rel=0.2)
    assert a.num_clusters == 20
    (difference,) = found.differences
    assert difference.difference.mean == pytest.approx((better - worse).sum() / length.sum())
    assert (difference.better, difference.difference.low > 0) == ("a", True)
    same = suite_statistics("s", [measure], items, {"a": scored["a"], "c": scored["a"]}, seed=0).differences[0]
    assert (same.p, same.better, same.difference.low, same.difference.high) == (1.0, "", 0.0, 0.0)


def test_values_by_group_and_a_single_cluster() -> None:
    items = [Item("q0", (), "x"), Item("q1", (), "x"), Item("q2", (), "y")]
    found = suite_statistics("s", [RIGHT], items, {"a": rows_of("right", [1.0, 0.0, 1.0])}, seed=0)
    assert [(v.group, v.value.mean, v.num_items) for v in found.values] == [
        ("", 2 / 3, 3),
        ("x", 0.5, 2),
        ("y", 1.0, 1),
    ]
    one = mean_interval(np.array([1.0, 0.5]), np.array([0, 0]), is_share=True)
    assert (one.mean, math.isnan(one.low)) == (0.75, True)


def test_shares_that_are_not_0_or_1_stay_in_their_range_and_have_a_width() -> None:
    measure = Measure("f1", "F1.", is_share=True)
    ties = suite_statistics("s", [measure], items_of(20), {"a": rows_of("f1", [0.5] * 20)}, seed=0).of("a", "f1")
    assert ties is not None
    assert (ties.unit, ties.value.mean) == ("share", 0.5)
    assert 0.2 < ties.value.low < 0.45 < 0.55 < ties.value.high < 0.8  # Student's would be 0.5 to 0.5
    values = np.array([0.0] * 11 + [0.9])
    assert mean_interval(values, np.arange(12), is_share=False).low < 0  # Student's
    for cluster_I in (np.arange(12), np.arange(12) // 2):
        found = mean_interval(values, cluster_I, is_share=True)
        assert 0 < found.low < found.mean < found.high < 1


def test_shares_of_clustered_items_stay_between_0_and_1() -> None:
    """Items of a cluster that are all alike are worth one item, and independent ones as many as they are."""
    right_C = np.array([1.0] * 19 + [0.0])
    alone, copied = (
        mean_interval(right_C, np.arange(20), is_share=True),
        mean_interval(np.repeat(right_C, 5), np.arange(100) // 5, is_share=True),
    )
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high), abs=0.03)
    assert copied.high < 1
    alike = mean_interval(np.ones(100), np.arange(100) // 5, is_share=True)
    assert (alike.low, alike.high) == (pytest.approx(float(wilson(np.array([1.0]), np.array([20.0]))[0][0])), 1.0)
    spread = mean_interval(
        np.tile([0.0, 1.0, 0.0, 0.0], 25), np.arange(100) // 4, is_share=True
    )  # every cluster has one right answer
    low, high = (float(end[0]) for end in wilson(np.array([0.25]), np.array([100.0])))
    assert (spread.low, spread.high) == pytest.approx((low, high))


@pytest.mark.parametrize("binary", [True, False])
def test_intervals_over_clusters_cover_and_those_over_items_do_not(binary: bool) -> None:
    """400 worlds of 25 clusters of 8 items that share most of their difficulty; the standard error is about 1%. A share
    is far from ½, where Student's interval would cover less.
    """
    generator = np.random.default_rng(3)
    cluster_I = np.repeat(np.arange(25), 8)
    covered = covered_by_items = 0
    for _ in range(400):
        shared = generator.normal(size=25)[cluster_I]
        value_I = shared + 0.5 * generator.normal(size=200)
        value_I = (value_I > EDGE).astype(float) if binary else value_I
        truth = 1 - _phi(EDGE / math.sqrt(1.25)) if binary else 0.0
        over_clusters = mean_interval(value_I, cluster_I, is_share=binary)
        over_items = mean_interval(value_I, np.arange(200), is_share=binary)
        covered += over_clusters.low <= truth <= over_clusters.high
        covered_by_items += over_items.low <= truth <= over_items.high
    assert 0.92 <= covered / 400 <= 0.98
    assert covered_by_items / 400 < 0.75


def test_paired_tests_over_clusters_reject_a_true_null_at_their_level() -> None:
    generator = np.random.default_rng(4)
    items = items_of(120, per_cluster=6)
    rejected = 0
    for _ in range(200):
        shared = np.repeat(generator.normal(size=20), 6)
        a, b = (list(generator.normal(size=120) + sign * shared) for sign in (0.5, -0.5))
        found = suite_statistics("s", [LOSS], items, {"a": rows_of("loss", a), "b": rows_of("loss", b)}, seed=0)
        rejected += bool(found.differences[0].better)
    assert rejected / 200 <= 0.09
    assert statistics.NUM_RESAMPLES >= 1_000
