"""Statistics of an evaluation: each model's measures with intervals, and paired differences of models and algorithms.

An item that a measure could not score is counted as a failure and enters no mean. Two models are compared on the items
that both have a value for and that are not in the training data of either. If too many answers are missing, there is
only a bound of the difference, or no verdict. A cluster of items (questions made from one template, say) is one
observation.

    interval of a mean         `share_interval` for shares (values from 0 to 1), else Student's over clusters
    interval of an aggregate   (a BLEU score, for example, is no mean) by the jackknife over clusters, at least six
    difference of two models   of the paired values, with a test: the interval excludes 0 exactly if the p-value,
                               corrected for all pairs of models by Holm's method, is below 5%
    difference of algorithms   of several runs each, over runs and items (`evaluation.statistics.algorithms`)

Shape letters: I items, C clusters, S runs, X observations: the items of a mean, the clusters of an aggregate.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from evaluation.contamination import too_few_clean
from evaluation.statistics.algorithms import AlgorithmTest
from evaluation.statistics.results import Conclusion
from evaluation.statistics.significance import (
    ALPHA,
    MOST_BOUNDED,
    MOST_IGNORED,
    EqualityTest,
    GainTest,
    holm,
    holm_level,
)
from evaluation.statistics.summary import NO_RUNS, Runs
from evaluation.suites.suite import Item, Measure, Scored
from files.hashes import derive_seed
from preferences.statistics.estimates import UNKNOWN, Floats, Interval, Ints, Z
from preferences.statistics.intervals import clustered_mean, share_interval, wilson

MIN_CLUSTERS = 6  # for an aggregate's interval and test: of five clusters, all in favour, p by signs is 2/32
MAX_BLOCKS = 1_000  # the jackknife leaves out blocks of clusters if there are more
_SMALLEST = 1e-9  # half an interval; smaller ones are rounding

_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")  # in reasons: numbers and quoted texts

Unit = Literal["share", "number"]
ByModel = Mapping[str, Mapping[str, Scored]]  # by name of model and item id
Seen = Mapping[str, Collection[str]]  # the items that overlap with a model's training data, by name of model


@dataclass(frozen=True)
class Value:
    """A measure of one model on the items of one group ("" = all items): the mean or aggregate with its 95% interval.

    `unit` is "share" if the measure is one. Unknown numbers are NaN.
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
    """A measure of `a` minus that of `b`: two models, or two algorithms with several runs each, over the items that
    both, or all runs, have. `num_items_seen` overlap with the training data of either and are left out.

    `p` is two-sided; `holm_p` is corrected for all pairs of models, or of algorithms. The interval excludes 0 exactly
    if `holm_p` < 5%. `num_items_missing` are those that some runs have a value for, or failed on, but not all runs. If
    the conclusion is a bound, the interval is from what is missing counted as worst for `a` and best for `b` to the
    reverse; if it is none, numbers are NaN.
    """

    a: str
    b: str
    measure: str
    difference: Interval
    p: float
    holm_p: float
    num_items: int
    num_clusters: int
    conclusion: Conclusion
    num_runs_a: int = 1
    num_runs_b: int = 1
    num_items_missing: int = 0
    num_items_seen: int = 0

    @property
    def better(self) -> str:
        """The name of the one that is shown to be better; "" if none is."""
        return {"better": self.a, "worse": self.b, "": ""}[self.conclusion.shown]

    @property
    def ahead_first(self) -> "Difference":
        """The row from the side of the one that is better or, if none is, has the higher value."""
        if not (self.better == self.b or (not self.better and self.difference.mean < 0)):
            return self
        return replace(
            self, a=self.b, b=self.a, difference=-self.difference, conclusion=self.conclusion.turned,
            num_runs_a=self.num_runs_b, num_runs_b=self.num_runs_a,
        )  # fmt: skip


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
    """All results on one suite. `values` has a row per model, measure and group. `same_answers` are pairs of models
    with the same answers to all items, which are not compared.
    """

    suite: str
    models: tuple[str, ...]
    num_items: int
    values: tuple[Value, ...]
    differences: tuple[Difference, ...]
    failures: tuple[Failure, ...]
    algorithms: tuple[Difference, ...] = ()
    same_answers: tuple[tuple[str, str], ...] = ()

    def of(self, model: str, measure: str, group: str = "") -> Value | None:
        """Returns a model's value; None if the measure applies to no item of the group."""
        return next((v for v in self.values if (v.model, v.measure, v.group) == (model, measure, group)), None)


