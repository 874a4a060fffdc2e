"""The steps that are commands: the GPU tests, a whole job with Ray and DeepSpeed, the table of benchmarks.gpu."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.first_quarter.run import CARRIED, read_json, write_json

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("chain.toml")
TINY_JOB = ROOT / "configs" / "jobs" / "debug.toml"
TINY_SETTINGS = ("--set", "engine.zero_stage=1", "--set", "engine.trackers=[]")
SMOLLM2_JOB = Path(__file__).with_name("smollm2.toml")
SMOLLM2, SMOLLM2_PARTS = "smollm2.gguf", ("smollm2-0", "smollm2-1")  # in the carried folder
TINY_SMOLLM2 = {
    "engine.zero_stage": 0, "world.num_demonstrations": 64, "world.num_collect_prompts": 24,
    "sft.batch.micro_batch_size": 4, "reward.batch.micro_batch_size": 4, "ppo.num_iterations": 1,
    "ppo.rollout_batch_size": 8, "ppo.minibatch.batch_size": 8, "ppo.minibatch.micro_batch_size": 4,
    "ppo.max_new_tokens": 8, "collect.max_new_tokens": 8,
}  # fmt: skip
LONGEST_REPORT_BYTES, LONGEST_RESULTS_BYTES = 8_000_000, 20_000
SECONDS_TO_END = 10  # time left for `benchmarks.gpu` to write its table
LINEAGE, METRICS = "lineage.json", "metrics.jsonl"  # in a stage's folder: the first once it has finished
PPO_METRICS = ("step", "score", "kl_nats", "response_tokens", "sampler_difference", "importance_max")


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

        At the deadline all processes of its session are killed. Heed sets its workers' allocator itself.
        """
        command = [sys.executable, "-m", module, *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_CUDA_ALLOC_CONF"}
        path = self.out / "log.txt"
        with path.open("a", encoding="utf-8") as log:
            log.write(f"\n=== {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
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


def run_chain(step: CommandStep) -> str:
    return _run_job(step, "chain", [str(TINY_JOB), *TINY_SETTINGS] if step.tiny else [str(JOB)])


def run_smollm2(step: CommandStep) -> str:
    """Runs a job on a published model, if both parts of its file were carried to this machine."""
    lacking = [name for name in SMOLLM2_PARTS if not (CARRIED / name).exists()]
    if lacking:
        return f"skipped: {' and '.join(f'{CARRIED.name}/{name}' for name in lacking)} not carried"
    whole = CARRIED / SMOLLM2
    whole.write_bytes(b"".join((CARRIED / name).read_bytes() for name in SMOLLM2_PARTS))
    settings = [part for key, value in TINY_SMOLLM2.items() for part in ("--set", f"{key}={value}")]
    return _run_job(step, "smollm2", [str(SMOLLM2_JOB), *(settings if step.tiny else ())])


def _run_job(step: CommandStep, name: str, job: Sequence[str]) -> str:
    """Runs a whole job with Ray and DeepSpeed, and notes each stage's seconds and metrics."""
    with tempfile.TemporaryDirectory(prefix="first-quarter-", ignore_cleanup_errors=True) as folder:
        runs = Path(folder) / "runs"
        status = step.run("heed", ["run", *job, "--runs", str(runs)])
        stages = sorted({path.parent for name in (LINEAGE, METRICS) for path in runs.glob(f"*/*/{name}")})
        step.note(name, {stage.name: _stage(stage) for stage in stages})
        if step.device == "cuda":
            _wait_for_memory()
        report = next(iter(runs.glob("*/report.json")), None)
        if report is not None and report.stat().st_size < LONGEST_REPORT_BYTES:
            shutil.copy(report, step.out / f"{name}_report.json")
    return status


def _stage(folder: Path) -> dict[str, Any]:
    """Returns what a stage's folder says: its seconds, the first and last metrics (for PPO all), its results."""
    lineage, metrics, results = (folder / name for name in (LINEAGE, METRICS, "results.json"))
    found: dict[str, Any] = {"unfinished": True}
    if lineage.exists():
        found = {"stage_seconds": read_json(lineage).get("seconds")}
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # a kill cuts the last
    if lines:
        found |= {"steps": len(lines), "first": lines[0], "last": lines[-1]}
    if folder.name == "ppo":
        found["all"] = [
            {name: value for name, value in line.items() if name in PPO_METRICS or name.endswith("_seconds")}
            for line in lines
        ]
    if results.exists() and results.stat().st_size < LONGEST_RESULTS_BYTES:
        found["results"] = read_json(results)
    return found


def _wait_for_memory() -> None:
    """Waits until the job's processes have left the GPU, for at most 6 s."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    for _ in range(12):
        used_mib = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        if used_mib.isdigit() and int(used_mib) < 2000:
            return
        time.sleep(0.5)


def run_rows(step: CommandStep) -> str:
    """Measures the rows of `python -m benchmarks.gpu`, as many as the time allows.

    `python -m benchmarks.gpu table --results FILE` turns `gpu_results.json` into the table.
    """
    results = step.out / "gpu_results.json"
    seconds = int(step.allowed_seconds) - SECONDS_TO_END
    options = ["--seconds", str(seconds), "--results", str(results), "--device", step.device]
    status = step.run("benchmarks.gpu", ["all", *options, *(["--tiny"] if step.tiny else [])])
    step.note("rows", {"found": read_json(results)})
    return status
