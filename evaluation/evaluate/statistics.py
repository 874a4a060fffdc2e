"""Statistics of an evaluation: each model's measures with intervals, and paired differences between models.

An item that a measure could not score is counted as a failure and enters no mean. Two models are compared on the items
that both have a value for. A cluster of items (questions made from one template, say) is one observation.

    interval of a mean         Wilson's for shares (values from 0 to 1), else Student's over clusters
    interval of an aggregate   percentiles over resampled clusters (a BLEU score, for example, is no mean)
    difference                 of the paired values, with a test: the interval excludes 0 exactly if the p-value,
                               corrected for all pairs of models by Holm's method, is below 5%

Shape letters: I items, C clusters, N resamples.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from evaluation.statistics.significance import ALPHA, EqualityTest, GainTest, holm, holm_level
from evaluation.suites.suite import Item, Measure, Scored
from files.hashes import derive_seed
from preferences.statistics.estimates import LEVEL, UNKNOWN, Floats, Interval, Ints, Z
from preferences.statistics.intervals import clustered_mean, percentiles, share_interval, wilson

NUM_RESAMPLES = 1_000
_SMALLEST = 1e-9  # half an interval; smaller ones are rounding

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")  # in reasons: numbers and quoted texts

Unit = Literal["share", "number"]
ByModel = Mapping[str, Mapping[str, Scored]]  # by name of model and item id


@dataclass(frozen=True)
class Value:
    """A measure of one model on the items of one group ("" = all items): the mean or aggregate with its 95% interval.

    `unit` is "share" if the measure is one, or if every value is 0 or 1. Unknown numbers are NaN.
    """

    model: str
    measure: str
    group: str
    value: Interval
    unit: Unit
    num_items: int
    num_clusters: int
    num_failed: int


@dataclass(frozen=True)
class Difference:
    """A measure of `model_a` minus that of `model_b`, over the items that both have. `better` is "" if not shown.

    `p` is two-sided; `holm_p` is corrected for all pairs of models. The interval excludes 0 exactly if `holm_p` < 5%.
    """

    model_a: str
    model_b: str
    measure: str
    difference: Interval
    p: float
    holm_p: float
    num_items: int
    num_clusters: int
    better: str


@dataclass(frozen=True)
class Failure:
    """On how many items of a model measures could not be computed for one kind of reason.

    Reasons of one kind differ in numbers and quoted texts only; `reason` and `item_id` are those of the first item.
    """

    model: str
    measures: tuple[str, ...]
    reason: str
    num_items: int
    item_id: str


@dataclass(frozen=True)
class SuiteStatistics:
    """All results on one suite. `values` has a row per model, measure and group."""

    suite: str
    models: tuple[str, ...]
    num_items: int
    values: tuple[Value, ...]
    differences: tuple[Difference, ...]
    failures: tuple[Failure, ...]

    def of(self, model: str, measure: str, group: str = "") -> Value | None:
        """Returns a model's value; None if the measure applies to no item of the group."""
        return next((v for v in self.values if (v.model, v.measure, v.group) == (model, measure, group)), None)


@dataclass(frozen=True)
class _Column:
    """What one model's answers are worth by one measure: the rows that it scored, and the items on which it failed."""

    measure: Measure
    rows: Mapping[str, Scored]
    failed: frozenset[str]

    @classmethod
    def of(cls, measure: Measure, scored: Mapping[str, Scored]) -> "_Column":
        """An aggregate reads every row on which it did not fail, other measures those that have their value."""
        failed = frozenset(item_id for item_id, row in scored.items() if measure.name in row.failures)
        rows = {
            item_id: row
            for item_id, row in scored.items()
            if item_id not in failed and (measure.aggregate is not None or measure.name in row.values)
        }
        return cls(measure, rows, failed)

    def value_I(self, ids: Sequence[str]) -> Floats:
        return np.array([self.rows[item_id].values[self.measure.name] for item_id in ids], dtype=np.float64)


def suite_statistics(
    suite: str, measures: Sequence[Measure], items: Sequence[Item], scored: ByModel, *, seed: int
) -> SuiteStatistics:
    """Computes all statistics of a suite. Values are also given by the items' groups, if there are several."""
    groups = list(dict.fromkeys(item.group for item in items if item.group))
    values: list[Value] = []
    differences: list[Difference] = []
    for measure in measures:
        columns = {model: _Column.of(measure, rows) for model, rows in scored.items()}
        for group in ["", *(groups if len(groups) > 1 else [])]:
            chosen = [item for item in items if not group or item.group == group]
            values += [found for model, own in columns.items() if (found := value_of(model, own, chosen, group, seed))]
        differences += _differences(measure, columns, items, seed)
    return SuiteStatistics(suite, tuple(scored), len(items), tuple(values), tuple(differences), _failures(scored))


