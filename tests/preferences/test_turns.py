"""Ratings of the assistant's earlier turns, and conversations that call tools: stored, exported, and read again."""

import json
from dataclasses import replace

import pytest

from files.rows import read_source
from preferences.annotations import Annotations, CriterionRatings, TurnRating
from preferences.backup import backup
from preferences.formats.annotated import by_criterion
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read, format_to_write
from preferences.records import Answer, Judgment, Message, StoredTask, Task
from preferences.statistics.summary import summary
from preferences.store import LabelStore

HOW = {"client": "test", "instructions_version": "1"}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "Dante's death", "limit": 3}}}
TURNS = [
    {
        "role": "system",
        "content": "Be brief.",
        "tools": [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}],
    },
    {"role": "user", "content": "When did Dante die?"},
    {"role": "assistant", "content": "Let me look.", "tool_calls": [{**CALL, "id": "c1"}]},
    {"role": "tool", "content": '{"year": 1321}', "tool_call_id": "c1", "name": "search"},
    {"role": "assistant", "content": "In 1321."},
    {"role": "user", "content": "Where?"},
]
PROMPT = tuple(Message.of(turn) for turn in TURNS)
TASK = Task("t1", PROMPT, ("In Ravenna.", "In Florence."), ("x", "y"))
# In canonical order.
SAID = Annotations((CriterionRatings("right", (1, 0)),), turns=(TurnRating(2, "right", 1), TurnRating(4, "right", 0)))


@pytest.fixture
def store(new_database, clock):
    with LabelStore(new_database(), clock=clock) as opened:
        opened.add_tasks([TASK], batch="b", num_labelers=3)
        yield opened


def answer(store, labeler, said=SAID, ranks=(1, 2)):
    lease = store.lease(labeler, seconds=60, batch="b")
    assert lease.shown.prompt == PROMPT
    shown = tuple(ranks[index] for index in lease.order)
    store.submit(lease, Answer(shown, 10, annotations=said.as_shown(lease.order)), **HOW)


def rows_of(store, name, report=None, criterion=""):
    form, stored, judgments, report = format_to_write(name), store.tasks("b"), store.judgments("b"), report or Report()
    if criterion:
        stored, judgments = by_criterion(form, stored, judgments, criterion, report)
    return list(form.write(stored, judgments, report))


def row_of(name):
    """The row of Ann's answer, without a store."""
    said = Judgment("t1", "ann", 0, "answer", (1, 2), (), (), "", (0, 1), "1", 10, "test", 1.0, SAID)
    (row,) = format_to_write(name).write([StoredTask(TASK, "b", 1)], [said], Report())
    return json.loads(json.dumps(row))


# ---- ratings of turns ----


def test_a_change_replaces_the_ratings_and_both_are_kept_in_every_copy(store, new_database, tmp_path):
    answer(store, "ann")
    lease = store.reopened("ann", "t1")
    changed = replace(SAID, turns=(TurnRating(2, "right", 0), TurnRating(4, "right", 0)))
    store.submit(lease, Answer((1, 2), 10, annotations=changed.as_shown(lease.order)), **HOW)
    first, second = store.judgments("b")
    assert (first.annotations, second.annotations.turns) == (SAID, changed.turns)
    assert second.annotations.turn_ratings_by("right") == {2: 0, 4: 0}
    export(store, format_to_write("heed"), tmp_path / "labels.jsonl", with_names=True)
    export(store, format_to_write("heed"), tmp_path / "labels.parquet", with_names=True)
    for name in ("labels.jsonl", "labels.parquet"):
        found = collect_all(format_to_read("heed"), read_source(str(tmp_path / name)))
        with LabelStore(new_database()) as other:
            store_found(other, found, "")
            assert other.judgments("b") == store.judgments("b")
            assert [one.task for one in other.tasks("b")] == [TASK]


