"""`heed label usability` in this process: a study from its file to its report."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from heed.commands.label_usability import usability_app
from preferences import usability
from preferences.accounts import Accounts
from preferences.page.config import LabelingConfig
from preferences.page.study_config import StudyConfig
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore
from preferences.usability import NOT_ASKED, QuestionnaireAnswer

DOCS = Path(__file__).parents[2] / "docs" / "usability.md"
STORE = ("--store", "labels.sqlite")
NAMES = ("ann", "bob", "cy", "dee")
FILE = """\
name = "criteria"
labelers = ["ann", "bob", "cy", "dee"]
tasks_per_condition = 2
practice_tasks = 0

[[conditions]]
name = "ranks only"
batch = "b"

[[conditions]]
name = "with a criterion"
batch = "b"
criteria = [{ name = "helpful" }]
"""


@pytest.fixture
def folder(sqlite_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of four labelers and four tasks, and the study's file."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(sqlite_tables, "labels.sqlite")
    accounts = Accounts("labels.sqlite")
    for name in NAMES:
        accounts.invite(name, "labeler")
    accounts.close()
    tasks = [Task(f"t{n}", (Message("user", f"{n}?"),), ("a", "b"), ("x", "y")) for n in range(4)]
    with LabelStore("labels.sqlite") as store:
        store.add_tasks(tasks, batch="b", num_labelers=4)
    Path("study.toml").write_text(FILE)
    return tmp_path


def take_part(name: str) -> None:
    """Does everything that the study asks, in the labeler's order; the second form takes twice as long."""
    with LabelStore("labels.sqlite") as store:
        for place in range(2):
            with store.reading() as connection:
                stage = usability.stage_of(connection, name)
            assert stage is not None
            index = stage.conditions[place]
            for _ in range(2):
                lease = store.lease(name, seconds=60, batch="b")
                assert lease is not None
                answer = Answer((1, 2), 5_000 * (index + 1) * (1 + NAMES.index(name)))
                store.submit(lease, answer, client="t", instructions_version=stage.condition.version)
            load = (20 + 10 * index + 5 * NAMES.index(name),) * 6
            said = QuestionnaireAnswer(name, index, load, (4, 2) * 5, 0 if place else NOT_ASKED, f"I am {name}")
            with store.writing() as connection:
                assert usability.store_answer(connection, name, said, 9.0)


@pytest.mark.usefixtures("folder")
def test_a_study_from_its_file_to_its_report(heed_label: Any) -> None:
    code, out, _ = heed_label("usability", "start", "study.toml", *STORE)
    assert code == 0
    assert out.count("ranks only, then with a criterion") == out.count("with a criterion, then ranks only") == 2
    assert "study 'criteria' runs with 4 labelers, 2 tasks with each form" in out
    assert "runs with 0 new labelers" in heed_label("usability", "start", "study.toml", *STORE)[1]
    for name in NAMES[:3]:
        take_part(name)
    out = heed_label("usability", "status", "criteria", *STORE)[1]
    assert "ann: 2 of 2 forms finished\n" in out
    assert "dee: 0 of 2 forms finished; now " in out
    assert "study 'criteria' is running" in out
    take_part("dee")

    code, out, _ = heed_label("usability", "report", "criteria", *STORE, "--json", "report.json")
    assert code == 0
    said = " ".join(out.split())
    for words in (
        "Study criteria: 4 of 4 labelers finished all forms",
        "Load (raw TLX, 0 to 100, lower is better): with a criterion - ranks only",
        "10.0 (alike for all 4 labelers: no interval)",
        "2.00 (alike for all 4 labelers: no interval)",
    ):
        assert words in said, out
    found = json.loads(Path("report.json").read_text())
    assert found["measures"][0]["differences"][0]["found"]["interval"]["mean"] == 10.0
    assert "ann" not in Path("report.json").read_text()
    assert len(found["labelers"]) == 4

    assert heed_label("usability", "export", "criteria", *STORE, "--out", "q.jsonl", "--names")[0] == 0
    rows = [json.loads(line) for line in Path("q.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    first = next(row for row in rows if row["labeler"] == "ann" and row["condition"] == "ranks only")
    assert (first["load"], first["sus"], first["comment"]) == (20.0, 75.0, "I am ann")
    assert {row["place"] for row in rows} == {1, 2}
    assert {row["preferred"] for row in rows} == {None, "ranks only"}
    heed_label("usability", "export", "criteria", *STORE, "--out", "p.jsonl")
    assert '"labeler": "labeler-' in Path("p.jsonl").read_text()
    assert "study 'criteria' is stopped" in heed_label("usability", "stop", "criteria", *STORE)[1]
    assert "was stopped" in heed_label("usability", "status", "criteria", *STORE)[1]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("start", "none.toml"), "none.toml: no such file"),
        (("report", "other"), "study 'other' is not in the store; it has none"),
        (("export", "other", "--out", "study.toml"), "study.toml: already exists"),
        (("report", "x", "--half-width", "load"), "--half-width load: MEASURE=NUMBER was expected, such as load=5"),
        (("stop", "other"), "study 'other' is not in the store"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str, heed_label: Any) -> None:
    code, _, err = heed_label("usability", *arguments, *STORE)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.usefixtures("folder")
def test_a_labeler_who_is_not_there_is_named_with_the_file(heed_label: Any) -> None:
    Path("study.toml").write_text(FILE.replace("dee", "zoe"))
    code, _, err = heed_label("usability", "start", "study.toml", *STORE)
    assert code == 2
    assert "study.toml: labelers: 'zoe' has no account and no link" in " ".join(err.split())
    code, _, err = heed_label("usability", "start", "study.toml", "--store", "none.sqlite")
    assert code == 2
    assert "none.sqlite" in err


def test_the_file_and_the_commands_of_the_documentation(tmp_path: Path) -> None:
    text = DOCS.read_text()
    (file,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "study.toml").write_text(file)
    study, forms = StudyConfig.load(tmp_path / "study.toml").study(LabelingConfig())
    assert [len(form.criteria) for form in forms] == [0, 2]
    command: Any = get_command(usability_app)
    shown = re.findall(r"^heed label usability (\w+) (.*)$", text, re.MULTILINE)
    assert {name for name, _ in shown} == set(command.commands)
    for name, words in shown:
        command.commands[name].make_context(name, shlex.split(words))
        assert study.name in words or name == "start"
