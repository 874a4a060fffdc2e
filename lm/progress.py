"""A count of the pieces of work that this process has done.

A watcher outside a rank uses this count to tell slow work from stuck work. Each loop over batches, tokens, rows or
files adds to it. The size of a piece does not matter, only that the next one comes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_num_pieces = 0
_users_code = ""


def note_progress() -> None:
    """Count one more piece of work. It costs nothing, so any loop that a rank runs may call it."""
    global _num_pieces
    _num_pieces += 1


def progress_noted() -> int:
    """Returns how many pieces this process has counted so far."""
    return _num_pieces


@contextmanager
def in_users_code(what: str) -> Iterator[None]:
    """Note that this process runs user code, which counts no work. `what` names the code and its arguments."""
    global _users_code
    _users_code = what
    try:
        yield
    finally:
        _users_code = ""


def users_code_noted() -> str:
    """Returns which user code this process is running; "" if none."""
    return _users_code
