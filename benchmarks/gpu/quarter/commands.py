"""The steps that are processes of their own: the GPU tests, two ranks on one GPU, the table of benchmarks.gpu."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.quarter.run import read_json, write_json

ROOT = Path(__file__).parents[3]
SECONDS_TO_END = 10  # time left for `benchmarks.gpu` to write its table


@dataclass(frozen=True)
class CommandStep:
    """How long a command may take, on which device, and the folder for its results."""

    allowed_seconds: float
    device: str
    tiny: bool
    out: Path

    def note(self, name: str, found: dict[str, Any]) -> None:
        write_json(self.out / "parts" / f"{name}.json", found)

    def run(self, module: str, arguments: Sequence[str]) -> str:
        """Runs `python -m MODULE`, with its output in `log.txt`, and returns "ok" or what went wrong.

        At the deadline all processes of its session are killed.
        """
        command = [sys.executable, "-m", module, *arguments]
        path = self.out / "log.txt"
        with path.open("a", encoding="utf-8") as log:
            log.write(f"\n=== {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(self.allowed_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"not finished within {self.allowed_seconds:.0f} s"
        if code == 0:
            return "ok"
        return f"ended with {code}: {path.read_text(encoding='utf-8', errors='replace').strip()[-300:]}"


def run_tests(step: CommandStep) -> str:
    """Runs tests/gpu; four processes share a GPU. Without one, all tests are skipped."""
    report = step.out / "tests.xml"
    options = ["-q", "-p", "no:cacheprovider", "--timeout=90", "--dist", "loadfile", f"--junitxml={report}"]
    num_processes = "4" if step.device == "cuda" else "0"
    status = step.run("pytest", ["--confcutdir=tests/gpu", "tests/gpu", "-n", num_processes, *options])
    if report.exists():
        step.note("tests", _summary(ElementTree.parse(report).getroot()[0]))
    return status


def _summary(suite: ElementTree.Element) -> dict[str, Any]:
    """Returns the counts of a suite in JUnit's format, its failures with their messages, and its slowest tests."""
    cases = list(suite.iter("testcase"))
    failed = {
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": (part.get("message") or "")[:500]
        for case in cases
        for part in case
        if part.tag in ("failure", "error")
    }
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    slowest = sorted(((float(case.get("time", 0)), case.get("name", "")) for case in cases), reverse=True)[:6]
    return {**counts, "failed": failed, "slowest": slowest}


def run_two_ranks(step: CommandStep) -> str:
    """Compares two ranks on this device with one. A part that goes wrong is noted as `PART_failed`."""
    from benchmarks.gpu.quarter.two_ranks import measure

    figures = dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="two-ranks-") as folder:
        for found in measure(step.device, step.tiny, Path(folder), step.allowed_seconds):
            figures |= found
            step.note("two_ranks", figures)
            print(f"  [two_ranks] {json.dumps(found)}", flush=True)
    return "ok"


def run_table(step: CommandStep) -> str:
    """Measures the rows of `python -m benchmarks.gpu`, as many as the time allows.

    `python -m benchmarks.gpu table --results FILE` turns `gpu_results.json` into the table.
    """
    results = step.out / "gpu_results.json"
    seconds = int(step.allowed_seconds) - SECONDS_TO_END
    options = ["--seconds", str(seconds), "--results", str(results), "--device", step.device]
    status = step.run("benchmarks.gpu", ["all", *options, *(["--tiny"] if step.tiny else [])])
    step.note("table", {"found": read_json(results)})
    return status
