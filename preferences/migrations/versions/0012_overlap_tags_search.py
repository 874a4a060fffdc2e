"""Overlap that leads change, archived tasks, tags and quotas, per-task agreement, and words to search by.

Revision ID: 0012
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

OFFERED: dict[str, Any] = {
    "sqlite_where": sa.text("is_done = 0 AND is_surplus = 0 AND is_archived = 0"),
    "postgresql_where": sa.text("NOT is_done AND NOT is_surplus AND NOT is_archived"),
}


def upgrade() -> None:
    op.add_column("places", sa.Column("is_surplus", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("places", sa.Column("is_archived", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("places", sa.Column("requires", sa.String, nullable=False, server_default=""))
    op.drop_index("places_open", "places")
    op.create_index("places_open", "places", ["batch", "task", "place"], **OFFERED)
    archived: dict[str, Any] = {
        "sqlite_where": sa.text("is_archived = 1"),
        "postgresql_where": sa.text("is_archived"),
    }
    op.create_index("places_archived", "places", ["task"], **archived)
    op.add_column("accounts", sa.Column("tags", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("accounts", sa.Column("daily_quota", sa.Integer, nullable=False, server_default="0"))
    op.add_column("accounts", sa.Column("identity", sa.String, nullable=False, server_default=""))
    _create_tables()
    op.create_index("judgments_by_time", "judgments", ["created_at"])
    op.create_index("judgments_by_labeler_time", "judgments", ["labeler", "created_at"])
    for name, where in (
        ("judgments_noted", {"sqlite_where": "note <> '\"\"'", "postgresql_where": "note::text <> '\"\"'"}),
        ("judgments_marked", {"sqlite_where": "flags <> '[]'", "postgresql_where": "flags::text <> '[]'"}),
    ):
        only: dict[str, Any] = {key: sa.text(condition) for key, condition in where.items()}
        op.create_index(name, "judgments", ["judgment_id"], **only)
    _index_words()
    _fill()


def _create_tables() -> None:
    op.create_table(
        "batch_settings",
        sa.Column("batch", sa.String, primary_key=True),
        sa.Column("is_closed", sa.Boolean, nullable=False),
        sa.Column("requires", sa.String, nullable=False),
    )
    op.create_table(
        "requirements",
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("requires", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("batch", "requires"),
    )
    op.create_table(
        "task_summaries",
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), primary_key=True, autoincrement=False),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("num_answers", sa.Integer, nullable=False),
        sa.Column("num_agreeing", sa.Integer, nullable=False),
        sa.Column("disagreement", sa.Float, nullable=False),
        sa.Column("is_adjudicated", sa.Boolean, nullable=False),
    )
    op.create_index("task_summaries_by_disagreement", "task_summaries", ["batch", "disagreement", "task"])
    op.create_table(
        "task_texts",
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
    )


def _index_words() -> None:
    """Creates the full-text index. On SQLite a trigger fills it, so that a restored backup has it too."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE INDEX task_texts_words ON task_texts USING gin (to_tsvector('simple', text))")
        return
    op.execute("CREATE VIRTUAL TABLE task_words USING fts5(text, content='task_texts', content_rowid='task')")
    op.execute(
        "CREATE TRIGGER task_texts_words AFTER INSERT ON task_texts"
        " BEGIN INSERT INTO task_words (rowid, text) VALUES (NEW.task, NEW.text); END"
    )


def _fill() -> None:
    """Fills the new tables for tasks and judgments that are already stored."""
    from preferences import adjudication, search

    tasks = sa.table("tasks", sa.column("position"), sa.column("prompt", sa.JSON), sa.column("responses", sa.JSON))
    wanted = sa.select(tasks.c.position, tasks.c.prompt, tasks.c.responses).order_by(tasks.c.position).limit(1_000)
    connection, last = op.get_bind(), 0
    while found := connection.execute(wanted.where(tasks.c.position > last)).all():
        search.index_texts(connection, [(row.position, row.prompt, row.responses) for row in found])
        adjudication.refresh(connection, [row.position for row in found])
        last = found[-1].position
