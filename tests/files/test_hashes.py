"""Hashes of files and folders see names and contents, and nothing else."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

import files.hashes as hashes_module
from files.hashes import file_hash, folder_hash, folder_hashes, unchanged_hash

# echo -n abc | sha256sum
SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_hash_is_the_sha256_of_its_contents(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("abc")
    assert file_hash(tmp_path / "file") == SHA256_OF_ABC


def test_folder_hashes_go_by_relative_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("abc")
    (tmp_path / ".hidden").write_text("abc")
    assert folder_hashes(tmp_path) == {".hidden": SHA256_OF_ABC, "inner/file": SHA256_OF_ABC}


def test_folder_hash_sees_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, content in (("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        (folder / name).write_text(content)
        hashes.append(folder_hash(folder))
    assert len(set(hashes[:3])) == 3
    assert hashes[3] == hashes[0]


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads, read = 0, hashlib.file_digest

    def counted(file: BinaryIO, digest: str) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(file, digest)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    monkeypatch.setattr(hashes_module, "SETTLED_SECONDS", 0.0)
    path = tmp_path / "file"
    path.write_text("abd")
    assert unchanged_hash(path) != SHA256_OF_ABC
    assert folder_hashes(tmp_path) == {"file": unchanged_hash(path)}
    assert num_reads == 1
    times = path.stat()
    time.sleep(0.05)  # longer than a tick of the file system's clock
    path.write_text("abc")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as one who hides a change would
    assert unchanged_hash(path) == SHA256_OF_ABC
    assert num_reads == 2


def test_a_file_that_has_just_changed_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in ("abd", "abc", "abd", "abc"):  # all within one tick
        path.write_text(content)
        found = unchanged_hash(path)
    assert found == SHA256_OF_ABC
