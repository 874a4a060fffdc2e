"""A lock file that a killed compilation left."""

import os
import time
from pathlib import Path

import pytest
import torch

from training.compiled import EXTENSION, STALE_SECONDS, choose_extension_folder, drop_stale_lock
from training.internals import extension_folder


def test_each_installation_compiles_into_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for installation in ("/here/torch/__init__.py", "/there/torch/__init__.py"):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        monkeypatch.setattr(torch, "__file__", installation)
        choose_extension_folder()
        folders.add(os.environ["TORCH_EXTENSIONS_DIR"])
    assert len(folders) == 2
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # set by the user
    choose_extension_folder()
    assert extension_folder(EXTENSION) == tmp_path / EXTENSION


@pytest.mark.parametrize(("age", "stays"), [(60.0, True), (STALE_SECONDS + 60, False)])
def test_only_a_stale_lock_is_removed(
    age: float, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    drop_stale_lock()  # no lock exists
    lock = tmp_path / EXTENSION / "lock"
    lock.touch()
    os.utime(lock, (time.time() - age,) * 2)
    drop_stale_lock()
    assert lock.exists() == stays
    assert (str(lock) in caplog.text) != stays
