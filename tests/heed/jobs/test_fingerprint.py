"""What a stage's fingerprint depends on, and what it does not."""

from pathlib import Path
from typing import cast

import pytest
import tomli_w

from heed.jobs.job_file import load_job
from heed.jobs.run import Run, inputs_of, what_changed
from stages.world import World

DEBUG = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"


def fingerprint(stage_name: str, *overrides: str) -> str:
    job = load_job(DEBUG, overrides)
    run = Run(job, Path("nowhere"), cast(World, None), lambda: pytest.fail("no workers are needed"))
    return inputs_of(run, job.registry[stage_name]).fingerprint


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
        ("sft", "ppo.kl.coef=0.3"),
    ],
)
def test_how_work_is_split_and_logged_is_no_input(stage: str, override: str) -> None:
    assert fingerprint(stage, override) == fingerprint(stage)


def test_how_long_a_server_is_waited_for_is_no_input() -> None:
    user = "kind='user', url='http://127.0.0.1:9/v1', model='m'"
    start, patient, other = (
        fingerprint("ppo", f"ppo.environment={{{user}, {key}}}")
        for key in ("max_wait_seconds=600", "max_wait_seconds=60", "max_turns=2")
    )
    assert start == patient != other


@pytest.mark.parametrize(
    ("stage", "override"),
    [
        ("pretrain", "pretrain.batch.batch_size=32"),
        ("pretrain", "model.hidden_size=64"),
        ("sft", "sft.optimizer.learning_rate=1e-4"),
        ("ppo", "ppo.kl.coef=0.3"),
        ("reward", "seed=1"),
        ("reward", "engine.precision=bf16"),
    ],
)
def test_what_changes_a_result_is_an_input(stage: str, override: str) -> None:
    assert fingerprint(stage, override) != fingerprint(stage)


def test_what_changed_is_named(tmp_path: Path) -> None:
    job = load_job(DEBUG)
    run = Run(job, Path("nowhere"), cast(World, None), lambda: pytest.fail("no workers are needed"))
    inputs = inputs_of(run, job.registry["ppo"])
    assert what_changed(tmp_path, inputs) == "changed"  # nothing says what it was made with
    before = {
        "seed": inputs.seed,
        **inputs.config,
        "ppo": {**inputs.config["ppo"], "kl": {**inputs.config["ppo"]["kl"], "coef": 0.7}, "gone": 1},
    }
    (tmp_path / "config.toml").write_text(tomli_w.dumps(before))
    assert what_changed(tmp_path, inputs) == "changed: ppo.gone, ppo.kl.coef"
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"seed": inputs.seed, **inputs.config}))
    assert what_changed(tmp_path, inputs) == "its data or an earlier stage changed"
