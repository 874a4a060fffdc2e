"""Checkpoints written while training continues: training waits only while its state is copied.

A thread per rank writes the copy (`training.checkpoint_part`). A write that fails is retried for `RETRY_SECONDS`. If
that does not help, the user is told, training continues, and the next save tries again; `CheckpointWriter` says when
training stops.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lm.transfer import host_bytes
from training.checkpoint import begin_checkpoint
from training.checkpoint_part import CheckpointPart
from training.failures import CheckpointError
from training.notices import say
from training.state import ShardRange, State

PROGRESS = "progress.json"
ALIGNMENT = 64  # bytes; of each tensor in the memory that states are copied to
RETRY_SECONDS = 20.0  # a folder may be unreachable for this long

# Returns every rank's value, by rank; a collective call.
Gather = Callable[[str], list[str]]


@dataclass
class CheckpointWriter:
    """Writes one rank's part of checkpoints, at most one at a time. Leaving its context waits for the last one.

    The newest `keep` checkpoints stay. `gather` is a collective call of all ranks. A rank waits `deadline_seconds` for
    the others' parts. Training stops after `max_failed_saves` failed checkpoints in a row, or after a single one if
    there is no older one, whose step would be `sound_step`.
    """

    rank: int
    num_ranks: int
    keep: int
    deadline_seconds: float
    gather: Gather
    max_failed_saves: int = 3
    retry_seconds: float = RETRY_SECONDS
    sound_step: int | None = None
    _num_failed: int = 0
    _cause: str = ""  # of the last failed checkpoint
    _waited: float = 0.0
    _arena: Tensor | None = None
    _part: CheckpointPart | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            self.abandon()

    def save(
        self,
        checkpoints: Path,
        step: int,
        models: Mapping[str, State],
        progress: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Start writing this rank's part of `models` and, on rank 0, `progress` and whole `files` by name.

        Every rank calls it. Tensors may change as soon as it returns.

        Raises:
            CheckpointError: on every rank, after too many failed checkpoints.
        """
        self.wait()
        if self._num_failed and (self.sound_step is None or self._num_failed >= self.max_failed_saves):
            self._stop()
        started = time.monotonic()
        content = json.dumps({"step": step, **(progress or {})}) + "\n"
        copies = self._copies(models)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        all_files = {PROGRESS: content.encode(), **(files or {})}
        part = CheckpointPart(
            checkpoints, step, copies, all_files, self.rank, self.num_ranks, self.keep, self.deadline_seconds,
            self.retry_seconds,
        )  # fmt: skip
        has_begun = False
        if self.rank == 0:
            try:
                begin_checkpoint(checkpoints, step)
                has_begun = True
            except OSError:  # the thread tries again
                pass
        self.gather("")  # no rank writes before the folder is empty
        part.start(has_begun=has_begun)
        self._part = part
        self._waited += time.monotonic() - started

    def seconds_waited(self) -> float:
        """How long training has waited for checkpoints since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def wait(self) -> None:
        """Wait for the checkpoint being written. All ranks then agree on whether it succeeded. Every rank calls it."""
        part, self._part = self._part, None
        if part is None:
            return
        started = time.monotonic()
        part.own_part.wait()
        early = self.gather(part.cause)
        if any(early):
            part.abandoned.set()
        part.join()
        causes = [first or second for first, second in zip(early, self.gather(part.cause), strict=True)]
        self._waited += time.monotonic() - started
        if not any(causes):
            self._num_failed, self._cause, self.sound_step = 0, "", part.step
            return
        self._num_failed += 1
        self._cause = next(filter(None, causes))
        if self.rank == 0:
            shutil.rmtree(part.folder, ignore_errors=True)  # the parts of the ranks that did not fail
        if self.rank == 0 and not causes[0]:  # its own failure was reported at once
            say(f"{self._cause}. The run continues without this checkpoint")

    def abandon(self) -> None:
        """Training has failed: finish this rank's part, but do not wait for the others'."""
        if self._part is not None:
            self._part.abandoned.set()
            self._part.join()

    def _stop(self) -> None:
        """Raises CheckpointError with the last cause."""
        if self.sound_step is None:
            what, where = "no checkpoint can be written", "starts the stage again"
        else:
            what = f"{self._num_failed} checkpoints in a row (engine.max_failed_saves) could not be written"
            where = f"resumes from step {self.sound_step}"
        raise CheckpointError(f"{what}: {self._cause} and run the same command again, which {where}")

    def _copies(self, models: Mapping[str, State]) -> dict[str, State]:
        """Copy all states to CPU memory: into one piece that every checkpoint uses, pinned where there is a GPU."""
        num_bytes = sum(_aligned(held.values.nbytes) for state in models.values() for held in state.values())
        if self._arena is None or len(self._arena) < num_bytes:
            self._arena = None  # before there is another
            self._arena = host_bytes(num_bytes, pinned=torch.cuda.is_available())
        copies, start = dict[str, State](), 0
        for model, state in models.items():
            copied = dict[str, ShardRange]()
            for key, original in state.items():
                values, end = original.values, start + original.values.nbytes
                buffer = self._arena[start:end].view(values.dtype).view(values.shape)
                buffer.copy_(values, non_blocking=True)
                copied[key] = ShardRange(original.offset, buffer)
                start += _aligned(values.nbytes)
            copies[model] = copied
        return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
