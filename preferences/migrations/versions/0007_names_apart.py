"""Names move to a table of their own; judgments, assignments and the audit log get random pseudonyms instead.

Only an erasure may then change a judgment (empty the note of an erased labeler) or a name (empty it).

Revision ID: 0007
"""

import re
import secrets

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_NOBODY = re.compile(r"labeler-[0-9a-f]{12}|unknown( \d+)?|consensus")  # names that are kept as pseudonyms
_NOT_PEOPLE = "('', 'command line', 'server')"
_ABOUT_PEOPLE = "act NOT IN ('exported', 'read')"  # then the subject is a person, otherwise a batch
_JUDGMENT = (
    "judgment_id", "task", "labeler", "revision", "kind", "ranks", "ratings", "flags", "shown_order",
    "instructions_version", "milliseconds", "client", "created_at",
)  # fmt: skip
_ERASED = "EXISTS (SELECT 1 FROM labelers WHERE pseudonym = OLD.labeler AND is_erased)"


def upgrade() -> None:
    table = op.create_table(
        "labelers",
        sa.Column("pseudonym", sa.String, primary_key=True),
        sa.Column("name", sa.String, unique=True),
        sa.Column("is_erased", sa.Boolean, nullable=False),
    )
    rows = [_row(name) for name in _names()]
    if rows:
        op.bulk_insert(table, rows)
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    _drop_triggers(is_sqlite=is_sqlite)
    for target, column, where in (
        ("judgments", "labeler", "1 = 1"),
        ("places", "labeler", "labeler IS NOT NULL"),
        ("people_acts", "actor", f"actor NOT IN {_NOT_PEOPLE}"),
        ("people_acts", "subject", _ABOUT_PEOPLE),
    ):
        pseudonym = f"(SELECT pseudonym FROM labelers WHERE name = {target}.{column})"
        op.execute(f"UPDATE {target} SET {column} = coalesce({pseudonym}, {column}) WHERE {where}")
    (_sqlite_triggers if is_sqlite else _postgresql_triggers)()


def _names() -> list[str]:
    """Returns everybody who is named anywhere, sorted."""
    parts = (
        "SELECT labeler AS name FROM judgments",
        "SELECT labeler FROM places WHERE labeler IS NOT NULL",
        "SELECT name FROM accounts",
        "SELECT name FROM invitations",
        f"SELECT actor FROM people_acts WHERE actor NOT IN {_NOT_PEOPLE}",
        f"SELECT subject FROM people_acts WHERE {_ABOUT_PEOPLE}",
    )
    return sorted(op.get_bind().scalars(sa.text(" UNION ".join(parts))))


def _row(name: str) -> dict[str, object]:
    if _NOBODY.fullmatch(name):
        return {"pseudonym": name, "name": None, "is_erased": False}
    return {"pseudonym": f"labeler-{secrets.token_hex(6)}", "name": name, "is_erased": False}


def _drop_triggers(*, is_sqlite: bool) -> None:
    for table in ("judgments", "people_acts"):
        if is_sqlite:
            op.execute(f"DROP TRIGGER {table}_refuse_update")
        else:
            op.execute(f"DROP TRIGGER {table}_refuse ON {table}")


def _sqlite_triggers() -> None:
    same = " AND ".join(f"NEW.{name} IS OLD.{name}" for name in _JUDGMENT)
    _sqlite_trigger("judgments", "UPDATE", f"NOT ({same} AND NEW.note = '\"\"' AND {_ERASED})")
    _sqlite_trigger("people_acts", "UPDATE", "1")
    _sqlite_trigger("labelers", "UPDATE", "NOT (NEW.pseudonym IS OLD.pseudonym AND NEW.name IS NULL AND NEW.is_erased)")
    _sqlite_trigger("labelers", "DELETE", "1")


def _sqlite_trigger(table: str, verb: str, condition: str) -> None:
    op.execute(
        f"CREATE TRIGGER {table}_refuse_{verb.lower()} BEFORE {verb} ON {table} WHEN {condition}"
        f" BEGIN SELECT RAISE(ABORT, '{table} are append-only: {verb} refused'); END"
    )


def _postgresql_triggers() -> None:
    same = " AND ".join(f"NEW.{name}::text IS NOT DISTINCT FROM OLD.{name}::text" for name in _JUDGMENT)
    erasures = {
        "judgments": f"{same} AND NEW.note::text = '\"\"' AND {_ERASED}",
        "labelers": "NEW.pseudonym = OLD.pseudonym AND NEW.name IS NULL AND NEW.is_erased",
    }
    op.execute(
        "CREATE FUNCTION labelers_refuse() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN RAISE EXCEPTION 'labelers are append-only: % refused', TG_OP; END $$"
    )
    for table, is_erasure in erasures.items():
        op.execute(
            f"CREATE TRIGGER {table}_refuse BEFORE DELETE OR TRUNCATE ON {table}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION {table}_refuse()"
        )
        op.execute(
            f"CREATE FUNCTION {table}_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$"
            f" BEGIN IF {is_erasure} THEN RETURN NEW; END IF;"
            f" RAISE EXCEPTION '{table} are append-only: UPDATE refused'; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_refuse_update BEFORE UPDATE ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION {table}_refuse_update()"
        )
    op.execute(
        "CREATE TRIGGER people_acts_refuse BEFORE UPDATE OR DELETE OR TRUNCATE ON people_acts"
        " FOR EACH STATEMENT EXECUTE FUNCTION people_acts_refuse()"
    )
