"""A Ray of this process's own, which starts while the process is still importing its libraries.

Ray's processes end with the thread that has started them, so a thread of their own starts them and lives as long as
they are needed. Importing this module imports neither Ray nor torch.
"""

import atexit
import logging
import os
import threading

from cluster.environment import RAY_ENVIRONMENT
from cluster.lean_node import lean_nodes
from cluster.sigterm import end_by_sigterm, sigterm_kept


class _LocalRay(threading.Thread):
    """Starts Ray, and lives until `close`."""

    def __init__(self) -> None:
        super().__init__(name="local-ray", daemon=True)
        self.was_awaited = False
        self._is_up, self._closes = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            _init()
        except BaseException as error:  # raised where Ray is waited for
            self._error = error
        self._is_up.set()
        self._closes.wait()

    def wait(self) -> None:
        """Return once Ray runs. Raises what starting it raised."""
        self._is_up.wait()
        self.was_awaited = True
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End Ray. One that is still starting is waited for: its agents would outlive a raylet that ends so early."""
        import ray

        self._is_up.wait()
        ray.shutdown()
        self._closes.set()


_started: _LocalRay | None = None


def begin() -> None:
    """Start Ray, unless it was started, without waiting for it."""
    global _started
    if _started is None:
        end_by_sigterm()
        _started = _LocalRay()
        _started.start()


def is_starting() -> bool:
    """Whether it was started and nobody has waited for it yet."""
    return _started is not None and not _started.was_awaited


def start() -> None:
    """Return once Ray runs, having started it if it was not."""
    begin()
    assert _started is not None
    try:
        _started.wait()
    except BaseException:
        close()
        raise


def close() -> None:
    """End Ray if this process has started it."""
    global _started
    if _started is not None:
        started, _started = _started, None
        started.close()


def _init() -> None:
    # A local cluster uses a token by default, and Ray warns about it at each start. The setting that silences the
    # warning works only before Ray is imported, when nobody knows yet which cluster is meant.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # `cluster.sigterm` handles SIGTERM; Ray warns that a thread cannot.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM handler" not in record.getMessage())
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    from cluster.worker import HeedFirst

    atexit.register(close)
    # "local": a head that somebody started on this machine is not joined unless RAY_ADDRESS names it.
    with lean_nodes(), sigterm_kept():
        ray.init(
            "local",
            num_cpus=os.cpu_count() or 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            job_config=HeedFirst(),
        )
