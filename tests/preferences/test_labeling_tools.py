"""Argilla and Label Studio: files that their own packages made.

`samples/` has the files, and the scripts that made them with argilla 2.8.0 and label-studio 1.23.2.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from files.rows import read_source
from preferences.formats.merging import ImportedLabels, collect_all
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read, sniff

HERE = Path(__file__).parent
SAMPLES = HERE / "samples"
ANN, BO = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"


def read(path: Path | str, name: str) -> ImportedLabels:
    source = str(path)
    assert sniff(read_source(source), source)[0].name == name
    return collect_all(format_to_read(name), read_source(source))


def said(found: ImportedLabels) -> list[tuple[Any, ...]]:
    return [
        (found.tasks[one.task_id].prompt[-1].content, one.labeler, one.kind, one.ranks, one.ratings, one.note)
        for one in found.judgments
    ]


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


def test_label_studios_ranker() -> None:
    found = read(SAMPLES / "label_studio_ranker.json", "label-studio")
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
