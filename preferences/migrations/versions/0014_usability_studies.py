"""Usability studies: their conditions, each labeler's order of them, and the answers to the questionnaire.

The answers are append-only like judgments; an erasure may empty the comments that the erased person wrote.

Revision ID: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_ANSWER = ("answer_id", "study", "labeler", "condition", "load", "sus", "preferred", "created_at")
_ERASED = "EXISTS (SELECT 1 FROM labelers WHERE pseudonym = OLD.labeler AND is_erased)"
_TABLE = "usability_answers"


def upgrade() -> None:
    op.create_table(
        "usability_studies",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("conditions", sa.JSON, nullable=False),
        sa.Column("tasks_per_condition", sa.Integer, nullable=False),
        sa.Column("practice_tasks", sa.Integer, nullable=False),
        sa.Column("seed", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("stopped_at", sa.Float, nullable=False),
    )
    op.create_table(
        "usability_participants",
        sa.Column("study", sa.String, sa.ForeignKey("usability_studies.name"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("conditions", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("study", "labeler"),
    )
    op.create_index("usability_participants_by_labeler", "usability_participants", ["labeler"])
    op.create_table(
        _TABLE,
        sa.Column("answer_id", sa.Integer, primary_key=True),
        sa.Column("study", sa.String, sa.ForeignKey("usability_studies.name"), nullable=False),
        sa.Column("labeler", sa.String, nullable=False),
        sa.Column("condition", sa.Integer, nullable=False),
        sa.Column("load", sa.JSON, nullable=False),
        sa.Column("sus", sa.JSON, nullable=False),
        sa.Column("preferred", sa.Integer, nullable=False),
        sa.Column("comment", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.UniqueConstraint("study", "labeler", "condition", name="usability_answers_once"),
    )
    (_sqlite if op.get_bind().dialect.name == "sqlite" else _postgresql)()


def _sqlite() -> None:
    same = " AND ".join(f'NEW."{name}" IS OLD."{name}"' for name in _ANSWER)
    _refuse("UPDATE", f"NOT ({same} AND NEW.comment = '\"\"' AND {_ERASED})")
    _refuse("DELETE", "1")
    taken = (
        f"EXISTS (SELECT 1 FROM {_TABLE} WHERE answer_id = NEW.answer_id"
        " OR (study = NEW.study AND labeler = NEW.labeler AND condition = NEW.condition))"
    )
    _refuse("INSERT", taken, name="replace", refused="REPLACE")


def _refuse(verb: str, condition: str, *, name: str = "", refused: str = "") -> None:
    op.execute(
        f"CREATE TRIGGER {_TABLE}_refuse_{name or verb.lower()} BEFORE {verb} ON {_TABLE} WHEN {condition}"
        f" BEGIN SELECT RAISE(ABORT, '{_TABLE} are append-only: {refused or verb} refused'); END"
    )


def _postgresql() -> None:
    same = " AND ".join(f'NEW."{name}"::text IS NOT DISTINCT FROM OLD."{name}"::text' for name in _ANSWER)
    op.execute(
        f"CREATE FUNCTION {_TABLE}_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$"
        f" BEGIN IF {same} AND NEW.comment::text = '\"\"' AND {_ERASED} THEN RETURN NEW; END IF;"
        f" RAISE EXCEPTION '{_TABLE} are append-only: UPDATE refused'; END $$"
    )
    op.execute(
        f"CREATE FUNCTION {_TABLE}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        f" BEGIN RAISE EXCEPTION '{_TABLE} are append-only: % refused', TG_OP; END $$"
    )
    for name, verb, each in (("refuse", "DELETE OR TRUNCATE", "STATEMENT"), ("refuse_update", "UPDATE", "ROW")):
        op.execute(
            f"CREATE TRIGGER {_TABLE}_{name} BEFORE {verb} ON {_TABLE}"
            f" FOR EACH {each} EXECUTE FUNCTION {_TABLE}_{name}()"
        )
