"""What leads change after tasks were added: overlap, closed batches, archived tasks, tags, quotas; and the queue."""

import random
from dataclasses import replace

import pytest

from files.rows import read_source
from preferences import adjudication, assignment, organizing, search
from preferences.accounts import Accounts
from preferences.adjudication import Threshold
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.registry import format_to_read, format_to_write
from preferences.leases import LeaseLostError
from preferences.names import known_pseudonym
from preferences.rankings import disagreement
from preferences.records import Answer, Message, Task
from preferences.search import Search
from preferences.store import LabelStore

HOW = {"client": "test", "instructions_version": "1"}
BY = {"by": "eve", "now": 1.0}


def make_task(name, **fields):
    return Task(
        name,
        (Message("user", f"Say {name}"),),
        tuple(f"{fields.get('repeat_of', name)} {which}" for which in ("one", "two", "three")),
        ("x", "y", "z"),
        **fields,
    )


@pytest.fixture
def url(new_database):
    return new_database()


@pytest.fixture
def store(url, clock):
    with LabelStore(url, clock=clock) as opened:
        yield opened


def resize(store, number, *task_ids):
    with store.writing() as connection:
        organizing.set_num_labelers(connection, organizing.positions_of(connection, task_ids), number, **BY)


def say(store, name, ranks=(1, 2, 3), batch="b", **how):
    """Leases a labeler's next task and answers it with these canonical ranks. Returns the lease, or None."""
    lease = store.lease(name, seconds=60, batch=batch, **how)
    if lease is not None:
        store.submit(lease, Answer(tuple(ranks[index] for index in lease.order), 5_000), **HOW)
    return lease


def num_leased(store):
    (counts,) = store.batch_counts()
    return counts.num_leased


# ---- overlap ----


def test_more_labelers_are_wanted(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    assert [say(store, "ann").task_id for _ in "12"] == ["t1", "t2"]
    assert store.lease("bob", seconds=60, batch="b") is None
    resize(store, 3, "t1")
    assert [one.num_labelers for one in store.tasks("b")] == [3, 1]
    assert say(store, "bob").task_id == "t1"
    assert say(store, "cem").task_id == "t1"
    assert store.lease("dia", seconds=60, batch="b") is None
    (counts,) = store.batch_counts()
    assert (counts.num_wanted, counts.num_judgments, counts.num_open) == (4, 4, 0)
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)  # repeating the import is no change
    assert [one.num_labelers for one in store.tasks("b")] == [3, 1]


def test_hidden_repeats_are_archived_with_their_originals(store):
    store.add_tasks([make_task("t1"), make_task("r1", repeat_of="t1"), make_task("t2")], batch="b", num_labelers=1)
    for is_archived, num_open in ((True, 1), (False, 3)):
        with store.writing() as connection:
            organizing.set_archived(
                connection, organizing.positions_of(connection, ["t1"]), is_archived=is_archived, **BY
            )
        assert store.progress("b").num_open == num_open


def test_tasks_are_added_again_with_the_old_or_the_new_number(store, tmp_path):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=2)
    say(store, "ann")
    resize(store, 3, "t1")
    export(store, format_to_write("heed"), tmp_path / "all.jsonl")  # says 3 and 2
    path = str(tmp_path / "all.jsonl")
    found = collect_all(format_to_read("heed"), read_source(path))
    store_found(store, found, "")
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=2)
    assert [task.num_labelers for task in store.tasks("b")] == [3, 2]
    with pytest.raises(ValueError, match="num_labelers is 3, but the store has 2"):
        store.add_tasks([make_task("t2")], batch="b", num_labelers=3)


