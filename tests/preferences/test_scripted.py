"""The interface for scripts: who answers what, and that a SIGKILL at any point does not change the result."""

import hashlib
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from preferences.records import Answer, Coverage, Message, Skip, Task
from preferences.scripted import answer_all, assign
from preferences.store import LabelStore

ROOT = Path(__file__).resolve().parents[2]
HOW = {"batch": "b", "client": "script", "instructions_version": "1"}

# Runs in separate processes, so it is text; the labeler's answer depends only on its name and the task shown.
SCRIPT = """
import hashlib, os, signal, sys
from preferences.scripted import answer_all
from preferences.records import Answer
from preferences.store import LabelStore

class Scripted:
    num_judged = 0  # by all labelers of this process
    def __init__(self, name, killed_at):
        self.name, self.killed_at = name, killed_at
    def judge(self, shown):
        Scripted.num_judged += 1
        if Scripted.num_judged == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        digests = [hashlib.sha256(f"{self.name} {response}".encode()).digest()[0] for response in shown.responses]
        return Answer(tuple(1 + digest // 64 for digest in digests), 5)

def main(path, names, killed_at):
    with LabelStore(path) as store:
        labelers = [Scripted(name, int(killed_at)) for name in names.split(",")]
        answer_all(store, labelers, batch="b", client="script", instructions_version="1")

main(*sys.argv[1:])
"""


def start(path, names="ann,bob,cy", killed_at=0):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(path), names, str(killed_at)], cwd=ROOT)


def finish(process):
    assert process.wait(timeout=120) == 0


def fill(path, num_tasks, num_labelers=2):
    tasks = [
        Task(f"t{i:04d}", (Message("user", f"Say {i}"),), (f"{i} a", f"{i} b", f"{i} c"), ("x", "y", "z"))
        for i in range(num_tasks)
    ]
    with LabelStore(path) as store:
        store.add_tasks(tasks, batch="b", num_labelers=num_labelers)


@pytest.mark.parametrize("killed_at", [70, pytest.param(130, marks=pytest.mark.nightly)])  # of 160 judgments
def test_a_killed_run_resumes_to_the_content_of_an_undisturbed_one(new_database, killed_at):
    undisturbed, killed = new_database(), new_database()
    for url in (undisturbed, killed):
        fill(url, num_tasks=80)
    finish(start(undisturbed))
    assert start(killed, killed_at=killed_at).wait(timeout=120) == -signal.SIGKILL
    with LabelStore(killed) as store:
        assert 0 < store.progress("b").num_judgments < killed_at
        kept = {(r.task_id, r.labeler, r.ranks) for r in store.rankings("b")}
        finish(start(killed))
        assert kept <= {(r.task_id, r.labeler, r.ranks) for r in store.rankings("b")}
        with LabelStore(undisturbed) as calm:
            assert store.content_hash("b") == calm.content_hash("b")
            assert store.progress("b") == calm.progress("b")
        assert store.progress("b").num_open == 0


def test_four_processes_at_once_never_exceed_the_quota(new_database):
    """Two of them even play the same labelers."""
    path = new_database()
    fill(path, num_tasks=80, num_labelers=2)
    processes = [start(path, names) for names in ("ann,bob", "ann,bob", "cy,dee", "eve,fay")]
    for process in processes:
        finish(process)
    with LabelStore(path) as store:
        judged = Counter(ranking.task_id for ranking in store.rankings("b"))
        assert judged == dict.fromkeys((f"t{i:04d}" for i in range(80)), 2)


LEASER = """
import sys
from preferences.store import LabelStore
with LabelStore(sys.argv[1]) as store:
    num_held = 0
    while len(held := store.lease_many(sys.argv[2], num_held + 1, seconds=600, batch="b")) > num_held:
        num_held = len(held)
    print(*(lease.task_id for lease in held))
"""

OPENER = "import sys; from preferences.store import LabelStore; LabelStore(sys.argv[1]).close()"


@pytest.mark.long
def test_two_processes_never_hold_leases_beyond_the_quota(new_database):
    path = new_database()
    fill(path, num_tasks=300, num_labelers=1)
    command = [sys.executable, "-c", LEASER, str(path)]
    processes = [
        subprocess.Popen([*command, name], cwd=ROOT, stdout=subprocess.PIPE, text=True) for name in ("ann", "bob")
    ]
    held = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sorted(held[0] + held[1]) == [f"t{i:04d}" for i in range(300)]  # each exactly once


def test_a_new_store_may_be_opened_by_several_processes_at_once(empty_database):
    for _ in range(2):
        command = [sys.executable, "-c", OPENER, empty_database()]
        processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
        for process in processes:
            finish(process)


class Steady:
    """Ranks by a hash of its name and the response; counts its calls."""

    def __init__(self, name):
        self.name = name
        self.num_judged = 0

    def judge(self, shown):
        self.num_judged += 1
        digests = [hashlib.sha256(f"{self.name} {response}".encode()).digest()[0] for response in shown.responses]
        return Answer(tuple(1 + digest for digest in digests), 5)


