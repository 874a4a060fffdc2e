"""Lets scripted labelers answer a batch through the same door as people: lease, judge, submit.

Leaves out: labelers that answer at the same time (run several processes on one store for that).
"""

import hashlib
import json
from collections.abc import Callable, Sequence

from preferences.records import Labeler
from preferences.results import Coverage, Progress
from preferences.store import LabelStore

TASKS_PER_TURN = 64  # one transaction and one disk sync per turn and direction
LEASE_SECONDS = 3_600.0  # for one turn, so for TASKS_PER_TURN judgments


def answer_all(
    store: LabelStore,
    labelers: Sequence[Labeler],
    *,
    batch: str,
    client: str,
    instructions_version: str,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Let the labelers take turns until none of them has an open task in the batch; returns how far it then is.

    Who answers what is fixed by `assign`, so a run that was killed at any point and started again ends with the
    judgments, and the `content_hash`, of one nobody touched, provided each labeler's answer depends only on the task
    shown. A task with more places than labelers, or one leased to somebody else, stays open.

    Raises ValueError for a batch without tasks and for two labelers of one name.
    """
    by_name = {labeler.name: labeler for labeler in labelers}
    if len(by_name) != len(labelers):
        raise ValueError(f"labelers is {[labeler.name for labeler in labelers]}; distinct names were expected")
    coverage = store.coverage(batch)
    if not coverage:
        raise ValueError(f"batch {batch!r} has no tasks in the store")
    assigned = assign(coverage, list(by_name))
    for start in range(0, max(map(len, assigned.values()), default=0), TASKS_PER_TURN):
        for name, labeler in by_name.items():
            held = store.lease_these(
                name, assigned[name][start : start + TASKS_PER_TURN], seconds=LEASE_SECONDS, batch=batch
            )
            answers = [labeler.judge(lease.shown) for lease in held]
            store.submit_many(held, answers, client=client, instructions_version=instructions_version)
            if held and on_progress is not None:
                on_progress(store.progress(batch))
    return store.progress(batch)


def assign(coverage: Sequence[Coverage], names: Sequence[str]) -> dict[str, list[str]]:
    """Which labeler is to judge which tasks still: name -> task ids, in the order of `coverage`.

    With a quota of q, each task goes to q distinct labelers. The tasks are dealt in hash order, so that no labeler
    gets every n-th task of the batch, and round the sorted names, so that the labelers' loads differ by one at most.
    Those who have judged already only drop out of what is dealt; hence a resumed run makes the same assignment.
    """
    ring = sorted(names)
    dealt: dict[str, set[str]] = {name: set() for name in ring}
    next_place = 0
    for task in sorted(coverage, key=lambda task: hashlib.sha256(json.dumps(task.task_id).encode()).digest()):
        turn = [ring[(next_place + step) % len(ring)] for step in range(len(ring))]
        next_place += task.num_labelers
        num_wanted = task.num_labelers - len(task.judged_by)
        for name in [name for name in turn if name not in task.judged_by][: max(num_wanted, 0)]:
            dealt[name].add(task.task_id)
    return {name: [task.task_id for task in coverage if task.task_id in dealt[name]] for name in ring}
