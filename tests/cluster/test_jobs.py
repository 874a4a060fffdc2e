"""What `heed jobs` shows of a job, and a head that accepts connections without answering."""

import socket
import time
from typing import Any

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from cluster import jobs


class FakeClient:
    """Ray's client for a cluster with one failed job, whose command and log contain URLs."""

    def list_jobs(self) -> list[JobDetails]:
        return [self.get_job_info("")]

    def get_job_info(self, _job_id: str) -> JobDetails:
        url = "https://me:hunter2@judge.example/score?token=abc"
        return JobDetails(
            type=JobType.SUBMISSION, submission_id="mine-1", status=JobStatus.FAILED, driver_exit_code=1,
            entrypoint=f"python -m heed run --set ppo.reward.url={url} --runs /runs",
            message=f"exit code 1, last logs:\nerror: {url}: refused, is it up?",
        )  # fmt: skip


def test_credentials_in_urls_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_require_answer", lambda _: None)
    monkeypatch.setattr(jobs, "_Client", lambda _: FakeClient())
    cluster = jobs.Jobs("http://head:8265")
    for job in (cluster.find("mine-1"), *cluster.list()):
        shown = "https://***@judge.example/score?***"
        assert job.command == f"python -m heed run --set ppo.reward.url={shown} --runs /runs"
        assert job.message == f"exit code 1, last logs: error: {shown} refused, is it up?"


def test_every_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections for a process that listens, even if that process is stopped."""
    monkeypatch.setattr(jobs, "_require_answer", lambda _: None)
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(jobs._Client, "_check_connection_and_version", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0), backlog=20) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        cluster = jobs.Jobs(address)
        calls: list[Any] = [cluster.list, lambda: cluster.find("a-1"), lambda: cluster.logs("a-1")]
        for call in (*calls, lambda: cluster.stop("a-1")):
            begun = time.monotonic()
            with pytest.raises(jobs.UnreachableError, match=f"^{address}: no answer for 0.5 s$"):
                call()
            assert time.monotonic() - begun < 10
    with pytest.raises(
        jobs.UnreachableError, match=rf"^{address}: no connection \(\[Errno 111\] Connection refused\)$"
    ):
        cluster.find("a-1")
