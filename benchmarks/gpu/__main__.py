"""Measures rows on one GPU, each in a separate process, and writes the table: `python -m benchmarks.gpu --help`."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rows import ROWS, TINY_ROWS, Row
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


NOT_MEASURED = "not yet measured"
HEAD = ("| work | measured | of the ceiling | aim | peak memory |", "|---|---|---|---|---|")
GIB = 2**30


def markdown(found: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """`found` maps device names to their `machine`, their `rates`, and their `rows` by name.

    Rows without results say so, and failed ones say why.
    """
    if not found:
        return "\n".join(["No GPU has been measured with these rows.", "", *_table({"rates": {}, "rows": {}}, rows)])
    return "\n\n".join("\n".join([*_about(device, rows), "", *_table(device, rows)]) for device in found.values())


def _about(device: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    machine, rates = device["machine"], device["rates"]
    software = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "python") if name in machine)
    products = [f"{rates[row.name] / 1e12:.3g} ({row.name})" for row in rows if row.name in rates]
    return [
        f"**{machine['device']}**: {software}. A copy moves {rates['bytes'] / 1e12:.3g} TB/s, read and written;",
        f"TFLOP/s of bf16 matrix products at the models' own shapes: {', '.join(products)}.",
    ]


def _table(device: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    return [*HEAD, *(_line(row, device["rows"].get(row.name), device["rates"]) for row in rows)]


def _line(row: Row, figures: Mapping[str, Any] | None, rates: Mapping[str, float]) -> str:
    aim = f"{row.aim:.0%}" if row.aim else ""
    if figures is None:
        return _cells(row.name, NOT_MEASURED, "", aim, "")
    if "failed" in figures:
        return _cells(row.name, f"failed: {figures['failed'].replace('|', '/')}", "", aim, "")
    measured, share = DESCRIBED[row.kind](row, figures, rates)
    return _cells(row.name, measured, share, aim, _memory(figures))


def _cells(*cells: str) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def _pretraining(row: Row, figures: Mapping[str, float], rates: Mapping[str, float]) -> tuple[str, str]:
    flops = figures["flops_per_second"]
    measured = f"{figures['tokens_per_second']:,.0f} tokens per second, {flops / 1e12:.3g} TFLOP/s"
    return measured, f"{flops / rates[row.name]:.0%} of the matrix rate"


def _generation(_row: Row, figures: Mapping[str, float], rates: Mapping[str, float]) -> tuple[str, str]:
    shortest = figures["decoded_bytes"] / rates["bytes"]
    fixed, eager = (shortest / figures[f"{kind}decoding_seconds"] for kind in ("", "eager_"))
    measured = f"{figures['tokens_per_second']:,.0f} tokens per second; eager {figures['eager_tokens_per_second']:,.0f}"
    return measured, f"{fixed:.0%} of the memory bandwidth; eager {eager:.0%}"


def _iteration(_row: Row, figures: Mapping[str, float], _rates: Mapping[str, float]) -> tuple[str, str]:
    phases = ("sampling", "scoring", "learning", "weights", "rest")
    parts = ", ".join(f"{name} {figures[f'{name}_seconds']:.2f}" for name in phases)
    rate = figures["response_tokens_per_second"]
    return f"{figures['seconds']:.2f} s: {parts}; {rate:,.0f} response tokens per second", ""


DESCRIBED = {"pretrain": _pretraining, "generate": _generation, "ppo": _iteration}


def _memory(figures: Mapping[str, float]) -> str:
    peak, planned = figures["peak_bytes"] / GIB, figures["planned_bytes"] / GIB
    return f"{peak:.1f} GiB, planned {planned:.1f}" if peak else f"planned {planned:.1f} GiB"


if __name__ == "__main__":
    main()
