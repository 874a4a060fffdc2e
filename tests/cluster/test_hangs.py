"""Hanging ranks are detected by what is missing: a stopped process sends no heartbeats, a stuck one makes no progress.

All tests use real processes on a real Ray, which are really stopped.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import cloudpickle
from ray.experimental import internal_kv

from cluster.calls import wait_all
from cluster.config import ClusterConfig
from cluster.connection import connect, disconnect
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from cluster.worker import _Worker
from heed.jobs.recovery import run_to_end
from lm.progress import note_progress
from lm.tokenizer import Messages
from reward.external import RewardFunction, Scored
from training.notices import RunError

pytestmark = pytest.mark.long

# Workers cannot import this module, so its functions and classes are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = ClusterConfig(silence_seconds=6, stall_seconds=600, start_seconds=60, wait_for_nodes_seconds=60)
STALLS = SOON.model_copy(update={"silence_seconds": 30.0, "stall_seconds": 3.0})


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    connect(2)
    yield
    disconnect()


@pytest.fixture
def pair(opened: list[WorkerGroup]) -> WorkerGroup:
    """Two ranks; those that the previous test left whole, as starting them takes long."""
    if not opened or not opened[-1].is_open:
        opened.append(WorkerGroup(2, SOON))
    return opened[-1]


@pytest.fixture
def no_pair(opened: list[WorkerGroup]) -> None:
    """Gives the places of the pair to groups of other sizes."""
    for group in opened:
        group.close()


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


def test_a_stopped_rank_is_named_soon_and_its_process_ended(pair: WorkerGroup, opened: list[WorkerGroup]) -> None:
    pids = pair.run("pids", os.getpid)
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"^collect: sft: rank 1 of 2 was lost: no heartbeat for 6 s") as lost:
        pair.run("collect: sft", stop_rank_1_while_0_works, 300.0)
    assert 6 < time.monotonic() - begun < 60
    assert len(str(lost.value).splitlines()) == 1
    assert not pair.is_open
    # Its memory and its resources are released, although a stopped process ignores requests to end.
    end = time.monotonic() + 30
    while is_alive(pids[1]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(pids[1])
    opened.append(WorkerGroup(2, SOON))
    assert opened[-1].run("pids", rank) == [0, 1]


def test_a_rank_that_waits_long_is_not_taken_for_one_that_is_stopped(pair: WorkerGroup) -> None:
    seconds = SOON.silence_seconds + 2
    assert pair.run("compile", lambda: time.sleep(seconds) or "done") == ["done"] * 2


@pytest.mark.nightly
def test_a_rank_stopped_between_two_calls_is_found_by_the_next(pair: WorkerGroup) -> None:
    pids = pair.run("pids", os.getpid)
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(1)
    with pytest.raises(WorkerLostError, match=r"^ppo: rank 0 of 2 was lost: no heartbeat"):
        pair.run("ppo", rank)


@pytest.mark.usefixtures("no_pair")
def test_ranks_that_make_no_progress_are_named_though_they_live() -> None:
    def work() -> str:
        for _ in range(80):
            note_progress()
            time.sleep(0.1)
        return "done"

    def wait_on(event: Callable[[], bool]) -> None:
        if rank() == 0:  # makes progress for a while, which does not count as progress of the stuck rank
            for _ in range(20):
                note_progress()
                time.sleep(0.1)
            return
        while not event():
            time.sleep(0.05)

    with WorkerGroup(2, STALLS) as group:
        assert group.run("sft", work) == ["done"] * 2  # longer than the limit, which is no hang
        begun = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost: it has made no progress for 3 s"):
            group.run("sft", wait_on, bool)
        assert time.monotonic() - begun < 60


@pytest.mark.nightly
@pytest.mark.usefixtures("no_pair")
def test_of_groups_that_wait_for_each_other_the_stopped_one_is_named() -> None:
    with WorkerGroup(1, SOON) as learners, WorkerGroup(1, SOON) as generators:
        sending = learners.put("role", Role).start_all(Role.wait)
        receiving = generators.put("role", Role).start_all(Role.stop)
        with pytest.raises(WorkerLostError, match=r"^role\.stop: rank 0 of 1 was lost: no heartbeat"):
            wait_all(sending, receiving)


@pytest.mark.usefixtures("no_pair")
def test_a_reward_function_that_never_returns_ends_the_run_after_one_limit(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef score(prompts, responses):\n    time.sleep(300)\n")
    function, tries = f"{tmp_path / 'slow.py'}:score", list[int]()

    def score() -> list[Scored]:
        asked: list[Messages] = [
            [{"role": "user", "content": "How are you?"}],
            [{"role": "user", "content": "And now?"}],
        ]
        return RewardFunction(function=function).score(asked, ["well", "tired"])

    def work() -> None:
        tries.append(1)
        with WorkerGroup(1, STALLS) as group:
            group.run("ppo.score", score)

    words = (
        rf"^ppo\.score: rank 0 of 1: {function}, called with 2 responses, the first to the prompt 'How are you\?', has"
    )
    with pytest.raises(RunError, match=rf"{words} not returned for 3 s \(cluster\.stall_seconds\)"):
        run_to_end("ppo", tmp_path, work, list)
    assert tries == [1]


class Role:
    def wait(self) -> None:
        time.sleep(300)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        pass


@pytest.mark.nightly
@pytest.mark.usefixtures("no_pair")
def test_a_rank_stopped_while_it_starts_is_named(opened: list[WorkerGroup]) -> None:
    def stop_first() -> None:
        """Returns the first worker to appear, as soon as it has begun to build its rank."""
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
    with pytest.raises(WorkerLostError, match=r"^start: rank \d(, \d)? of 2 was lost: no heartbeat for (6|15) s"):
        WorkerGroup(2, hasty)
    striking.join()
    assert stopped
    opened.append(WorkerGroup(2, SOON))
    assert opened[-1].run("ranks", rank) == [0, 1]


class Frozen(_Worker):
    """A rank that is stopped while it imports, before its first heartbeat."""

    def __init__(self, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__(*arguments)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_pair")
def test_a_rank_stopped_before_its_first_heartbeat_has_the_limit_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.group._Worker", Frozen)
    words = r"^start: rank 0 of 1 was lost: no heartbeat for 6 s \(cluster\.silence_seconds\): its process is stopped"
    with pytest.raises(WorkerLostError, match=words):
        WorkerGroup(1, SOON)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_pair")
def test_a_process_that_never_starts_has_the_limit_of_starting(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 120\n")
    python.chmod(0o755)
    words = r"^start: rank 0 of 1 was lost: no heartbeat for 8 s \(cluster\.start_seconds\): its process does not start"
    with pytest.raises(WorkerLostError, match=words):
        WorkerGroup(1, SOON.model_copy(update={"start_seconds": 8.0}), python=str(python))


def test_nobody_is_blamed_while_rays_head_does_not_answer(pair: WorkerGroup) -> None:
    def outlast_the_silence() -> int:
        time.sleep(3 * SOON.silence_seconds)
        return rank()

    head = ray_head()
    os.kill(head, signal.SIGSTOP)
    waking = threading.Timer(2 * SOON.silence_seconds, os.kill, (head, signal.SIGCONT))
    waking.start()
    assert pair.run("sft", outlast_the_silence) == [0, 1]
    waking.join()
    with pytest.raises(WorkerLostError, match=r"^sft: rank 1 of 2 was lost: no heartbeat"):
        pair.run("sft", stop_rank_1_while_0_works, 300.0)


@pytest.mark.nightly
@pytest.mark.usefixtures("no_pair")
def test_a_head_that_never_answers_ends_the_call() -> None:
    with WorkerGroup(1, SOON.model_copy(update={"start_seconds": 8.0})) as group:
        assert group.run("sft", rank) == [0]
        name, head = group.ranks.name, ray_head()
        assert beats_of(name)
        os.kill(head, signal.SIGSTOP)
        waking = threading.Timer(15, os.kill, (head, signal.SIGCONT))
        waking.start()
        words = r"^sft: rank 0 of 1 was lost: its state is unknown, because Ray's head has not answered for 8 s"
        with pytest.raises(WorkerLostError, match=words):
            group.run("sft", lambda: time.sleep(300))
        waking.join()
    with WorkerGroup(1, SOON) as group:
        assert group.run("sft", rank) == [0]
        name = group.ranks.name
        assert beats_of(name)
    assert not beats_of(name)


def ray_head() -> int:
    """Returns the process that keeps the heartbeats of this process's Ray."""
    return next(pid for pid in processes() if b"gcs_server" in command_of(pid))


def beats_of(group: str) -> list[bytes]:
    return internal_kv._internal_kv_list(f"{group}/", namespace="heed-beats")


def processes() -> list[int]:
    """Returns the processes that this process started, and theirs: other Ray clusters may run on this machine."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
