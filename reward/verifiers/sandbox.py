"""Runs code that a model wrote, and its tests, in a process that can do little but compute (docs/verifiers.md)."""

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

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>.*)")
_PYTHON = re.compile(r"\{?\.?py(?:thon)?[\d.]*\b(?!-)", re.IGNORECASE)  # the first word after a fence that opens

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
    """Returns the last block of code in a response that says it is Python; without any, the last one that names no
    language; without that either, the whole response.
    """
    blocks = _blocks(response)
    for is_code in (_PYTHON.match, lambda info: not info):
        if found := [code for info, code in blocks if is_code(info)]:
            return found[-1]
    return response


def _blocks(response: str) -> list[tuple[str, str]]:
    """Returns what follows the opening fence of each fenced block of Markdown, and the block (CommonMark 0.31, 4.5).

    A fence closes a block if it has the opening one's character, at least as often, and nothing follows it. A block
    that is cut off ends with the response. Unlike in CommonMark, a fence may be indented by any number of spaces.
    """
    blocks: list[tuple[str, list[str]]] = []
    opening: re.Match[str] | None = None
    for line in re.findall(r".*\n|.+", response):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            if fence and not ("`" in fence["info"] and fence["marks"].startswith("`")):
                opening = fence
                blocks.append((fence["info"], []))
        elif fence and not fence["info"] and fence["marks"].startswith(opening["marks"]):
            opening = None
        else:
            blocks[-1][1].append(line.removeprefix(opening["indent"]))
    return [(info, "".join(lines)) for info, lines in blocks]


def passes_tests(code: str, tests: Sequence[str], limits: Limits) -> tuple[bool, str]:
    """Returns whether the code passes all tests, and why that cannot be told; "" if it can.

    Code that fails, ends its process, or needs more computing time or memory than it may use does not pass. It cannot
    be told of code that needs more time by the clock, since the machine may have been busy, and if the machine ended
    the process.
    """
    token = secrets.token_hex(sandboxed.TOKEN_BYTES // 2)  # proves that the process got to the end of the tests
    request = {
        "code": code,
        "tests": list(tests),
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
    }
    with TemporaryFile() as asked, TemporaryFile() as output:
        asked.write(json.dumps(request).encode() + token.encode())
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
