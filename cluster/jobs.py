"""Jobs on a running Ray cluster, through Ray's Jobs API: submit, list, follow, stop."""

import logging
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray.exceptions
import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from files.urls import without_credentials

REACH_SECONDS = 10.0
ANSWER_SECONDS = 30.0  # how long the head may be silent in any other request
FOLLOW_SECONDS = 300.0  # how long to keep trying after the connection to a followed job is lost
POLL_SECONDS = 1.0
STOP_SECONDS = 30.0


# These report every upload.
for _name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
    logging.getLogger(_name).setLevel(logging.WARNING)


@dataclass(frozen=True)
class ClusterJob:
    """One submitted job as the cluster knows it."""

    job_id: str
    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED
    message: str
    command: str
    labels: Mapping[str, str]  # as given at submission
    submitted_at: float  # Unix seconds
    ended_at: float  # Unix seconds; 0 while it runs
    exit_code: int  # of its command: 0 for success or while it runs, 1 if it ended without a code

    @property
    def is_over(self) -> bool:
        return JobStatus(self.status).is_terminal()


class JobSource(Protocol):
    """Something that runs jobs, and knows them by their ids."""

    address: str  # as messages name it
    poll_seconds: float  # between two looks of who follows a job

    def find(self, job_id: str) -> ClusterJob:
        """Raises: ValueError if there is no such job."""
        ...

    def logs(self, job_id: str) -> str:
        """Return what the job has written so far."""
        ...

    def stop(self, job_id: str) -> ClusterJob:
        """Stop a job that has not ended, and wait until it has."""
        ...


class UnreachableError(ValueError):
    """The head did not answer, or replied that it cannot answer now. A later request may succeed."""


class _Client(JobSubmissionClient):
    """Ray's client with a time limit: Ray's own waits forever for a head that accepts connections without answering."""

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> requests.Response:
        return super()._do_request(method, endpoint, timeout=ANSWER_SECONDS, **kwargs)


