"""Usability studies in the label store: orders, stages, what is refused, and what an erasure and a backup do."""

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise

import pytest
from sqlalchemy import event

from preferences import usability
from preferences.accounts import Accounts
from preferences.backup import backup, restore
from preferences.page.config import LabelingConfig, Screening
from preferences.page.study_config import StudyConfig
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore
from preferences.usability import NO_PREFERENCE, NOT_ASKED, Condition, QuestionnaireAnswer, Study

STUDY = Study("s", (Condition("one", "b", "v1", {}), Condition("two", "b", "v2", {})), 2, 0, 0)
NAMES = ("ann", "bob", "cy", "dee")
TASKS = [Task(f"t{n}", (Message("user", f"{n}?"),), ("a", "b"), ("x", "y")) for n in range(4)]
LOAD, SUS = (50,) * 6, (3,) * 10
pytestmark = pytest.mark.usefixtures("cheap_hashes")


def filled(made, clock):
    accounts = Accounts(made, clock=clock)
    for name in NAMES:
        accounts.invite(name, "labeler")
    accounts.invite("eve", "lead")
    assert accounts.accept(accounts.invite("flo", "labeler"))
    accounts.set_state("flo", "closed", by="command line")
    accounts.close()
    with LabelStore(made, clock=clock) as store:
        store.add_tasks(TASKS, batch="b", num_labelers=4)
    return made


@pytest.fixture
def store(sqlite_tables, tmp_path, clock):
    with LabelStore(filled(str(shutil.copy(sqlite_tables, tmp_path / "labels.db")), clock), clock=clock) as opened:
        yield opened


@pytest.fixture
def url(new_database, clock):
    """In either database."""
    return filled(new_database(), clock)


@pytest.fixture
def either_store(url, clock):
    with LabelStore(url, clock=clock) as opened:
        yield opened


def start(store, study=STUDY, names=NAMES):
    with store.writing() as connection:
        return usability.start(connection, study, names, 5.0)


def stage(store, name):
    with store.reading() as connection:
        return usability.stage_of(connection, name)


def judge(store, name, version, num=1):
    for _ in range(num):
        lease = store.lease(name, seconds=60, batch="b")
        store.submit(lease, Answer((1, 2), 1), client="test", instructions_version=version)


def say(store, name, condition, preferred=NOT_ASKED, comment=""):
    with store.writing() as connection:
        said = QuestionnaireAnswer(name, condition, LOAD, SUS, preferred, comment)
        return usability.store_answer(connection, name, said, 9.0)


@pytest.mark.parametrize("num", [2, 3, 4, 5, 6, 7, 8])
def test_each_form_is_equally_often_in_each_place_and_after_each_other(num):
    square = usability.latin_square(num)
    assert len(square) == len(set(square)) == (num if num % 2 == 0 else 2 * num)
    assert all(sorted(row) == list(range(num)) for row in square)
    places = Counter((place, entry) for row in square for place, entry in enumerate(row))
    followed = Counter(pair for row in square for pair in pairwise(row))
    assert (len(places), len(set(places.values()))) == (num * num, 1)
    assert (len(followed), len(set(followed.values()))) == (num * (num - 1), 1)
    in_first = Counter((place, entry) for row in square[:num] for place, entry in enumerate(row))
    assert set(in_first.values()) == {1}  # the first n labelers are a Latin square already


def test_orders_stay_balanced_when_labelers_are_added(store):
    first = start(store, names=NAMES[:3])
    assert start(store, names=NAMES[:3]) == ()  # repeated
    added = start(store)
    assert [one.labeler for one in added] == ["dee"]
    orders = Counter(one.conditions for one in (*first, *added))
    assert orders == {(0, 1): 2, (1, 0): 2}
    with store.reading() as connection:
        assert usability.participants(connection, "s") == (*first, *added)
        assert usability.require(connection, "s") == replace(STUDY, started_at=5.0)


