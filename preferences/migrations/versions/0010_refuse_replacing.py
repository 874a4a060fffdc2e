"""Triggers that keep tasks unchanged and assignments complete, and that refuse to replace rows.

SQLite's `INSERT OR REPLACE` and `UPDATE OR REPLACE` delete the row that has the same key without firing its delete
trigger (unless the connection sets `recursive_triggers`), so BEFORE triggers refuse a key that is already in use. On
PostgreSQL, `INSERT .. ON CONFLICT DO UPDATE` is an update.

Revision ID: 0010
"""

from alembic import op

revision = "0010"
down_revision = "0009"

KEYS = {
    "tasks": ("position", "task_id", "handle"),
    "places": ("task, place", "labeler, task"),
    "judgments": ("judgment_id", "task, labeler, revision"),
    "labelers": ("pseudonym", "name"),
    "people_acts": ("act_id",),
}
_MOVED = ("task", "place", "batch", "original")  # columns of an assignment that never change


def upgrade() -> None:
    (_sqlite if op.get_bind().dialect.name == "sqlite" else _postgresql)()


def _sqlite() -> None:
    for table, keys in KEYS.items():
        taken = " OR ".join(_is_taken(table, key) for key in keys)
        _sqlite_trigger(table, "INSERT", "refuse_replace", taken, "REPLACE")
    moved = " OR ".join(f"NEW.{name} IS NOT OLD.{name}" for name in _MOVED)
    is_other = "EXISTS (SELECT 1 FROM places WHERE labeler = NEW.labeler AND task = NEW.task AND place <> NEW.place)"
    for table, refused in (("tasks", "1"), ("places", f"{moved} OR {is_other}")):
        _sqlite_trigger(table, "UPDATE", "refuse_update", refused, "UPDATE")
        _sqlite_trigger(table, "DELETE", "refuse_delete", "1", "DELETE")


def _is_taken(table: str, key: str) -> str:
    # Equality with a NULL is never true, so a free assignment and an unknown name occupy no key.
    same = " AND ".join(f"{column} = NEW.{column}" for column in key.split(", "))
    return f"EXISTS (SELECT 1 FROM {table} WHERE {same})"


def _sqlite_trigger(table: str, event: str, name: str, condition: str, refused: str) -> None:
    op.execute(
        f"CREATE TRIGGER {table}_{name} BEFORE {event} ON {table} WHEN {condition}"
        f" BEGIN SELECT RAISE(ABORT, '{table} are append-only: {refused} refused'); END"
    )


def _postgresql() -> None:
    moved = " OR ".join(f"NEW.{name} IS DISTINCT FROM OLD.{name}" for name in _MOVED)
    for table, when in (("tasks", ""), ("places", f"WHEN ({moved}) ")):
        op.execute(
            f"CREATE FUNCTION {table}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN RAISE EXCEPTION '{table} are append-only: % refused', TG_OP; END $$"
        )
        for name, verb, each in (
            ("refuse", "DELETE OR TRUNCATE", "STATEMENT"),
            ("refuse_update", "UPDATE", f"ROW {when}"),
        ):
            op.execute(
                f"CREATE TRIGGER {table}_{name} BEFORE {verb} ON {table}"
                f" FOR EACH {each} EXECUTE FUNCTION {table}_refuse()"
            )
