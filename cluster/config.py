"""What a job expects of the cluster, and how long it waits for it."""

from pydantic import Field

from training.config import Config


class ClusterConfig(Config):
    """What ranks take of their machines, and how long the driver waits for silent ranks and missing machines.

    All of it may be changed between two runs of a job. Results do not depend on it, except for rounding if the number
    of threads differs, as it does between machines.
    """

    silence_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A rank without a heartbeat for this long, from the start of its process on, counts as lost.",
    )
    stall_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="A call counts as stuck if no rank finishes a token or a micro-batch for this long.",
    )
    start_seconds: float = Field(default=600.0, gt=0, description="How long Ray may take to start a worker's process.")
    wait_for_nodes_seconds: float = Field(
        default=300.0,
        ge=0,
        description="How long to wait for resources: for a lost machine to return, or for another job to end.",
    )
    use_gpus: bool = Field(
        default=True, description="If false, every rank runs on a CPU, even where the cluster has GPUs."
    )

    cpu_threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads per rank; 0 = a machine's cores divided by its ranks. One thread is fastest for models"
        " whose matrices have fewer than a few hundred columns.",
    )

    @property
    def beat_limit_seconds(self) -> float:
        """The shortest time within which a worker must be heard from."""
        return min(self.silence_seconds, self.stall_seconds)
