"""An index for a labeler's leases, which is small however many tasks are done or open.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index(
        "places_held",
        "places",
        ["labeler", "task"],
        sqlite_where=sa.text("is_done = 0 AND labeler IS NOT NULL"),
        postgresql_where=sa.text("NOT is_done AND labeler IS NOT NULL"),
    )
