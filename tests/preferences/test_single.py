"""Tasks with one response, which labelers rate and mark alone: in the store, in statistics, and in every format."""

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from dpo.config import DPOConfig
from dpo.losses import labels_of
from files.rows import read_source
from preferences import adjudication, recording
from preferences.adjudication import Threshold
from preferences.annotations import Annotations, CriterionRatings, TurnRating
from preferences.formats.annotated import by_criterion
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.parts import Report
from preferences.formats.registry import format_to_read, format_to_write, sniff
from preferences.page.config import Screening
from preferences.page.service import screened
from preferences.rankings import disagreement_alone, said_alone
from preferences.records import Answer, Message, Task
from preferences.rows import task_row
from preferences.statistics.summary import summary
from preferences.store import LabelStore
from reward.prepared import read_judgments
from tests.rows import jsonl

HOW = {"client": "test", "instructions_version": "1"}
PROMPT = (Message("user", "Why?"), Message("assistant", "Who asks?"), Message("user", "I do."))
RIGHT = ("fine", 7.0, 1.0, ())
WRONG = ("wrong", 2.0, 0.0, ("rude",))


@pytest.fixture
def store(sqlite_tables, tmp_path):
    with LabelStore(shutil.copy(sqlite_tables, tmp_path / "labels.db")) as opened:
        yield opened


def task(name, response="So.", **fields):
    return Task(name, PROMPT, (response,), ("x",), **fields)


def say(store, labeler, task_id, said):
    """One of RIGHT and WRONG: a note, a rating from 1 to 7, yes or no, marks; the earlier turn is rated like it."""
    note, rating, is_right, flags = said
    (lease,) = store.lease_these(labeler, [task_id], seconds=60, batch="b")
    annotations = Annotations((CriterionRatings("right", (is_right,)),), turns=(TurnRating(1, "right", is_right),))
    store.submit(lease, Answer((1,), 9, (rating,), (flags,) if flags else (), note, annotations), **HOW)


@pytest.fixture
def judged(store):
    """Two labelers agree on three responses to one prompt, and disagree on a fourth, which is mine to adjudicate."""
    store.add_tasks([task(f"t{n}", f"So {n}.") for n in range(4)], batch="b", num_labelers=2)
    for name in ("ann", "bob"):
        for number, said in enumerate((RIGHT, WRONG, RIGHT)):
            say(store, name, f"t{number}", said)
    say(store, "ann", "t3", RIGHT)
    say(store, "bob", "t3", WRONG)
    return store


def rows_of(store, name, criterion=""):
    form, report = format_to_write(name), Report()
    stored, judgments = store.tasks("b"), store.judgments("b")
    if criterion:
        stored, judgments = by_criterion(form, stored, judgments, criterion, report)
    return list(form.write(stored, judgments, report)), report.counts()


# ---- in the store ----


def test_a_batch_has_single_responses_or_rankings(store, tmp_path):
    store.add_tasks([task("t1")], batch="alone", num_labelers=1)
    pair = replace(task("t2"), responses=("a", "b"), sources=("x", "y"))
    with pytest.raises(ValueError, match=r"'t2': responses has 2 entries, but the tasks of batch 'alone' have single"):
        store.add_tasks([pair], batch="alone", num_labelers=1)
    with pytest.raises(ValueError, match=r"'t3': responses has 1 entry, but the tasks of batch 'new' have several"):
        store.add_tasks([pair, task("t3")], batch="new", num_labelers=1)
    path = tmp_path / "tasks.jsonl"
    asked = [{"role": "user", "content": "Why?"}]
    rows = [{"task_id": name, "prompt": asked, "responses": list(texts)} for name, texts in (("p", "ab"), ("q", "a"))]
    path.write_text(jsonl(rows))
    found = collect_all(format_to_read("heed"), read_source(str(path)))
    with pytest.raises(ValueError, match=rf"{path}: line 2: task 'q': responses has 1 entry, but the tasks of batch"):
        store_found(store, found, "c")


