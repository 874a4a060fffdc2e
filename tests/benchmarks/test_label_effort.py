"""The benchmark of keystrokes per task judges a task by keyboard and by mouse, and finds both answers stored."""

import shutil
import subprocess
import sys

import pytest

MEASURE = """
from benchmarks.label_effort import WHAT, measure
found = measure(WHAT["ranks and three criteria"], 2)
print(found.num_keys, found.num_clicks)
"""


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="no browser")
def test_two_responses_with_three_criteria():
    # Two responses, each with a letter, a rank and three ratings of two keys; then Control and Enter.
    found = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(2 * (1 + 1 + 3 * 2) + 2), str(2 * 4 + 1)]
