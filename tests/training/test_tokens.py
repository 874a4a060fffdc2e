"""Tokens in files: interrupted writing resumes, errors arrive, and a rank keeps little of them in memory."""

import errno
import resource
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from training import tokens
from training.packing import Packed
from training.tokens import SEQUENCES, Part, Sequences, ahead, chunks, read_array, sequence_arrays, write_arrays


def numbers(first: int, stop: int = 5000, size: int = 100) -> Iterator[Part]:
    """Yields texts that are one number each, in chunks."""
    for start in range(first, stop, size):
        yield Part(size, {"tokens": np.arange(start, start + size, dtype=np.int32)})


def test_arrays_are_written_once_and_whole(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_arrays(folder, ("tokens",), numbers)
    assert read_array(folder, "tokens").tolist() == list(range(5000))
    assert [path.name for path in tmp_path.rglob("*.*")] == ["tokens.bin"]

    def again(_first: int) -> Iterator[Part]:
        raise AssertionError("it is there")

    write_arrays(folder, ("tokens",), again)


def test_no_texts_are_an_empty_array(tmp_path: Path) -> None:
    write_arrays(tmp_path / "x", SEQUENCES, lambda _: iter([]))
    assert len(Sequences.read(tmp_path / "x")) == 0


@pytest.mark.parametrize("killed_after", [1, 17, 49])
def test_interrupted_writing_continues_where_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    monkeypatch.setattr(tokens, "SAVE_SECONDS", 0.0)
    reported: list[str] = []
    monkeypatch.setattr(tokens, "say", reported.append)
    folder = tmp_path / "x"

    def interrupted(first: int) -> Iterator[Part]:
        for index, part in enumerate(numbers(first)):
            if index == killed_after:
                raise KeyboardInterrupt
            yield part

    with pytest.raises(KeyboardInterrupt):
        write_arrays(folder, ("tokens",), interrupted)
    assert not folder.exists()
    with (tmp_path / ".writing-x" / "tokens.bin").open("ab") as file:
        file.write(b"half of a chunk")  # written, but not yet saved when the process was killed
    begun: list[int] = []

    def rest(first: int) -> Iterator[Part]:
        begun.append(first)
        return numbers(first)

    write_arrays(folder, ("tokens",), rest)
    assert begun == [100 * killed_after]
    assert read_array(folder, "tokens").tolist() == list(range(5000))
    assert reported[-1] == "x: 5,000 rows tokenized, 5,000 tokens"


def test_an_error_in_the_texts_arrives(tmp_path: Path) -> None:
    def parts(first: int) -> Iterator[Part]:
        yield from numbers(first, 1000)
        raise ValueError("line 1001: not JSON")

    with pytest.raises(ValueError, match="line 1001"):
        write_arrays(tmp_path / "x", ("tokens",), parts)
    assert not (tmp_path / "x").exists()


def test_a_thread_makes_the_next_item_while_one_is_used() -> None:
    made = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        made.set()
        yield 2

    found = ahead(items())
    assert next(found) == 1
    assert made.wait(timeout=60)
    assert list(found) == [2]


def test_arrays_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    """As on a full disk: writing begins, and fails with the system's own reason."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            write_arrays(tmp_path / "x", ("tokens",), lambda first: numbers(first, 500_000, 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.errno == errno.EFBIG


def test_chunks_hold_everything_in_order() -> None:
    assert list(chunks((str(i) for i in range(5)), 2)) == [["0", "1"], ["2", "3"], ["4"]]
    assert list(chunks([], 2)) == []


def test_a_rank_keeps_less_than_half_a_byte_per_token_of_its_data(tmp_path: Path) -> None:
    """It used to keep 64 bytes per token, and 88 while tokenizing. Mapped files do not count: ranks share them."""
    drawn = np.random.default_rng(0)
    lengths = drawn.integers(100, 400, 3000)
    num_tokens = int(lengths.sum())

    def parts(first: int) -> Iterator[Part]:
        for of_chunk in np.array_split(lengths[first:], 30):
            yield Part(len(of_chunk), sequence_arrays(([7] * int(n), [False, *[True] * int(n - 1)]) for n in of_chunk))

    tracemalloc.start()
    try:
        write_arrays(tmp_path / "x", SEQUENCES, parts)
        written = tracemalloc.get_traced_memory()[1]
        before = tracemalloc.get_traced_memory()[0]
        packed = Packed(Sequences.read(tmp_path / "x"), 1024, pad_id=0)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 0.5 * num_tokens
    # One chunk, the next one and their Python lists, whatever the total size.
    assert written < 4 * 40 * num_tokens / 30
    assert packed.num_tokens(np.arange(len(packed))) == num_tokens
    assert packed.num_counted(np.arange(len(packed))) == num_tokens - len(lengths)
