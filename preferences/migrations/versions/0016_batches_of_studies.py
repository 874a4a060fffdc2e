"""The batches of each usability study as rows with an index. Every lease looks up whether its task is in a study.

Revision ID: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    table = op.create_table(
        "usability_batches",
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("study", sa.String, sa.ForeignKey("usability_studies.name"), nullable=False),
        sa.PrimaryKeyConstraint("batch", "study"),
    )
    studies = sa.table("usability_studies", sa.column("name"), sa.column("conditions", sa.JSON))
    for study in op.get_bind().execute(sa.select(studies)).all():
        batches = sorted({one["batch"] for one in study.conditions})
        op.bulk_insert(table, [{"batch": batch, "study": study.name} for batch in batches])
