"""Checkpoints written while training continues: training waits only while its state is copied.

A thread per rank (`CheckpointPart`) writes, syncs and hashes the copy of the rank's state, and then leaves a note with
the hashes. It also reads the next rank's files back and compares them with that rank's note. Rank 0's thread waits for
all notes and commits the checkpoint. The threads communicate only through files: a collective call from a thread could
get in between the collective calls of training.

A write that fails is retried for `RETRY_SECONDS`. If that does not help, the user gets a notice, training continues,
and the next save tries again; `CheckpointWriter` says when training stops.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from files.atomic import sync, write_json
from files.hashes import file_hash
from lm.progress import note_progress
from training.checkpoint import (
    ShardRange,
    State,
    begin_checkpoint,
    changed_files,
    commit_checkpoint,
    write_state,
    writing_folder,
)
from training.internals import host_bytes
from training.notices import CheckpointError, cause_of, remedy_of, say, system_error

PROGRESS = "progress.json"
ALIGNMENT = 64  # bytes; of each tensor in the buffer that states are copied to
MAX_FAILED_SAVES = 3  # checkpoints in a row, before a run stops
RETRY_SECONDS = 20.0  # a folder may be unreachable for this long
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 4.0  # between two attempts
POLL_SECONDS = 0.02  # between checks for other ranks' notes

Result = TypeVar("Result")

# Returns every rank's value, by rank; a collective call.
Gather = Callable[[str], list[str]]


@dataclass
class CheckpointWriter:
    """Writes one rank's part of checkpoints, at most one at a time. Leaving its context waits for the last one.

    The newest `keep` checkpoints stay. `gather` is a collective call of all ranks. A rank waits `deadline_seconds` for
    the others' parts. Training stops after `MAX_FAILED_SAVES` failed checkpoints in a row, or after one failure if
    there is no older checkpoint to resume from. `sound_step` is the older checkpoint's step, or None.
    """

    rank: int
    num_ranks: int
    keep: int
    deadline_seconds: float
    gather: Gather
    retry_seconds: float = RETRY_SECONDS
    sound_step: int | None = None
    _num_failed: int = 0
    _cause: str = ""  # of the last failed checkpoint
    _waited: float = 0.0
    _arena: Tensor | None = None
    _part: "CheckpointPart | None" = None

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
        if self._num_failed and (self.sound_step is None or self._num_failed >= MAX_FAILED_SAVES):
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
            what = f"{self._num_failed} checkpoints in a row could not be written"
            where = f"resumes from step {self.sound_step}"
        raise CheckpointError(f"{what}: {self._cause} and run the same command again, which {where}")

    def _copies(self, models: Mapping[str, State]) -> dict[str, State]:
        """Copy all states to CPU memory: into one buffer that every checkpoint reuses, pinned if there is a GPU."""
        num_bytes = sum(_aligned(held.values.nbytes) for state in models.values() for held in state.values())
        if self._arena is None or len(self._arena) < num_bytes:
            self._arena = None  # free it before allocating another
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


class _AbandonedError(Exception):
    """Another rank's part will never be written."""


