"""Tokens in files. Texts are tokenized once, before ranks are placed, and every rank memory-maps the files.

A folder of tokens has one file per array, `NAME.bin`, and is complete or absent. Interrupted writing continues from the
last save.

Shape letters: N sequences.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from files.atomic import commit_folder, sync, temporary_path, write_json
from files.records import as_json, record_of
from lm.chat_template import Messages
from lm.progress import note_progress
from training.data import Overlong, SourceRows
from training.notices import say

Item = TypeVar("Item")

CHUNK_TEXTS = 1024
SAVE_SECONDS = 30.0  # between saves of unfinished files, and between progress lines
PROGRESS = "progress.json"
SOURCES = "sources.json"  # the sources of the texts, if they have unusual rows

TYPES = {
    "tokens": np.int32,
    "counted": np.bool_,  # per token, True = counted in the loss
    "token_types": np.uint8,  # per token, 1 = of the second text of a pair
    "targets": np.int32,  # per token, what a classifier is to say of it; -1 = nothing
    "lengths": np.int32,  # of each sequence, tokens
    "num_counted": np.int32,  # of each sequence, without its first token, which nothing predicts
    "num_bytes": np.int32,  # of text that each token stands for
    "overlong": np.uint8,  # of each row: FITS, TRUNCATED or SKIPPED
    "texts": np.uint8,  # UTF-8
    "text_bytes": np.int32,  # of each text
    "warnings": np.uint8,  # a JSON list of warnings about rows
}


@dataclass(frozen=True)
class TokenFolders:
    """A stage's tokens: those it trains on, and those it is evaluated on."""

    training: Path
    heldout: Path


@dataclass(frozen=True)
class Part:
    """The next entries of each of the folder's arrays, made from the next `num_rows` rows of the texts.

    The last part has the `sources` whose rows are unusual.
    """

    num_rows: int
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    sources: Sequence[SourceRows] = ()


def write_arrays(folder: Path, names: Sequence[str], parts: Callable[[int], Iterator[Part]]) -> None:
    """Write the arrays of these names, unless the folder exists. `parts(n)` yields the parts from row n on."""
    if folder.is_dir():
        return
    temporary = temporary_path(folder)
    temporary.mkdir(exist_ok=True)
    with ExitStack() as closing:
        files = {name: closing.enter_context(array_path(temporary, name).open("ab")) for name in names}
        num_rows = _go_back(files, temporary / PROGRESS)
        saved = time.monotonic()
        for part in ahead(parts(num_rows)):
            for name, array in part.arrays.items():
                # Errors of `tofile` do not give the system's reason.
                files[name].write(np.ascontiguousarray(array, dtype=TYPES[name]).data)
            num_rows += part.num_rows
            if part.sources:
                write_json(temporary / SOURCES, as_json(part.sources))
            if time.monotonic() - saved >= SAVE_SECONDS:
                _save(files, num_rows, temporary / PROGRESS)
                saved = time.monotonic()
                num_tokens = files["tokens"].tell() // np.dtype(TYPES["tokens"]).itemsize
                say(f"{folder.name}: {num_rows:,} rows tokenized, {num_tokens:,} tokens")
    (temporary / PROGRESS).unlink(missing_ok=True)
    commit_folder(temporary, folder)


def _save(files: Mapping[str, IO[bytes]], num_rows: int, path: Path) -> None:
    """Sync what is written so far to disk, then record how much that is."""
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    write_json(path, {"num_rows": num_rows, "bytes": {name: file.tell() for name, file in files.items()}})
    sync(path.parent)


def _go_back(files: Mapping[str, IO[bytes]], path: Path) -> int:
    """Truncate the files to the last save. Returns the number of rows saved."""
    saved: dict[str, Any] = {"num_rows": 0, "bytes": {}}
    if path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
    for name, file in files.items():
        file.truncate(saved["bytes"].get(name, 0))
        file.seek(0, os.SEEK_END)
    return int(saved["num_rows"])


def array_path(folder: Path, name: str) -> Path:
    """The file of one of a folder's arrays."""
    return folder / f"{name}.bin"


def map_array(path: Path, dtype: Any) -> NDArray[Any]:
    """Memory-map an array's file. The ranks of a machine share one copy in memory, which the system may drop."""
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))  # slices of a plain array are faster