def test_a_backup_has_them(sqlite_tables, tmp_path):
    path = tmp_path / "labels.sqlite"
    path.write_bytes(sqlite_tables.read_bytes())
    with LabelStore(path) as store:
        store.add_tasks([TASK], batch="b", num_labelers=1)
        answer(store, "ann")
        backup(path, tmp_path / "backup.sqlite")
    with LabelStore(tmp_path / "backup.sqlite") as copy:
        assert copy.judgments("b")[0].annotations == SAID
        assert copy.tasks("b")[0].task == TASK


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((TurnRating(1, "right", 1),), r"turns: turn 1 is rated; the place of one of the assistant's turns .*\(2, 4\)"),
        ((TurnRating(2, "right", float("nan")),), "turn 2 is rated nan; a finite number"),
        ((TurnRating(2, "right", 1), TurnRating(2, "right", 0)), "one per turn and criterion"),
        ((TurnRating(2, "", 1),), "names a criterion"),
    ],
)
def test_malformed_ratings_are_refused_by_field(store, turns, message):
    lease = store.lease("ann", seconds=60, batch="b")
    with pytest.raises(ValueError, match=f"task 't1', labeler 'ann': .*{message}"):
        store.submit(lease, Answer((1, 2), 5, annotations=Annotations(turns=turns)), **HOW)


@pytest.mark.parametrize(
    ("rated", "message"),
    [
        ({"turn": 3, "name": "right", "rating": 1}, r"judgments\[0\]: turns: turn 3 is rated"),
        ({"turn": 9, "name": "right", "rating": 1}, r"judgments\[0\]: field 'turn' is 9"),
        ({"turn": 2, "rating": 1}, r"'name'"),
    ],
)
def test_malformed_rows_are_refused_by_field(rated, message):
    row = row_of("heed")
    row["judgments"][0]["turns"] = [rated]
    with pytest.raises(ValueError, match=r"file.jsonl:1.*" + message):
        collect_all(format_to_read("heed"), [("file.jsonl:1", row)])


def test_what_cannot_hold_them_says_so(store):
    answer(store, "ann")
    for name in ("rankings", "trl", "criteria"):
        report = Report()
        assert rows_of(store, name, report)
        assert report.counts()["turns"] == 1, name


def test_an_import_of_judgments_is_checked_too(store):
    answer(store, "ann")
    wrong = replace(store.judgments("b")[0], labeler="bob", annotations=Annotations(turns=(TurnRating(0, "right", 1),)))
    with pytest.raises(ValueError, match=r"task 't1', labeler 'bob'.*turns: turn 0 is rated"):
        store.import_judgments("b", [wrong])


# ---- tools ----


def test_conversations_with_tools_are_exported_unchanged(store):
    answer(store, "ann")
    assert store.tasks("b")[0].task.prompt == PROMPT
    for name in ("heed", "rankings", "consensus", "trl"):
        assert rows_of(store, name)[0]["prompt"] == TURNS, name
    assert rows_of(store, "prompts")[0]["messages"] == TURNS
    assert rows_of(store, "demonstrations")[0]["messages"][:-1] == TURNS
    for name in ("rankings", "trl"):
        (row,) = rows_of(store, name)
        (found,) = collect_all(format_to_read(name), [("file.jsonl:1", json.loads(json.dumps(row)))]).found_tasks
        assert found.task.prompt == PROMPT, name


def test_transcripts_leave_them_out(store):
    answer(store, "ann")
    report = Report()
    assert rows_of(store, "hh", report) == []
    assert report.counts()["not a transcript"] == 1


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (2, {"tool_calls": [{"function": {"name": "search"}}]}, r"prompt\[2\].tool_calls\[0\].*'arguments'"),
        (2, {"tool_calls": [{"function": {"name": "search", "arguments": "{"}}]}, r"prompt\[2\].tool_calls\[0\]"),
        (1, {"tool_calls": [CALL]}, r"'prompt\[1\].tool_calls' holds a tool call; only an assistant's message"),
        (3, {"tool_call_id": "c2"}, r"'prompt\[3\].tool_call_id' is 'c2'; the id of a call before it"),
        (2, {"tool_calls": []}, r"'prompt\[3\].role' is 'tool' without a call before it"),
        (2, {"function_call": {"name": "x"}}, r"'prompt\[2\].function_call' holds a call in OpenAI's older form"),
        (0, {"tools": [{"type": "function", "function": {}}]}, r"prompt\[0\]: tools.*'name'"),
        (3, {"role": "robot"}, r"'prompt\[3\].role' is 'robot'"),
    ],
)
@pytest.mark.parametrize("name", ["heed", "rankings"])
def test_malformed_tools_are_refused_by_file_line_and_field(name, place, change, message):
    row = row_of(name)
    row["prompt"][place] |= change
    with pytest.raises(ValueError, match=r"^file.jsonl:1: .*" + message):
        collect_all(format_to_read(name), [("file.jsonl:1", row)])


