"""A lock that a killed compilation left behind."""

import os
import time
from pathlib import Path

import pytest

from training.compiled import EXTENSION, STALE_SECONDS, drop_stale_lock


@pytest.mark.parametrize(("age", "stays"), [(60.0, True), (STALE_SECONDS + 60, False)])
def test_only_a_stale_lock_is_removed(
    age: float, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    drop_stale_lock()  # none is there
    lock = tmp_path / EXTENSION / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    drop_stale_lock()
    assert lock.exists() == stays
    assert (str(lock) in caplog.text) != stays
