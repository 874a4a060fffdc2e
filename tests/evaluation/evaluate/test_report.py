"""The page and the folder of an evaluation: its headline, algorithms with several seeds, settings and items."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evaluation.evaluate.folder import EvaluationFolder, EvaluationReport, ReportedMeasure, SuiteReport
from evaluation.evaluate.report import page_of
from evaluation.evaluate.statistics import suite_statistics
from evaluation.suites.suite import Item, Measure, Scored
from files.hashes import file_hash
from files.parquet import read_parquet

Call = Callable[..., tuple[int, str]]
Arguments = Callable[..., list[str]]

LENGTHS = {"short-1": 2, "short-2": 3, "long-1": 20, "long-2": 22, "other": 9}  # characters of each model's answers


@pytest.fixture
def saved(place: Path) -> Callable[[str], str]:
    """Returns a file of answers of one of LENGTHS; the six items are independent."""
    items = [json.loads(line) | {"cluster": ""} for line in (place / "items.jsonl").read_text().splitlines()]
    (place / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))

    def of(name: str) -> str:
        apart = 2 if LENGTHS[name] > 10 else 0  # equal differences of six items would show nothing
        rows = [
            {"item_id": f"q{n}", "turns": ["x" * (LENGTHS[name] + apart * (-1) ** n), "y" * (1 + n % 2)]}
            for n in range(6)
        ]
        (place / f"{name}.json").write_text(json.dumps(rows))
        return str(place / f"{name}.json")

    return of


def only_length(place: Path) -> None:
    """Leave the suite with its length as first measure."""
    suite = place / "suite.py"
    suite.write_text(suite.read_text().replace('    Measure("even"', '    Measure("odd"'))


def test_several_seeds_of_two_algorithms(
    heed_main: Call, evaluate: Arguments, place: Path, saved: Callable[[str], str]
) -> None:
    only_length(place)
    runs = [f"{name.partition('-')[0]}={saved(name)}" for name in ("short-1", "long-1", "short-2", "long-2")]
    code, said = heed_main(*evaluate(place, *runs))
    assert code == 0, said
    report = json.loads((place / "out" / "report.json").read_text())
    assert report["models"] == ["short/1", "long/1", "short/2", "long/2"]
    assert report["settings"]["algorithms"] == {"short": ["short/1", "short/2"], "long": ["long/1", "long/2"]}
    row = next(one for one in report["suites"][0]["statistics"]["algorithms"] if one["measure"] == "length")
    assert (row["a"], row["b"], row["num_runs_a"], row["conclusion"]["kind"]) == ("short", "long", 2, "better")
    assert row["difference"]["mean"] == 2.5 - 21
    sentence = "foxes: as algorithms, short is better than long in length, where lower is better, over 2 and 2 runs:"
    assert sentence in " ".join(said.split())
    assert "The sentences on algorithms hold for other seeds" in " ".join(said.split())
    page = (place / "out" / "report.html").read_text()
    top = page.partition("<section")[0]
    assert sentence in top
    assert top.index(sentence) < top.index("The rest is about these weights only")
    assert "A difference is one between two sets of weights" not in top
    assert "Algorithms, over seeds" in page
    # The same evaluation again, with a name per run, is about weights only.
    named = [f"{name}={saved(name)}" for name in ("short-1", "long-1", "short-2", "long-2")]
    assert heed_main(*evaluate(place, *named, out="weights"))[0] == 0
    top = (place / "weights" / "report.html").read_text().partition("<section")[0]
    assert "as algorithms" not in top
    assert "two sets of weights" in top


def test_a_model_that_is_the_only_run_of_its_algorithm_is_pointed_out(
    heed_main: Call, evaluate: Arguments, place: Path, saved: Callable[[str], str]
) -> None:
    given = [f"long={saved('long-1')}", f"long={saved('long-2')}", saved("other"), "--training-data"]
    (place / "extra.txt").write_text("The fox xxxxx?")
    code, said = heed_main(*evaluate(place, *given, f"long={place / 'extra.txt'}"))
    assert code == 0, said
    page = (place / "out" / "report.html").read_text()
    assert "There is only one run of other: a sentence on an algorithm takes several runs (seeds) of it." in page
    found = json.loads((place / "out" / "report.json").read_text())["suites"][0]
    assert found["statistics"]["algorithms"] == []
    assert [row["model"] for row in found["contamination"]] == ["long/1", "long/2"]


def test_settings_say_what_judge_and_baseline_were(
    heed_main: Call, evaluate: Arguments, place: Path, saved: Callable[[str], str]
) -> None:
    two = place / "models" / "two" / "model"
    more = ["--judge", str(two), "--baseline", saved("other")]
    code, said = heed_main(*evaluate(place, saved("long-1"), *more))
    assert code == 0, said
    settings = json.loads((place / "out" / "evaluate.json").read_text())
    assert settings["baseline"]["sha256"] == file_hash(place / "other.json")
    assert (settings["judge"]["spec"], len(settings["judge"]["sha256"])) == (str(two), 64)


def test_what_scoring_needed_is_json(heed_main: Call, place: Path) -> None:
    row = {"key": 7, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (place / "mine.jsonl").write_text(json.dumps({"key": 7, "response": "None"}) + "\n")
    options = ["--suite", "ifeval", "--data", str(place / "rows.jsonl"), "--out", str(place / "out")]
    code, said = heed_main("evaluate", str(place / "mine.jsonl"), *options)
    assert code == 0, said
    ((_, found),) = read_parquet(place / "out" / "items.parquet")
    assert json.loads(found["data"]) == {"checks": [{"kind": "punctuation:no_comma", "arguments": {}}], "number": 1}


def test_data_that_are_no_json_are_refused(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    suite = place / "suite.py"
    suite.write_text(suite.read_text().replace('row["cluster"], row)', 'row["cluster"], {"seen": {1}})'))
    code, said = heed_main(*evaluate(place, "none.jsonl"))  # before models are opened
    assert (code, "suite 'foxes': item 'q0': `data` is no JSON" in said) == (2, True), said


def test_the_headline_of_one_model_is_of_a_measure_that_it_has(heed_main: Call, place: Path) -> None:
    """Without a judge, XSTest has the values of the rule only."""
    head = "id,prompt,type,label,focus,note\n"
    (place / "xstest.csv").write_text(head + "".join(f"{n},How {n}?,homonyms,safe,kill,\n" for n in range(8)))
    rows = [{"prompt": f"How {n}?", "response": "Sorry" if n < 2 else "Like this."} for n in range(8)]
    (place / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--suite", "xstest", "--data", str(place / "xstest.csv"), "--out", str(place / "out")]
    code, said = heed_main("evaluate", str(place / "mine.jsonl"), *options)
    assert code == 0, said
    assert "xstest: rule_refused_safe of mine 25.0% (" in said
    page = (place / "out" / "report.html").read_text()
    assert "of no model" not in page
    assert "xstest: rule_refused_safe of mine 25.0% (" in page.partition("<section")[0]


def test_the_first_sentence_agrees_with_the_tone_of_several_suites(
    heed_main: Call, evaluate: Arguments, place: Path, saved: Callable[[str], str]
) -> None:
    """The first suite shows nothing, and the second a difference: the page begins with the second's."""
    suite = place / "suite.py"
    again = 'Suite("again", "Foxes", "conversations", (Measure("length", "Characters."),), read, foxes)'
    suite.write_text(f"{suite.read_text()}\n\nAGAIN = {again}\n")
    given = evaluate(place, saved("short-1"), saved("long-1"), suite="SUITE")
    given[given.index("--data") + 1] = f"foxes={place / 'items.jsonl'}"
    more = ["--suite", f"{suite}:AGAIN", "--data", f"again={place / 'items.jsonl'}"]
    code, said = heed_main(*given, *more)
    assert code == 0, said
    top = (place / "out" / "report.html").read_text().partition("<section")[0]
    shown, not_shown = "again: long-1 is better than short-1 in length", "foxes: no difference in even is shown"
    assert top.index(shown) < top.index(not_shown)


def test_sentences_that_do_not_fit_are_counted() -> None:
    """Of seven models, one is better than the other six; then five sentences follow the first."""
    items = [Item(f"q{n}", ({"role": "user", "content": "?"},)) for n in range(40)]
    measure, generator = Measure("gain", "Of something."), np.random.default_rng(0)
    scored = {
        f"m{m}": {item.item_id: Scored(item.item_id, {"gain": generator.normal(5.0 * (m == 6))}) for item in items}
        for m in range(7)
    }
    statistics = suite_statistics("s", [measure], items, scored, seed=0)
    assert sum(bool(row.better) for row in statistics.differences) == 6
    measures = (ReportedMeasure(measure.name, measure.description, higher_is_better=True),)
    suite = SuiteReport("s", "S", "items.jsonl", measures, statistics, ())
    report = EvaluationReport(tuple(scored), (suite, replace(suite, suite="t")), {})
    top = page_of(EvaluationFolder("out", report, [], {}, {})).partition("<section")[0]
    assert top.count(" is better than ") == 6
    assert "6 more sentences like these: see the sections." in top
