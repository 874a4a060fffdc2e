"""SkyPilot: one task whose nodes start Ray and whose first node runs the job, on whichever cloud has the machines."""

import os
import re
import secrets
import shlex
from pathlib import Path

from cluster.jobs import ClusterJob
from heed.jobs.launchers.launcher import KEYS, Launch, ToolError, call, render

WHERE = "a machine with SkyPilot (pip install skypilot)"
TOKEN = "RAY_AUTH_TOKEN"
# Exit codes of `sky logs`; with --no-follow, a running job's is 0.
STATES = {0: "SUCCEEDED", 100: "FAILED", 101: "RUNNING", 103: "STOPPED"}
NOT_FOUND = 102


class Sky:
    """Jobs of SkyPilot. An id is "sky:" with the cluster's name and the job's number on it, "sky:heed-demo/1"."""

    file = "sky.yaml"
    address = "sky"
    poll_seconds = 10.0

    def render(self, launch: Launch) -> str:
        machines = launch.machines
        if not launch.image:
            raise ValueError(
                "--image is missing; --sky expects an image with the packages of constraints.txt"
                " (configs/cluster/Dockerfile)"
            )
        if machines.gpus_per_node and not machines.gpu:
            raise ValueError("--gpu is missing; --sky expects the kind of GPU, such as h100")
        if machines.nodes > 1 and not launch.volume:
            raise ValueError(
                f"--volume is missing; a job on {machines.nodes} nodes expects a SkyPilot volume that all nodes"
                " mount at --runs (`sky volumes apply`)"
            )
        again = f"{TOKEN}=$(openssl rand -hex 32) {shlex.join(_launch(launch, launch.folder / self.file))}"
        gpus = machines.gpus_per_node
        if gpus and machines.nodes == 1:
            gpus = 1 << (gpus - 1).bit_length()  # clouds sell machines with 1, 2, 4 or 8 GPUs
        return render("sky.yaml.jinja", launch, keys=(TOKEN, *_keys_here()), again=again, gpus=gpus)

    def submit(self, launch: Launch, path: Path) -> str:
        # The cluster's token is made for this launch, and only this process and the nodes see it.
        environment = {TOKEN: secrets.token_hex(32)}
        said = call([*_launch(launch, path), "--yes", "--detach-run"], WHERE, environment=environment)
        found = re.search(r"Job submitted, ID: (\d+)", re.sub(r"\x1b\[[0-9;]*m", "", said))
        return f"sky:heed-{launch.label}/{found[1] if found else 1}"

    def find(self, job_id: str) -> ClusterJob:
        code, said = 0, ""
        try:
            call(["sky", "logs", "--status", *_words(job_id)], WHERE)
        except ToolError as error:
            code, said = error.code, str(error)
        if code == NOT_FOUND or "does not exist" in said:
            raise ValueError(f"SkyPilot has no job {job_id!r}; `sky status` and `sky queue` list its clusters and jobs")
        if code not in STATES:
            raise ToolError(said, code)
        status = STATES[code]
        return ClusterJob(
            job_id=job_id,
            status=status,
            message="",
            command="",
            labels={},
            submitted_at=0.0,
            ended_at=0.0,
            exit_code=int(status in ("FAILED", "STOPPED")),
        )

    def logs(self, job_id: str) -> str:
        return call(["sky", "logs", "--no-follow", "--tail", "0", *_words(job_id)], WHERE, accepted=STATES)

    def stop(self, job_id: str) -> ClusterJob:
        """Cancel a job. Its machines end ten minutes later; `sky down` ends them at once."""
        call(["sky", "cancel", "--yes", *_words(job_id)], WHERE)
        return self.find(job_id)


def _launch(launch: Launch, path: Path) -> list[str]:
    named = [word for key in (TOKEN, *_keys_here()) for word in ("--secret", key)]
    return ["sky", "launch", "--cluster", f"heed-{launch.label}", *named, str(path)]


def _keys_here() -> list[str]:
    """The names of the keys that this shell's environment holds."""
    return [name for name in KEYS if os.environ.get(name)]


def _words(job_id: str) -> list[str]:
    cluster, _, number = job_id.removeprefix("sky:").partition("/")
    return [cluster, *([number] if number else [])]