def read_array(folder: Path, name: str) -> NDArray[Any]:
    """One of a folder's arrays, memory-mapped."""
    return map_array(array_path(folder, name), TYPES[name])


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens, one after another in one array.

    `counted` is True for tokens whose prediction counts in the loss. `ends` [N] are the sequences' ends in these
    arrays. `num_counted` [N] leaves out each first token, which nothing predicts.
    """

    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]
    ends: NDArray[np.int64]
    num_counted: NDArray[np.int32]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Memory-map the sequences of a folder with the arrays of `sequence_arrays`; keeps 8 bytes per sequence."""
        ends = np.cumsum(read_array(folder, "lengths"), dtype=np.int64)
        counts = read_array(folder, "num_counted")
        return cls(read_array(folder, "tokens"), read_array(folder, "counted"), ends, counts)

    @classmethod
    def of(cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Self:
        """The (tokens, counted) sequences, in memory."""
        arrays = sequence_arrays(sequences)
        ends = np.cumsum(arrays["lengths"], dtype=np.int64)
        return cls(arrays["tokens"], arrays["counted"], ends, arrays["num_counted"])

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, [N]."""
        return np.diff(self.ends, prepend=0)

    def lengths_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of these sequences."""
        lengths: NDArray[np.int64] = self.ends[numbers] - np.where(numbers > 0, self.ends[numbers - 1], 0)
        return lengths

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of a sequence, and which of them count."""
        start, end = (int(self.ends[index - 1]) if index else 0), int(self.ends[index])
        return self.tokens[start:end], self.counted[start:end]


SEQUENCES = ("tokens", "counted", "lengths", "num_counted")  # the arrays of a folder of sequences
CHECKED_SEQUENCES = (*SEQUENCES, "overlong")  # and which rows were too long: FITS, TRUNCATED or SKIPPED
FITS, TRUNCATED, SKIPPED = range(3)


def read_overlong(folder: Path) -> Overlong:
    """Count the rows of CHECKED_SEQUENCES that were too long, truncated and skipped."""
    fates = read_array(folder, "overlong")
    return Overlong(len(fates), int(np.sum(fates == TRUNCATED)), int(np.sum(fates == SKIPPED)))


def unusual_rows(sources: Iterable[SourceRows]) -> Iterator[Part]:
    """Yield the last part, with the sources that have unusual rows, or nothing if there are none."""
    if unusual := [rows for rows in sources if rows]:
        yield Part(0, sources=unusual)


def read_sources(*folders: Path) -> tuple[SourceRows, ...]:
    """Read which sources of these folders' texts have unusual rows, each once."""
    sources = list[SourceRows]()
    for path in (folder / SOURCES for folder in folders):
        if path.is_file():
            read = [record_of(row, SourceRows, str(path)) for row in json.loads(path.read_text(encoding="utf-8"))]
            sources += [rows for rows in read if rows not in sources]
    return tuple(sources)


def encode_rows(
    encode: Callable[[Sequence[Messages]], Sequence[Item]], rows: Sequence[tuple[str, Messages]]
) -> Sequence[Item]:
    """Call `encode` once on the conversations of all (where, messages) rows.

    Raises: ValueError naming file and line of a conversation that the chat template refuses.
    """
    try:
        return encode([messages for _, messages in rows])
    except ValueError:
        for where, messages in rows:  # one by one, to find the row
            try:
                encode([messages])
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        raise


def sequence_arrays(sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> dict[str, NDArray[Any]]:
    """Return (tokens, counted) sequences as the arrays that `Sequences.read` reads."""
    all_tokens, all_counted = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.bool_)]
    for tokens, counted in sequences:
        all_tokens.append(np.array(tokens, dtype=np.int32))
        all_counted.append(np.array(counted, dtype=np.bool_))
    return {
        "tokens": np.concatenate(all_tokens),
        "counted": np.concatenate(all_counted),
        "lengths": np.array([len(tokens) for tokens in all_tokens[1:]], dtype=np.int32),
        "num_counted": np.array([np.count_nonzero(counted[1:]) for counted in all_counted[1:]], dtype=np.int32),
    }


def chunks(texts: Iterable[Item], size: int = CHUNK_TEXTS) -> Iterator[list[Item]]:
    """Yield lists of at most `size` texts, so that streams can be tokenized in parallel without loading them whole."""
    chunk: list[Item] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == size:
            note_progress()
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, while a thread produces the next one. Raises what `items` raises, in order."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
