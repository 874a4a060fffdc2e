"""Training works where the extra `labels` is not installed, and commands that need it say so in one line."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from files.importing import LABELS_EXTRA

ROOT = Path(__file__).parents[2]
OF_RICH = ("markdown_it", "pygments")  # rich needs them, so they are always there
# A module of this name is imported when a Python process starts; Ray's workers inherit the path to it.
HOOK = f"""
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(set(LABELS_EXTRA) - set(OF_RICH))}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Block())
"""


def heed(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command without the packages of the extra. Returns its status and its output."""
    (folder / "blocked").mkdir(exist_ok=True)
    (folder / "blocked" / "sitecustomize.py").write_text(HOOK)
    command = [sys.executable, "-m", "heed", *arguments]
    paths = os.pathsep.join((str(folder / "blocked"), str(ROOT)))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "300"}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_the_extra_has_the_packages_whose_absence_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {Requirement(one).name for one in project["optional-dependencies"]["labels"]}
    needed = {Requirement(one).name for one in project["dependencies"]}
    from_module = packages_distributions()
    assert {from_module[module][0].lower().replace("_", "-") for module in LABELS_EXTRA} == extra
    assert not extra & needed


def test_commands_of_training_work(tmp_path: Path) -> None:
    for arguments in (("--help",), ("label", "--help"), ("plan", str(ROOT / "configs" / "jobs" / "debug.toml"))):
        code, said = heed(tmp_path, *arguments)
        assert code == 0, said
    store = str(tmp_path / "labels.sqlite")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n')
    for command in (
        ("import", str(rows), "--batch", "b"),
        ("export", "--batch", "b", "--out", str(tmp_path / "o.jsonl")),
    ):
        code, said = heed(tmp_path, "label", *command, "--store", store)
        assert code == 0, said


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("label", "serve", "--store", "labels.sqlite", "--new"), "uvicorn"),
        (("label", "invite", "ann", "--store", "labels.sqlite"), "argon2"),
        (("watch", "run"), "uvicorn"),
        (("label", "export", "--store", "postgresql://127.0.0.1:9/labels", "--out", "x.jsonl"), "psycopg"),
    ],
)
def test_a_command_that_needs_the_extra_says_so_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], module: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text("")
    code, said = heed(tmp_path, *arguments)
    assert code == 2, said
    assert said.startswith(f"error: {module} is not installed; label pages"), said
    assert "pip install 'heed-rlhf[labels]'" in said
    assert said.count("\n") == 1


@pytest.mark.long
def test_a_job_runs(tmp_path: Path) -> None:
    code, said = heed(tmp_path, "run", str(ROOT / "configs" / "jobs" / "debug.toml"))
    assert code == 0, said
    assert (tmp_path / "runs" / "debug" / "report.html").is_file()
