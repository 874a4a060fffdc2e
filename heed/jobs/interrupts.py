"""Ctrl-C during a stage: its ranks save a checkpoint first, if they can within seconds."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cluster.messages import send_request, withdraw_request
from stages.progress import console
from training.notices import request_stop, stop_requested, withdraw_stop

SAVE_SECONDS = 10.0  # in which a step must end and its checkpoint be written


@contextmanager
def saving_on_interrupt(stage: str, can_save: Callable[[], bool]) -> Iterator[None]:
    """At the first Ctrl-C, ask whoever trains to save and stop. A second one, or `SAVE_SECONDS`, ends the wait.

    `can_save` is asked whether there is anything to save yet. Outside the main thread, and where Ctrl-C is ignored,
    nothing changes.
    Raises: KeyboardInterrupt in the end, however the block ends after the request.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # ignored, as in a shell's background
        yield
        return
    last_call = threading.Timer(SAVE_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    last_call.daemon = True

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop_requested() or not can_save():
            raise KeyboardInterrupt
        request_stop()
        last_call.start()
        threading.Thread(target=send_request, name="interrupt", daemon=True).start()
        console.print(f"{stage}: saving a checkpoint before it stops; Ctrl-C again stops at once", markup=False)

    earlier = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        if stop_requested():  # it was at its end
            raise KeyboardInterrupt
    except Exception as error:  # the ranks' StoppedError, or what else came in between
        if stop_requested():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, earlier)
        last_call.cancel()
        if stop_requested():
            withdraw_stop()
            withdraw_request()
