"""Ranks on two hosts: a misleading host table, a network that fails for half a minute, and other code on one host."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(Path(__file__).with_name("two_hosts.py"))]
PARTITION_SECONDS = 30


@pytest.fixture(scope="module")
def cluster(two_hosts: tuple[Any, Any]) -> tuple[Any, Any]:
    """A head and a node, started once: a link that has failed is mended, and the node comes back."""
    head, node = two_hosts
    head.start_head()
    node.start_node(head)
    return head, node


def drive(head: Any, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts the driver, which joins the head from its own host."""
    process: subprocess.Popen[bytes] = head.run(
        [*PROGRAM, *arguments], "driver.log", RAY_ADDRESS=f"{head.address}:6379"
    )
    return process


@pytest.mark.long
def test_a_host_name_that_leads_to_127_0_1_1_keeps_no_ranks_apart(cluster: tuple[Any, Any]) -> None:
    """gloo offers its peers the address of its own host name: 127.0.1.1 on Debian, where peers find only themselves."""
    head, node = cluster
    process = drive(head, "sum", str(head.folder))
    assert process.wait(timeout=240) == 0, head.said("driver.log")
    said = head.said("driver.log")
    # Each rank has the cores of its own host, which here are all cores of this machine.
    assert f", 21.0, {len(os.sched_getaffinity(0))})" in said
    assert head.name in said
    assert node.name in said


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["placing", "step-000010"])
def test_a_network_that_fails_for_half_a_minute_ends_no_run(
    cluster: tuple[Any, Any], tmp_path: Path, moment: str
) -> None:
    """The link fails while a group starts, and while it works. Ray drops the node; after a restart it is accepted
    again."""
    head, node = cluster
    process = drive(head, "count", str(tmp_path))
    end = time.monotonic() + 180
    while moment not in head.said("driver.log") and not (tmp_path / "checkpoints" / moment).exists():
        assert process.poll() is None, head.said("driver.log")
        assert time.monotonic() < end, head.said("driver.log")
        time.sleep(0.1)
    node.cut()
    time.sleep(PARTITION_SECONDS)
    node.mend()
    assert process.wait(timeout=420) == 0, head.said("driver.log")
    said = head.said("driver.log")
    assert "done" in said
    assert len(list((tmp_path / "checkpoints").iterdir())) == 60
    if moment != "placing":
        assert "count: rank 1 of 2 was lost" in said or "count: continues from" in said


@pytest.mark.nightly
def test_a_host_with_other_code_or_another_torch_is_named(cluster: tuple[Any, Any], tmp_path: Path) -> None:
    """This test comes last, because it restarts the node."""
    head, node = cluster
    engine, torch_version = ROOT / "training" / "engine.py", Path(torch.version.__file__)
    (tmp_path / "engine.py").write_text(f"{engine.read_text()}\n# a line of another version\n")
    (tmp_path / "version.py").write_text(torch_version.read_text().replace(torch.__version__, "2.11.0"))
    for place, words, code in (
        (
            torch_version,
            f"{node.name} has torch 2.11.0, and {head.name}, where the driver runs, torch {torch.__version__}",
            0,
        ),
        (engine, f"ValueError: Heed's code differs between hosts: {head.name}, where the driver runs, has version ", 1),
    ):
        node.end()
        node.replaced = {place: tmp_path / place.name}
        node.start_node(head)
        process = drive(head, "hosts", str(tmp_path))
        assert process.wait(timeout=240) == code, head.said("driver.log")
        assert words in head.said("driver.log")
