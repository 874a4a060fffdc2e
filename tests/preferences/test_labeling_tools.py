"""Argilla and Label Studio: files that their own packages made, a project that Label Studio loads, round trips.

`samples/` has the files, and the scripts that made them with argilla 2.8.0 and label-studio 1.23.2. Tests with the
packages need a Python that has them: this one, or the one that LABEL_STUDIO_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from files.rows import read_source
from preferences.accounts import Accounts
from preferences.formats.exchange import export
from preferences.formats.merging import ImportedLabels, collect_all
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read, format_to_write, rows_of, sniff
from preferences.records import Judgment, Message, Task
from preferences.store import LabelStore

HERE = Path(__file__).parent
SAMPLES = HERE / "samples"
ANN, BO = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
BIRDS = Task(
    "birds/1", (Message("user", "Which bird?"),), ("A crow.", "A cow."), ("model-a", "model-b"), "helpful",
    details={"n": [1]},
)  # fmt: skip
TURNS = (
    Message("system", "Be brief."),
    Message("user", "Hi"),
    Message("assistant", "Yes?"),
    Message("user", "<Why> &?"),
)
TALK = Task("birds/2", TURNS, ("Because.", '山 "x"'), ("model-b", "model-a"), warning="It is rude.")
OPEN = Task("birds/3", (Message("user", "Nobody judged this."),), ("x", "y"), ("model-a", "model-b"))


def read(path: Path | str, name: str) -> ImportedLabels:
    source = rows_of(str(path))
    assert sniff(read_source(source), source)[0].name == name
    return collect_all(format_to_read(name), read_source(source))


def said(found: ImportedLabels) -> list[tuple[Any, ...]]:
    return [
        (found.tasks[one.task_id].prompt[-1].content, one.labeler, one.kind, one.ranks, one.ratings, one.note)
        for one in found.judgments
    ]


def event(task: Task, labeler: str, ranks: tuple[int, ...], revision: int = 0, **others: Any) -> Judgment:
    made = Judgment(
        task.task_id, labeler, revision, "answer", ranks, (), (), "", (), "", 4200, "page", 1.7e9 + revision
    )
    return replace(made, **others)


def third(task: Task) -> Task:
    return replace(task, responses=(*task.responses, "A rook."), sources=(*task.sources, "model-c"))


def judged(num_responses: int) -> list[tuple[Task, list[Judgment]]]:
    """Returns tasks with two or three responses: ties, ratings, flags, notes, skips, a revision, two labelers."""
    birds, talk, unjudged = (BIRDS, TALK, OPEN) if num_responses == 2 else map(third, (BIRDS, TALK, OPEN))
    ratings, flags = ((7.0, 2.0, 3.0), (("rude", "wrong"), (), ("empty",)))
    first = event(
        birds, "ann", (1, 2, 2)[:num_responses], ratings=ratings[:num_responses], flags=flags[:num_responses],
        note="A cow is no bird.",
    )  # fmt: skip
    skip = event(birds, "cy", (), kind="skip", note="Not my field")
    return [
        (birds, [first, event(birds, "bo", (1, 1, 2)[:num_responses]), skip]),
        (talk, [event(talk, "ann", (1, 2, 3)[:num_responses]), event(talk, "ann", (2, 1, 3)[:num_responses], 1)]),
        (unjudged, []),
    ]


@pytest.fixture
def filled(new_store: Callable[[], LabelStore]) -> Callable[[int], LabelStore]:
    def fill(num_responses: int) -> LabelStore:
        store = new_store()
        for task, judgments in judged(num_responses):
            store.add_tasks([task], batch="b", num_labelers=3)
            store.import_judgments("b", judgments)
        return store

    return fill


# ---- files that the packages made ----


def test_argillas_records_give_each_users_order_ratings_and_text() -> None:
    found = read(SAMPLES / "argilla_records.json", "argilla")
    assert said(found) == [
        ("Which bird?", ANN, "answer", (1, 2), (5, 2), '{"why": "No bird."}'),
        ("Which bird?", BO, "answer", (2, 1), (3, 4), ""),
        ("Why?", ANN, "answer", (1, 2), (), ""),
    ]
    assert [task.details for task in found.tasks.values()] == [{"topic": "birds"}, {}, {}]
    # Nested records do not say that the second record's answer is a draft.
    assert found.report.counts() == {"suggestions": 1, "possibly drafts": 1}


def test_argillas_columns_say_what_is_a_draft() -> None:
    found = read(SAMPLES / "argilla_columns.jsonl", "argilla")
    assert said(found) == said(read(SAMPLES / "argilla_records.json", "argilla"))[:2]
    assert found.report.counts() == {"suggestions": 1, "draft": 1}
    assert [task.prompt[0].content for task in found.tasks.values()] == ["Which bird?", "When?"]


def test_label_studios_tasks_give_each_annotation() -> None:
    found = read(SAMPLES / "label_studio_pairwise.json", "label-studio")
    assert said(found) == [
        ("Which bird?", "annotator 1", "answer", (1, 2), (5, 2), "No bird."),
        ("Which bird?", "annotator 1", "answer", (2, 1), (), ""),
        ("Why?", "annotator 1", "answer", (1, 1), (), ""),
        ("Why?", "annotator 1", "skip", (), (), "skipped"),
    ]
    assert [one.milliseconds for one in found.judgments] == [12500, 3000, 2000, 1000]
    assert len(found.tasks) == 3  # nobody judged the third
    assert found.report.counts() == {"judged again": 2}


def test_label_studios_short_form_is_put_in_order_of_time() -> None:
    """JSON_MIN lists the newest annotation first, and leaves out those that were cancelled."""
    found = read(SAMPLES / "label_studio_pairwise_min.json", "label-studio")
    assert said(found) == [one for one in said(read(SAMPLES / "label_studio_pairwise.json", "label-studio")) if one[3]]
    assert [(one.revision, one.milliseconds) for one in found.judgments] == [(0, 12500), (1, 3000), (0, 2000)]
    assert len(found.tasks) == 3


@pytest.mark.parametrize("name", ["label_studio_ranker.json", "label_studio_ranker_min.json"])
def test_label_studios_ranker(name: str) -> None:
    found = read(SAMPLES / name, "label-studio")
    assert said(found) == [("When?", "annotator 1", "answer", (2, 3, 1), (), "")]
    assert [task.responses for task in found.tasks.values()] == [("Now.", "Never.", "?")]


# ---- malformed rows ----

ROWS: dict[str, dict[str, Any]] = json.loads((HERE / "format_rows.json").read_text())


def changed(name: str, *path: Any, value: Any) -> dict[str, Any]:
    row = json.loads(json.dumps(ROWS[name]))
    *above, last = path
    holder = row
    for key in above:
        holder = holder[key]
    holder[last] = value
    return row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed("label-studio", "annotations", 0, "result", 0, "value", "selected", value="top"),
         "annotations[0]: result[0]: field 'selected' is 'top'; left or right"),
        (changed("label-studio", "annotations", 0, "result", 1, "value", "rating", value="good"),
         "annotations[0]: result[1]: field 'rating' is 'good'; a number was expected"),
        (changed("label-studio", "annotations", 1, "created_at", value="yesterday"),
         "annotations[1]: field 'created_at' is 'yesterday'; a time such as"),
        (changed("label-studio", "annotations", 1, "completed_by", value=[1]),
         "annotations[1]: field 'completed_by' is [1]; a user, an email or a number was expected"),
        (changed("label-studio", "annotations", 0, "result", 0, "value", value={"ranker": {"good": [], "bad": []}}),
         "field 'ranker' has the bucket 'good' among 2; names that end with a rank"),
        (changed("label-studio", "annotations", 0, "result", 0, "value", value={"ranker": {"rank_1": ["x"]}}),
         "result[0]: 'x' names no response; each of ['answer1', 'answer2'] once"),
        (changed("label-studio", "data", value={"prompt": "Why?"}), "data: 1 to 9 responses were expected"),
        (changed("label-studio", "data", "prompt", value=[{"role": "robot", "content": "x"}]),
         "data: prompt[0]: field 'role' is 'robot'"),
        (changed("argilla", "fields", value={"text": "x"}), "fields: a prompt was expected in one of prompt"),
        (changed("argilla", "responses", "ranking", 0, "user_id", value=7),
         "responses: ranking[0]: field 'user_id' is 7; a user's id was expected"),
        (changed("argilla", "responses", "rating_1", 0, "value", value=True),
         "question 'rating_1', user 'u1': the value is bool; text, a number or a list was expected"),
        (changed("argilla", "responses", "ranking", 1, "value", value=["response_1", "response_1"]),
         "'response_1' names a response that is ranked twice"),
        (changed("argilla", "responses", "ranking", 1, "user_id", value="u1"), "user 'u1' answers 'ranking' twice"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_refused_with_its_field(row: dict[str, Any], message: str) -> None:
    name = "argilla" if "fields" in row else "label-studio"
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        collect_all(format_to_read(name), [("file: line 4", row)])
    assert str(error.value).startswith("file: line 4: ")
    assert message in str(error.value)


def test_what_cannot_be_placed_is_kept_or_reported() -> None:
    row = changed("label-studio", "annotations", 0, "result", 2, "from_name", value="mood")
    found = collect_all(format_to_read("label-studio"), [("row", row)])
    first = next(one for one in found.judgments if one.labeler == "annotator 1")
    assert first.ratings == ()
    assert json.loads(first.note) == {
        "comment": "No bird.",
        "ratings": {"quality": {"answer1": 5}, "mood": {"answer2": 2}},
    }
    assert found.report.counts() == {"not all rated": 2}
    row = changed("argilla", "responses", "ranking", value=[])
    row["responses"].pop("rating_3")
    found = collect_all(format_to_read("argilla"), [("row", row)])
    assert [one.kind for one in found.judgments] == ["skip"]
    assert found.report.counts() == {"not all rated": 1, "nothing to rank": 1}


def test_ratings_alone_order_the_responses_by_the_objective_or_their_mean() -> None:
    ratings = {"honest_1": 5, "honest_2": 1, "helpful_1": 1, "helpful_2": 3}
    responses = {name: [{"value": value, "user_id": "u", "status": "submitted"}] for name, value in ratings.items()}
    row = ROWS["argilla"] | {"responses": responses}
    row["fields"] = {name: text for name, text in row["fields"].items() if name != "response_3"}
    for objective, expected in (("", (3.0, 2.0)), ("helpful", (1.0, 3.0)), ("honest", (5.0, 1.0))):
        form = format_to_read("argilla")
        assert form.read is not None
        (one,) = form.read("row", row, Report(), objective)
        assert one.votes[0].ratings == expected
        assert one.votes[0].ranks == ((1, 2) if expected[0] > expected[1] else (2, 1))
        assert set(json.loads(one.votes[0].note)["ratings"]) == {"honest", "helpful"}


# ---- round trips ----


@pytest.mark.parametrize("num_responses", [2, 3])
def test_a_project_written_and_read_holds_all_but_revisions(
    num_responses: int, filled: Callable[[int], LabelStore], tmp_path: Path
) -> None:
    report, num_rows = export(
        filled(num_responses), format_to_write("label-studio"), tmp_path / "project", with_names=True
    )
    assert (num_rows, report.counts()) == (3, {"superseded": 1})
    found = read(tmp_path / "project", "label-studio")
    assert found.report.counts() == {}
    expected = judged(num_responses)
    assert [*found.tasks.values()] == [task for task, _ in expected]
    final = [replace(one, revision=0) for _, judgments in expected for one in judgments if one != expected[1][1][0]]
    fields = ["task_id", "labeler", "revision", "kind", "ranks", "ratings", "flags", "note"]
    fields += ["created_at", "milliseconds"]
    assert [[getattr(one, field) for field in fields] for one in found.judgments] == [
        [getattr(one, field) for field in fields] for one in final
    ]


def test_what_label_studio_cannot_hold_is_reported(new_store: Callable[[], LabelStore], tmp_path: Path) -> None:
    store = new_store()
    odd = event(BIRDS, "ann", (1, 2), ratings=(0.5, 11.0), flags=(("",), ("a\x01b",)))
    store.add_tasks([BIRDS, replace(OPEN, gold_ranks=(1, 2)), third(TALK)], batch="b", num_labelers=2)
    store.import_judgments("b", [odd, event(BIRDS, "eve", (2, 1), kind="adjudication")])
    store.import_judgments("b", [event(third(TALK), "ann", (1, 1, 2))])
    report, _ = export(store, format_to_write("label-studio"), tmp_path / "studio", with_names=True)
    assert report.counts() == {"superseded": 1, "gold task": 1}
    assert [(one.labeler, one.kind) for one in read(tmp_path / "studio", "label-studio").judgments] == [
        ("eve", "adjudication"), ("ann", "answer"),
    ]  # fmt: skip
    alone = new_store()
    alone.add_tasks([BIRDS], batch="b", num_labelers=1)
    alone.import_judgments("b", [odd])
    report, _ = export(alone, format_to_write("label-studio"), tmp_path / "studio again")
    assert report.counts() == {"unwritable flag": 2}
    assert read(tmp_path / "studio again", "label-studio").judgments[0].ratings == (0.5, 11.0)


def test_a_project_is_a_folder_and_a_suffix_writes_the_rows_alone(
    filled: Callable[[int], LabelStore], tmp_path: Path, heed_label: Any
) -> None:
    form, name, store, folder = format_to_write("label-studio"), "label-studio", filled(2), tmp_path / "project"
    export(store, form, folder, with_names=True)
    assert {path.name for path in folder.iterdir()} == {"label_config.xml", "tasks.json"}
    export(store, form, tmp_path / "rows.json", with_names=True)
    assert said(read(tmp_path / "rows.json", name)) == said(read(folder, name))
    with pytest.raises(ValueError, match="already exists; a new path was expected"):
        export(store, form, folder)
    code, out, err = heed_label("import", str(folder), "--check")
    assert code == 0
    assert "3 tasks, 4 judgments by ann, bo, cy; checked" in out
    assert "format: label-studio (" in err


def test_a_folder_of_argillas_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    (folder / ".argilla").mkdir(parents=True)
    (folder / ".argilla" / "dataset.json").write_text("{}")
    (folder / "records.json").write_bytes((SAMPLES / "argilla_records.json").read_bytes())
    assert said(read(folder, "argilla")) == said(read(SAMPLES / "argilla_records.json", "argilla"))


# ---- with the packages ----


def with_package(package: str, variable: str) -> str:
    """Returns a Python that can import the package, or skips the test."""
    if importlib.util.find_spec(package):
        return sys.executable
    if python := os.environ.get(variable):
        return python
    pytest.skip(f"{package} is not installed; {variable} may name a Python that has it")


def ran(python: str, script: str, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(
        [python, str(SAMPLES / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("num_responses", [2, 3])
def test_label_studio_accepts_configuration_tasks_and_annotations(
    num_responses: int, filled: Callable[[int], LabelStore], tmp_path: Path
) -> None:
    """The SDK validates everything, and its converter's JSON_MIN gives the same answers."""
    python = with_package("label_studio_sdk", "LABEL_STUDIO_PYTHON")
    export(filled(num_responses), format_to_write("label-studio"), tmp_path / "project", with_names=True)
    found = ran(python, "load_label_studio.py", str(tmp_path / "project"), str(tmp_path))
    assert found == {"tasks": [True] * 3, "annotations": [True] * 4}
    short = read(tmp_path / "result.json", "label-studio")
    whole = read(tmp_path / "project", "label-studio")
    assert [one for one in said(whole) if one[2] == "answer"] == said(short)
    assert [one.flags for one in whole.judgments if one.kind == "answer"] == [one.flags for one in short.judgments]


def test_a_skip_of_somebody_who_was_erased_is_still_one(new_database: Callable[[], str], tmp_path: Path) -> None:
    url = new_database()
    accounts = Accounts(url)
    accounts.accept(accounts.invite("ann", "labeler"))
    with LabelStore(url) as store:
        store.add_tasks([BIRDS], batch="b", num_labelers=1)
        lease = store.lease("ann", seconds=60, batch="b")
        assert lease is not None
        store.skip(lease, "I am Ann and know no birds", 5, client="page", instructions_version="1")
        pseudonym = accounts.erase("ann")
        report, _ = export(store, format_to_write("label-studio"), tmp_path / "project")
    accounts.close()
    assert report.counts() == {}
    (skip,) = read(tmp_path / "project", "label-studio").judgments
    assert (skip.labeler, skip.kind, skip.note) == (pseudonym, "skip", "skipped")
