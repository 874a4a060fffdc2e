"""Criteria and edits: stored with an answer, exported, and read again."""

import json
from dataclasses import replace

import pytest

from preferences.annotations import Annotations, CriterionRatings
from preferences.formats.annotated import by_criterion
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read, format_to_write
from preferences.leases import canonical
from preferences.records import Answer, Message, Task
from preferences.statistics.summary import summary
from preferences.store import LabelStore

HOW = {"client": "test", "instructions_version": "1"}
TASK = Task("t1", (Message("user", "Hi?"),), ("Hello", "Hm, hello there", "No"), ("x", "y", "z"))


def criteria(**ratings):
    return tuple(CriterionRatings(name, tuple(values)) for name, values in ratings.items())


# In canonical order.
SAID = Annotations(criteria(helpful=(7, 4, 1), correct=(1, 1, 0)), ("", "Hello!", ""))


@pytest.fixture
def store(new_database, clock):
    with LabelStore(new_database(), clock=clock) as opened:
        opened.add_tasks([TASK], batch="b", num_labelers=3)
        yield opened


def answer(store, labeler, ranks=(1, 2, 3), said=SAID):
    """Submits an answer that is given in canonical order."""
    lease = store.lease(labeler, seconds=60, batch="b")
    shown = [ranks[index] for index in lease.order]
    assert canonical(lease.order, shown) == list(ranks)
    store.submit(lease, Answer(tuple(shown), 10, annotations=said.as_shown(lease.order)), **HOW)


def rows_of(store, name, criterion="", *, report=None):
    stored, judgments, report = store.tasks("b"), store.judgments("b"), report or Report()
    form = format_to_write(name)
    if criterion:
        stored, judgments = by_criterion(form, stored, judgments, criterion, report)
    return list(form.write(stored, judgments, report))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_order_shown_and_back(order):
    shown = SAID.as_shown(order)
    assert [shown.edits[place] for place in range(3)] == [SAID.edits[index] for index in order]
    assert shown.canonical(order) == SAID
    assert Annotations.of(json.loads(json.dumps(SAID.as_dict()))) == SAID
    assert (Annotations().as_dict(), bool(Annotations())) == ({}, False)


def test_annotations_are_stored_in_canonical_order_whoever_says_them(store):
    for name in ("ann", "bob", "cem"):
        answer(store, name)
    assert {judgment.annotations for judgment in store.judgments("b")} == {SAID}
    before = store.content_hash("b")
    lease = store.reopened("ann", "t1")
    shown = tuple((1, 2, 3)[index] for index in lease.order)
    store.submit(lease, Answer(shown, 10), **HOW)  # the same ranks without annotations
    assert store.content_hash("b") != before


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (Annotations(criteria(helpful=(1, 2))), "criteria: 'helpful' has 2 ratings for 3 responses"),
        (Annotations(criteria(helpful=(1, 2, float("nan")))), "finite numbers"),
        (Annotations((*criteria(a=(1, 2, 3)), *criteria(a=(1, 2, 3)))), "different names"),
        (Annotations(criteria(**{"": (1, 2, 3)})), "names a criterion"),
        (Annotations(edits=("a", "b")), "edits has 2 entries"),
        (Annotations(edits=("a", "b", "\ud800")), "half of a surrogate pair"),
        (Annotations(edits=("a", "b", "x" * 20_001)), "at most 20,000 characters"),
    ],
)
def test_malformed_annotations_are_refused_by_field(store, said, message):
    lease = store.lease("ann", seconds=60, batch="b")
    with pytest.raises(ValueError, match=f"task 't1', labeler 'ann': .*{message}"):
        store.submit(lease, Answer((1, 2, 3), 5, annotations=said), **HOW)


def test_heed_holds_everything_and_reads_it_again(store, new_database, tmp_path):
    answer(store, "ann")
    answer(store, "bob", said=Annotations())
    for suffix in (".jsonl", ".parquet"):
        path = tmp_path / f"labels{suffix}"
        export(store, format_to_write("heed"), path, with_names=True)
        from files.rows import read_source

        found = collect_all(format_to_read("heed"), read_source(str(path)))
        with LabelStore(new_database()) as other:
            store_found(other, found, "")
            assert other.judgments("b") == store.judgments("b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"criteria": [{"name": "a", "ratings": [1, 2]}]}, r"judgments\[0\]: criteria: 'a' has 2 ratings"),
        ({"edits": ["a"]}, r"judgments\[0\]: edits has 1 entries"),
    ],
)
def test_malformed_rows_are_refused_by_field(store, change, message):
    answer(store, "ann", said=Annotations())
    (row,) = rows_of(store, "heed")
    row["judgments"][0] |= change
    with pytest.raises(ValueError, match=message):
        collect_all(format_to_read("heed"), [("file.jsonl:1", row)])


