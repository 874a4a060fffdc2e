"""The label store's guarantees in one process: order, quota, leases, idempotency, errors."""

import itertools
import sqlite3
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preferences.leases import LeaseLostError, display_order
from preferences.records import Answer, Coverage, Message, Progress, StoredTask, Task, dense_ranks
from preferences.store import LabelStore
from tests.examples import examples

HOW = {"client": "test", "instructions_version": "1"}


def make_task(name, num_responses=3):
    letters = "abcdefghi"[:num_responses]
    return Task(name, (Message("user", f"Say {name}"),), tuple(f"{name}-{x}" for x in letters), tuple(letters))


@pytest.fixture
def store(new_database, clock):
    with LabelStore(new_database(), clock=clock) as opened:
        yield opened


def answer_like(lease, canonical, milliseconds=10):
    """Returns the answer, in display order, of a labeler with these canonical ranks."""
    return Answer(tuple(canonical[index] for index in lease.order), milliseconds)


# ---- tasks ----


def test_tasks_come_out_as_they_went_in(store):
    prompt = (Message("system", "a\x00b"), Message("user", "\ufffe é😀"))
    hostile = Task("t", prompt, ("", "<b>'--"), ("base", "ppo"), "safe", details={"line": 7})
    store.add_tasks([hostile], batch="b", num_labelers=1)
    lease = store.lease("ann", seconds=60, batch="b")
    assert lease.shown.prompt == hostile.prompt
    assert sorted(lease.shown.responses) == sorted(hostile.responses)
    store.submit(lease, answer_like(lease, (2, 1)), **HOW)
    (ranking,) = store.rankings("b")
    assert (ranking.prompt, ranking.responses, ranking.ranks) == (hostile.prompt, hostile.responses, (2, 1))
    assert ranking.objective == "safe"
    assert store.tasks("b") == [StoredTask(hostile, "b", 1)]


def test_adding_again_changes_nothing(store):
    batch = [make_task("t1"), make_task("t2")]
    store.add_tasks(batch, batch="b", num_labelers=[1, 2])
    store.add_tasks(batch, batch="b", num_labelers=[1, 2])
    store.add_tasks([*batch, make_task("t3"), make_task("t3")], batch="b", num_labelers=[1, 2, 1, 1])
    assert store.coverage("b") == [Coverage("t1", 1, ()), Coverage("t2", 2, ()), Coverage("t3", 1, ())]


