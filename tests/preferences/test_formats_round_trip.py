"""Exported from a store and imported again: the same store, or the rankings that the format can hold."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from files.rows import read_source
from preferences.annotations import NO_ANNOTATIONS, Annotations, CriterionRatings
from preferences.formats.exchange import export, store_found, write_rows
from preferences.formats.merging import collect_all, report_excluded
from preferences.formats.parts import Report
from preferences.formats.registry import FORMATS, format_to_read, format_to_write, sniff
from preferences.records import Judgment, Message, StoredTask, Task, dense_ranks
from preferences.store import LabelStore
from tests.examples import examples

TEXT = st.text(max_size=12)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)  # of text columns
SOME_TEXT = st.text("abc 山\n\"'", min_size=1, max_size=6).filter(str.strip)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def tasks(draw: st.DrawFn, task_id: str) -> Task:
    num = draw(st.integers(2, 4))
    prompt = draw(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=3))
    return Task(
        task_id=task_id,
        prompt=tuple(Message(role, text) for role, text in prompt),
        responses=tuple(draw(st.lists(TEXT, min_size=num, max_size=num))),
        sources=tuple(draw(st.lists(TEXT, min_size=num, max_size=num))),
        objective=draw(NAME),
        gold_ranks=draw(st.just(()) | st.lists(st.integers(1, 4), min_size=num, max_size=num).map(dense_ranks)),
        details=draw(st.dictionaries(TEXT, JSON, max_size=2)),
    )


@st.composite
def acts(draw: st.DrawFn, task: Task, labeler: str, revision: int) -> Judgment:
    num = len(task.responses)
    kind = draw(st.sampled_from(["answer", "skip", "undo", "adjudication"]))
    is_answer = kind in ("answer", "adjudication")
    rating = st.floats(-1e6, 1e6) | st.integers(1, 7)
    return Judgment(
        task_id=task.task_id,
        labeler=labeler,
        revision=revision,
        kind=kind,
        ranks=dense_ranks(draw(st.lists(st.integers(1, 4), min_size=num, max_size=num))) if is_answer else (),
        ratings=draw(st.just(()) | st.lists(rating, min_size=num, max_size=num).map(tuple)) if is_answer else (),
        flags=draw(st.just(()) | st.lists(st.lists(TEXT, max_size=2).map(tuple), min_size=num, max_size=num).map(tuple))
        if is_answer
        else (),
        note=draw(TEXT),
        shown_order=draw(st.just(()) | st.permutations(range(num)).map(tuple)),
        instructions_version=draw(NAME),
        milliseconds=draw(st.integers(0, 10**9)),
        client=draw(NAME),
        created_at=draw(st.floats(0, 4e9)),
    )


@st.composite
def contents(draw: st.DrawFn) -> list[tuple[Task, str, int, list[Judgment]]]:
    """Draws tasks with their batch, quota and judgments; batches come one after another."""
    found = []
    for batch in ("one", "two"):
        for number in range(draw(st.integers(1, 2))):
            task = draw(tasks(f"{batch}/{number}"))
            judgments = [
                draw(acts(task, labeler, revision))
                for labeler in ("ann", "bo")
                for revision in range(draw(st.integers(0, 2)))
            ]
            found.append((task, batch, draw(st.integers(2, 5)), judgments))
    return found


def filled(new_store: Callable[[], LabelStore], content: list[tuple[Task, str, int, list[Judgment]]]) -> LabelStore:
    book = new_store()
    for task, batch, quota, judgments in content:
        book.add_tasks([task], batch=batch, num_labelers=[quota])
        book.import_judgments(batch, judgments)
    return book


def whole(store: LabelStore) -> list[tuple[str, list[StoredTask], list[Judgment]]]:
    """Returns the contents of a store; judgments are sorted, not in order of arrival."""

    def place(act: Judgment) -> tuple[str, str, int]:
        return act.task_id, act.labeler, act.revision

    return [(name, store.tasks(name), sorted(store.judgments(name), key=place)) for name in store.batches()]


@pytest.mark.parametrize(("suffix", "num_examples"), [(".jsonl", 60), (".parquet", 8), ("", 4)])
def test_heed_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, new_store: Callable[[], LabelStore], suffix: str, num_examples: int
) -> None:
    @examples(num_examples)
    @given(contents())
    def there_and_back(content: list[tuple[Task, str, int, list[Judgment]]]) -> None:
        book, again = filled(new_store, content), new_store()
        path = tmp_path_factory.mktemp("export") / f"labels{suffix}"
        report, num_rows = export(book, format_to_write("heed"), path, with_names=True)
        assert (report.warnings, num_rows) == ([], len(content))
        for _ in range(2):  # a second import changes nothing
            store_found(again, collect_all(format_to_read("heed"), read_source(str(path))), "")
            assert whole(again) == whole(book)

    there_and_back()


HOLDS = {"hh": True, "trl": True, "trl_text": False}  # whether it has several turns


@st.composite
def ranked(draw: st.DrawFn) -> list[tuple[Task, str, int, list[Judgment]]]:
    """Draws tasks with prompts by people and different responses, each ranked and rated alike by one or two
    labelers."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        turns = draw(st.sampled_from([1, 3]))
        texts = draw(st.lists(SOME_TEXT, min_size=turns, max_size=turns))
        prompt = tuple(Message(("user", "assistant")[turn % 2], text) for turn, text in enumerate(texts))
        responses = tuple(draw(st.lists(SOME_TEXT, min_size=2, max_size=4, unique=True)))
        task = Task(f"t{number}", prompt, responses, tuple(f"m{place}" for place in range(len(responses))))
        judgments = []
        for labeler in draw(st.sampled_from([["ann"], ["ann", "bo"]])):
            ranks = dense_ranks(draw(st.lists(st.integers(1, 4), min_size=len(responses), max_size=len(responses))))
            ratings = tuple(float(-rank) for rank in ranks)
            judgments.append(
                Judgment(f"t{number}", labeler, 0, "answer", ranks, ratings, (), "", (), "1", 5, "page", 1.0)
            )
        found.append((task, "b", 2, judgments))
    return found