def clean_values(
    measures: Sequence[Measure], items: Sequence[Item], scored: Mapping[str, Scored], *, model: str, seed: int
) -> list[Value]:
    """Returns one model's measures on some of the items, such as those that do not overlap with its training data."""
    columns = (_Column.of(measure, scored) for measure in measures)
    return [found for column in columns if (found := value_of(model, column, items, "", seed))]


def value_of(model: str, column: _Column, items: Sequence[Item], group: str, seed: int) -> Value | None:
    """Returns a measure on these items; None if it applies to none of them."""
    ids = [item.item_id for item in items if item.item_id in column.rows]
    num_failed = sum(item.item_id in column.failed for item in items)
    if not ids and not num_failed:
        return None
    cluster_I = _clusters(items, ids)
    unit: Unit = "number"
    if column.measure.aggregate is None:
        value_I = column.value_I(ids)
        unit = "share" if column.measure.is_share or _is_binary(value_I) else "number"
        found = mean_interval(value_I, cluster_I, is_share=unit == "share")
    else:
        unit = "share" if column.measure.is_share else "number"
        found = UNKNOWN if not ids else _aggregate_interval([column], ids, cluster_I, seed)[0]
    num_clusters = len(np.unique(cluster_I))
    return Value(model, column.measure.name, group, found, unit, len(ids), num_clusters, num_failed)


def mean_interval(value_I: Floats, cluster_I: Ints, *, is_share: bool) -> Interval:
    """Returns the mean of items' values with its 95% interval over clusters: Student's, or for shares, whose values are
    from 0 to 1, Wilson's (`score_interval`), which stays in this range and has a width even if all values are alike.

    Among I items in clusters, Wilson's interval is that of n* independent values of 0 and 1 (as in `clustered_shares`):

        n* = p(1 - p)/v · (z/t)² = p(1 - p)·z²/h²

    v is the variance of the mean over clusters, and h = t·√v half of Student's interval. Values of 0 and 1 have
    n* <= I. If all values are alike, n* is the number of clusters. A single cluster has no interval.
    """
    if len(value_I) == 0:
        return UNKNOWN
    found = clustered_mean(value_I, cluster_I)
    num_clusters = len(np.unique(cluster_I))
    if not is_share or (num_clusters == 1 and len(value_I) > 1):
        return found
    if num_clusters == len(value_I):
        return share_interval(value_I)
    half, spread = found.high - found.mean, found.mean * (1 - found.mean)
    if np.ptp(value_I) == 0:
        num = float(num_clusters)
    else:
        num = spread * Z**2 / max(half, _SMALLEST) ** 2
        num = min(num, float(len(value_I))) if _is_binary(value_I) else num
    low, high = wilson(np.array([found.mean]), np.array([num]))
    return Interval(found.mean, float(low[0]), float(high[0]))


def _is_binary(value_I: Floats) -> bool:
    return bool(np.isin(value_I, (0.0, 1.0)).all())


def _clusters(items: Sequence[Item], ids: Sequence[str]) -> Ints:
    """Returns the number of each item's cluster [I]."""
    name = {item.item_id: ("cluster", item.cluster) if item.cluster else ("item", item.item_id) for item in items}
    place: dict[tuple[str, str], int] = {}
    return np.array([place.setdefault(name[item_id], len(place)) for item_id in ids], dtype=np.int64)


def _differences(
    measure: Measure, columns: Mapping[str, _Column], items: Sequence[Item], seed: int
) -> list[Difference]:
    """Returns a row for every two models that have items in common."""
    found = []
    for (name_a, a), (name_b, b) in itertools.combinations(columns.items(), 2):
        ids = [item.item_id for item in items if item.item_id in a.rows and item.item_id in b.rows]
        if ids:
            cluster_I = _clusters(items, ids)
            own_seed = derive_seed(seed, "difference", measure.name, name_a, name_b)
            test = _paired_test(a, b, ids, cluster_I, own_seed)
            found.append((name_a, name_b, test, len(ids), len(np.unique(cluster_I))))
    corrected = holm(np.array([test.p for _, _, test, _, _ in found]))
    rows = []
    for (name_a, name_b, test, num_items, num_clusters), holm_p in zip(found, corrected, strict=True):
        interval = test.interval(holm_level(test.p, float(holm_p)))
        is_a = (interval.mean > 0) == measure.higher_is_better
        better = "" if holm_p >= ALPHA else (name_a if is_a else name_b)
        rows.append(
            Difference(name_a, name_b, measure.name, interval, test.p, float(holm_p), num_items, num_clusters, better)
        )
    return rows