@dataclass(frozen=True)
class _Column:
    """What one model's answers are worth by one measure: the rows that it scored, and the items on which it failed."""

    measure: Measure
    rows: Mapping[str, Scored]
    failed: frozenset[str]
    _jackknifed: dict[tuple[str, ...], Floats] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, measure: Measure, scored: Mapping[str, Scored]) -> "_Column":
        """An aggregate has the rows with all values that it reads, other measures those with their own value."""
        wanted = measure.reads if measure.aggregate is not None else (measure.name,)
        failed = frozenset(item_id for item_id, row in scored.items() if measure.name in row.failures)
        rows = {
            item_id: row
            for item_id, row in scored.items()
            if item_id not in failed and all(name in row.values for name in wanted)
        }
        return cls(measure, rows, failed)

    def filled(self, ids: Sequence[str], value: float) -> "_Column":
        """Returns the column with a value for those of the items that it has none for."""
        missing = {item_id: Scored(item_id, {self.measure.name: value}) for item_id in ids if item_id not in self.rows}
        return _Column(self.measure, {**self.rows, **missing}, self.failed)

    def observations(self, ids: Sequence[str], cluster_I: Ints, *, seed: int) -> tuple[Floats, Ints]:
        """Returns what the measure is the mean of [X], with the cluster [X] of each: the items' values or, for an
        aggregate, the jackknife's pseudo-values of clusters. `seed` draws blocks of clusters.
        """
        if self.measure.aggregate is None:
            values = [self.rows[item_id].values[self.measure.name] for item_id in ids]
            return np.array(values, dtype=np.float64), cluster_I
        if tuple(ids) not in self._jackknifed:
            self._jackknifed[tuple(ids)] = self._pseudo_values(ids, _in_blocks(cluster_I, seed))
        found_X = self._jackknifed[tuple(ids)]
        return found_X, np.arange(len(found_X))

    def _pseudo_values(self, ids: Sequence[str], cluster_I: Ints) -> Floats:
        """Returns a number per cluster whose mean is the aggregate θ, and whose spread is that of θ (the jackknife:
        Efron & Tibshirani 1993, ch. 11, centred at θ instead of corrected for bias):

            x_c = θ + (C - 1)·(mean over c of θ_-c  -  θ_-c),   θ_-c of all items but those of cluster c

        If θ is the mean of clusters of equal size, x_c is the mean of cluster c. Only θ, whose spread is then unknown,
        for fewer than MIN_CLUSTERS clusters, and if θ_-c is unknown for some c.
        """
        whole = self._aggregate(ids)
        clusters = np.unique(cluster_I)
        if len(clusters) < MIN_CLUSTERS:
            return np.array([whole])
        without_C = np.array(
            [
                self._aggregate([ids[place] for place in np.flatnonzero(cluster_I != cluster).tolist()])
                for cluster in clusters
            ]
        )
        found_C: Floats = whole + (len(clusters) - 1) * (without_C.mean() - without_C)
        return found_C if np.isfinite(found_C).all() else np.array([whole])

    def _aggregate(self, ids: Sequence[str]) -> float:
        assert self.measure.aggregate is not None, self.measure.name
        return float(self.measure.aggregate([self.rows[item_id] for item_id in ids]))


def _in_blocks(cluster_I: Ints, seed: int) -> Ints:
    """Returns the clusters, or if there are more than MAX_BLOCKS the random blocks of equal size that they are in."""
    clusters, place_I = np.unique(cluster_I, return_inverse=True)
    if len(clusters) <= MAX_BLOCKS:
        return cluster_I
    block_C: Ints = np.random.default_rng(seed).permutation(len(clusters)) % MAX_BLOCKS
    return block_C[place_I]


def _common(columns: Sequence[_Column], ids: Sequence[str], cluster_I: Ints, *, seed: int) -> tuple[Floats, Ints]:
    """Returns all models' observations [S, X] on the same items, with their clusters [X]."""
    seen = [column.observations(ids, cluster_I, seed=seed) for column in columns]
    if len({len(value_X) for value_X, _ in seen}) > 1:  # the spread of a model's aggregate is unknown
        return np.array([[value_X.mean()] for value_X, _ in seen]), np.arange(1)
    return np.stack([value_X for value_X, _ in seen]), seen[0][1]


