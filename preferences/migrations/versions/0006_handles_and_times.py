"""Tasks get random handles, which labelers see instead of ids; places record when they were leased.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("tasks", sa.Column("handle", sa.String, nullable=False, server_default=""))
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    random = "lower(hex(randomblob(12)))" if is_sqlite else "replace(gen_random_uuid()::text, '-', '')"
    op.execute(f"UPDATE tasks SET handle = {random}")
    op.create_index("tasks_by_handle", "tasks", ["handle"], unique=True)
    op.add_column("places", sa.Column("given_at", sa.Float, nullable=False, server_default="0"))
