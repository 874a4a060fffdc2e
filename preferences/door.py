"""Lets scripted labelers answer a batch through the same door as people: lease, judge, submit.

Leaves out: labelers that answer at the same time (run several processes on one store for that).
"""

import hashlib
import json
from collections.abc import Callable, Sequence, Set

from preferences.leasing import Lease
from preferences.records import Answer, Labeler, Skip
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
    shown. What one skips goes to the next. A task with more places than labelers, or one leased to somebody else, stays
    open.

    Raises ValueError for a batch without tasks and for two labelers of one name.
    """
    by_name = {labeler.name: labeler for labeler in labelers}
    if len(by_name) != len(labelers):
        raise ValueError(f"labelers is {[labeler.name for labeler in labelers]}; distinct names were expected")
    if not store.coverage(batch):
        raise ValueError(f"batch {batch!r} has no tasks in the store")
    not_theirs: set[tuple[str, str]] = set()  # (task id, name): skipped, or refused when nothing else was to be had
    while True:
        assigned = assign(store.coverage(batch), list(by_name), not_theirs)
        asked = {(task_id, name) for name, task_ids in assigned.items() for task_id in task_ids}
        granted: set[tuple[str, str]] = set()
        for start in range(0, max(map(len, assigned.values()), default=0), TASKS_PER_TURN):
            for name, labeler in by_name.items():
                held = store.lease_these(
                    name, assigned[name][start : start + TASKS_PER_TURN], seconds=LEASE_SECONDS, batch=batch
                )
                said = [labeler.judge(lease.shown) for lease in held]
                _store(store, held, said, client, instructions_version)
                granted |= {(lease.task_id, name) for lease in held}
                skips = zip(held, said, strict=True)
                not_theirs |= {(lease.task_id, name) for lease, word in skips if isinstance(word, Skip)}
                if held and on_progress is not None:
                    on_progress(store.progress(batch))
        if granted == asked and not not_theirs & granted:
            return store.progress(batch)
        if not granted:  # a repeat is refused until they have judged what it repeats, so what was refused may open
            not_theirs |= asked


def _store(
    store: LabelStore, held: Sequence[Lease], said: Sequence[Answer | Skip], client: str, instructions_version: str
) -> None:
    answered = [(lease, word) for lease, word in zip(held, said, strict=True) if isinstance(word, Answer)]
    store.submit_many(
        [lease for lease, _ in answered],
        [answer for _, answer in answered],
        client=client,
        instructions_version=instructions_version,
    )
    for lease, word in zip(held, said, strict=True):
        if isinstance(word, Skip):
            store.skip(lease, word.reason, word.milliseconds, client=client, instructions_version=instructions_version)


def assign(
    coverage: Sequence[Coverage], names: Sequence[str], not_theirs: Set[tuple[str, str]] = frozenset()
) -> dict[str, list[str]]:
    """Which labeler is to judge which tasks still: name -> task ids, in the order of `coverage`.

    With a quota of q, each task goes to q distinct labelers. The tasks are dealt in hash order, so that no labeler
    gets every n-th task of the batch, and round the sorted names, so that the labelers' loads differ by one at most.
    Those who have judged already only drop out of what is dealt; hence a resumed run makes the same assignment. What is
    `not_theirs`, (task id, name), goes to the next on the ring.
    """
    ring = sorted(names)
    dealt: dict[str, set[str]] = {name: set() for name in ring}
    next_place = 0
    for task in sorted(coverage, key=lambda task: hashlib.sha256(json.dumps(task.task_id).encode()).digest()):
        turn = [ring[(next_place + step) % len(ring)] for step in range(len(ring))]
        next_place += task.num_labelers
        num_wanted = max(task.num_labelers - len(task.judged_by), 0)
        left = [name for name in turn if name not in task.judged_by and (task.task_id, name) not in not_theirs]
        for name in left[:num_wanted]:
            dealt[name].add(task.task_id)
    return {name: [task.task_id for task in coverage if task.task_id in dealt[name]] for name in ring}
