"""A rank's exception reaches the driver complete, as text or as itself; losses that a new group repairs are
recognised."""

import io
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from datetime import timedelta
from email.message import Message
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle

from cluster.connection import connect, disconnect
from cluster.failures import Failure, WorkerError, WorkerLostError, kind_of, last_line
from cluster.group import WorkerGroup

# Workers cannot import this module, so its functions and classes are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class TwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class LockedError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UserError(ValueError):
    def __init__(self, field: str, value: int) -> None:
        super().__init__(f"{field} is {value}; more was expected")


def two_arguments() -> None:
    raise TwoArgumentsError("this", "that")


def locked() -> None:
    raise LockedError("held")


def refused() -> None:
    raise urllib.error.HTTPError("http://scores", 503, "busy", Message(), io.BytesIO())


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    connect(1)
    yield
    disconnect()


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        (two_arguments, r"TwoArgumentsError: this and that\n(.|\n)*in two_arguments"),
        (locked, r"LockedError: held\n(.|\n)*in locked"),
        (refused, r"HTTP Error 503: busy(.|\n)*in refused|HTTPError(.|\n)*503(.|\n)*in refused"),
    ],
)
def test_an_exception_that_cannot_be_sent_arrives_as_text(fail: Callable[[], None], says: str) -> None:
    with WorkerGroup(1) as group, pytest.raises(WorkerError, match=rf"^ppo: rank 0 of 1: (.|\n)*({says})") as caught:
        group.run("ppo", fail)
    assert not isinstance(caught.value, WorkerLostError), "it would be tried again, to fail again"


def test_a_users_mistake_that_cannot_be_sent_is_a_value_error_still() -> None:
    def fail() -> None:
        raise UserError("ppo.clip_range", -1)

    with (
        WorkerGroup(1) as group,
        pytest.raises(ValueError, match=r"ppo\.clip_range is -1; more was expected") as caught,
    ):
        group.run("ppo", fail)
    assert not isinstance(caught.value, WorkerError)


def test_what_a_rank_returns_and_cannot_be_sent_is_an_error_and_no_loss() -> None:
    with WorkerGroup(1) as group, pytest.raises(WorkerError, match=r"^sft: rank 0 of 1: (.|\n)*pickle") as caught:
        group.run("sft", threading.Lock)
    assert not isinstance(caught.value, WorkerLostError)


def test_a_module_that_a_worker_lacks_is_named_in_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own text begins with its process, colour codes and all."""
    path = tmp_path / "only_on_the_driver.py"
    path.write_text("def work():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = import_module("only_on_the_driver").work
    path.unlink()
    with WorkerGroup(1) as group, pytest.raises(WorkerError) as caught:
        group.run("sft", function)
    first, *rest = str(caught.value).splitlines()
    assert first == "sft: rank 0 of 1: ModuleNotFoundError: No module named 'only_on_the_driver'"
    assert any("ray::_Worker.run()" in line for line in rest)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a.b()\n  File x\nKeyError: 1\n\nThen:\nlib.errors.LostError: gone\n more\n", "lib.errors.LostError: gone"),
        ("Traceback (most recent call last):\n  File x\nAssertionError\n", "AssertionError"),
        ("ImportError: two\nlines of it\n", "ImportError: two"),
        ("no exception at all", "no exception at all"),
    ],
)  # fmt: skip
def test_the_last_line_names_the_last_exception(text: str, line: str) -> None:
    assert last_line(text) == line


def test_a_port_that_is_taken_is_a_loss_that_another_group_mends() -> None:
    def bind_twice() -> None:
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    with (
        WorkerGroup(1) as group,
        pytest.raises(WorkerLostError, match=r"^sft: rank 0 of 1 was lost(.|\n)*EADDRINUSE"),
    ):
        group.run("sft", bind_twice)


def nowhere() -> Exception:
    """What torch raises if the first rank's host cannot be found or reached."""
    try:
        dist.TCPStore("no-such-host.invalid", 29_999, timeout=timedelta(seconds=2))  # type: ignore[attr-defined]
    except Exception as error:
        return error
    raise AssertionError("a host was found that does not exist")


ECC = "CUDA error: uncorrectable ECC error encountered"
CASES = [
    (dist.DistNetworkError("failed to connect: No route to host"), "echo"),
    (dist.DistBackendError("NCCL error: ncclRemoteError: remote process exiting prematurely"), "echo"),
    (dist.DistStoreError("wait timeout after 10000ms"), "echo"),
    (RuntimeError("[enforce fail] gloo: connect: No route to host"), "echo"),
    (RuntimeError("gloo: Timed out waiting 30000ms for recv operation to complete"), "echo"),
    (torch.AcceleratorError(ECC), "loss"),
    (RuntimeError(ECC), "loss"),
    (dist.DistNetworkError("port: 29500, code: -98, name: EADDRINUSE, message: address already in use"), "loss"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "error"),
    (torch.AcceleratorError("CUDA error: out of memory"), "error"),
    (RuntimeError("the loss is not finite on 1 of 2 ranks"), "error"),
    (KeyError("connection closed"), "error"),
    (OSError("No route to host"), "error"),  # another process's server; a new group would not help
    (ValueError("connection closed by peer: sft.url"), "mistake"),
]


@pytest.mark.parametrize(("error", "kind"), CASES, ids=[f"{type(e).__name__}-{kind}" for e, kind in CASES])
def test_kinds_of_failures(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
    assert Failure.of(error).kind == kind


def test_a_host_that_is_not_found_is_an_echo() -> None:
    assert kind_of(nowhere()) == "echo"
