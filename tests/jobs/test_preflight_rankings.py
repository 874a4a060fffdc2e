"""Rankings in a published format are read, measured and their warnings told before any training starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.job_file import load_job
from jobs.preflight import check_data
from jobs.run import Run

GOOD = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}


def check(tmp_path: Path, model_folder: Path, *rows: Any) -> None:
    """The preflight of a job that trains a reward model alone."""
    path = tmp_path / "pairs.jsonl"
    others = [GOOD | {"prompt": f"Why {number}?"} for number in range(8)]  # of which some are held out
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *others)))
    (tmp_path / "job.toml").write_text(
        f"""
        name = "pairs"
        seed = 0
        workers = 1
        [engine]
        precision = "fp32"
        [reward]
        init_from = "{model_folder}"
        rankings = {{ source = "{path}", format = "trl" }}
        demonstrations = [{{ source = "{path}" }}]
        heldout_share = 0.5
        num_epochs = 1
        batch = {{ batch_size = 2, micro_batch_size = 1 }}
        optimizer = {{ learning_rate = 1e-3, schedule = "constant" }}
        save_every_steps = 10
        evaluate_every_steps = 10
        """
    )
    job = load_job(tmp_path / "job.toml")
    check_data(Run(job, tmp_path, None, None))  # type: ignore[arg-type]  # no worker is asked


def test_oddities_are_counted(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, model_folder, GOOD, GOOD, GOOD | {"chosen": ""})
    said = " ".join(capsys.readouterr().err.split())
    assert "pairs.jsonl: warnings, told in reward/warnings.json: 1 x row seen twice, 1 x empty reply" in said
    check(tmp_path, model_folder, GOOD)
    assert capsys.readouterr().err == ""


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"pairs\.jsonl: line 2: field 'rejected' is missing"):
        check(tmp_path, model_folder, GOOD, {"prompt": "Why?", "chosen": "So."})
    with pytest.raises(ValueError, match=r"task 'trl/\w+': prompt and response have \d+ tokens; .* holds 96"):
        check(tmp_path, model_folder, GOOD, GOOD | {"chosen": "x" * 200})
