"""Names are kept apart from judgments: pseudonyms in exports, what is held about a person, and erasing them."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from files.rows import read_source
from preferences.accounts import Accounts
from preferences.database import open_engines, store_file
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.registry import FORMATS
from preferences.records import Answer, Judgment, Message, Task
from preferences.store import LabelStore

NAME, NOTE = "Zebulon Quibbleworth", "my neighbour Xanthippe says so"
LEAD = "Persephone Oglethorpe"
TASKS = [Task(f"t{n}", (Message("user", f"Say {n}"),), ("a", "b", "c"), ("x", "y", "z")) for n in range(4)]
pytestmark = pytest.mark.usefixtures("cheap_hashes")
TRAINING = ("rankings", "consensus", "trl", "hh", "demonstrations")


def fill(store: LabelStore, accounts: Accounts) -> None:
    """Two labelers and a lead, everything that the store can hold about them."""
    for name, role in ((NAME, "labeler"), ("bob", "labeler"), (LEAD, "lead")):
        accepted = accounts.accept(accounts.invite(name, role, by="command line" if role == "lead" else LEAD))  # type: ignore[arg-type]
        assert accepted is not None
        assert accounts.sign_in(name, accepted[1])
    store.add_tasks(TASKS, batch="main", num_labelers=2)
    for name in (NAME, "bob"):
        for number, lease in enumerate(store.lease_many(name, 3, seconds=60, batch="main")):
            if number == 2:
                store.skip(lease, NOTE, 9, client="t", instructions_version="1")
            else:
                answer = Answer((1, 2, 2) if name == "bob" else (2, 1, 3), 10 + number, (3, 2, 1), note=NOTE)
                store.submit(lease, answer, client="t", instructions_version="1")
    adjudicated = store.reopened(LEAD, "t1")
    store.adjudicate(adjudicated, Answer((1, 1, 2), 5, note="as agreed"), client="t", instructions_version="1")
    assert store.lease(NAME, seconds=60, batch="main") is not None
    accounts.invite(NAME, "labeler", by=LEAD)
    accounts.invite("cy", "labeler", by=LEAD)
    accounts.log(LEAD, "exported", "main (trl)")


def everything_in(url: str, postgres: Any) -> bytes:
    """All bytes of a SQLite store's files, or a dump of a PostgreSQL database with the planner's statistics."""
    path = store_file(url)
    if path is not None:
        return b"".join(part.read_bytes() for part in sorted(path.parent.glob(f"{path.name}*")))
    reader, _ = open_engines(url)
    with reader.connect() as connection:
        tables = connection.exec_driver_sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").scalars()
        asked = [*(f'SELECT t::text FROM "{name}" t' for name in tables), "SELECT s::text FROM pg_stats s"]
        said = "\n".join(row for one in asked for row in connection.exec_driver_sql(one).scalars())
        files = connection.exec_driver_sql(
            "SELECT pg_relation_filepath(oid) FROM pg_class WHERE relkind IN ('r', 'i', 't')"
            " AND relnamespace IN ('public'::regnamespace, 'pg_toast'::regnamespace) AND relfilenode <> 0"
        )
        connection.exec_driver_sql("CHECKPOINT")
        raw = b"".join((postgres.folder / "data" / file).read_bytes() for file in files.scalars())
    reader.dispose()
    return said.encode() + raw


def exports(store: LabelStore, folder: Path, *names: str) -> dict[str, str]:
    folder.mkdir()
    for name in names:
        export(store, FORMATS[name], folder / f"{name}.jsonl")
    return {name: (folder / f"{name}.jsonl").read_text() for name in names}


def test_a_person_is_exported_and_erased(new_database, tmp_path, request):
    url = new_database()
    postgres = request.getfixturevalue("postgres") if url.startswith("postgresql") else None
    with LabelStore(url) as store:
        accounts = Accounts(url)
        fill(store, accounts)
        pseudonym = accounts.pseudonyms()[NAME]

        # Exports have pseudonyms, which are the same each time; names only if they are wanted.
        before = exports(store, tmp_path / "before", *TRAINING, "heed")
        assert exports(store, tmp_path / "again", "trl", "heed") == {name: before[name] for name in ("trl", "heed")}
        assert pseudonym in before["rankings"]
        assert not any(name in text for text in before.values() for name in (NAME, LEAD, "bob"))
        export(store, FORMATS["rankings"], tmp_path / "named.jsonl", with_names=True)
        assert (tmp_path / "named.jsonl").read_text() == before["rankings"].replace(pseudonym, NAME).replace(
            accounts.pseudonyms()["bob"], "bob"
        ).replace(accounts.pseudonyms()[LEAD], LEAD)

        # What is held: everything that `fill` stored, other people by their pseudonyms.
        held = accounts.held_about(NAME, by=LEAD)
        json.dumps(held)
        assert (held["pseudonym"], held["account"]["state"], len(held["sessions_until"])) == (pseudonym, "new", 1)
        assert "key_hash" not in held["account"]
        assert [one["kind"] for one in held["judgments"]] == ["answer", "answer", "skip"]
        assert {one["note"] for one in held["judgments"]} == {NOTE}
        assert [one["task_id"] for one in held["leases"]] == ["t3"]
        assert len(held["links"]) == 1
        assert [one["action"] for one in held["audit_log"]] == ["invited", "joined", "signed in", "invited"]
        assert LEAD not in json.dumps(held)
        assert [(event.actor, event.action, event.subject) for event in accounts.audit_log()[:2]] == [
            (LEAD, "exported the data of", NAME), (LEAD, "exported", "main (trl)"),
        ]  # fmt: skip

        # Nobody can change a judgment or a name in other ways, before or after.
        others = [one for one in store.judgments("main") if one.labeler != NAME]
        refuse_changes(url, pseudonym)
        assert NAME.encode() in everything_in(url, postgres)
        assert accounts.erase(NAME, by=LEAD) == pseudonym
        refuse_changes(url, pseudonym)

        found = everything_in(url, postgres)
        assert NAME.encode() not in found
        assert found.count(NOTE.encode()) >= 1  # of bob
        assert accounts.account(NAME) is None
        assert NAME not in {link.name for link in accounts.links()}
        assert (accounts.audit_log()[0].action, accounts.audit_log()[0].subject) == ("erased", pseudonym)
        assert not any(NAME in (event.actor, event.subject) for event in accounts.audit_log())
        with pytest.raises(ValueError, match="holds nothing under this name"):
            accounts.erase(NAME)

        # Judgments stay, without notes; training data are the same bytes; the freed lease is open for others.
        after = exports(store, tmp_path / "after", *TRAINING, "heed")
        assert {name: after[name] for name in TRAINING} == {name: before[name] for name in TRAINING}
        assert [one for one in store.judgments("main") if one.labeler != pseudonym] == others
        assert [one.note for one in store.judgments("main") if one.labeler == pseudonym] == [""] * 3
        assert store.coverage("main")[0].judged_by == tuple(sorted(("bob", pseudonym)))
        assert store.batch_counts()[0].by_labeler == {"bob": 2, pseudonym: 2}
        assert store.batch_counts()[0].num_leased == 0

        # An erased lead leaves no name either, and the name may come back as somebody else.
        accounts.erase(LEAD)
        found = everything_in(url, postgres)
        assert LEAD.encode() not in found
        assert "as agreed" not in found.decode(errors="replace")
        accounts.invite(NAME, "labeler")
        assert accounts.pseudonyms()[NAME] != pseudonym
        accounts.close()

        # The export of a store with erased people can be imported, and gives the same labelers.
        with LabelStore(tmp_path / "copy.sqlite") as copy:
            store_found(copy, collect_all(FORMATS["heed"], read_source(str(tmp_path / "after/heed.jsonl"))), "")
            by = [(one.task_id, one.labeler, one.ranks) for one in copy.judgments("main")]
            assert by == [(one.task_id, one.labeler, one.ranks) for one in store.judgments("main", with_names=False)]
            assert exports(copy, tmp_path / "copied", "rankings") == {"rankings": before["rankings"]}


def refuse_changes(url: str, pseudonym: str) -> None:
    reader, writer = open_engines(url)
    for statement in (
        "UPDATE judgments SET note = '\"\"' WHERE labeler <> '{0}'",
        "UPDATE judgments SET note = '\"x\"'",
        "UPDATE judgments SET note = '\"\"', milliseconds = 1 WHERE labeler = '{0}'",
        "UPDATE judgments SET labeler = 'x' WHERE labeler = '{0}'",
        "DELETE FROM judgments",
        "UPDATE labelers SET name = 'x' WHERE pseudonym = '{0}'",
        "UPDATE labelers SET is_erased = (1 = 1), pseudonym = 'x', name = NULL WHERE pseudonym = '{0}'",
        "DELETE FROM labelers",
        "UPDATE people_acts SET subject = 'x'",
    ):
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="append-only"), writer.begin() as connection:
            connection.execute(sqlalchemy.text(statement.format(pseudonym)))
    reader.dispose()


def test_labelers_without_a_name_keep_what_they_are_called(new_database):
    """Published data names no labelers: "unknown" is its own pseudonym, and no account may have such a name."""
    url = new_database()
    with LabelStore(url) as store:
        accounts = Accounts(url)
        store.add_tasks(TASKS[:1], batch="b", num_labelers=4)
        store.import_judgments(
            "b",
            [
                Judgment("t0", name, 0, "answer", (1, 2, 3), (), (), "", (0, 1, 2), "1", 5, "page", 7.0)
                for name in ("ann", "unknown", "unknown 2")
            ],
        )
        accounts.invite("eve", "lead")
        accounts.invite("ann", "labeler", by="eve")
        accounts.log("eve", "exported", "b (trl)")
        assert [one.labeler for one in store.judgments("b")] == ["ann", "unknown", "unknown 2"]
        ann, *unknown = [one.labeler for one in store.judgments("b", with_names=False)]
        assert accounts.pseudonyms()["ann"] == ann != "ann"
        assert unknown == ["unknown", "unknown 2"]
        assert store.coverage("b")[0].judged_by == ("ann", "unknown", "unknown 2")
        assert [(one.actor, one.action, one.subject) for one in accounts.audit_log()] == [
            ("eve", "exported", "b (trl)"), ("eve", "invited", "ann"), ("command line", "invited", "eve"),
        ]  # fmt: skip
        accounts.erase("ann")
        assert [one.labeler for one in store.judgments("b")] == [ann, "unknown", "unknown 2"]
        for name in ("unknown", "unknown 3", "labeler-0123456789ab", "server"):
            with pytest.raises(ValueError, match="is reserved"):
                accounts.invite(name, "labeler")
        accounts.close()