def test_a_labeler_goes_from_stage_to_stage(either_store):
    store = either_store
    order = {one.labeler: one.conditions for one in start(store)}["ann"]
    versions = [STUDY.conditions[index].version for index in order]
    assert (stage(store, "ann").place, stage(store, "ann").num_left) == (0, 2)
    with pytest.raises(ValueError, match="no questionnaire about this form is due"):
        say(store, "ann", order[0])
    judge(store, "ann", versions[0], 2)
    assert stage(store, "ann").num_left == 0
    store.undo(store.with_history("ann", store.history("ann", 1)[0].handle), "no", client="t")
    assert stage(store, "ann").num_left == 1
    judge(store, "ann", versions[0])
    with pytest.raises(ValueError, match="expected at the end only"):
        say(store, "ann", order[0], preferred=1)
    assert say(store, "ann", order[0])
    assert not say(store, "ann", order[0])  # sent twice
    assert (stage(store, "ann").place, stage(store, "ann").is_last, stage(store, "ann").num_left) == (1, True, 2)
    with store.reading() as connection:
        done = store.history("ann", 9)[-1].judgment.task_id
        assert usability.condition_of(connection, done, "ann").version == versions[0]
    judge(store, "ann", versions[1], 2)
    with pytest.raises(ValueError, match=r"preferred is 2; a form"):
        say(store, "ann", order[1], preferred=2)
    assert say(store, "ann", order[1], preferred=NO_PREFERENCE)
    assert stage(store, "ann") is None
    assert stage(store, "bob").place == 0
    assert stage(store, "nobody") is None


@pytest.mark.parametrize(
    ("change", "names", "message"),
    [
        ({}, ("ann", "zoe"), r"labelers: 'zoe' has no account and no link"),
        ({}, ("ann", "eve"), r"labelers: 'eve' is a lead"),
        ({}, ("ann", "flo"), r"labelers: 'flo' has a closed account"),
        ({"tasks_per_condition": 3}, ("ann", "bob"), r"batch 'b' has 4 open tasks; 6 for each labeler were expected"),
        ({"conditions": (*STUDY.conditions, Condition("c", "z", "v", {}))}, ("ann", "bob"), r"batch 'z' has no open"),
    ],
)
def test_a_study_that_cannot_work_is_refused(store, change, names, message):
    with pytest.raises(ValueError, match=message):
        start(store, replace(STUDY, **change), names)
    with store.reading() as connection:
        assert usability.studies(connection) == []


def test_a_second_study_at_the_same_time_is_refused(store):
    store.add_tasks([replace(task, task_id="c" + task.task_id) for task in TASKS], batch="c", num_labelers=1)
    start(store, names=NAMES[:2])
    with pytest.raises(ValueError, match=r"study 's' runs with other settings"):
        start(store, replace(STUDY, tasks_per_condition=1), NAMES[:2])
    with pytest.raises(ValueError, match=r"batch 'b' is used by study 's', which is running"):
        start(store, replace(STUDY, name="other"), NAMES[2:])
    elsewhere = tuple(replace(one, batch="c") for one in STUDY.conditions)
    with pytest.raises(ValueError, match=r"labelers: 'ann' is in study 's', which is running"):
        start(store, replace(STUDY, name="other", conditions=elsewhere), ("ann", "cy"))
    with pytest.raises(ValueError, match=r"batch 'c' wants 4 answers; 8 were expected, 4 for each of 2 labelers"):
        start(store, replace(STUDY, name="other", conditions=elsewhere), NAMES[2:])
    with store.writing() as connection:
        usability.stop(connection, "s", 7.0)
        assert usability.batches_in_studies(connection) == set()
        with pytest.raises(ValueError, match=r"study 'z' is not in the store; it has 's'"):
            usability.stop(connection, "z", 7.0)
    assert stage(store, "ann") is None
    with pytest.raises(ValueError, match=r"study 's' was stopped; another name"):
        start(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": (50,) * 5}, r"6 numbers from 0 to 100"),
        ({"sus": (6,) * 10}, r"10 numbers from 1 to 5"),
        ({"comment": "x" * 4_001}, r"comment has 4,001 characters"),
        ({"comment": "\ud800"}, r"half of a surrogate pair"),
    ],
)
def test_malformed_answers_are_refused(store, change, message):
    order = {one.labeler: one.conditions for one in start(store)}["ann"]
    judge(store, "ann", STUDY.conditions[order[0]].version, 2)
    said = replace(QuestionnaireAnswer("ann", order[0], LOAD, SUS), **change)
    with pytest.raises(ValueError, match=message), store.writing() as connection:
        usability.store_answer(connection, "ann", said, 9.0)


