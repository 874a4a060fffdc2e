"""Statistics of an evaluation: by hand, and the coverage of intervals over clustered items."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy

from evaluation.evaluate.statistics import SuiteStatistics, suite_statistics
from evaluation.statistics.algorithms import AlgorithmTest
from evaluation.statistics.significance import EqualityTest
from evaluation.suites.arena_hard import SUITE as ARENA_HARD
from evaluation.suites.suite import Item, Measure, Scored
from preferences.statistics.estimates import Floats, Interval
from preferences.statistics.intervals import clustered_mean, share_interval, wilson

RIGHT = Measure("right", "Share of right answers.", is_share=True)
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
    by_pair = {(row.a, row.b): row for row in found.differences}
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


def _ratio(rows: Sequence[Scored]) -> float:
    return sum(row.values["hits"] for row in rows) / sum(row.values["length"] for row in rows)


RATIO = Measure("ratio", "Hits per length.", aggregate=_ratio, reads=("hits", "length"))


def ratio_rows(hits: Floats, length: Floats) -> dict[str, Scored]:
    pairs = zip(hits.tolist(), length.tolist(), strict=True)
    return {f"q{n}": Scored(f"q{n}", {"hits": hit, "length": size}) for n, (hit, size) in enumerate(pairs)}


def test_an_aggregate_and_its_difference_have_the_errors_of_the_delta_method() -> None:
    generator = np.random.default_rng(1)
    length = generator.integers(1, 9, size=60).astype(float)
    better, worse = (length * share + generator.normal(size=60) * 0.3 for share in (0.8, 0.4))
    scored = {"a": ratio_rows(better, length), "b": ratio_rows(worse, length)}
    items = items_of(60, per_cluster=3)
    found = suite_statistics("s", [RATIO], items, scored, seed=0)
    a = found.of("a", "ratio")
    assert a is not None
    assert a.value.mean == pytest.approx(better.sum() / length.sum())
    residual = (better - a.value.mean * length).reshape(20, 3).sum(axis=1)
    half = float(scipy.special.stdtrit(19, 0.975)) * math.sqrt(20 / 19 * (residual**2).sum()) / length.sum()
    assert (a.value.high - a.value.low) / 2 == pytest.approx(half, rel=0.03)
    assert a.num_clusters == 20
    (difference,) = found.differences
    assert difference.difference.mean == pytest.approx((better - worse).sum() / length.sum())
    assert (difference.better, difference.difference.low > 0) == ("a", True)
    same = suite_statistics("s", [RATIO], items, {"a": scored["a"], "c": scored["a"]}, seed=0).differences[0]
    assert (same.p, same.better, same.difference.low, same.difference.high) == (1.0, "", 0.0, 0.0)


def test_an_aggregate_that_is_a_mean_has_the_interval_and_test_of_a_mean() -> None:
    def mean(rows: Sequence[Scored]) -> float:
        return sum(row.values["loss"] for row in rows) / len(rows)

    generator = np.random.default_rng(2)
    values = {name: list(generator.normal(size=40)) for name in ("a", "b")}
    scored = {name: rows_of("loss", own) for name, own in values.items()}
    as_aggregate = Measure("loss", "Nats.", higher_is_better=False, aggregate=mean, reads=("loss",))
    found, expected = (
        suite_statistics("s", [measure], items_of(40, per_cluster=4), scored, seed=0)
        for measure in (as_aggregate, LOSS)
    )
    for one, other in zip(found.values, expected.values, strict=True):
        assert (one.value.mean, one.value.low, one.value.high) == pytest.approx(
            (other.value.mean, other.value.low, other.value.high)
        )
    assert found.differences[0].p == pytest.approx(expected.differences[0].p)


def test_more_clusters_than_blocks_give_about_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    length = generator.integers(1, 9, size=240).astype(float)
    scored = {"a": ratio_rows(length * 0.5 + generator.normal(size=240), length)}
    widths = []
    for size in (240, 60):
        monkeypatch.setattr("evaluation.evaluate.statistics.MAX_BLOCKS", size)
        found = suite_statistics("s", [RATIO], items_of(240), scored, seed=0).of("a", "ratio")
        assert found is not None
        widths.append(found.value.high - found.value.low)
    assert widths[0] != widths[1]
    assert widths[1] == pytest.approx(widths[0], rel=0.25)


def test_an_aggregate_of_fewer_than_six_clusters_has_no_interval_and_shows_nothing() -> None:
    """Of five clusters that all favour a, the p-value by signs is 2/32. Percentiles of resamples would exclude 0."""
    ones, twos = np.ones(6), np.array([2.1, 1.9, 2.1, 1.9, 2.0, 2.0])
    for num, is_known in ((5, False), (6, True)):
        scored = {"a": ratio_rows(twos[:num], ones[:num]), "b": ratio_rows(ones[:num], ones[:num])}
        found = suite_statistics("s", [RATIO], items_of(num), scored, seed=0)
        a, (difference,) = found.of("a", "ratio"), found.differences
        assert a is not None
        assert (a.value.mean, math.isfinite(a.value.low)) == (pytest.approx(2.0), is_known)
        assert (difference.difference.mean, bool(difference.better)) == (pytest.approx(1.0), is_known)


def test_differences_of_an_aggregate_survive_the_correction_for_36_pairs() -> None:
    """Nine models, of which the first is far better. 1,000 resamples would give p = .002, and .072 after correction."""
    generator = np.random.default_rng(4)
    length = np.ones(60)
    scored = {f"m{n}": ratio_rows(generator.normal(3.0 if n == 0 else 0.0, 1.0, size=60), length) for n in range(9)}
    found = suite_statistics("s", [RATIO], items_of(60), scored, seed=0).differences
    assert len(found) == 36
    assert all(row.better == "m0" for row in found if row.a == "m0")


def arena_rows(generator: np.random.Generator, num: int, lead: float) -> dict[str, Scored]:
    """Draws verdicts in both orders, which share an item's difficulty, and scores them as Arena-Hard does."""
    levels = generator.normal(lead, 1.0, size=num)[:, None] + generator.normal(0.0, 0.7, size=(num, 2))
    leads = np.clip(np.round(levels), -2, 2)
    weights, wins = np.where(np.abs(leads) == 2, 3.0, 1.0), np.where(leads == 0, 0.5, (leads > 0).astype(float))
    weight, won = weights.sum(axis=1), (weights * wins).sum(axis=1)
    pairs = zip((won / weight).tolist(), weight.tolist(), strict=True)
    return {f"q{n}": Scored(f"q{n}", {"score": score, "verdict_weight": w}) for n, (score, w) in enumerate(pairs)}


