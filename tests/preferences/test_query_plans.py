"""The queries that a page sends to PostgreSQL, and their plans."""

import shutil

import pytest
from sqlalchemy import event

from preferences import adjudication, leases, results, search
from preferences.adjudication import Threshold
from preferences.records import Judgment, Message, Task
from preferences.search import Search
from preferences.store import LabelStore

PROMPT = (Message("user", "?"),)


@pytest.mark.parametrize("has_statistics", [False, True])
def test_postgresql_takes_the_first_open_place_and_looks_at_no_others(postgres, postgres_tables, has_statistics):
    """Whatever the statistics of the batch: open places are neither all sorted nor all joined."""
    names, asked = [f"t{number}" for number in range(3_000)], []
    with LabelStore(postgres.new_database(postgres_tables)) as store:
        tasks = [Task(name, PROMPT, ("a", "b"), ("x", "y")) for name in names]
        store.add_tasks(tasks, batch="b", num_labelers=2)
        said = [Judgment(name, "ann", 0, "answer", (1, 2), (), (), "", (0, 1), "1", 9, "t", 1.0) for name in names[:99]]
        store.import_judgments("b", said)
        if has_statistics:
            with store._writer.begin() as connection:
                connection.exec_driver_sql("ANALYZE")
        event.listen(store._writer, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
        assert store.lease("ann", seconds=60, batch="b").task_id == "t99"
        looked = [(statement, values) for statement, values in asked if statement.startswith("SELECT places")]
        assert len(looked) == 2  # the leases of ann, and the open places
        with store._writer.begin() as connection:
            leases.lock_labeler(connection, "ann")
            for statement, values in looked:
                plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", values).scalars())
                assert "Index Scan using places_" in plan
                assert not any(slow in plan for slow in ("Sort", "Join", "Seq Scan on places")), plan


@pytest.mark.parametrize(
    ("read", "index"),
    [
        (lambda at: search.find_tasks(at, Search(sort="gold"), after=0, limit=9), "tasks_gold"),
        (lambda at: search.find_tasks(at, Search(sort="repeat"), after=0, limit=9), "tasks_repeating"),
        (lambda at: search.find_tasks(at, Search(batch="b", state="open"), after=0, limit=9), "places_open"),
        (lambda at: search.find_answers(at, Search(note="dull"), before=0, limit=9), "judgments_noted"),
        (lambda at: search.find_answers(at, Search(mark="rude"), before=0, limit=9), "judgments_marked"),
        (lambda at: adjudication.queued(at, Threshold("b"), start=0, limit=9), "task_summaries_by_disagreement"),
        (lambda at: adjudication.queued(at, Threshold(), start=0, limit=9), "task_summaries_in_all_batches"),
        (lambda at: adjudication.neighbour(at, Threshold("b"), "t1", is_next=True), "task_summaries_by_disagreement"),
        (lambda at: results.batch_counts(at, 0.0), "places_done"),
        (lambda at: search.find_answers(at, Search(batch="b", kind="any"), before=9, limit=9), "PRIMARY KEY (rowid<?)"),
    ],
)
def test_leads_read_the_index_that_is_meant_for_them(sqlite_tables, tmp_path, read, index):
    """SQLite ignores a partial index if a query words its condition otherwise, and sorts if the order is another."""
    asked = []
    with LabelStore(shutil.copy(sqlite_tables, tmp_path / "labels.db")) as store, store.reading() as connection:
        event.listen(store._reader, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
        read(connection)
        plans = ["\n".join(row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values))
                 for statement, values in list(asked) if statement.startswith("SELECT")]  # fmt: skip
    (plan, *_) = [plan for plan in plans if index in plan] or [f"none of {plans}"]
    assert index in plan
    assert "ORDER BY" not in plan