def preferences_of(content: list[tuple[Task, str, int, list[Judgment]]], turns: bool) -> set[Any]:
    """Returns (prompt, better, worse) of every untied pair, counted directly from the judgments."""
    found = set()
    for task, _, _, judgments in content:
        if len(task.prompt) > 1 and not turns:
            continue
        for act in judgments:
            for i, j in combinations(range(len(task.responses)), 2):
                if act.ranks[i] != act.ranks[j]:
                    better, worse = (i, j) if act.ranks[i] < act.ranks[j] else (j, i)
                    found.add((task.prompt, task.responses[better], task.responses[worse]))
    return found


@pytest.mark.parametrize("name", HOLDS)
def test_other_formats_keep_the_preferences_that_they_can_hold(name: str, new_store: Callable[[], LabelStore]) -> None:
    @examples(40)
    @given(ranked())
    def there_and_back(content: list[tuple[Task, str, int, list[Judgment]]]) -> None:
        book, report = filled(new_store, content), Report()
        write = format_to_write(name).write
        assert write is not None
        rows = [json.loads(json.dumps(row)) for row in write(book.tasks("b"), book.judgments("b"), report)]
        found = collect_all(format_to_read(name), [(f"row {n}", row) for n, row in enumerate(rows, start=1)])
        expected = preferences_of(content, HOLDS[name])
        read = [(found.tasks[act.task_id], "", 0, [act]) for act in found.judgments]
        assert preferences_of(read, turns=True) == expected
        # Each pair of each labeler is a row or an entry in the report.
        num_pairs = sum(
            len(task.responses) * (len(task.responses) - 1) // 2 * len(judgments) for task, _, _, judgments in content
        )
        assert len(rows) + len(report.warnings) == num_pairs
        if rows and name != "trl_text":
            assert sniff(iter([("row 1", rows[0])]), "t")[0].name == name

    there_and_back()


