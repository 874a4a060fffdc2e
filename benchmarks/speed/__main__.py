"""The speed benchmarks, one per command: `python -m benchmarks.speed COMMAND --help`. The default is `peers`.

`peers` compares Heed with others. The other commands measure Heed alone, each in a separate process with the
environment of Heed's workers, and write their figures to JSON and their tables into benchmarks/README.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.figures import write_pages
from benchmarks.speed import peers
from benchmarks.speed.environments import ROOT
from benchmarks.speed.machine import describe
from benchmarks.speed.process import run
from benchmarks.speed.table import README, write_between_markers

# The number of rounds per command that takes a few minutes; memory hardly differs between rounds. Each module measures
# when run as a program, with the clock and the number of rounds as arguments, and has `markdown(found)`.
COMMANDS = {"overhead": 5, "input": 5, "growth": 3, "memory": 1}


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        measure(given[0], given[1:])
    else:
        peers.main(given[1:] if given[:1] == ["peers"] else given)
        write_pages()


def measure(name: str, arguments: Sequence[str]) -> None:
    """Runs one command; writes its figures to JSON and its table between its markers.

    Raises: RuntimeError with the last line of a measuring process that failed.
    """
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
    parser.add_argument("--rounds", type=int, default=COMMANDS[name], help="number of times to measure everything")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of the measuring process")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "speed" / f"{name}.json")
    parser.add_argument("--loaded", action="store_true", help=peers.LOADED)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
