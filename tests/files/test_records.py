"""Dataclasses read back from JSON, with their types or an error that names the field."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from files.records import as_json, record_of
from preferences.statistics.estimates import Interval


@dataclass(frozen=True)
class Inner:
    share: Interval
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outer:
    count: int
    inner: Inner
    by_name: Mapping[str, Inner]
    kind: Literal["soft", "half"] = "half"
    loss: float | None = None
    rows: list[float] = field(default_factory=list)


def test_what_was_written_is_read_back() -> None:
    inner = Inner(Interval(0.5, math.nan, 1.0), ("a", "b"))
    outer = Outer(3, inner, {"x.y": inner}, "soft", None, [1.0, 2.5])
    found = record_of(json.loads(json.dumps(as_json(outer))), Outer, "results.json")
    assert math.isnan(found.inner.share.low)
    assert found.inner.share.high == 1.0
    assert found.by_name["x.y"].names == ("a", "b")
    assert (found.count, found.kind, found.loss, found.rows) == (3, "soft", None, [1.0, 2.5])


def test_other_fields_are_ignored_and_defaults_fill_in() -> None:
    inner = {"share": {"mean": 1, "low": 0, "high": 1}, "names": []}
    found = record_of({"count": 1, "inner": inner, "by_name": {}, "new": 5}, Outer, "here")
    assert found.inner.share.mean == 1.0
    assert found.kind == "half"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "here: count is '3'; int was expected"),
        ({"count": True}, "here: count is True; int was expected"),
        ({"inner": {"names": []}}, "here: inner.share is missing"),
        ({"inner": None}, "here: inner is None; Inner was expected"),
        ({"by_name": {"x": {"share": {"mean": 1, "low": 0, "high": "1"}, "names": []}}}, "by_name.x.share.high is '1'"),
        ({"kind": "none"}, "kind is 'none'"),
        ({"rows": [1.0, "2"]}, r"rows\[1\] is '2'; float was expected"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    inner = {"share": {"mean": 1, "low": 0, "high": 1}, "names": []}
    with pytest.raises(ValueError, match=message):
        record_of({"count": 1, "inner": inner, "by_name": {}} | change, Outer, "here")