def test_two_programs_that_begin_a_batch_at_once_cannot_mix_it(new_database):
    url = new_database()
    with LabelStore(url) as one, LabelStore(url) as other, ThreadPoolExecutor(1) as thread:
        with one.writing() as connection:
            recording.add_tasks(connection, [task_row(task("t1"), "b", 1)])
            pair = replace(task("t2"), responses=("a", "b"), sources=("x", "y"))
            late = thread.submit(other.add_tasks, [pair], batch="b", num_labelers=1)
            wait([late], timeout=0.2)  # it reads the batch before the first task is committed
        with pytest.raises(ValueError, match="'t2': responses has 2 entries, but the tasks of batch 'b' have single"):
            late.result()
        assert [stored.task.task_id for stored in one.tasks("b")] == ["t1"]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ({"criteria": {}}, "a right rating or marks were expected"),
        ({}, "a right answer|such as"),
        ({"rated": 1}, "such as"),
        ({"rating": "good"}, r"details\.gold: rating is 'good'; a rating, or the lowest and the highest"),
        ({"criteria": {"right": [2, 1]}}, r"details\.gold: right is \[2, 1\]"),
        ({"criteria": ["right"]}, "ratings by criterion were expected"),
        ({"flags": "rude"}, "a list of marks was expected"),
    ],
)
def test_a_gold_task_that_does_not_say_what_is_right_is_refused(store, gold, message):
    with pytest.raises(ValueError, match=f"'t1': .*({message})"):
        store.add_tasks([task("t1", gold_ranks=(1,), details={"gold": gold})], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match=r"'t1': details\.gold .*gold_ranks is empty; \[1\] was expected"):
        store.add_tasks([task("t1", details={"gold": {"rating": 1}})], batch="b", num_labelers=1)


def test_the_queue_has_the_responses_that_labelers_judge_differently(judged):
    with judged.reading() as connection:
        queue = adjudication.queued(connection, Threshold("b"), start=0, limit=9)
    assert [(one.task_id, one.disagreement, one.num_agreeing, one.num_answers) for one in queue] == [("t3", 1.0, 1, 2)]
    judged.adjudicate(judged.reopened("eve", "t3"), Answer((1,), 9, (5.0,)), **HOW)
    with judged.reading() as connection:
        assert adjudication.num_queued(connection, Threshold("b")) == 0
    assert [one.ratings for one in judged.rankings("b")] == [(7.0,), (7.0,), (2.0,), (2.0,), (7.0,), (7.0,), (5.0,)]


def test_how_far_answers_about_one_response_disagree():
    yes, no = (said_alone((), (), Annotations((CriterionRatings("right", (n,)),))) for n in (1.0, 0.0))
    assert disagreement_alone([]) == disagreement_alone([yes]) == disagreement_alone([yes, yes]) == 0
    assert disagreement_alone([yes, no]) == 1
    assert disagreement_alone([yes, yes, no]) == pytest.approx(2 / 3)
    one, four, seven = (said_alone((float(n),), (), Annotations()) for n in (1, 4, 7))
    assert (disagreement_alone([one, four]), disagreement_alone([one, seven])) == (0.5, 1)
    rude = said_alone((4.0,), (("rude",),), Annotations())
    assert (disagreement_alone([rude, four]), disagreement_alone([rude, rude])) == (1, 0)


# ---- statistics ----