def test_a_taken_id_with_other_content_is_refused_by_name_and_nothing_is_added(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    changed = Task("t1", (Message("user", "Say t1"),), ("x", "y", "z"), ("a", "b", "c"))
    with pytest.raises(ValueError, match="'t1': responses"):
        store.add_tasks([make_task("t0"), changed], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match="'t1': batch is 'other'"):
        store.add_tasks([make_task("t1")], batch="other", num_labelers=1)
    with pytest.raises(ValueError, match="'t1': num_labelers is 2"):
        store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    assert store.progress("b") == Progress(num_tasks=1, num_judgments=0, num_open=1)


def test_malformed_tasks_are_refused_by_task_and_field(store):
    with pytest.raises(ValueError, match=r"'t': prompt\[0\]"):
        store.add_tasks([Task("t", (Message("robot", "x"),), ("a", "b"), ("s", "s"))], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match="'t': responses is"):
        store.add_tasks([Task("t", (Message("user", "x"),), ("a", None), ("s", "s"))], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match="'t': num_labelers is 0"):
        store.add_tasks([make_task("t")], batch="b", num_labelers=0)
    with pytest.raises(ValueError, match="2 entries for 1 tasks"):
        store.add_tasks([make_task("t")], batch="b", num_labelers=[1, 1])
    with pytest.raises(ValueError, match="'t': responses has 0 entries; 1 to 9 were expected"):
        make_task("t", num_responses=0)


# ---- leases ----


def test_a_reload_keeps_lease_and_order(store, clock):
    store.add_tasks([make_task(f"t{i}") for i in range(5)], batch="b", num_labelers=1)
    first = store.lease("ann", seconds=60, batch="b")
    clock.now += 30
    again = store.lease("ann", seconds=60, batch="b")
    assert (again.shown, again.order) == (first.shown, first.order)
    assert again.expires_at == first.expires_at + 30
    assert store.lease("bob", seconds=60, batch="b").task_id != first.task_id


def test_no_more_labelers_hold_a_task_than_are_wanted(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    ann, bob = store.lease("ann", seconds=60, batch="b"), store.lease("bob", seconds=60, batch="b")
    assert store.lease("cy", seconds=60, batch="b") is None
    store.submit(ann, Answer((1, 2, 3), 1), **HOW)
    assert store.lease("ann", seconds=60, batch="b") is None  # already judged
    assert store.lease("cy", seconds=60, batch="b") is None  # one judgment, one live lease
    store.submit(bob, Answer((1, 2, 3), 1), **HOW)
    assert store.progress("b") == Progress(num_tasks=1, num_judgments=2, num_open=0)


def test_an_expired_lease_goes_to_another_and_the_late_answer_is_refused(store, clock):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    late = store.lease("ann", seconds=60, batch="b")
    clock.now += 59
    assert store.lease("bob", seconds=60, batch="b") is None
    clock.now += 2
    taken = store.lease("bob", seconds=60, batch="b")
    assert taken.task_id == "t1"
    with pytest.raises(LeaseLostError, match="'t1', labeler 'ann'"):
        store.submit(late, Answer((1, 2, 3), 1), **HOW)
    store.submit(taken, Answer((1, 2, 3), 1), **HOW)
    assert [ranking.labeler for ranking in store.rankings("b")] == ["bob"]


def test_a_late_answer_is_taken_while_there_is_room(store, clock):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    late = store.lease("ann", seconds=60, batch="b")
    clock.now += 3_600
    store.submit(late, Answer((1, 2, 3), 1), **HOW)
    assert store.progress("b").num_open == 0


def test_lease_many_gives_held_ones_first_then_in_order_of_arrival(store):
    store.add_tasks([make_task(name) for name in ("z", "a", "m")], batch="b", num_labelers=1)
    store.add_tasks([make_task("other")], batch="c", num_labelers=1)
    assert [lease.task_id for lease in store.lease_many("ann", 1, seconds=60, batch="b")] == ["z"]
    assert [lease.task_id for lease in store.lease_many("bob", 1, seconds=60, batch="b")] == ["a"]
    assert [lease.task_id for lease in store.lease_many("ann", 9, seconds=60, batch="b")] == ["z", "m"]
    assert [lease.task_id for lease in store.lease_many("ann", 9, seconds=60, batch="c")] == ["other"]


def test_tasks_are_drawn_for_each_labeler_of_a_store(new_database, clock, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr("preferences.names.new_pseudonym", lambda: f"labeler-{next(numbers):012x}")

    def orders():
        with LabelStore(new_database(), clock=clock) as store:
            store.add_tasks([make_task(f"before{n}") for n in range(3)], batch="other", num_labelers=1)
            store.add_tasks([make_task(f"t{n:02d}") for n in range(30)], batch="b", num_labelers=2)
            found = {name: [] for name in ("ann", "bob")}
            while not all(len(own) == 30 for own in found.values()):
                for name, own in found.items():
                    first = store.lease(name, seconds=60, batch="b", is_random=True)
                    clock.now += 30 if len(own) % 2 else 61  # leased still, or run out
                    lease = store.lease(name, seconds=60, batch="b", is_random=True)
                    assert lease.task_id == first.task_id
                    own.append(lease.task_id)
                    store.submit(lease, answer_like(lease, (1, 2, 3)), **HOW)
            assert store.lease("ann", seconds=60, batch="b", is_random=True) is None
            return found

    found = orders()
    arrived = [f"t{n:02d}" for n in range(30)]
    assert sorted(found["ann"]) == sorted(found["bob"]) == arrived  # each task once
    assert found["ann"] != arrived != found["bob"] != found["ann"]
    early = sum(int(name[1:]) for name in found["ann"][:10]) / 10
    assert 8 < early < 22  # 14.5 with a standard deviation of 2.3 if drawn; 4.5 in order of arrival
    assert orders() != found  # in another store they have other pseudonyms


def test_lease_these_gives_only_what_is_open(store):
    store.add_tasks([make_task(name) for name in ("t1", "t2", "t3")], batch="b", num_labelers=1)
    store.lease_these("bob", ["t2"], seconds=60, batch="b")
    granted = store.lease_these("ann", ["t3", "t2", "t1"], seconds=60, batch="b")
    assert [lease.task_id for lease in granted] == ["t1", "t3"]


def test_leases_refuse_nonsense(store):
    with pytest.raises(ValueError, match="labeler is empty"):
        store.lease("", seconds=60, batch="b")
    with pytest.raises(ValueError, match="seconds is 0"):
        store.lease("ann", seconds=0, batch="b")
    with pytest.raises(ValueError, match="num_tasks is 0"):
        store.lease_many("ann", 0, seconds=1, batch="b")


def test_every_order_is_shown_about_equally_often():
    counts = dict.fromkeys(permutations(range(3)), 0)
    for i in range(6_000):
        counts[display_order(f"task-{i}", "ann", 3)] += 1
    assert all(850 < count < 1_150 for count in counts.values()), counts  # 1,000 plus or minus 5 deviations
    assert display_order("task-1", "ann", 9) != display_order("task-1", "bob", 9)


# ---- answers ----


@examples(40)
@given(meant=st.lists(st.integers(1, 9), min_size=2, max_size=9), labeler=st.text(min_size=1, max_size=5))
def test_ranks_are_stored_dense_in_canonical_order_ties_kept(tmp_path_factory, meant, labeler):
    with LabelStore(tmp_path_factory.mktemp("store") / "labels.db") as store:
        store.add_tasks([make_task("t", len(meant))], batch="b", num_labelers=1)
        lease = store.lease(labeler.encode("ascii", "replace").decode(), seconds=60, batch="b")
        for place, response in enumerate(lease.shown.responses):
            assert response == make_task("t", len(meant)).responses[lease.order[place]]
        store.submit(lease, answer_like(lease, meant), **HOW)
        assert store.rankings("b")[0].ranks == dense_ranks(meant)


def test_the_same_answer_again_is_accepted_once(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    lease = store.lease("ann", seconds=60, batch="b")
    store.submit(lease, Answer((1, 1, 2), 10), **HOW)
    store.submit(lease, Answer((4, 4, 9), 99), **HOW)  # the same ranking, a slower second click
    store.submit_many([lease, lease], [Answer((1, 1, 2), 10)] * 2, **HOW)
    assert store.progress("b") == Progress(num_tasks=1, num_judgments=1, num_open=1)


def test_another_answer_to_the_same_task_is_refused(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    lease = store.lease("ann", seconds=60, batch="b")
    store.submit(lease, Answer((1, 1, 2), 10), **HOW)
    for other in (Answer((2, 1, 1), 10), Answer((1, 1, 2), 10, flags=(("unclear",), (), ()))):
        with pytest.raises(ValueError, match=r"'t1', labeler 'ann': (ranks|flags) .* differs"):
            store.submit(lease, other, **HOW)
    assert store.progress("b").num_judgments == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer((1, 2), 1), "ranks has 2 entries for 3 responses"),
        (Answer((1, 2, 0), 1), "ranks contains 0"),
        (Answer((1, 2, 2.0), 1), r"ranks contains 2\.0"),
        (Answer((1, 2, True), 1), "ranks contains True"),
        (Answer((1, 2, 3), -1), "milliseconds is -1"),
        (Answer((1, 2, 3), 1, flags=((7,), (), ())), "flags is"),
    ],
)
def test_malformed_answers_are_refused_by_task_and_field(store, answer, message):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
    lease = store.lease("ann", seconds=60, batch="b")
    with pytest.raises(ValueError, match=f"'t1', labeler 'ann': {message}"):
        store.submit(lease, answer, **HOW)
    assert store.progress("b").num_judgments == 0


def test_submit_many_stores_all_or_none(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    held = store.lease_many("ann", 2, seconds=60, batch="b")
    store.submit(held[1], Answer((1, 2, 3), 1), **HOW)
    with pytest.raises(ValueError, match="'t2'"):
        store.submit_many(held, [Answer((1, 2, 3), 1), Answer((3, 2, 1), 1)], **HOW)
    assert [ranking.task_id for ranking in store.rankings("b")] == ["t2"]
    store.submit_many([], [], **HOW)
    with pytest.raises(ValueError, match="answers has 1 entries for 2 leases"):
        store.submit_many(held, [Answer((1, 2, 3), 1)], **HOW)


def test_submit_many_is_of_one_labeler(store):
    store.add_tasks([make_task("t1")], batch="b", num_labelers=2)
    held = [store.lease("ann", seconds=60, batch="b"), store.lease("bob", seconds=60, batch="b")]
    with pytest.raises(ValueError, match="'ann' and 'bob'"):
        store.submit_many(held, [Answer((1, 2, 3), 1)] * 2, **HOW)


def test_an_unknown_task_is_refused(store, new_database):
    with LabelStore(new_database()) as elsewhere:
        elsewhere.add_tasks([make_task("stranger")], batch="b", num_labelers=1)
        lease = elsewhere.lease("ann", seconds=60, batch="b")
    with pytest.raises(ValueError, match="'stranger', labeler 'ann': task_id is not in the store"):
        store.submit(lease, Answer((1, 2, 3), 1), **HOW)


# ---- what comes out, and what stays ----


def test_rankings_come_by_arrival_then_labeler(store):
    store.add_tasks([make_task("z"), make_task("a")], batch="b", num_labelers=2)
    for labeler in ("bob", "ann"):
        held = store.lease_many(labeler, 2, seconds=60, batch="b")
        store.submit_many(held, [Answer((1, 2, 3), 1)] * 2, **HOW)
    assert [(r.task_id, r.labeler) for r in store.rankings("b")] == [
        ("z", "ann"),
        ("z", "bob"),
        ("a", "ann"),
        ("a", "bob"),
    ]
    assert store.rankings("c") == []


def test_the_hash_follows_content_and_not_time(new_database):
    def hash_of(now, canonical, milliseconds, flags=()):
        with LabelStore(new_database(), clock=lambda: now) as store:
            store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
            for lease in store.lease_many("ann", 2, seconds=60, batch="b"):
                shown = answer_like(lease, canonical)
                store.submit(lease, Answer(shown.ranks, milliseconds, flags=flags), **HOW)
            return store.content_hash("b")

    first = hash_of(1_000.0, (1, 2, 3), 10)
    assert first == hash_of(9_000.0, (1, 2, 3), 77)
    assert first != hash_of(1_000.0, (1, 2, 2), 10)
    assert first != hash_of(1_000.0, (1, 2, 3), 10, flags=(("unclear",), (), ()))


def test_judgments_outlive_the_process_and_cannot_be_changed(tmp_path):
    path = tmp_path / "new" / "labels.db"
    with LabelStore(f"sqlite:///{path}") as store:
        store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
        store.submit(store.lease("ann", seconds=60, batch="b"), Answer((1, 2, 3), 1), **HOW)
    connection = sqlite3.connect(path)
    for statement in ("UPDATE judgments SET ranks = '[1,1,1]'", "DELETE FROM judgments"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
    connection.close()
    with LabelStore(path) as store:
        assert len(store.rankings("b")) == 1


def test_other_databases_are_refused():
    with pytest.raises(ValueError, match="neither SQLite nor PostgreSQL"):
        LabelStore("mysql://somewhere/labels")
    with pytest.raises(ValueError, match="in memory"):
        LabelStore("sqlite://")
