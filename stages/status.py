"""What a running job says of itself in RUN/status.json: its stage and phase, its workers, and their restarts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

STATUS = "status.json"
WRITE_EVERY_SECONDS = 5.0  # and when something changes

State = Literal["running", "finished", "waiting", "stopped", "failed"]


@dataclass(frozen=True)
class Restart:
    """Workers were lost, or the storage, and the stage continued. `at` is in seconds since the epoch."""

    at: float
    stage: str
    why: str


@dataclass(frozen=True)
class RunStatus:
    """Times are in seconds since the epoch. `done` of `total` are what the stage counts; 0 of 0 if it counts nothing.

    `workers` are the ranks of each group. `message` says why a job failed, or what it waits for.
    """

    state: State
    host: str
    pid: int
    started: float
    updated: float
    stage: str = ""
    stage_started: float = 0.0
    phase: str = ""
    done: int = 0
    total: int = 0
    workers: Mapping[str, int] | None = None
    restarts: tuple[Restart, ...] = ()
    message: str = ""
