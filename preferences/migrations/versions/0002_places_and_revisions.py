"""Places (assignments) replace leases, so that finding the next task stays fast; revisions make an undo an append.

Existing judgments become first revisions. Flags, which were per task, become the note.

Revision ID: 0002
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

ROWS_AT_ONCE = 1_000


def upgrade() -> None:
    for name, kind, value in (
        ("objective", sa.String, "overall"),
        ("gold_ranks", sa.JSON, "[]"),
        ("repeat_of", sa.String, ""),
        ("details", sa.JSON, "{}"),
    ):
        op.add_column("tasks", sa.Column(name, kind, nullable=False, server_default=value))
    op.drop_table("leases")  # open pages request their task again
    op.rename_table("judgments", "judgments_before")
    judgments, places = _create_judgments(), _create_places()
    _copy_judgments(judgments)
    _fill_places(places)
    op.drop_table("judgments_before")
    _refuse_changes()


def _create_judgments() -> sa.Table:
    table = op.create_table(
        "judgments",
        sa.Column("judgment_id", sa.Integer, primary_key=True),
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("ratings", sa.JSON, nullable=False),
        sa.Column("flags", sa.JSON, nullable=False),
        sa.Column("note", sa.JSON, nullable=False),
        sa.Column("shown_order", sa.JSON, nullable=False),
        sa.Column("instructions_version", sa.String, nullable=False),
        sa.Column("milliseconds", sa.Integer, nullable=False),
        sa.Column("client", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.UniqueConstraint("task", "labeler", "revision", name="judgments_once"),
    )
    op.create_index("judgments_by_labeler", "judgments", ["labeler", "judgment_id"])
    return table


def _create_places() -> sa.Table:
    table = op.create_table(
        "places",
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("original", sa.Integer, nullable=False),
        sa.Column("labeler", sa.String),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("is_done", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("task", "place"),
    )
    op.create_index(
        "places_open",
        "places",
        ["batch", "task", "place"],
        sqlite_where=sa.text("is_done = 0"),
        postgresql_where=sa.text("NOT is_done"),
    )
    op.create_index("places_by_labeler", "places", ["labeler", "task"], unique=True)
    return table


def _copy_judgments(judgments: sa.Table) -> None:
    connection = op.get_bind()
    found = connection.execute(sa.text("SELECT * FROM judgments_before ORDER BY judgment_id")).mappings()
    for rows in found.partitions(ROWS_AT_ONCE):
        connection.execute(judgments.insert(), [_copied(dict(row)) for row in rows])


def _copied(row: dict[str, Any]) -> dict[str, Any]:
    lists = {name: json.loads(row[name]) for name in ("ranks", "shown_order")}
    note = ", ".join(json.loads(row["flags"]))
    return {**row, **lists, "revision": 0, "kind": "answer", "ratings": [], "flags": [], "note": note}


def _fill_places(places: sa.Table) -> None:
    connection = op.get_bind()
    judged_by: dict[int, list[str]] = {}
    for task, labeler in connection.execute(sa.text("SELECT task, labeler FROM judgments ORDER BY judgment_id")):
        judged_by.setdefault(task, []).append(labeler)
    found = connection.execute(sa.text("SELECT position, batch, num_labelers FROM tasks ORDER BY position"))
    for rows in found.partitions(ROWS_AT_ONCE):
        connection.execute(
            places.insert(),
            [
                {
                    "task": position,
                    "place": place,
                    "batch": batch,
                    "original": 0,
                    "labeler": labeler,
                    "expires_at": 0.0,
                    "is_done": labeler is not None,
                }
                for position, batch, num_labelers in rows
                for place, labeler in enumerate([*judged_by.get(position, []), *[None] * num_labelers][:num_labelers])
            ],
        )


def _refuse_changes() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER judgments_refuse_{verb.lower()} BEFORE {verb} ON judgments"
                f" BEGIN SELECT RAISE(ABORT, 'judgments are append-only: {verb} refused'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION judgments_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE EXCEPTION 'judgments are append-only: % refused', TG_OP; END $$"
    )
    op.execute(
        "CREATE TRIGGER judgments_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON judgments"
        " FOR EACH STATEMENT EXECUTE FUNCTION judgments_refuse()"
    )
