"""Slurm: one batch script that starts Ray on the job's nodes and runs the job on it."""

import re
import shlex
import sys
import time
from pathlib import Path

from cluster.jobs import ClusterJob, wait_until_over
from heed.jobs.launchers.launcher import Launch, ToolError, call, render

WHERE = "a machine of the Slurm cluster, such as its login node"
# Slurm's states that end a job, as `heed jobs` calls them; every other one is PENDING or RUNNING.
ENDS = {
    "COMPLETED": "SUCCEEDED", "CANCELLED": "STOPPED", "FAILED": "FAILED", "TIMEOUT": "FAILED", "NODE_FAIL": "FAILED",
    "OUT_OF_MEMORY": "FAILED", "BOOT_FAIL": "FAILED", "DEADLINE": "FAILED", "PREEMPTED": "FAILED",
}  # fmt: skip
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# The script lets the run save for four minutes, then ends Ray.
STOP_SECONDS = 300.0


class Slurm:
    """Jobs of the Slurm cluster whose commands are on the PATH. An id is "slurm:" and Slurm's number."""

    file = "heed.sbatch"
    address = "slurm"
    poll_seconds = 2.0

    def render(self, launch: Launch) -> str:
        if launch.image or launch.volume:
            raise ValueError(
                "--image and --volume are for --kubernetes and --sky; Slurm uses this environment and --runs"
            )
        if '"' in str(launch.runs):
            raise ValueError(f'--runs {launch.runs}: Slurm reads " in options; expected a folder without it')
        if '"' in str(launch.folder) or "%" in str(launch.folder):
            raise ValueError(f'--out {launch.folder}: Slurm reads " and % in paths; expected a folder without them')
        again = f"sbatch {shlex.quote(str(launch.folder / self.file))}"
        return render("slurm.sbatch.jinja", launch, again=again, python_folder=Path(sys.executable).parent)

    def submit(self, launch: Launch, path: Path) -> str:
        if not launch.runs.is_dir():
            raise ValueError(f"--runs {launch.runs}: no such folder here; expected one that all of Slurm's nodes share")
        try:
            return "slurm:" + call(["sbatch", "--parsable", str(path)], WHERE).strip().partition(";")[0]
        except ToolError as error:
            said = str(error)
            if "partition" in said:
                names = ", ".join(sorted(set(call(["sinfo", "--noheader", "--format=%R"], WHERE).split())))
                said += f"; expected one of: {names} (SBATCH_PARTITION, or a line in {path})"
            raise ValueError(said) from None

    def find(self, job_id: str) -> ClusterJob:
        shown = self._shown(job_id)
        status = shown["JobState"]
        code, _, signal = shown["ExitCode"].partition(":")
        name = ENDS.get(status) or ("PENDING" if status in WAITING else "RUNNING")
        is_over = status in ENDS
        return ClusterJob(
            job_id=job_id,
            status=name,
            message="" if shown["Reason"] == "None" else shown["Reason"],
            command=shown["Command"],
            labels={"results": shown.get("Comment", "")},
            submitted_at=_seconds(shown["SubmitTime"]),
            ended_at=_seconds(shown["EndTime"]) if is_over else 0.0,
            exit_code=0 if not is_over or name == "SUCCEEDED" else max(1, int(code), int(signal)),
        )

    def logs(self, job_id: str) -> str:
        try:
            return Path(self._shown(job_id)["StdOut"]).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""  # it has not started

    def stop(self, job_id: str) -> ClusterJob:
        """Cancel a job. One that runs may first save a checkpoint."""
        if self.find(job_id).status == "RUNNING":
            call(["scancel", "--batch", "--signal=USR2", _number(job_id)], WHERE)
        else:
            call(["scancel", _number(job_id)], WHERE)
        late = (
            f"{job_id}: asked to stop, still running after {STOP_SECONDS:.0f} s;"
            f" `scancel {_number(job_id)}` ends it without saving"
        )
        return wait_until_over(self, job_id, STOP_SECONDS, late)

    def _shown(self, job_id: str) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        try:
            line = call(["scontrol", "show", "job", "--oneliner", _number(job_id)], WHERE)
        except ToolError as error:
            if "Invalid job id" not in str(error):
                raise
            raise ValueError(
                f"Slurm knows no job {job_id!r}, or has forgotten it, as it does some minutes after a job's end;"
                f" `sacct -j {_number(job_id)}` may know it, and its log is next to its script"
            ) from None
        return dict(re.findall(r"(\S+?)=(.*?)(?= [A-Za-z/:]+=|\s*$)", line))


def _number(job_id: str) -> str:
    return job_id.removeprefix("slurm:")


def _seconds(moment: str) -> float:
    """Read Slurm's local time; 0 for "Unknown"."""
    try:
        return time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return 0.0
