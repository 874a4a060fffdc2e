"""The tables as `preferences.schema` declares them, the full-text index, and the triggers that refuse changes.

Judgments, messages, names and the audit log are append-only, tasks never change, and assignments stay complete; an
erasure may empty what the erased person wrote, and no row can be replaced. SQLite's `INSERT OR REPLACE` and `UPDATE OR
REPLACE` delete the row that has the same key without firing its delete trigger (unless the connection sets
`recursive_triggers`), so BEFORE triggers refuse a key that is already in use. On PostgreSQL, `INSERT .. ON CONFLICT DO
UPDATE` is an update.

It is the first revision, so it takes the tables from the schema. A later revision that changes a table must freeze
them here first: write them out as they were.

Revision ID: 0017
"""

from alembic import op

from preferences.schema import metadata

revision = "0017"
down_revision = None

KEYS = {
    "tasks": ("position", "task_id", "handle"),
    "places": ("task, place", "labeler, task"),
    "judgments": ("judgment_id", "task, labeler, revision"),
    "questions": ("message_id",),
    "labelers": ("pseudonym", "name"),
    "people_acts": ("act_id",),
}
_FIXED = {  # columns that no update may change
    "places": ("task", "place", "batch", "original"),
    "judgments": (
        "judgment_id", "task", "labeler", "revision", "kind", "ranks", "ratings", "flags", "shown_order",
        "instructions_version", "milliseconds", "client", "created_at", "annotations",
    ),
    "questions": ("message_id", "task", "labeler", "author", "kind", "created_at"),
}  # fmt: skip
_EMPTIED = {"judgments": ("note", "labeler"), "questions": ("text", "author")}  # by the erasure of its author
_NAME_ERASED = "NEW.pseudonym = OLD.pseudonym AND NEW.name IS NULL AND NEW.is_erased"


def upgrade() -> None:
    metadata.create_all(op.get_bind())
    (_sqlite if op.get_bind().dialect.name == "sqlite" else _postgresql)()


def _erasure(table: str, same: str, as_text: str = "") -> str:
    """Returns the condition that an update only empties what an erased person wrote.

    `same` compares a column's old and new value; `as_text` casts JSON for a comparison.
    """
    emptied, person = _EMPTIED[table]
    kept = " AND ".join(same.format(name=name) for name in _FIXED[table])
    is_erased = f"EXISTS (SELECT 1 FROM labelers WHERE pseudonym = OLD.{person} AND is_erased)"
    return f"{kept} AND NEW.{emptied}{as_text} = '\"\"' AND {is_erased}"


# ---- SQLite ----


def _sqlite() -> None:
    # A trigger fills the full-text index, so that a restored backup has it too.
    op.execute("CREATE VIRTUAL TABLE task_words USING fts5(text, content='task_texts', content_rowid='task')")
    op.execute(
        "CREATE TRIGGER task_texts_words AFTER INSERT ON task_texts"
        " BEGIN INSERT INTO task_words (rowid, text) VALUES (NEW.task, NEW.text); END"
    )
    moved = " OR ".join(f"NEW.{name} IS NOT OLD.{name}" for name in _FIXED["places"])
    is_other = "EXISTS (SELECT 1 FROM places WHERE labeler = NEW.labeler AND task = NEW.task AND place <> NEW.place)"
    changed = {table: f"NOT ({_erasure(table, 'NEW.{name} IS OLD.{name}')})" for table in _EMPTIED}
    changed |= {"places": f"{moved} OR {is_other}", "labelers": f"NOT ({_NAME_ERASED})"}
    for table, keys in KEYS.items():
        taken = " OR ".join(_is_taken(table, key) for key in keys)
        _sqlite_trigger(table, "INSERT", "refuse_replace", taken, "REPLACE")
        _sqlite_trigger(table, "UPDATE", "refuse_update", changed.get(table, "1"), "UPDATE")
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


# ---- PostgreSQL ----


def _postgresql() -> None:
    op.execute("CREATE INDEX task_texts_words ON task_texts USING gin (to_tsvector('simple', text))")
    same = "NEW.{name}::text IS NOT DISTINCT FROM OLD.{name}::text"
    allowed = {table: _erasure(table, same, "::text") for table in _EMPTIED}
    allowed |= {"places": " AND ".join(same.format(name=name) for name in _FIXED["places"]), "labelers": _NAME_ERASED}
    for table in KEYS:
        op.execute(
            f"CREATE FUNCTION {table}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN IF TG_OP = 'UPDATE' THEN IF {allowed.get(table, 'false')} THEN RETURN NEW; END IF; END IF;"
            f" RAISE EXCEPTION '{table} are append-only: % refused', TG_OP; END $$"
        )
        for name, verbs, each in (("refuse", "DELETE OR TRUNCATE", "STATEMENT"), ("refuse_update", "UPDATE", "ROW")):
            op.execute(
                f"CREATE TRIGGER {table}_{name} BEFORE {verbs} ON {table}"
                f" FOR EACH {each} EXECUTE FUNCTION {table}_refuse()"
            )
