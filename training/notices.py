"""What the user should know during a run: where it resumes, what was skipped, what could not be saved.

Nobody reads a worker's log, so the process that starts a worker says where its notices go (`cluster.notices`). In any
other process they are log messages.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