def test_statistics_compare_ratings_and_marks(judged):
    report = summary([one.task for one in judged.tasks("b")], judged.judgments("b"))
    assert (report.is_single, report.num_answers) == (True, 8)
    # t0 and t2: the rating, the criterion, the turn; t1: the mark too. On t3 nothing is alike.
    assert report.agreement.mean == pytest.approx((3 + 4 + 3) / (3 + 4 + 3 + 4))
    assert [one.agreement.mean for one in report.labelers] == pytest.approx([10 / 14] * 2)
    (right,) = report.criteria
    assert (right.num_answers, right.agreement.mean, right.mean_rating) == (8, 0.75, 5 / 8)
    # units (1, 1), (0, 0), (1, 1), (1, 0): α = 1 - (n - 1)·o₁₀/(n₁·n₀), where o₁₀ = 1, n₁ = 5, n₀ = 3
    assert right.alpha.value == pytest.approx(1 - 7 * 1 / 15)
    assert report.rating_alpha.value == pytest.approx(1 - 7 * 1 / 15)
    assert report.as_dict()["shown_first"]["mean"] is None


GOLD = {"rating": [6, 7], "criteria": {"right": 1}, "flags": []}


def test_gold_tasks_and_repeats(store):
    gold = [task(f"g{n}", f"Gold {n}.", gold_ranks=(1,), details={"gold": GOLD}) for n in range(2)]
    store.add_tasks([*gold, task("t0"), task("t0 again", repeat_of="t0")], batch="b", num_labelers=2)
    for name in ("g0", "g1", "t0", "t0 again"):
        say(store, "ann", name, RIGHT)
        say(store, "bob", name, WRONG if name != "t0" else RIGHT)
    report = summary([one.task for one in store.tasks("b")], store.judgments("b"))
    ann, bob = report.labelers
    assert (ann.gold_accuracy.mean, bob.gold_accuracy.mean, ann.gold_accuracy.num_tasks) == (1, 0, 2)
    assert (ann.self_agreement.mean, bob.self_agreement.mean) == (1, 0)
    assert report.agreement.num_tasks == 1  # the ordinary one
    # Three questions of each gold task are one trial: Wilson's interval of 2 of 2 begins at 1 / (1 + 1.96² / 2).
    assert ann.gold_accuracy.low == pytest.approx(1 / (1 + 1.959964**2 / 2))
    assert ann.self_agreement.low == pytest.approx(1 / (1 + 1.959964**2))
    screening = Screening(batch="b", min_tasks=2, min_accuracy=0.6)
    assert (screened(store, "ann", screening), screened(store, "bob", screening)) == (True, False)
    for name in ("rankings", "grouped"):
        assert rows_of(store, name)[1].items() >= {("gold task", 4), ("hidden repeat", 2)}


# ---- out and in ----


def test_the_stores_own_format_keeps_everything(judged, sqlite_tables, tmp_path):
    judged.add_tasks([task("g", gold_ranks=(1,), details={"gold": GOLD})], batch="b", num_labelers=1)
    export(judged, format_to_write("heed"), tmp_path / "all.jsonl", with_names=True)
    with LabelStore(shutil.copy(sqlite_tables, tmp_path / "other.db")) as other:
        store_found(other, collect_all(format_to_read("heed"), read_source(str(tmp_path / "all.jsonl"))), "")
        assert other.tasks("b") == judged.tasks("b")
        assert {*other.judgments("b")} == {*judged.judgments("b")}


def test_marks_and_ratings_train_kto(judged, tmp_path):
    export(judged, format_to_write("rankings"), tmp_path / "labels.jsonl")
    data = {"rankings": {"source": str(tmp_path / "labels.jsonl")}, "loss": "kto"}
    flagged = DPOConfig.model_validate(data | {"kto": {"desirable_above": 4, "undesirable_flags": ["rude"]}})
    found = read_judgments(flagged.rankings, least_responses=flagged.least_responses).rankings
    assert [labels_of(one, flagged.kto) for one in found] == [(1,), (1,), (-1,), (-1,), (1,), (1,), (1,), (-1,)]
    with pytest.raises(ValueError, match=r"line 1: a single response, which ranks nothing"):
        read_judgments(flagged.rankings)


