"""Checkpoints written while training continues: training waits while its state is copied, and no longer.

Each rank has a thread that writes, syncs and hashes the copy of the rank's own part, and then leaves a note with the
hashes. Then it reads another rank's part back against that rank's note. The main rank's thread waits for all notes and
makes the checkpoint of them. The threads communicate through files alone: a collective call of theirs could come
between two of training's.

A write that fails is tried again for `RETRY_SECONDS`. If that does not help, training continues, the next save tries
again, and the user is told; `CheckpointWriter` says when training stops.
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

import tenacity
import torch
from torch import Tensor

from files.atomic import sync, write_text
from files.hashes import file_hash
from lm.progress import note_progress
from training.checkpoint import begin_checkpoint, changed_files, commit_checkpoint, writing_folder
from training.failures import CheckpointError, cause_of, remedy_of, system_error
from training.notices import say
from training.state import ShardRange, State, write_state

PROGRESS = "progress.json"
LOOK_SECONDS = 0.02
RETRY_SECONDS = 20.0  # a folder may be away for so long
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 4.0  # between two tries

Result = TypeVar("Result")

# What every rank gives, by rank; a collective call.
Gather = Callable[[str], list[str]]


class _AbandonedError(Exception):
    """Another rank's part will not come."""


@dataclass
class _Write:
    """One checkpoint under way on this rank."""

    checkpoints: Path
    step: int
    models: Mapping[str, State]
    files: Mapping[str, bytes]
    failure: Exception | None = None
    own_part: threading.Event = field(default_factory=threading.Event)  # written, or given up
    abandoned: threading.Event = field(default_factory=threading.Event)  # no other rank's part is waited for
    thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return writing_folder(self.checkpoints, self.step)

    @property
    def name(self) -> str:
        return f"checkpoint {self.checkpoints / f'step-{self.step:06d}'}"

    def cause(self, rank: int) -> str:
        """Why it failed here; "" where it did not."""
        if self.failure is None:
            return ""
        return f"{self.name}, rank {rank}: {cause_of(self.failure)}; {remedy_of(self.failure)}"

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()