def suite_statistics(
    suite: str,
    measures: Sequence[Measure],
    items: Sequence[Item],
    scored: ByModel,
    runs: Runs = NO_RUNS,
    *,
    seen: Seen = MappingProxyType({}),
    seed: int,
) -> SuiteStatistics:
    """Computes all statistics of a suite. Values are also given by the items' groups, if there are several. `runs`
    names the algorithms of which several runs are compared. Differences leave out what either side has `seen`.
    """
    groups = list(dict.fromkeys(item.group for item in items if item.group))
    values: list[Value] = []
    differences: list[Difference] = []
    algorithms: list[Difference] = []
    same = [pair for pair in itertools.combinations(scored, 2) if _are_same_answers(*(scored[one] for one in pair))]
    for measure in measures:
        columns = {model: _Column.of(measure, rows) for model, rows in scored.items()}
        for group in ["", *(groups if len(groups) > 1 else [])]:
            chosen = [item for item in items if not group or item.group == group]
            values += [
                value for model, column in columns.items() if (value := value_of(model, column, chosen, group, seed))
            ]
        pairs = [pair for pair in itertools.combinations(columns, 2) if pair not in same]
        differences += _differences(measure, columns, {name: [name] for name in scored}, pairs, items, seen, seed)
        algorithms += _differences(measure, columns, runs, list(itertools.combinations(runs, 2)), items, seen, seed)
    return SuiteStatistics(
        suite,
        tuple(scored),
        len(items),
        tuple(values),
        tuple(differences),
        _failures(scored),
        tuple(algorithms),
        tuple(same),
    )


def _are_same_answers(a: Mapping[str, Scored], b: Mapping[str, Scored]) -> bool:
    texts = [{item_id: row.answer for item_id, row in rows.items()} for rows in (a, b)]
    return texts[0] == texts[1] and any(texts[0].values())


def clean_values(
    measures: Sequence[Measure], items: Sequence[Item], scored: Mapping[str, Scored], *, model: str, seed: int
) -> list[Value]:
    """Returns one model's measures on some of the items, such as those that do not overlap with its training data."""
    columns = (_Column.of(measure, scored) for measure in measures)
    return [value for column in columns if (value := value_of(model, column, items, "", seed))]


def value_of(model: str, column: _Column, items: Sequence[Item], group: str, seed: int) -> Value | None:
    """Returns a measure on these items; None if it applies to none of them."""
    ids = [item.item_id for item in items if item.item_id in column.rows]
    num_failed = sum(item.item_id in column.failed for item in items)
    if not ids and not num_failed:
        return None
    cluster_I = _clusters(items, ids)
    interval = UNKNOWN
    if ids:
        value_X, cluster_X = column.observations(ids, cluster_I, seed=seed)
        if not column.measure.is_share:
            interval = clustered_mean(value_X, cluster_X)
        elif column.measure.aggregate is None:
            interval = share_interval(value_X, cluster_X)
        else:
            interval = _share_of_clusters(value_X)
    unit: Unit = "share" if column.measure.is_share else "number"
    return Value(model, column.measure.name, group, interval, unit, len(ids), len(np.unique(cluster_I)), num_failed)


def _share_of_clusters(value_C: Floats) -> Interval:
    """Returns a share that is an aggregate, with Wilson's interval, from the pseudo-values of its clusters.

    It is Wilson's for n* independent values of 0 and 1 that give p the same variance v (as in `clustered_shares`):

        n* = p(1 - p)/v · (z/t)² = p(1 - p)·z²/h²,   h = t·√v half of Student's interval over clusters

    So it stays from 0 to 1. If all clusters are alike, n* is their number. A single cluster has no interval.
    """
    interval = clustered_mean(value_C, np.arange(len(value_C)))
    if math.isnan(interval.low):
        return interval
    mean, half = min(max(interval.mean, 0.0), 1.0), interval.high - interval.mean
    spread = mean * (1 - mean) * Z**2
    num = spread / half**2 if half > _SMALLEST and spread > _SMALLEST else float(len(value_C))
    low, high = wilson(np.array([mean]), np.array([num]))
    return Interval(mean, float(low[0]), float(high[0]))


def _clusters(items: Sequence[Item], ids: Sequence[str]) -> Ints:
    """Returns the number of each item's cluster [I]."""
    name = {item.item_id: ("cluster", item.cluster) if item.cluster else ("item", item.item_id) for item in items}
    place: dict[tuple[str, str], int] = {}
    return np.array([place.setdefault(name[item_id], len(place)) for item_id in ids], dtype=np.int64)