def test_rankings_keep_labelers_objectives_and_ratings(new_store: Callable[[], LabelStore]) -> None:
    task = Task("t", (Message("user", "q"),), ("a", "b", "c"), ("x", "y", "z"), objective="helpful")
    judgments = [
        Judgment("t", name, 0, "answer", (2, 1, 2), (1.0, 2.5, 1.0), (), "", (), "1", 5, "page", 1.0)
        for name in ("ann", "bo")
    ]
    book = filled(new_store, [(task, "b", 2, judgments)])
    write = FORMATS["rankings"].write
    assert write is not None
    rows = [json.loads(json.dumps(row)) for row in write(book.tasks("b"), book.judgments("b"), Report())]
    found = collect_all(format_to_read("rankings"), [("row", row) for row in rows])
    expected = [("ann", (2, 1, 2), (1.0, 2.5, 1.0), "helpful"), ("bo", (2, 1, 2), (1.0, 2.5, 1.0), "helpful")]
    assert [(r.labeler, r.ranks, r.ratings, r.objective) for r in found.rankings] == expected


# ---- what stands, what is left out ----


def act(labeler: str, revision: int, kind: Any = "answer", ranks: tuple[int, ...] = (1, 2)) -> Judgment:
    kept = ranks if kind in ("answer", "adjudication") else ()
    return Judgment("t", labeler, revision, kind, kept, (), (), "too hard", (), "1", 5, "page", 1.0)


PAIR = Task("t", (Message("user", "q"),), ("a", "b"), ("x", "y"))


@pytest.mark.parametrize(
    ("judgments", "chosen", "counts"),
    [
        ([act("ann", 0), act("ann", 1, ranks=(2, 1))], ["b"], {"superseded": 1}),
        ([act("ann", 0), act("ann", 1, "undo")], [], {"undo": 1}),
        ([act("ann", 0), act("ann", 1, "undo"), act("ann", 2, ranks=(2, 1))], ["b"], {"undo": 1}),
        ([act("ann", 0), act("ann", 1, "void"), act("ann", 2, "skip")], [], {"void": 1, "skip": 1}),
        ([act("ann", 0, "skip"), act("bo", 0)], ["a"], {"skip": 1}),
        ([act("ann", 0), act("bo", 0, "adjudication", (2, 1))], ["b"], {"superseded": 1}),
        ([act("ann", 0, ranks=(1, 1)), act("bo", 0)], ["a"], {"tie": 1}),
    ],
)
def test_what_does_not_stand_is_not_written_and_said(
    judgments: list[Judgment], chosen: list[str], counts: dict[str, int], new_store: Callable[[], LabelStore]
) -> None:
    book, report = filled(new_store, [(PAIR, "b", 2, judgments)]), Report()
    write = FORMATS["trl_text"].write
    assert write is not None
    assert [row["chosen"] for row in write(book.tasks("b"), book.judgments("b"), report)] == chosen
    assert report.counts() == counts
    assert {warning.where for warning in report.warnings} <= {"task 't', labeler 'ann'", "task 't', labeler 'bo'"}


GOLD = Task("gold", (Message("user", "g"),), ("a", "b"), ("x", "y"), gold_ranks=(1, 2))
AGAIN = replace(PAIR, task_id="again", repeat_of="t")


