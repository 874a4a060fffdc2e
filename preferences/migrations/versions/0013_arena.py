"""Tables for conversations of people with two policies (`heed arena`).

Revision ID: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "arena_conversations",
        sa.Column("handle", sa.String, primary_key=True),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("policies", sa.JSON, nullable=False),
        sa.Column("prompt_id", sa.String, nullable=False),
        sa.Column("start", sa.JSON, nullable=False),
        sa.Column("is_swapped", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("arena_conversations_by_labeler", "arena_conversations", ["labeler", "created_at"])
    op.create_table(
        "arena_turns",
        sa.Column("conversation", sa.String, sa.ForeignKey("arena_conversations.handle"), nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("question", sa.JSON, nullable=False),
        sa.Column("follows", sa.String, nullable=False),
        sa.Column("responses", sa.JSON, nullable=False),
        sa.Column("records", sa.JSON, nullable=False),
        sa.Column("finished_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("conversation", "turn"),
    )
