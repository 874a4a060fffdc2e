"""The folder of a stage that runs again: kept until the new run writes something, and never in another's place."""

from pathlib import Path

import pytest

from heed.jobs.run import open_folder, put_aside
from stages.lineage import LINEAGE, Inputs, forced_by


def run_again(folder: Path, error: type[BaseException], *, writes: bool) -> None:
    """A new run of the stage with other inputs, which ends with an error."""
    with open_folder(folder, Inputs("sft", 0, {"sft": {"num_epochs": 2}}, {}, {}), forced=False):
        assert not (folder / LINEAGE).exists()
        if writes:
            (folder / "metrics.jsonl").write_text("{}\n")
        raise error


def finished(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / LINEAGE).write_text("{}")
    (folder / "inputs.json").write_text('{"fingerprint": "of other inputs"}')
    return folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_earlier_result_comes_back_if_the_new_run_writes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    folder = finished(tmp_path / "sft")
    with pytest.raises(error):
        run_again(folder, error, writes=False)
    assert (folder / LINEAGE).is_file()
    assert not (tmp_path / "replaced").exists()


def test_an_earlier_result_stays_aside_once_the_new_run_has_written(tmp_path: Path) -> None:
    folder = finished(tmp_path / "sft")
    with pytest.raises(KeyboardInterrupt):
        run_again(folder, KeyboardInterrupt, writes=True)
    assert (tmp_path / "replaced" / "sft-1" / LINEAGE).is_file()
    assert (folder / "metrics.jsonl").is_file()


def test_a_submission_forces_a_stage_once(tmp_path: Path) -> None:
    folder, inputs = finished(tmp_path / "sft"), Inputs("sft", 0, {"sft": {"num_epochs": 2}}, {}, {})
    with open_folder(folder, inputs, forced=True, submission="slurm-7"):
        (folder / "metrics.jsonl").touch()
    assert forced_by(folder) == "slurm-7"
    with open_folder(folder, inputs, forced=False):  # as when it is requeued: the interrupted stage continues
        assert (folder / "metrics.jsonl").exists()
    assert forced_by(folder) == "slurm-7"


def test_numbers_of_replaced_results_are_not_given_twice(tmp_path: Path) -> None:
    kept = [put_aside(finished(tmp_path / "sft")) for _ in range(2)]
    (kept[0] / LINEAGE).unlink()
    (kept[0] / "inputs.json").unlink()
    kept[0].rmdir()
    assert [path.name for path in kept] == ["sft-1", "sft-2"]
    assert put_aside(finished(tmp_path / "sft")).name == "sft-3"
