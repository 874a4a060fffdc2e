"""A run whose Ray head is killed ends with one line that says what to do, before Ray ends it with a line of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from research.chaos.local_cluster import HEAD, LocalCluster

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"
SOONER = "import cluster.connection; cluster.connection.HEAD_SECONDS = 3.0; from heed.cli import main; main()"


@pytest.mark.long
def test_a_lost_head_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LocalCluster(num_nodes=1, cpus=1) as cluster, log.open("w") as output:
        run = [sys.executable, "-c", SOONER, "run", str(DEBUG), "--only", "pretrain", "--runs", str(tmp_path)]
        process = subprocess.Popen(
            [*run, "--set", "pretrain.num_steps=4000"], cwd=ROOT, env={**os.environ, **cluster.environment},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while not (tmp_path / "debug" / "pretrain" / "metrics.jsonl").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        servers = [pid for pid in cluster.node_processes(HEAD) if b"gcs_server" in command_of(pid)]
        assert len(servers) == 1
        os.kill(servers[0], signal.SIGKILL)
        assert process.wait(timeout=180) == 1, log.read_text()
    last = log.read_text().splitlines()[-1]
    words = (
        r"has ended; restart Ray there and on the other machines if they do not rejoin by themselves, then run the same"
    )
    assert re.match(rf"error: Ray's head at [\d.]+:{cluster.address.partition(':')[2]} {words} command again", last), (
        last
    )
    assert "rpc_client" not in log.read_text()
    status = json.loads((tmp_path / "debug" / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", last.removeprefix("error: "))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
