"""What Heed's processes share with the system: environment variables for libraries not loaded yet, Ray's token,
free ports, and SIGTERM, by which Slurm, systemd, containers and `heed jobs stop` end a process: treated like Ctrl-C.

Standard library only.
"""

import ctypes
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

# glibc returns large buffers to the system at every free and pays for new pages at every allocation. Training allocates
# the same sizes again at once, so keeping them saves up to a third of a small model's step.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

# Threads that spin while they wait for each other slow down everything else on the machine, and threads that sleep at
# once wake up slowly. These spin for a quarter of a millisecond, then sleep (GNU's OpenMP; others sleep at once).
# docs/negative-results.md has the times.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

# Widths differ from one micro-batch to the next. PyTorch's allocator then keeps blocks of many sizes that fit no other
# request; expandable segments fit all of them. No effect without a GPU.
GPU_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# NCCL would register the memory of recorded steps (CUDA graphs), which it cannot with expandable segments: Megatron-LM
# refuses the pair because of illegal memory accesses.
NCCL_IN_GRAPHS = {"NCCL_GRAPH_REGISTER": "0"}

# Ray runs workers at a niceness of 15. Next to other busy processes they would get little CPU time and send heartbeats
# too late (docs/negative-results.md).
NICENESS = {"RAY_worker_niceness": "0"}

GROUP = "HEED_GROUP"  # the environment variable that names the group of a rank's process
WORKER_ENVIRONMENT = ALLOCATOR | WAITING | GPU_ALLOCATOR | NCCL_IN_GRAPHS | NICENESS

# What a launcher such as torchrun sets for its own ranks. A driver that one of them starts must not join their process
# group, or open a port that they have taken.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# For a Ray that Heed starts. Ray would start one idle worker per core in advance, but without the environment above, so
# no rank could use it. On a busy machine, a node may take longer to start than Ray's limit of 30 seconds.
RAY_ENVIRONMENT = {"RAY_prestart_worker_first_driver": "0", "RAY_raylet_start_wait_time_s": "120"} | NICENESS


def token_warning() -> str:
    """Return one line if other users can read the file with the cluster's token; "" if not, or if there is no file.

    `ray get-auth-token --generate` creates the file with the user's umask, so usually everybody can read it.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or os.environ.get("RAY_AUTH_TOKEN"):
        return ""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:  # Ray reports what is missing
        return ""
    if not mode & 0o077 or not path.is_file():
        return ""
    return (
        f"{path} has mode {mode:04o}: whoever reads this token can run code on the cluster as you;"
        f" expected 0600: chmod 600 {path}"
    )


SIGACTION_BYTES = 1024  # more than any platform's `struct sigaction` has
_wakeup_fd = -1  # of the `call_on_sigterm` that is active; -1 if none is


def end_by_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C. Does nothing outside the main thread, since only the main thread can set a handler."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after Ray was started, in any thread.

    Ray's own handler prints a C++ stack trace, and ends the process before it can say where it stopped.
    """
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, handler)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, handler, None)


@contextmanager
def call_on_sigterm(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` in another thread as soon as SIGTERM arrives. Does nothing outside the main thread.

    A main thread that waits inside Ray notices a signal up to a second late. If the signal has also ended Ray's own
    processes, as Slurm's and systemd's do, Ray ends this process before that, without a message.
    """
    global _wakeup_fd
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # as `set_wakeup_fd` requires
    earlier = signal.set_wakeup_fd(-1)
    listener = threading.Thread(target=_listen, args=(reader, earlier, callback), name="SIGTERM", daemon=True)
    listener.start()
    try:
        _wakeup_fd = writer.fileno()
        signal.set_wakeup_fd(_wakeup_fd, warn_on_full_buffer=False)
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        _wakeup_fd = -1
        writer.shutdown(socket.SHUT_WR)  # ends the listener, after it has reported what is pending
        listener.join()
        writer.close()
        reader.close()


def _listen(reader: socket.socket, earlier: int, callback: Callable[[], None]) -> None:
    """Read the number of each signal, one byte each, until the other end is shut down.

    `earlier` is the wakeup file descriptor that was set before, such as an event loop's; -1 for none.
    """
    while numbers := reader.recv(64):
        if earlier != -1:
            with suppress(OSError):
                os.write(earlier, numbers)
        if signal.SIGTERM in numbers:
            callback()


def _hear_nothing() -> None:
    """Stop reporting signals in a forked child: it inherits the file descriptor, but its signals are its own."""
    if _wakeup_fd != -1:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_nothing)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# Below the ports for outgoing connections (32768 and up), so that no connection takes the port before its server opens
# it, which can be minutes later; above the ports of Ray's own workers (10002 to 19999).
PORTS = range(20_000, 32_000)
TRIES = 100


def free_port() -> int:
    """Returns a free port of this machine. Raises: OSError if none is found."""
    # Two runs with the same seed would draw the same port from Python's global generator.
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # the port is taken
                continue
            return port
    raise OSError(f"{TRIES} ports between {PORTS[0]} and {PORTS[-1]} are all taken")
