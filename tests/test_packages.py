"""The top folders are the import packages, so every one must resolve into this tree, whatever else is installed."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from files.importing import PACKAGES
from stages.lineage import CODE_VERSION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def origins(folder: Path, python_path: str = "") -> dict[str, Path]:
    """Where a fresh interpreter started in `folder` finds each package."""
    script = (
        "import importlib.util, sys\n"
        "for name in sys.argv[1:]:\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    print(name, spec.origin if spec else None, sep='\\t')\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path}
    # -P keeps the working directory off the path, so that only the installation can answer.
    command = [sys.executable, "-P", "-c", script, *PACKAGES]
    output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout
    return {name: Path(origin) for name, origin in (line.split("\t") for line in output.splitlines())}


def test_every_package_resolves_into_this_tree_from_another_folder(tmp_path: Path) -> None:
    expected = {name: ROOT / name / "__init__.py" for name in PACKAGES}
    assert origins(tmp_path) == expected, "not installed from this tree; run `make venv` and use .venv/bin/pytest"


def test_a_foreign_package_of_the_same_name_does_not_win(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = origins(elsewhere, python_path=str(tmp_path))
    assert {name: path.parent for name, path in found.items()} == {name: ROOT / name for name in PACKAGES}


def test_code_that_came_with_a_job_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CODE_VERSION, "abc")
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    found = origins(tmp_path, python_path=str(tmp_path))
    assert found == {name: tmp_path / name / "__init__.py" for name in PACKAGES}


def test_every_top_package_is_listed() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, "benchmarks", "research"}
    assert all((ROOT / name / "py.typed").is_file() for name in PACKAGES)
    # configs holds values only: there is nothing to keep apart.
    layered = PYPROJECT["tool"]["importlinter"]["root_packages"]
    assert set(layered) == {*PACKAGES, "benchmarks", "research"} - {"configs"}
    floors = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    assert {name for floor in floors for name in floor.split(" | ")} == set(layered)


@pytest.mark.parametrize(
    "package", ["cluster", "evaluation", "files", "heed/jobs", "lm", "ppo", "reward", "stages", "training"]
)
def test_the_map_of_a_package_names_each_of_its_modules_once(package: str) -> None:
    folder = ROOT / package
    entries = re.findall(r"^    \S.*?  +(.*)$", (folder / "__init__.py").read_text(), re.MULTILINE)
    named = [name for entry in entries for name in re.sub(r" \(.*?\)", "", entry).split(", ")]
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert sorted(named) == sorted(modules | folders)


def test_the_wheel_has_the_packages_and_nothing_else() -> None:
    options = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert options == {"namespaces": False, "exclude": ["research", "research.*", "benchmarks", "benchmarks.*"]}
    paths = [path.parent.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")]
    assert sorted(find_packages(str(ROOT), exclude=options["exclude"])) == sorted(
        ".".join(path.parts) for path in paths
    )


def test_a_generator_imports_neither_accelerate_nor_deepspeed() -> None:
    """vLLM's environment has neither (docs/samplers.md)."""
    script = "import sys; sys.modules |= {'accelerate': None, 'deepspeed': None}; import cluster.worker, ppo.generator"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
