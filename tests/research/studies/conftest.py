"""Workers for studies at the debug job's size."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from heed.jobs import pipeline
from heed.jobs.recovery import Workers


@pytest.fixture
def _shared_workers(tmp_path: Path) -> Iterator[None]:
    """One group works for all arms: to start a worker takes longer than an arm of this size."""
    workers = Workers((1,), tmp_path, ClusterConfig(cpu_threads=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setattr(workers, "close", lambda: None)
        patch.setattr(pipeline, "Workers", lambda *_: workers)
        yield
    workers.close()
