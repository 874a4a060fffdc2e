"""Checkpoints are complete or absent, and a state written in any ranges can be read in any other ranges."""

import hashlib
import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import training.checkpoint as checkpoint_module
from files.hashes import folder_hashes
from tests.training.checkpoints import latest_checkpoint
from training.checkpoint import (
    ParamShard,
    SavedState,
    ShardRange,
    State,
    begin_checkpoint,
    changed_files,
    choose_sound,
    commit_checkpoint,
    find_resumption,
    read_manifest,
    share_of_files,
    state_of,
    step_folders,
    whole_tensors,
    write_state,
)

SIZES = {"weight/a": 7, "exp_avg/a": 7, "weight/b.c": 12, "weight/d": 1}


def write(folder: Path, step: int, keep: int = 2) -> Path:
    writing = begin_checkpoint(folder, step)
    (writing / "inner").mkdir()
    (writing / "inner" / "weights.bin").write_bytes(bytes([step % 256]) * 100)
    (writing / "loop.json").write_text(f'{{"step": {step}}}')
    return commit_checkpoint(writing, step, folder_hashes(writing), keep)


def test_the_manifest_holds_the_sha256_of_every_file(tmp_path: Path) -> None:
    final = write(tmp_path, 5)
    assert final == tmp_path / "step-000005"
    manifest = json.loads((final / "manifest.json").read_text())
    assert manifest == {
        "step": 5,
        "sha256": {
            "inner/weights.bin": hashlib.sha256(b"\x05" * 100).hexdigest(),
            "loop.json": hashlib.sha256(b'{"step": 5}').hexdigest(),
        },
    }
    assert latest_checkpoint(tmp_path) == (final, 5)


