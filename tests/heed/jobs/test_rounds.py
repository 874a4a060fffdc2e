"""A job of several rounds: its stages, what each reads, and a run of two that is resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.stage import _title as start_title
from files.hashes import derive_seed
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.run import Run
from heed.jobs.times import GPUS
from ppo.stage import was_measured
from preferences.store import LabelStore

JOBS = Path(__file__).parents[3] / "configs" / "jobs"
DPO, PPO, REJECTION = JOBS / "dpo.toml", JOBS / "demo.toml", JOBS / "rejection.toml"
TWO_ROUNDS = """
base = "{base}"
name = "rounds"
rounds = 2
without = ["dpo", "compare.best_of"]
[world]
num_collect_prompts = 30
num_compare_prompts = 5
[pretrain]
num_steps = 4
[sft]
num_epochs = 0.3
[ppo]
num_iterations = 2
"""


def job_file(folder: Path, text: str, **values: Any) -> Path:
    path = folder / "job.toml"
    path.write_text(text.format(**values), encoding="utf-8")
    return path


def test_a_later_round_reads_the_policy_before_it_and_its_own_samples() -> None:
    job = load_job(DPO, ["rounds=3"])
    assert job.stage_names == (
        "pretrain",
        "sft",
        "collect",
        "dpo",
        "collect_2",
        "dpo_2",
        "collect_3",
        "dpo_3",
        "compare",
    )
    assert job.parents("collect_2") == ("dpo",)
    assert job.parents("dpo_2") == ("dpo", "collect_2")
    assert job.parents("dpo_3") == ("dpo_2", "collect_3")
    assert job.parents("compare") == ("pretrain", "sft", "dpo", "dpo_2", "dpo_3")
    first, later = (job.section_of(job.stage(name)) for name in ("dpo", "dpo_3"))
    assert later.rankings.source == "collect_3:rankings"
    assert later.model_copy(update={"rankings": first.rankings}) == first
    fewer = load_job(DPO, ["rounds=2"])  # whose stages are not run again with one more
    assert fewer.section_of(fewer.stage("dpo_2")) == job.section_of(job.stage("dpo_2"))
    assert fewer.parents("dpo_2") == job.parents("dpo_2")
    assert load_job(DPO).stage_names == ("pretrain", "sft", "collect", "dpo", "compare")
    planned = {stage.name: stage for stage in make_plan(job, Setting(GPUS["h100"], 0.4, 1000)).stages}
    assert planned["dpo_3"].memory == planned["dpo"].memory
    run = Run(job, Path("run"), None, None)
    assert run.of("dpo_3").start("sft") == Path("run/dpo_2/model")
    assert run.of("dpo_3").parents == ("sft", "collect")
    seeds = [run.of(name).seed for name in ("dpo", "collect_2", "dpo_2", "dpo_3", "compare")]
    assert seeds == [0, derive_seed(0, "round", 2), derive_seed(0, "round", 2), derive_seed(0, "round", 3), 0]


def test_the_reward_model_is_refitted_where_the_policy_learns_from_it() -> None:
    job = load_job(PPO, ["rounds=2"])
    assert job.stage_names[4:] == ("ppo", "collect_2", "reward_2", "ppo_2", "compare")
    assert job.parents("reward_2") == ("ppo", "collect_2")
    assert job.parents("ppo_2") == ("pretrain", "ppo", "reward_2")
    assert job.extra_ranks == load_job(PPO).extra_ranks
    run = Run(job, Path("run"), None, None)
    assert was_measured(run.of("ppo_2"))  # by reward_2, on the samples of ppo that collect_2 has collected
    assert run.of("ppo_2").start("reward") == Path("run/reward_2/model")
    titles = [start_title(run.of("compare").job, name) for name in ("ppo", "ppo_2")]
    assert titles == ["PPO, round 1", "PPO, round 2"]
    kept = load_job(REJECTION, ["rounds=2", "reward.init_from=body"], opens_models=False)
    assert kept.section_of(kept.stage("reward_2")).init_from == "body"


def test_a_policy_from_elsewhere_is_where_the_first_round_starts(tmp_path: Path) -> None:
    text = """
    base = "{base}"
    name = "raft"
    rounds = 2
    without = ["pretrain", "sft", "collect", "reward"]
    rejection = {{ init_from = "start", reward_from = "judge", end_token = "</s>" }}
    """
    job = load_job(job_file(tmp_path, text, base=REJECTION), opens_models=False)
    first, second = (job.section_of(job.stage(name)) for name in ("rejection", "rejection_2"))
    assert (first.init_from, first.reward_from, first.end_token) == ("start", "judge", "</s>")
    assert (second.init_from, second.reward_from, second.end_token) == ("", "judge", "")
    assert job.parents("rejection_2") == ("rejection",)


@pytest.mark.parametrize(
    ("base", "overrides", "said"),
    [
        (DPO, ["rounds=0"], "rounds is 0|rounds: at least 1 was expected, not 0"),
        (
            JOBS / "debug.toml",
            ["rounds=2"],
            r"rounds = 2: one stage that trains a policy was expected; .*\[dpo\], \[ppo\]",
        ),
        (
            DPO,
            ["rounds=2", "dpo.rankings.source=mine.jsonl"],
            "rounds = 2: no stage samples the policy of the round before",
        ),
    ],
    ids=["none", "two-policies", "no-samples"],
)
def test_rounds_that_could_not_learn_are_refused(base: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_job(base, overrides)


@pytest.mark.nightly
@pytest.mark.usefixtures("one_ray")
def test_two_rounds_are_run_recorded_shown_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job(job_file(tmp_path, TWO_ROUNDS, base=JOBS / "debug.toml"))
    run = run_job(job, tmp_path / "runs")
    lineage = {name: read(run / name / "lineage.json") for name in job.stage_names}
    assert set(lineage["ppo_2"]["parents"]) == {"pretrain", "ppo", "reward_2"}
    assert lineage["ppo_2"]["parents"]["ppo"] == lineage["ppo"]["outputs"] != lineage["ppo_2"]["outputs"]
    with LabelStore(run / "labels.sqlite") as store:
        sources = [{task.task.sources for task in store.tasks(batch)} for batch in store.batches()]
        labelers = [{ranking.labeler for ranking in store.rankings(batch)} for batch in store.batches()]
    assert sorted(next(iter(found))[0] for found in sources) == ["ppo", "sft"]
    assert labelers[0] == labelers[1]
    policies = read(run / "compare" / "results.json")["policies"]
    assert {"sft", "ppo", "ppo_2"} < set(policies)
    report = read(run / "report.json")
    assert report["ppo_2"]["score_scale_mean"] == report["reward_2"]["sample_score_mean"]
    assert report["reward_2"]["sample_score_mean"] != report["reward"]["sample_score_mean"]
    assert report["lineage"]["ppo_2"] == lineage["ppo_2"]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "PPO, round 2" in page
    assert "Collecting preferences, round 2" in page

    # As after a kill in the second round, one iteration past its first checkpoint.
    expected = (run / "ppo_2/model/model.safetensors").read_bytes()
    for folder in ("compare", "ppo_2/model", "ppo_2/model_ema"):
        shutil.rmtree(run / folder)
    for file in ("lineage.json", "results.json"):
        (run / "ppo_2" / file).unlink()
    for checkpoint in sorted((run / "ppo_2" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(checkpoint)
    capsys.readouterr()
    run_job(job, tmp_path / "runs")
    said = capsys.readouterr().err
    skipped = ", ".join(job.stage_names[: job.stage_names.index("ppo_2")])
    assert f"\n{skipped}: unchanged, skipped\n" in said
    assert "ppo_2: resumes from" in said
    assert (run / "ppo_2/model/model.safetensors").read_bytes() == expected
    assert read(run / "compare" / "results.json")["policies"] == policies


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
