"""The shipped job of rejection sampling: its plan, and what is refused. test_kill.py runs and kills one."""

import shutil
from pathlib import Path

import pytest

from heed.jobs.job_file import load_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from heed.jobs.times import GPUS
from lm.tokenizer import CHAT_TEMPLATES
from sft.rejection import STAGE, load_tokenizer

SHIPPED = Path(__file__).parents[3] / "configs" / "jobs" / "rejection.toml"


def test_a_model_without_a_template_gets_the_jobs(tmp_path: Path, model_folder: Path) -> None:
    """Prompts are sampled in it, and it goes into the trained model."""
    model = shutil.copytree(model_folder, tmp_path / "published")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATES["continuation"])
    path = tmp_path / "job.toml"
    path.write_text(
        f'name = "r"\n[rejection]\ninit_from = "{model}"\nreward_from = "{model}"\nprompts = {{ source = "p.jsonl" }}\n'
        'seq_len = 64\nmax_new_tokens = 8\nchat_template = "chat"\nbatch = { batch_size = 2, micro_batch_size = 2 }\n'
        "optimizer = { learning_rate = 1e-3 }\n"
    )
    job = load_job(path)
    run = Run(job, tmp_path / "run", None, Workers((1,), tmp_path, job.cluster)).of("rejection")
    config = job.section_of(STAGE)
    assert load_tokenizer(run, config).chat_template == CHAT_TEMPLATES["chat"]
    own = load_tokenizer(run, config.model_copy(update={"chat_template": ""}))
    assert own.chat_template == CHAT_TEMPLATES["continuation"]


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