def test_what_a_format_cannot_hold_is_reported(store):
    answer(store, "ann")
    report = Report()
    rows_of(store, "rankings", report=report)
    assert report.counts() == {"criteria": 1, "edits": 1}
    assert report.warnings[0].found == "the answer has 2, which this format cannot hold"
    for name, left in (("criteria", {"edits": 1}), ("edits", {"criteria": 1}), ("heed", {})):
        report = Report()
        rows_of(store, name, report=report)
        assert report.counts() == left, name


def test_any_format_by_one_criterion(store):
    answer(store, "ann", ranks=(3, 2, 1))
    answer(store, "bob", said=replace(SAID, criteria=criteria(helpful=(2, 2, 5))))
    answer(store, "cem", said=Annotations())
    report = Report()
    rows = rows_of(store, "rankings", "helpful", report=report)
    assert [(row["labeler"], row["ranks"], row["ratings"], row["objective"]) for row in rows] == [
        ("ann", (1, 2, 3), [7, 4, 1], "helpful"),
        ("bob", (2, 2, 1), [2, 2, 5], "helpful"),
    ]
    assert report.counts()["no such criterion"] == 1
    assert [row["labeler"] for row in rows_of(store, "rankings", "correct")] == ["ann"]
    (row,) = rows_of(store, "consensus", "correct")
    assert (row["ranks"], row["objective"]) == ((1, 1, 2), "correct")
    assert {row["chosen"][0]["content"] for row in rows_of(store, "trl", "correct")} == {"Hello", "Hm, hello there"}
    with pytest.raises(ValueError, match="criterion 'funny': one of correct, helpful was expected"):
        rows_of(store, "rankings", "funny")
    with pytest.raises(ValueError, match="format 'heed' is not one of rankings by a criterion"):
        rows_of(store, "heed", "helpful")


def test_an_adjudication_without_the_criterion_overrides_answers_that_have_it(store):
    answer(store, "ann")
    lease = store.reopened("lea", "t1")
    ranks = tuple((2, 1, 3)[index] for index in lease.order)
    store.adjudicate(lease, Answer(ranks, 10), client="t", instructions_version="1")
    assert rows_of(store, "rankings", "helpful") == []
    assert [row["ranks"] for row in rows_of(store, "rankings")] == [(2, 1, 3)]


def test_rows_of_ratings_by_criterion(store):
    answer(store, "ann")
    answer(store, "bob", said=Annotations(criteria(helpful=(1, 2, 3))))
    rows = rows_of(store, "criteria")
    assert rows[0] == {
        "task_id": "t1", "prompt": "Hi?", "response": "Hello", "source": "x", "labeler": "ann", "correct": 1.0,
        "helpful": 7.0,
    }  # fmt: skip
    assert [(row["correct"], row["helpful"]) for row in rows[3:]] == [(None, 1.0), (None, 2.0), (None, 3.0)]


def test_an_edit_is_preferred_and_a_demonstration(store):
    answer(store, "ann", ranks=(2, 1, 3))
    (row,) = rows_of(store, "edits")
    assert row == {
        "prompt": [{"role": "user", "content": "Hi?"}],
        "chosen": [{"role": "assistant", "content": "Hello!"}],
        "rejected": [{"role": "assistant", "content": "Hm, hello there"}],
    }
    assert list(collect_all(format_to_read("trl"), [("file.jsonl:1", row)]).found_tasks)
    (row,) = rows_of(store, "demonstrations")
    assert row["messages"][-1]["content"] == "Hello!"


def test_an_edit_of_another_response_is_no_demonstration(store):
    answer(store, "ann", ranks=(1, 2, 3))
    report = Report()
    (row,) = rows_of(store, "demonstrations", report=report)
    assert (row["messages"][-1]["content"], report.counts()["edits"]) == ("Hello", 1)


def test_statistics_by_criterion(store):
    """Ann and Bob rate alike by the one criterion, and the opposite by the other."""
    answer(store, "ann", said=Annotations(criteria(good=(7, 4, 1), short=(1, 2, 3))))
    answer(store, "bob", said=Annotations(criteria(good=(7, 4, 1), short=(3, 2, 1))))
    good, short = summary([TASK], store.judgments("b")).criteria
    assert (good.name, good.num_answers, good.mean_rating) == ("good", 2, 4.0)
    assert (good.agreement.mean, good.alpha.value) == (1.0, 1.0)
    assert short.agreement.mean == 0.0
    assert short.alpha.value < 0  # less than by chance
