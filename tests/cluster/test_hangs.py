"""Ranks that hang are found by what they fail to give: a stopped process gives no beats, a stuck one makes no progress.

All of it with real processes on a real Ray, which are really stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray import cloudpickle

from cluster.calls import wait_all
from cluster.config import ClusterConfig
from cluster.connection import connect, disconnect
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from lm.progress import note_progress

# Workers cannot import this module, so what they run of it travels by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = ClusterConfig(silence_seconds=3, stall_seconds=600, start_seconds=60, wait_for_nodes_seconds=60)
STALLS = SOON.model_copy(update={"silence_seconds": 30.0, "stall_seconds": 3.0})


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    connect(2)
    yield
    disconnect()


def rank() -> int:
    return int(os.environ["RANK"])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop_rank_1_while_0_works(seconds: float) -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        note_progress()
        time.sleep(0.05)


def test_a_stopped_rank_is_named_soon_and_its_process_ended() -> None:
    group = WorkerGroup(2, SOON)
    pids = group.run("pids", os.getpid)
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"^collect: sft: rank 1 of 2 was lost: no sign of life for 3 s") as lost:
        group.run("collect: sft", stop_rank_1_while_0_works, 300.0)
    assert 3 < time.monotonic() - begun < 20
    assert len(str(lost.value).splitlines()) == 1
    assert not group.is_open
    # Its memory and its place come back: a process that is stopped heeds no request to end.
    end = time.monotonic() + 10
    while is_alive(pids[1]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pids[1])
    with WorkerGroup(2, SOON) as following:
        assert following.run("pids", rank) == [0, 1]


def test_a_rank_that_waits_long_is_not_taken_for_one_that_is_stopped() -> None:
    with WorkerGroup(1, SOON) as group:
        assert group.run("compile", lambda: time.sleep(8) or "done") == ["done"]


def test_a_rank_stopped_between_two_calls_is_found_by_the_next() -> None:
    with WorkerGroup(2, SOON) as group:
        pids = group.run("pids", os.getpid)
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(1)
        with pytest.raises(WorkerLostError, match=r"^ppo: rank 0 of 2 was lost: no sign of life"):
            group.run("ppo", rank)


def test_ranks_that_make_no_progress_are_named_though_they_live() -> None:
    def wait_on(event: Callable[[], bool]) -> None:
        if rank() == 0:  # makes progress for a while, which is no progress of the stuck one's
            for _ in range(20):
                note_progress()
                time.sleep(0.1)
            return
        while not event():
            time.sleep(0.05)

    begun = time.monotonic()
    with WorkerGroup(2, STALLS) as group:
        with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost: it hangs, without progress for 3 s"):
            group.run("sft", wait_on, bool)
        assert time.monotonic() - begun < 60


def test_work_that_goes_on_for_longer_than_the_limit_is_no_hang() -> None:
    def work() -> str:
        for _ in range(80):
            note_progress()
            time.sleep(0.1)
        return "done"

    with WorkerGroup(1, STALLS) as group:
        assert group.run("sft", work) == ["done"]


def test_of_groups_that_wait_for_each_other_the_stopped_one_is_named() -> None:
    with WorkerGroup(1, SOON) as learners, WorkerGroup(1, SOON) as generators:
        sending = learners.put("role", Role).start_all(Role.wait)
        receiving = generators.put("role", Role).start_all(Role.stop)
        with pytest.raises(WorkerLostError, match=r"^role\.stop: rank 0 of 1 was lost: no sign of life"):
            wait_all(sending, receiving)


class Role:
    def wait(self) -> None:
        time.sleep(300)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        pass


def test_a_rank_stopped_while_it_starts_is_named() -> None:
    def stop_first() -> None:
        """The first worker that appears, as soon as it has begun to build its rank."""
        end = time.monotonic() + 60
        while time.monotonic() < end and not stopped:
            for pid in set(processes()) - before:
                if b"_Worker" in command_of(pid):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
                    break

    stopped, before = list[int](), set(processes())
    striking = threading.Thread(target=stop_first)
    striking.start()
    hasty = SOON.model_copy(update={"start_seconds": 15.0})
    with pytest.raises(WorkerLostError, match=r"^start: rank \d(, \d)? of 2 was lost: no sign of life for (3|15) s"):
        WorkerGroup(2, hasty)
    striking.join()
    assert stopped
    with WorkerGroup(2, SOON) as group:
        assert group.run("ranks", rank) == [0, 1]


def test_a_listener_that_is_stopped_is_replaced_with_the_group() -> None:
    hasty = SOON.model_copy(update={"start_seconds": 12.0})
    with WorkerGroup(1, hasty) as group:
        assert group.run("sft", rank) == [0]
        listener = next(pid for pid in processes() if b"_Heartbeats" in command_of(pid))
        os.kill(listener, signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match=r"^sft: rank 0 of 1 was lost: nothing can be heard of it"):
            group.run("sft", lambda: time.sleep(300))
    with WorkerGroup(1, SOON) as group, pytest.raises(WorkerLostError, match="no sign of life"):
        group.run("sft", lambda: os.kill(os.getpid(), signal.SIGSTOP))


def processes() -> list[int]:
    """Those that this process started, and theirs: other Ray clusters may run on this machine."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_listener_may_die_and_hangs_are_found_still() -> None:
    with WorkerGroup(2, SOON) as group:
        killing = threading.Timer(1.0, lambda: ray.kill(group.ranks.heartbeats, no_restart=False))
        killing.start()
        with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost: no sign of life"):
            group.run("sft", stop_rank_1_while_0_works, 300.0)
        killing.join()
