"""What hears SIGTERM while the main thread is elsewhere."""

import hashlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from cluster.processes import call_on_sigterm


@pytest.fixture(autouse=True)
def _survives() -> Iterator[None]:
    own = os.getpid()
    earlier = signal.signal(signal.SIGTERM, lambda *_: None if os.getpid() == own else os._exit(0))
    yield
    signal.signal(signal.SIGTERM, earlier)


def test_it_is_heard_while_the_main_thread_is_in_c() -> None:
    heard: list[float] = []
    with call_on_sigterm(lambda: heard.append(time.monotonic())):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        end = time.monotonic() + 30
        while time.monotonic() < end:  # Python handles signals only between these calls
            hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 1_000_000)
            returned = time.monotonic()
            if heard:
                break
    assert len(heard) == 1
    assert heard[0] < returned
    os.kill(os.getpid(), signal.SIGTERM)  # outside the block
    assert len(heard) == 1
    assert signal.set_wakeup_fd(-1) == -1


def test_the_end_of_a_forked_child_is_not_ones_own() -> None:
    heard: list[int] = []
    begun = time.monotonic()
    with call_on_sigterm(lambda: heard.append(1)):
        forks = multiprocessing.get_context("fork")
        ended, left = (forks.Process(target=time.sleep, args=(60,)) for _ in range(2))
        ended.start()
        left.start()
        ended.terminate()
        ended.join()
    assert time.monotonic() - begun < 30, "the child that is left was waited for"
    left.kill()
    left.join()
    assert heard == []


def test_whoever_heard_of_signals_before_still_does() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier = signal.set_wakeup_fd(writer.fileno())
    try:
        with call_on_sigterm(lambda: None):
            os.kill(os.getpid(), signal.SIGTERM)
        assert reader.recv(8) == bytes([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        assert reader.recv(8) == bytes([signal.SIGTERM])
    finally:
        signal.set_wakeup_fd(earlier)
        reader.close()
        writer.close()