def test_the_work_is_shared_evenly_and_done_once(tmp_path):
    fill(tmp_path / "labels.db", num_tasks=200, num_labelers=2)
    labelers = [Steady(name) for name in ("ann", "bob", "cy")]
    seen = []
    with LabelStore(tmp_path / "labels.db") as store:
        answer_all(store, labelers, **HOW, on_progress=seen.append)
        assert sorted(labeler.num_judged for labeler in labelers) == [133, 133, 134]
        assert all(len(task.judged_by) == 2 for task in store.coverage("b"))
        assert [p.num_judgments for p in seen] == sorted(p.num_judgments for p in seen)
        assert seen[-1].num_open == 0
        answer_all(store, labelers, **HOW)
        assert sum(labeler.num_judged for labeler in labelers) == 400


def test_the_order_in_which_labelers_are_named_does_not_matter(tmp_path):
    hashes = []
    for names in (("ann", "bob", "cy"), ("cy", "ann", "bob")):
        path = tmp_path / f"{names[0]}.db"
        fill(path, num_tasks=50)
        with LabelStore(path) as store:
            answer_all(store, [Steady(name) for name in names], **HOW)
            hashes.append(store.content_hash("b"))
    assert hashes[0] == hashes[1]


def test_too_few_labelers_leave_tasks_open(tmp_path):
    fill(tmp_path / "labels.db", num_tasks=5, num_labelers=3)
    with LabelStore(tmp_path / "labels.db") as store:
        assert answer_all(store, [Steady("ann"), Steady("bob")], **HOW).num_open == 5
        assert answer_all(store, [Steady("cy")], **HOW).num_open == 0


class Choosy(Steady):
    """Skips every task whose number is divisible by its own."""

    def __init__(self, name, number):
        super().__init__(name)
        self.number = number

    def judge(self, shown):
        answer = super().judge(shown)
        return Skip("not mine", 5) if int(shown.task_id[1:]) % self.number == 0 else answer


def test_what_one_skips_goes_to_the_next(tmp_path):
    """Two of three judge each task; if fewer than two are left, it stays open. No labeler gets a task twice."""
    fill(tmp_path / "labels.db", num_tasks=120, num_labelers=2)
    labelers = [Choosy("ann", 2), Choosy("bob", 3), Choosy("cy", 5)]
    willing = [{labeler.name for labeler in labelers if number % labeler.number} for number in range(120)]
    with LabelStore(tmp_path / "labels.db") as store:
        for _ in range(2):
            progress = answer_all(store, labelers, **HOW)
            assert progress.num_open == sum(len(names) < 2 for names in willing) > 20
            assert progress.num_judgments == sum(min(2, len(names)) for names in willing)
            assert all(set(task.judged_by) <= willing[int(task.task_id[1:])] for task in store.coverage("b"))
            acts = store.judgments("b")
            assert sum(labeler.num_judged for labeler in labelers) == len(acts) > progress.num_judgments
            assert {act.note for act in acts if act.kind == "skip"} == {"not mine"}


def test_a_repeat_is_asked_in_the_same_turn_as_its_task(tmp_path):
    with LabelStore(tmp_path / "labels.db") as store:
        task = Task("t1", (Message("user", "Say 1"),), ("a", "b"), ("x", "y"))
        store.add_tasks([task, replace(task, task_id="t2", repeat_of="t1")], batch="b", num_labelers=1)
        assert answer_all(store, [Steady("ann"), Steady("bob")], **HOW).num_open == 0
        assert len({act.labeler for act in store.judgments("b")}) == 1


def test_refusals(tmp_path):
    fill(tmp_path / "labels.db", num_tasks=1)
    with LabelStore(tmp_path / "labels.db") as store:
        with pytest.raises(ValueError, match="distinct names"):
            answer_all(store, [Steady("ann"), Steady("ann")], **HOW)
        with pytest.raises(ValueError, match="batch 'c' has no tasks"):
            answer_all(store, [Steady("ann")], **HOW | {"batch": "c"})


def test_what_is_judged_already_never_changes_who_judges_the_rest():
    names = ["ann", "bob", "cy", "dee"]
    fresh = [Coverage(f"t{i}", 1 + i % 3, ()) for i in range(60)]
    whole = assign(fresh, names)
    assert max(map(len, whole.values())) - min(map(len, whole.values())) <= 1
    who = {task.task_id: {name for name in names if task.task_id in whole[name]} for task in fresh}
    assert all(len(who[task.task_id]) == task.num_labelers for task in fresh)
    half = [Coverage(t.task_id, t.num_labelers, tuple(sorted(who[t.task_id])[: int(t.task_id[1:]) % 4])) for t in fresh]
    rest = assign(half, names)
    for task in half:
        assert {name for name in names if task.task_id in rest[name]} == who[task.task_id] - set(task.judged_by)
