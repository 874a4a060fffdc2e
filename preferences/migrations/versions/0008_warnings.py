"""Tasks may carry a content warning; assignments record whether the labeler has revealed the task.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("warning", sa.String, nullable=False, server_default=""))
    op.add_column("places", sa.Column("is_revealed", sa.Boolean, nullable=False, server_default=sa.false()))
