"""The debug job as a user runs it: `heed run` in a separate process group whose processes can all be found."""

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.connection import connect, disconnect
from cluster.processes import free_port
from files.atomic import write_json
from heed.jobs import recovery

ROOT = Path(__file__).parents[3]
DEBUG_JOB = ROOT / "configs" / "jobs" / "debug.toml"
MARK = "HEED_TEST_PROCESS"
# Checkpoints every few steps, so that every stage resumes in its middle; dropout, so that random draws resume too.
OVERRIDES = ("pretrain.save_every_steps=5", "reward.save_every_steps=2", "pretrain.dropout=0.1", "reward.dropout=0.1")


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """One Ray for all jobs that a file runs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(recovery, "disconnect", lambda: None)
        connect(1)
        yield
        disconnect()


def processes_of(mark: str) -> list[int]:
    """Returns every process that inherited the mark: the command, its Ray, its workers."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            marked = folder.name.isdigit() and f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
            # a zombie, which has ended but was not waited for, has nothing left to do
            if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(folder.name))
        except OSError:  # it ended during the check, or belongs to another user
            continue
    return found


@dataclass
class HeedCommand:
    """A started `heed` command."""

    process: "subprocess.Popen[str] | ProcessOfAnother"
    mark: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait(self, seconds: float = 300.0) -> int:
        return self.process.wait(timeout=seconds)

    def kill_everything(self) -> None:
        """Sends SIGKILL to the command's whole process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def wait_until_gone(self, seconds: float = 30.0) -> list[int]:
        """Returns the processes that are left after a time."""
        end = time.monotonic() + seconds
        while (left := processes_of(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        return left


@pytest.fixture(scope="session")
def heed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., HeedCommand]]:
    """Starts `heed` with arguments; what is still running at the end is killed."""
    started: list[HeedCommand] = []
    logs = tmp_path_factory.mktemp("logs")
    # Ray keeps sockets here, whose paths must be short.
    ray_folder = tempfile.mkdtemp(prefix="heed-ray-")
    # Ranks named by tests in this process are none of the command's business. Passive threads leave the cores to
    # processes that have work.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RAY_ADDRESS")
        and not name.startswith("ACCELERATE_")
    }

    def start(*arguments: str, environment: Mapping[str, str] | None = None, stdin: str = "") -> HeedCommand:
        mark = f"{os.getpid()}-{len(started)}"
        log, typed = logs / f"{len(started)}.log", logs / f"{len(started)}.in"
        typed.write_text(stdin, encoding="utf-8")
        marked = {"OMP_WAIT_POLICY": "PASSIVE", "RAY_TMPDIR": ray_folder, "PYTHONPATH": str(ROOT), MARK: mark}
        with log.open("w") as output, typed.open() as lines:
            process = subprocess.Popen(
                [sys.executable, "-c", "from heed.cli import main; main()", *arguments],
                cwd=ROOT, env={**inherited, **marked, **(environment or {})}, text=True,
                stdin=lines, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append(HeedCommand(process, mark, log))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.kill_everything()
        for process in command.wait_until_gone():
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.fixture(scope="session")
def overrides() -> tuple[str, ...]:
    """Overrides that every debug run here has."""
    return OVERRIDES


RunDebug = Callable[[Path, Sequence[str]], HeedCommand]


@pytest.fixture(scope="session")
def run_debug(heed: Callable[..., HeedCommand], overrides: tuple[str, ...]) -> RunDebug:
    """Starts the debug job with further arguments."""

    def start(runs: Path, arguments: Sequence[str] = ()) -> HeedCommand:
        changed = [part for override in overrides for part in ("--set", override)]
        return heed("run", str(DEBUG_JOB), "--runs", str(runs), *changed, *arguments)

    return start


class ProcessOfAnother:
    """A `heed run` that another test process started; as much of Popen as is needed here."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self._log = pid, log

    def poll(self) -> int | None:
        """Returns 0 if the run has ended well, 1 if it has ended otherwise."""
        try:
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return None
        except OSError:  # nothing of it is left
            pass
        return 0 if "\nreport: " in self._log.read_text(encoding="utf-8") else 1

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"the run has not ended in {timeout:g} s"
            time.sleep(0.1)
        return code


