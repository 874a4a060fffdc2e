"""The measures of a comparison as tables: whatever measures.json holds is shown, nothing is picked.

    policies            {policy: evaluation.measures.policies.PolicyMeasures}: a table with a column a policy
    tax                 evaluation.measures.tax.Tax: likewise
    anything else       figures by their place, a list of objects as a table of its own; report_curves draws
                        `over_optimisation` and `reward_model`

A figure is a number, a text, or {mean, low, high}; objects nest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.text import Policy, number

# What places in PolicyMeasures are called; others are called as they are.
TITLES = {
    "kl_nats": "KL to the reference, nats",
    "diversity.num_prompts": "prompts",
    "diversity.num_responses": "responses",
    "diversity.within.num_samples": "within a prompt: responses compared",
    "diversity.within.identical": "within a prompt: identical pairs",
    "diversity.within.distinct_2": "within a prompt: distinct bigrams",
    "diversity.within.self_bleu": "within a prompt: self-BLEU",
    "diversity.across.num_words": "across prompts: words compared",
    "diversity.across.identical": "across prompts: identical pairs",
    "diversity.across.distinct_1": "across prompts: distinct words",
    "diversity.across.distinct_2": "across prompts: distinct bigrams",
    "diversity.across.self_bleu": "across prompts: self-BLEU",
    "diversity.words.mean": "words a response",
    "diversity.words.quantiles": "words: 0, 5, 25, 50, 75, 95 and 100% quantiles",
    "diversity.tokens": "tokens a response",
    "diversity.tokens.mean": "tokens a response",
    "diversity.tokens.quantiles": "tokens: 0, 5, 25, 50, 75, 95 and 100% quantiles",
    "diversity.finished": "ended by themselves",
    "diversity.repetition": "repeated 4-grams",
    "diversity.empty": "empty responses",
}
UNKNOWN = "–"

SMALL = 0.01  # below it a number is shown by significant digits


@dataclass(frozen=True)
class MeasureTable:
    """A table of texts; the first cell of a row is its head."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_main: bool = False  # open on the page


def measure_tables(measures: Mapping[str, Any], looks: Mapping[str, Policy]) -> list[MeasureTable]:
    """All tables: that of policies first, then the rest in the file's order."""
    tables = []
    policies = measures.get("policies")
    if isinstance(policies, Mapping) and policies:
        tables.append(_policy_table(policies, looks))
    tax = measures.get("tax")
    if isinstance(tax, Mapping):
        tables.append(_tax_table(tax, looks))
    rest = {name: value for name, value in measures.items() if name not in ("policies", "tax")}
    single = [
        line for name, value in rest.items() if not isinstance(value, Mapping | list) for line in figures(value, name)
    ]
    if single:
        tables.append(MeasureTable("Single figures", "From measures.json.", ("Measure", "Value"), _titled(single)))
    for name, value in rest.items():
        if isinstance(value, Mapping | list):
            tables += _tables(name, value)
    return tables


def _policy_table(policies: Mapping[str, Any], looks: Mapping[str, Policy]) -> MeasureTable:
    found = {name: dict(figures(value)) for name, value in policies.items()}
    places = list(dict.fromkeys(place for own in found.values() for place in own))
    known = [place for place in places if any(own.get(place, UNKNOWN) != UNKNOWN for own in found.values())]
    # Lengths in tokens are one place where nobody counted them, and two where somebody did.
    unknown = [place for place in places if place not in known and not any(k.startswith(f"{place}.") for k in known)]
    titles = tuple(looks[name].title if name in looks else name for name in found)
    rows = tuple((_title(place), *(own.get(place, UNKNOWN) for own in found.values())) for place in known)
    caption = "Every policy's measures; in brackets 95% intervals over prompts. From measures.json."
    if unknown:
        caption += f" Not known of any policy: {'; '.join(_title(place) for place in unknown)}."
    return MeasureTable("Policies", caption, ("Measure", *titles), rows, is_main=True)


def _tax_table(tax: Mapping[str, Any], looks: Mapping[str, Policy]) -> MeasureTable:
    """Every policy's quality as a language model, and below it how far it is above that of the one before."""
    before = str(tax["before"])
    measured = [("bits a byte", tax["bits_per_byte"])]
    for task in tax["tasks"]:
        name = f"{task['task']}, {number(task['num_shots'])} shots"
        measured += [(f"{name}: exact match", task["exact_match"]), (f"{name}: bits a byte", task["bits_per_byte"])]
    policies = list(dict.fromkeys(policy for _, changes in measured for policy in changes))
    titles = {policy: looks[policy].title if policy in looks else policy for policy in [*policies, before]}
    rows: list[tuple[str, ...]] = []
    for name, changes in measured:
        for field, text in (("figure", name), ("above_before", f"{name}, above {titles[before]}'s")):
            cells = [_figure(changes[policy][field]) if policy in changes else "–" for policy in policies]
            rows.append((text, *cells))
    caption = (
        f"{number(tax['num_documents'])} held-out texts of {number(tax['num_bytes'])} bytes; bits a byte: lower is"
        " better; exact match: higher is. In brackets 95% intervals. From measures.json."
    )
    columns = ("Measure", *(titles[policy] for policy in policies))
    return MeasureTable("Alignment tax", caption, columns, tuple(rows), is_main=True)


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
    """(place, text) of every figure within a value, lists of objects left out. A figure is {mean, low, high}; what has
    a figure called "mean" is none."""
    if isinstance(value, Mapping):
        found = []
        rest = value
        if "mean" in value and not isinstance(value["mean"], Mapping):
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
    """With its interval, unless that has no width: prompts that all came out alike say nothing of precision."""
    low, high = value.get("low"), value.get("high")
    ends = "" if low is None or high is None or low == high else f" ({_number(low)} to {_number(high)})"
    return _number(value["mean"]) + ends


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value or "–"
    if isinstance(value, float) and 0 < abs(value) < SMALL:
        return f"{value:.2g}".replace("-", "\u2212")
    return number(value)


def _title(place: str) -> str:
    return TITLES.get(place) or place.replace("_", " ").replace(".", ", ")