def test_fewer_labelers_are_wanted_and_nobody_loses_work(store, clock):
    store.add_tasks([make_task("t")], batch="b", num_labelers=3)
    say(store, "ann")
    bob = store.lease("bob", seconds=60, batch="b")
    resize(store, 1, "t")
    assert store.lease("cem", seconds=60, batch="b") is None
    assert store.progress("b").num_open == 0
    assert store.lease("bob", seconds=60, batch="b").task_id == "t"  # what is on screen may be finished
    clock.now += 100  # even late, since nobody else can have taken it
    assert store.lease("cem", seconds=60, batch="b") is None
    store.submit(bob, Answer((1, 2, 3), 1), **HOW)
    assert {one.labeler for one in store.judgments("b")} == {"ann", "bob"}
    assert [one.num_labelers for one in store.tasks("b")] == [2]  # an export can be imported again
    store.void("t", "ann", 0, "a script", by="eve", client="test")
    assert store.lease("cem", seconds=60, batch="b") is None  # one is wanted, and one counts
    resize(store, 2, "t")
    assert say(store, "cem").task_id == "t"
    assert store.lease("dia", seconds=60, batch="b") is None


def test_a_late_answer_is_too_late_if_others_took_what_is_wanted(store, clock):
    store.add_tasks([make_task("t")], batch="b", num_labelers=2)
    ann = store.lease("ann", seconds=60, batch="b")
    clock.now += 100
    resize(store, 1, "t")
    assert say(store, "bob").task_id == "t"
    with pytest.raises(LeaseLostError):
        store.submit(ann, Answer((1, 2, 3), 1), **HOW)
    assert num_leased(store) == 0


def test_never_more_leases_than_wanted(store, clock):
    """Random changes and labelers: no lease is granted above what is wanted."""
    draw = random.Random(0)
    store.add_tasks([make_task("t")], batch="b", num_labelers=2)
    wanted = 2
    for step in range(60):
        name = f"p{draw.randrange(8)}"
        (before,) = store.batch_counts()
        action = draw.choice(["lease", "lease", "say", "resize", "late"])
        if action == "resize":
            wanted = draw.randint(1, 5)
            resize(store, wanted, "t")
        elif action == "late":
            clock.now += 61
        elif action == "say":
            say(store, name)
        else:
            store.lease(name, seconds=60, batch="b")
        (after,) = store.batch_counts()
        if after.num_leased + after.num_judgments > before.num_leased + before.num_judgments:
            assert after.num_leased + after.num_judgments <= wanted, (step, action)
        assert after.num_wanted >= after.num_judgments
    assert [one.num_labelers for one in store.tasks("b")] == [max(wanted, store.progress("b").num_judgments)]


# ---- closing and archiving ----


