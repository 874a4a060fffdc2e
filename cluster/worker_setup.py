"""Starts a Ray worker's Python process with the requested environment variables.

Ray runs it in place of its own `setup_worker.py`, which imports all of Ray first:
`worker_setup.py default_worker.py ... --language=PYTHON --serialized-runtime-env-context=JSON`.
Workers that need more than variables and a Python are left to Ray's own program.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules must not shadow the standard library's

import json
import os
import re
from pathlib import Path
from typing import NoReturn

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
UNDERSTOOD = {"env_vars", "py_executable"}


def start_worker(arguments: list[str]) -> NoReturn:
    """Replace this process with the worker's."""
    passed_on = [argument for argument in arguments if not argument.startswith((CONTEXT, LANGUAGE))]
    context = next((argument.removeprefix(CONTEXT) for argument in arguments if argument.startswith(CONTEXT)), "{}")
    wanted = {name: value for name, value in json.loads(context).items() if value}
    if LANGUAGE + "PYTHON" not in arguments or wanted.keys() - UNDERSTOOD:
        rays_own = Path(passed_on[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(rays_own), *arguments])
    for name, value in wanted.get("env_vars", {}).items():
        # As Ray does: ${NAME} becomes that variable's value, or nothing.
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    python = wanted.get("py_executable", sys.executable)  # may be a command with arguments
    os.execvp("bash", ["bash", "-c", f'exec {python} "$@"', "bash", *passed_on])


if __name__ == "__main__":
    start_worker(sys.argv[1:])
