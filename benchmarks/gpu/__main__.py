"""Measures rows on one GPU, each in a separate process, and writes the table: `python -m benchmarks.gpu --help`."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rows import ROWS, TINY_ROWS, Row
from benchmarks.gpu.table import markdown
from benchmarks.speed.table import write_between_markers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "gpu" / "results.json"
README = ROOT / "benchmarks" / "README.md"
MEASURE = "benchmarks.gpu.measure"
CEILING_SECONDS = 120.0  # the most that a run may take
SHORTEST_SECONDS = 20.0  # with less time left, no row is started


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.rows == "table":
        write_between_markers(README, "gpu", markdown(read(options.results), ROWS))
        return
    every = TINY_ROWS if options.tiny else ROWS
    chosen = [row for row in every if options.rows in (row.kind, "all")]
    is_kept = options.device == "cuda" and not options.tiny
    found = measure(chosen, options, read(options.results) if is_kept else {}, is_kept=is_kept)
    print(markdown(found, every))
    if is_kept:
        write_between_markers(README, "gpu", markdown(found, ROWS))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("rows", choices=("pretrain", "generate", "ppo", "all", "table"), help="table: measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same code at tiny, meaningless sizes; only printed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of results, from which the table is made")
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="total time; rows not started by then are left out"
    )
    options = parser.parse_args(arguments)
    if options.rows != "table" and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found, or torch was built without CUDA; --device cpu --tiny tries the code")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the rows are sized for a GPU")
    return options


def read(results: Path) -> dict[str, Any]:
    return dict(json.loads(results.read_text(encoding="utf-8"))) if results.exists() else {}


def measure(
    rows: Sequence[Row], options: argparse.Namespace, found: dict[str, Any], *, is_kept: bool
) -> dict[str, Any]:
    """Measures the ceilings and these rows again, updates `found`, and writes it after each.

    Results of the same device with another driver or other versions are dropped.
    Raises: SystemExit if the ceilings could not be measured.
    """
    started = time.monotonic()
    ceilings = run("ceilings", options, CEILING_SECONDS)
    if "failed" in ceilings:
        raise SystemExit(f"the ceilings were not measured: {ceilings['failed']}")
    machine = ceilings["machine"]
    before = found.get(machine["device"], {})
    kept = before["rows"] if before.get("machine") == machine else {}
    device = {"machine": machine, "rates": ceilings["rates"], "rows": kept}
    all_found = {**found, machine["device"]: device}
    for row in rows:
        left = options.seconds - (time.monotonic() - started)
        if left < SHORTEST_SECONDS:
            print(f"{row.name}: not started, {left:.0f} of {options.seconds:.0f} s are left", file=sys.stderr)
            continue
        device["rows"][row.name] = run(row.name, options, min(row.limit_seconds, left))
        print(json.dumps({row.name: device["rows"][row.name]}), file=sys.stderr, flush=True)
        if is_kept:
            options.results.write_text(json.dumps(all_found, indent=2) + "\n", encoding="utf-8")
    return all_found


def run(name: str, options: argparse.Namespace, limit_seconds: float) -> dict[str, Any]:
    """Returns the JSON that a measuring process printed as its last line, or {"failed": why}."""
    command = [sys.executable, "-m", MEASURE, name, options.device, "tiny" if options.tiny else "full"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished within {limit_seconds:.0f} s"}
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return {"failed": cause(done.stderr) or f"ended with {done.returncode}"}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def cause(stderr: str) -> str:
    """Returns the last line that names an error, since libraries may print warnings after it; "" if none does."""
    named = [line.strip() for line in stderr.splitlines() if "Error" in line.partition(":")[0]]
    return named[-1] if named else ""


if __name__ == "__main__":
    main()
