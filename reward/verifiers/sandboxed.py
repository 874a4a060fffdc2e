"""The process in which a response's code and its tests run; `reward.verifiers.sandbox` starts it.

Standard library only, since it starts without installed packages. It reads a request from its standard input, imports
the modules that code may use, limits itself, and then runs the code. From then on the kernel refuses every system call
but those of ALLOWED, which compute, allocate memory, tell the time, and use files that are open: no file can be opened,
no process or thread started, no socket made, no other process be signalled.
"""

import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
from types import ModuleType
from typing import Any

READY = b"ready\n"
OUTPUT_BYTES = 4096  # of the file that holds the result
RESULT = 3  # its descriptor once the process is limited; before, it is standard error
MODULES = (
    "__future__", "abc", "array", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq",
    "inspect", "io", "itertools", "json", "math", "numbers", "operator", "os", "pprint", "queue", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "time", "traceback", "types", "typing", "unicodedata",
    "csv", "graphlib", "html", "logging", "pickle", "secrets", "unittest", "uuid", "warnings", "zlib", "_strptime",
    "encodings.idna", "encodings.latin_1", "encodings.ascii",
)  # fmt: skip

# Numbers of system calls on (x86_64, aarch64); -1 = it does not exist there.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigreturn": (15, 139), "restart_syscall": (219, 128),
    "getpid": (39, 172), "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, -1),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getrandom": (318, 278), "getrusage": (98, 165), "times": (100, 153),
}  # fmt: skip
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column of ALLOWED; AUDIT_ARCH of linux/audit.h

# linux/prctl.h, linux/seccomp.h and linux/bpf_common.h
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
RET_ALLOW, RET_EPERM, RET_KILL = 0x7FFF0000, 0x00050001, 0x80000000
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
AT_NUMBER, AT_ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def run(request: dict[str, Any]) -> None:
    """Run the code, then the tests, and write the request's token. Never returns."""
    for name in MODULES:
        importlib.import_module(name)
    try:
        limit(request["cpu_seconds"], request["memory_bytes"])
    except OSError as error:
        os.write(RESULT, str(error).encode())
        os._exit(1)
    os.write(RESULT, READY)
    module = ModuleType("response")
    sys.modules["response"] = module
    try:
        for name, text in (("response", request["code"]), *((f"test {n}", t) for n, t in enumerate(request["tests"]))):
            exec(compile(text, name, "exec"), module.__dict__)
    except BaseException:  # whatever the code raises, SystemExit too
        os._exit(1)
    os.write(RESULT, request["token"].encode())
    os._exit(0)


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process for good. Raises: OSError if the system does not support a limit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the request holds the token
    os.closerange(3, 1024)
    os.dup2(2, RESULT)
    os.dup2(1, 2)  # what code prints is thrown away
    sys.path.clear()
    # At the first limit of computing time the kernel sends SIGXCPU, which nothing can catch or block here: no system
    # call sets a handler or a mask. SIGKILL then means that the machine ended the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, RESULT + 1),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"system calls cannot be limited on {machine}; one of {', '.join(ARCHITECTURES)} was expected")
    instructions = ctypes.create_string_buffer(system_call_filter(*ARCHITECTURES[machine]))
    program = _Program(len(instructions) // 8, ctypes.addressof(instructions))
    for arguments in (
        (PR_SET_PDEATHSIG, signal.SIGKILL, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}: {os.strerror(ctypes.get_errno())}")


def system_call_filter(column: int, architecture: int) -> bytes:
    """Returns a program for the kernel's filter: system calls that are not ALLOWED fail with EPERM."""
    numbers = [of[column] for of in ALLOWED.values() if of[column] >= 0]
    instructions = [
        (LOAD_WORD, 0, 0, AT_ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, RET_KILL),
        (LOAD_WORD, 0, 0, AT_NUMBER),
        *((JUMP_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (RETURN, 0, 0, RET_EPERM),
        (RETURN, 0, 0, RET_ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


if __name__ == "__main__":
    run(json.load(sys.stdin))
