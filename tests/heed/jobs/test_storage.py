"""A stage whose storage fails for a while waits for it and resumes; any other failure is raised immediately."""

import errno
import threading
from pathlib import Path

import pytest
from sqlalchemy import Connection, event

import heed.jobs.recovery as recovery_module
from cluster.failures import WorkerError
from heed.jobs.recovery import MAX_LOSSES_IN_PLACE, missing_in_one_line, run_to_end, storage_trouble, wait_for_storage
from preferences.records import Message, Task
from preferences.store import LabelStore
from stages.lineage import require_outputs
from training.notices import CheckpointError, RunError


def make_stage(run: Path) -> Path:
    folder = run / "collect"
    folder.mkdir(parents=True)
    (folder / "inputs.json").touch()
    return folder


def test_a_folder_that_is_away_for_a_while_costs_a_stage_no_more_than_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ended, tries = make_stage(tmp_path / "run"), list[str](), list[int]()

    def come_back() -> None:
        (tmp_path / "away").rename(tmp_path / "run")

    def wait(stage_folder: Path, seconds: float) -> bool:
        threading.Timer(1.0, come_back).start()
        return wait_for_storage(stage_folder, seconds)

    def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            (tmp_path / "run").rename(tmp_path / "away")
        (folder / "samples.writing").write_text("samples")

    monkeypatch.setattr(recovery_module, "wait_for_storage", wait)

    run_to_end("collect", folder, work, lambda: ended.append("workers"))
    assert (len(tries), ended) == (2, ["workers"])
    said = capsys.readouterr().err
    assert f"collect: No such file or directory (ENOENT): {folder / 'samples.writing'}; waiting up to 120 s" in said
    assert "collect: continues from its start" in said


def test_a_label_store_that_cannot_grow_for_a_while_costs_a_stage_no_more_than_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite reports a full disk with its own code, inside SQLAlchemy's exception."""
    folder, tries = make_stage(tmp_path / "run"), list[int]()
    tasks = [Task(str(number), (Message("user", "?" * 9_000),), ("a", "b"), ("sft", "sft")) for number in range(40)]

    def work() -> None:
        tries.append(1)
        with LabelStore(tmp_path / "run" / "labels.sqlite") as store:
            pages = 60 if len(tries) == 1 else 2**30
            event.listen(store._writer, "begin", lambda connection: _limit(connection, pages))
            store.add_tasks(tasks, batch="1", num_labelers=[1] * len(tasks))

    run_to_end("collect", folder, work, lambda: None)
    assert len(tries) == 2
    assert "collect: No space left on device (ENOSPC); waiting up to 120 s" in capsys.readouterr().err


def _limit(connection: Connection, pages: int) -> None:
    connection.connection.cursor().execute(f"PRAGMA max_page_count = {pages}")


def test_a_run_folder_that_is_away_as_a_stage_starts_costs_it_no_more_than_that(tmp_path: Path) -> None:
    """Readers report a missing file as the user's mistake; in the run's own folder it is a storage failure."""
    folder, tries = make_stage(tmp_path / "run"), list[int]()

    def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError(f"{tmp_path / 'run' / 'sft' / 'model' / 'tokenizer.json'}: no such file")

    run_to_end("collect", folder, work, lambda: None)
    assert len(tries) == 2


def test_a_full_disk_that_stays_full_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "STORAGE_SECONDS", 0.2)
    folder = make_stage(tmp_path / "run")
    cause = OSError(errno.ENOSPC, "No space left on device")

    def work() -> None:
        (folder / "inputs.json").unlink(missing_ok=True)
        raise WorkerError("collect: rank 1 of 2: ...") from cause

    with pytest.raises(RunError, match=r"^collect: No space left on device \(ENOSPC\): .* run the same command again$"):
        run_to_end("collect", folder, work, lambda: None)


def test_storage_that_is_there_and_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    folder, tries = make_stage(tmp_path / "run"), list[int]()

    def work() -> None:
        tries.append(1)
        (folder / "nothing").read_text()

    with pytest.raises(RunError, match=f"{MAX_LOSSES_IN_PLACE} times in a row from its start"):
        run_to_end("collect", folder, work, lambda: None)
    assert len(tries) == MAX_LOSSES_IN_PLACE


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/prompts.jsonl"),
        ValueError("/elsewhere/prompts.jsonl: no such file"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        WorkerError("collect: rank 0 of 2: KeyError()"),
        CheckpointError("three checkpoints in a row could not be written"),
    ],
)
def test_what_is_not_the_storage_is_raised_at_once(tmp_path: Path, error: Exception) -> None:
    folder = make_stage(tmp_path / "run")
    assert storage_trouble(error, folder) == ""

    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        run_to_end("collect", folder, work, lambda: None)


def test_a_decision_to_stop_outranks_the_storage_behind_it(tmp_path: Path) -> None:
    error = CheckpointError("three checkpoints in a row could not be written")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert storage_trouble(error, make_stage(tmp_path / "run")) == ""


def test_a_folder_that_somebody_made_again_is_not_the_stages_own(tmp_path: Path) -> None:
    folder = make_stage(tmp_path / "run")
    assert wait_for_storage(folder, 5.0)
    (folder / "inputs.json").unlink()
    assert not wait_for_storage(folder, 0.2)


def test_between_stages_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    said = r"sft/inputs.json; bring the folder back and run the same command again$"
    with pytest.raises(RunError, match=said), missing_in_one_line(tmp_path / "run"):
        (tmp_path / "run" / "sft" / "inputs.json").write_text("{}")
    with pytest.raises(FileNotFoundError), missing_in_one_line(tmp_path / "run"):
        (tmp_path / "elsewhere" / "prompts.jsonl").read_text()


def test_a_stage_whose_outputs_went_elsewhere_is_not_finished(tmp_path: Path) -> None:
    folder = make_stage(tmp_path / "run")
    (folder / "results.json").touch()
    with pytest.raises(FileNotFoundError, match=r"rankings\.jsonl") as found:
        require_outputs(folder, ["rankings.jsonl"])
    assert storage_trouble(found.value, folder)
    (folder / "rankings.jsonl").touch()
    require_outputs(folder, ["rankings.jsonl"])
    (folder / "model").mkdir()
    with pytest.raises(FileNotFoundError, match="data/ready"):
        require_outputs(folder, ["model", "data/ready"])
    (folder / "data").mkdir()
    (folder / "data" / "ready").touch()
    require_outputs(folder, ["model", "data/ready"])
    (folder / "inputs.json").unlink()  # as in a folder that was created in place of the stage's own
    with pytest.raises(FileNotFoundError, match=r"inputs\.json"):
        require_outputs(folder, ["model", "data/ready"])
