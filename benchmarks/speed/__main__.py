"""The speed benchmarks, a command each: `python -m benchmarks.speed COMMAND --help`; without one, `peers`.

`peers` compares Heed with others; the rest measures Heed alone, each in a process of its own with the environment that
Heed gives its workers, and writes its figures to JSON and its table into benchmarks/README.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.speed import peers
from benchmarks.speed.environments import ROOT
from benchmarks.speed.machine import describe
from benchmarks.speed.process import run
from benchmarks.speed.table import README, write_between_markers

# Each module measures where it is the program, given the clock and the rounds, and has `markdown(found)`. By command,
# how many rounds keep it to minutes; memory hardly differs from one to the next.
COMMANDS = {"overhead": 5, "input": 5, "growth": 3, "memory": 1}


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        measure(given[0], given[1:])
    else:
        peers.main(given[1:] if given[:1] == ["peers"] else given)


def measure(name: str, arguments: Sequence[str]) -> None:
    """Run one command: figures to JSON, the table between its markers. Errors: RuntimeError with its last words."""
    module = import_module(f"benchmarks.speed.{name}")
    options = parse(name, str(module.__doc__), arguments)
    seconds = "cpu_seconds" if options.loaded else "seconds"
    command = [sys.executable, "-m", module.__name__, seconds, str(options.rounds)]
    figures = run(command, options.threads)
    if "failed" in figures:
        raise RuntimeError(f"{name} was not measured: {figures['failed']}")
    found: dict[str, Any] = {"machine": describe(), "threads": options.threads, "seconds": seconds}
    found |= {"rounds": options.rounds, **figures}
    options.results.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    text = module.markdown(found)
    write_between_markers(README, name, text)
    print(text)


def parse(name: str, description: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.speed {name}", description=description)
    parser.add_argument("--rounds", type=int, default=COMMANDS[name], help="how often everything is measured")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the measuring process")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "speed" / f"{name}.json")
    parser.add_argument("--loaded", action="store_true", help=peers.LOADED)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
