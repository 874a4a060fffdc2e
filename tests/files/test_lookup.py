"""Errors about files that are not found name the folder of the search, and the file next to the job."""

from contextlib import suppress
from pathlib import Path

import pytest

from files.importing import load_function
from files.rows import read_source
from heed.jobs.job_file import load_job


def test_a_relative_path_is_looked_for_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (there / "rows.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    (there / "checks.py").write_text("def reward(prompts, responses): ...\n", encoding="utf-8")
    monkeypatch.chdir(here)
    monkeypatch.setattr("files.fields._jobs", [])
    searched = f"no such file in {here}, where relative paths start"
    with pytest.raises(ValueError, match=f"rows.jsonl: {searched}$"):
        list(read_source("rows.jsonl"))
    (there / "job.toml").write_text('name = "x"\n', encoding="utf-8")
    with suppress(ValueError):  # it has no stage
        load_job(Path("../there/job.toml"))
    hint = f"; {tmp_path}/.*there/rows.jsonl exists, so run heed in .*there, or write that path"
    with pytest.raises(ValueError, match=f"rows.jsonl: {searched}{hint}$"):
        list(read_source("rows.jsonl"))
    with pytest.raises(ValueError, match=f"reward function: checks.py: {searched}; .*there/checks.py exists"):
        load_function("checks.py:reward", "reward function")
    with pytest.raises(ValueError, match=f"other.jsonl: {searched}$"):
        list(read_source("other.jsonl"))
    with pytest.raises(ValueError, match=r"^/none/rows.jsonl: no such file$"):
        list(read_source("/none/rows.jsonl"))
