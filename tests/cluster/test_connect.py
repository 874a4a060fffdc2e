"""How a process gets a Ray of its own: what is refused before, what is started, and what is left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from ray._private.utils import publish_error_to_driver
from ray.experimental import internal_kv

from cluster import local_ray
from cluster.connection import connect, disconnect
from cluster.group import WorkerGroup
from training.notices import RunError, speaking_through

ROOT = Path(__file__).parents[2]


def test_more_workers_than_cores_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cores = os.cpu_count() or 1
    for refused in (connect, WorkerGroup):
        with pytest.raises(ValueError, match=rf"^workers is {cores + 3}; this machine has {cores} cores"):
            refused(cores + 3)
    assert not ray.is_initialized()


@pytest.fixture
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    disconnect()


@pytest.fixture
def too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A folder in which Ray cannot start: the paths of its sockets would be too long."""
    path = str(tmp_path / ("x" * 100))
    monkeypatch.setenv("RAY_TMPDIR", path)
    return path


@pytest.mark.usefixtures("_own_ray", "too_long")
def test_a_ray_that_does_not_start_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    notices = []

    def hear(notice: str) -> None:
        notices.append(notice)
        if "trying once more" in notice:
            monkeypatch.delenv("RAY_TMPDIR")

    with speaking_through(hear):
        connect(1)
    assert ray.is_initialized()
    first, second = notices
    assert first == "starting Ray"
    assert second.startswith("Ray did not start (validate_socket_filename failed: AF_UNIX path length cannot exceed")


@pytest.mark.usefixtures("_own_ray")
def test_a_ray_that_does_not_start_twice_is_one_line(too_long: str) -> None:
    notices: list[str] = []
    with (
        speaking_through(notices.append),
        pytest.raises(RunError, match=r"^Ray did not start in two tries: .* run the same command again") as caught,
    ):
        connect(1)
    assert len(notices) == 2
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).endswith(f"Ray's logs: {too_long}/ray/session_latest/logs")
    assert not ray.is_initialized()


def test_ray_has_two_minutes_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own limit of 30 seconds is too short on a busy machine."""
    limit, seen = "RAY_raylet_start_wait_time_s", dict[str, str]()
    monkeypatch.setenv(limit, "")
    monkeypatch.delenv(limit)
    monkeypatch.setattr(ray, "init", lambda *_, **__: seen.update(os.environ))
    local_ray._init()
    assert float(seen[limit]) == 120


def run(program: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"MARK": mark}, capture_output=True, text=True, timeout=120, check=False
    )


STARTED = """
import sys
from cluster import local_ray
assert "ray" not in sys.modules and "torch" not in sys.modules
local_ray.begin()
from cluster import local_ray
from cluster.connection import connect, disconnect
import psutil, ray
from ray._private import worker
connect(1)
connect(1)
assert ray.get(ray.remote(lambda: 3).remote()) == 3
print(worker._global_node.dashboard_agent_listen_port, worker._global_node.metrics_agent_port)
for process in psutil.Process().children(recursive=True):
    print(" ".join(process.cmdline()))
disconnect()
print("left:", psutil.Process().children(recursive=True))
"""


def test_only_what_is_used_is_started() -> None:
    done = run(STARTED)
    assert (done.returncode, done.stderr) == (0, "")
    ports, *processes, left = done.stdout.splitlines()
    assert ports == "-1 -1"
    assert left == "left: []"
    names = ("gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent", "ray::")
    assert all(any(name in process for name in names) for process in processes), processes
    for name in names:
        assert any(name in process for process in processes), (name, processes)


@pytest.mark.usefixtures("_own_ray")
def test_what_a_lost_node_says_of_itself_stays_out_of_the_output(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of a node whose raylet was killed publishes the last lines of its log to all drivers.

    A driver misses what is published before its thread has subscribed, so this is published until it arrives.
    """
    connect(1)
    told = "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump] ray::rpc"
    with caplog.at_level("INFO", logger="cluster.connection"):
        printed = ""
        end = time.monotonic() + 120
        while "state-dump" not in caplog.text + printed and time.monotonic() < end:
            publish_error_to_driver("raylet_died", told, gcs_client=internal_kv.internal_kv_get_gcs_client())
            time.sleep(0.1)
            printed += "".join(capfd.readouterr())
    disconnect()
    printed += "".join(capfd.readouterr())
    assert "state-dump" in caplog.text
    assert "state-dump" not in printed


ENDED = """
import os, signal, time
from cluster import local_ray
try:
    local_ray.begin()
    local_ray.start()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    print("told")
"""


def test_sigterm_is_like_ctrl_c_whichever_thread_has_started_ray() -> None:
    done = run(ENDED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n", "")


@pytest.mark.parametrize("wait", [0.0, 0.8])
def test_a_process_that_fails_while_ray_starts_ends_with_all_of_it(wait: float, tmp_path: Path) -> None:
    begin = "import time; from cluster import local_ray; local_ray.begin()"
    done = run(f"{begin}; time.sleep({wait}); raise SystemExit(2)", mark=str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "")
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == str(tmp_path):
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