@pytest.mark.parametrize("name", ["heed", "rankings"])
def test_tools_may_stand_in_the_row(name):
    row = row_of(name)
    row["tools"] = json.dumps(row["prompt"][0].pop("tools"))
    (found,) = collect_all(format_to_read(name), [("file.jsonl:1", row)]).found_tasks
    assert found.task.prompt == PROMPT


def test_a_program_cannot_store_malformed_tools(store):
    result = Message("tool", "1")
    with pytest.raises(ValueError, match=r"task 't2': field 'prompt\[1\].role' is 'tool' without a call before it"):
        store.add_tasks([replace(TASK, task_id="t2", prompt=(PROMPT[1], result))], batch="b", num_labelers=1)


def test_the_words_of_a_call_are_found(store):
    from preferences.search import Search, find_tasks

    with store.reading() as connection:
        found = [len(find_tasks(connection, Search(words=words), after=0, limit=9)) for words in ("Dante's", "florist")]
    assert found == [1, 0]


def test_statistics_of_turns(store):
    """Ann and Bob agree on one of two turns; Cem rates no turn."""
    answer(store, "ann")
    answer(store, "bob", said=replace(SAID, turns=(TurnRating(2, "right", 1), TurnRating(4, "right", 1))))
    answer(store, "cem", said=Annotations())
    (turns,) = summary([TASK], store.judgments("b")).turns
    assert (turns.name, turns.num_answers, turns.mean_rating) == ("right", 4, 0.75)
    assert (turns.agreement.mean, turns.alpha.value) == (0.5, 0.0)  # 1 - 3·1/(1·3), as by chance
    report = summary([replace(TASK, gold_ranks=(1, 2))], store.judgments("b")).turns[0]
    assert (report.num_answers, report.agreement.num_tasks, report.alpha.reason != "") == (4, 0, True)


def test_labels_of_turns_are_by_one_criterion_and_yes_or_no(store):
    answer(store, "ann")
    rows = rows_of(store, "turns")
    assert [(row["messages"][:-1], row["messages"][-1]["content"], row["labels"]) for row in rows] == [
        (TURNS, "In Ravenna.", [True, False, True]),
        (TURNS, "In Florence.", [None, None, False]),
    ]
    more = (*SAID.turns, TurnRating(2, "fun", 5), TurnRating(4, "fun", 1))
    answer(store, "bob", said=replace(SAID, criteria=(*SAID.criteria, CriterionRatings("fun", (1, 7))), turns=more))
    answer(store, "cem", said=Annotations())
    with pytest.raises(ValueError, match="there are ratings by fun, right; one of them was expected"):
        rows_of(store, "turns")
    report = Report()
    rows = rows_of(store, "turns", report, criterion="right")
    assert [(row["labeler"], row["labels"]) for row in rows[2:]] == [
        ("bob", [True, False, True]),
        ("bob", [None, None, False]),
    ]
    assert report.counts() == {"no such criterion": 1}
    report = Report()
    assert rows_of(store, "turns", report, criterion="fun") == []
    assert report.counts() == {"no such criterion": 2, "no yes or no": 1}


def test_a_first_turn_that_was_rated_is_a_label_too(new_database, clock):
    with LabelStore(new_database(), clock=clock) as store:
        store.add_tasks([replace(TASK, prompt=PROMPT[1:2])], batch="b", num_labelers=1)
        lease = store.lease("ann", seconds=60, batch="b")
        said = Annotations(SAID.criteria).as_shown(lease.order)
        store.submit(lease, Answer((1, 1), 10, annotations=said), **HOW)
        assert [row["labels"] for row in rows_of(store, "turns")] == [[True], [False]]
