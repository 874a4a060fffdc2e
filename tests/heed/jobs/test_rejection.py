"""The shipped job of rejection sampling: its plan, and what is refused. test_kill.py runs and kills one."""

from pathlib import Path

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, make_plan
from stages.planning.hardware import GPUS

SHIPPED = Path(__file__).parents[3] / "configs" / "jobs" / "rejection.toml"


def test_both_halves_are_planned_and_unusable_settings_refused() -> None:
    setting = Setting(GPUS["h100"], 0.4, 1000)
    (planned,) = (stage for stage in make_plan(load_job(SHIPPED), setting).stages if stage.name == "rejection")
    assert planned.batch["responses per prompt"] == 8
    assert set(planned.memory) == {"rank that samples", "rank that trains"}
    assert planned.num_steps > 1
    assert planned.seconds > 0
    assert "at most" in " ".join(planned.assumptions)
    for overrides, said in (
        (["rejection.seq_len=4096"], r"rejection.seq_len does not fit model.max_position_embeddings = 128"),
        (["rejection.reward_from=x"], r"rejection.reward_from and \[reward\] are both set"),
        (["rejection.init_from=y"], r"rejection.init_from and \[sft\] are both set; only one"),
        (["rejection.objective_weights.calm=1"], "this reward model has one objective, but weights are set for calm"),
    ):
        with pytest.raises(ValueError, match=said):
            load_job(SHIPPED, overrides)