def test_an_erasure_keeps_ratings_and_empties_comments(url, either_store, clock, tmp_path):
    store = either_store
    order = {one.labeler: one.conditions for one in start(store)}["ann"]
    judge(store, "ann", STUDY.conditions[order[0]].version, 2)
    say(store, "ann", order[0], comment="Ann says: too long")
    backup(url, tmp_path / "backup.sqlite")
    accounts = Accounts(url, clock=clock)
    held = accounts.held_about("ann", by="command line")
    assert held["usability_studies"] == [{"study": "s", "conditions": [STUDY.conditions[i].name for i in order]}]
    (answer,) = held["questionnaires"]
    assert (answer["comment"], answer["study"], answer["load"]) == ("Ann says: too long", "s", LOAD)
    pseudonym = accounts.erase("ann", by="command line")
    with store.reading() as connection:
        (kept,) = usability.answers(connection, "s")
        assert (kept.labeler, kept.load, kept.sus, kept.comment) == (pseudonym, LOAD, SUS, "")
        assert pseudonym in {one.labeler for one in usability.participants(connection, "s")}
    restore(tmp_path / "backup.sqlite", tmp_path / "again.sqlite", current=url)
    with LabelStore(tmp_path / "again.sqlite") as again, again.reading() as connection:
        assert usability.answers(connection, "s") == (kept,)
        assert len(usability.participants(connection, "s")) == 4
    accounts.close()


def load(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return StudyConfig.load(path)


HEAD = 'name = "s"\nlabelers = ["ann", "bob"]\n'
PAIR = '[[conditions]]\nname = "one"\nbatch = "b"\n[[conditions]]\nname = "two"\nbatch = "b"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, r"conditions: this key is missing"),
        (HEAD + "tasks_per_condition = 2\npractice_tasks = 2\n" + PAIR, r"practice_tasks is 2; fewer than"),
        (HEAD.replace("bob", "ann") + PAIR, r"labelers: 'ann' is named twice"),
        (HEAD + PAIR.replace("two", "one"), r"conditions: 'one' is named twice"),
        (HEAD + PAIR + "asks_rating = true\n", r"conditions\.1\.asks_rating: unknown key; did you mean asks_ratings"),
        (HEAD + PAIR + 'criteria = [{ name = "" }]\n', r"conditions\.1\.criteria\.0\.name"),
        ("name =", r"study\.toml: Invalid value"),
    ],
)
def test_mistakes_in_a_study_file_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as refused:
        load(tmp_path, text)
    assert "study.toml" in str(refused.value)


def test_a_condition_takes_over_what_it_leaves_out(tmp_path):
    base = LabelingConfig(instructions="As always.", flags=("rude",), asks_ratings=False)
    asked = load(tmp_path, HEAD + PAIR + "asks_edits = true\nflags = []\n")
    study, forms = asked.study(base)
    assert [form.instructions for form in forms] == ["As always."] * 2
    assert [(form.flags, form.asks_edits, form.asks_ratings) for form in forms] == [
        (("rude",), False, False), ((), True, False)
    ]  # fmt: skip
    assert [one.version for one in study.conditions] == [form.version for form in forms]
    assert base.with_form(study.conditions[1].form).version == forms[1].version
    screened = base.model_copy(update={"screening": Screening(batch="b")})
    with pytest.raises(ValueError, match=r"conditions\.0\.batch: 'b' is the screening batch"):
        asked.study(screened)
    assert "screening batch, 'b', is in a running usability study" in screened.warning(["b"], {"b"}, [])
    assert (screened.warning(["b"], {"c"}, []), base.warning(["b"], {"b"}, [])) == ("", "")
    assert "Tasks of 'a' have one response" in base.model_copy(update={"flags": ()}).warning(["a", "b"], set(), ["a"])
    with pytest.raises(ValueError, match=r"conditions\.1: 'two' has the form and the batch of 'one'"):
        load(tmp_path, HEAD + PAIR).study(base)


def test_a_questionnaire_that_is_sent_twice_at_once_is_stored_once(either_store):
    start(either_store)
    now = stage(either_store, "ann")
    judge(either_store, "ann", now.condition.version, 2)
    first = now.conditions[0]
    with ThreadPoolExecutor() as pool:
        with either_store.writing() as connection:
            said = QuestionnaireAnswer("ann", first, LOAD, SUS)
            stored = usability.store_answer(connection, "ann", said, 9.0)
            second = pool.submit(say, either_store, "ann", first)
            wait([second], timeout=0.3)  # it waits for this transaction, or it has not begun
        assert (stored, second.result()) == (True, False)


