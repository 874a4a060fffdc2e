"""Win rates that people's verdicts correct: by hand, in worlds with a known truth, and in a comparison's report."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.judge_worlds import WORLDS, intervals
from evaluation.compare.report.page import write_comparison_report
from evaluation.statistics.corrected import MIN_LABELLED, corrected
from evaluation.verdicts import Response, Verdict, write_rows


def test_by_hand() -> None:
    """The judge predicts people's verdict plus a bias of 0.2, so its weight is 1: mean(f) over all + mean(y - f)."""
    y_P = np.array([0.1, 0.3, 0.5, 0.7] * 10)
    f_P = y_P + 0.2
    labelled_P = np.arange(40) % 2 == np.arange(40) // 4 % 2  # all four values, half of the prompts
    rate, weight = corrected(f_P, np.where(labelled_P, y_P, np.nan), np.arange(40))
    assert weight == pytest.approx(1.0)
    assert rate.mean == pytest.approx(f_P.mean() - 0.2)
    # People never contradict it otherwise: the variance is that of two contradictions among 20 labels.
    assert rate.high - rate.mean == pytest.approx(2.1009 * math.sqrt(2) / 20, abs=1e-4)


def test_the_variance_by_hand() -> None:
    """λ·mean_P(f) + mean_L(y - λ·f) of two independent parts, with every prompt its own cluster."""
    generator = np.random.default_rng(0)
    f_P = generator.random(500)
    y_P = (generator.random(500) < 0.25 + 0.5 * f_P).astype(np.float64)
    y_P[60:] = np.nan
    rate, weight = corrected(f_P, y_P, np.arange(500))
    f_L, y_L = f_P[:60], y_P[:60]
    expected = float(np.cov(f_L, y_L, ddof=0)[0, 1] / f_P.var())
    assert weight == pytest.approx(expected)
    assert rate.mean == pytest.approx(weight * f_P.mean() + (y_L - weight * f_L).mean())
    rest_L = y_L - weight * f_L
    parts_P = weight * (f_P - f_P.mean()) / 500 + np.pad((rest_L - rest_L.mean()) / 60, (0, 440))
    half = 2.00172 * math.sqrt(60 / 58 * (parts_P**2).sum())  # Student's quantile, 58 degrees of freedom
    assert (rate.low, rate.high) == (
        pytest.approx(rate.mean - half, rel=1e-5),
        pytest.approx(rate.mean + half, rel=1e-5),
    )


def test_clusters_of_copies_are_one_observation() -> None:
    generator = np.random.default_rng(1)
    f_P, y_P = generator.random(40), generator.random(40)
    y_P[20:] = np.nan
    once, _ = corrected(f_P, y_P, np.arange(40))
    copied, _ = corrected(np.repeat(f_P, 5), np.repeat(y_P, 5), np.repeat(np.arange(40), 5))
    assert (copied.low, copied.high) == (pytest.approx(once.low), pytest.approx(once.high))


@pytest.mark.parametrize("world", WORLDS)
def test_corrected_win_rates_cover_what_people_would_say(world: str) -> None:
    """150 worlds with 40 labels: a standard error of 1.8%. The judge alone misses the truth wherever it has a bias."""
    held = [one for n in range(150) for one in intervals(world, 40, np.random.default_rng([40, n]))]
    covers = {
        what: np.mean([one.low <= one.truth <= one.high for one in held if one.what == what])
        for what in ("judge", "corrected")
    }
    assert covers["corrected"] >= 0.92
    assert (covers["judge"] > 0.9) == (world == "good judge, equal policies")


def comparison(folder: Path, num_labelled: int, people: str = "people") -> Path:
    """200 prompts. The judge always prefers "long"; people prefer it every second time, on the first prompts."""
    folder.mkdir()
    names = [f"p{n}" for n in range(200)]
    rows = [{"prompt_id": name, "messages": [{"role": "user", "content": f"Question {name}?"}]} for name in names]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({**row, "category": ""}) + "\n" for row in rows))
    texts = {"long": "a long answer", "short": "short"}
    write_rows(
        folder / "responses.parquet", [Response(of, name, 0, text) for name in names for of, text in texts.items()]
    )
    verdicts = [Verdict(name, "long", "short", 0, 0, "length", "length", 1.0) for name in names]
    verdicts += [Verdict(names[n], "long", "short", 0, 0, people, "ann", float(n % 2)) for n in range(num_labelled)]
    write_rows(folder / "verdicts.parquet", verdicts)
    judges = [{"name": name, "kind": "external"} for name in ("length", people)]
    settings = {"policies": [{"name": name, "kind": "external"} for name in texts], "seed": 0, "judges": judges}
    (folder / "compare.json").write_text(json.dumps(settings))
    return folder


def test_a_comparison_reports_them_where_people_judged_a_part(tmp_path: Path) -> None:
    report = write_comparison_report(comparison(tmp_path / "some", 40))
    (found,) = report["corrected"]
    assert (found["judge"], found["people"], found["num_labelled"], found["num_prompts"]) == (
        "length",
        "people",
        40,
        200,
    )
    assert found["win_rate"]["mean"] == pytest.approx(0.5)  # not the judge's 100%
    (text,) = report["judge_quality"]
    assert "length corrected by people on 40 of 200 prompts: long over short 50.0%" in text
    assert "no difference shown" in text
    assert text in (tmp_path / "some/report.html").read_text()
    for name, num, people in (("few", MIN_LABELLED - 1, "people"), ("all", 200, "people"), ("model", 40, "gpt-4")):
        assert write_comparison_report(comparison(tmp_path / name, num, people))["corrected"] == []


def test_prompts_of_the_training_data_correct_nothing(tmp_path: Path) -> None:
    """10 of the 40 prompts that people judged are in the training data of a policy, and 20 of the others."""
    folder = comparison(tmp_path / "seen", 40)
    settings = json.loads((folder / "compare.json").read_text())
    settings["training_data"] = {"long": {"files": {}, "prompt_ids": [f"p{n}" for n in (*range(10), *range(180, 200))]}}
    (folder / "compare.json").write_text(json.dumps(settings))
    (found,) = write_comparison_report(folder)["corrected"]
    assert (found["num_labelled"], found["num_prompts"]) == (30, 170)
