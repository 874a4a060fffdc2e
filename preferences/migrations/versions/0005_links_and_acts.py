"""One valid link per name, links that record who made them, and an audit log.

The newest link of each name is kept. Closed accounts lose their links, sessions and leases.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_CLOSED = "(SELECT name FROM accounts WHERE state = 'closed')"
_FIRST_LEAD = "lead"  # servers made a link for this name at each start until there was a lead


def upgrade() -> None:
    _take_from_closed_accounts()
    _keep_one_link_per_name()
    op.create_table(
        "people_acts",
        sa.Column("act_id", sa.Integer, primary_key=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    _refuse_changes()


def _take_from_closed_accounts() -> None:
    op.execute(f"DELETE FROM invitations WHERE name IN {_CLOSED}")
    op.execute(f"DELETE FROM sessions WHERE account IN {_CLOSED}")
    op.execute(
        f"UPDATE places SET labeler = NULL, expires_at = 0 WHERE NOT is_done AND labeler IN {_CLOSED}",
    )


def _keep_one_link_per_name() -> None:
    """Creates the table again, because SQLite cannot add a constraint to an existing table."""
    connection = op.get_bind()
    before = connection.execute(sa.text("SELECT code_hash, name, role, expires_at FROM invitations"))
    newest: dict[str, dict[str, object]] = {}
    for row in sorted(before.mappings(), key=lambda row: (row["expires_at"], row["code_hash"])):
        is_first = (row["name"], row["role"]) == (_FIRST_LEAD, "lead")
        newest[row["name"]] = {**row, "invited_by": "server" if is_first else ""}
    if connection.scalar(sa.text("SELECT count(*) FROM accounts WHERE role = 'lead' AND state <> 'closed'")):
        newest.pop(_FIRST_LEAD, None)
    op.drop_table("invitations")
    table = op.create_table(
        "invitations",
        sa.Column("code_hash", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("invited_by", sa.String, nullable=False),
    )
    if newest:
        op.bulk_insert(table, list(newest.values()))


def _refuse_changes() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER people_acts_refuse_{verb.lower()} BEFORE {verb} ON people_acts"
                f" BEGIN SELECT RAISE(ABORT, 'people_acts are append-only: {verb} refused'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION people_acts_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE EXCEPTION 'people_acts are append-only: % refused', TG_OP; END $$"
    )
    op.execute(
        "CREATE TRIGGER people_acts_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON people_acts"
        " FOR EACH STATEMENT EXECUTE FUNCTION people_acts_refuse()"
    )
