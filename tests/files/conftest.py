"""What reading a file takes, measured in a process that reads nothing else."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Importing the libraries takes longer than reading a file, so one process has them, and a copy of it reads each file.
READER = """
import os, re, sys
from pathlib import Path
from files.rows import read_source
import pyarrow.parquet
import datasets

def peak_kb():  # getrusage would tell the peak of the process that started this one, where that is higher
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def read(path):
    before = peak_kb()  # a copy's peak begins at what it holds
    rows = []
    try:
        for where, row in read_source(path):
            rows.append(row)
    except ValueError as error:
        print(error)
    print((peak_kb() - before) // 1000, flush=True)

for line in sys.stdin:
    if not os.fork():
        read(line[:-1])
        os._exit(0)
    assert os.wait()[1] == 0
    print("read", flush=True)
"""


@pytest.fixture(scope="session")
def refusal_and_megabytes() -> Iterator[Callable[[Path], tuple[str, int]]]:
    """Reads a file in a separate process. Returns the error message, "" if it is read, and the memory that it took."""
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        asked, answers = reader.stdin, reader.stdout

        def read(path: Path) -> tuple[str, int]:
            print(path, file=asked, flush=True)
            lines = []
            for line in answers:
                if line == "read\n":
                    break
                lines.append(line.rstrip("\n"))
            *said, megabytes = lines
            assert len(said) <= 1, said
            return "".join(said), int(megabytes)

        yield read
        asked.close()
