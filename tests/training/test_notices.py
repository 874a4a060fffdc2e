"""Failures with a known cause are one line; all others keep their traceback."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from training.notices import CheckpointError, in_one_line


def raised_from(cause: Exception) -> RuntimeError:
    """Raises it as the driver raises a worker's failure."""
    error = RuntimeError(f"sft: rank 1 of 2: {cause!r}\nTraceback ...")
    error.__cause__ = cause
    return error


def test_a_full_disk_is_reported_with_the_file_and_the_remedy() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/demo/sft/results.writing")
    expected = (
        "No space left on device (ENOSPC): runs/demo/sft/results.writing; free space there and run the same command"
        " again"
    )
    assert in_one_line(full) == expected
    assert in_one_line(raised_from(full)) == f"sft: {expected}"


def test_errors_of_safetensors_are_the_systems_own(tmp_path: Path) -> None:
    """safetensors does not raise OSError; a file size limit stands in for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(SafetensorError) as full:
            save_file({"a": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large (EFBIG)" in in_one_line(raised_from(full.value))


def test_failures_that_know_their_cause_say_it() -> None:
    assert in_one_line(raised_from(CheckpointError("no checkpoint can be written"))) == "no checkpoint can be written"


@pytest.mark.parametrize("unknown", [KeyError("a"), FileNotFoundError(errno.ENOENT, "gone", "x"), RuntimeError("?")])
def test_an_unforeseen_error_keeps_its_traceback(unknown: Exception) -> None:
    assert in_one_line(unknown) == ""
    assert in_one_line(raised_from(unknown)) == ""
