"""Runs code that a model wrote and its tests in two processes that can do little but compute (docs/verifiers.md)."""

import atexit
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryFile

from files.fields import shown
from reward.external import Scored

SCRIPT = Path(__file__).with_name("sandboxed.py")
PASSED, WRONG, FORGED, REFUSED, KILLED = VERDICTS = ("passed", "wrong", "forged", "refused", "killed")  # SCRIPT's words

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
    """Limits of the code's process. Its tests may use as much again; the clock's limit is for both together."""

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


class _Process:
    """A process that runs one program after another, each in processes of its own."""

    def __init__(self, limits: Limits) -> None:
        self.errors = TemporaryFile()  # noqa: SIM115  # `end` closes it
        command = [sys.executable, "-s", "-S", "-P", "-B", str(SCRIPT)]
        self.process = subprocess.Popen(
            [*command, str(limits.cpu_seconds), str(limits.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={"PYTHONHASHSEED": "0"},  # the same order of sets in every run
            cwd=Path("/"),
            start_new_session=True,
        )

    def verdict(self, request: bytes, seconds: float) -> str | None:
        """Returns the verdict, or how the process ended; None if neither came in time."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(request + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return f"status {self.process.wait()}"
        if not wait([self.process.stdout.fileno()], seconds):
            return None
        line = self.process.stdout.readline()
        return line.decode().strip() or f"status {self.process.wait()}"

    def end(self) -> str:
        """End the process, and with it its children. Returns the last line of its errors."""
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()
        with self.errors:
            self.errors.seek(0)
            return self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]


_idle: dict[tuple[Path, Limits], list[_Process]] = {}  # what has answered, for the next program


@atexit.register
def close_sandboxes() -> None:
    """End the processes that wait for a program."""
    for processes in _idle.values():
        while processes:
            processes.pop().end()


def score_code(code: str, tests: Sequence[str], limits: Limits) -> Scored:
    """Returns 1 if the code passes all tests, else 0; or no score and the reason if that cannot be told.

    Code that fails, or needs more computing time or memory than it may use, does not pass. If it tried to pass without
    being right, the kind of failure is FORGED. If a test uses an object of the code's in a way that needs both in one
    process, it is REFUSED. There is no score if the code exceeds its limit by the clock, since the machine may have
    been busy, or if the machine ended a process.
    """
    key = (SCRIPT, limits)
    try:
        process = _idle[key].pop()
    except (KeyError, IndexError):
        process = _Process(limits)
    verdict = process.verdict(json.dumps({"code": code, "tests": list(tests)}).encode(), limits.wall_seconds)
    if verdict in VERDICTS:
        _idle.setdefault(key, []).append(process)
    else:
        said = process.end()
    if verdict is None:
        return Scored(math.nan, f"the tests took longer than {limits.wall_seconds:g} s by the clock")
    if verdict in (KILLED, f"status {-signal.SIGKILL}"):
        return Scored(math.nan, "the machine ended the process of the tests, perhaps for lack of memory")
    if verdict not in VERDICTS:
        return Scored(math.nan, f"the sandbox did not start: {shown(said or verdict)}")
    return Scored(float(verdict == PASSED), failure_kind=verdict if verdict in (FORGED, REFUSED) else "")


@cache
def check_sandbox() -> None:
    """Check that this machine limits what code can do. Raises: ValueError saying what it does not limit."""
    wanted = "Linux on x86_64 or aarch64 with seccomp was expected"
    limits = Limits(1, 60.0, 2**28)
    for unlimited, probe in {"code cannot run": "", **_PROBES}.items():
        scored = score_code(probe, [probe or "pass"], limits)
        if scored.score != 1:
            raise ValueError(
                f"unit tests of code: in the sandbox {unlimited}; {wanted}"
                f"{f' ({scored.failure})' * bool(scored.failure)}"
            )
    scored = score_code("while True: pass", ["pass"], limits)
    if scored != Scored(0.0):
        raise ValueError(f"unit tests of code: in the sandbox computing time is not limited; {wanted}")
