"""The first tables: one judgment per labeler and task, and leases.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("task_id", sa.String, nullable=False, unique=True),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("num_labelers", sa.Integer, nullable=False),
        sa.Column("prompt", sa.JSON, nullable=False),
        sa.Column("responses", sa.JSON, nullable=False),
        sa.Column("sources", sa.JSON, nullable=False),
    )
    op.create_index("tasks_by_batch", "tasks", ["batch", "position"])
    op.create_table(
        "leases",
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("task", "labeler"),
    )
    op.create_index("leases_by_labeler", "leases", ["labeler"])
    op.create_table(
        "judgments",
        sa.Column("judgment_id", sa.Integer, primary_key=True),
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("shown_order", sa.JSON, nullable=False),
        sa.Column("flags", sa.JSON, nullable=False),
        sa.Column("instructions_version", sa.String, nullable=False),
        sa.Column("milliseconds", sa.Integer, nullable=False),
        sa.Column("client", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.UniqueConstraint("task", "labeler"),
    )
