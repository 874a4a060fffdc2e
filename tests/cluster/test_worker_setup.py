"""The program that starts a worker's Python: its environment, its arguments, and what it leaves to Ray's own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import worker_setup

WORKER = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
RAYS_OWN = "import sys; print('left to Ray:', *sys.argv[1:])"


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A program in place of Ray's `default_worker.py`. Its folder has one in place of Ray's `setup_worker.py`."""
    (tmp_path / "setup_worker.py").write_text(RAYS_OWN)
    (tmp_path / "default_worker.py").write_text(WORKER)
    return tmp_path / "default_worker.py"


def started(worker: Path, *options: str, **variables: str) -> str:
    command = [sys.executable, worker_setup.__file__, str(worker), "--port=1", "two words", "'$HOME'", *options]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


def context(**values: Any) -> str:
    nothing = {"command_prefix": [], "env_vars": {}, "override_worker_entrypoint": None, "java_jars": []}
    wanted = {**nothing, "py_executable": sys.executable, **values}
    return "--serialized-runtime-env-context=" + json.dumps(wanted)


def test_a_worker_gets_its_variables_and_the_arguments_that_are_its_own(worker: Path) -> None:
    wanted = {"PLAIN": "it's $5", "JOINED": "${FOUND}:${NOT_THERE}:end", "RAY_worker_niceness": "0"}
    found = started(worker, "--language=PYTHON", context(env_vars=wanted), "--last=2", FOUND="a b", KEPT="kept")
    arguments, environment = json.loads(found)
    assert arguments == ["--port=1", "two words", "'$HOME'", "--last=2"]
    given = {name: environment[name] for name in ("PLAIN", "JOINED", "RAY_worker_niceness", "KEPT")}
    assert given == {"PLAIN": "it's $5", "JOINED": "a b::end", "RAY_worker_niceness": "0", "KEPT": "kept"}


def test_another_python_may_be_a_command_with_arguments(worker: Path) -> None:
    of_its_own = context(py_executable=f"env OF_ITS_OWN=1 {sys.executable} -B")
    assert json.loads(started(worker, "--language=PYTHON", of_its_own))[1]["OF_ITS_OWN"] == "1"


@pytest.mark.parametrize(
    "options",
    [
        ("--language=PYTHON", context(command_prefix=["cd /tmp &&"])),
        ("--language=PYTHON", context(override_worker_entrypoint="/in/a/container.py")),
        ("--language=PYTHON", context(of_a_later_release=1)),
        ("--language=JAVA", context()),
    ],
)
def test_what_it_does_not_know_is_left_to_ray_as_it_came(worker: Path, options: tuple[str, ...]) -> None:
    expected = " ".join(["left to Ray:", str(worker), "--port=1", "two words", "'$HOME'", *options])
    assert started(worker, *options) == expected + "\n"
