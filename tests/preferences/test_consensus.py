"""The consensus of a task's labelers, by hand."""

import pytest

from preferences.formats.native import consensus_of, read_rankings, write_consensus
from preferences.formats.parts import Report
from preferences.records import Judgment, Message, StoredTask, Task


def judgment(task: str, labeler: str, *ranks: int, kind: str = "answer", ratings: tuple[float, ...] = ()) -> Judgment:
    order = tuple(range(len(ranks)))
    return Judgment(task, labeler, 0, kind, ranks, ratings, (), "", order, "v", 9, "page", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rankings", "expected"),
    [
        ([(1, 2)], (1, 2)),
        ([(1, 2), (1, 2), (2, 1)], (1, 2)),
        ([(1, 2), (2, 1)], (1, 1)),
        ([(1, 1), (2, 1)], (2, 1)),
        # Places 1, 2, 3 and 1.5, 3, 1.5 and 3, 1, 2: sums 5.5, 6, 6.5.
        ([(1, 2, 3), (1, 2, 1), (3, 1, 2)], (1, 2, 3)),
        ([(1, 2, 3), (3, 2, 1)], (1, 1, 1)),
    ],
)
def test_responses_are_ordered_by_their_mean_rank(rankings: list[tuple[int, ...]], expected: tuple[int, ...]) -> None:
    assert consensus_of(rankings) == expected
    assert consensus_of(rankings[::-1]) == expected  # no labeler comes first


def test_one_row_per_task_that_the_reward_stage_reads() -> None:
    tasks = [Task(name, (Message("user", "Why?"),), ("a", "b"), ("x", "y")) for name in ("t1", "t2", "t3", "t4")]
    stored = [StoredTask(task, "main", 3) for task in tasks]
    given = [
        judgment("t1", "ann", 1, 2, ratings=(7.0, 1.0)),
        judgment("t1", "bob", 1, 2, ratings=(5.0, 2.0)),
        judgment("t1", "cem", 2, 1),
        judgment("t2", "ann", 1, 2),
        judgment("t2", "eve", 2, 1, kind="adjudication"),
        judgment("t3", "ann", 1, 2),
        judgment("t3", "bob", 2, 1),
    ]
    report = Report()
    rows = list(write_consensus(stored, given, report))
    assert [(row["task_id"], row["ranks"], row["num_labelers"], row["agreement"]) for row in rows] == [
        ("t1", (1, 2), 3, pytest.approx(2 / 3)), ("t2", (2, 1), 1, 1.0), ("t3", (1, 1), 2, None),
    ]  # fmt: skip
    assert rows[0]["ratings"] == [6.0, 1.5]
    assert report.counts() == {"superseded": 1, "written as a tie": 1}
    (read,) = read_rankings("row", rows[0], Report(), "")
    assert (read.votes[0].labeler, read.votes[0].ranks) == ("consensus", (1, 2))
