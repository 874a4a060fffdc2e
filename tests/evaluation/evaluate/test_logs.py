"""Logs of lm-evaluation-harness, inspect_ai and OpenAI evals through `heed evaluate`, and its exit code for CI.

inspect_a.eval was written by inspect_ai 0.3.285 with its mockllm model, inspect_b.json likewise, shortened to the
fields that are read. Rows of the harness have the fields that `EvaluationTracker` of lm_eval 0.4.13 writes.
"""

import json
import math
import random
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from evaluation.evaluate.logs import _events, _inspect_sample
from evaluation.suites.suite import pass_at

Call = Callable[..., tuple[int, str]]
LOGS = Path(__file__).parent / "logs"
TIME = "2026-11-28T20-01-02.345678"


def harness_log(
    folder: Path, right: list[int], task: str = "gsm8k", *, time: str = TIME, results: dict[str, Any] | None = None
) -> Path:
    """Writes a task's log as `lm_eval --log_samples` does: two filters, of which the second is always right."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number, is_right in enumerate(right):
        for kept_by, value in (("strict-match", is_right), ("flexible-extract", 1)):
            row = {
                "doc_id": number,
                "doc": {"question": f"What is {number}?", "passage": f"story {number // 2}"},
                "target": str(number),
                "arguments": {
                    "gen_args_0": {"arg_0": f"Question: What is {number}?\nAnswer:", "arg_1": {"until": ["Q"]}}
                },
                "resps": [[f"It is {number}, says {folder.name}."]],
                "filtered_resps": [str(number)],
                "filter": kept_by,
                "metrics": ["exact_match"],
                "doc_hash": f"hash{number}",
                "prompt_hash": "p",
                "target_hash": "t",
                "exact_match": float(value),
            }
            lines.append(json.dumps(row) + "\n")
    (folder / f"samples_{task}_{time}.jsonl").write_text("".join(lines))
    if results is not None:
        (folder / f"results_{time}.json").write_text(json.dumps(results))
    return folder


def openai_log(path: Path, right: list[list[bool]]) -> Path:
    rows: list[dict[str, Any]] = [{"spec": {"eval_name": "sums.dev.v0", "completion_fns": ["x"]}}]
    for number, samples in enumerate(right):
        for is_right in samples:
            where = {"run_id": "r", "event_id": len(rows), "sample_id": f"sums.dev.{number}"}
            written = f"I am {path.stem}."
            rows.append({**where, "type": "sampling", "data": {"prompt": f"What is {number}?", "sampled": [written]}})
            match = {"correct": is_right, "expected": "1", "picked": path.stem, "sampled": path.stem}
            rows.append({**where, "type": "match", "data": match})
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"final_report": {"accuracy": 0.5}}]))
    return path


def statistics_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["suites"][0]["statistics"]
    return found


def test_logs_of_the_harness_are_paired_by_document_in_clusters(heed_main: Call, tmp_path: Path) -> None:
    draw = random.Random(5)
    a, b = [int(draw.random() < 0.9) for _ in range(80)], [int(draw.random() < 0.4) for _ in range(80)]
    harness_log(tmp_path / "b", [1] * 80, time="2026-11-27T20-01-02.345678")  # an earlier run, which is not read
    specs = [f"{name}={harness_log(tmp_path / name, right)}" for name, right in (("a", a), ("b", b))]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    assert code == 0, said
    found = statistics_in(tmp_path / "out")
    strict, flexible = found["differences"]
    assert (strict["measure"], flexible["measure"]) == ("exact_match,strict-match", "exact_match,flexible-extract")
    assert strict["difference"]["mean"] == pytest.approx((sum(a) - sum(b)) / 80)
    assert (strict["num_items"], strict["num_clusters"], strict["conclusion"]["kind"]) == (80, 40, "better")
    assert "a is better than b in exact_match,strict-match" in said.replace("\n", " ")
    assert "What is 0?" in (tmp_path / "out" / "report.html").read_text()


def test_tasks_of_a_group_are_one_suite_and_the_results_say_which_direction_is_better(
    heed_main: Call, tmp_path: Path
) -> None:
    results = {
        "group_subtasks": {"mmlu": ["mmlu_stem"], "mmlu_stem": ["physics", "maths"], "physics": [], "maths": []},
        "higher_is_better": {"physics": {"exact_match": False}, "maths": {"exact_match": False}},
    }
    for name, right in (("a", [1] * 12), ("b", [0] * 12)):
        for task in ("physics", "maths"):
            harness_log(tmp_path / name, right, task, results=results)
    specs = [f"{name}={tmp_path / name}" for name in "ab"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    assert code == 0, said
    found = statistics_in(tmp_path / "out")
    assert (found["suite"], found["num_items"]) == ("mmlu", 24)
    assert {value["group"] for value in found["values"]} == {"", "physics", "maths"}
    assert found["differences"][0]["conclusion"]["kind"] == "worse"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda rows: rows[0].pop("doc_id"), "line 1"),
        (lambda rows: rows[2].update(doc_id=0), "line 3: doc_id 0 with filter 'strict-match' is already in"),
        (lambda rows: [row.update(doc_hash="other") for row in rows], "asks something else than in"),
        (lambda rows: [row.update(metrics=["bleu"], bleu=["x", "y"]) for row in rows], ""),
        (lambda rows: [row.update(metrics=None) for row in rows], ""),
        (lambda rows: [row.update(arguments={"gen_args_0": ["What is it?"]}) for row in rows], ""),
    ],
)
def test_malformed_logs_are_refused_by_file_and_line(
    heed_main: Call, tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], Any], expected: str
) -> None:
    for name in "ab":
        harness_log(tmp_path / name, [0, 1, 0])
    (file,) = (tmp_path / "b").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    spoil(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = [f"{name}={tmp_path / name}" for name in "ab"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    if not expected:  # such as a metric of the corpus, without a value per document: those of the other log remain
        assert code == 0, said
        return
    assert code == 2
    assert expected in said.replace("\n", " ")
    assert str(file) in said.replace("\n", "")


def spoilt(tmp_path: Path, spoil: Callable[[list[dict[str, Any]]], Any]) -> tuple[list[str], Path]:
    """Returns an evaluation's arguments of two logs of 40 items, of which the second is spoilt, and its file."""
    for name, right in (("a", [1] * 20 + [0] * 20), ("b", [1] * 30 + [0] * 10)):
        harness_log(tmp_path / name, right)
    (file,) = (tmp_path / "b").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    spoil(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["evaluate", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--out", str(tmp_path / "out")], file


def test_a_log_without_numbers_gives_no_verdict(heed_main: Call, tmp_path: Path) -> None:
    command, _ = spoilt(tmp_path, lambda rows: [row.update(exact_match="right") for row in rows])
    code, said = heed_main(*command)
    assert code == 0, said
    assert "no verdict on a and b in exact_match,strict-match: " in " ".join(said.split())
    code, said = heed_main(*command, "--fail-if", "b worse than a")
    assert code == 2, said


@pytest.mark.parametrize("value", ["yes", None, float("nan")])
def test_a_value_that_is_no_number_is_a_failure_with_file_and_line(
    heed_main: Call, tmp_path: Path, value: object
) -> None:
    command, file = spoilt(tmp_path, lambda rows: rows[0].update(exact_match=value))
    code, said = heed_main(*command)
    assert code == 0, said
    report = (tmp_path / "out" / "report.json").read_text()
    assert f"{file}: line 1: exact_match is " in json.dumps(json.loads(report))
    assert statistics_in(tmp_path / "out")["differences"][0]["num_items"] == 39


def test_every_measure_has_a_sentence_the_page_agrees_in_sign_and_a_gate_may_name_one(
    heed_main: Call, tmp_path: Path
) -> None:
    """a is right by the strict filter on 10 of 40 items, b on 33 (and 4 are not in its log); both by the other one."""
    for name, right in (("a", [1] * 10 + [0] * 30), ("b", [1] * 33 + [0] * 3)):
        harness_log(tmp_path / name, right)
        (log,) = (tmp_path / name).glob("samples_*")
        rows = [json.loads(line) | {"metrics": ["exact_match", "f1"]} for line in log.read_text().splitlines()]
        for row in rows:
            row["f1"] = 1 - row["exact_match"] if row["filter"] == "strict-match" else 1.0
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["evaluate", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--out", str(tmp_path / "out")]
    code, said = heed_main(*command)
    page, said = (tmp_path / "out" / "report.html").read_text(), " ".join(said.split())
    assert code == 0, said
    strict = (
        "gsm8k: b is better than a in exact_match,strict-match, whatever the missing answers are worth: +63.9 points"
    )
    assert strict in said
    assert strict in page
    assert "gsm8k: a is better than b in f1,strict-match, whatever the missing answers are worth: +63.9 points" in said
    for measure in ("exact_match,flexible-extract", "f1,flexible-extract"):
        open_one = f"gsm8k: no difference in {measure} is shown between a and b, with what is missing counted as worst"
        assert open_one in said
    assert "25.0%" in said
    assert "4 without a value" in said
    assert "4 failed" not in said + page
    assert page.count("+63.9 points") > 2
    assert "\u221263.9 points" not in page
    for measure, expected in (("exact_match,strict-match", 0), ("f1,strict-match", 1)):
        code, said = heed_main(*command, "--fail-if", f"b worse than a in {measure} by .02")
        assert (code, f"in {measure} (" in " ".join(said.split())) == (expected, True), said
    code, said = heed_main(*command, "--fail-if", "b worse than a in bleu")
    assert (code, "gsm8k has no measure 'bleu'; one of exact_match,strict-match, " in " ".join(said.split())) == (
        2,
        True,
    )


def test_the_whole_text_of_an_answer_is_kept(heed_main: Call, tmp_path: Path) -> None:
    specs = [str(harness_log(tmp_path / "harness", [1, 0])), str(openai_log(tmp_path / "evals.jsonl", [[True]]))]
    for spec, text in zip(specs, ("It is 1, says harness.", "I am evals."), strict=True):
        code, said = heed_main("evaluate", f"a={spec}", "--out", str(tmp_path / f"out-{text[:2]}"))
        assert code == 0, said
        assert text in (tmp_path / f"out-{text[:2]}" / "report.html").read_text()


def test_what_is_no_log_is_refused(heed_main: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    for spec, expected in ((tmp_path / "empty", "no log; without --suite"), (tmp_path / "rows.jsonl", "no event")):
        code, said = heed_main("evaluate", str(spec))
        assert (code, expected in said.replace("\n", " ")) == (2, True), said
    harness_log(tmp_path / "a", [1, 0])
    code, said = heed_main("evaluate", f"a={tmp_path / 'a'}", "--data", "x.jsonl")
    assert (code, "logs have their items" in said.replace("\n", " ")) == (2, True), said
    openai_log(tmp_path / "b.jsonl", [[True], [False]])
    code, said = heed_main("evaluate", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b.jsonl'}")
    assert (code, "a has gsm8k; b has sums.dev.v0" in said.replace("\n", " ")) == (2, True), said


def test_repeated_samples_are_one_observation_per_item_and_give_pass_at_k(heed_main: Call, tmp_path: Path) -> None:
    right = {"a": [[True, False, False, True]] * 5 + [[False] * 4] * 5, "b": [[True] * 4] * 10}
    specs = [f"{name}={openai_log(tmp_path / f'{name}.jsonl', samples)}" for name, samples in right.items()]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    assert code == 0, said
    values = {(row["model"], row["measure"]): row for row in statistics_in(tmp_path / "out")["values"]}
    assert values["a", "correct"]["value"]["mean"] == pytest.approx(0.25)
    assert values["a", "correct"]["num_items"] == 10
    assert values["a", "correct_pass@2"]["value"]["mean"] == pytest.approx(
        (1 - 1 / 6) / 2
    )  # 1 of 6 pairs has no right one
    assert values["a", "correct_pass@4"]["value"]["mean"] == pytest.approx(0.5)
    assert values["a", "correct_pass@4"]["value"]["high"] < 0.9


def test_a_match_and_its_metrics_are_one_sample_and_what_is_no_number_fails(tmp_path: Path) -> None:
    """OpenAI's FuzzyMatch writes both events of a sample."""
    log, rows = openai_log(tmp_path / "a.jsonl", [[True, False]]), list[dict[str, Any]]()
    for row in map(json.loads, log.read_text().splitlines()):
        rows.append(row)
        if row.get("type") == "match":
            rows.append({**row, "type": "metrics", "data": {"f1_score": 0.5, "accuracy": None}})
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ((samples,),) = [suite.values() for suite in _events(log).values()]
    assert [sample.values for sample in samples] == [{"correct": 1, "f1_score": 0.5}, {"correct": 0, "f1_score": 0.5}]
    unscored = _inspect_sample("line 1", {"scores": {"match": {"value": math.nan}}})
    assert (unscored.values, list(unscored.failures)) == ({}, ["match"])


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for num in range(1, 7):
        for num_right in range(num + 1):
            samples = [True] * num_right + [False] * (num - num_right)
            for k in range(1, num + 1):
                subsets = list(combinations(samples, k))
                assert pass_at(k, num, num_right) == pytest.approx(math.fsum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at(3, 2, 1)


def test_logs_of_inspect_as_json_with_epochs(heed_main: Call, tmp_path: Path) -> None:
    log = json.loads((LOGS / "inspect_b.json").read_text())
    worse = {"C": "I", "I": "I"}
    for sample in log["samples"]:
        sample["scores"]["match"]["value"] = worse[sample["scores"]["match"]["value"]]
    log["samples"][0] |= {"scores": {}, "error": {"message": "the sandbox died"}}
    (tmp_path / "c.json").write_text(json.dumps(log))
    specs = [f"b={LOGS / 'inspect_b.json'}", f"c={tmp_path / 'c.json'}"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    assert code == 0, said
    found = statistics_in(tmp_path / "out")
    values = {(row["model"], row["measure"]): row for row in found["values"]}
    assert values["b", "match"]["value"]["mean"] == 0.5  # one of the two epochs of each item
    assert values["b", "match_pass@2"]["value"]["mean"] == 1
    assert (values["c", "match"]["num_items"], values["c", "match"]["num_failed"]) == (3, 1)
    assert "the sandbox died" in found["failures"][0]["reason"]


@pytest.mark.parametrize(("field", "value"), [("scores", [1]), ("output", "x")])
def test_malformed_samples_of_inspect_are_refused_by_field(
    heed_main: Call, tmp_path: Path, field: str, value: Any
) -> None:
    log = json.loads((LOGS / "inspect_b.json").read_text())
    log["samples"][1][field] = value
    (tmp_path / "c.json").write_text(json.dumps(log))
    code, said = heed_main("evaluate", f"c={tmp_path / 'c.json'}", "--out", str(tmp_path / "out"))
    assert (code, f"c.json: sample 2: field '{field}'" in said.replace("\n", "")) == (2, True), said


def test_logs_of_inspect_in_its_own_format(heed_main: Call, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: pip install '.[inspect]'")
    shutil.copy(LOGS / "inspect_a.eval", tmp_path)
    specs = [f"a={tmp_path / 'inspect_a.eval'}", f"b={LOGS / 'inspect_b.json'}"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"))
    assert code == 0, said
    assert statistics_in(tmp_path / "out")["differences"][0]["num_items"] == 4


@pytest.mark.parametrize(
    ("a", "b", "gate", "expected"),
    [
        ([1] * 30, [0] * 30, "b worse than a", 1),
        ([1] * 30, [0] * 30, "a worse than b", 0),
        ([1] * 30, [0] * 30, "b worse than a by 2", 2),  # points are hundredths
        ([1, 0] * 15, [0, 1] * 15, "b worse than a by .02", 2),
        ([1, 0] * 15, [0, 1] * 15, "b worse than a by .9", 0),
        ([1], [0], "b worse than a", 2),
        ([1] * 30, [1] * 25 + [0] * 5, "a worse than b", 2),  # p is 2/32, so the interval is stretched to end at 0
    ],
)
def test_the_exit_code_says_whether_a_model_got_worse(
    heed_main: Call, tmp_path: Path, a: list[int], b: list[int], gate: str, expected: int
) -> None:
    specs = [
        f"{name}={openai_log(tmp_path / f'{name}.jsonl', [[bool(value)] for value in right])}"
        for name, right in (("a", a), ("b", b))
    ]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"), "--fail-if", gate)
    assert code == expected, said
    assert " worse than " in said


def test_a_task_that_one_log_lacks_is_named_and_is_no_success(heed_main: Call, tmp_path: Path) -> None:
    for name in ("a", "b"):
        harness_log(tmp_path / name, [1, 0] * 20)
    harness_log(tmp_path / "a", [1] * 40, task="other")
    command = ["evaluate", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--out"]
    code, said = heed_main(*command, str(tmp_path / "out"))
    assert (code, "left out: other, which b lacks" in said) == (0, True), said
    code, said = heed_main(*command, str(tmp_path / "gated"), "--fail-if", "b worse than a by .5")
    assert (code, "differ in their tasks: other, which b lacks" in said.replace("\n", " ")) == (2, True), said


def test_other_prompts_for_the_same_documents_are_told(heed_main: Call, tmp_path: Path) -> None:
    folders = [harness_log(tmp_path / name, [1, 0] * 20) for name in ("a", "b")]
    (log,) = folders[1].glob("samples_*.jsonl")
    log.write_text(log.read_text(encoding="utf-8").replace('"arg_0": "', '"arg_0": "Example: 1. '), encoding="utf-8")
    code, said = heed_main("evaluate", *(f"{f.name}={f}" for f in folders), "--out", str(tmp_path / "out"))
    assert code == 0, said
    assert "the prompts of 40 of 40 items differ" in said.replace("\n", " ")
    code, said = heed_main("evaluate", f"a={log}", f"b={folders[0]}")
    assert (code, "its folder was expected" in said.replace("\n", " ")) == (2, True), said


def test_an_interval_without_width_decides_nothing(heed_main: Call, tmp_path: Path) -> None:
    specs = [f"{name}={harness_log(tmp_path / name, [3] * 30)}" for name in "ab"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"), "--fail-if", "b worse than a")
    assert statistics_in(tmp_path / "out")["differences"][0]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert (code, "undecided whether b is worse than a" in said.replace("\n", " ")) == (2, True), said


def test_the_same_answers_are_not_worse(heed_main: Call, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    specs = [f"{name}={openai_log(tmp_path / name / 'log.jsonl', [[True], [False]] * 10)}" for name in "ab"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"), "--fail-if", "b worse than a")
    assert (code, "b is not worse than a: they gave the same answers." in said.replace("\n", " ")) == (0, True), said


@pytest.mark.parametrize("error", [OSError("the disk is full"), RuntimeError("the endpoint failed")])
def test_an_evaluation_that_fails_decides_nothing(
    heed_main: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_given: object) -> None:
        raise error

    monkeypatch.setattr("evaluation.evaluate.evaluating.evaluate", fail)
    specs = [f"{name}={openai_log(tmp_path / f'{name}.jsonl', [[True]])}" for name in "ab"]
    code, said = heed_main("evaluate", *specs, "--out", str(tmp_path / "out"), "--fail-if", "b worse than a")
    assert (code, f"undecided, since the evaluation failed: {error}" in said.replace("\n", " ")) == (2, True), said


def test_a_gate_that_names_nothing_is_refused_before_anything_is_read(heed_main: Call) -> None:
    for gate, expected in (
        ("c worse than a", "no model is called 'c'"),
        ("b better than a", "was expected"),
        ("a worse than a", "two different models were expected"),
        ("b worse than a in bleu", "gsm8k has no measure 'bleu'; one of "),
        ("b worse than a by 2", "of gsm8k is a share, from 0 to 1; .02, which is 2 points, was expected"),
    ):
        code, said = heed_main("evaluate", "a=x", "b=y", "--suite", "gsm8k", "--fail-if", gate)
        assert (code, expected in said.replace("\n", " ")) == (2, True), said


def test_a_task_of_the_harness_without_its_package_says_what_to_install(
    heed_main: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.evaluate.evaluating.find_spec", lambda _name: None)
    code, said = heed_main("evaluate", "model", "--suite", "harness:gsm8k")
    assert code == 2
    assert "--suite harness:gsm8k: lm_eval is not installed; run pip install '.[harness]'" in " ".join(said.split())
