"""A private Ray cluster of this process, which starts while the process is still importing its libraries.

Ray's processes end with the thread that started them, so a dedicated thread starts them and lives as long as they are
needed. Importing this module imports neither Ray nor torch.

Its nodes lack the processes that Heed does not use, which would take a fifth of a debug run's CPU time.
`python -m cluster.local_ray start ...` is `ray start ...` with such a node. `tests/cluster/test_connect.py` fails if a
new release of Ray renames what is replaced here.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.processes import RAY_ENVIRONMENT, end_by_sigterm, sigterm_kept

# They start the autoscaler, workers' output on the console, the dashboard, and access for drivers outside the cluster.
UNUSED_STARTS = ("start_monitor", "start_log_monitor", "start_api_server", "start_ray_client_server")


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Make the Ray nodes that this process starts inside the block lean."""
    from ray._private import node, utils

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        # If the dashboard cannot be imported, the agent that each node needs opens no HTTP port.
        (utils, "get_dashboard_dependency_error", lambda: ImportError("not asked")),
        *((node.Node, name, lambda _self, *_args, **_options: None) for name in UNUSED_STARTS),
    ]
    kept = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, replacement in replaced:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, kept, strict=True):
            setattr(owner, name, original)


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
        except BaseException as error:  # raised in `wait`
            self._error = error
        self._is_up.set()
        self._closes.wait()

    def wait(self) -> None:
        """Wait until Ray runs. Raises whatever starting it raised."""
        self._is_up.wait()
        self.was_awaited = True
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End Ray. If it is still starting, wait first: its agents would outlive a raylet that ends so early."""
        import ray

        self._is_up.wait()
        ray.shutdown()
        self._closes.set()


_started: _LocalRay | None = None


def begin() -> None:
    """Start Ray unless it was already started, and do not wait for it."""
    global _started
    if _started is None:
        end_by_sigterm()
        _started = _LocalRay()
        _started.start()


def is_starting() -> bool:
    """Whether Ray was started and nothing has waited for it yet."""
    return _started is not None and not _started.was_awaited


def start() -> None:
    """Start Ray if it was not started, and wait until it runs."""
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
    # warning works only before Ray is imported, when it is not yet known which cluster to use.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Ray warns that it cannot handle SIGTERM in a thread; `cluster.processes` handles it.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM handler" not in record.getMessage())
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    from cluster.worker import HeedFirst

    atexit.register(close)
    # "local": do not join a head that is already running on this machine unless RAY_ADDRESS names it.
    with lean_nodes(), sigterm_kept():
        ray.init(
            "local",
            num_cpus=os.cpu_count() or 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            job_config=HeedFirst(),
        )


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_nodes():
        main()
