"""The files beside the code say what is so: configs parse, named targets exist, pins pin, no machine is named."""

import os
import re
import shutil
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


FAKE_PYTHON = """#!/bin/sh
# A Python whose `-m venv` copies this script, and whose `-m pip` says what pip says.
case "$*" in
*"-m venv "*) mkdir -p .venv/bin .venv/lib && cp "$0" .venv/bin/python ;;
*"-m pip "*)
    echo "Collecting torch==2.13.0"
    echo "  Downloading torch-2.13.0.whl.metadata (29 kB)"
    echo "  Downloading torch-2.13.0.whl (526.6 MB)"
    echo "  Downloading filelock-4.3.1.whl (244 kB)"
    echo "Installing collected packages: filelock, torch"
    exit $PIP_RC ;;
esac
"""


@pytest.mark.parametrize("pip_rc", [0, 1])
def test_the_installation_says_what_it_does(tmp_path: Path, pip_rc: int) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "venv", f"PYTHON={python}"]
    environment = os.environ | {"PIP_RC": str(pip_rc), "MAKEFLAGS": ""}  # not the flags of a make that runs these tests
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = made.stdout.splitlines()
    assert "2.6 GB" in lines[0]
    assert [line[:3] for line in lines if re.match(r"\d/4", line)] == ["1/4", "2/4", "3/4", "4/4"][: 2 if pip_rc else 4]
    shown = [line for line in lines if line.startswith("    ")]
    assert shown == ["    Downloading torch-2.13.0.whl (526.6 MB)", "    Installing collected packages"] * (2 - pip_rc)
    assert (made.returncode != 0) == bool(pip_rc)
    assert (tmp_path / ".venv" / "installed").exists() == (pip_rc == 0)


def test_check_runs_what_the_commit_hooks_run() -> None:
    hooks = re.findall(r"entry: \.venv/bin/(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks
    assert [tool for tool in hooks if f"$(BIN)/{tool}" not in MAKEFILE] == []


def test_constraints_pin_exactly_and_agree_with_pyproject() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert [pin for pin in pins.items() if not re.fullmatch(r"[0-9][0-9a-z.]*", pin[1])] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "heed-rlhf[labels]" in extras["dev"]
    wanted = project["dependencies"] + extras["labels"] + [name for name in extras["dev"] if "heed-rlhf[" not in name]
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


def test_every_source_file_that_a_page_names_exists() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.*") if path.is_file()]
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
    # A path may begin inside a package: `samplers/engine.py` in a sentence on `lm`. Runs have files of their own.
    named = re.compile(r"`((?!runs/)[\w/]+/[\w/]+\.(?:py|toml|jinja|sh))(?:::\w+)?`")
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in named.findall(page.read_text(encoding="utf-8"))
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert missing == []
