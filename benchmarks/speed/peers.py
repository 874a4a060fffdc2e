"""Measures Heed and its peers in alternation: `python -m benchmarks.speed peers --help`."""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.speed.environments import ROOT, NotInstalledError, python_of
from benchmarks.speed.machine import describe
from benchmarks.speed.process import run
from benchmarks.speed.protocol import Task, command
from benchmarks.speed.rows import HEED, OWN_MODULE, ROWS, Row
from benchmarks.speed.table import README, markdown, write_between_markers
from benchmarks.speed.work import SHAPE, Sizes, write_work
from cluster.processes import ALLOCATOR, WORKER_ENVIRONMENT

LOADED = "other processes use the same cores: compare CPU seconds instead of wall time"
RESULTS = ROOT / "benchmarks" / "speed"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows = [row for row in ROWS if not options.rows or row.name.startswith(tuple(options.rows))]
    seconds = "cpu_seconds" if options.loaded else "seconds"
    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder), SHAPE, Sizes())
        tasks = {row.name: row.task(folder, Sizes()) for row in rows}
        found: dict[str, Any] = {
            "machine": describe(),
            "threads": options.threads,
            "seconds": seconds,
            "ceiling": measure_ceiling(tasks, seconds, options.threads),
            "rows": {row.name: {**asdict(row), "runs": []} for row in rows},
        }
        pythons, missing = interpreters(rows, options.cache)
        found["missing"] = missing
        for number in range(options.rounds):
            for row in rows:
                runs = one_round(row, tasks[row.name], pythons, options.threads, reverse=number % 2 == 1)
                found["rows"][row.name]["runs"].append(runs)
                print(json.dumps({row.name: runs}), file=sys.stderr, flush=True)
                options.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        found["ceiling"] = higher_ceiling(found["ceiling"], measure_ceiling(tasks, seconds, options.threads))
        options.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    write_between_markers(README, "table", tables())
    print(markdown(found))


def tables() -> str:
    """Formats a table for each CPU."""
    return "\n\n".join(map(markdown, stored_results()))


def stored_results() -> list[dict[str, Any]]:
    """Returns the results of each CPU, fastest in bf16 first. Ratios on one CPU say little about those on another."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("peers-*.json")]
    return sorted(found, key=lambda one: -float(one["ceiling"]["bf16_flops"]))


def results_file(cpu: str) -> Path:
    """The file for CPUs of this name."""
    return RESULTS / f"peers-{re.sub('[^a-z0-9]+', '-', cpu.lower()).strip('-')}.json"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of times that every contender is measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("--rows", action="append", help="only rows whose names begin with this; can be repeated")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="folder of the peers' environments")
    parser.add_argument(
        "--results",
        type=Path,
        default=results_file(str(describe()["cpu"])),
        help="file of figures, from which a table is made",
    )
    parser.add_argument("--loaded", action="store_true", help=LOADED)
    return parser.parse_args(arguments)


def interpreters(rows: Sequence[Row], cache: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns each peer environment's interpreter, or the reason why there is none."""
    pythons: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for name in sorted({peer.environment for row in rows for peer in row.peers}):
        try:
            pythons[name] = python_of(name, cache)
        except NotInstalledError as reason:
            missing[name] = str(reason)
    return pythons, missing


def one_round(row: Row, task: Task, pythons: Mapping[str, Path], threads: int, *, reverse: bool) -> dict[str, Any]:
    """Runs every installed contender once; every other round is in the opposite order."""
    contenders = [(HEED, OWN_MODULE, Path(sys.executable))]
    contenders += [
        (peer.name, peer.module, pythons[peer.environment]) for peer in row.peers if peer.environment in pythons
    ]
    ordered = contenders[::-1] if reverse else contenders
    given = {name: WORKER_ENVIRONMENT if name == HEED else ALLOCATOR for name, _, _ in ordered}
    return {
        name: run(command(str(python), module, task), threads, given=given[name]) for name, module, python in ordered
    }


def measure_ceiling(tasks: Mapping[str, Task], seconds: str, threads: int) -> dict[str, Any]:
    """Measures the ceiling in a separate process. Raises: RuntimeError with the last line of a process that failed."""
    given = json.dumps({name: asdict(task) for name, task in tasks.items()})
    found = run([sys.executable, "-m", "benchmarks.speed.ceiling", seconds, given], threads)
    if "failed" in found:
        raise RuntimeError(f"the ceiling was not measured: {found['failed']}")
    return found


def higher_ceiling(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the better of two ceilings, number by number: a shared machine may have been slow during one."""
    steps = {name: min(seconds, other["step_seconds"][name]) for name, seconds in one["step_seconds"].items()}
    return {name: max(one[name], other[name]) for name in one if name != "step_seconds"} | {"step_seconds": steps}