def test_yes_or_no_as_trls_unpaired_rows(judged, sqlite_tables, tmp_path):
    rows, left_out = rows_of(judged, "trl_unpaired", "right")
    assert [row["label"] for row in rows] == [True, True, False, False, True, True, True, False]
    assert rows[0]["completion"] == [{"role": "assistant", "content": "So 0."}]
    assert left_out == {"turns": 8}
    assert rows_of(judged, "trl_unpaired") == ([], {"criteria": 8, "turns": 8, "no yes or no": 8})
    path = tmp_path / "unpaired.jsonl"
    path.write_text(jsonl(rows))
    with LabelStore(shutil.copy(sqlite_tables, tmp_path / "other.db")) as other:
        form, _ = sniff(read_source(str(path)), str(path))
        store_found(other, collect_all(form, read_source(str(path))), "new")
        assert [one.ratings for one in other.rankings("new")] == [(1.0,), (0.0,), (1.0,), (1.0,), (0.0,)]


def test_responses_to_one_prompt_make_a_ranking_for_a_reward_model(judged, tmp_path):
    (ann, bob), left_out = rows_of(judged, "grouped")
    assert (ann["responses"], ann["ranks"]) == (("So 0.", "So 1.", "So 2.", "So 3."), (1, 2, 1, 1))
    assert (bob["ranks"], bob["ratings"], ann["task_id"]) == ((1, 2, 1, 2), [7.0, 2.0, 7.0, 2.0], bob["task_id"])
    assert left_out == {"criteria": 8, "turns": 8}
    export(judged, format_to_write("grouped"), tmp_path / "rankings.jsonl")
    config = DPOConfig.model_validate({"rankings": {"source": str(tmp_path / "rankings.jsonl")}})
    assert [one.ranks for one in read_judgments(config.rankings).rankings] == [(1, 2, 1, 1), (1, 2, 1, 2)]
    judged.add_tasks([replace(task("alone"), prompt=(Message("user", "Else?"),))], batch="b", num_labelers=1)
    (lease,) = judged.lease_these("ann", ["alone"], seconds=60, batch="b")
    judged.submit(lease, Answer((1,), 9, (3.0,)), **HOW)
    assert rows_of(judged, "grouped")[1]["nothing to rank"] == 1
    judged.add_tasks([task("again", "So 1.")], batch="b", num_labelers=1)
    say(judged, "ann", "again", RIGHT)
    (ann, _), left_out = rows_of(judged, "grouped")
    assert (ann["ranks"], left_out["rated twice"]) == ((1, 2, 1, 1), 1)


def test_formats_of_pairs_report_single_responses(judged):
    for name in ("trl", "hh"):
        rows, left_out = rows_of(judged, name)
        assert (rows, left_out["single response"]) == ([], 8)
    rows, left_out = rows_of(judged, "demonstrations")
    assert (rows, left_out["no best response"]) == ([], 8)
    consensus, _ = rows_of(judged, "consensus")
    assert [(row["ranks"], row["ratings"], row.get("flags")) for row in consensus] == [
        ((1,), [7.0], None), ((1,), [2.0], (("rude",),)), ((1,), [7.0], None), ((1,), [4.5], None)
    ]  # fmt: skip
    assert [row["right"] for row in rows_of(judged, "criteria")[0]] == [1, 1, 0, 0, 1, 1, 1, 0]
    turns, _ = rows_of(judged, "turns", "right")
    assert turns[2]["labels"] == [0, 0]


def test_a_tools_question_without_a_number_is_about_the_only_response():
    row = {
        "fields": {"prompt": "Why?", "response": "So."},
        "metadata": {},
        "suggestions": {},
        "responses": {"quality": [{"value": 4, "user_id": "u1"}], "flags": [{"value": ["rude"], "user_id": "u1"}]},
        "status": "completed",
    }
    (vote,) = [vote for one in format_to_read("argilla").read("line 1", row, Report(), "") for vote in one.votes]
    assert (vote.ranks, vote.ratings, vote.flags) == ((1,), (4,), (("rude",),))
