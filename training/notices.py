"""What the user should know during a run: where it resumes, what was skipped, what could not be saved.

Nobody reads a worker's log, so the process that starts a worker says where its notices go (`cluster.notices`). In any
other process they are log messages.
"""

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

log = logging.getLogger(__name__)

Speaker = Callable[[str], None]
_speakers: list[Speaker] = []


def say(notice: str) -> None:
    """Report one line to the user. Any thread may call it."""
    if _speakers:
        _speakers[-1](notice)
    else:
        log.warning("%s", notice)


def speak_through(speaker: Speaker) -> None:
    """Sends this process's notices to `speaker` from now on."""
    _speakers.append(speaker)


@contextmanager
def speaking_through(speaker: Speaker) -> Iterator[None]:
    """Sends this process's notices to `speaker` while the context is open."""
    speak_through(speaker)
    try:
        yield
    finally:
        _speakers.remove(speaker)


@contextmanager
def printing_aloud(who: str) -> Iterator[None]:
    """What a user's code prints reaches the user, line by line after `who`: nobody reads a worker's standard output.

    In a process that has no speaker it is printed as usual.
    """
    if not _speakers:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            say(f"{who}: {line}")
