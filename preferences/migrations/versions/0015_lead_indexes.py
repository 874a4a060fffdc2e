"""Indexes for the leads' pages: counting what is done, the order of the adjudication queue, gold tasks and repeats.

Revision ID: 0015
"""

from typing import Any

from alembic import op
from sqlalchemy import text

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    def where(sqlite: str, postgresql: str) -> dict[str, Any]:
        return {"sqlite_where": text(sqlite), "postgresql_where": text(postgresql)}

    op.create_index("places_done", "places", ["batch", "labeler"], **where("is_done = 1", "is_done"))
    op.create_index("tasks_gold", "tasks", ["position"], **where("gold_ranks <> '[]'", "gold_ranks::text <> '[]'"))
    op.create_index("tasks_repeating", "tasks", ["position"], **where("repeat_of <> ''", "repeat_of <> ''"))
    op.drop_index("task_summaries_by_disagreement", "task_summaries")
    falling = text("disagreement DESC")
    op.create_index("task_summaries_by_disagreement", "task_summaries", ["batch", falling, "task"])
    op.create_index("task_summaries_in_all_batches", "task_summaries", [falling, "task"])