@dataclass
class CheckpointPart:
    """What this rank writes of step `step`: the tensors of `models` and, on rank 0, whole `files` by name.

    Of all checkpoints, rank 0 keeps the newest `keep`. `deadline_seconds` limits the wait for other ranks' parts, and
    `retry_seconds` the time in which a failed operation is tried again.
    """

    checkpoints: Path
    step: int
    models: Mapping[str, State]
    files: Mapping[str, bytes]
    rank: int
    num_ranks: int
    keep: int
    deadline_seconds: float
    retry_seconds: float
    failure: Exception | None = None
    own_part: threading.Event = field(default_factory=threading.Event)  # written, or given up
    abandoned: threading.Event = field(default_factory=threading.Event)  # no longer wait for other ranks' parts
    thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return writing_folder(self.checkpoints, self.step)

    @property
    def name(self) -> str:
        return f"checkpoint {self.checkpoints / f'step-{self.step:06d}'}"

    @property
    def cause(self) -> str:
        """Why this part failed on this rank; "" if it did not."""
        if self.failure is None:
            return ""
        return f"{self.name}, rank {self.rank}: {cause_of(self.failure)}; {remedy_of(self.failure)}"

    def start(self, *, has_begun: bool) -> None:
        """Start the thread. With `has_begun` the empty folder exists already; otherwise rank 0's thread creates it."""
        self.thread = threading.Thread(target=self._run, args=(has_begun,), daemon=True)
        self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _run(self, has_begun: bool) -> None:
        """Keep a failure until training asks for it: an exception in a thread would go unseen."""
        try:
            if self.rank == 0 and not has_begun:
                self._retry(lambda: begin_checkpoint(self.checkpoints, self.step))
            hashes = self._retry(self._write)
            self.own_part.set()
            self._read_back()
            if self.rank == 0:
                self._commit(hashes)
        except _AbandonedError:
            return
        except Exception as error:
            self.failure = error
            self._remove()
            if self.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)  # it must not fill the disk
                say(f"{self.cause}. The run continues without this checkpoint")
        finally:
            self.own_part.set()

    def _retry(self, work: Callable[[], Result]) -> Result:
        """Call `work`, and again after errors of the operating system, with growing pauses.

        Raises the last error after `retry_seconds`, or once training no longer waits for this part.
        """
        started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                return work()
            except Exception as error:
                is_late = time.monotonic() - started >= self.retry_seconds
                if system_error(error) is None or is_late or self.abandoned.is_set():
                    raise
                if self.rank == 0 and pause == FIRST_PAUSE_SECONDS:
                    say(f"{self.name}: {cause_of(error)}; retrying for {self.retry_seconds:g} s")
            self.abandoned.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _write(self) -> dict[str, str]:
        """Write this rank's files and the note with their hashes.

        If that fails, what was written is removed at once: on a full disk, the next attempt needs its space.
        """
        hashes = {}
        try:
            for model, state in self.models.items():
                path = self.folder / model / f"rank-{self.rank:05d}.safetensors"
                path.parent.mkdir(exist_ok=True)
                write_state(state, path)
                hashes[str(path.relative_to(self.folder))] = _synced_hash(path)
            for name, content in self.files.items() if self.rank == 0 else ():
                (self.folder / name).write_bytes(content)
                hashes[name] = _synced_hash(self.folder / name)
            write_json(_written_note(self.folder, self.rank), hashes)
        except Exception:
            self._remove()
            raise
        return hashes

    def _remove(self) -> None:
        """Remove this rank's files, as far as the disk can be reached."""
        paths = [self.folder / model / f"rank-{self.rank:05d}.safetensors" for model in self.models]
        paths += [self.folder / name for name in self.files] if self.rank == 0 else []
        for path in (*paths, _written_note(self.folder, self.rank)):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue

    def _read_back(self) -> None:
        """Compare the next rank's files with its note.

        So on a cluster, files are read back on another machine, and no rank reads more than a rank writes.
        """
        other = (self.rank + 1) % self.num_ranks
        self._wait_for(lambda rank: _written_note(self.folder, rank), [other])
        hashes = self._retry(lambda: _read_hashes(_written_note(self.folder, other)))
        if changed := changed_files(self.folder, hashes):
            raise ValueError(f"{', '.join(changed)} does not read back as rank {other} wrote it")
        self._retry(lambda: write_json(_verified_note(self.folder, self.rank), {}))

    def _commit(self, hashes: dict[str, str]) -> None:
        """Commit the checkpoint once every rank's part is written and read back."""
        ranks = list(range(self.num_ranks))
        self._wait_for(lambda rank: _verified_note(self.folder, rank), ranks)
        for rank in ranks:
            hashes |= self._retry(lambda rank=rank: _read_hashes(_written_note(self.folder, rank)))  # type: ignore[misc]

        def commit() -> None:
            for rank in ranks:
                _written_note(self.folder, rank).unlink(missing_ok=True)
                _verified_note(self.folder, rank).unlink(missing_ok=True)
            commit_checkpoint(self.folder, self.step, hashes, self.keep)

        self._retry(commit)

    def _wait_for(self, note: Callable[[int], Path], ranks: list[int]) -> None:
        """Wait until the notes of these ranks exist."""
        end = time.monotonic() + self.deadline_seconds
        while missing := [rank for rank in ranks if not note(rank).exists()]:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"timed out after {self.deadline_seconds:g} s: no part of the checkpoint of step {self.step} from"
                    f" ranks {missing} of {self.num_ranks}"
                )
            if self.abandoned.wait(POLL_SECONDS):
                raise _AbandonedError


def _written_note(folder: Path, rank: int) -> Path:
    """Says that a rank's files are written, with their hashes."""
    return folder / f"written-{rank:05d}.json"


def _verified_note(folder: Path, rank: int) -> Path:
    """Says that a rank has read another's files back."""
    return folder / f"read-{rank:05d}.json"


def _read_hashes(path: Path) -> dict[str, str]:
    hashes: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return hashes


def _synced_hash(path: Path) -> str:
    sync(path)
    note_progress()
    return file_hash(path)
