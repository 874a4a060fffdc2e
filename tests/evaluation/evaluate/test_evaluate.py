"""`heed evaluate`: real models, saved answers, an endpoint, judges and baselines through the real command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.evaluate import models as evaluated_models
from evaluation.evaluate.evaluating import open_suite, suite_names
from files.parquet import read_parquet
from lm.config import ModelConfig
from lm.model import LanguageModel, init_weights
from lm.sequence_logprobs import sequence_logprobs
from lm.source import load_for_inference
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder, save_model

Call = Callable[..., tuple[int, str]]
Arguments = Callable[..., list[str]]


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for _, row in read_parquet(folder / name)]


def values_of(folder: Path, measure: str) -> dict[tuple[str, str], float | str]:
    rows = [row for row in rows_of(folder, "values.parquet") if row["measure"] == measure]
    return {(row["model"], row["item_id"]): row["failure"] or row["value"] for row in rows}


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def value_in(report: dict[str, Any], model: str, measure: str, group: str = "") -> dict[str, Any]:
    (found,) = [
        row
        for row in report["suites"][0]["statistics"]["values"]
        if (row["model"], row["measure"], row["group"]) == (model, measure, group)
    ]
    return found


def test_two_models_are_evaluated_and_never_asked_twice(
    heed_main: Call, evaluate: Arguments, place: Path, monkeypatch: pytest.MonkeyPatch, read_page: Any
) -> None:
    both = [f"{name}={place / 'models' / name / 'model'}" for name in ("one", "two")]
    code, said = heed_main(*evaluate(place, *both))
    assert code == 0, said
    folder = place / "out"
    lengths = values_of(folder, "length")
    answers = {(row["model"], row["item_id"]): row["answer"] for row in rows_of(folder, "answers.parquet")}
    assert lengths == {key: float(len(text)) for key, text in answers.items()}
    assert len(lengths) == 12
    report = report_of(folder)
    for name in ("one", "two"):
        own = [len(text) for (model, _), text in answers.items() if model == name]
        assert value_in(report, name, "length")["value"]["mean"] == pytest.approx(sum(own) / 6)
        assert value_in(report, name, "length")["num_clusters"] == 3
        assert value_in(report, name, "longest")["value"]["mean"] == max(own)
        groups = [value_in(report, name, "length", group) for group in "ab"]
        assert [group["num_items"] for group in groups] == [3, 3]
    (difference,) = [row for row in report["suites"][0]["statistics"]["differences"] if row["measure"] == "length"]
    means = [value_in(report, name, "length")["value"]["mean"] for name in ("one", "two")]
    assert difference["difference"]["mean"] == pytest.approx(means[0] - means[1])
    # A second suite, or the same one in another folder, generates nothing: every answer is in the cache.
    monkeypatch.setattr(evaluated_models, "generate", None)
    assert heed_main(*evaluate(place, *both, out="again"))[0] == 0
    assert rows_of(place / "again", "values.parquet") == rows_of(folder, "values.parquet")
    # The page is a function of the folder.
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert heed_main("report", str(folder))[0] == 0
    assert (folder / "report.html").read_text() == page
    outline = read_page(page)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.references) - {""} <= set(outline.ids)
    assert "two sets of weights" in page


def test_samples_of_an_item_differ_and_count_once(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    model = f"one={place / 'models' / 'one' / 'model'}"
    code, said = heed_main(*evaluate(place, model), "--samples", "3")
    assert code == 0, said
    answers = [row["answer"].split("\n\n----\n\n") for row in rows_of(place / "out", "answers.parquet")]
    assert [len(samples) for samples in answers] == [3] * 6
    assert all(len(set(samples)) > 1 for samples in answers)  # the suite's first turn is greedy otherwise
    lengths = values_of(place / "out", "length")
    assert sorted(lengths.values()) == pytest.approx(sorted(sum(map(len, samples)) / 3 for samples in answers))
    found = value_in(report_of(place / "out"), "one", "even_pass@2")
    counts = [sum(len(text) % 2 == 0 for text in samples) for samples in answers]
    assert found["value"]["mean"] == pytest.approx(sum((0, 2 / 3, 1, 1)[count] for count in counts) / 6)
    assert (found["num_items"], found["num_clusters"]) == (6, 3)
    code, said = heed_main(*evaluate(place, model, suite="LIKELY", out="no"), "--samples", "3")
    assert (code, "samples no answers" in said) == (2, True), said


def test_what_is_better_is_said_in_words_and_follows_the_direction(
    heed_main: Call, evaluate: Arguments, place: Path
) -> None:
    for name, length, apart in (("long", 9, 2), ("short", 2, 0)):
        saved = [{"item_id": f"q{n}", "turns": ["x" * (length + apart * (-1) ** n), "y" * (n % 2)]} for n in range(6)]
        (place / f"{name}.json").write_text(json.dumps(saved))
    items = [json.loads(line) | {"cluster": ""} for line in (place / "items.jsonl").read_text().splitlines()]
    (place / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    code, said = heed_main(*evaluate(place, str(place / "long.json"), str(place / "short.json")))
    assert code == 0, said
    # Of the 2^6 sign vectors of the six lengths, 2 are as extreme.
    rows = report_of(place / "out")["suites"][0]["statistics"]["differences"]
    found = {row["measure"]: (row["difference"]["mean"], row["p"], row["conclusion"]["kind"]) for row in rows}
    assert found["even"] == (0.0, 1.0, "undecided")
    assert found["length"] == (7.0, pytest.approx(2 / 2**6), "worse")
    assert "foxes: no difference in even is shown between " in said
    assert "short is better" in (place / "out" / "report.html").read_text()


def test_an_interrupted_evaluation_continues(
    heed_main: Call, evaluate: Arguments, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"one={place / 'models' / 'one' / 'model'}"
    assert heed_main(*evaluate(place, model, out="whole"), "--cache", str(place / "whole.sqlite"))[0] == 0
    monkeypatch.setattr(evaluated_models, "CHUNK", 2)
    generate, calls = evaluated_models.generate, list[int]()

    def interrupted(network: Any, prompts: Any, **how: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise ValueError("the power went out")
        return generate(network, prompts, **how)

    monkeypatch.setattr(evaluated_models, "generate", interrupted)
    code, said = heed_main(*evaluate(place, model))
    assert (code, "the power went out" in said) == (2, True)
    assert not (place / "out").exists()
    code, said = heed_main(*evaluate(place, model))
    assert code == 0, said
    assert calls == [2, 2, 2, 2, 2, 2, 2]  # two stored, one lost; then that one, and the three of the second turn
    assert not (place / "out.sampling").exists()
    assert values_of(place / "out", "length") == values_of(place / "whole", "length")


def test_saved_answers_are_found_by_id_and_by_text(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    saved = [
        {"item_id": "q0", "turns": ["ab", "c"]},  # "ab c"
        {"prompt": "The fox x?", "turns": ["abc", "c"]},
        {"question_id": "q2", "choices": [{"turns": [{"content": "a"}, {"content": "b"}]}]},
        {"item_id": "q3", "output": "only the first turn"},
        {"item_id": "other", "output": "unused"},
    ]
    (place / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    code, said = heed_main(*evaluate(place, f"old={place / 'saved.jsonl'}"), "--max-failed-share", "0.5")
    assert code == 0, said
    lengths = values_of(place / "out", "length")
    assert {item: lengths["old", item] for item in ("q0", "q1", "q2")} == {"q0": 4.0, "q1": 5.0, "q2": 3.0}
    assert lengths["old", "q3"] == "the file has no answer to item 'q3', turn 2"
    assert lengths["old", "q4"] == "the file has no answer to item 'q4'"
    # Failures are counted, and never taken for 0.
    value = value_in(report_of(place / "out"), "old", "length")
    assert (value["value"]["mean"], value["num_items"], value["num_failed"]) == (4.0, 3, 3)
    (missing, second) = report_of(place / "out")["suites"][0]["statistics"]["failures"]
    assert (missing["num_items"], second["num_items"]) == (2, 1)
    # An evaluation's own answers can be evaluated again.
    rows = place / "out" / "answers.parquet"
    code, said = heed_main(*evaluate(place, f"same={rows}#old", out="more"))
    assert values_of(place / "more", "length")["same", "q0"] == "the file has no answer to item 'q0', turn 2"


def test_an_endpoint_is_asked_once_and_within_the_budget(
    heed_main: Call, evaluate: Arguments, place: Path, chat_server: Any
) -> None:
    arguments = evaluate(place, f"api={chat_server.url}#writer")
    code, said = heed_main(*arguments, "--budget", "4")
    assert (code, len(chat_server.bodies)) == (2, 4)
    assert "--budget 4 requests is used up: 2 of 6 requests to writer have not been sent" in said
    assert not (place / "out").exists()
    code, said = heed_main(*arguments, "--budget", "8")
    assert (code, len(chat_server.bodies)) == (0, 12), said
    first, second = chat_server.bodies[0], chat_server.bodies[-1]
    assert (first["temperature"], first["max_tokens"], "seed" in first) == (0.0, 6, False)
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
    assert isinstance(second["seed"], int)
    # Judged later, without a further request to the model.
    terse = f"{chat_server.url}#terse"
    code, said = heed_main(*arguments, "--judge", terse, "--baseline", terse)
    assert code == 0, said
    assert [body["model"] for body in chat_server.bodies[12:]] == ["terse"] * 12  # the judge's and the baseline's
    assert values_of(place / "out", "judged") == {("api", f"q{n}"): 3.0 for n in range(6)}
    assert values_of(place / "out", "beats") == {("api", f"q{n}"): 1.0 for n in range(6)}


def test_log_probabilities_of_continuations(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    folder = place / "models" / "one" / "model"
    assert heed_main(*evaluate(place, f"one={folder}", suite="LIKELY"))[0] == 0
    model, tokenizer = load_for_inference(ModelFolder(folder, LanguageModel)), Tokenizer.load(folder)
    asked = tokenizer.encode_prompt([{"role": "user", "content": "The fox xxx?"}])
    (expected,) = sequence_logprobs(model, [asked], [tokenizer.encode_plain([" yes"])[0]], 1.0)
    assert values_of(place / "out", "logprob")["one", "q3"] == pytest.approx(expected, abs=1e-5)


def test_reward_models_are_evaluated_on_rewards(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    both = [f"net={place / 'models' / 'reward'}", f"length={place / 'scorers.py'}:length"]
    code, said = heed_main(*evaluate(place, *both, suite="PREFERRED"))
    assert code == 0, said
    rewards = values_of(place / "out", "reward")
    assert [rewards["length", f"q{n}"] for n in range(6)] == [6.0 * (n + 1) for n in range(6)]
    assert len({rewards["net", f"q{n}"] for n in range(5)}) == 5
    # What a reward model cannot read has failed.
    assert (
        sum(isinstance(value, str) for value in rewards.values())
        == value_in(report_of(place / "out"), "net", "reward")["num_failed"]
    )


def test_two_suites_and_a_judge_in_this_process(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    items = place / "items.jsonl"
    one, two = (str(place / "models" / name / "model") for name in ("one", "two"))
    more = ["--suite", f"{place / 'suite.py'}:LIKELY", "--data", f"likely={items}", "--judge", f"strict={two}"]
    arguments = evaluate(place, one, two, *more)
    code, said = heed_main(*arguments)
    assert (code, "--data" in said, "SUITE=PATH was expected" in said) == (2, True, True)
    arguments[arguments.index(str(items))] = f"foxes={items}"
    code, said = heed_main(*arguments)
    assert code == 0, said
    report = report_of(place / "out")
    assert [suite["suite"] for suite in report["suites"]] == ["likely", "foxes"]
    assert {row["suite"] for row in rows_of(place / "out", "values.parquet")} == {"likely", "foxes"}
    judged = values_of(place / "out", "judged")
    assert {judged["one", f"q{n}"] == judged["two", f"q{n}"] for n in range(6)} == {True}  # it reads the question only


def test_a_base_model_continues_gsm8k_as_plain_text(
    heed_main: Call, tmp_path: Path, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    rows = [
        {"question": f"What is {n} and 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
        for n in range(9)
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = Tokenizer(tokenizer.vocabulary, end=tokenizer.end, pad=tokenizer.pad, chat_template="")
    model = LanguageModel(tiny_config.model_copy(update={"max_position_embeddings": 1_024}))
    init_weights(model, seed=0)
    save_model(tmp_path / "base", model, model.state_dict(), base)
    given = ["--suite", "gsm8k", "--data", str(tmp_path), "--max-new-tokens", "8", "--out", str(tmp_path / "out")]
    code, said = heed_main("evaluate", str(tmp_path / "base"), *given)
    assert code == 0, said
    assert set(values_of(tmp_path / "out", "accuracy")) == {("base", str(n)) for n in range(9)}
    assert not any(isinstance(value, str) for value in values_of(tmp_path / "out", "accuracy").values())


def test_more_items_than_wanted_are_thinned_evenly(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    model = str(place / "models" / "one" / "model")
    assert heed_main(*evaluate(place, model, "--max-items", "3", "--max-new-tokens", "2"))[0] == 0
    assert {item for _, item in values_of(place / "out", "length")} == {"q0", "q2", "q4"}


def test_a_short_context_reduces_the_limit_and_says_so(
    heed_main: Call, evaluate: Arguments, place: Path, tiny_config: ModelConfig
) -> None:
    rows = [{"id": f"q{n}", "question": "fox " * n, "group": "", "cluster": ""} for n in (5, 40, 200)]
    (place / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(place / "models" / "one" / "model")
    code, said = heed_main(*evaluate(place, model, "--max-new-tokens", "60"))
    assert code == 0, said
    assert f"had less room in the context of {tiny_config.max_position_embeddings} tokens" in said
    lengths = values_of(place / "out", "length")
    assert isinstance(lengths["one", "q5"], float)
    assert "tokens, which leave no room in the context of 96" in str(lengths["one", "q200"])


def test_a_model_without_a_chat_template_is_refused_in_a_line(
    heed_main: Call, evaluate: Arguments, place: Path, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    base = Tokenizer(tokenizer.vocabulary, end=tokenizer.end, pad=tokenizer.pad, chat_template="")
    model = LanguageModel(tiny_config)
    init_weights(model, seed=0)
    save_model(place / "base", model, model.state_dict(), base)
    code, said = heed_main(*evaluate(place, str(place / "base")))
    refusal = "model 'base' is a language model without a chat template; suite 'foxes' needs answers to conversations"
    assert (code, refusal in said) == (2, True), said


@pytest.mark.parametrize(
    ("given", "suite", "expected"),
    [
        ([], "SUITE", "no model was given"),
        (["{place}/models/none"], "SUITE", "no such folder"),
        (["{place}/models/one"], "SUITE", "is the folder of a stage; its model is"),
        (["x={place}/models/one/model"] * 2, "SUITE", "is given twice; different runs were expected"),
        (["{place}/none.jsonl"], "SUITE", "none.jsonl: no such file"),
        (["{place}/items.jsonl"], "SUITE", "field 'response' is missing"),
        (["{place}/turns.jsonl"], "SUITE", "turns.jsonl: line 1: field 'turns' is"),
        (["{place}/twice.jsonl"], "SUITE", "twice.jsonl: line 2: item 'q0' is already answered in"),
        (["{place}/both.jsonl"], "SUITE", "choose one with both="),
        (["{place}/models/one/model"], "PREFERRED", "is a language model; suite 'preferred' needs rewards"),
        (["{place}/other.jsonl"], "LIKELY", "is a file of answers; suite 'likely' needs log-probabilities"),
        (["{place}/models/one/model"], "NEEDY", "suite 'needy' needs --judge SPEC"),
        (["{place}/models/one/model"], "SCORED", "needs or uses ['grader']; some of ['baseline', "),
        (["{place}/models/one/model"], "EMPTY", "holds no `evaluation.suites.suite.Suite` EMPTY"),
        (["{place}/models/one/model", "--judge", "{place}/other.jsonl"], "SUITE", "answers; a language model, or a"),
        (["{place}/models/one/model", "--baseline", "{place}/models/reward"], "SUITE", "is a reward model; a language"),
        (["{place}/models/one/model", "--training-data", "none.txt"], "SUITE", "[MODEL=]FILE was expected"),
        (["{place}/models/one/model", "--suite", "gsm9k"], "SUITE", "one of"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    heed_main: Call, evaluate: Arguments, place: Path, given: list[str], suite: str, expected: str
) -> None:
    (place / "other.jsonl").write_text('{"item_id": "zzz", "output": "a"}\n')
    (place / "turns.jsonl").write_text('{"item_id": "q0", "turns": "a"}\n')
    (place / "twice.jsonl").write_text('{"item_id": "q0", "output": "a"}\n' * 2)
    (place / "both.jsonl").write_text("".join(f'{{"item_id": "q0", "output": "a", "model": "{m}"}}\n' for m in "ab"))
    code, said = heed_main(*evaluate(place, *(part.format(place=place) for part in given), suite=suite))
    if not given:
        assert code == 2  # typer's own message
        return
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert (code, len(lines)) == (2, 1), said
    assert expected in said.replace("\n", " ")


def test_a_folder_with_another_evaluation_is_left_alone(heed_main: Call, evaluate: Arguments, place: Path) -> None:
    one, two = (str(place / "models" / name / "model") for name in ("one", "two"))
    assert heed_main(*evaluate(place, one))[0] == 0
    before = (place / "out" / "report.json").read_bytes()
    code, said = heed_main(*evaluate(place, two))
    assert (code, "holds an evaluation whose models differ" in said) == (2, True)
    assert (place / "out" / "report.json").read_bytes() == before
    (place / "mine").mkdir()
    code, said = heed_main(*evaluate(place, one, out="mine"))
    assert (code, "exists and holds no evaluation" in said) == (2, True)


@pytest.mark.parametrize(
    ("specs", "suites", "refusal"),
    [
        (
            ["{api}", "{place}/models/reward"],
            ["SUITE"],
            "model 'reward' is a reward model; suite 'foxes' needs answers to",
        ),
        (["{api}"], ["SUITE", "LIKELY"], "model 'api' is behind an endpoint; suite 'likely' needs log-probabilities"),
        (["{api}", "{place}/other.jsonl"], ["SUITE"], "answers none of the 6 items of foxes (1 other rows)"),
        (
            ["{api}", "--judge", "{place}/base"],
            ["SUITE"],
            "has no chat template; a model that can be asked conversations",
        ),
        (["{api}", "--baseline", "{place}/base"], ["SUITE"], "is a language model without a chat template; a language"),
    ],
)
def test_what_does_not_suit_a_suite_is_refused_before_anything_is_asked(
    heed_main: Call,
    place: Path,
    chat_server: Any,
    tiny_config: ModelConfig,
    tokenizer: Tokenizer,
    specs: list[str],
    suites: list[str],
    refusal: str,
) -> None:
    (place / "other.jsonl").write_text('{"item_id": "zzz", "output": "a"}\n')
    base = Tokenizer(tokenizer.vocabulary, end=tokenizer.end, pad=tokenizer.pad, chat_template="")
    save_model(place / "base", network := LanguageModel(tiny_config), network.state_dict(), base)
    given = [part.format(place=place, api=f"api={chat_server.url}#writer") for part in specs]
    for suite in suites:
        given += ["--suite", f"{place / 'suite.py'}:{suite}"]
    for name in ("foxes", "likely")[: len(suites)]:
        given += ["--data", f"{name}={place / 'items.jsonl'}"]
    code, said = heed_main("evaluate", *given, "--out", str(place / "out"))
    assert (code, refusal in " ".join(said.split())) == (2, True), said
    assert chat_server.bodies == []


def test_the_baseline_is_asked_what_the_model_is_asked(heed_main: Call, place: Path, chat_server: Any) -> None:
    rows = [{"uid": f"u{n}", "category": "c", "prompt": f"Is {n} even?"} for n in range(2)]
    (place / "arena.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat_server.answer = lambda model, *_: "[[A=B]]" if model == "judge" else model
    given = [f"{name}={chat_server.url}#{name}" for name in ("mine", "other", "judge")]
    options = ["--suite", "arena-hard", "--data", str(place / "arena.jsonl"), "--out", str(place / "out")]
    code, said = heed_main("evaluate", given[0], "--baseline", given[1], "--judge", given[2], *options)
    assert code == 0, said
    asked = {
        name: sorted(json.dumps({**body, "model": ""}) for body in chat_server.bodies if body["model"] == name)
        for name in ("mine", "other")
    }
    assert asked["mine"] == asked["other"]
    assert {json.loads(body)["max_tokens"] for body in asked["other"]} == {4096}


def test_saved_answers_of_items_that_ask_the_same_are_told_apart_by_id(
    heed_main: Call, place: Path, chat_server: Any
) -> None:
    """Two conversations of MT-Bench with the same first question, whose four answers get four grades."""
    rows = [
        {"question_id": number, "category": "math", "turns": ["What is 2 + 3?", second]}
        for number, second in ((81, "Twice that?"), (82, "Half of that?"))
    ]
    saved = [
        {"question_id": number, "model_id": "mine", "choices": [{"index": 0, "turns": turns}]}
        for number, turns in ((81, ["two", "four"]), (82, ["six", "eight"]))
    ]
    for name, own in (("question", rows), ("mine", saved)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    grades = {"two": 2, "four": 4, "six": 6, "eight": 8}
    chat_server.answer = lambda _model, prompt, _seed: (
        f"Grade: {grades[prompt.rpartition('<answer ')[2].splitlines()[1]]}"
    )
    options = ["--suite", "mt-bench", "--data", str(place / "question.jsonl"), "--out", str(place / "out")]
    code, said = heed_main("evaluate", str(place / "mine.jsonl"), "--judge", f"{chat_server.url}#judge", *options)
    assert code == 0, said
    assert values_of(place / "out", "first_turn") == {("mine", "81"): 2.0, ("mine", "82"): 6.0}
    assert values_of(place / "out", "second_turn") == {("mine", "81"): 4.0, ("mine", "82"): 8.0}


def test_saved_answers_of_ifeval_are_found_by_key_and_by_prompt(heed_main: Call, place: Path) -> None:
    commas, json_format = "punctuation:no_comma", "detectable_format:json_format"
    rows = [
        {"key": 7, "prompt": "No commas.", "instruction_id_list": [commas, json_format], "kwargs": [{}, {}]},
        {"key": 8, "prompt": "JSON.", "instruction_id_list": [json_format, commas], "kwargs": [{}, {}]},
    ]
    saved = [{"key": 7, "response": "None"}, {"prompt": "JSON.", "response": "[1]"}]
    for name, own in (("rows", rows), ("mine", saved)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    options = ["--suite", "ifeval", "--data", str(place / "rows.jsonl"), "--out", str(place / "out")]
    code, said = heed_main("evaluate", str(place / "mine.jsonl"), *options)
    assert code == 0, said
    found = {item: value for (_, item), value in values_of(place / "out", "instruction_strict").items()}
    assert found == {"7": 1.0, "7:2": 0.0, "8": 1.0, "8:2": 1.0}


def test_every_module_of_a_suite_opens_by_its_name() -> None:
    assert "gsm8k" in suite_names()
    for name in suite_names():
        assert open_suite(name).name == name


def test_a_function_under_test_is_called_again_since_it_may_read_other_files(
    heed_main: Call, evaluate: Arguments, place: Path
) -> None:
    (place / "reading.py").write_text(
        "from pathlib import Path\n\n\ndef score(prompts, responses):\n"
        f"    return [float(Path({str(place / 'value')!r}).read_text())] * len(responses)\n"
    )
    for value, out in ((1.0, "first"), (2.0, "second")):
        (place / "value").write_text(str(value))
        arguments = evaluate(place, f"r={place / 'reading.py'}:score", suite="PREFERRED", out=out)
        assert heed_main(*arguments, "--cache", str(place / "cache.sqlite"))[0] == 0
        assert set(values_of(place / out, "reward").values()) == {value}