@pytest.mark.parametrize("num_items", [6, 8, 12])
@pytest.mark.parametrize("lead", [0.0, 1.2])
def test_an_aggregate_of_few_items_is_covered_and_equal_models_are_not_told_apart(num_items: int, lead: float) -> None:
    """Arena-Hard's score, of .5 or .89, in 200 worlds. Bootstrap percentiles cover 80 to 87%, and reject 8 to 12%."""
    score = ARENA_HARD.measures[0]
    assert score.aggregate is not None
    truth = score.aggregate(list(arena_rows(np.random.default_rng(99), 100_000, lead).values()))
    covered = rejected = 0
    for world in range(200):
        generator = np.random.default_rng([num_items, world])
        scored = {name: arena_rows(generator, num_items, lead) for name in ("a", "b")}
        found = suite_statistics("s", [score], items_of(num_items), scored, seed=world)
        a = found.of("a", "score")
        assert a is not None
        covered += a.value.low <= truth <= a.value.high
        rejected += found.differences[0].p < 0.05
    assert covered / 200 >= 0.9
    assert rejected / 200 <= 0.08


def test_an_aggregate_is_of_the_items_with_the_values_that_it_reads() -> None:
    scored = {"a": ratio_rows(np.arange(1.0, 9.0), np.ones(8)) | rows_of("other", [1.0] * 3)}
    found = suite_statistics("s", [RATIO], items_of(8), scored, seed=0).of("a", "ratio")
    assert found is not None
    assert (found.value.mean, found.num_items, found.num_clusters) == (6.0, 5, 5)


def test_a_grade_that_is_always_1_is_no_share() -> None:
    grade = Measure("grade", "From 1 to 10.")
    scored = {"a": rows_of("grade", [1.0] * 8), "b": rows_of("grade", [2.0, 1.0] * 4)}
    found = suite_statistics("s", [grade], items_of(8), scored, seed=0)
    assert {value.unit for value in found.values} == {"number"}
    (difference,) = found.differences
    student = clustered_mean(np.array([-1.0, 0.0] * 4), np.arange(8))
    assert difference.difference.low == pytest.approx(min(student.low, -1.0))  # the test by signs has p = 1/8


RUNS = {"ppo": ["ppo/1", "ppo/2"], "dpo": ["dpo/1", "dpo/2", "dpo/3"]}


