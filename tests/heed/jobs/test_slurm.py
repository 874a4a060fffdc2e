"""Jobs on a real Slurm: a controller and two nodes on this machine, as the present user, on loopback."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.processes import free_port

SBIN = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"
MISSING = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name, path=SBIN)]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (slurm-wlm)"),
]

DEBUG = str(Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
MpiDefault=none
KillWait=5
CommunicationParameters=NoInAddrAny
SlurmdParameters=config_overrides
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=debug Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


def in_time(is_done: Callable[[], bool], seconds: float, said: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, said()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "home"):
        (folder / name).mkdir()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    config = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    config.write_text(CONFIG.format(folder=folder, host=socket.gethostname(), user=user, ports=ports))
    environment = {"SLURM_CONF": str(config), "HOME": str(folder / "home"), "PATH": SBIN}
    daemons, log = [], (folder / "daemons.log").open("wb")
    for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"], ["slurmd", "-D", "-N", "two"]):
        path = str(shutil.which(words[0], path=SBIN))
        daemons.append(
            subprocess.Popen(
                [path, *words[1:]], env={**os.environ, **environment}, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        )

    def ask(*words: str) -> str:
        done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        return done.stdout

    try:
        in_time(
            lambda: ask("sinfo", "--noheader", "--format=%T %D") == "idle 2\n", 60, (folder / "daemons.log").read_text
        )
        yield environment
    finally:
        ask("scancel", "--user", user)
        with log:
            end = time.monotonic() + 60
            while ask("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.5)
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(timeout=30)


def test_a_job_on_two_nodes_is_stopped_and_resumes_to_its_end(
    heed: Callable[..., Any], slurm: dict[str, str], tmp_path: Path
) -> None:
    arguments = [
        "submit", DEBUG, "--runs", str(tmp_path), "--slurm", "--gpus-per-node", "0", "--nodes", "2", "--workers", "2",
        "--set", "pretrain.num_steps=1500", "--set", "pretrain.optimizer.warmup_steps=4",
    ]  # fmt: skip

    def call(*words: str, code: int = 0, seconds: float = 120.0) -> str:
        command = heed(*words, environment=slurm)
        assert command.wait(seconds) == code, command.output
        output: str = command.output
        return output

    job_id = call(*arguments, "--no-follow").split()[-1]
    assert job_id.startswith("slurm:")
    checkpoints = tmp_path / "debug" / "pretrain" / "checkpoints"
    in_time(lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*")), 400, lambda: call("jobs", "logs", job_id))
    assert call("jobs", "stop", job_id, seconds=400).splitlines()[-1] == f"{job_id}: STOPPED"
    status = call("jobs", "status", job_id)
    assert "STOPPED" in status
    assert str(tmp_path / "debug") in status
    stopped = call("jobs", "logs", job_id)
    assert re.search(r"pretrain: stopped at step \d+ of 1500 .*the same command continues", stopped), stopped

    said = call(*arguments, code=0, seconds=900)
    assert re.search(r"pretrain: resumes from step [1-9]\d* of 1500", said), said
    assert f"report: {tmp_path / 'debug' / 'report.html'}" in said
    assert "SUCCEEDED after" in said.splitlines()[-1]
    assert (tmp_path / "debug" / "compare" / "results.json").is_file()
    assert (Path(slurm["HOME"]) / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_an_unknown_partition(heed: Callable[..., Any], slurm: dict[str, str], tmp_path: Path) -> None:
    environment = {**slurm, "SBATCH_PARTITION": "nowhere"}
    command = heed("submit", DEBUG, "--runs", str(tmp_path), "--slurm", "--gpus-per-node", "0", environment=environment)
    assert command.wait() == 2, command.output
    last = " ".join(command.output.split()).partition("error: sbatch --parsable: ")[2]
    assert "Invalid partition name specified; expected one of: debug (SBATCH_PARTITION, or a line in" in last


def test_a_job_that_slurm_does_not_know(heed: Callable[..., Any], slurm: dict[str, str]) -> None:
    command = heed("jobs", "status", "slurm:99999", environment=slurm)
    assert command.wait() == 2, command.output
    assert "error: Slurm knows no job 'slurm:99999', or has forgotten it" in " ".join(command.output.split())
