"""The input and output of a measuring process. All peers' environments import this: standard library only."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROCESS_STARTED = time.perf_counter()  # this module is a measuring process's first import


@dataclass(frozen=True)
class Task:
    """One measurement. `folder` holds the models and data that `work.write_work` wrote.

    `batch` counts sequences (generate, train), prompts (ppo), comparisons of K responses (reward), packed rows (sft);
    `micro_batch` is the size of a PPO micro-batch. Rows of train and sft have `seq_len` tokens.
    """

    kind: str
    folder: str
    batch: int
    micro_batch: int
    seq_len: int
    response_tokens: int
    warmup_steps: int
    timed_steps: int

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def num_steps(self) -> int:
        return self.warmup_steps + self.timed_steps

    def read(self, name: str) -> Any:
        return json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))


class Clock:
    """Records when steps end, and the work done in each. Warm-up counts from the start of the process.

    In addition to wall time it records the CPU seconds of all threads of this process. These are more meaningful if
    other processes use the same cores, and meaningless if threads wait by spinning.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ends: list[float] = []
        self.computed: list[float] = []
        self.amounts: list[float] = []

    def tick(self, amount: float) -> None:
        """Records the end of a step that did this amount of work, in tokens or comparisons."""
        self.ends.append(time.perf_counter())
        self.computed.append(time.process_time())
        self.amounts.append(amount)

    def result(self, library: str) -> dict[str, float | str]:
        """Returns what the process prints. `library` is the measured library with its version."""
        assert len(self.ends) == self.task.num_steps, f"{len(self.ends)} steps instead of {self.task.num_steps}"
        last_warm = self.task.warmup_steps - 1
        return {
            "work": sum(self.amounts[last_warm + 1 :]),
            "seconds": self.ends[-1] - self.ends[last_warm],
            "cpu_seconds": self.computed[-1] - self.computed[last_warm],
            "warmup_seconds": self.ends[last_warm] - PROCESS_STARTED,
            "library": library,
        }


Measure = Callable[[Task, Clock], str]  # does the steps, ticks after each; returns the library and its version


def main(kinds: Mapping[str, Measure]) -> None:
    """Runs a measuring process: reads its task from the command line; its last line of output is JSON."""
    task = Task(**json.loads(sys.argv[1]))
    clock = Clock(task)
    library = kinds[task.kind](task, clock)
    print("\n" + json.dumps(clock.result(library)), flush=True)


def command(python: str, module: str, task: Task) -> list[str]:
    """Returns the command with which the driver starts a measuring process."""
    return [python, "-m", module, json.dumps(asdict(task))]
