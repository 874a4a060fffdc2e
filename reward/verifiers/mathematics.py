r"""Compares mathematical answers with Math-Verify, which reads LaTeX and decides with SymPy whether two are equal.

SymPy may compute for hours or fill the memory ("9^{9^9}"), and nothing within its process can stop that safely. So one
process per rank compares, within limits; it starts with the first answer, and again after one that exceeds them.
"""

import importlib
import json
import logging
import math
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time

CPU_SECONDS = 5  # of one comparison; the slowest of 9,000 took 3
CLOCK_SECONDS = 60.0  # for the same; longer means that the machine is busy
MEMORY_BYTES = 4 * 2**30  # address space
_lock = threading.Lock()
_started: list[subprocess.Popen[str]] = []  # at most one
_UNEQUAL = re.compile(r"\\not\b|\\neq?\b|≠|!=")  # which Math-Verify overlooks


def is_equal(answer: str, expected: str) -> bool:
    """Returns whether two answers in LaTeX are equal. If that takes too much time or memory, they are not.

    Raises: ValueError if one of them cannot be read; TimeoutError if the machine is too busy to tell.
    """
    with _lock:
        process = _started[0] if _started and _started[0].poll() is None else _start()
        assert process.stdout, "its pipes are open"
        print(json.dumps([answer, expected]), file=process.stdin, flush=True)
        in_time = bool(select.select([process.stdout], [], [], CLOCK_SECONDS)[0])
        verdict = process.stdout.readline() if in_time else ""
        if not verdict:
            process.kill()
            process.communicate()
            if process.returncode != -signal.SIGXCPU:
                raise TimeoutError("the comparison of two answers took too long, or its process ended")
            return False
    found = json.loads(verdict)
    if isinstance(found, str):
        raise ValueError(found)
    return bool(found)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "reward.verifiers.mathematics"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _started[:] = [process]
    if not (process.stdout and process.stdout.readline()):
        raise RuntimeError(f"{' '.join(command)} did not start: status {process.wait()}")
    return process


def _serve() -> None:
    importlib.import_module("math_verify")  # slow, so before it is ready

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable()  # of Math-Verify's warning that it has no limit of time here
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    print("ready", flush=True)
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_SECONDS, hard))
        print(json.dumps(_compare(*json.loads(line))), flush=True)


def _compare(answer: str, expected: str) -> bool | str:
    """Returns whether two answers are equal, or what cannot be read."""
    from math_verify import parse, verify

    # Math-Verify's own time limits are signals, which interrupt no long operation and are lost in some `except`.
    read = [parse(rf"\boxed{{{text.replace(chr(92) + '$', '')}}}", parsing_timeout=None) for text in (answer, expected)]
    for name, text, one in zip(("the response", "field 'answer'"), (answer, expected), read, strict=True):
        if not one:
            return f"{name}: {text[:60]!r} is no mathematics that can be read"
    if bool(_UNEQUAL.search(answer)) != bool(_UNEQUAL.search(expected)):
        return False
    return bool(verify(read[1], read[0], timeout_seconds=None))


if __name__ == "__main__":
    _serve()
