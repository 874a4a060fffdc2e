"""The job of process rewards at the smallest size, and jobs whose steps do not fit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.connection import connect, disconnect
from files.records import read_record
from heed.jobs import recovery
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from reward.report import StepResults
from reward.scoring import step_separator
from tests.heed.jobs.test_external_reward import JOBS, SMALL
from training.metrics import read_metrics

TINY = (
    *SMALL, "world.num_counting=300", "reward.num_epochs=2", "ppo.minibatch.batch_size=32",
    "ppo.minibatch.micro_batch_size=32", "compare.num_samples=1", "compare.best_of=2",
    "compare.prompts.max_rows=8", "compare.max_new_tokens=12",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """One Ray for all jobs of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setattr(recovery, "disconnect", lambda: None)
        connect(1)
        yield
        disconnect()


@pytest.mark.long
def test_the_example_job_trains_a_model_of_steps_and_a_policy_on_it(tmp_path: Path) -> None:
    run = run_job(load_job(JOBS / "process.toml", TINY), tmp_path / "runs")
    results = read_record(run / "reward" / "results.json", StepResults)
    assert results.train_responses + results.heldout_responses == 300
    assert results.num_with_error > 5
    assert results.first_error.low <= results.first_error.mean <= results.first_error.high
    assert step_separator(run / "reward" / "model") == "\n"
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(line["steps"] >= 1 for line in metrics)
    assert all(0 < line["score"] < 1 for line in metrics)  # the chance of the worst step
    assert "First error found" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ppo.reward={kind='model'}", r"\[reward\] learns from step labels; `steps = {}` was expected"),
        ("ppo.reward.steps.separator='; '", r"ppo.reward.steps.separator is '; ', but that of reward.step_labels is"),
        ("reward.rating_coef=1.0", r"rating_coef belongs to rankings, but the model learns from step_labels"),
    ],
)
def test_steps_that_do_not_fit_are_refused(change: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(JOBS / "process.toml", [change])
