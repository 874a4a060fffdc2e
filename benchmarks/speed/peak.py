"""How much memory a process takes at most."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
WATCH_SECONDS = 0.001


def private_bytes() -> int:
    """Memory of this process alone: pages of a mapped file, which the system may drop, are not in it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int]:
    """What the work returns, and by how many bytes this process grew at most while it ran."""
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
