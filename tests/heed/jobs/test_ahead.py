"""PPO that samples ahead, placed as by `heed run`: losing a worker changes no bit, and a generator is replaced."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from research.chaos.local_cluster import LocalCluster, kill_process
from stages.lineage import outputs_hash
from tests.tiers import in_ci
from training.metrics import read_metrics

DEBUG = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
PLACEMENTS = {
    "asynchronous": ("ppo.placement.kind=asynchronous",),
    "continuous": ("ppo.placement.kind=continuous", "ppo.placement.round_tokens=4", "ppo.placement.num_rows=20"),
}


LOST = ["learner", "generator"]  # in the order in which they start


@pytest.mark.long
@pytest.mark.parametrize("lost", in_ci(LOST, ["learner"]))  # tests/ppo/test_lost_generators.py has the other
@pytest.mark.parametrize("placement", in_ci(PLACEMENTS, ["continuous"]))
def test_a_worker_lost_with_rollouts_in_flight_changes_no_bit(
    finished_run: Path,
    overrides: tuple[str, ...],
    num_steps: Callable[[Path], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    placement: str,
    lost: str,
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ahead = (*PLACEMENTS[placement], "ppo.placement.max_staleness=1", "ppo.num_iterations=4")
    job, struck = load_job(DEBUG, [*overrides, *ahead]), list[str]()
    ppo = {name: tmp_path / name / "debug" / "ppo" for name in ("calm", "struck")}
    for folder in ppo.values():
        shutil.copytree(finished_run, folder.parent, ignore=shutil.ignore_patterns("ppo", "compare"))

    def strike(cluster: LocalCluster) -> None:
        end = time.monotonic() + 120
        while num_steps(ppo["struck"]) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        struck.extend(path.name for path in ppo["struck"].glob("checkpoints/step-*/rollout-*"))
        kill_process(cluster.worker_processes()[LOST.index(lost)])

    with LocalCluster(num_nodes=1, cpus=job.num_ranks) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        run_job(job, tmp_path / "calm", only="ppo")
        striking = threading.Thread(target=strike, args=(cluster,))
        striking.start()
        run_job(job, tmp_path / "struck", only="ppo")
        striking.join()
    assert struck, "no rollout was kept before the kill"
    said = capsys.readouterr().err
    assert "was lost" in said
    assert ("ppo: continues from checkpoints/step-" in said) == (lost == "learner")
    assert outputs_hash(ppo["struck"] / "model") == outputs_hash(ppo["calm"] / "model")
    curves = [[line["staleness"] for line in read_metrics(ppo[name] / "metrics.jsonl")] for name in ppo]
    assert curves == [[0, 1, 1, 1]] * 2
