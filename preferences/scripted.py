"""Lets scripted labelers answer a batch of a label store in this process: lease, judge, submit, as people do.

Leaves out: labelers that answer at the same time (run several processes on one store for that).
"""

import hashlib
import json
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from preferences.leases import Lease
from preferences.records import Answer, Coverage, Labeler, Progress, Skip

if TYPE_CHECKING:
    from preferences.store import LabelStore

TASKS_PER_TURN = 64  # a turn needs one transaction and disk sync to lease, and one to submit
LEASE_SECONDS = 3_600.0  # must cover one turn, that is, TASKS_PER_TURN judgments


def answer_all(
    store: "LabelStore",
    labelers: Sequence[Labeler],
    *,
    batch: str,
    client: str,
    instructions_version: str,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Lets the labelers take turns until none of them has an open task in the batch. Returns the batch's progress.

    `assign` fixes who answers what. So a run that is killed at any point and restarted ends with the same judgments and
    `content_hash` as an uninterrupted run, provided each labeler's answer depends only on the task shown. A task that
    one labeler skips goes to the next. A task that wants more labelers than there are, or that somebody else has
    leased, stays open.

    Raises: ValueError for a batch without tasks, and for two labelers with the same name.
    """
    by_name = {labeler.name: labeler for labeler in labelers}
    if len(by_name) != len(labelers):
        raise ValueError(f"labelers is {[labeler.name for labeler in labelers]}; distinct names were expected")
    if not store.coverage(batch):
        raise ValueError(f"batch {batch!r} has no tasks in the store")
    declined: set[tuple[str, str]] = set()  # (task id, name): skipped, or not granted in a round that granted nothing
    while True:
        assigned = assign(store.coverage(batch), list(by_name), declined)
        requested = {(task_id, name) for name, task_ids in assigned.items() for task_id in task_ids}
        granted: set[tuple[str, str]] = set()
        for start in range(0, max(map(len, assigned.values()), default=0), TASKS_PER_TURN):
            for name, labeler in by_name.items():
                leases = store.lease_these(
                    name, assigned[name][start : start + TASKS_PER_TURN], seconds=LEASE_SECONDS, batch=batch
                )
                results = [labeler.judge(lease.shown) for lease in leases]
                _store(store, leases, results, client, instructions_version)
                granted |= {(lease.task_id, name) for lease in leases}
                pairs = zip(leases, results, strict=True)
                declined |= {(lease.task_id, name) for lease, result in pairs if isinstance(result, Skip)}
                if leases and on_progress is not None:
                    on_progress(store.progress(batch))
        if granted == requested and not declined & granted:
            return store.progress(batch)
        if not granted:  # otherwise try again: a repeat opens once the labeler has judged the task that it repeats
            declined |= requested


def _store(
    store: "LabelStore",
    leases: Sequence[Lease],
    results: Sequence[Answer | Skip],
    client: str,
    instructions_version: str,
) -> None:
    answered = [(lease, result) for lease, result in zip(leases, results, strict=True) if isinstance(result, Answer)]
    store.submit_many(
        [lease for lease, _ in answered],
        [answer for _, answer in answered],
        client=client,
        instructions_version=instructions_version,
    )
    for lease, result in zip(leases, results, strict=True):
        if isinstance(result, Skip):
            reason, milliseconds = result.reason, result.milliseconds
            store.skip(lease, reason, milliseconds, client=client, instructions_version=instructions_version)


def assign(
    coverage: Sequence[Coverage], names: Sequence[str], declined: Set[tuple[str, str]] = frozenset()
) -> dict[str, list[str]]:
    """Returns the tasks that each labeler still has to judge: name -> task ids, in the order of `coverage`.

    A task with a quota of q goes to q distinct labelers. Tasks are dealt in hash order, so that no labeler gets every
    n-th task of the batch, and round-robin over the sorted names, so that loads differ by at most one. Judgments made
    so far only remove tasks from the deal, so a resumed run makes the same assignment. A (task id, name) in `declined`
    goes to the next labeler in the round.
    """
    ring = sorted(names)
    dealt: dict[str, set[str]] = {name: set() for name in ring}
    next_index = 0
    for task in sorted(coverage, key=lambda task: hashlib.sha256(json.dumps(task.task_id).encode()).digest()):
        turn = [ring[(next_index + step) % len(ring)] for step in range(len(ring))]
        next_index += task.num_labelers
        num_wanted = max(task.num_labelers - len(task.judged_by), 0)
        left = [name for name in turn if name not in task.judged_by and (task.task_id, name) not in declined]
        for name in left[:num_wanted]:
            dealt[name].add(task.task_id)
    return {name: [task.task_id for task in coverage if task.task_id in dealt[name]] for name in ring}
