"""Criteria, marked passages and edits of a judgment, and questions to the lead.

Questions are append-only like judgments; an erasure may empty the texts that the erased person wrote.

Revision ID: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_JUDGMENT = (
    "judgment_id", "task", "labeler", "revision", "kind", "ranks", "ratings", "flags", "shown_order",
    "instructions_version", "milliseconds", "client", "created_at", "annotations",
)  # fmt: skip
_MESSAGE = ("message_id", "task", "labeler", "author", "kind", "created_at")
_ERASED = "EXISTS (SELECT 1 FROM labelers WHERE pseudonym = OLD.{person} AND is_erased)"


def upgrade() -> None:
    op.add_column("judgments", sa.Column("annotations", sa.JSON, nullable=False, server_default="{}"))
    op.create_table(
        "questions",
        sa.Column("message_id", sa.Integer, primary_key=True),
        sa.Column("task", sa.Integer, sa.ForeignKey("tasks.position"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("author", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("text", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_index("questions_by_labeler", "questions", ["labeler", "task", "message_id"])
    op.create_index("questions_by_task", "questions", ["task", "labeler", "message_id"])
    (_sqlite if op.get_bind().dialect.name == "sqlite" else _postgresql)()


def _sqlite() -> None:
    op.execute("DROP TRIGGER judgments_refuse_update")
    for table, columns, emptied, person in (
        ("judgments", _JUDGMENT, "note", "labeler"),
        ("questions", _MESSAGE, "text", "author"),
    ):
        same = " AND ".join(f"NEW.{name} IS OLD.{name}" for name in columns)
        erasure = f"{same} AND NEW.{emptied} = '\"\"' AND {_ERASED.format(person=person)}"
        _refuse(table, "UPDATE", f"NOT ({erasure})")
    _refuse("questions", "DELETE", "1")
    taken = "EXISTS (SELECT 1 FROM questions WHERE message_id = NEW.message_id)"
    _refuse("questions", "INSERT", taken, name="replace", refused="REPLACE")


def _refuse(table: str, verb: str, condition: str, *, name: str = "", refused: str = "") -> None:
    op.execute(
        f"CREATE TRIGGER {table}_refuse_{name or verb.lower()} BEFORE {verb} ON {table} WHEN {condition}"
        f" BEGIN SELECT RAISE(ABORT, '{table} are append-only: {refused or verb} refused'); END"
    )


def _postgresql() -> None:
    for table, columns, emptied, person in (
        ("judgments", _JUDGMENT, "note", "labeler"),
        ("questions", _MESSAGE, "text", "author"),
    ):
        same = " AND ".join(f"NEW.{name}::text IS NOT DISTINCT FROM OLD.{name}::text" for name in columns)
        erasure = f"{same} AND NEW.{emptied}::text = '\"\"' AND {_ERASED.format(person=person)}"
        op.execute(
            f"CREATE OR REPLACE FUNCTION {table}_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN IF {erasure} THEN RETURN NEW; END IF;"
            f" RAISE EXCEPTION '{table} are append-only: UPDATE refused'; END $$"
        )
    op.execute(
        "CREATE FUNCTION questions_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE EXCEPTION 'questions are append-only: % refused', TG_OP; END $$"
    )
    for name, verb, each in (("refuse", "DELETE OR TRUNCATE", "STATEMENT"), ("refuse_update", "UPDATE", "ROW")):
        op.execute(
            f"CREATE TRIGGER questions_{name} BEFORE {verb} ON questions"
            f" FOR EACH {each} EXECUTE FUNCTION questions_{name}()"
        )
