"""Policies: models sampled here, models behind an endpoint, saved outputs."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.policies import LocalPolicy, RemotePolicy, Sampling, SavedPolicy
from evaluation.verdicts import Response, write_rows
from files import retries
from lm.tokenizer import Tokenizer
from reward.endpoint import Asker, Endpoint
from training.data import Prompt

SAMPLING = Sampling(num_samples=2, temperature=1.0, max_new_tokens=6, seed=3, precision="fp32")
PROMPTS = [
    Prompt(prompt_id=f"p{n}", messages=({"role": "user", "content": f"The fox {n}?"},), kind="") for n in range(3)
]


def ignore(_done: int, _total: int) -> None:
    """Ignores progress."""


def test_a_model_is_sampled_with_seeds_of_its_name(model_folder: Path) -> None:
    policy = LocalPolicy.open("a", str(model_folder), PROMPTS, SAMPLING)
    found = policy.respond(ignore)
    assert [(row.policy, row.prompt_id, row.index) for row in found] == [
        ("a", f"p{n}", index) for n in range(3) for index in range(2)
    ]
    texts = [row.text for row in found]
    assert texts == [row.text for row in LocalPolicy.open("a", str(model_folder), PROMPTS, SAMPLING).respond(ignore)]
    assert texts != [row.text for row in LocalPolicy.open("b", str(model_folder), PROMPTS, SAMPLING).respond(ignore)]
    described = policy.describe()
    assert (described["kind"], len(described["sha256"]), described["sampling"]["seed"]) == ("model", 64, 3)


def test_kl_is_measured_to_a_reference_of_the_same_tokens(
    model_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    measured = Sampling(1, 1.0, 4, 0, "fp32", reference=str(model_folder))
    assert [row.log_ratio for row in LocalPolicy.open("a", str(model_folder), PROMPTS, measured).respond(ignore)] == [
        0.0
    ] * 3
    other = shutil.copytree(model_folder, tmp_path / "other")
    tokenizer.with_template("{{ messages[-1]['content'] }}").save(other)
    policy = LocalPolicy.open("a", str(other), PROMPTS, measured)
    assert (policy.reference, policy.describe()["reference_sha256"]) == ("", "")


def test_what_cannot_be_sampled_is_refused_first(model_folder: Path, encoder_folder: Path, tmp_path: Path) -> None:
    def refuse(folder: Path, words: str, prompts: list[Prompt] = PROMPTS) -> None:
        with pytest.raises(ValueError, match=words):
            LocalPolicy.open("a", str(folder), prompts, SAMPLING)

    long = Prompt(prompt_id="p0", messages=({"role": "user", "content": "The fox? " * 60},), kind="")
    refuse(model_folder, r"policy 'a': prompt 'p0' has \d+ tokens, which leave no room for a response", [long])
    refuse(encoder_folder, "architectures")
    refuse(tmp_path / "none", "no such folder")
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    refuse(broken, "model.safetensors: no such file")
    with pytest.raises(ValueError, match="num_samples is 0"):
        Sampling(0, 1.0, 1, 0, "fp32")


def remote(chat_server: Any, tmp_path: Path, model: str, name: str = "r") -> RemotePolicy:
    endpoint = Endpoint.of(f"{chat_server.url}#{model}", name, timeout_seconds=5, max_wait_seconds=0)
    return RemotePolicy(name, PROMPTS, SAMPLING, Asker(endpoint, tmp_path / "answers.sqlite", 2, 0.5))


def test_an_endpoint_is_asked_with_a_seed_a_sample(chat_server: Any, tmp_path: Path) -> None:
    policy = remote(chat_server, tmp_path, "writer")
    found = policy.respond(ignore)
    assert [(row.prompt_id, row.index) for row in found] == [(f"p{n}", index) for n in range(3) for index in range(2)]
    assert len({body["seed"] for body in chat_server.bodies}) == 6
    assert all(row.text.startswith("The fox number") and row.finished and row.num_tokens == 4 for row in found)
    assert {body["temperature"] for body in chat_server.bodies} == {1.0}
    assert [row.text for row in policy.respond(ignore)] == [row.text for row in found]
    assert len(chat_server.bodies) == 6  # no request is sent the second time
    assert policy.describe()["spec"] == f"{chat_server.url}#writer"


def test_an_endpoint_has_to_answer_every_prompt(
    chat_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    chat_server.fails = lambda body: body["messages"][0]["content"] == "The fox 1?"
    with pytest.raises(ValueError, match=r"policy 'r': 2 of 6 requests failed, the first on prompt 'p1'.*503"):
        remote(chat_server, tmp_path, "writer").respond(ignore)
    chat_server.fails = lambda _: False
    chat_server.bodies.clear()
    assert len(remote(chat_server, tmp_path, "writer").respond(ignore)) == 6
    assert len(chat_server.bodies) == 2


Open = Callable[..., SavedPolicy]


@pytest.fixture
def saved(tmp_path: Path) -> Open:
    """Opens a policy with these rows."""

    def open_policy(rows: Sequence[dict[str, Any]], writer: str = "", *, allow_empty: bool = False) -> SavedPolicy:
        path = tmp_path / "outputs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SavedPolicy.open("s", f"{path}{writer}", PROMPTS, allow_empty=allow_empty)

    return open_policy


def answer(n: int, **more: Any) -> dict[str, Any]:
    return {"prompt_id": f"p{n}", "response": f"answer {n}", **more}


def test_saved_outputs_by_id_and_by_text(saved: Open) -> None:
    policy = saved(
        [
            {"instruction": "The fox 2?", "output": "two", "generator": "g", "dataset": "d"},
            {"prompt": "The fox 0? ", "response": "nought", "generator": "g", "num_tokens": 3, "finished": True},
            {"messages": [{"role": "user", "content": "Another?"}], "response": "x", "generator": "g"},
            answer(1, prompt="The fox 1?", generator="g"),
        ]
    )
    found = policy.respond(ignore)
    assert [(row.prompt_id, row.text) for row in found] == [("p0", "nought"), ("p1", "answer 1"), ("p2", "two")]
    assert (found[0].num_tokens, found[0].finished, found[1].finished) == (3, True, None)
    assert found[2].where.endswith("outputs.jsonl: line 1")
    assert policy.describe()["num_unused"] == 1


def test_several_samples_and_several_writers(saved: Open) -> None:
    rows = [answer(n, index=index, policy=name) for name in "xy" for index in (1, 0) for n in range(3)]
    found = saved(rows, "#y").respond(ignore)
    assert [(row.prompt_id, row.index) for row in found] == [(f"p{n}", i) for n in range(3) for i in range(2)]
    assert found[0].where.endswith("line 10")


def test_the_responses_of_a_comparison_are_outputs_too(tmp_path: Path) -> None:
    rows = [Response("old", f"p{n}", 0, f"text {n}", 2, False, -0.5) for n in range(3)]
    write_rows(tmp_path / "responses.parquet", rows)
    found = SavedPolicy.open("s", str(tmp_path / "responses.parquet"), PROMPTS, allow_empty=False).respond(ignore)
    assert [(row.text, row.num_tokens, row.finished, row.log_ratio) for row in found] == [
        (f"text {n}", 2, False, -0.5) for n in range(3)
    ]


def test_an_empty_response_is_taken_where_that_is_said(saved: Open) -> None:
    rows = [answer(0), answer(1), {"prompt_id": "p2", "output": ""}]
    assert saved(rows, allow_empty=True).respond(ignore)[2].text == ""
    with pytest.raises(ValueError, match=r"line 3: field 'output' is empty"):
        saved(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [answer(0), answer(0)],
            r"line 2: prompt 'p0' is already answered in .*line 1; number several responses with the field 'index'",
        ),
        ([answer(0), answer(2)], r"has no response to 1 of 3 prompts: 'p1'; 0 other rows are unused"),
        ([{"response": "x"}], r"line 1: the row names no prompt; one of prompt_id, messages"),
        ([answer(0, prompt="The fox 1?")], "line 1: prompt_id 'p0' belongs to a prompt other"),
        ([answer(0, index=-1)], "line 1: field 'index' is -1"),
        ([answer(0, finished="yes")], "line 1: field 'finished' is 'yes'; true or false"),
        ([{"prompt_id": "p0"}], "line 1: field 'response' is missing"),
        ([{"prompt_id": "p0", "output": ["x"]}], "line 1: field 'output' is list"),
        ([answer(0, generator="g"), answer(1, generator="h")], r"line 2: the file has rows by 'g' and 'h'"),
    ],
)
def test_bad_outputs_are_named_by_line(saved: Open, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        saved(rows)


def test_a_writer_or_a_file_that_is_not_there(saved: Open, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no row's policy or generator is 'z'; found \['y'\]"):
        saved([answer(n, policy="y") for n in range(3)], "#z")
    with pytest.raises(ValueError, match=r"policy 's': .*none.jsonl: no such file"):
        SavedPolicy.open("s", str(tmp_path / "none.jsonl"), PROMPTS, allow_empty=False)
