"""A Ray with as many places as a test needs, whatever this machine has."""

import pytest
import ray

from cluster.local_ray import lean_nodes
from cluster.processes import RAY_ENVIRONMENT
from cluster.worker import HeedFirst


def start_ray(num_cpus: int, num_gpus: int = 0) -> None:
    """Start Ray for this process, as `heed run` does."""
    with pytest.MonkeyPatch.context() as patch, lean_nodes():
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        ray.init(
            "local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False,
            job_config=HeedFirst(),
        )  # fmt: skip