class Jobs:
    """The jobs of one Ray cluster.

    Raises:
        ValueError: nothing answers at the address, the token is not accepted, or there is no such job; the message says
            what to do.
    """

    poll_seconds = POLL_SECONDS

    def __init__(self, address: str) -> None:
        """`address` is the URL of the head's dashboard, such as http://head:8265."""
        if not address.startswith(("http://", "https://")):
            raise ValueError(
                f"address is {address!r}; the URL of the head's dashboard was expected, such as http://head:8265"
            )
        self.address = address.rstrip("/")
        _require_answer(self.address)
        with self._explained(), _without("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
            self._client = _Client(self.address)

    def submit(
        self, name: str, command: str, folder: Path, environment: Mapping[str, str], labels: Mapping[str, str]
    ) -> str:
        """Start a shell command in a copy of `folder`, which its workers also get. Returns the job's id.

        `name` is the first part of the id; `labels` are kept with the job.
        """
        with self._explained():
            return self._client.submit_job(
                entrypoint=command,
                submission_id=f"{name}-{secrets.token_hex(3)}",
                runtime_env={"working_dir": str(folder), "env_vars": dict(environment)},
                metadata=dict(labels),
            )

    def list(self) -> Sequence[ClusterJob]:
        """Every job submitted since the cluster started, newest last."""
        with self._explained():
            jobs = [_read(details) for details in self._client.list_jobs() if details.type == JobType.SUBMISSION]
        return sorted(jobs, key=lambda job: job.submitted_at)

    def find(self, job_id: str) -> ClusterJob:
        with self._explained(job_id):
            return _read(self._client.get_job_info(job_id))

    def logs(self, job_id: str) -> str:
        """Return what the job has written so far."""
        with self._explained(job_id):
            return self._client.get_job_logs(job_id)

    def stop(self, job_id: str) -> ClusterJob:
        """Stop a job that has not ended, and wait until it has."""
        with self._explained(job_id):
            self._client.stop_job(job_id)
        late = f"{job_id}: asked to stop, but still running after {STOP_SECONDS:.0f} s; try again"
        return wait_until_over(self, job_id, STOP_SECONDS, late)

    @contextmanager
    def _explained(self, job_id: str = "") -> Iterator[None]:
        """Turn Ray's errors into what the user can do about them."""
        try:
            yield
        except ray.exceptions.AuthenticationError as error:
            raise ValueError(
                f"{self.address}: the token is missing or was rejected: set RAY_AUTH_MODE=token, and put the"
                " cluster's token into ~/.ray/auth_token, or its path into RAY_AUTH_TOKEN_PATH"
                f" ({str(error).splitlines()[0]})"
            ) from None
        except requests.Timeout:
            raise UnreachableError(f"{self.address}: no answer for {ANSWER_SECONDS:g} s") from None
        except (requests.ConnectionError, ConnectionError) as error:
            raise UnreachableError(f"{self.address}: no connection ({_last_cause(error)})") from None
        except (RuntimeError, OSError) as error:
            text = " ".join(str(error).split())
            if job_id and "status code 404" in text:
                raise ValueError(f"{self.address} knows no job {job_id!r}; `heed jobs list` shows its jobs") from None
            kind = UnreachableError if "status code 5" in text else ValueError
            raise kind(f"{self.address}: the request failed: {text}") from error


def wait_until_over(jobs: JobSource, job_id: str, seconds: float, late: str) -> ClusterJob:
    """Wait until a job has ended. Raises: ValueError with the message `late` after `seconds`."""
    end = time.monotonic() + seconds
    while not (job := jobs.find(job_id)).is_over:
        if time.monotonic() > end:
            raise ValueError(late)
        time.sleep(jobs.poll_seconds)
    return job


def follow(jobs: JobSource, job_id: str, write: Callable[[str], None], say: Callable[[str], None]) -> ClusterJob:
    """Pass a job's output to `write` until the job ends, and one line to `say` if the connection is lost or back.

    Fetches the whole log each time, because the logs of runs are short, and then no connection has to stay open.

    Raises:
        UnreachableError: the connection stays lost for `FOLLOW_SECONDS`; the message says how to follow again.
    """
    written, lost_at = 0, 0.0
    while True:
        try:
            job = jobs.find(job_id)  # read before the log, so that the log of a job that has ended is complete
            text = jobs.logs(job_id)
        except UnreachableError as error:
            if not lost_at:
                lost_at = time.monotonic()
                say(f"{error}; the job runs on without this connection, trying again for {FOLLOW_SECONDS:.0f} s")
            elif time.monotonic() - lost_at > FOLLOW_SECONDS:
                raise UnreachableError(
                    f"{error}; the job does not depend on this connection; to follow it again:"
                    f" heed jobs logs -f {job_id} --address {jobs.address}"
                ) from None
            time.sleep(jobs.poll_seconds)
            continue
        if lost_at:
            lost_at = 0.0
            say(f"{jobs.address} answers again")
        write(text[written:])
        written = len(text)
        if job.is_over:
            return job
        time.sleep(jobs.poll_seconds)


def _last_cause(error: BaseException) -> str:
    """Return the system's own error message, without the class names that `requests` and `urllib3` put around it."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


def _require_answer(address: str) -> None:
    """Raise soon if nothing answers: Ray's client waits minutes for a machine that drops packets."""
    try:
        urllib.request.urlopen(address, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return  # any answer will do
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{address}: no answer ({error}); is the head running with its dashboard, and reachable from this machine?"
        ) from None


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Remove environment variables that Ray would prefer to its arguments while the context is open."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _read(details: JobDetails) -> ClusterJob:
    exit_code = 0
    if details.status in (JobStatus.FAILED, JobStatus.STOPPED):
        # A command ended by a signal has a negative code; one that never started has none.
        exit_code = max(details.driver_exit_code or 1, 1)
    return ClusterJob(
        job_id=details.submission_id or "",
        status=str(details.status),
        message=without_credentials(" ".join((details.message or "").split())),  # it may quote the log
        command=without_credentials(details.entrypoint),
        labels=details.metadata or {},
        submitted_at=(details.start_time or 0) / 1000,
        ended_at=(details.end_time or 0) / 1000,
        exit_code=exit_code,
    )
