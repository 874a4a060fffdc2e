"""Measures the peak memory of a process."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
WATCH_SECONDS = 0.001


def private_bytes() -> int:
    """Returns this process's private memory, without pages of mapped files, which the system may drop."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int]:
    """Returns the result of `work`, and the peak growth of this process in bytes while it ran."""
    before, over = private_bytes(), threading.Event()
    seen = [before]

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            seen.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = work()
    finally:
        seen.append(private_bytes())
        over.set()
        thread.join()
    return result, max(seen) - before
