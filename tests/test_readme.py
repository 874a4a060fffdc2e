"""The README is short, its job is a job, and its links lead somewhere."""

import re
from pathlib import Path

from heed.jobs.job_file import load_job

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_the_job_in_the_readme_is_complete(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "job.toml"
    path.write_text(blocks[0])
    job = load_job(path, opens_models=False)
    assert job.name == "mine"
    assert job.stage_names == ("sft", "reward", "ppo")


def test_every_file_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
