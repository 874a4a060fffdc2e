"""What measures.json holds is on the page: figures of policies, and curves of over-optimisation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.measures.curves import Curve, points
from evaluation.measures.overoptimisation import fit_curve
from heed.comparison_report import write_comparison_report
from heed.comparison_report_measures import figures, measure_tables
from heed.comparison_report_words import looks_of
from preferences.intervals import Interval, plain


def over_optimised(kind: Any) -> dict[str, Any]:
    """A curve that rises and falls: Gao et al.'s forms with an optimum inside the measured range, 40 prompts."""
    generator = np.random.default_rng(5)
    kl = np.array([0.25, 1.0, 2.25, 4.0, 9.0, 16.0])
    d = np.sqrt(kl)
    gain = d * (1.0 - 0.2 * d) if kind == "best_of_n" else d * (1.0 - 0.75 * np.log(d))
    noise = generator.normal(0, 0.2, size=(6, 40))
    curve = Curve(
        kind=kind,
        names=tuple(f"step {place}" for place in range(6)),
        kl_KP=np.tile(kl[:, None], (1, 40)),
        gold_KP=gain[:, None] + noise,
        proxy_KP=d[:, None] + noise,
        start_gold_P=np.zeros(40),
        start_proxy_P=np.zeros(40),
    )
    return {"kind": kind, "points": plain(points(curve)), "fitted": plain(fit_curve(curve, seed=0))}


def test_curves_are_drawn_with_their_advice(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    measures = {
        "reference": "sft",
        "policies": {
            "sft": {"kl_nats": plain(Interval(0.0, 0.0, 0.0)), "distinct_2": 0.78},
            "ppo": {"kl_nats": plain(Interval(4.21, 3.9, 4.5)), "distinct_2": 0.7112, "bits_per_byte": 1.5},
        },
        "over_optimisation": [over_optimised("rl"), over_optimised("best_of_n")],
        "reward_model": {"accuracy": {"mean": 0.7, "low": 0.65, "high": 0.75, "num_pairs": 900}, "bins": [
            {"predicted": 0.6, "observed": 0.58, "num_pairs": 450}, {"predicted": 0.9, "observed": 0.8}
        ]},
    }  # fmt: skip
    (folder / "measures.json").write_text(json.dumps(measures))
    report = write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert report["measures"] == measures
    assert "measures.json" in report["files"]
    for curve in measures["over_optimisation"]:
        assert curve["fitted"]["advice"].split(".")[0] in page
    assert "Gold score against KL: step 0" in page
    for text in ("4.21 (3.90 to 4.50)", "<td>0.71</td>", "900", "reward model, bins", "0.58"):
        assert text in page
    assert '<a href="#measures">' in page


def test_a_curve_without_a_fit_has_points_alone(make_folder: Callable[..., Path]) -> None:
    folder = make_folder()
    curve = over_optimised("rl") | {"fitted": None}
    (folder / "measures.json").write_text(json.dumps({"over_optimisation": [curve]}))
    write_comparison_report(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Gold score against KL: step 0" in page
    (folder / "measures.json").write_text(json.dumps({"over_optimisation": [{"kind": "ppo", "points": []}]}))
    with pytest.raises(ValueError, match=r"over_optimisation\[0\]: kind rl or best_of_n"):
        write_comparison_report(folder)


def test_a_page_without_measures_has_no_section_of_them(two_policies: Path) -> None:
    assert 'id="measures"' not in (two_policies / "report.html").read_text(encoding="utf-8")


def test_no_figure_is_left_out() -> None:
    value = {"a": {"mean": 0.5, "low": None, "high": None, "num": 3}, "b": [1, 2.5], "c": {"d": True, "e": None}}
    assert figures(value) == [("a", "0.50"), ("a.num", "3"), ("b", "1, 2.50"), ("c.d", "yes"), ("c.e", "–")]
    assert figures(0.00012) == [("", "0.00012")]
    tables = measure_tables({"x": 1, "y": [{"p": 1}, {"q": -2}], "policies": {"sft": {"z": 3}}}, looks_of(["sft"]))
    assert [table.title for table in tables] == ["Policies", "x", "y"]
    assert tables[2].columns == ("p", "q")
    assert tables[2].rows == (("1", "–"), ("–", "\u22122"))