@pytest.fixture(scope="session")
def started_run(run_debug: RunDebug, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HeedCommand, Path]]:
    """The uninterrupted run, started in the background; tests that need its end use `finished_run`.

    It is one run for all of pytest's processes: the first that asks starts it.
    """
    base = tmp_path_factory.getbasetemp()
    runs = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "untouched"
    note = runs / "process.json"
    try:
        runs.mkdir()
    except FileExistsError:
        end = time.monotonic() + 60
        while not note.exists():
            assert time.monotonic() < end, "the process that was to start the run has not"
            time.sleep(0.05)
        found = json.loads(note.read_text())
        log = Path(found["log"])
        yield HeedCommand(ProcessOfAnother(found["pid"], log), found["mark"], log), runs / "debug"
        return
    command = run_debug(runs, ())
    write_json(note, {"pid": command.process.pid, "log": str(command.log), "mark": command.mark})
    yield command, runs / "debug"
    command.wait()  # others may need it still


@pytest.fixture(scope="session")
def finished_run(started_run: tuple[HeedCommand, Path]) -> Path:
    """The folder of a finished debug run. Read only."""
    command, folder = started_run
    assert command.wait(600.0) == 0, command.output
    return folder


@pytest.fixture(scope="session")
def processes() -> Callable[[str], list[int]]:
    """Returns every process that inherited a command's mark."""
    return processes_of


OUTPUTS = (
    "pretrain/model/model.safetensors",
    "sft/model/model.safetensors",
    "collect/rankings.jsonl",
    "reward/model/model.safetensors",
    "dpo/model/model.safetensors",
    "dpo/reference.safetensors",
    "ppo/model/model.safetensors",
    "ppo/model_ema/model.safetensors",
    "compare/responses.parquet",
    "compare/results.json",
)


@pytest.fixture(scope="session")
def hashes() -> Callable[[Path], dict[str, str]]:
    """Returns the SHA-256 of everything that a run's stages leave to others."""
    return lambda folder: {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in OUTPUTS}


@pytest.fixture(scope="session")
def num_steps() -> Callable[[Path], int]:
    """Returns the number of steps that a stage's log holds so far."""

    def count(stage: Path) -> int:
        path = stage / "metrics.jsonl"
        return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0

    return count


@dataclass
class RayHead:
    """A running Ray head on loopback, and the environment that a client needs for it."""

    address: str
    token: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"HEED_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}


def distinct_ports(count: int) -> list[int]:
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def wait_for_answer(head: RayHead, process: subprocess.Popen[bytes], log: Path, seconds: float = 240.0) -> None:
    """Waits until the Jobs API answers a client with the token."""
    asked = urllib.request.Request(
        f"{head.address}/api/jobs/", headers={"Authorization": f"Bearer {head.token.read_text()}"}
    )
    end = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(asked, timeout=10).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.3)


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """A cluster of one machine, started as described in docs/cluster.md, whose Python finds another `heed` than this
    one."""
    folder = Path(tempfile.mkdtemp(prefix="heed-head-"))  # Ray keeps sockets here, whose paths must be short
    stale = tmp_path_factory.mktemp("stale")
    for package in ("heed", "cluster", "lm"):
        (stale / package).mkdir()
        (stale / package / "__init__.py").write_text("raise ImportError('code that was not shipped')\n")
    token, log = folder / "token", folder / "head.log"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    port, dashboard, agent, client = distinct_ports(4)
    head = RayHead(f"http://127.0.0.1:{dashboard}", token)
    mark = f"head-{os.getpid()}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ACCELERATE_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an activated environment
    own = {"PATH": path, "PYTHONPATH": str(stale), "RAY_TMPDIR": str(folder), "OMP_WAIT_POLICY": "PASSIVE", MARK: mark}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4", "--no-monitor",
             "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--port={port}",
             f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
             f"--ray-client-server-port={client}"],
            env={**inherited, **own, **head.environment}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_answer(head, process, log)
        yield head
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        for left in processes_of(mark):
            os.kill(left, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