def test_answers_in_an_earlier_study_are_none_in_this_one(store):
    start(store)
    for place, condition in enumerate(stage(store, "ann").conditions):
        judge(store, "ann", STUDY.conditions[condition].version, 2)
        assert say(store, "ann", condition, NO_PREFERENCE if place else NOT_ASKED)
    with store.writing() as connection:
        usability.stop(connection, "s", 7.0)
    store.add_tasks([replace(one, task_id=f"again {one.task_id}") for one in TASKS], batch="c", num_labelers=4)
    start(store, replace(STUDY, name="next", conditions=tuple(replace(one, batch="c") for one in STUDY.conditions)))
    for condition in (0, 1):
        with pytest.raises(ValueError, match="no questionnaire about this form is due"):
            say(store, "ann", condition)


def test_answers_with_the_same_form_before_the_study_do_not_count(store, clock):
    judge(store, "ann", "v1")
    judge(store, "ann", "v2")
    clock.now += 60
    with store.writing() as connection:
        usability.start(connection, replace(STUDY, tasks_per_condition=1), NAMES, clock.now)
    assert stage(store, "ann").num_answered == 0
    judge(store, "ann", stage(store, "ann").condition.version)
    assert stage(store, "ann").num_answered == 1


def test_an_undo_and_a_void_have_the_version_of_the_form_that_was_judged_with(store):
    start(store)
    judge(store, "ann", "v1", 2)
    first, second = (store.reopened("ann", f"t{number}") for number in range(2))
    store.undo(first, "slipped", client="test")
    store.void(second.task_id, "ann", 0, "asleep", by="eve", client="test")
    store.skip(store.lease("bob", seconds=60, batch="b"), "hard", 1, client="test", instructions_version="v2")
    store.undo(store.reopened("bob", "t0"), "not so hard", client="test")
    last = [(one.kind, one.instructions_version) for one in store.judgments("b") if one.revision == 1]
    assert last == [("undo", "v1"), ("void", "v1"), ("undo", "v2")]


def test_two_starts_of_one_study_at_once_start_it_once(either_store):
    """The second waits for the first, and then has nothing to add. PostgreSQL has several writers."""
    store = either_store
    with ThreadPoolExecutor() as pool:
        with store.writing() as connection:
            added = usability.start(connection, STUDY, NAMES, 5.0)
            second = pool.submit(start, store)
            wait([second], timeout=0.3)  # it waits for this transaction, or it has not begun
        assert (len(added), second.result()) == (4, ())
    with store.reading() as connection:
        assert usability.participants(connection, "s") == added


def test_a_labeler_who_skips_every_task_of_a_form_rates_it(store):
    store.add_tasks([replace(one, task_id=f"c {one.task_id}") for one in TASKS[:2]], batch="c", num_labelers=4)
    conditions = (replace(STUDY.conditions[0], batch="c"), STUDY.conditions[1])
    start(store, replace(STUDY, conditions=conditions), names=("ann", "bob"))
    now = stage(store, "ann")
    while lease := store.lease("ann", seconds=60, batch=now.condition.batch):
        store.skip(lease, "hard", 1, client="test", instructions_version=now.condition.version)
    assert (stage(store, "ann").num_answered, stage(store, "ann").num_left) == (0, 2)
    assert say(store, "ann", now.conditions[0])
    assert stage(store, "ann").place == 1


def test_the_form_of_a_task_comes_from_the_study_that_runs(store):
    start(store)
    assert form_of(store, "t0", "bob") == stage(store, "bob").condition
    with store.writing() as connection:
        usability.stop(connection, "s", 7.0)
    assert (form_of(store, "t0", "bob"), form_of(store, "t0", "eve")) == (None, None)
    later = replace(STUDY, name="later", conditions=tuple(replace(one, version=f"l{one.version}") for one in
                                                          STUDY.conditions))  # fmt: skip
    with store.writing() as connection:
        usability.start(connection, later, NAMES, 8.0)
    assert form_of(store, "t0", "eve").version == "lv1"


def form_of(store, task_id, name):
    with store.reading() as connection:
        return usability.condition_of(connection, task_id, name)


def test_a_lease_looks_up_its_tasks_study_in_one_query_that_reads_no_other_study(store):
    start(store)
    store.add_tasks([replace(TASKS[0], task_id="ordinary")], batch="other", num_labelers=1)
    asked = []
    with store.reading() as connection:
        event.listen(store._reader, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
        assert usability.condition_of(connection, "ordinary", "ann") is None
        ((statement, values),) = list(asked)
        plan = [row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)]
    assert not [step for step in plan if step.startswith("SCAN")], plan
