"""What labelers and leads do besides answering: skips, undos, adjudications, repeats, imports."""

import dataclasses

import pytest

from preferences.formats.exchange import store_found
from preferences.formats.merging import collect_all
from preferences.formats.native import write_heed, write_rankings
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read
from preferences.leases import LeaseLostError
from preferences.records import Answer, Message, Progress, Task
from preferences.statistics.summary import summary
from preferences.store import UNDO_SECONDS, LabelStore

HOW = {"client": "test", "instructions_version": "1"}
BEST_FIRST = Answer((1, 2), 10)


def make_task(name, **fields):
    said = fields.get("repeat_of", name)  # a repeat has its original's responses
    return Task(name, (Message("user", f"Say {name}"),), (f"{said} a", f"{said} b"), ("x", "y"), **fields)


@pytest.fixture
def store(new_database, clock):
    with LabelStore(new_database(), clock=clock) as opened:
        yield opened


def lease(store, labeler):
    return store.lease(labeler, seconds=60, batch="b")


def acts(store):
    return [(j.labeler, j.revision, j.kind) for j in store.judgments("b")]


# ---- skipping ----


def test_who_skips_a_task_is_not_offered_it_again_and_others_are(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    first = lease(store, "ann")
    store.skip(first, "cannot judge medicine", 900, **HOW)
    store.skip(first, "cannot judge medicine", 950, **HOW)  # a second click
    assert acts(store) == [("ann", 0, "skip")]
    assert lease(store, "ann").task_id == "t2"
    assert lease(store, "bob").task_id == "t1"
    assert store.rankings("b") == []
    assert store.progress("b") == Progress(num_tasks=2, num_judgments=0, num_open=2)


def test_a_skip_needs_a_reason(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match="'t1', labeler 'ann': note is empty"):
        store.skip(lease(store, "ann"), "", 900, **HOW)


def test_a_skip_is_taken_even_where_the_lease_was_lost(store, clock):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    late = lease(store, "ann")
    clock.now += 61
    taken = lease(store, "bob")
    store.skip(late, "unclear", 5, **HOW)
    store.submit(taken, BEST_FIRST, **HOW)
    assert acts(store) == [("ann", 0, "skip"), ("bob", 0, "answer")]


# ---- taking back ----


def test_an_answer_taken_back_stays_and_stands_no_more(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    back = store.reopened("ann", "t1")
    store.undo(back, "slipped", client="test")
    store.undo(back, "slipped", client="test")  # a second click
    assert (store.rankings("b"), store.progress("b").num_judgments) == ([], 0)
    again = lease(store, "ann")
    assert (again.task_id, again.revision) == ("t1", 2)
    store.submit(again, Answer((1, 1), 20), **HOW)
    assert acts(store) == [("ann", 0, "answer"), ("ann", 1, "undo"), ("ann", 2, "answer")]
    assert [ranking.ranks for ranking in store.rankings("b")] == [(1, 1)]
    assert [act.judgment.kind for act in store.history("ann", 2)] == ["answer", "undo"]


def test_the_place_is_kept_for_who_took_back_and_then_goes_to_others(store, clock):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    store.undo(store.reopened("ann", "t1"), "slipped", client="test")
    assert lease(store, "bob") is None
    clock.now += UNDO_SECONDS + 1
    assert lease(store, "bob").task_id == "t1"
    with pytest.raises(LeaseLostError, match="'t1', labeler 'ann'"):
        store.submit(store.reopened("ann", "t1"), BEST_FIRST, **HOW)


def test_a_skip_is_taken_back_while_there_is_a_place(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    store.skip(lease(store, "ann"), "unclear", 5, **HOW)
    store.undo(store.reopened("ann", "t1"), "understood", client="test")
    assert lease(store, "ann").task_id == "t1"
    store.skip(store.reopened("ann", "t1"), "unclear after all", 5, **HOW)
    lease(store, "bob")
    with pytest.raises(LeaseLostError):
        store.undo(store.reopened("ann", "t1"), "understood", client="test")


def test_nothing_is_taken_back_twice_and_nothing_judged_twice(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    first = lease(store, "ann")
    with pytest.raises(ValueError, match="no answer or skip to take back"):
        store.undo(first, "slipped", client="test")
    store.submit(first, BEST_FIRST, **HOW)
    with pytest.raises(ValueError, match="already judged"):
        store.skip(store.reopened("ann", "t1"), "too hard", 5, **HOW)
    with pytest.raises(ValueError, match="revision is 5, but only 1 are stored"):
        store.submit(dataclasses.replace(first, revision=5), BEST_FIRST, **HOW)
    with pytest.raises(ValueError, match="'nothing': task_id is not in the store"):
        store.reopened("ann", "nothing")


def test_a_changed_answer_replaces_the_old_one_and_nobody_else_gets_the_task(store, clock):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    opened = store.reopened("ann", "t1")
    assert (opened.is_done, opened.revision) == (True, 1)
    assert not store.reopened("bob", "t1").is_done
    clock.now += 1_000_000  # there is no lease that could run out
    assert lease(store, "bob") is None
    other = dataclasses.replace(BEST_FIRST, ranks=tuple(reversed(BEST_FIRST.ranks)))
    for _ in range(2):  # sent twice, stored once
        store.submit(opened, other, **HOW)
    assert [kind for _, _, kind in acts(store)] == ["answer", "answer"]
    (ranking,) = store.rankings("b")
    before, after = store.judgments("b")
    assert (ranking.ranks, sorted(after.ranks)) == (after.ranks, sorted(before.ranks))
    assert after.ranks != before.ranks
    assert lease(store, "bob") is None
    with pytest.raises(ValueError, match="differs from the stored"):  # from a page that was opened before the change
        store.submit(opened, BEST_FIRST, **HOW)


# ---- leads ----


def test_what_a_lead_adjudicates_stands_alone(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=2)
    for labeler, ranks in (("ann", (1, 2)), ("bob", (2, 1))):
        for held in store.lease_many(labeler, 2, seconds=60, batch="b"):
            store.submit(held, Answer(tuple(ranks[index] for index in held.order), 10), **HOW)
    over = store.reopened("lead", "t1")
    store.adjudicate(over, Answer(tuple((2, 1)[index] for index in over.order), 10, note="b is right"), **HOW)
    assert [(r.task_id, r.labeler, r.ranks) for r in store.rankings("b")] == [
        ("t1", "lead", (2, 1)),
        ("t2", "ann", (1, 2)),
        ("t2", "bob", (2, 1)),
    ]
    assert store.progress("b").num_judgments == 4
    again = store.reopened("lead", "t1")
    store.adjudicate(again, Answer((1, 1), 10), **HOW)
    assert store.rankings("b")[0].ranks == (1, 1)


# ---- repeats and gold ----


def test_a_repeat_goes_to_who_judged_the_original(store):
    original, repeat = make_task("t1"), make_task("t1 again", repeat_of="t1")
    store.add_tasks([original, repeat], batch="b", num_labelers=1)
    held = lease(store, "ann")
    assert lease(store, "bob") is None
    store.submit(held, BEST_FIRST, **HOW)
    assert lease(store, "bob") is None
    assert lease(store, "ann").task_id == "t1 again"


def test_a_repeat_of_nothing_is_refused(store):
    with pytest.raises(ValueError, match="'t': repeat_of is 'nothing'"):
        store.add_tasks([make_task("t", repeat_of="nothing")], batch="b", num_labelers=1)
    assert store.batches() == []


def test_gold_ranks_are_kept_and_not_shown(store):
    task = make_task("t1", gold_ranks=(2, 1), details={"file": "a.jsonl", "line": 3})
    store.add_tasks([task], batch="b", num_labelers=1)
    assert store.tasks("b")[0].task == task
    assert not hasattr(lease(store, "ann").shown, "gold_ranks")
    with pytest.raises(ValueError, match="gold_ranks has 3 entries for 2 responses"):
        make_task("t2", gold_ranks=(1, 2, 3))


# ---- from elsewhere ----


def test_a_store_written_into_another_is_the_same_store(store, new_database):
    tasks = [make_task("t1"), make_task("t2", objective="safe")]
    store.add_tasks(tasks, batch="b", num_labelers=2)
    full = Answer((1, 1), 12, ratings=(3.5, 7), flags=(("rude",), ()), note="\0é")
    store.submit(lease(store, "ann"), full, **HOW)
    store.skip(lease(store, "ann"), "unclear", 5, **HOW)
    store.submit(lease(store, "bob"), BEST_FIRST, **HOW)
    store.undo(store.reopened("bob", "t1"), "slipped", client="test")
    with LabelStore(new_database()) as other:
        for _ in range(2):
            other.add_tasks([stored.task for stored in store.tasks("b")], batch="b", num_labelers=2)
            other.import_judgments("b", store.judgments("b"))
        key = lambda judgment: (judgment.labeler, judgment.task_id, judgment.revision)  # noqa: E731
        assert sorted(other.judgments("b"), key=key) == sorted(store.judgments("b"), key=key)
        assert other.tasks("b") == store.tasks("b")
        assert other.content_hash("b") == store.content_hash("b")
        assert other.coverage("b") == store.coverage("b")


def test_imports_are_whole_or_refused(store, new_database):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    for labeler in ("ann", "bob"):
        store.submit(lease(store, labeler), BEST_FIRST, **HOW)
    found = store.judgments("b")
    with LabelStore(new_database()) as other:
        other.add_tasks([make_task("t1")], batch="b", num_labelers=1)
        with pytest.raises(ValueError, match="'bob': the task wants 1 labelers, and others have judged it already"):
            other.import_judgments("b", found)
        assert other.judgments("b") == []
        for field, value, message in (
            ("task_id", "t9", "batch 'b' has no such task"),
            ("kind", "guess", "kind is 'guess'"),
            ("ranks", (1,), "ranks has 1 entries for 2"),
            ("shown_order", (0, 0), "shown_order is"),
        ):
            with pytest.raises(ValueError, match=message):
                other.import_judgments("b", [dataclasses.replace(found[0], **{field: value})])
        with pytest.raises(ValueError, match="of kind 'skip'"):
            other.import_judgments("b", [dataclasses.replace(found[0], kind="skip")])


# ---- voiding ----


def void(store, labeler, revision, reason="the labeler was asleep", task_id="t1"):
    store.void(task_id, labeler, revision, reason, by="eve", client="test")


def test_a_voided_answer_stays_and_counts_nowhere_and_its_task_is_asked_again(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=2)
    for name in ("ann", "bob"):
        store.submit(lease(store, name), BEST_FIRST, **HOW)
    assert store.progress("b") == Progress(num_tasks=2, num_judgments=2, num_open=1)
    void(store, "ann", 0)
    void(store, "ann", 0)  # a second click
    assert acts(store) == [("ann", 0, "answer"), ("bob", 0, "answer"), ("ann", 1, "void")]
    assert store.judgments("b")[-1].note == "the labeler was asleep"
    assert store.progress("b") == Progress(num_tasks=2, num_judgments=1, num_open=2)
    assert [one.labeler for one in store.rankings("b")] == ["bob"]
    assert (store.num_current_answers("ann"), store.coverage("b")[0].judged_by) == (0, ("bob",))
    report = summary([one.task for one in store.tasks("b")], store.judgments("b"))
    assert (report.num_answers, [one.counts.num_voided for one in report.labelers]) == (1, [1, 0])
    assert report.labelers[0].counts.num_answers == 0
    assert store.batch_counts()[0].by_labeler == {"bob": 1}
    left_out = Report()
    assert [row["labeler"] for row in write_rankings(store.tasks("b"), store.judgments("b"), left_out)] == ["bob"]
    assert [(one.kind, one.found) for one in left_out.warnings] == [("void", "answer 0: the labeler was asleep")]
    assert lease(store, "cy").task_id == "t1"  # asked again, and once only
    assert lease(store, "ann").task_id == "t2"


def test_a_voided_labeler_may_judge_the_task_again(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    void(store, "ann", 0)
    store.submit(lease(store, "ann"), Answer((2, 1), 5), **HOW)
    assert acts(store) == [("ann", 0, "answer"), ("ann", 1, "void"), ("ann", 2, "answer")]
    assert store.progress("b").num_judgments == 1
    assert len(store.rankings("b")) == 1


def test_a_voided_adjudication_lets_the_answers_count_again(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    store.adjudicate(store.reopened("eve", "t1"), Answer((1, 1), 5), **HOW)
    assert [one.labeler for one in store.rankings("b")] == ["eve"]
    void(store, "eve", 0)
    assert [one.labeler for one in store.rankings("b")] == ["ann"]
    assert store.progress("b").num_judgments == 1


def test_only_a_judgment_that_counts_is_voided(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    store.undo(store.reopened("ann", "t1"), "slip", client="test")
    for arguments, message in (
        (("ann", 1), "there is no judgment to void"),
        (("ann", 0), "kind 'void' differs from the stored 'undo'"),
        (("ann", 5), "revision is 6, but only 2 are stored"),
        (("bob", 0), "labeler 'bob' is not in the store"),
        (("ann", 0, "why", "t9"), "task_id 't9' is not in the store"),
        (("ann", 0, ""), "note is empty; a reason was expected"),
    ):
        with pytest.raises(ValueError, match=message):
            void(store, *arguments)
    assert [kind for _, _, kind in acts(store)] == ["answer", "undo"]


def test_voids_survive_an_export_and_an_import(store, new_database):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    store.submit(lease(store, "ann"), BEST_FIRST, **HOW)
    void(store, "ann", 0)
    rows = list(write_heed(store.tasks("b"), store.judgments("b"), Report()))
    found = collect_all(format_to_read("heed"), [("f:1", row) for row in rows])
    with LabelStore(new_database()) as other:
        store_found(other, found, "")
        assert other.judgments("b") == store.judgments("b")
        assert other.progress("b").num_judgments == 0
        assert lease(other, "bob").task_id == "t1"
