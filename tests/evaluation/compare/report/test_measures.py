"""The page shows what measures.json holds: measures of policies, and scores of best-of-n."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evaluation.compare.report.measures import figures, measure_tables
from evaluation.compare.report.page import write_comparison_report
from evaluation.measures.best_of_n import BestOfN
from evaluation.measures.policies import measure_policies
from evaluation.verdicts import Response
from files.records import as_json
from preferences.statistics.estimates import Interval
from stages.reports.parts import Table
from stages.reports.text import styles_of


def measured_policies() -> dict[str, Any]:
    """Computes a comparison's measures of its policies from responses."""
    rows = [
        Response(name, f"p{prompt}", 0, f"{name} says {'no ' * prompt}{prompt}", 3, True, 0.1 * prompt + place)
        for place, name in enumerate(("sft", "ppo"))
        for prompt in range(20)
    ]
    return dict(as_json(measure_policies(rows, seed=0)))


BEST = [
    BestOfN(1, 0.0, Interval(0.25, 0.2, 0.3), Interval(1.0, 0.5, 1.5)),
    BestOfN(4, 0.636, Interval(0.5, 0.45, 0.55), Interval(2.0, 1.5, 2.5)),
]


def test_every_measure_is_on_the_page(make_folder: Callable[..., Path], read_page: Callable[[str], Any]) -> None:
    folder = make_folder()
    measures = {"best_of_n": as_json(tuple(BEST)), "reward_hacking": None, "policies": measured_policies()}
    (folder / "measures.json").write_text(json.dumps(measures))
    report = write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert report["measures"] == measures
    assert "measures.json" in report["files"]
    kl = measures["policies"]["ppo"]["kl_nats"]
    assert f"<td><bdi>{kl['mean']:.2f} ({kl['low']:.2f} to {kl['high']:.2f})</bdi></td>" in page
    for text in ("across prompts: distinct bigrams", "0.64", "0.50 (0.45 to 0.55)", "2.00 (1.50 to 2.50)"):
        assert text in page
    assert read_page(page).open == []
    assert '<a href="#measures">' in page


def test_a_page_without_measures_has_no_section_of_them(two_policies: Path) -> None:
    assert 'id="measures"' not in (two_policies / "report.html").read_text(encoding="utf-8")


def test_no_figure_is_left_out() -> None:
    value = {"a": {"mean": 0.5, "low": None, "high": None, "num": 3}, "b": [1, 2.5], "c": {"d": True, "e": None}}
    assert figures(value) == [("a", "0.50"), ("a.num", "3"), ("b", "1, 2.50"), ("c.d", "yes"), ("c.e", "–")]
    lengths = {"mean": {"mean": 35.7, "low": 33.1, "high": 38.3}, "quantiles": [18.0, 24.0]}
    assert figures(lengths) == [("mean", "35.70 (33.10 to 38.30)"), ("quantiles", "18.00, 24.00")]
    assert figures(0.00012) == [("", "0.00012")]


def test_what_is_known_of_no_policy_is_named_once() -> None:
    rows = [Response(name, f"p{place}", 0, "one two three four five") for name in ("sft", "ppo") for place in range(4)]
    (details,) = measure_tables({"policies": as_json(measure_policies(rows, seed=0))}, styles_of(["sft", "ppo"]))
    (table,) = details.parts
    assert isinstance(table, Table)
    shown = [row.heads[0] for row in table.rows]
    assert "words per response" in shown
    assert not any({cell.text for cell in row.cells} == {"–"} for row in table.rows)
    unknown = table.caption.split("Not known of any policy: ")[1].split("; ")
    assert {"KL to the reference, nats", "within a prompt: identical pairs"} <= set(unknown)
    assert table.caption.endswith("; tokens per response; ended with the end token.")
