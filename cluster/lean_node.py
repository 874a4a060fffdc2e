"""Ray's node without the processes that Heed does not use. They take two CPU seconds, and starting Ray waits for them.

`python lean_node.py start ...` is `ray start ...` with such a node; this file imports nothing of Heed.
`tests/cluster/test_connect.py` fails if a new release of Ray renames what is replaced here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

# They start the autoscaler, workers' output on the console, the dashboard, and access for drivers outside the cluster.
UNUSED_STARTS = ("start_monitor", "start_log_monitor", "start_api_server", "start_ray_client_server")


@contextmanager
def lean_nodes() -> Iterator[None]:
    """Make the Ray nodes that this process starts inside the block lean.

    Their workers start through `cluster.worker_setup`, which saves .4 CPU seconds each, and `cluster.idle_agent` stands
    in for the dashboard's agent.
    """
    from ray._private import node, services, utils

    ray_node, start_process = node.Node, services.start_ray_process
    dashboard_error = utils.get_dashboard_dependency_error
    # As written in the raylet's command, which contains the agent's: quoted if necessary.
    rays_agent = list2cmdline([str(Path(services.RAY_PATH, "dashboard", "agent.py"))])
    idle_agent = list2cmdline([str(Path(__file__).with_name("idle_agent.py"))])

    class Node(ray_node):  # type: ignore[misc, valid-type]
        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.setup_worker_path = str(Path(__file__).with_name("worker_setup.py"))
            super().__init__(ray_params, *args, **kwargs)

    for name in UNUSED_STARTS:
        setattr(Node, name, lambda _self, *_args, **_options: None)

    def start_with_idle_agent(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start_process([part.replace(rays_agent, idle_agent) for part in command], *args, **kwargs)

    node.Node, services.start_ray_process = Node, start_with_idle_agent  # type: ignore[misc]
    # To check this, Ray would import everything that its dashboard needs, which takes a third of a CPU second.
    utils.get_dashboard_dependency_error = lambda: ImportError("not asked")
    try:
        yield
    finally:
        node.Node, services.start_ray_process = ray_node, start_process  # type: ignore[misc]
        utils.get_dashboard_dependency_error = dashboard_error


if __name__ == "__main__":
    from ray.scripts.scripts import main

    with lean_nodes():
        main()
