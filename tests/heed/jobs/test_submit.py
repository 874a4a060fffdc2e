"""Jobs on a real Ray head: submitted, watched and stopped by the commands that a user types."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.lineage import code_version

pytestmark = pytest.mark.long

DEBUG = str(Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml")
ONLY_PRETRAIN = ("--only", "pretrain", "--set", "pretrain.batch.micro_batch_size=16")


@dataclass
class Submitted:
    """Three jobs that were submitted together."""

    runs: Path
    short: Any  # a HeedCommand that follows the job
    failing: str  # job ids
    endless: str


@pytest.fixture(scope="module")
def output_of(heed: Callable[..., Any], ray_head: Any) -> Callable[..., str]:
    """Returns the output of a `heed` command that the cluster answers."""

    def call(*arguments: str, code: int = 0) -> str:
        command = heed(*arguments, environment=ray_head.environment)
        assert command.wait() == code, command.output
        output: str = command.output
        return output

    return call


@pytest.fixture(scope="module")
def submitted(heed: Callable[..., Any], ray_head: Any, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    runs = tmp_path_factory.mktemp("shared")

    def start(name: str, *arguments: str) -> Any:
        return heed(
            "submit", DEBUG, "--runs", str(runs), "--set", f"name={name}", *arguments, environment=ray_head.environment
        )

    # A file below the current folder, which is the repository's, is sent with the job.
    heldout = 'pretrain.heldout=[{ source = "README.md" }]'
    note = "note=https://me:hunter2@example.com"
    short = start("short", *ONLY_PRETRAIN, "--set", "pretrain.num_steps=3", "--set", heldout, "--set", note)
    failing = start("failing", "--no-follow", "--set", "ppo.prompts.source=/absent/prompts.jsonl")
    endless = start("endless", "--no-follow", *ONLY_PRETRAIN, "--set", "pretrain.num_steps=100000")
    for command in (failing, endless):
        assert command.wait() == 0, command.output
    return Submitted(runs, short, *(command.output.split()[-1] for command in (failing, endless)))


def test_a_job_is_stopped(submitted: Submitted, output_of: Callable[..., str]) -> None:
    """First, so that it does not train for longer than it must."""
    metrics = submitted.runs / "endless" / "pretrain" / "metrics.jsonl"
    end = time.monotonic() + 240
    # The status follows the metrics by a moment.
    while not re.search(r"^run +pretrain: \d+ of ", output_of("jobs", "status", submitted.endless), re.MULTILINE):
        assert time.monotonic() < end, output_of("jobs", "logs", submitted.endless)
        time.sleep(0.2)
    assert output_of("jobs", "stop", submitted.endless) == f"{submitted.endless}: STOPPED\n"
    assert output_of("jobs", "stop", submitted.endless) == f"{submitted.endless}: already over: STOPPED\n"
    assert "STOPPED" in output_of("jobs", "status", submitted.endless)
    assert f"{submitted.endless}: STOPPED" in output_of("jobs", "logs", "-f", submitted.endless, code=1)
    size = metrics.stat().st_size
    time.sleep(1.0)
    assert metrics.stat().st_size == size  # its workers have ended too


def test_a_submitted_job_is_a_run(submitted: Submitted, output_of: Callable[..., str], ray_head: Any) -> None:
    assert submitted.short.wait() == 0, submitted.short.output
    said = submitted.short.output
    folder = submitted.runs / "short"
    job_id = said.split("submitted: ")[1].split()[0]
    assert job_id.startswith("short-")
    for line in ("pretrain: done in", f"report: {folder / 'report.html'}", f"{job_id}: SUCCEEDED after 0:"):
        assert line in said
    lineage = json.loads((folder / "pretrain" / "lineage.json").read_text())
    assert lineage["code_version"] == code_version()  # the shipped code has no git history
    assert "README.md" in lineage["data"]
    assert (folder / "pretrain" / "model" / "model.safetensors").is_file()
    assert output_of("jobs", "logs", job_id) in said
    status = output_of("jobs", "status", job_id)
    assert "SUCCEEDED" in status
    assert f"last line  report: {folder / 'report.html'}" in status
    assert f"python -m heed run debug.toml --runs {submitted.runs} --only pretrain" in status
    assert "--set" not in status
    assert "hunter2" not in status
    unpacked = [path for path in ray_head.token.parent.rglob("debug.toml") if "hunter2" in path.read_text()]
    assert {path.stat().st_mode & 0o777 for path in unpacked} == {0o600}
    listed = {line.split()[0]: line for line in output_of("jobs", "list").splitlines()}
    assert "SUCCEEDED" in listed[job_id]
    assert str(folder) in listed[job_id]
    assert {submitted.failing, submitted.endless} < set(listed)


def test_a_followed_job_ends_the_command_as_it_ends(submitted: Submitted, output_of: Callable[..., str]) -> None:
    said = output_of("jobs", "logs", submitted.failing, "-f", code=2)
    assert re.search(r"error: debug\.toml:\d+: ppo\.prompts\.source: /absent/prompts\.jsonl: no such file", said)
    assert f"{submitted.failing}: FAILED after" in said


def test_an_unknown_job(output_of: Callable[..., str], ray_head: Any) -> None:
    for command in ("status", "logs", "stop"):
        said = output_of("jobs", command, "nobody-123", code=2)
        assert said == f"error: {ray_head.address} knows no job 'nobody-123'; `heed jobs list` shows its jobs\n"


@pytest.mark.parametrize("token", ["none", "wrong"])
def test_a_token_that_is_missing_or_wrong(heed: Callable[..., Any], ray_head: Any, tmp_path: Path, token: str) -> None:
    environment = {**ray_head.environment, "HOME": str(tmp_path), "RAY_AUTH_TOKEN": "wrong"}
    if token == "none":
        environment |= {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": os.devnull}
    command = heed("jobs", "list", environment=environment)
    assert command.wait() == 2, command.output
    assert command.output.count("\n") == 1
    assert f"error: {ray_head.address}: the token is missing or was rejected: set RAY_AUTH_MODE" in command.output