# ---- differences of models ----


@dataclass(frozen=True)
class _Test:
    """A two-sided test of "the mean difference is 0", and its interval at level 1 - α."""

    p: float
    interval: Callable[[float], Interval]


def _differences(
    measure: Measure,
    columns: Mapping[str, _Column],
    runs: Runs,
    pairs: Sequence[tuple[str, str]],
    items: Sequence[Item],
    seen: Seen,
    seed: int,
) -> list[Difference]:
    """Returns a row for every pair of models, or of algorithms with their `runs`, that the measure applies to."""
    rows = []
    for a, b in pairs:
        one, other = ([columns[run] for run in runs[name]] for name in (a, b))
        if all(column.rows or column.failed for column in (*one, *other)):
            left_out = {item_id for run in (*runs[a], *runs[b]) for item_id in seen.get(run, ())}
            rows.append(_Pair(a, b, one, other, items, left_out, seed).row())
    return _corrected(measure, rows)


@dataclass(frozen=True)
class _Pair:
    """Two models, or two algorithms with a column per run. `left_out` are items that one of them was trained on."""

    a: str
    b: str
    one: Sequence[_Column]
    other: Sequence[_Column]
    items: Sequence[Item]
    left_out: Collection[str]
    seed: int

    def row(self) -> tuple[Difference, _Test | None]:
        """Returns the row without the numbers of its test, and the test if there is a verdict."""
        columns = (*self.one, *self.other)
        measure = columns[0].measure
        known = [i.item_id for i in self.items if any(i.item_id in c.rows or i.item_id in c.failed for c in columns)]
        clean = [item_id for item_id in known if item_id not in self.left_out]
        ids = [item_id for item_id in clean if all(item_id in column.rows for column in columns)]
        row = Difference(
            a=self.a,
            b=self.b,
            measure=measure.name,
            difference=UNKNOWN,
            p=math.nan,
            holm_p=math.nan,
            num_items=len(ids),
            num_clusters=len(np.unique(_clusters(self.items, ids))),
            conclusion=Conclusion("undecided"),
            num_runs_a=len(self.one),
            num_runs_b=len(self.other),
            num_items_missing=len(clean) - len(ids),
            num_items_seen=len(known) - len(clean),
        )
        if reason := too_few_clean(len(clean), len(known), "item"):
            return replace(row, conclusion=Conclusion("none", reason=reason)), None
        share, reason = self._missing(clean)
        if share <= MOST_IGNORED:
            return row, self._test(self.one, self.other, ids)
        if share > MOST_BOUNDED:
            return replace(row, conclusion=Conclusion("none", reason=reason)), None
        if not measure.is_share or measure.aggregate is not None:
            reason += f", and nothing bounds what {measure.name} would be with them"
            return replace(row, conclusion=Conclusion("none", reason=reason)), None
        return replace(row, conclusion=Conclusion("bound", reason=reason)), self._bound(ids, clean)

    def _missing(self, clean: Sequence[str]) -> tuple[float, str]:
        """Returns the largest share of the items that a side has no value for, and says how many each side lacks."""
        missing = {
            name: max(sum(item_id not in column.rows for item_id in clean) for column in columns)
            for name, columns in ((self.a, self.one), (self.b, self.other))
        }
        said = [
            f"{num} of {len(clean)} answers of {name} are missing or could not be scored"
            for name, num in missing.items()
            if num
        ]
        return max(missing.values()) / len(clean), "; ".join(said)

    def _bound(self, ids: Sequence[str], clean: Sequence[str]) -> _Test:
        """Returns the test that what is missing can change nothing: p is 1 if its extremes are on both sides of 0."""
        zero, one = (
            ([c.filled(clean, low) for c in self.one], [c.filled(clean, 1 - low) for c in self.other])
            for low in (0.0, 1.0)
        )
        least, most = self._test(*zero, clean), self._test(*one, clean)
        mean = self._test(self.one, self.other, ids).interval(ALPHA).mean
        is_above, is_below = least.interval(ALPHA).mean > 0, most.interval(ALPHA).mean < 0
        p = least.p if is_above else most.p if is_below else 1.0
        return _Test(p, lambda alpha: Interval(mean, least.interval(alpha).low, most.interval(alpha).high))

    def _test(self, one: Sequence[_Column], other: Sequence[_Column], ids: Sequence[str]) -> _Test:
        cluster_I, measure = _clusters(self.items, ids), one[0].measure
        if len(one) == len(other) == 1:
            own_seed = derive_seed(self.seed, "difference", measure.name, self.a, self.b)
            return _paired_test(one[0], other[0], ids, cluster_I, self.seed, own_seed)
        value_SX, cluster_X = _common([*one, *other], ids, cluster_I, seed=self.seed)
        own_seed = derive_seed(self.seed, "algorithms", measure.name, self.a, self.b)
        return _algorithm_test(measure, value_SX[: len(one)], value_SX[len(one) :], cluster_X, own_seed)


