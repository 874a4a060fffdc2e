"""What `heed evaluate` refuses, and that it does so before a model is asked."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.evaluate.evaluating import open_suite, suite_names

Call = Callable[..., tuple[int, str]]
Arguments = Callable[..., list[str]]


def test_training_data_are_read_before_any_model_is_asked(
    heed_main: Call, evaluate: Arguments, place: Path, chat_server: Any
) -> None:
    (place / "train.jsonl").write_text('{"text": "The fox xx?"}\n{"text": \n')
    api = f"api={chat_server.url}#writer"
    code, said = heed_main(*evaluate(place, api, "--training-data", str(place / "train.jsonl")))
    assert (code, "train.jsonl: line 2" in said) == (2, True), said
    assert chat_server.bodies == []


def test_items_that_the_hub_does_not_give_may_be_in_a_file(heed_main: Call, place: Path) -> None:
    """Tests have no network."""
    arguments = ["evaluate", str(place / "models/one/model"), "--suite", "gsm8k", "--out", str(place / "out")]
    code, said = heed_main(*arguments)
    wanted = "--data gsm8k=PATH reads grade_school_math/data/test.jsonl of https://github.com/openai/"
    assert (code, wanted in " ".join(said.split())) == (2, True), said


@pytest.mark.parametrize("suite", suite_names())
def test_missing_items_are_named_by_address_licence_and_size(heed_main: Call, place: Path, suite: str) -> None:
    assert re.search(
        r" of https://\S+ \((Apache 2.0|MIT|CC BY|ODC-BY)|/arena-hard-auto \(Apache", open_suite(suite).files
    )
    assert re.search(r"\d (kB|MB)\)", open_suite(suite).files)
    if not open_suite(suite).source:
        code, said = heed_main("evaluate", str(place / "models/one/model"), "--suite", suite)
        assert (code, open_suite(suite).files in " ".join(said.split())) == (2, True), said


@pytest.mark.parametrize(
    ("option", "given", "refusal"),
    [
        ("--judge", "http://127.0.0.1:1/v1#judge", "likely uses no judge"),
        ("--baseline", "http://127.0.0.1:1/v1#other", "likely uses no baseline"),
    ],
)
def test_options_that_no_suite_uses_are_refused(
    heed_main: Call, evaluate: Arguments, place: Path, option: str, given: str, refusal: str
) -> None:
    suite = place / "suite.py"
    suite.write_text(suite.read_text().replace("uses=BOTH", ""))
    code, said = heed_main(*evaluate(place, str(place / "models/one/model"), option, given, suite="LIKELY"))
    assert (code, refusal in said) == (2, True), said


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ("float('nan')", "suite 'likely': model 'one': item 'q0': logprob is nan; a finite number, or a failure"),
        ("float('inf')", "item 'q0': logprob is inf; a finite number"),
        ("1.5", "item 'q0': logprob is 1.5; it is a share, so a number from 0 to 1 was expected"),
    ],
)
def test_values_that_no_statistic_can_take_are_refused(
    heed_main: Call, evaluate: Arguments, place: Path, value: str, refusal: str
) -> None:
    suite = place / "suite.py"
    changed = suite.read_text().replace('Measure("logprob", "Nats.")', 'Measure("logprob", "Nats.", is_share=True)')
    suite.write_text(changed.replace('{"logprob": value}', f'{{"logprob": {value}}}'))
    code, said = heed_main(*evaluate(place, str(place / "models/one/model"), suite="LIKELY"))
    assert (code, refusal in " ".join(said.split())) == (2, True), said


def test_rows_of_saved_answers_that_are_unused_are_counted(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    saved = [{"item_id": name, "turns": ["ab", "c"]} for name in ("q0", "q1", "q2", "q3", "q4", "q5", "zz", "zzz")]
    (place / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    code, said = heed_main(*evaluate(place, f"old={place / 'saved.jsonl'}"))
    assert code == 0, said
    line = "old: 2 rows of the file answer none of the 6 items of foxes and are unused, the first in"
    assert f"{line} {place / 'saved.jsonl'}: line 7" in " ".join(said.split())
    assert json.loads((place / "out" / "evaluate.json").read_text())["unused_rows"] == {"foxes": {"old": 2}}
    page = (place / "out" / "report.html").read_text()
    assert "foxes: 2 rows of old&#39;s file answer no item that was asked and are unused." in page


def test_a_suite_of_ones_own_is_judged_by_a_function(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    """A judge may fail on single answers: here on the one without a fox."""
    (place / "judges.py").write_text(
        "def words(prompts, responses):\n"
        "    assert all(prompt[-1]['role'] == 'user' for prompt in prompts)\n"
        "    return [None if 'fox' not in text else len(text.split()) for text in responses]\n"
    )
    for name, text in (("long", "a fox and more"), ("short", "fox")):
        rows = [{"item_id": f"q{n}", "output": text if n or name == "long" else "none"} for n in range(6)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = [f"{name}={place / name}.jsonl" for name in ("long", "short")]
    code, said = heed_main(*evaluate(place, *models, "--judge", f"{place / 'judges.py'}:words", suite="GRADED"))
    assert code == 0, said
    assert json.loads((place / "out/evaluate.json").read_text())["judge"]["kind"] == "function"
    report = json.loads((place / "out/report.json").read_text())["suites"][0]["statistics"]
    assert [(v["value"]["mean"], v["num_failed"]) for v in report["values"] if not v["group"]] == [(4, 0), (1, 1)]
    assert report["failures"][0]["reason"].startswith(f"{place / 'judges.py'}:words returned None")


@pytest.mark.parametrize(
    ("judge", "suite", "refusal"),
    [
        ("{place}/scorers.py", "GRADED", "scorers.py names no function; FILE.py:FUNCTION was expected, as in"),
        ("{place}/scorers.py:none", "GRADED", "no function 'none'"),
        ("", "GRADED", "suite 'graded' needs --judge SPEC, a judge that scores single responses, such as FILE.py:"),
        ("http://127.0.0.1:1/v1#judge", "GRADED", "graded uses no judge that is a language model"),
        ("{place}/scorers.py:length", "SUITE", "foxes uses no judge that scores single responses"),
        ("{place}/scorers.py:length", "LIKELY", "likely uses no judge that scores single responses"),
    ],
)
def test_a_judge_is_refused_by_what_a_suite_needs(
    heed_main: Call, evaluate: Arguments, place: Path, judge: str, suite: str, refusal: str
) -> None:
    given = ["--judge", judge.format(place=place)] if judge else []
    code, said = heed_main(*evaluate(place, str(place / "models/one/model"), *given, suite=suite))
    assert (code, refusal in " ".join(said.split())) == (2, True), said
