"""Runs code that a model wrote, and its tests, in a process that can do little but compute (docs/rewards.md)."""

import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from files.fields import shown
from reward.verifiers import sandboxed

_FENCED = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)

# What must fail in the sandbox. Each is a test that passes if it does; none harms anything where it does not.
_PROBES = {
    "files can be opened": "import os\ntry:\n    os.open('/etc/passwd', os.O_RDONLY)\nexcept PermissionError: pass\n"
    "else: raise ValueError",
    "processes can be started": "import os\ntry:\n    if os.fork() == 0: os._exit(0)\nexcept PermissionError: pass\n"
    "else: raise ValueError",
    "other processes can be signalled": "import os\ntry:\n    os.kill(1, 0)\nexcept PermissionError: pass\n"
    "else: raise ValueError",
    "sockets can be made": "import sys\nctypes = sys.modules['ctypes']\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.socket(2, 1, 0) == -1 and ctypes.get_errno() == 1",
    "memory is not limited": "try:\n    bytearray(2**29)\nexcept MemoryError: pass\nelse: raise ValueError",
}


@dataclass(frozen=True)
class Limits:
    """What code and its tests may use together."""

    cpu_seconds: int
    wall_seconds: float
    memory_bytes: int


def code_in(response: str) -> str:
    """Returns the last block of Python code in a response, or the whole response if it has no block of code."""
    blocks = _FENCED.findall(response)
    return str(blocks[-1]) if blocks else response


def passes_tests(code: str, tests: Sequence[str], limits: Limits) -> tuple[bool, str]:
    """Returns whether the code passes all tests, and why that cannot be told; "" if it can.

    Code that fails, ends its process, or needs more computing time or memory than it may use does not pass. It cannot
    be told of code that needs more time by the clock, since the machine may have been busy, and if the machine ended
    the process.
    """
    token = secrets.token_hex(16)  # proves that the process got to the end of the tests
    request = {
        "code": code,
        "tests": list(tests),
        "token": token,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
    }
    with TemporaryFile() as asked, TemporaryFile() as output:
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", sandboxed.__file__],
            stdin=asked,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={"PYTHONHASHSEED": "0"},  # the same order of sets in every run
            cwd=Path("/"),
            start_new_session=True,
        )
        try:
            status = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return False, f"the tests took longer than {limits.wall_seconds:g} s by the clock"
        finally:
            process.kill()  # it has no children
            process.wait()
        output.seek(0)
        said = output.read(sandboxed.OUTPUT_BYTES)
    if not said.startswith(sandboxed.READY):
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return False, f"the sandbox did not start: {shown(last or f'status {status}')}"
    if status == -signal.SIGKILL:
        return False, "the machine ended the process of the tests, perhaps for lack of memory"
    return status == 0 and said == sandboxed.READY + token.encode(), ""


@cache
def check_sandbox() -> None:
    """Check that this machine limits what code can do. Raises: ValueError saying what it does not limit."""
    wanted = "Linux on x86_64 or aarch64 with seccomp was expected"
    limits = Limits(1, 60.0, 2**28)
    for unlimited, probe in {"code cannot run": "", **_PROBES}.items():
        passed, failure = passes_tests("", [probe], limits)
        if failure or not passed:
            raise ValueError(
                f"unit tests of code: in the sandbox {unlimited}; {wanted}{f' ({failure})' * bool(failure)}"
            )
    passed, failure = passes_tests("while True: pass", ["pass"], limits)
    if failure or passed:
        raise ValueError(f"unit tests of code: in the sandbox computing time is not limited; {wanted}")