# `grouped` has no rankings; tests/preferences/test_single.py tests it.
WRITTEN = sorted(name for name, form in FORMATS.items() if form.write is not None and name != "grouped")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_measures_labelers_is_no_training_data(
    name: str, new_store: Callable[[], LabelStore], tmp_path: Path
) -> None:
    """Gold tasks and hidden repeats are exported only by `heed`, which marks them; what is left out is counted."""
    said = {
        "criteria": Annotations((CriterionRatings("helpful", (5.0, 2.0)),)),
        "edits": Annotations(edits=("a better one", "")),
        "turns": Annotations((CriterionRatings("right", (1.0, 0.0)),)),
    }
    ratings = (1.0, 0.0) if name == "trl_unpaired" else (5.0, 2.0)
    rated = replace(act("ann", 0), ratings=ratings, annotations=said.get(name, NO_ANNOTATIONS))
    book = filled(new_store, [(task, "b", 1, [replace(rated, task_id=task.task_id)]) for task in (PAIR, GOLD, AGAIN)])
    report, num_rows = export(book, format_to_write(name), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    if name == "heed":
        assert [(bool(row["gold_ranks"]), row["repeat_of"]) for row in rows] == [(False, ""), (True, ""), (False, "t")]
        assert [len(row["judgments"]) for row in rows] == [1, 1, 1]
        assert report.counts() == {}
        back = collect_all(format_to_read("heed"), [("row", row) for row in rows])
        assert [ranking.task_id for ranking in back.rankings] == ["t"]
        report_excluded(back)
        report = back.report
    else:
        assert num_rows == len(rows) == (2 if name in ("criteria", "trl_unpaired", "turns") else 1)  # one per response
    assert report.counts() == {"gold task": 1, "hidden repeat": 1}
    assert [ranking.task_id for ranking in book.rankings("b")] == ["t"]


@pytest.mark.parametrize(
    ("name", "task", "kind"),
    [
        ("hh", Task("t", (Message("user", "x\n\nHuman: y"),), ("a", "b"), ("x", "y")), "not a transcript"),
        ("hh", Task("t", (Message("system", "s"), *PAIR.prompt), ("a", "b"), ("x", "y")), "not a transcript"),
        ("hh", Task("t", (Message("assistant", "s"),), ("a", "b"), ("x", "y")), "no user's turn"),
        ("trl_text", Task("t", (*PAIR.prompt, *PAIR.prompt), ("a", "b"), ("x", "y")), "prompt of several turns"),
    ],
)
def test_what_a_format_cannot_hold_is_said(
    name: str, task: Task, kind: str, new_store: Callable[[], LabelStore], tmp_path: Path
) -> None:
    book = filled(new_store, [(task, "b", 1, [act("ann", 0)])])
    with pytest.raises(ValueError, match=f"nothing can be written as {name}: 1 x {kind}"):
        export(book, format_to_write(name), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_demonstrations_and_prompts_for_the_other_stages(new_store: Callable[[], LabelStore], tmp_path: Path) -> None:
    tied = Task("u", (Message("user", "r"),), ("a", "b"), ("x", "y"))
    judgments = [act("ann", 0, ranks=(2, 1)), act("bo", 0)]
    tie = Judgment("u", "ann", 0, "answer", (1, 1), (), (), "", (), "1", 5, "page", 1.0)
    book = filled(new_store, [(PAIR, "b", 2, judgments), (tied, "b", 1, [tie])])
    report, _ = export(book, format_to_write("demonstrations"), tmp_path / "demonstrations.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    assert row == {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]}
    assert report.counts() == {"no best response": 1}
    export(book, format_to_write("prompts"), tmp_path / "prompts.jsonl")
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [(prompt["prompt_id"], prompt["messages"][0]["content"]) for prompt in prompts] == [("t", "q"), ("u", "r")]


# ---- containers ----


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet", "a"])
def test_every_container_gives_its_rows_back(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"chosen": "a\n山", "rejected": f"b{n}"} for n in range(3)]
    assert write_rows(tmp_path / "new" / name, iter(rows)) == 3
    assert capsys.readouterr().err == ""  # no progress bars of libraries
    read = list(read_source(str(tmp_path / "new" / name)))
    assert [row for _, row in read] == rows
    word = "line" if ".jsonl" in name else "row"
    assert [where for where, _ in read] == [f"{tmp_path / 'new' / name}: {word} {n}" for n in (1, 2, 3)]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]  # no temporary file remains
    with pytest.raises(ValueError, match="already exists; a new path was expected"):
        write_rows(tmp_path / "new" / name, iter(rows))


def test_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.csv: suffix '\.csv'; one of \.jsonl"):
        write_rows(tmp_path / "a.csv", [{}])
    assert write_rows(tmp_path / "b.jsonl", []) == 0
    assert list(tmp_path.iterdir()) == []


def test_stores_without_what_was_asked_for(new_store: Callable[[], LabelStore], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the store has no tasks"):
        export(new_store(), format_to_write("heed"), tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="batch 'x' has no tasks"):
        export(new_store(), format_to_write("heed"), tmp_path / "a.jsonl", batch="x")
    found = collect_all(format_to_read("trl"), [("row", {"prompt": "q", "chosen": "a", "rejected": "b"})])
    with pytest.raises(ValueError, match="has no batch; a batch name was expected"):
        store_found(new_store(), found, "")
