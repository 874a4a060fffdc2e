"""Worker groups on a real Ray: calls on all ranks, and failures that name their first cause."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import cloudpickle

from cluster import calls
from cluster.config import ClusterConfig
from cluster.connection import NoPlaceError, connect, disconnect, require_places
from cluster.failures import Failure, WorkerError, WorkerLostError
from cluster.group import WorkerGroup
from cluster.processes import WORKER_ENVIRONMENT
from cluster.remote import Local
from cluster.worker import interface_of
from files.records import read_record
from heed.jobs.report import StatusFile
from stages.progress import STATUS, RunStatus
from training.notices import speaking_through

# Workers cannot import this module, so its functions and classes are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Group = Callable[[], WorkerGroup]


class Counter:
    """An object to keep on every rank."""

    def __init__(self, start: int) -> None:
        self.total = start + int(os.environ["RANK"])

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total

    def value(self) -> int:
        return self.total

    def values(self) -> Iterator[int]:
        yield from (self.total, 100)

    def add_all(self, amounts: Iterable[int]) -> None:
        self.total += sum(amounts)

    def fail(self, amounts: Iterable[int]) -> None:
        raise RuntimeError(f"no more than {amounts}")

    def close(self) -> None:
        os.environ["COUNTER_CLOSED"] = "yes"


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    connect(2)
    yield
    disconnect()
    assert not ray.is_initialized()


@pytest.fixture
def pair(opened: list[WorkerGroup]) -> WorkerGroup:
    """Two workers; those of the previous test if it left them intact."""
    if not opened or not opened[-1].is_open:
        opened.append(WorkerGroup(2))
    return opened[-1]


class Large:
    """Counts how often it is pickled."""

    num_pickled = 0

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[type["Large"], tuple[bytes]]:
        Large.num_pickled += 1
        return Large, (self.content,)


class Holder:
    def __init__(self, large: Large, *, again: Large) -> None:
        self.sizes = len(large.content), len(again.content)

    def held(self) -> tuple[int, int]:
        return self.sizes

    def close(self) -> None:
        pass


def size_of(large: Large) -> int:
    return len(large.content)


@pytest.mark.long
def test_what_all_ranks_get_is_pickled_and_stored_once(pair: WorkerGroup) -> None:
    large = Large(bytes(3_000_000))
    Large.num_pickled = 0
    assert pair.run("stage", size_of, large) == [3_000_000] * 2
    assert Large.num_pickled == 1
    holders = pair.put("stage", Holder, large, again=large)
    assert holders.call_all(Holder.held) == [(3_000_000, 3_000_000)] * 2
    assert Large.num_pickled == 3
    holders.close()


def rank() -> int:
    return int(os.environ["RANK"])


def test_every_rank_sees_its_environment(pair: WorkerGroup) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", *WORKER_ENVIRONMENT]
    first, second = pair.run("look", lambda: {name: os.environ.get(name) for name in names})
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    for name in names[1:]:
        assert first[name] == second[name]
    assert first["WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"]
    assert 0 < int(first["MASTER_PORT"]) < 65_536
    assert first["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert {name: first[name] for name in WORKER_ENVIRONMENT} == WORKER_ENVIRONMENT


def test_ranks_run_at_the_drivers_priority(pair: WorkerGroup) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert pair.run("look", niceness) == [niceness()] * 2


def test_run_and_run_split_give_results_by_rank(pair: WorkerGroup) -> None:
    def late_first(word: str) -> str:
        time.sleep(0.2 * (1 - rank()))  # the order of arrival differs from the order of ranks
        return f"{word} {rank()}"

    assert pair.run("words", late_first, "a") == ["a 0", "a 1"]
    assert pair.run_split("words", late_first, [("a",), ("b",)]) == ["a 0", "b 1"]
    with pytest.raises(ValueError, match="zip"):
        pair.run_split("words", late_first, [("a",)])


def test_ranks_are_separate_processes(pair: WorkerGroup) -> None:
    pids = pair.run("pids", os.getpid)
    assert len({*pids, os.getpid()}) == 3
    assert pair.run("pids", os.getpid) == pids


def test_the_ranks_form_one_process_group(pair: WorkerGroup) -> None:
    def total() -> tuple[int, float]:
        import torch

        torch.distributed.init_process_group("gloo")
        summed = torch.tensor([10.0 + rank()])
        torch.distributed.all_reduce(summed)
        torch.distributed.destroy_process_group()
        return torch.get_num_threads(), float(summed)

    assert [found for _, found in pair.run("sum", total)] == [21.0, 21.0]


def test_nobody_can_take_the_port_of_a_rendezvous_before_the_ranks_meet_there(pair: WorkerGroup) -> None:
    def meet(host: str, port: int) -> float:
        from datetime import timedelta

        import torch

        from lm.tensor_parallel import Rendezvous, process_group

        group = process_group(Rendezvous(host, port, 2, 30.0), rank(), 2, torch.device("cpu"))
        summed = torch.tensor([10.0 + rank()])
        group.allreduce(summed).wait(timedelta(seconds=30))
        return float(summed)

    host, port = pair.free_address()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert pair.run("meet", meet, host, port) == [21.0, 21.0]
    assert pair.free_address() != (host, port)


def test_gloo_and_nccl_use_the_interface_by_which_ray_knows_the_machine(pair: WorkerGroup) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_GRAPH_REGISTER")
    interface = interface_of(ray.util.get_node_ip_address())
    for found in pair.run("environment", lambda: [os.environ[name] for name in names]):
        assert found == [interface, f"={interface}", "0"]


def test_put_call_and_close(pair: WorkerGroup) -> None:
    counters, others = pair.put("count", Counter, 100), pair.put("count", Counter, start=200)
    assert counters.call_split(Counter.add, [(1,), (2,)]) == [101, 103]
    assert counters.call_all(Counter.add, 0) == counters.call_all(Counter.add, amount=0) == [101, 103]
    assert counters.start_first(Counter.add, 7)() == [108]
    assert others.call_all(Counter.add, 0) == [200, 201]
    with pytest.raises(AssertionError, match="1 arguments for 2 ranks"):
        counters.call_split(Counter.add, [(1,)])
    counters.close()
    assert pair.run("look", lambda: os.environ.pop("COUNTER_CLOSED", "no")) == ["yes", "yes"]
    assert others.call_all(Counter.add, 0) == [200, 201]
    with pytest.raises(WorkerError, match=r"^count\.add: rank \d of 2: KeyError"):
        counters.call_split(Counter.add, [(1,), (2,)])


@pytest.mark.long
def test_calls_of_a_rank_run_in_the_order_they_were_started(pair: WorkerGroup) -> None:
    counters = pair.put("count", Counter, 0)
    started = [counters.start_all(Counter.add, amount) for amount in range(10)]
    assert [calls()[0] for calls in started] == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]
    assert started[3]() == started[3]() == [6, 7]  # waiting again returns the same results
    counters.close()


def test_a_value_passes_from_object_to_object_on_each_rank(pair: WorkerGroup) -> None:
    givers, takers = pair.put("count", Counter, 10), pair.put("count", Counter, 0)
    givers.pass_on(Counter.values, takers, Counter.add_all)()
    assert takers.call_all(Counter.value) == [0 + 110, 1 + 111]


def test_an_object_in_this_process_is_called_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    giver, taker = Local(Counter(1)), Local(Counter(2))
    assert giver.call_all(Counter.add, 5) == giver.call_split(Counter.add, [(0,)]) == [6]
    giver.pass_on(Counter.values, taker, Counter.add_all)
    assert taker.call_all(Counter.value) == [108]


def test_the_first_cause_is_named_by_phase_rank_and_exception(pair: WorkerGroup, tmp_path: Path) -> None:
    failing = tmp_path / "failing"

    def fail() -> None:
        if rank() == 0:
            while not failing.exists():
                time.sleep(0.01)
            time.sleep(1.0)  # a consequence of another failure, such as a lost peer
            raise RuntimeError("connection closed by peer")
        failing.touch()
        raise KeyError("the cause")

    with pytest.raises(WorkerError) as caught:
        pair.run("sft", fail)
    text = str(caught.value)
    assert text.startswith("sft: rank 1 of 2: KeyError: 'the cause'")
    assert "in fail" in text  # the worker's own traceback
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_value_error_comes_as_it_is_and_a_stuck_peer_is_not_waited_for(pair: WorkerGroup) -> None:
    def fail() -> None:
        if rank() == 1:
            raise ValueError("ppo.kl_coef is -1; at least 0 was expected")
        time.sleep(300)

    started = time.monotonic()
    with pytest.raises(ValueError, match=r"^ppo\.kl_coef is -1; at least 0 was expected$") as caught:
        pair.run("ppo", fail)
    assert not isinstance(caught.value, WorkerError)
    assert time.monotonic() - started < 30


def test_a_worker_killed_inside_a_collective_is_named(pair: WorkerGroup) -> None:
    def die() -> None:
        import torch

        torch.distributed.init_process_group("gloo")
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(value)  # rank 0 fails here, because its peer is gone

    with pytest.raises(WorkerError, match="ppo: rank 1 of 2 was lost"):
        pair.run("ppo", die)


@pytest.mark.long
def test_a_worker_lost_while_a_peer_fails_is_the_cause_however_late_it_is_reported(pair: WorkerGroup) -> None:
    """Ray reports a lost node seconds after the connections to it broke."""

    def fail() -> None:
        if rank() == 1:
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("gloo: Read error: Connection reset by peer")

    with pytest.raises(WorkerLostError, match=r"sft: rank 1 of 2 was lost(.|\n)*rank 0: RuntimeError"):
        pair.run("sft", fail)


def test_an_unexplained_broken_connection_is_a_loss(pair: WorkerGroup) -> None:
    def fail() -> None:
        raise RuntimeError("gloo: Timed out waiting 30000ms for recv operation to complete")

    with pytest.raises(WorkerLostError, match=r"the connection between ranks was lost, and no rank reported a cause"):
        pair.run("sft", fail)


def test_a_rank_that_hangs_is_named_and_not_those_that_wait(pair: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LOSS_SECONDS", 1.0)

    def wait() -> None:
        if rank() == 1:
            time.sleep(300)
        raise RuntimeError("gloo: Timed out waiting 30000ms for recv operation to complete")

    with pytest.raises(
        WorkerLostError, match=r"^sft: rank 1 of 2 was lost: it hangs or is unreachable(.|\n)*rank 0: RuntimeError"
    ):
        pair.run("sft", wait)


@pytest.mark.long
def test_memory_that_ran_out_comes_with_advice(pair: WorkerGroup) -> None:
    def of_torch() -> None:
        import torch

        torch.empty(1 << 50)

    says = r"sft: rank \d of 2(.|\n)*you tried to allocate \d+ bytes(.|\n)*a smaller micro_batch_size"
    with pytest.raises(WorkerError, match=says):
        pair.run("sft", of_torch)
    with pytest.raises(MemoryError, match=r"Unable to allocate 1.00 PiB") as of_numpy:
        np.zeros(1 << 50, np.uint8)
    assert Failure.of(of_numpy.value).is_memory  # what the advice depends on


def test_a_worker_that_ray_ended_for_its_memory_comes_with_advice() -> None:
    error = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    assert "a smaller micro_batch_size" in calls._advice(error)
    assert calls._advice(ray.exceptions.RayError("the worker was killed")) == ""


@pytest.mark.long
def test_the_value_of_rank_0_passes_to_every_rank_of_another_group(opened: list[WorkerGroup]) -> None:
    for group in opened:
        group.close()
    with WorkerGroup(1) as giving, WorkerGroup(1) as taking:
        givers, takers = giving.put("count", Counter, 10), taking.put("count", Counter, 5)
        givers.pass_on(Counter.values, takers, Counter.add_all)()
        assert takers.call_all(Counter.value) == [115]
        with pytest.raises(WorkerError, match=r"^count\.fail: rank 0 of 1: .*no more"):
            givers.pass_on(Counter.values, takers, Counter.fail)()


def test_a_group_that_could_never_be_placed_is_refused_at_once(opened: list[WorkerGroup]) -> None:
    for group in opened:
        group.close()
    cores = os.cpu_count() or 1
    started = time.monotonic()
    says = rf"^workers is {cores + 1}, and each needs 1 CPU on one node; .* nodes \(1 x .*\) have room for {cores}$"
    with pytest.raises(ValueError, match=says):
        WorkerGroup(cores + 1)
    assert time.monotonic() - started < 30


@pytest.mark.long
def test_a_group_whose_place_stays_taken_waits_aloud_and_is_refused(opened: list[WorkerGroup], tmp_path: Path) -> None:
    for group in opened:
        group.close()
    cores = os.cpu_count() or 1
    needed = f"{cores} workers with 1 CPU each"
    free = "1 is" if cores == 2 else f"{cores - 1} are"
    there_is = f"the cluster's 1 machine has room for {cores}, of which {free} free; other jobs hold the rest"
    notices, states = list[str](), list[str]()

    def hear(notice: str) -> None:
        notices.append(notice)
        with StatusFile(tmp_path, dict):
            states.append(read_record(tmp_path / STATUS, RunStatus).message)

    with WorkerGroup(1), speaking_through(hear), pytest.raises(NoPlaceError) as refused:
        WorkerGroup(cores, ClusterConfig(wait_for_nodes_seconds=3))
    assert str(refused.value) == f"{needed} could not be placed within 3 s: {there_is}"
    assert re.fullmatch(
        re.escape(f"waiting up to N s for places of {needed}: {there_is}").replace("N", r"\d"), notices[0]
    )
    assert states == notices
    # The resources reserved for it are free again.
    with WorkerGroup(cores) as group:
        assert len(group.run("pids", os.getpid)) == cores


def test_a_worker_lies_whole_on_one_node() -> None:
    bundle = {"CPU": 1.0, "GPU": 1.0}
    nodes = [{"CPU": 4.0, "GPU": 8.0}, {"CPU": 64.0}, {"CPU": 64.0}]
    require_places(4, bundle, nodes)
    says = r"each needs 1 CPU and 1 GPU .* \(1 x \(4 CPU and 8 GPU\), 2 x \(64 CPU and 0 GPU\)\) have room for 4$"
    with pytest.raises(ValueError, match=says):
        require_places(5, bundle, nodes)