def _corrected(measure: Measure, rows: Sequence[tuple[Difference, _Test | None]]) -> list[Difference]:
    """Returns the rows with their tests' intervals and p-values, corrected for all tests by Holm's method."""
    corrected = iter(holm(np.array([test.p for _, test in rows if test])).tolist())
    differences = []
    for row, test in rows:
        if test is None:
            differences.append(row)
            continue
        holm_p = next(corrected)
        interval = test.interval(holm_level(test.p, holm_p))
        if measure.is_share and not math.isnan(interval.low):
            interval = Interval(interval.mean, max(interval.low, -1.0), min(interval.high, 1.0))
        concluded = Conclusion.of(interval if measure.higher_is_better else -interval)
        if row.conclusion.kind == "bound":
            concluded = replace(concluded, kind="bound", reason=row.conclusion.reason)
        concluded = concluded.with_caution(
            min(row.num_runs_a, row.num_runs_b), row.num_clusters, bounded=measure.is_share
        )
        differences.append(replace(row, difference=interval, p=test.p, holm_p=holm_p, conclusion=concluded))
    return differences


def _paired_test(a: _Column, b: _Column, ids: Sequence[str], cluster_I: Ints, seed: int, own_seed: int) -> _Test:
    (value_X, other_X), cluster_X = _common([a, b], ids, cluster_I, seed=seed)
    d_X = value_X - other_X
    if not np.isfinite(d_X).all():
        return _untested(float(d_X.mean()))
    is_binary = a.measure.is_share and a.measure.aggregate is None and bool(np.isin(d_X, (-1.0, 0.0, 1.0)).all())
    if not is_binary:
        gains = GainTest(d_X, cluster_X, seed=own_seed)
        return _Test(gains.p, gains.interval)
    shares, mean = EqualityTest((1 + d_X) / 2, cluster_X, seed=own_seed), float(d_X.mean() + 1) / 2
    return _Test(shares.p, lambda alpha: _from_shares(Interval(mean, *shares.interval(alpha))))


def _untested(mean: float) -> _Test:
    return _Test(1.0, lambda _alpha: Interval(mean, math.nan, math.nan))


def _algorithm_test(measure: Measure, value_AX: Floats, value_BX: Floats, cluster_X: Ints, seed: int) -> _Test:
    if not (np.isfinite(value_AX).all() and np.isfinite(value_BX).all()):
        return _untested(float(value_AX.mean() - value_BX.mean()))
    if not measure.is_share or measure.aggregate is not None:
        test = AlgorithmTest.of_values(value_AX, value_BX, cluster_X, seed=seed)
        return _Test(test.p, test.interval)
    # Unlike Student's, the score interval has a width if all runs are right, or wrong, on the same items.
    shares = AlgorithmTest.of_preferences((1 + value_AX[:, None] - value_BX[None]) / 2, cluster_X, seed=seed)
    return _Test(shares.p, lambda alpha: _from_shares(shares.interval(alpha)))


def _from_shares(interval: Interval) -> Interval:
    """Returns a difference from the mean of (1 + difference)/2."""
    return Interval(2 * interval.mean - 1, 2 * interval.low - 1, 2 * interval.high - 1)


def _failures(scored: ByModel) -> tuple[Failure, ...]:
    """Returns the kinds of failures, the most frequent first."""
    failures: list[Failure] = []
    for model, rows in scored.items():
        kinds: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        for row in rows.values():
            for measure, reason in row.failures.items():
                kinds[_VARYING.sub("*", reason)].append((measure, reason, row.item_id))
        for of_kind in kinds.values():
            measures = tuple(dict.fromkeys(measure for measure, _, _ in of_kind))
            num_items = len({item_id for _, _, item_id in of_kind})
            failures.append(Failure(model, measures, of_kind[0][1], num_items, of_kind[0][2]))
    return tuple(sorted(failures, key=lambda failure: -failure.num_items))
