"""Models from the hub: another machine gets the same complete commit, and downloads it once."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lm.hub import hub_name, is_on_this_machine, model_directory, on_this_machine
from lm.progress import progress_noted
from tests.hub_server import COMMIT, LATER, NAME, serve


def test_another_machine_downloads_the_same_commit_once(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(model_folder) as hub:
        hub.reach(monkeypatch, tmp_path / "driver")
        resolved = model_directory(NAME)
        assert hub_name(resolved) == NAME
        (tmp_path / "driver").rename(tmp_path / "elsewhere")  # the driver's disk is not this machine's
        hub.main = LATER  # meanwhile a new commit is pushed
        hub.reach(monkeypatch, tmp_path / "worker")
        hub.downloads.clear()
        before = progress_noted()
        with ThreadPoolExecutor(4) as ranks:  # ranks on one machine
            found = set(ranks.map(lambda _: on_this_machine(resolved), range(4)))
        assert found == {tmp_path / "worker" / "models--owner--tiny" / "snapshots" / COMMIT}
        assert set(hub.downloads.values()) == {1}
        assert progress_noted() > before  # a monitor of the rank sees that it is busy
        (folder,) = found
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == (model_folder / name).read_bytes()


def test_a_second_copy_in_another_layout_is_not_downloaded(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss and Llama have one, of as many bytes as the model."""
    published = tmp_path / "published"
    shutil.copytree(model_folder, published)
    shutil.copytree(model_folder, published / "original")
    with serve(published) as hub:
        hub.reach(monkeypatch, tmp_path / "cache")
        folder = model_directory(NAME)
        assert (folder / "model.safetensors").is_file()
        assert not (folder / "original").exists()


def test_a_half_downloaded_model_is_completed(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(model_folder) as hub:
        hub.reach(monkeypatch, tmp_path)
        folder = model_directory(NAME)
        (folder / "model.safetensors").unlink()  # as while another rank downloads it
        assert on_this_machine(folder) == folder
        assert (folder / "model.safetensors").is_file()
    assert on_this_machine(folder) == folder  # from then on it needs no hub


def test_a_model_whose_weights_are_here_is_on_this_machine(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_on_this_machine(str(model_folder))
    assert not is_on_this_machine("no folder/and no/hub id")
    with serve(model_folder) as hub:
        hub.reach(monkeypatch, tmp_path)
        assert not is_on_this_machine(NAME)
        assert not hub.downloads, "to look is not to download"
        folder = model_directory(NAME)
    assert is_on_this_machine(NAME)
    (folder / "model.safetensors").unlink()
    assert not is_on_this_machine(NAME)


def test_local_folders_are_themselves_and_a_missing_model_says_so(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_this_machine(model_folder) == model_folder
    assert not hub_name(model_folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    gone = tmp_path / "models--owner--tiny" / "snapshots" / COMMIT
    with pytest.raises(ValueError, match="'owner/tiny' is neither a local folder nor a model that the hub provided"):
        on_this_machine(gone)
