"""The weight of Heed has a budget, and every key and option has somebody who sets it.

A change that raises a number below lowers another one in the same commit, or its message says why not. A change that
makes something smaller lowers the number.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command

from benchmarks.reference import _sections
from files.importing import PACKAGES
from heed.cli import app
from heed.jobs.job_file import load_job

ROOT = Path(__file__).parents[1]
TESTS_OF_WEIGHT = {"test_budgets.py", "test_reference.py"}  # what they name is not set by anybody

NEED_A_DOWNLOAD = {"smollm2", "hh", "hh-judge"}  # jobs that load only next to their model


class Budget(NamedTuple):
    """At most this much in a package. Keys are those of docs/reference, of tables whose class is in the package."""

    lines: int
    files: int
    keys: int


BUDGETS = {
    "heed": Budget(13_415, 56, 27),
    "evaluation": Budget(14_575, 62, 14),
    "classify": Budget(1_540, 8, 30),
    "sft": Budget(845, 4, 36),
    "dpo": Budget(1_465, 7, 25),
    "ppo": Budget(9_930, 36, 165),
    "reward": Budget(6_150, 24, 71),
    "pretrain": Budget(580, 3, 12),
    "stages": Budget(3_345, 17, 0),
    "cluster": Budget(2_680, 14, 6),
    "training": Budget(4_385, 16, 43),
    "lm": Budget(15_565, 55, 77),
    "preferences": Budget(15_565, 62, 33),
    "files": Budget(2_430, 12, 0),
    "configs": Budget(130, 2, 0),
    "research": Budget(5_960, 27, 0),
}
MAX_PARAMETERS = 275  # of all commands
MAX_WORDS = 75_000  # of README, CONTRIBUTING, CHANGELOG, benchmarks/README.md, and docs/ without docs/reference
MAX_WORDS_PER_PAGE = 2_500
# Files whose functions a new reader enters (`python -m benchmarks.files_entered --list`).
MAX_FILES_ENTERED = {"one PPO iteration": 43, "a forward pass of two layers": 10, "rankings to a reward model": 58}
MAX_CLOSURE_OF_PPO = 44_165  # lines that `ppo/stage.py` imports, itself included


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def guides() -> list[Path]:
    """The pages that people write, of which docs/reference has none."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.relative_to(ROOT).parts]
    return [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")), *pages]


def keys() -> list[tuple[str, str, type[BaseModel]]]:
    """(page title, key, the class that holds it) of each key in docs/reference."""
    return [(section.title, key, section.model) for section in _sections() for key in section.model.model_fields]


@pytest.mark.parametrize("package", sorted({*BUDGETS, *PACKAGES, "research"}))
def test_a_package_keeps_its_budget(package: str) -> None:
    paths = source_files(package)
    num_keys = sum(model.__module__.split(".")[0] == package for _, _, model in keys())
    now = Budget(num_lines(paths), len(paths), num_keys)
    budget = BUDGETS[package]
    assert all(value <= bound for value, bound in zip(now, budget, strict=True)), f"{package} has {now}, of {budget}"


def closure(start: str) -> set[Path]:
    """The files of Heed that a module imports, directly or not, in functions too."""
    todo, reached = [ROOT / start], set[Path]()
    while todo:
        path = todo.pop()
        if path in reached:
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                if parts[0] in PACKAGES:
                    inits = [ROOT.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
                    todo += [file for file in (*inits, ROOT.joinpath(*parts).with_suffix(".py")) if file.is_file()]
    return reached


def test_the_ppo_stage_reaches_no_more_than_its_budget() -> None:
    assert num_lines([*closure("ppo/stage.py")]) <= MAX_CLOSURE_OF_PPO


def test_no_walk_enters_more_files_than_its_budget() -> None:
    command = [sys.executable, "-m", "benchmarks.files_entered", "--list"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entered = {what: int(count) for what, count in re.findall(r"^(\S.*): (\d+) files$", printed, re.MULTILINE)}
    listed = re.findall(r"^    (\S+\.py)$", printed, re.MULTILINE)
    assert len(listed) == sum(entered.values())
    assert {"ppo/controller.py", "lm/block.py", "reward/objective.py"} <= set(listed)
    assert entered.keys() == MAX_FILES_ENTERED.keys()
    assert all(count <= MAX_FILES_ENTERED[what] for what, count in entered.items()), entered


def test_the_guides_keep_their_words() -> None:
    words = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").split()) for path in guides()}
    assert sum(words.values()) <= MAX_WORDS
    assert {name: count for name, count in words.items() if count > MAX_WORDS_PER_PAGE} == {}


# --- who sets it -----------------------------------------------------------------------------------------------------


@cache
def guide_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in guides() if path.name != "CHANGELOG.md")


@cache
def texts_of_tests() -> list[str]:
    return [
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if path.name not in TESTS_OF_WEIGHT
    ]


def fields_set(value: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """The keys that a job sets, in its tables and lists of tables."""
    if isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield type(value), name
            yield from fields_set(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from fields_set(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from fields_set(item)


def test_somebody_sets_each_key() -> None:
    """In a job of configs/, on a guide page (`key`, `table.key` or `key = ...`), or in a test (`key=...` or "key")."""
    jobs = [path for path in (ROOT / "configs" / "jobs").rglob("*.toml") if path.stem not in NEED_A_DOWNLOAD]
    in_jobs = {key for path in jobs for key in fields_set(load_job(path, opens_models=False))}
    on_pages = {
        name for names in re.findall(r"`(?:[\w.]+\.)?(\w+)`|\b(\w+) ?= ?[\"\[{\w]", guide_text()) for name in names
    }
    in_tests = {
        name
        for text in texts_of_tests()
        for names in re.findall(r"\b(\w+) ?= ?|[\"'](?:[\w.]+\.)?(\w+)[\"'=]", text)
        for name in names
    }
    unset = {
        f"{title} {key}"
        for title, key, model in keys()
        if key not in on_pages | in_tests and not any(issubclass(of, model) and name == key for of, name in in_jobs)
    }
    assert unset == set()


def parameters(command: Any, path: tuple[str, ...] = ("heed",)) -> Iterator[tuple[str, Any]]:
    """(command, parameter) of each command below this one."""
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            yield from parameters(below, (*path, name))
    else:
        yield from ((" ".join(path), parameter) for parameter in command.params if parameter.name != "help")


def test_somebody_uses_each_option() -> None:
    """On a guide page that names the command, or in a test that runs it."""
    every = [*parameters(get_command(app))]
    assert len(every) <= MAX_PARAMETERS
    pages = [path.read_text(encoding="utf-8") for path in [*guides(), ROOT / "Makefile"]]
    unused = set()
    for command, parameter in every:
        names = [re.escape(name) for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
        option = re.compile(rf"(?<![\w-])({'|'.join(names)})(?![\w-])")
        in_test = re.compile(r"[\s\S]*?".join(rf"[\"' ]{re.escape(word)}[\"' ,]" for word in command.split()[1:]))
        used = any(command in text and option.search(text) for text in pages)
        if names and not used and not any(option.search(text) and in_test.search(text) for text in texts_of_tests()):
            unused.add(f"{command} {parameter.opts[0]}")
    assert unused == set()
