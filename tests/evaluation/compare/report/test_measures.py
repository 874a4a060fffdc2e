"""The page shows what measures.json holds: measures of policies, the tax, and a reward model's reliability."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.compare.report.measures import figures, measure_tables
from evaluation.compare.report.page import write_comparison_report
from evaluation.measures.language_modelling import Change, TaskTax, Tax
from evaluation.measures.policies import measure_policies
from evaluation.measures.reward_model import RewardMeasures, ScoredPairs, calibration
from evaluation.verdicts import Response
from files.records import as_json
from preferences.statistics.estimates import Interval, Share
from stages.reports.parts import Table
from stages.reports.text import percent, styles_of


def measured_policies() -> dict[str, Any]:
    """Computes a comparison's measures of its policies from responses."""
    rows = [
        Response(name, f"p{prompt}", 0, f"{name} says {'no ' * prompt}{prompt}", 3, True, 0.1 * prompt + place)
        for place, name in enumerate(("sft", "ppo"))
        for prompt in range(20)
    ]
    return dict(as_json(measure_policies(rows, seed=0)))


TAX = Tax(
    before="sft",
    num_documents=40,
    num_bytes=9_000,
    bits_per_byte={
        "sft": Change(Interval(1.5, 1.4, 1.6), Interval(0.0, 0.0, 0.0)),
        "ppo": Change(Interval(1.6, 1.5, 1.7), Interval(0.1, 0.05, 0.15)),
    },
    tasks=(TaskTax("sums", 4, 30, {"ppo": Change(Interval(0.5, 0.4, 0.6), Interval(-0.1, -0.2, 0.0))}, {}),),
)


def reward_model() -> RewardMeasures:
    """An overconfident model: its score differences are twice as large as they should be."""
    generator = np.random.default_rng(2)
    lead = generator.normal(0, 1.5, size=400)
    right = generator.random(400) < 1 / (1 + np.exp(-np.abs(lead) / 2))
    ones, places = np.ones(400, dtype=np.int64), np.arange(400)
    pairs = ScoredPairs(
        np.where(right, np.abs(lead), -np.abs(lead)), places, places, 2 * ones, ones, 0 * ones, ("all",)
    )  # fmt: skip
    return RewardMeasures(
        form="rankings", num_tasks=400, num_labelers=3, num_tied_pairs=4, num_too_long=0, too_long="", warnings={},
        calibration=calibration(pairs, seed=0, num_bins=4), agreement=Share(0.79, 0.76, 0.82, 400, 400),
        ceiling=Interval(0.88, 0.86, 0.9), by_category={"all": Share(0.7, 0.6, 0.8, 400, 400)}, rewardbench=None,
    )  # fmt: skip


def test_every_measure_is_on_the_page(make_folder: Callable[..., Path], read_page: Callable[[str], Any]) -> None:
    folder = make_folder()
    measures = {
        "reference": "sft",
        "policies": measured_policies(),
        "tax": as_json(TAX),
        "reward_model": as_json(reward_model()),
    }  # fmt: skip
    (folder / "measures.json").write_text(json.dumps(measures))
    report = write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert report["measures"] == measures
    assert "measures.json" in report["files"]
    kl = measures["policies"]["ppo"]["kl_nats"]
    assert f"<td><bdi>{kl['mean']:.2f} ({kl['low']:.2f} to {kl['high']:.2f})</bdi></td>" in page
    for text in (
        "across prompts: distinct bigrams",
        "1.60 (1.50 to 1.70)",
        "bits per byte, above SFT&#39;s",
    ):
        assert text in page
    accuracy = measures["reward_model"]["calibration"]["accuracy"]
    ends = f"({accuracy['low']:.2f} to {accuracy['high']:.2f})"
    assert f"<td><bdi>{accuracy['mean']:.2f} {ends}</bdi></td>" in page
    for entry in measures["reward_model"]["calibration"]["bins"]:
        assert f"{percent(entry['accuracy']['mean'])} right at {percent(entry['confidence'])} confidence" in page
    assert "ceiling by the labelers&#39; own agreement, 88%" in page
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
    tables = measure_tables({"x": 1, "y": [{"p": 1}, {"q": -2}], "policies": {"sft": {"z": 3}}}, styles_of(["sft"]))
    assert [table.title for table in tables] == ["Policies", "Single figures", "y"]
    (table,) = tables[2].parts
    assert isinstance(table, Table)
    assert table.columns == ("p", "q")
    assert [(row.heads, [cell.text for cell in row.cells]) for row in table.rows] == [
        (("1",), ["–"]),
        (("–",), ["\u22122"]),
    ]


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
