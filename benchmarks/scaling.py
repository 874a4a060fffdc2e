"""Compares two one-core workers with one: tokens per second by stage, and the time to the first optimizer step.

    python -m benchmarks.scaling [ROUNDS]

It runs all stages of a shortened configs/jobs/demo.toml except the comparison, first on one core with one worker, then
on two with two. The work is the same, because results do not depend on the split. Rounds alternate, because a machine's
speed may vary; the table has medians over rounds of medians over steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[1]
STAGES = ("pretrain", "sft", "reward", "ppo")
WARMUP_SHARE = 0.25  # share of a stage's steps left out, while caches fill and threads start
# Enough steps for a steady rate, and few enough to repeat the run.
SHORTENED: dict[str, dict[str, Any]] = {
    "world": {"num_pretrain_texts": 3000, "num_collect_prompts": 400},
    "pretrain": {"num_steps": 80, "evaluate_every_steps": 1000, "save_every_steps": 1000},
    "sft": {"num_epochs": 0.3, "evaluate_every_steps": 1000, "save_every_steps": 1000},
    "reward": {"evaluate_every_steps": 1000, "save_every_steps": 1000},
    "ppo": {"num_iterations": 6, "save_every_iterations": 100},
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        job = shortened(Path(folder) / "scaling.toml")
        for number in range(rounds):
            for workers in (1, 2):
                runs = Path(folder) / f"round-{number}-workers-{workers}"
                found[workers].append(run(job, runs, workers))
                print(workers, found[workers][-1], file=sys.stderr, flush=True)
    one, two = (middle(found[workers]) for workers in (1, 2))
    print("| stage | one worker, tokens/s | two workers, tokens/s | efficiency |\n|---|---|---|---|")
    for stage in STAGES:
        share = two[stage] / (2 * one[stage])
        print(f"| {stage} | {one[stage]:,.0f} | {two[stage]:,.0f} | {share:.0%} |")
    for workers, figures in ((1, one), (2, two)):
        print(f"seconds from `heed run` to the first optimizer step, {workers} worker(s): {figures['start']:.1f}")


def shortened(path: Path) -> Path:
    """Returns the demo with fewer steps and without the comparison."""
    job = tomllib.loads((ROOT / "configs/jobs/demo.toml").read_text(encoding="utf-8"))
    for section, values in SHORTENED.items():
        job[section] |= values
    del job["compare"]
    path.write_text(tomli_w.dumps(job | {"name": "scaling"}), encoding="utf-8")
    return path


def run(job: Path, runs: Path, workers: int) -> dict[str, float]:
    """Runs on one core per worker; returns tokens per second by stage, and `start`: seconds to the first step."""
    command = [sys.executable, "-m", "heed", "run", str(job), "--set", f"workers={workers}", "--runs", str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    cores = sorted(os.sched_getaffinity(0))[:workers]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        preexec_fn=on_cores(cores),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = runs / "scaling" / "pretrain" / "metrics.jsonl"
    while not (first.exists() and first.read_text()):
        assert process.poll() is None, f"the run ended with {process.returncode} before its first step"
        time.sleep(0.02)
    start = time.monotonic() - started
    assert process.wait() == 0, f"the run ended with {process.returncode}"
    return {"start": start} | {stage: rate(runs / "scaling" / stage / "metrics.jsonl") for stage in STAGES}


def on_cores(cores: list[int]) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, cores)


def rate(path: Path) -> float:
    """Returns median tokens per second after the warm-up."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rates = [row["tokens_per_second"] for row in rows]
    return median(rates[int(WARMUP_SHARE * len(rates)) :])


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(figures[name] for figures in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main()
