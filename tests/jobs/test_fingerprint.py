"""What a stage's fingerprint depends on, and what it does not."""

from pathlib import Path
from typing import cast

import pytest

from jobs.job_file import load_job
from jobs.pipeline import _inputs
from jobs.run import Run
from stages.world import World

DEBUG = Path(__file__).parents[2] / "configs" / "jobs" / "debug.toml"


def fingerprint(stage_name: str, *overrides: str) -> str:
    job = load_job(DEBUG, overrides)
    run = Run(job, Path("nowhere"), cast(World, None), lambda: pytest.fail("no workers are needed"))
    return _inputs(run, job.registry[stage_name]).fingerprint


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("pretrain", "pretrain.batch.micro_batch_size=4"),
        ("pretrain", "pretrain.save_every_steps=3"),
        ("sft", "sft.evaluate_every_steps=2"),
        ("ppo", "ppo.minibatch.micro_batch_size=2"),
        ("ppo", "ppo.save_every_iterations=2"),
        ("reward", "workers=2"),
        ("reward", "engine.zero_stage=2"),
        ("sft", "ppo.kl_coef=0.3"),
    ],
)
def test_how_work_is_split_and_logged_is_no_input(stage: str, override: str) -> None:
    assert fingerprint(stage, override) == fingerprint(stage)


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("pretrain", "pretrain.batch.batch_size=32"),
        ("pretrain", "model.hidden_size=64"),
        ("sft", "sft.optimizer.learning_rate=1e-4"),
        ("ppo", "ppo.kl_coef=0.3"),
        ("reward", "seed=1"),
        ("reward", "engine.precision=bf16"),
    ],
)
def test_what_changes_a_result_is_an_input(stage: str, override: str) -> None:
    assert fingerprint(stage, override) != fingerprint(stage)
