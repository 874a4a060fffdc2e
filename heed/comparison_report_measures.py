"""The measures of a comparison as tables: whatever measures.json holds is shown, nothing is picked.

    policies            {policy: {measure: figure}}: a table with a column a policy
    over_optimisation   a list of curves, drawn by comparison_report_curves
    anything else       figures by their place, a list of objects as a table of its own

A figure is a number, a text, or {mean, low, high}; objects nest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heed.comparison_report_curves import CURVES
from heed.report_words import Policy, number

SMALL = 0.01  # below it a number is shown by significant digits


@dataclass(frozen=True)
class MeasureTable:
    """A table of texts; the first cell of a row is its head."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def measure_tables(measures: Mapping[str, Any], looks: Mapping[str, Policy]) -> list[MeasureTable]:
    """All tables: that of policies first, then the rest in the file's order."""
    tables = []
    policies = measures.get("policies")
    if isinstance(policies, Mapping) and policies:
        tables.append(_policy_table(policies, looks))
    for name, value in measures.items():
        if name not in ("policies", CURVES):
            tables += _tables(name, value)
    return tables


def _policy_table(policies: Mapping[str, Any], looks: Mapping[str, Policy]) -> MeasureTable:
    found = {name: dict(figures(value)) for name, value in policies.items()}
    places = list(dict.fromkeys(place for own in found.values() for place in own))
    titles = tuple(looks[name].title if name in looks else name for name in found)
    rows = tuple((_title(place), *(own.get(place, "–") for own in found.values())) for place in places)
    caption = "Every policy's measures; in brackets 95% intervals over prompts. From measures.json."
    return MeasureTable("Policies", caption, ("Measure", *titles), rows)


def _tables(name: str, value: Any) -> list[MeasureTable]:
    """One table of single figures, and one of every list of objects within."""
    rows = figures(value)
    tables = [MeasureTable(_title(name), "From measures.json.", ("Measure", "Value"), _titled(rows))] if rows else []
    return tables + [
        _list_table(_title(f"{name}.{place}" if place else name), entries) for place, entries in _lists(value)
    ]


def _titled(rows: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
    return tuple((_title(place), text) for place, text in rows)


def _list_table(title: str, entries: Sequence[Mapping[str, Any]]) -> MeasureTable:
    found = [dict(figures(entry)) for entry in entries]
    columns = tuple(dict.fromkeys(place for own in found for place in own))
    rows = tuple(tuple(own.get(place, "–") for place in columns) for own in found)
    return MeasureTable(title, "From measures.json.", tuple(_title(column) for column in columns), rows)


def figures(value: Any, place: str = "") -> list[tuple[str, str]]:
    """(place, text) of every figure within a value, lists of objects left out."""
    if isinstance(value, Mapping):
        found = []
        rest = value
        if "mean" in value:
            found.append((place, _figure(value)))
            rest = {key: entry for key, entry in value.items() if key not in ("mean", "low", "high")}
        return found + [
            line for key, entry in rest.items() for line in figures(entry, f"{place}.{key}" if place else str(key))
        ]
    if _is_list_of_objects(value):
        return []
    if isinstance(value, list):
        return [(place, ", ".join(text for entry in value for _, text in figures(entry)))] if value else []
    return [(place, _number(value))]


def _lists(value: Any, place: str = "") -> list[tuple[str, list[Mapping[str, Any]]]]:
    """(place, entries) of every list of objects within a value."""
    if _is_list_of_objects(value):
        return [(place, value)]
    if not isinstance(value, Mapping):
        return []
    return [found for key, entry in value.items() for found in _lists(entry, f"{place}.{key}" if place else str(key))]


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _figure(value: Mapping[str, Any]) -> str:
    low, high = value.get("low"), value.get("high")
    ends = "" if low is None or high is None else f" ({_number(low)} to {_number(high)})"
    return _number(value["mean"]) + ends


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and 0 < abs(value) < SMALL:
        return f"{value:.2g}".replace("-", "\u2212")
    return number(value)


def _title(place: str) -> str:
    return place.replace("_", " ").replace(".", ", ")
