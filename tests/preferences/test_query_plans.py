"""The queries that a page sends to PostgreSQL, and their plans."""

import pytest
from sqlalchemy import event

from preferences import leases
from preferences.records import Judgment, Message, Task
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
