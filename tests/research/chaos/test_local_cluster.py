"""A cluster on this machine: nodes that die and come back, links that are cut, and no leftover processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from research.chaos.local_cluster import HEAD, LocalCluster, Network, host_names, is_alive, kill_process, why_no_network

# In CI, the tests of lost nodes and workers are on such a cluster: a fault of it fails them.
pytestmark = pytest.mark.nightly

WHY_NOT = why_no_network()
needs_network = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob(f"heed-{os.getpid()}-*")}


def hears(network: Network, host: str, other: str) -> bool:
    """Returns whether one host can reach another's port on which nothing listens: the connection is refused, not
    lost."""
    script = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), timeout=2)\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError: sys.exit(1)\n"
    )
    command = network.command(host, [sys.executable, "-c", script, network.address(other)])
    return subprocess.run(command, check=False).returncode == 0


@needs_network
def test_hosts_hear_each_other_until_a_cable_is_pulled_and_again_when_it_is_back() -> None:
    with closing(Network(["one", "two", "three"])) as network:
        assert hears(network, "one", "two")
        network.unplug("two")
        assert not hears(network, "one", "two")
        assert not hears(network, "two", "one")
        assert hears(network, "one", "three")
        network.plug("two")
        assert hears(network, "one", "two")


@needs_network
def test_a_network_leaves_no_namespace_behind_even_if_it_cannot_be_made() -> None:
    with closing(Network(["one"])):
        assert len(namespaces()) == 2
    assert not namespaces()
    with pytest.raises(OSError, match="ip link add"):
        Network(["one", "a-name-longer-than-interfaces-have"])
    assert not namespaces()


@pytest.fixture(scope="module", params=["loopback", pytest.param("network", marks=needs_network)])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    if request.param == "loopback":
        with LocalCluster(2, 1) as cluster:
            yield cluster
        return
    with closing(Network(host_names(2))) as network, LocalCluster(2, 1, network) as cluster:
        yield cluster


def test_a_driver_joins_and_finds_every_node(cluster: LocalCluster) -> None:
    script = "import ray; ray.init(logging_level='ERROR'); print(int(ray.cluster_resources()['CPU']), len(ray.nodes()))"
    done = subprocess.run(
        cluster.driver_command([sys.executable, "-c", script]),
        env={**os.environ, **cluster.environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "3"]


def test_nodes_have_no_process_that_heed_does_not_use(cluster: LocalCluster) -> None:
    for name in (HEAD, *cluster.nodes):
        commands = [" ".join(psutil.Process(pid).cmdline()) for pid in cluster.node_processes(name)]
        for unused in ("dashboard.py", "ray.util.client.server", "log_monitor"):
            assert not any(unused in command for command in commands), commands


def test_a_killed_node_is_gone_whole_and_comes_back_when_it_is_filled(cluster: LocalCluster) -> None:
    processes = {name: cluster.node_processes(name) for name in cluster.nodes}
    assert all(len(found) >= 2 for found in processes.values())  # `ray start` and the raylet
    cluster.kill_node("node-1")
    assert not cluster.is_whole
    assert not any(is_alive(pid) for pid in processes["node-1"])
    assert all(is_alive(pid) for pid in processes["node-2"])
    cluster.fill(absent={"node-1"})
    assert not cluster.node_processes("node-1")
    cluster.fill()
    cluster.wait()
    assert cluster.is_whole


def test_a_node_whose_raylet_died_is_started_again(cluster: LocalCluster) -> None:
    raylets = [pid for pid in cluster.node_processes("node-2") if "/raylet" in first_word(pid)]
    kill_process(raylets[0])
    wait_until(lambda: not cluster.is_whole)
    cluster.fill()
    cluster.wait()
    assert cluster.is_whole


def first_word(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_closing_ends_every_process_and_removes_the_folder() -> None:
    with LocalCluster(1, 1) as cluster:
        processes = [pid for name in ("head", *cluster.nodes) for pid in cluster.node_processes(name)]
        driver = subprocess.Popen(["sleep", "600"], env={**os.environ, **cluster.environment})
        folder = cluster.folder
    assert driver.wait() < 0
    assert not any(is_alive(pid) for pid in processes)
    assert not folder.exists()
