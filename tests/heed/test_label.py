"""`heed label` in this process, on a label store."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import heed.commands.label
from preferences.formats.registry import FORMATS
from preferences.store import LabelStore
from tests.rows import jsonl

ROOT = Path(__file__).parents[2]
REAL = Path(__file__).parents[3] / "shared" / "data"
GOOD = {"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."}
TASK = {"task_id": "t", "batch": "b", "prompt": [{"role": "user", "content": "Why?"}], "responses": ["So.", "No."]}
EMPTY = GOOD | {"chosen": "\n\nHuman: Why?\n\nAssistant:"}


@pytest.fixture
def book(sqlite_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LabelStore]:
    """The store that commands are given."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(sqlite_tables, "labels.sqlite")
    with LabelStore("labels.sqlite") as opened:
        yield opened


def whole(store: LabelStore) -> list[Any]:
    """Tasks and judgments of every batch."""
    return [(name, store.tasks(name), store.judgments(name)) for name in store.batches()]


def write(path: Path, *rows: Any) -> str:
    path.write_text(jsonl(rows))
    return str(path)


STORE = ("--store", "labels.sqlite")


def test_import_tells_what_it_found_and_stores_the_rest(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    file = write(tmp_path / "hh.jsonl", GOOD, EMPTY)
    arguments = ("import", file, *STORE, "--batch", "b", "--objective", "harmless")
    for _ in range(2):
        code, out, err = heed_label(*arguments)
        assert code == 0
        assert "2 rows: 1 tasks, 1 judgments by unknown; stored in labels.sqlite" in out
        assert "1  empty reply" in out
        assert "format: hh (Anthropic's HH-RLHF): its rows have chosen and rejected begin with" in err
        assert f"{file}: line 2: chosen ends with an empty reply; left out" in err
        (stored,) = book.tasks("b")
        assert (stored.task.objective, stored.num_labelers, len(book.judgments("b"))) == ("harmless", 1, 1)


def test_a_task_that_nobody_has_judged_needs_four_fields(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    """The example of docs/labels.md, with and without its other fields."""
    shown = re.search(r'^(\{"task_id": .*\})$', (ROOT / "docs/labels.md").read_text(), re.MULTILINE)
    assert shown is not None
    example = json.loads(shown[1])
    file = write(tmp_path / "tasks.jsonl", example, TASK, {**TASK, "task_id": "u", "details": {"from": "x"}})
    code, out, err = heed_label("import", file, *STORE)
    assert (code, "format: heed" in err) == (0, True)
    assert "3 rows: 3 tasks, not yet judged; stored in labels.sqlite" in out
    (stored,) = book.tasks(example["batch"])
    assert stored.task.sources == tuple(example["sources"])
    plain, detailed = book.tasks("b")
    assert (plain.task.sources, plain.task.objective, plain.num_labelers) == (("unknown",) * 2, "overall", 1)
    assert (plain.task.gold_ranks, plain.task.details, detailed.task.details) == ((), {}, {"from": "x"})
    nowhere = {name: value for name, value in TASK.items() if name != "batch"}
    code, _, err = heed_label("import", write(tmp_path / "none.jsonl", nowhere), *STORE)
    assert (code, "has no batch; a batch name was expected (--batch)" in err) == (2, True)
    new = ("--store", str(tmp_path / "new.sqlite"))
    assert heed_label("import", str(tmp_path / "none.jsonl"), *new)[0] == 2
    assert not list(tmp_path.glob("new.sqlite*"))  # no store is made for nothing


def test_check_stores_nothing(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    code, out, _ = heed_label("import", write(tmp_path / "hh.jsonl", GOOD), "--check")
    assert (code, book.batches()) == (0, [])
    assert "1 judgments by unknown; checked" in out


def test_every_warning_goes_to_the_report_file(tmp_path: Path, heed_label: Any) -> None:
    file, report = write(tmp_path / "hh.jsonl", GOOD, *[EMPTY] * 12), tmp_path / "odd.jsonl"
    _, _, err = heed_label("import", file, "--check", "--report", str(report))
    assert "and 2 more" in err
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert [row["where"] for row in rows] == [f"{file}: line {n}" for n in range(2, 14)]
    assert {row["kind"] for row in rows} == {"empty reply"}


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([GOOD, EMPTY], ("--strict",), "line 2: empty reply: chosen ends with an empty reply; --strict refuses it"),
        ([GOOD, {"chosen": GOOD["chosen"]}], ("--format", "hh"), "line 2: field 'rejected' is missing"),
        ([EMPTY], (), "1 rows, none of which holds a judgment"),
        ([{"text": "a"}], (), "no known format has the fields"),
        ([], (), "a.jsonl: there are no rows; at least one was expected"),
        ([TASK, GOOD], (), "line 2: fields 'task_id', 'prompt', 'responses' are missing; found ['chosen', 'rejected']"),
        ([GOOD, *[{"chosen": GOOD["chosen"]}] * 2], (), "2 of 3 rows are invalid:"),
        ([GOOD, *[{"chosen": GOOD["chosen"]}] * 2], (), "line 3: field 'rejected' is missing; found ['chosen']"),
        ([GOOD], ("--format", "hhh"), "format 'hhh': one of heed, rankings"),
    ],
)
def test_import_refuses(
    tmp_path: Path, book: LabelStore, heed_label: Any, rows: list[Any], options: tuple[str, ...], words: str
) -> None:
    code, out, err = heed_label("import", write(tmp_path / "a.jsonl", *rows), *STORE, "--batch", "b", *options)
    assert (code, out, book.batches()) == (2, "", [])
    assert words in err
    assert "Traceback" not in err


def test_import_needs_a_store_and_a_batch(tmp_path: Path, heed_label: Any) -> None:
    file = write(tmp_path / "a.jsonl", GOOD)
    assert "--store is missing" in heed_label("import", file, "--batch", "b")[2]
    assert "--batch is missing; format 'hh' names no batches" in heed_label("import", file, *STORE)[2]
    assert "HF_HUB_OFFLINE is set" in heed_label("import", "nobody/nothing", "--check")[2]


def test_export_and_import_give_the_same_store(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    other = GOOD | {"rejected": GOOD["rejected"] + " Never."}
    heed_label("import", write(tmp_path / "a.jsonl", GOOD), *STORE, "--batch", "one")
    heed_label("import", write(tmp_path / "b.jsonl", other), *STORE, "--batch", "two")
    out = str(tmp_path / "all.jsonl")
    code, said, _ = heed_label("export", *STORE, "--out", out)
    assert (code, said) == (0, f"2 rows of heed (everything in a label store) in {out}\n")
    assert book.batches() == ["one", "two"]
    for name in ("again.sqlite", "merged.sqlite"):
        with LabelStore(name) as again:
            batch = ("--batch", "all") if name == "merged.sqlite" else ()
            assert heed_label("import", out, "--store", name, *batch)[0] == 0
            if batch:
                both = [*book.tasks("one"), *book.tasks("two")]
                assert [one.task for one in again.tasks("all")] == [one.task for one in both]
            else:
                assert whole(again) == whole(book)
    # In another format, and of one batch.
    code, said, _ = heed_label("export", *STORE, "--batch", "two", "--format", "hh", "--out", str(tmp_path / "h.jsonl"))
    assert code == 0
    assert [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()] == [other]


def test_a_person_is_exported_and_erased(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    row = {"task_id": "t", "prompt": [{"role": "user", "content": "?"}], "responses": ["x", "y"], "ranks": [1, 2]}
    heed_label("import", write(tmp_path / "a.jsonl", row | {"labeler": "Zoe Q"}), *STORE, "--batch", "b")
    person = tmp_path / "zoe.json"
    code, said, _ = heed_label("person", "Zoe Q", *STORE, "--out", str(person))
    held = json.loads(person.read_text())
    assert (code, held["name"], len(held["judgments"])) == (0, "Zoe Q", 1)
    assert f"1 judgments of Zoe Q ({held['pseudonym']})" in said
    assert "already exists" in heed_label("person", "Zoe Q", *STORE, "--out", str(person))[2]
    for options, whose in (((), held["pseudonym"]), (("--names",), "Zoe Q")):
        out = tmp_path / f"{whose}.jsonl"
        assert heed_label("export", *STORE, "--format", "rankings", *options, "--out", str(out))[0] == 0
        assert json.loads(out.read_text())["labeler"] == whose
    code, said, _ = heed_label("erase", "Zoe Q", *STORE, "--yes")
    assert (code, f"as those of {held['pseudonym']}" in said) == (0, True)
    assert [one.labeler for one in book.judgments("b")] == [held["pseudonym"]]
    assert b"Zoe" not in b"".join(path.read_bytes() for path in tmp_path.glob("labels.sqlite*"))
    for name, *options in (("person", "--out", str(tmp_path / "b.json")), ("erase", "--yes")):
        code, _, err = heed_label(name, "Zoe Q", *STORE, *options)
        assert (code, "the store holds nothing under this name" in " ".join(err.split())) == (2, True)


def test_export_refuses(tmp_path: Path, book: LabelStore, heed_label: Any) -> None:
    heed_label("import", write(tmp_path / "a.jsonl", GOOD), *STORE, "--batch", "b")
    for options, words in (
        (("--format", "oasst"), "format 'oasst': one of heed, rankings"),
        (("--batch", "c"), "batch 'c' has no tasks in the store"),
        (("--out", str(tmp_path / "a.jsonl")), "already exists"),
        (("--format", "trl_unpaired"), "nothing can be written as trl_unpaired: 1 x no ratings"),
    ):
        code, out, err = heed_label("export", *STORE, "--out", str(tmp_path / "out.jsonl"), *options)
        assert (code, out) == (2, "")
        assert words in err
    assert not (tmp_path / "out.jsonl").exists()
    assert len(book.tasks("b")) == 1


def test_every_command_that_is_shown_parses() -> None:
    command: Any = get_command(heed.commands.label.label_app)
    pages = [*(ROOT / "docs").glob("labels*.md"), *(ROOT / "configs/jobs/cluster").glob("hh-*.toml")]
    texts = [path.read_text() for path in pages]
    shown = {line for text in texts for line in re.findall(r"^(?:#  *)?heed label (.*)$", text, re.MULTILINE)}
    assert len(shown) >= 14
    for line in shown:
        name, *words = shlex.split(line, comments=True)
        command.commands[name].make_context(name, words)


def test_the_table_of_formats_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "labels-formats.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (yes|no|as `trl`) \| (yes|no|pairs) \|", text, re.MULTILINE)
    expected = {name: (read != "no", written != "no") for name, read, written in rows}
    assert expected == {name: (form.read is not None, form.write is not None) for name, form in FORMATS.items()}


def test_every_kind_of_warning_is_explained() -> None:
    code = "".join(path.read_text() for path in (ROOT / "preferences" / "formats").glob("*.py"))
    kinds = set(re.findall(r"report\.add\(\s*\"([^\"]+)\"", code))
    assert len(kinds) > 20
    text = (ROOT / "docs" / "labels-formats.md").read_text()
    assert {kind for kind in kinds if kind not in text} == set()


def test_a_real_file_through_the_store_and_out_for_every_stage(
    tmp_path: Path, book: LabelStore, heed_label: Any
) -> None:
    """What the comments of configs/jobs/cluster/hh-*.toml say, on a part of the data."""
    file = REAL / "hh-rlhf" / "harmless-base" / "test.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"the real data ({file}) is not on this machine")
    code, out, _ = heed_label("import", str(file), "--format", "hh", *STORE, "--batch", "test")
    assert code == 0
    assert "2,000 rows: 1,992 tasks, 1,992 judgments by unknown" in out
    assert len(book.judgments("test")) == 1992
    for name in ("demonstrations", "prompts", "hh"):
        code, out, _ = heed_label("export", *STORE, "--format", name, "--out", str(tmp_path / f"{name}.jsonl"))
        assert code == 0
    assert len((tmp_path / "demonstrations.jsonl").read_text().splitlines()) == 1992
    code, out, _ = heed_label("import", str(tmp_path / "hh.jsonl"), *STORE, "--batch", "test")
    assert code == 0
    assert len(book.judgments("test")) == 1992  # the same tasks by the same ids
