"""The output of a comparison: rows of all policies and judges, identical bytes on reruns, interruptions, messages."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.comparing import results_table
from evaluation.verdicts import Verdict, read_responses
from lm.tokenizer import Tokenizer
from reward import sampling

FILES = ("compare.json", "prompts.jsonl", "responses.parquet", "verdicts.parquet")
Call = Callable[..., tuple[int, str]]
Compare = Callable[..., list[str]]
SettingsOf = Callable[[Path], dict[str, Any]]
ByJudge = Callable[[Path], dict[str, list[Verdict]]]


def test_a_model_an_endpoint_and_a_file_before_three_judges(
    place: Path, chat_server: Any, heed_main: Call, compare: Compare, settings_of: SettingsOf, by_judge: ByJudge
) -> None:
    policies = (str(place / "models/one/model"), f"{chat_server.url}#writer", str(place / "saved.jsonl"))
    judges = (str(place / "models/reward"), f"{place / 'judges.py'}:length", f"lm={chat_server.url}#longer")
    more = ("--num-samples", "2", "--reference", str(place / "models/two/model"))
    code, said = heed_main(*compare(place, *policies, judges=judges, more=more))
    assert code == 0, said
    assert str(place / "out/report.html") in said
    assert "one against saved" in said or "saved against one" in said
    folder = place / "out"
    assert [entry["name"] for entry in settings_of(folder)["policies"]] == ["one", "writer", "saved"]
    responses = read_responses(folder / "responses.parquet")
    assert [sum(row.policy == name for row in responses) for name in ("one", "writer", "saved")] == [10, 10, 5]
    assert all(row.log_ratio == row.log_ratio for row in responses if row.policy == "one")
    assert all(row.log_ratio != row.log_ratio for row in responses if row.policy != "one")
    found = by_judge(folder)
    # Per prompt (there are five): 2 x 2 pairs of the two sampled policies, and 2 x 1 of each with the saved one.
    assert {name: len(own) for name, own in found.items() if name != "lm"} == {"reward": 40, "length": 40}
    text = {(row.policy, row.prompt_id, row.index): row.text for row in responses}
    for verdict in found["length"] + found["lm"]:
        a = len(text[verdict.policy_a, verdict.prompt_id, verdict.index_a])
        b = len(text[verdict.policy_b, verdict.prompt_id, verdict.index_b])
        assert verdict.preference_a == (0.5 if a == b else float(a > b))
        assert (verdict.length_a, verdict.length_b) == (a, b)
    assert {v.category for v in found["lm"]} == {"a", "b"}
    assert [entry["num_failed"] for entry in settings_of(folder)["judges"]] == [0, 0, 0]
    measures = json.loads((folder / "measures.json").read_text())["policies"]
    assert measures["one"]["kl_nats"]["mean"] == pytest.approx(
        sum(row.log_ratio for row in responses if row.policy == "one") / 10
    )
    assert (measures["saved"]["kl_nats"]["mean"], measures["saved"]["diversity"]["num_responses"]) == (None, 5)
    assert sorted(path.name for path in place.glob("out*")) == ["out"]


def test_the_same_command_gives_the_same_bytes(
    place: Path, chat_server: Any, heed_main: Call, compare: Compare
) -> None:
    policies = (str(place / "models/one/model"), f"{chat_server.url}#writer")
    judges = (f"{place / 'judges.py'}:length", f"{chat_server.url}#first")
    for out in ("first/run", "second/run"):
        assert heed_main(*compare(place, *policies, judges=judges, out=out))[0] == 0
    for name in (*FILES, "measures.json", "report.json", "report.html"):
        assert (place / "first/run" / name).read_bytes() == (place / "second/run" / name).read_bytes(), name
    num_asked = len(chat_server.bodies)
    before = (place / "first/run/verdicts.parquet").stat().st_mtime_ns
    assert heed_main(*compare(place, *policies, judges=judges, out="first/run"))[0] == 0
    assert (place / "first/run/verdicts.parquet").stat().st_mtime_ns == before
    assert len(chat_server.bodies) == num_asked
    code, said = heed_main(*compare(place, *policies, judges=judges, out="first/run", more=("--seed", "1")))
    assert code == 2
    assert re.search(
        r"first/run: holds a comparison with other settings: policies\.one\.\S*seed: 0 there, 1 now; give", said
    )


def test_an_interrupted_comparison_samples_nothing_again(
    place: Path, chat_server: Any, heed_main: Call, monkeypatch: pytest.MonkeyPatch, compare: Compare, by_judge: ByJudge
) -> None:
    policies = (str(place / "models/one/model"), str(place / "models/two/model"))
    judge = f"{chat_server.url}#longer"
    chat_server.fails = lambda _: True
    code, said = heed_main(*compare(place, *policies, judges=(judge,)))
    assert (code, "requests to longer failed" in said, (place / "out").exists()) == (2, True, False)
    chat_server.fails = lambda _: False
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "generate", None)  # a model that is sampled now would fail
        code, said = heed_main(*compare(place, *policies, judges=(judge,)))
        assert code == 0, said
    shutil.rmtree(place / "out")
    assert heed_main(*compare(place, *policies, judges=(judge,), out="whole"))[0] == 0
    assert len(by_judge(place / "whole")["longer"]) > 5


def test_external_judgments(place: Path, heed_main: Call, settings_of: SettingsOf, by_judge: ByJudge) -> None:
    rows = [
        {"instruction": f"Sing {n}", "output_1": "la", "output_2": "lala", "generator_1": "old", "generator_2": "new",
         "annotator": "gpt", "preference": 2.0 if n else None}
        for n in range(4)
    ]  # fmt: skip
    (place / "annotations.json").write_text(json.dumps(rows))
    command = ("verdicts", str(place / "annotations.json"), "--out", str(place / "out"))
    code, said = heed_main(*command)
    assert (code, "no preference: 1" in said) == (0, True)
    (warning,) = (place / "out" / "warnings.jsonl").read_text().splitlines()
    assert json.loads(warning)["kind"] == "no preference"
    settings = settings_of(place / "out")
    assert [policy["name"] for policy in settings["policies"]] == ["new", "old"]
    assert (settings["verdicts"]["format"], settings["verdicts"]["warnings"]) == ("alpacaeval", {"no preference": 1})
    assert [v.preference_a for v in by_judge(place / "out")["gpt"]] == [0.0] * 3
    assert heed_main(*command)[0] == 0  # again: the comparison already exists
    # Other judges can judge its responses too, without sampling.
    assert heed_main("judge", str(place / "out"), f"{place / 'judges.py'}:length")[0] == 0
    assert [(v.policy_a, v.preference_a) for v in by_judge(place / "out")["length"]] == [("new", 1.0)] * 3
    code, said = heed_main("judge", str(place / "out"), f"gpt={place / 'judges.py'}:length")
    assert (code, "has the name of external judgments" in said) == (2, True)


def test_messages_about_policies(place: Path, heed_main: Call, compare: Compare) -> None:
    rows = [{"prompt_id": f"p{n}", "output": "  " if n == 2 else "yes"} for n in range(9)]
    (place / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = shutil.copytree(place / "models/one/model", place / "other/model")
    Tokenizer.load(other).with_template("{{ messages[-1]['content'] }}").save(other)
    policies = (str(other), str(place / "more.jsonl"))
    more = ("--allow-empty", "--reference", str(place / "models/two/model"))
    code, said = heed_main(*compare(place, *policies, judges=(f"{place / 'judges.py'}:length",), more=more))
    assert code == 0
    assert "other: KL is not measured, because its tokenizer differs from the reference's" in said
    assert "more: 4 rows of " in said
    assert "more: 1 of 5 responses are empty" in said


def test_the_table_of_results() -> None:
    pair = {
        "policy_a": "a", "policy_b": "b", "different": True, "num_failed": 0,
        "conclusion": {"kind": "undecided", "reason": ""},
        "win_rate": {"mean": 0.25, "low": 0.1, "high": None, "num_prompts": 1200},
        "significance": {"p": 0.0041152, "holm_p": 0.0123456}, "power": {"detectable": 0.08},
        "verdicts": {"wins": 300, "ties": 0, "losses": 900},
    }  # fmt: skip
    table = results_table(
        {"summary": {"judges": [{"judge": "j", "algorithms": [], "pairs": [{**pair, "num_failed": 3}]}]}}
    )
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == [
        "j", "a against b", "25.0% (10.0% to ?)", "0.0123", "1,200", "shown; 3 verdicts failed"
    ]  # fmt: skip
    taken_back = pair | {"different": False, "significance": {"p": 0.03, "holm_p": 0.09}}
    table = results_table({"summary": {"judges": [{"judge": "j", "algorithms": [], "pairs": [taken_back]}]}})
    assert [*table.columns[2].cells] == ["25.0% (10.0% to ?, 98.3% interval)"]


def test_several_runs_of_an_algorithm_and_clusters(
    place: Path, heed_main: Call, compare: Compare, settings_of: SettingsOf
) -> None:
    """Two runs each of two algorithms: the answer is on the algorithms, and judging again keeps runs and clusters."""
    lengths = {"a0": 3, "a1": 4, "b0": 1, "b1": 2}
    for name, more in lengths.items():
        rows = [{"prompt_id": f"p{n}", "output": "x" * (10 * n + more)} for n in range(5)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = [f"{name[0]}={place / name}.jsonl" for name in lengths]
    length = f"{place / 'judges.py'}:length"
    code, said = heed_main(*compare(place, *specs, judges=(length,), more=("--cluster-by", "category")))
    assert code == 0, said
    assert "a against b, 2 and 2 runs" in said
    assert "The rest is about these weights, whatever their algorithm." in " ".join(said.split())
    settings, out = settings_of(place / "out"), place / "out"
    assert settings["algorithms"] == {"a": ["a/1", "a/2"], "b": ["b/1", "b/2"]}
    assert settings["prompts"]["cluster_by"] == "category"
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert [row["cluster"] for row in prompts] == ["a", "b", "a", "b", "a"]
    assert heed_main("judge", str(out), f"again={length}")[0] == 0
    report = json.loads((out / "report.json").read_text())
    for judge in report["summary"]["judges"]:
        (pair,) = judge["algorithms"]
        assert (pair["algorithm_a"], pair["num_runs_a"], pair["num_clusters"]) == ("a", 2, 2)
        assert pair["win_rate"]["mean"] == 1
        assert pair["score_difference"]["mean"] == 2
        assert judge["pairs"][0]["win_rate"]["num_clusters"] == 2
    said = report["answer"]["text"]
    assert said.startswith("No difference between the algorithms a and b is shown by the judge length")
    assert any(text.startswith("Only 2 clusters of prompts") for text in report["warnings"])
    page = (out / "report.html").read_text()
    assert "Algorithms, over seeds" in page
    assert "5 prompts in 2 clusters" in page


def test_one_run_of_each_is_about_weights_only(place: Path, heed_main: Call, compare: Compare) -> None:
    saved, length = str(place / "saved.jsonl"), f"{place / 'judges.py'}:length"
    (place / "other.jsonl").write_text((place / "saved.jsonl").read_text().replace("legs", "paws"))
    code, said = heed_main(*compare(place, f"a={saved}", f"b={place / 'other.jsonl'}", judges=(length,)))
    assert (code, said.count("This is about these weights only: another seed of the same algorithm")) == (0, 1)
    answer = json.loads((place / "out/report.json").read_text())["answer"]
    for sentence in (answer["text"], *answer["more"]):  # the terminal says what the page says
        assert sentence in " ".join(said.split())
    missing = compare(place, f"a={saved}", f"b={saved}", judges=(length,), out="other", more=("--cluster-by", "level"))
    code, said = heed_main(*missing)
    assert (code, "line 1: the field 'level' to cluster by is missing; found" in said) == (2, True), said