@dataclass(frozen=True)
class _Test:
    """A two-sided test of "the mean difference is 0", and its interval at level 1 - α."""

    p: float
    interval: Callable[[float], Interval]


def _paired_test(a: _Column, b: _Column, ids: Sequence[str], cluster_I: Ints, seed: int) -> _Test:
    if a.measure.aggregate is not None:
        return _bootstrap_test(a, b, ids, cluster_I, seed)
    d_I = a.value_I(ids) - b.value_I(ids)
    if bool(np.isin(d_I, (-1.0, 0.0, 1.0)).all()):
        # A win rate of ½ is a difference of 0.
        shares = EqualityTest((1 + d_I) / 2, cluster_I, seed=seed)
        mean = float(d_I.mean())
        return _Test(shares.p, lambda alpha: Interval(mean, *(2 * end - 1 for end in shares.interval(alpha))))
    gains = GainTest(d_I, cluster_I, seed=seed)
    return _Test(gains.p, gains.interval)


def _bootstrap_test(a: _Column, b: _Column, ids: Sequence[str], cluster_I: Ints, seed: int) -> _Test:
    """Returns the percentile interval of the difference of two aggregates, and the p-value that belongs to it."""
    mean_a, mean_b = (_aggregate(column, ids) for column in (a, b))
    resampled_N = np.subtract(*_resampled([a, b], ids, cluster_I, seed))
    resampled_N = resampled_N[np.isfinite(resampled_N)]
    if not len(resampled_N) or not math.isfinite(mean_a - mean_b):
        return _Test(1.0, lambda _alpha: Interval(mean_a - mean_b, math.nan, math.nan))
    beyond = min(int((resampled_N <= 0).sum()), int((resampled_N >= 0).sum()))
    p = min(1.0, 2 * (beyond + 1) / (len(resampled_N) + 1))

    def interval(alpha: float) -> Interval:
        low, high = percentiles(resampled_N, 1 - alpha)
        if p >= alpha:
            low, high = min(low, 0.0), max(high, 0.0)
        return Interval(mean_a - mean_b, low, high)

    return _Test(p, interval)


def _aggregate(column: _Column, ids: Sequence[str]) -> float:
    assert column.measure.aggregate is not None, column.measure.name
    return float(column.measure.aggregate([column.rows[item_id] for item_id in ids]))


def _aggregate_interval(columns: Sequence[_Column], ids: Sequence[str], cluster_I: Ints, seed: int) -> list[Interval]:
    found = []
    for column, resampled_N in zip(columns, _resampled(columns, ids, cluster_I, seed), strict=True):
        finite_N = resampled_N[np.isfinite(resampled_N)]
        ends = percentiles(finite_N, LEVEL) if len(finite_N) else (math.nan, math.nan)
        found.append(Interval(_aggregate(column, ids), *ends))
    return found


def _resampled(columns: Sequence[_Column], ids: Sequence[str], cluster_I: Ints, seed: int) -> list[Floats]:
    """Returns each model's aggregate [N] on the same resamples of clusters; NaN for a single cluster."""
    members: dict[int, list[str]] = defaultdict(list)
    for item_id, cluster in zip(ids, cluster_I.tolist(), strict=True):
        members[cluster].append(item_id)
    if len(members) == 1:
        return [np.full(1, math.nan) for _ in columns]
    generator, groups = np.random.default_rng(seed), list(members.values())
    found_NM = np.empty((NUM_RESAMPLES, len(columns)))
    for resample in range(NUM_RESAMPLES):
        drawn = generator.integers(0, len(groups), size=len(groups)).tolist()
        chosen = [item_id for cluster in drawn for item_id in groups[cluster]]
        found_NM[resample] = [_aggregate(column, chosen) for column in columns]
    return list(found_NM.T)


def _failures(scored: ByModel) -> tuple[Failure, ...]:
    """Returns the kinds of failures, the most frequent first."""
    found: list[Failure] = []
    for model, rows in scored.items():
        kinds: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for row in rows.values():
            for measure, reason in row.failures.items():
                kinds[_VARYING.sub("*", reason)].append((measure, reason, row.item_id))
        for of_kind in kinds.values():
            measures = tuple(dict.fromkeys(measure for measure, _, _ in of_kind))
            num_items = len({item_id for _, _, item_id in of_kind})
            found.append(Failure(model, measures, of_kind[0][1], num_items, of_kind[0][2]))
    return tuple(sorted(found, key=lambda failure: -failure.num_items))