def runs_of(measure: str, num: int, generator: np.random.Generator) -> dict[str, dict[str, Scored]]:
    return {
        run: rows_of(measure, list(generator.normal(2.0 if algorithm == "ppo" else 0.0, 1.0, size=num)))
        for algorithm, own in RUNS.items()
        for run in own
    }


def test_algorithms_are_compared_over_runs_and_items() -> None:
    scored = runs_of("gain", 60, np.random.default_rng(5))
    del scored["dpo/3"]["q7"]
    gain = Measure("gain", "Of something.")
    for per_cluster in (1, 3):
        found = suite_statistics("s", [gain], items_of(60, per_cluster=per_cluster), scored, RUNS, seed=0)
        (row,) = found.algorithms
        kept = [f"q{n}" for n in range(60) if n != 7]
        a, b = (np.array([[scored[run][q].values["gain"] for q in kept] for run in own]) for own in RUNS.values())
        expected = AlgorithmTest.of_values(a, b, np.array([int(q[1:]) // per_cluster for q in kept]), seed=0)
        assert (row.difference.mean, row.difference.low) == pytest.approx((expected.mean, expected.interval().low))
        assert row.p == pytest.approx(expected.p, rel=0.2)  # of sign flips that are drawn
        assert (row.a, row.b, row.num_runs_a, row.num_runs_b) == ("ppo", "dpo", 2, 3)
        assert (row.better, row.num_items, row.num_items_missing) == ("ppo", 59, 1)
        assert row.num_clusters == (59 if per_cluster == 1 else 20)
    assert suite_statistics("s", [gain], items_of(60), scored, seed=0).algorithms == ()


def test_algorithms_that_are_all_wrong_have_an_interval_with_a_width() -> None:
    """Ten wrong answers of every run say nothing certain about another item."""
    scored = {run: rows_of("right", [0.0] * 10) for own in RUNS.values() for run in own}
    (row,) = suite_statistics("s", [RIGHT], items_of(10), scored, RUNS, seed=0).algorithms
    (low, high), found = EqualityTest(np.full(10, 0.5), seed=0).interval(), row.difference
    assert (found.mean, found.low, found.high) == pytest.approx((0.0, 2 * low - 1, 2 * high - 1))
    assert found.low < -0.2
    assert (row.p, row.better) == (1.0, "")


def test_algorithms_of_an_aggregate_and_a_lower_measure() -> None:
    generator = np.random.default_rng(6)
    scored = {
        run: ratio_rows(generator.normal(6.0 if algorithm == "ppo" else 0.0, 1.0, size=30), np.ones(30))
        for algorithm, own in RUNS.items()
        for run in own
    }
    (row,) = suite_statistics("s", [RATIO], items_of(30), scored, RUNS, seed=0).algorithms
    means = {run: np.mean([one.values["hits"] for one in own.values()]) for run, own in scored.items()}
    assert row.difference.mean == pytest.approx(np.mean([means[r] for r in RUNS["ppo"]]) - np.mean(
        [means[r] for r in RUNS["dpo"]]
    ))  # fmt: skip
    assert row.better == "ppo"
    (few,) = suite_statistics(
        "s", [RATIO], items_of(30), {run: dict(list(own.items())[:4]) for run, own in scored.items()}, RUNS, seed=0
    ).algorithms
    assert (few.p, few.better, math.isnan(few.difference.low)) == (1.0, "", True)
    losses = {
        run: rows_of("loss", list(generator.normal(6.0 if algorithm == "ppo" else 0.0, 1.0, size=30)))
        for algorithm, own in RUNS.items()
        for run in own
    }
    lower = suite_statistics("s", [LOSS], items_of(30), losses, RUNS, seed=0).algorithms[0]
    assert lower.better == "dpo"


def test_one_lucky_seed_is_no_better_algorithm() -> None:
    """Of two runs each, one is far better. As weights they differ; as algorithms nothing is shown."""
    generator = np.random.default_rng(7)
    lead = {"ppo/1": 2.0, "ppo/2": 0.0, "dpo/1": 0.0, "dpo/2": 0.0}
    scored = {run: rows_of("gain", list(generator.normal(own, 0.5, size=60))) for run, own in lead.items()}
    runs = {"ppo": ["ppo/1", "ppo/2"], "dpo": ["dpo/1", "dpo/2"]}
    found = suite_statistics("s", [Measure("gain", "G.")], items_of(60), scored, runs, seed=0)
    assert [row.better for row in found.algorithms] == [""]
    by_pair = {(row.a, row.b): row.better for row in found.differences}
    assert by_pair["ppo/1", "dpo/1"] == by_pair["ppo/1", "ppo/2"] == "ppo/1"


def interval_of(values: list[float], clusters: list[int], measure: Measure) -> Interval:
    """Returns the interval of a measure on items with these values and clusters."""
    items = [Item(f"q{n}", (), cluster=f"c{cluster}") for n, cluster in enumerate(clusters)]
    found: SuiteStatistics = suite_statistics("s", [measure], items, {"a": rows_of(measure.name, values)}, seed=0)
    value = found.of("a", measure.name)
    assert value is not None
    return value.value


def test_values_by_group_and_a_single_cluster() -> None:
    items = [Item("q0", (), "x"), Item("q1", (), "x"), Item("q2", (), "y")]
    found = suite_statistics("s", [RIGHT], items, {"a": rows_of("right", [1.0, 0.0, 1.0])}, seed=0)
    assert [(v.group, v.value.mean, v.num_items) for v in found.values] == [
        ("", 2 / 3, 3),
        ("x", 0.5, 2),
        ("y", 1.0, 1),
    ]
    one = interval_of([1.0, 0.5], [0, 0], RIGHT)
    assert one.mean == 0.75
    assert one.high - one.low > 0.7  # one cluster says next to nothing


def test_shares_that_are_not_0_or_1_stay_in_their_range_and_have_a_width() -> None:
    measure = Measure("f1", "F1.", is_share=True)
    ties = suite_statistics("s", [measure], items_of(20), {"a": rows_of("f1", [0.5] * 20)}, seed=0).of("a", "f1")
    assert ties is not None
    assert (ties.unit, ties.value.mean) == ("share", 0.5)
    assert 0.2 < ties.value.low < 0.45 < 0.55 < ties.value.high < 0.8  # Student's would be 0.5 to 0.5
    values, clusters = [0.0] * 11 + [0.9], [list(range(12)), [n // 2 for n in range(12)]]
    assert interval_of(values, clusters[0], LOSS).low < 0  # Student's
    for own in clusters:
        found = interval_of(values, own, measure)
        assert 0 < found.low < found.mean < found.high < 1


def test_shares_of_clustered_items_have_the_interval_that_every_share_in_heed_has() -> None:
    """Items of a cluster that are all alike are worth one item."""
    generator = np.random.default_rng(8)
    right, clusters = (generator.random(40) < 0.8).astype(float), generator.integers(0, 9, size=40)
    for measure, expected in ((RIGHT, share_interval(right, clusters)), (LOSS, clustered_mean(right, clusters))):
        found = interval_of(list(right), list(clusters), measure)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    alone = [1.0] * 19 + [0.0]
    copied = interval_of(list(np.repeat(alone, 5)), [n // 5 for n in range(100)], RIGHT)
    single = interval_of(alone, list(range(20)), RIGHT)
    assert (copied.low, copied.high) == pytest.approx((single.low, single.high), abs=0.03)
    alike = interval_of([1.0] * 100, [n // 5 for n in range(100)], RIGHT)
    low = float(wilson(np.array([1.0]), np.array([20.0]))[0][0])
    assert (alike.low, alike.high) == (pytest.approx(low, abs=1e-6), 1.0)


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
        method = share_interval if binary else clustered_mean
        over_clusters = interval_of(list(value_I), list(cluster_I), RIGHT if binary else LOSS)
        over_items = method(value_I, np.arange(200))
        covered += over_clusters.low <= truth <= over_clusters.high
        covered_by_items += over_items.low <= truth <= over_items.high
    assert 0.92 <= covered / 400 <= 0.98
    assert covered_by_items / 400 < 0.75


def test_paired_tests_over_clusters_reject_a_true_null_at_their_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evaluation.statistics.significance.NUM_PERMUTATIONS", 1_000)
    generator = np.random.default_rng(4)
    items = items_of(120, per_cluster=6)
    rejected = 0
    for _ in range(60):
        shared = np.repeat(generator.normal(size=20), 6)
        a, b = (list(generator.normal(size=120) + sign * shared) for sign in (0.5, -0.5))
        found = suite_statistics("s", [LOSS], items, {"a": rows_of("loss", a), "b": rows_of("loss", b)}, seed=0)
        rejected += bool(found.differences[0].better)
    assert rejected / 60 <= 0.1  # of items that count as independent, 17% are
