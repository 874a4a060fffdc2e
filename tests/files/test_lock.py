"""Two runs never work in one folder at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from files.lock import lock

HOLDER = """
import sys, time
from pathlib import Path
from files.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(ValueError, match=rf"process {os.getpid()} is running this job"), lock(tmp_path):
        pass
    with lock(tmp_path):
        assert (tmp_path / "run.lock").read_text() == str(os.getpid())


def test_a_killed_run_locks_nothing(tmp_path: Path) -> None:
    locker = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert locker.stdout is not None
    try:
        assert locker.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {locker.pid}"), lock(tmp_path):
            pass
    finally:
        locker.send_signal(signal.SIGKILL)
        locker.wait()
    with lock(tmp_path):
        pass