def test_none_where_none_was_written(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None


def flip_a_bit(final: Path) -> None:
    path = final / "inner" / "weights.bin"
    content = bytearray(path.read_bytes())
    content[42] ^= 1
    path.write_bytes(content)


def truncate(final: Path) -> None:
    path = final / "inner" / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def add_a_file(final: Path) -> None:
    (final / "extra").touch()


def lose_a_file(final: Path) -> None:
    (final / "loop.json").unlink()


def lose_the_manifest(final: Path) -> None:
    (final / "manifest.json").unlink()


def cut_the_manifest(final: Path) -> None:
    path = final / "manifest.json"
    path.write_text(path.read_text()[:30])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip_a_bit, "inner/weights.bin"),
        (truncate, "inner/weights.bin"),
        (add_a_file, "extra"),
        (lose_a_file, "loop.json"),
        (lose_the_manifest, "manifest"),
        (cut_the_manifest, "manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, damage: object, name: str) -> None:
    write(tmp_path, 3)
    final = write(tmp_path, 6)
    assert callable(damage)
    damage(final)
    found = find_resumption(tmp_path, "sft")
    first, second = found.notices("sft", 9)
    assert first.startswith("sft: checkpoint step-000006 is damaged, so it is skipped: ")
    assert name in first
    assert second == "sft: resumes from step 3 of 9 (checkpoints/step-000003)"
    # Training resumes from step 3 and reaches 6 again.
    write(tmp_path, 6)
    assert latest_checkpoint(tmp_path) == (final, 6)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        write(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000012"]
    write(tmp_path, 14, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000014"]


def test_an_interrupted_write_leaves_the_old_checkpoint_usable(tmp_path: Path) -> None:
    write(tmp_path, 3, keep=1)
    writing = begin_checkpoint(tmp_path, 6)
    (writing / "weights.bin").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-000003", 3)
    again = begin_checkpoint(tmp_path, 6)
    assert list(again.iterdir()) == []


@pytest.mark.parametrize("broken", ["commit_folder", "read_manifest"])
def test_the_old_one_goes_only_after_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    write(tmp_path, 3, keep=1)

    def fail(*_: Path) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"the disk is gone"):  # noqa: PT012
        patch.setattr(checkpoint_module, broken, fail)
        write(tmp_path, 6, keep=1)
    assert (tmp_path / "step-000003").is_dir()
    found = latest_checkpoint(tmp_path)
    assert found is not None


def test_what_lies_on_disk_at_every_point_of_a_commit_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever saving is killed, before any rename or removal, a complete checkpoint remains."""
    write(tmp_path, 3, keep=1)
    seen: list[int] = []

    def watch(original: object) -> object:
        def watched(*arguments: object, **options: object) -> object:
            found = latest_checkpoint(tmp_path)
            assert found is not None, "a kill here would have lost everything"
            seen.append(found[1])
            assert callable(original)
            return original(*arguments, **options)

        return watched

    monkeypatch.setattr(shutil, "rmtree", watch(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", watch(Path.rename))
    write(tmp_path, 6, keep=1)
    assert seen == [3, 6, 6]  # rename, rename step-3, remove it


DAMAGES = [flip_a_bit, truncate, add_a_file, lose_a_file, lose_the_manifest, cut_the_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_every_checkpoint_is_damaged_the_user_decides(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    for step in (3, 6):
        damage(write(tmp_path, step))
    (tmp_path / ".writing-000009").mkdir()  # an unfinished checkpoint is neither a checkpoint nor damage
    with pytest.raises(ValueError, match=r"every checkpoint of sft is damaged.*--from sft") as raised:
        find_resumption(tmp_path, "sft")
    assert str(tmp_path) in str(raised.value)
    assert "step-000003" in str(raised.value)
    assert "step-000006" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unfinished_write_alone_is_no_damage(tmp_path: Path) -> None:
    begin_checkpoint(tmp_path, 3)
    found = find_resumption(tmp_path, "sft")
    assert found.notices("sft", 9) == ["sft: starts from step 0 of 9 (no checkpoint yet)"]


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    """Puts a file in the folder's place, because the tests may run as root, which can read every folder."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ValueError, match=r"checkpoints: the folder of checkpoints cannot be read: Not a directory"):
        find_resumption(tmp_path / "checkpoints", "sft")
    (tmp_path / "step-000003").touch()
    with pytest.raises(ValueError, match=r"every checkpoint of sft is damaged"):
        find_resumption(tmp_path, "sft")


def test_several_ranks_verify_every_file_once_and_agree(tmp_path: Path) -> None:
    write(tmp_path, 3)
    lose_a_file(write(tmp_path, 6))
    flip_a_bit(write(tmp_path, 9, keep=3))
    for num_ranks in (1, 2, 3):
        read: list[str] = []

        def check(folder: Path, sha256: Mapping[str, str]) -> list[str]:
            changed = []
            for rank in range(num_ranks):  # noqa: B023 - called before the next one
                share = share_of_files(sha256, rank, num_ranks)  # noqa: B023
                read.extend(share)  # noqa: B023
                changed += changed_files(folder, share)
            return changed

        found = choose_sound(tmp_path, "sft", [read_manifest(folder) for folder in step_folders(tmp_path)], check)
        assert found.name == "step-000003"
        assert list(found.damaged) == ["step-000009", "step-000006"]
        assert sorted(read) == sorted(["inner/weights.bin", "loop.json"] * 2)  # of steps 9 and 3; step 6 lacks a file


def test_damaged_checkpoints_of_later_steps_take_no_sound_ones_place(tmp_path: Path) -> None:
    write(tmp_path, 3)
    flip_a_bit(write(tmp_path, 8))
    write(tmp_path, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_steps_of_seven_digits_are_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 999_999)
    write(tmp_path, 1_000_000)
    assert latest_checkpoint(tmp_path) == (tmp_path / "step-1000000", 1_000_000)


def write_ranges(folder: Path, whole: dict[str, Tensor], num_ranks: int, generator: np.random.Generator) -> None:
    """Splits each tensor at random places and deals the parts to the ranks."""
    parts: list[dict[str, ShardRange]] = [{} for _ in range(num_ranks)]
    for key, tensor in whole.items():
        cuts = [0, *sorted(generator.integers(0, len(tensor) + 1, num_ranks - 1)), len(tensor)]
        for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
            if first < last:
                parts[rank][key] = ShardRange(int(first), tensor[first:last])
    for rank, state in enumerate(parts):
        write_state(state, folder / f"rank-{rank:05d}.safetensors")


@pytest.mark.parametrize("seed", range(20))
def test_any_run_is_read_out_of_any_cuts(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    whole = {key: torch.from_numpy(generator.standard_normal(size).astype(np.float32)) for key, size in SIZES.items()}
    write_ranges(tmp_path, whole, 1 + seed % 4, generator)
    saved = SavedState(tmp_path)
    assert sorted(saved.kinds("a")) == ["exp_avg", "weight"]
    for key, tensor in whole.items():
        first = int(generator.integers(0, len(tensor)))
        last = int(generator.integers(first, len(tensor))) + 1
        target = torch.full((last - first,), torch.nan)
        saved.fill(key, first, target)
        assert torch.equal(target, tensor[first:last])


def test_shares_of_a_tensor_are_all_of_it_once() -> None:
    tensor = torch.arange(10.0).view(2, 5)
    seen: dict[int, float] = {}
    for rank in range(3):
        (shard,) = whole_tensors([("t", tensor)])
        for fragment in state_of([shard.share(rank, 3)]).values():
            for place, value in enumerate(fragment.values.tolist(), start=fragment.offset):
                assert place not in seen
                seen[place] = value
    assert seen == {place: float(place) for place in range(10)}


def test_fewer_numbers_than_ranks(tmp_path: Path) -> None:
    """A single number, such as a score's bias, and its step are written once."""
    parameter = torch.tensor([3.0])
    for rank in range(2):
        shard = ParamShard("bias", 0, parameter, 0, 1, {"step": torch.tensor(5.0)}).share(rank, 2)
        write_state(state_of([shard]), tmp_path / f"rank-{rank:05d}.safetensors")
    restored = ParamShard("bias", 0, torch.zeros(1), 0, 1, {})
    restored.restore(SavedState(tmp_path))
    assert restored.storage.item() == 3
    assert restored.optimizer_state["step"].item() == 5


def test_an_optimizer_that_made_no_step_takes_what_was_kept(tmp_path: Path) -> None:
    kept = {"step": torch.tensor(2.0), "exp_avg": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    state: State = state_of([ParamShard("w", 0, torch.eye(2), 0, 4, kept)])
    write_state(state, tmp_path / "rank-00000.safetensors")
    home, found = torch.zeros(5), defaultdict[str, Tensor]()  # a row of more numbers than this parameter has
    ParamShard("w", 1, home, 2, 3, found).restore(SavedState(tmp_path))
    assert home.tolist() == [0, 0, 0, 0, 1]
    assert found["exp_avg"].tolist() == [0, 0, 2, 3, 4]
    assert found["step"].item() == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model state found; a checkpoint of this version of Heed was expected"):
        SavedState(tmp_path)
    write_state({"weight/a": ShardRange(2, torch.zeros(3))}, tmp_path / "rank-00000.safetensors")
    saved = SavedState(tmp_path)
    with pytest.raises(ValueError, match=r"has no weights of b, only those of \['a'\]"):
        saved.kinds("b")
    with pytest.raises(ValueError, match=r"3 numbers of weight/a from offset 1; 5 were expected"):
        saved.fill("weight/a", 1, torch.zeros(5))
