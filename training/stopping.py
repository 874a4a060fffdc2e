"""A request to end training with a checkpoint. Whoever controls this process passes it on; loops look between steps."""

import threading

from training.failures import RunError

_request = threading.Event()


class StoppedError(RunError):
    """Training has saved a checkpoint and ended, as requested."""


def request_stop() -> None:
    """Have the loop in this process save after the step that it is in, and raise StoppedError."""
    _request.set()


def stop_requested() -> bool:
    return _request.is_set()


def withdraw_stop() -> None:
    """Forget the request, if there was one."""
    _request.clear()
