"""Ray's node without the processes that Heed does not use. They would take a fifth of a debug run's CPU time.

`python lean_node.py start ...` is `ray start ...` with such a node; this file imports nothing of Heed.
`tests/cluster/test_connect.py` fails if a new release of Ray renames what is replaced here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_nodes():
        main()
