"""The files beside the code say what is so: configs parse, named targets exist, pins pin, no machine is named."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
JOBS = sorted((ROOT / "configs" / "jobs").glob("*.toml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_shipped_job_is_toml(path: Path) -> None:
    assert tomllib.loads(path.read_text())


def test_the_makefile_names_files_that_exist() -> None:
    named = re.findall(r"configs/\S+\.toml", MAKEFILE)
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    # Commands stand in code: `make test`, or a line of a code block.
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?|&& )make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named, f"{document} names no make target"
    assert named <= TARGETS


def test_every_target_is_phony_and_explained() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == TARGETS
    assert set(re.findall(r"^([a-z0-9-]+):.*## \S", MAKEFILE, re.MULTILINE)) == TARGETS


def test_check_runs_what_the_commit_hooks_run() -> None:
    hooks = re.findall(r"entry: \.venv/bin/(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert [tool for tool in hooks if f"$(BIN)/{tool}" not in MAKEFILE] == []


def test_constraints_pin_exactly_and_agree_with_pyproject() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert [pin for pin in pins.items() if not re.fullmatch(r"[0-9][0-9a-z.]*", pin[1])] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted}
    assert names - {name.lower().replace("_", "-") for name in pins} == set()
    assert [requirement for requirement in wanted if requirement == f"torch=={pins['torch']}"]


def test_ci_script_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_no_shipped_file_names_this_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: shipped files cannot be told from others")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    places = {str(path) for path in (ROOT, Path.home(), Path(sys.prefix)) if len(path.parts) > 1}
    pattern = re.compile(rb"(?<![\w.])(" + "|".join(map(re.escape, sorted(places))).encode() + rb")/")
    found = [
        f"{name}: {match[0].decode()}"
        for name in filter(None, listed.split("\0"))
        if (ROOT / name).is_file() and (match := pattern.search((ROOT / name).read_bytes()))
    ]
    assert found == []
