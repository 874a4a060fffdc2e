"""All tables of the label store, and the triggers that keep judgments, names and the audit log append-only.

Revisions 0001 to 0008 belonged to unreleased versions; `preferences.database` refuses their stores.

Revision ID: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = None

_JUDGMENT = (
    "judgment_id", "task", "labeler", "revision", "kind", "ranks", "ratings", "flags", "shown_order",
    "instructions_version", "milliseconds", "client", "created_at",
)  # fmt: skip
_ERASED = "EXISTS (SELECT 1 FROM labelers WHERE pseudonym = OLD.labeler AND is_erased)"


def upgrade() -> None:
    _create_tasks()
    _create_judgments()
    _create_people()
    (_sqlite_triggers if op.get_bind().dialect.name == "sqlite" else _postgresql_triggers)()


def _create_tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("task_id", sa.String, nullable=False, unique=True),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("num_labelers", sa.Integer, nullable=False),
        sa.Column("prompt", sa.JSON, nullable=False),
        sa.Column("responses", sa.JSON, nullable=False),
        sa.Column("sources", sa.JSON, nullable=False),
        sa.Column("objective", sa.String, nullable=False),
        sa.Column("gold_ranks", sa.JSON, nullable=False),
        sa.Column("repeat_of", sa.String, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("warning", sa.String, nullable=False, server_default=""),
        sa.Column("handle", sa.String, nullable=False),
    )
    op.create_index("tasks_by_handle", "tasks", ["handle"], unique=True)
    op.create_index("tasks_by_batch", "tasks", ["batch", "position"])
    op.create_table(
        "places",
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("batch", sa.String, nullable=False),
        sa.Column("original", sa.Integer, nullable=False),
        sa.Column("labeler", sa.String),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("is_done", sa.Boolean, nullable=False),
        sa.Column("given_at", sa.Float, nullable=False),
        sa.Column("is_revealed", sa.Boolean, nullable=False, server_default=sa.false()),
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
    op.create_index(
        "places_held",
        "places",
        ["labeler", "task"],
        sqlite_where=sa.text("is_done = 0 AND labeler IS NOT NULL"),
        postgresql_where=sa.text("NOT is_done AND labeler IS NOT NULL"),
    )


def _create_judgments() -> None:
    op.create_table(
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
    op.create_table(
        "labelers",
        sa.Column("pseudonym", sa.String, primary_key=True),
        sa.Column("name", sa.String, unique=True),
        sa.Column("is_erased", sa.Boolean, nullable=False),
    )


def _create_people() -> None:
    op.create_table(
        "accounts",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("key_hash", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("read_version", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "sessions",
        sa.Column("token_hash", sa.String, primary_key=True),
        sa.Column("account", sa.String, sa.ForeignKey("accounts.name"), nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
    )
    op.create_table(
        "invitations",
        sa.Column("code_hash", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        sa.Column("invited_by", sa.String, nullable=False),
    )
    op.create_table(
        "people_acts",
        sa.Column("act_id", sa.Integer, primary_key=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("act", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "instructions",
        sa.Column("version", sa.String, primary_key=True),
        sa.Column("text", sa.JSON, nullable=False),
        sa.Column("flags", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )


def _sqlite_triggers() -> None:
    same = " AND ".join(f"NEW.{name} IS OLD.{name}" for name in _JUDGMENT)
    is_other_update = {
        "judgments": f"NOT ({same} AND NEW.note = '\"\"' AND {_ERASED})",
        "people_acts": "1",
        "labelers": "NOT (NEW.pseudonym IS OLD.pseudonym AND NEW.name IS NULL AND NEW.is_erased)",
    }
    for table, condition in is_other_update.items():
        for verb, refused in (("UPDATE", condition), ("DELETE", "1")):
            op.execute(
                f"CREATE TRIGGER {table}_refuse_{verb.lower()} BEFORE {verb} ON {table} WHEN {refused}"
                f" BEGIN SELECT RAISE(ABORT, '{table} are append-only: {verb} refused'); END"
            )


def _postgresql_triggers() -> None:
    same = " AND ".join(f"NEW.{name}::text IS NOT DISTINCT FROM OLD.{name}::text" for name in _JUDGMENT)
    erasures = {
        "judgments": f"{same} AND NEW.note::text = '\"\"' AND {_ERASED}",
        "people_acts": "",
        "labelers": "NEW.pseudonym = OLD.pseudonym AND NEW.name IS NULL AND NEW.is_erased",
    }
    for table, is_erasure in erasures.items():
        op.execute(
            f"CREATE FUNCTION {table}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN RAISE EXCEPTION '{table} are append-only: % refused', TG_OP; END $$"
        )
        verbs = "DELETE OR TRUNCATE" if is_erasure else "UPDATE OR DELETE OR TRUNCATE"
        op.execute(
            f"CREATE TRIGGER {table}_refuse BEFORE {verbs} ON {table}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION {table}_refuse()"
        )
        if is_erasure:
            op.execute(
                f"CREATE FUNCTION {table}_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$"
                f" BEGIN IF {is_erasure} THEN RETURN NEW; END IF;"
                f" RAISE EXCEPTION '{table} are append-only: UPDATE refused'; END $$"
            )
            op.execute(
                f"CREATE TRIGGER {table}_refuse_update BEFORE UPDATE ON {table}"
                f" FOR EACH ROW EXECUTE FUNCTION {table}_refuse_update()"
            )