@dataclass
class CheckpointWriter:
    """One rank's part in writing checkpoints, at most one at a time; used as a context, which ends with the last one
    written. Of all checkpoints the newest `keep` stay. `gather` is a collective call of all ranks, `deadline_seconds`
    is how long a rank's thread waits for the others' parts.

    Training stops after `max_failed_saves` failed checkpoints in a row, or after one where there is no older one, whose
    step would be `sound_step`.
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
    _buffers: dict[str, Tensor] = field(default_factory=dict)
    _write: _Write | None = None

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

        Raises:
            CheckpointError: on every rank, after too many failed checkpoints.
        """
        self._settle()
        if self._num_failed and (self.sound_step is None or self._num_failed >= self.max_failed_saves):
            self._stop()
        begun = time.monotonic()
        told = json.dumps({"step": step, **(progress or {})}) + "\n"
        copies = {model: self._copy(model, state) for model, state in models.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        write = _Write(checkpoints, step, copies, {PROGRESS: told.encode(), **(files or {})})
        has_begun = False
        if self.rank == 0:
            try:
                begin_checkpoint(checkpoints, step)
                has_begun = True
            except OSError:  # the thread tries again
                pass
        self.gather("")  # no rank writes before the folder is empty
        write.thread = threading.Thread(target=self._guarded, args=(write, has_begun), daemon=True)
        self._write = write
        write.thread.start()
        self._waited += time.monotonic() - begun

    def seconds_waited(self) -> float:
        """How long training has waited for checkpoints since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def wait(self) -> None:
        """Until what was begun is written, or has failed, which the user is told. Every rank calls it."""
        self._settle()

    def abandon(self) -> None:
        """Training has failed: finish what is under way, but wait for no other rank's part."""
        if self._write is not None:
            self._write.abandoned.set()
            self._write.join()

    def _settle(self) -> None:
        """Wait for the checkpoint under way; all ranks then agree on what became of it."""
        write, self._write = self._write, None
        if write is None:
            return
        begun = time.monotonic()
        write.own_part.wait()
        causes = self.gather(write.cause(self.rank))
        if any(causes):
            write.abandoned.set()
        write.join()
        causes = [early or late for early, late in zip(causes, self.gather(write.cause(self.rank)), strict=True)]
        self._waited += time.monotonic() - begun
        if not any(causes):
            self._num_failed, self._cause, self.sound_step = 0, "", write.step
            return
        self._num_failed += 1
        self._cause = next(filter(None, causes))
        if self.rank == 0:
            shutil.rmtree(write.folder, ignore_errors=True)  # the parts of those that did not fail
        if self.rank == 0 and not causes[0]:  # its own failure was reported at once
            say(f"{self._cause}. The run continues without this checkpoint")

    def _stop(self) -> None:
        """Raises CheckpointError with the last cause."""
        if self.sound_step is None:
            what, where = "no checkpoint can be written", "starts the stage again"
        else:
            what = f"{self._num_failed} checkpoints in a row (engine.max_failed_saves) could not be written"
            where = f"resumes from step {self.sound_step}"
        raise CheckpointError(f"{what}: {self._cause} and run the same command again, which {where}")

    def _copy(self, model: str, state: State) -> State:
        """The state in the CPU's memory, in buffers that are used again; on a GPU's machine pages that it can reach."""
        copies = {}
        for key, fragment in state.items():
            buffer, values = self._buffers.get(f"{model}/{key}"), fragment.values
            if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
                buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=torch.cuda.is_available())
                self._buffers[f"{model}/{key}"] = buffer
            buffer.copy_(values, non_blocking=True)
            copies[key] = ShardRange(fragment.offset, buffer)
        return copies

    def _guarded(self, write: _Write, has_begun: bool) -> None:
        """A thread's failure would go unheard: training asks for it."""
        try:
            if self.rank == 0 and not has_begun:
                self._retried(write, lambda: begin_checkpoint(write.checkpoints, write.step))
            hashes = self._retried(write, lambda: self._write_part(write))
            write.own_part.set()
            self._read_back(write)
            if self.rank == 0:
                self._commit(write, hashes)
        except _AbandonedError:
            return
        except Exception as error:
            write.failure = error
            self._clean(write)
            if self.rank == 0:
                say(f"{write.cause(self.rank)}. The run continues without this checkpoint")
        finally:
            write.own_part.set()

    def _retried(self, write: _Write, work: Callable[[], Result]) -> Result:
        """`work()`, again after errors of the operating system; pauses grow."""

        def report(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if self.rank == 0 and state.attempt_number == 1 and error is not None:
                say(f"{write.name}: {cause_of(error)}; trying again for {self.retry_seconds:g} s")

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: system_error(error) is not None),
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(self.retry_seconds), tenacity.stop_when_event_set(write.abandoned)
            ),
            wait=tenacity.wait_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS),
            sleep=tenacity.sleep_using_event(write.abandoned),
            before_sleep=report,
            reraise=True,
        )
        return retrying(work)

    def _write_part(self, write: _Write) -> dict[str, str]:
        """This rank's files and the note with their hashes. What a failed try has written is removed at once: on a full
        disk the next one needs the room.
        """
        hashes = {}
        try:
            for model, state in write.models.items():
                path = write.folder / model / f"rank-{self.rank:05d}.safetensors"
                path.parent.mkdir(exist_ok=True)
                write_state(state, path)
                hashes[str(path.relative_to(write.folder))] = _synced_hash(path)
            for name, content in write.files.items() if self.rank == 0 else ():
                (write.folder / name).write_bytes(content)
                hashes[name] = _synced_hash(write.folder / name)
            _leave_note(_note(write.folder, self.rank), hashes)
        except Exception:
            self._remove_part(write)
            raise
        return hashes

    def _remove_part(self, write: _Write) -> None:
        own = [write.folder / model / f"rank-{self.rank:05d}.safetensors" for model in write.models]
        own += [write.folder / name for name in write.files] if self.rank == 0 else []
        for path in (*own, _note(write.folder, self.rank)):
            try:
                path.unlink(missing_ok=True)
            except OSError:  # the folder is away
                continue

    def _clean(self, write: _Write) -> None:
        """Leave nothing of a failed checkpoint to fill the disk."""
        self._remove_part(write)
        if self.rank == 0:
            shutil.rmtree(write.folder, ignore_errors=True)

    def _read_back(self, write: _Write) -> None:
        """Compare the next rank's files with its note: what one machine wrote, another one reads, where there are
        several. So no rank reads more than a rank writes.
        """
        other = (self.rank + 1) % self.num_ranks
        self._wait_for(write, lambda rank: _note(write.folder, rank), [other])
        hashes = self._retried(write, lambda: _read_note(_note(write.folder, other)))
        if changed := changed_files(write.folder, hashes):
            raise ValueError(f"{', '.join(changed)} read back other than rank {other} wrote")
        self._retried(write, lambda: _leave_note(_read_mark(write.folder, self.rank), {}))

    def _commit(self, write: _Write, hashes: dict[str, str]) -> None:
        """Make the checkpoint of all parts, each written and read back."""
        ranks = list(range(self.num_ranks))
        self._wait_for(write, lambda rank: _read_mark(write.folder, rank), ranks)
        for rank in ranks:
            hashes |= self._retried(write, lambda rank=rank: _read_note(_note(write.folder, rank)))  # type: ignore[misc]

        def commit() -> None:
            for rank in ranks:
                _note(write.folder, rank).unlink(missing_ok=True)
                _read_mark(write.folder, rank).unlink(missing_ok=True)
            commit_checkpoint(write.folder, write.step, hashes, self.keep)

        self._retried(write, commit)

    def _wait_for(self, write: _Write, note: Callable[[int], Path], ranks: list[int]) -> None:
        """Until the notes of these ranks are there."""
        end = time.monotonic() + self.deadline_seconds
        while missing := [rank for rank in ranks if not note(rank).exists()]:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"timed out after {self.deadline_seconds:g} s: no part of step {write.step} from ranks {missing} of"
                    f" {self.num_ranks}"
                )
            if write.abandoned.wait(LOOK_SECONDS):
                raise _AbandonedError


def _note(writing: Path, rank: int) -> Path:
    """A rank's files are written."""
    return writing / f"written-{rank:05d}.json"


def _read_mark(writing: Path, rank: int) -> Path:
    """A rank has read another's files back."""
    return writing / f"read-{rank:05d}.json"


def _leave_note(path: Path, hashes: Mapping[str, str]) -> None:
    write_text(path, json.dumps(hashes))


def _read_note(path: Path) -> dict[str, str]:
    hashes: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return hashes


def _synced_hash(path: Path) -> str:
    sync(path)
    note_progress()
    return file_hash(path)