def test_a_closed_batch_gives_no_new_tasks(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    store.add_tasks([make_task("u")], batch="other", num_labelers=1)
    ann = store.lease("ann", seconds=60, batch="b")
    with store.writing() as connection:
        organizing.set_closed(connection, "b", is_closed=True, **BY)
    assert store.lease("bob", seconds=60, batch="b") is None
    assert store.num_left("bob", "b", limit=9) == 0
    assert store.lease("bob", seconds=60, batch="other").task_id == "u"
    assert store.lease("ann", seconds=60, batch="b").task_id == ann.task_id
    store.submit(ann, Answer((1, 2, 3), 1), **HOW)
    assert store.lease("ann", seconds=60, batch="b") is None
    with store.reading() as connection:
        who = known_pseudonym(connection, "ann")
        assert assignment.why_nothing(connection, who, ["b"], 1_000.0) == "batches closed"
    with store.writing() as connection:
        organizing.set_closed(connection, "b", is_closed=False, **BY)
    assert store.lease("bob", seconds=60, batch="b").task_id == "t2"
    with pytest.raises(ValueError, match="batch 'x' is not in the store"), store.writing() as connection:
        organizing.set_closed(connection, "x", is_closed=True, **BY)


def test_archived_tasks_are_given_to_nobody_and_are_no_work_left(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=2)
    say(store, "ann")
    with store.writing() as connection:
        organizing.set_archived(connection, organizing.positions_of(connection, ["t1"]), is_archived=True, **BY)
    assert say(store, "bob").task_id == "t2"
    assert store.lease("bob", seconds=60, batch="b") is None
    (counts,) = store.batch_counts()
    assert (counts.num_tasks, counts.num_wanted, counts.num_judgments) == (1, 2, 1)
    assert len(store.judgments("b")) == 2  # answers stay
    with store.writing() as connection:
        organizing.set_archived(connection, organizing.positions_of(connection, ["t1"]), is_archived=False, **BY)
    assert store.lease("bob", seconds=60, batch="b").task_id == "t1"


def test_every_change_is_in_the_audit_log(store, url, clock):
    accounts = Accounts(url, clock=clock)
    accounts.accept(accounts.invite("ann", "labeler"))
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    resize(store, 2, "t1", "t2")
    with store.writing() as connection:
        organizing.set_closed(connection, "b", is_closed=True, **BY)
        organizing.set_required(connection, "b", ["German", "law"], **BY)
        organizing.set_archived(connection, organizing.positions_of(connection, ["t2"]), is_archived=True, **BY)
    accounts.set_assignment("ann", ["Law", "law"], 9, by="eve")
    logged = [(event.actor, f"{event.action} {event.subject}") for event in accounts.audit_log()[:5]]
    assert logged == [
        ("eve", "set tags to law and 9 answers per day for ann"),
        ("eve", "archived task 't2'"),
        ("eve", "set the required tags to german, law for b"),
        ("eve", "closed the batch b"),
        ("eve", "set the labelers per task to 2 for 2 tasks of b"),
    ]
    assert accounts.account("ann").tags == ("law",)
    for tags, quota, wrong in ((["a,b"], 0, "is not a tag"), ([""], 0, "is not a tag"), ([], -1, "daily_quota is -1")):
        with pytest.raises(ValueError, match=wrong):
            accounts.set_assignment("ann", tags, quota)
    with pytest.raises(ValueError, match="'bo' has no account"):
        accounts.set_assignment("bo", [], 0)
    accounts.close()


# ---- tags ----


@pytest.mark.parametrize("is_random", [False, True])
def test_tasks_go_to_people_with_the_tags(store, is_random):
    german = [make_task(f"g{number}", details={"requires": ["German"]}) for number in range(3)]
    both = make_task("both", details={"requires": ["law", "german"]})
    store.add_tasks([*german, both, make_task("any")], batch="b", num_labelers=1)
    how = {"is_random": is_random}

    def all_of(name, **more):
        found = []
        while (lease := say(store, name, **how, **more)) is not None:
            found.append(lease.task_id)
        return sorted(found)

    assert store.num_left("ann", "b", limit=9) == 1
    assert store.num_left("ann", "b", limit=9, tags=("german",)) == 4
    assert all_of("ann") == ["any"]
    with store.reading() as connection:
        who = known_pseudonym(connection, "ann")
        assert assignment.why_nothing(connection, who, ["b"], 1_000.0) == "no fitting task"
    assert all_of("bob", tags=("german", "chess")) == ["g0", "g1", "g2"]
    assert all_of("cem", tags=("german", "law")) == ["both"]
    with store.reading() as connection:
        assert assignment.why_nothing(connection, who, ["b"], 1_000.0) == "nothing open"


def test_requirements_of_batches_and_of_tasks_can_be_changed(store):
    store.add_tasks([make_task("t1"), make_task("t2")], batch="b", num_labelers=1)
    with store.writing() as connection:
        organizing.set_required(connection, "b", ["Law"], **BY)
        organizing.set_required_of_tasks(connection, organizing.positions_of(connection, ["t1"]), ["dutch"], **BY)
    assert store.lease("ann", seconds=60, batch="b", tags=("dutch",)) is None
    assert store.lease("ann", seconds=60, batch="b", tags=("law",)).task_id == "t2"
    assert store.lease("bob", seconds=60, batch="b", tags=("dutch", "law")).task_id == "t1"
    with pytest.raises(ValueError, match=r"task 't3': details.requires is 'law'; a list of tags was expected"):
        store.add_tasks([make_task("t3", details={"requires": "law"})], batch="b", num_labelers=1)


def test_answers_of_the_day_are_counted(store, clock):
    clock.now = 86_400 * 10 + 5.0
    store.add_tasks([make_task(f"t{number}") for number in range(4)], batch="b", num_labelers=1)
    for _ in range(2):
        say(store, "ann")
    lease = store.reopened("ann", "t0")
    store.undo(lease, "taken back", client="test")
    say(store, "ann")  # t0 again
    with store.reading() as connection:
        who = known_pseudonym(connection, "ann")
        assert assignment.num_answered_today(connection, who, clock.now) == 2
        assert assignment.num_answered_today(connection, who, clock.now + 86_400) == 0


# ---- agreement and the queue ----


def test_disagreement_by_hand():
    assert disagreement([]) == disagreement([(1, 2)]) == disagreement([(1, 2, 3)] * 3) == 0
    assert disagreement([(1, 2, 3), (3, 2, 1)]) == 1
    assert disagreement([(1, 1), (1, 2)]) == 0.25
    # pairs (1,2), (1,3), (2,3): one of three is reversed
    assert disagreement([(1, 2, 3), (2, 1, 3)]) == pytest.approx(1 / 3)
    # three labelers, of whom one reverses everything: two of three pairs of labelers disagree wholly
    assert disagreement([(1, 2), (1, 2), (2, 1)]) == pytest.approx(2 / 3)


def test_the_queue_is_ordered_by_the_stored_disagreement(store):
    names = [f"t{number}" for number in range(6)]
    store.add_tasks([make_task(name) for name in names], batch="b", num_labelers=3)
    rankings = [(1, 2, 3), (3, 2, 1), (1, 1, 2), (2, 1, 3), (1, 2, 2)]
    for turn, name in enumerate(("ann", "bob", "cem")):
        for number in range(6):
            say(store, name, rankings[(number * (turn + 1)) % 5])
    given = {}
    for judgment in store.judgments("b"):
        given.setdefault(judgment.task_id, []).append(judgment.ranks)
    expected = {name: found for name, ranks in given.items() if (found := disagreement(ranks))}
    with store.reading() as connection:
        found = adjudication.queued(connection, Threshold("b", 0.0), start=0, limit=9)
        assert {one.task_id: one.disagreement for one in found} == pytest.approx(expected)
        assert [one.disagreement for one in found] == sorted((one.disagreement for one in found), reverse=True)


def test_the_queue(store):
    gold = make_task("gold", gold_ranks=(1, 2, 3))
    names = ["agree", "third", "opposite", "waits"]
    store.add_tasks([make_task(name) for name in names] + [gold], batch="b", num_labelers=2)
    said = {"agree": (1, 2, 3), "third": (2, 1, 3), "opposite": (3, 2, 1), "waits": (3, 2, 1), "gold": (3, 2, 1)}
    for _ in range(5):
        say(store, "ann")
    for name in ("agree", "third", "opposite"):
        assert say(store, "bob", said[name]).task_id == name
    bob = store.lease_these("bob", ["gold"], seconds=60, batch="b")[0]
    store.submit(bob, Answer(tuple((3, 2, 1)[index] for index in bob.order), 1), **HOW)

    def queue(**how):
        with store.reading() as connection:
            return [one.task_id for one in adjudication.queued(connection, Threshold(**how), start=0, limit=9)]

    assert queue() == queue(batch="b") == ["opposite", "third"]
    assert queue(min_disagreement=0.5) == ["opposite"]
    assert queue(min_disagreement=1.0, fewer_than=2) == ["opposite", "third"]  # they give one ranking each
    assert queue(fewer_than=3) == ["opposite", "third", "agree"]
    assert queue(batch="other") == []
    with store.reading() as connection:
        for is_next, expected in ((True, ["third", "", "opposite"]), (False, ["", "opposite", ""])):
            shown = [
                adjudication.neighbour(connection, Threshold(), name, is_next=is_next)
                for name in ("opposite", "third", "unknown")
            ]
            assert shown == expected
    store.adjudicate(store.reopened("eve", "opposite"), Answer((1, 2, 3), 1), **HOW)
    assert queue() == ["third"]
    with store.reading() as connection:  # one that has left the queue still has its place in it
        assert adjudication.neighbour(connection, Threshold(), "opposite", is_next=True) == "third"
        assert adjudication.num_queued(connection, Threshold()) == 1
    store.undo(store.reopened("eve", "opposite"), "taken back", client="test")
    assert queue() == ["opposite", "third"]


# ---- search ----


def test_tasks_are_found_by_words_and_by_what_they_are(store):
    dogs = make_task("dogs")
    tasks = [
        Task("street", (Message("user", "Straße é\x00x"),), ("a", "b"), ("x", "y")),
        replace(dogs, task_id="cats and dogs", prompt=(Message("user", "Say cats and dogs"),), gold_ranks=(1, 2, 3)),
        replace(dogs, repeat_of="cats and dogs"),
    ]
    store.add_tasks(tasks, batch="b", num_labelers=1)
    store.add_tasks([make_task("catalogue 100%")], batch="c", num_labelers=1)

    def found(**how):
        with store.reading() as connection:
            return [one.task_id for one in search.find_tasks(connection, Search(**how), after=0, limit=9)]

    assert found(words="DOGS") == ["cats and dogs", "dogs"]
    assert found(words="cat") == ["cats and dogs", "catalogue 100%"]
    assert found(words="dogs cats") == ["cats and dogs"]
    assert found(words="three dogs", batch="b") == ["cats and dogs", "dogs"]  # "three" is in a response
    assert found(words="straße") == ["street"]
    assert found(words='"; DROP & | ! ( ') == found(words="'--") == []
    assert found(words="cat", batch="c") == ["catalogue 100%"]
    assert found(sort="gold") == ["cats and dogs"]
    assert found(sort="repeat") == ["dogs"]
    assert found(sort="ordinary", batch="c") == ["catalogue 100%"]
    say(store, "ann", batch="c")
    assert found(state="done") == ["catalogue 100%"]
    assert len(found(state="open")) == 3
    with store.writing() as connection:
        organizing.set_archived(connection, organizing.positions_of(connection, ["dogs"]), is_archived=True, **BY)
    assert found(state="archived") == ["dogs"]
    assert found(words="dogs", state="open") == ["cats and dogs"]


def test_answers_are_found_by_who_when_and_what(store, clock):
    store.add_tasks([make_task(f"t{number}") for number in range(4)], batch="b", num_labelers=2)
    first = store.lease("ann", seconds=60, batch="b")
    store.submit(first, Answer((1, 2, 3), 1, flags=(("too rude",), (), ()), note="Übung 100%_sure"), **HOW)
    clock.now += 86_400
    second = store.lease("ann", seconds=60, batch="b")
    store.skip(second, "not my field", 1, **HOW)
    say(store, "bob")

    def found(**how):
        with store.reading() as connection:
            events = search.find_answers(connection, Search(**how), before=0, limit=9)
            return [(event.labeler, event.task_id, event.kind) for _, event in events]

    ann, skip, bob = ("ann", "t0", "answer"), ("ann", "t1", "skip"), ("bob", "t0", "answer")
    assert found(labeler="ann") == [skip, ann]
    assert found(kind="answer") == [bob, ann]
    assert found(mark="too rude") == [ann]
    assert found(mark="rude") == []
    assert found(note="My FIELD") == [skip]
    assert found(note="Übung 100%_") == [ann]
    assert found(note="100_") == []
    assert found(since=clock.now) == [bob, skip]
    assert found(until=clock.now, labeler="ann") == [ann]
    assert found(labeler="ann", words="t1") == [skip]
    assert found(labeler="nobody") == []
    with store.reading() as connection:
        assert len(search.find_positions(connection, Search(labeler="ann"), limit=9)) == 2
        ((number, _),) = search.find_answers(connection, Search(labeler="ann"), before=0, limit=1)
        assert search.find_answers(connection, Search(labeler="ann"), before=number, limit=9)[0][1].task_id == "t0"


def test_disagreement_is_searched_and_pages_follow(store):
    store.add_tasks([make_task(f"t{number}") for number in range(5)], batch="b", num_labelers=2)
    for _ in range(5):
        say(store, "ann")
    for number in range(5):
        say(store, "bob", (3, 2, 1) if number % 2 else (1, 2, 3))
    with store.reading() as connection:
        found = search.find_tasks(connection, Search(min_disagreement=0.5), after=0, limit=1)
        more = search.find_tasks(connection, Search(min_disagreement=0.5), after=found[0].position, limit=9)
    assert [one.task_id for one in (*found, *more)] == ["t1", "t3"]
    assert (found[0].num_answers, found[0].num_wanted, found[0].disagreement) == (2, 2, 1.0)
