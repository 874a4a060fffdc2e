"""Hashes of files and folders see names and contents, and nothing else."""

from pathlib import Path

from files.hashes import file_hash, folder_hash, folder_hashes

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
