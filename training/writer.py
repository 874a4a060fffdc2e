"""Checkpoints written behind training's back: training waits while its state is copied, and no longer.

Each rank has a thread that writes, syncs and hashes the copy of the rank's own part, and then leaves a note with the
hashes. The main rank's thread waits for all notes and makes the checkpoint of them. The threads speak through files
alone: a collective call of theirs could come between two of training's.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from training.checkpoint import begin_checkpoint, commit_checkpoint, file_hash, sync, writing_folder
from training.state import Fragment, State, write_state

PROGRESS = "progress.json"
LOOK_SECONDS = 0.02


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says which, on which rank, and why."""


@dataclass
class CheckpointWriter:
    """One rank's part in writing checkpoints, at most one at a time; used as a context, which ends with the last one
    written. Of all checkpoints the newest `keep` stay. `barrier` waits for all ranks, `deadline_seconds` is how long
    the main rank's thread waits for the others' parts.
    """

    rank: int
    num_ranks: int
    keep: int
    deadline_seconds: float
    barrier: Callable[[], None]
    _waited: float = 0.0
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _failure: Exception | None = None
    _abandoned: threading.Event = field(default_factory=threading.Event)

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
        """Begin to write this rank's part of `models` and, on the main rank, `progress` and whole `files` by name.
        Every rank calls it; tensors may change as soon as it returns.

        Errors: CheckpointError where the write before failed.
        """
        self.wait()
        begun = time.monotonic()
        if self.rank == 0:
            begin_checkpoint(checkpoints, step)
        self.barrier()
        copies = {model: self._copy(model, state) for model, state in models.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        told = json.dumps({"step": step, **(progress or {})}) + "\n"
        arguments = (checkpoints, step, copies, {PROGRESS: told.encode(), **(files or {})})
        self._thread = threading.Thread(target=self._guarded, args=arguments, daemon=True)
        self._thread.start()
        self._waited += time.monotonic() - begun

    def seconds_waited(self) -> float:
        """How long training has waited for checkpoints since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def check(self) -> None:
        """Errors: CheckpointError where a write has failed."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until what was begun is written: on the main rank the whole checkpoint, elsewhere the rank's own part.

        Errors: CheckpointError where it failed.
        """
        begun = time.monotonic()
        if self._thread is not None:
            self._thread.join()
        self._waited += time.monotonic() - begun
        self.check()

    def abandon(self) -> None:
        """Training has failed: finish what is under way, but wait for no other rank's part."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()

    def _copy(self, model: str, state: State) -> State:
        """The state in the CPU's memory, in buffers that are used again; on a GPU's machine pages that it can reach."""
        copies = {}
        for key, fragment in state.items():
            buffer, values = self._buffers.get(f"{model}/{key}"), fragment.values
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=torch.cuda.is_available())
                self._buffers[f"{model}/{key}"] = buffer
            buffer.copy_(values, non_blocking=True)
            copies[key] = Fragment(fragment.offset, buffer)
        return copies

    def _guarded(self, checkpoints: Path, step: int, models: Mapping[str, State], files: Mapping[str, bytes]) -> None:
        """A thread's failure would go unheard: training asks for it."""
        try:
            self._write(writing_folder(checkpoints, step), step, models, files)
        except Exception as error:
            failure = CheckpointError(f"checkpoint {checkpoints / f'step-{step:06d}'}, rank {self.rank}: {error!r}")
            failure.__cause__ = error
            self._failure = failure

    def _write(self, writing: Path, step: int, models: Mapping[str, State], files: Mapping[str, bytes]) -> None:
        hashes = {}
        for model, state in models.items():
            path = writing / model / f"rank-{self.rank:05d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            write_state(state, path)
            hashes[str(path.relative_to(writing))] = _synced_hash(path)
        for name, content in files.items() if self.rank == 0 else ():
            (writing / name).write_bytes(content)
            hashes[name] = _synced_hash(writing / name)
        _leave_note(_note(writing, self.rank), hashes)
        if self.rank == 0 and self._wait_for_parts(writing, step):
            for rank in range(self.num_ranks):
                hashes |= json.loads(_note(writing, rank).read_text(encoding="utf-8"))
                _note(writing, rank).unlink()
            commit_checkpoint(writing, step, hashes, self.keep)

    def _wait_for_parts(self, writing: Path, step: int) -> bool:
        """Whether all ranks' parts are there; False where training has failed meanwhile."""
        end = time.monotonic() + self.deadline_seconds
        while missing := [rank for rank in range(self.num_ranks) if not _note(writing, rank).exists()]:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"timed out after {self.deadline_seconds:g} s: no part of step {step} from ranks {missing} of"
                    f" {self.num_ranks}"
                )
            if self._abandoned.wait(LOOK_SECONDS):
                return False
        return True


def _note(writing: Path, rank: int) -> Path:
    return writing / f"written-{rank:05d}.json"


def _leave_note(path: Path, hashes: Mapping[str, str]) -> None:
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(hashes), encoding="utf-8")
    sync(aside)
    aside.rename(path)


def _synced_hash(path: Path) -> str:
    sync(path)
    return file_hash(path)
