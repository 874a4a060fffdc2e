"""Jobs with two conflicting objectives: one reward model with two heads, and PPO that increases the one with more
weight."""

import json
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import tomli_w

from heed.jobs.job_file import load_job
from heed.jobs.pipeline import check_data, run_job
from heed.jobs.plan import RANK, Setting, make_plan
from heed.jobs.run import Run
from heed.jobs.times import GPUS
from lm.config import ModelConfig
from lm.model import ScalarModel, init_weights
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from tests.models import load_scalar_model
from tests.rows import jsonl
from training.metrics import read_metrics

JOBS = Path(__file__).parents[3] / "configs" / "jobs"
LOUD, CALM = "loud", "calm"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text(jsonl(rows))
    return {"source": str(path)}


def job_file(tmp_path: Path, model_folder: Path) -> Path:
    """The debug job's reward model and PPO, from a language model and a file of rankings: the more e's, the louder."""
    texts = ["Here the deer see trees", "Far", "Where the bee flew", "A dog"]
    num_loud = [text.lower().count("e") for text in texts]
    ranks = {
        LOUD: [1 + sum(other > one for other in num_loud) for one in num_loud],
        CALM: [1 + sum(other < one for other in num_loud) for one in num_loud],
    }
    rows = [
        {"task_id": f"{name}{i}", "prompt": [{"role": "user", "content": f"Where is dog {i}?"}], "responses": texts,
         "ranks": ranks[name], "labeler": "ann", "objective": name}
        for name in (LOUD, CALM) for i in range(24)
    ]  # fmt: skip
    prompts = [{"prompt": f"Where is dog {i}?", "completion": "Far."} for i in range(32)]
    values = tomllib.loads((JOBS / "debug.toml").read_text())
    reward, ppo = values["reward"], values["ppo"]
    reward |= {
        "init_from": str(model_folder),
        "rankings": write_rows(tmp_path / "rankings.jsonl", rows),
        "demonstrations": [write_rows(tmp_path / "demonstrations.jsonl", prompts)],
        "objectives": [CALM, LOUD],
        "num_epochs": 4,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    fast = {"learning_rate": 2e-2, "schedule": "constant", "eps": 1e-5}
    ppo |= {
        "init_from": str(model_folder),
        "prompts": write_rows(tmp_path / "prompts.jsonl", prompts),
        "reward": {"kind": "model", "objective_weights": {LOUD: 1.0, CALM: 0.25}},
        "policy_optimizer": fast, "advantage": {"kind": "gae", "value_optimizer": fast}, "kl": {"coef": 0.01},
        "missing_eos_penalty": 0.0,
        "num_iterations": 12, "rollout_batch_size": 32, "minibatch": {"batch_size": 32, "micro_batch_size": 32},
        "save_every_iterations": 12,
    }  # fmt: skip
    del ppo["ptx"]
    kept = {key: values[key] for key in ("name", "engine")}
    (tmp_path / "job.toml").write_text(tomli_w.dumps({**kept, "reward": reward, "ppo": ppo}))
    return tmp_path / "job.toml"


def end_of(run: Path) -> dict[str, float]:
    """Returns each objective's mean score in the last three iterations of PPO."""
    lines = read_metrics(run / "ppo" / "metrics.jsonl")[-3:]
    return {name: mean(line[f"score/{name}"] for line in lines) for name in (LOUD, CALM)}


@pytest.mark.nightly
@pytest.mark.usefixtures("one_ray")
def test_the_weights_decide_which_objective_the_policy_climbs(tmp_path: Path, model_folder: Path) -> None:
    path = job_file(tmp_path, model_folder)
    run = run_job(load_job(path), tmp_path / "runs")
    louder = end_of(run)
    assert load_scalar_model(run / "reward" / "model").labels == (CALM, LOUD)
    judged = json.loads((run / "reward" / "results.json").read_text())["objectives"]
    assert [judged[name]["heldout_accuracy"]["mean"] > 0.9 for name in (LOUD, CALM)] == [True, True]
    page = (run / "report.html").read_text()
    assert "Held-out accuracy, calm" in page
    assert "Score, loud" in page
    trained = (run / "reward" / "lineage.json").read_text()
    swapped = ["ppo.reward.objective_weights.loud=0.25", "ppo.reward.objective_weights.calm=1.0"]
    calmer = end_of(run_job(load_job(path, swapped), tmp_path / "runs"))
    assert (run / "reward" / "lineage.json").read_text() == trained  # other weights need no new reward model
    assert louder[LOUD] > calmer[LOUD] + 1.0
    assert calmer[CALM] > louder[CALM] + 1.0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["ppo.reward.objective_weights={}"],
            r"\[reward\]: this reward model has the objectives calm, loud, but weights are set for none",
        ),
        (
            ["ppo.reward.objective_weights={loud=1.0}"],
            r"weights are set for loud; a weight for each of calm, loud was exp",
        ),
        (
            ["ppo.reward.objective_weights.terse=1.0"],
            r"weights are set for loud, calm, terse; a weight for each of calm, lo",
        ),
        (["ppo.reward.objective_weights.loud=nan"], r"ppo.reward.objective_weights.loud.*finite number"),
        (
            ["reward.objectives=['loud']"],
            r"this reward model has one objective, but weights are set for loud, calm; no weights",
        ),
        (
            ["reward.objectives=['loud', 'loud']"],
            r"objectives is \['loud', 'loud'\]; distinct names that are not empty",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_job(
    tmp_path: Path, model_folder: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(job_file(tmp_path, model_folder), overrides)


def test_labelers_that_judge_by_everything_teach_no_other_objective() -> None:
    overrides = ["reward.objectives=['calm', 'loud']", "ppo.reward.objective_weights={calm=1.0, loud=1.0}"]
    with pytest.raises(
        ValueError, match=r"reward.objectives is \['calm', 'loud'\], but the labelers of \[collect\] jud"
    ):
        load_job(JOBS / "debug.toml", overrides)
    load_job(JOBS / "debug.toml", ["reward.objectives=['overall']"])


def test_objectives_without_rankings_are_refused_before_anything_runs(tmp_path: Path, model_folder: Path) -> None:
    path = job_file(tmp_path, model_folder)
    job = load_job(path, ["reward.objectives=['calm', 'terse']", "ppo.reward.objective_weights={calm=1.0, terse=1.0}"])
    with pytest.raises(
        ValueError, match=r"reward.objectives is \['calm', 'terse'\], but the rankings of .* have the objectives calm"
    ):
        check_data(Run(job, tmp_path, None, None))  # type: ignore[arg-type]  # no worker is asked


def test_what_is_not_learned_is_said(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tomllib.loads(job_file(tmp_path, model_folder).read_text())
    del values["ppo"]
    (tmp_path / "job.toml").write_text(tomli_w.dumps(values))
    job = load_job(tmp_path / "job.toml", ["reward.objectives=['calm']"])
    check_data(Run(job, tmp_path, None, None))  # type: ignore[arg-type]
    assert "24 rankings have objectives that are not learned" in " ".join(capsys.readouterr().err.split())


def test_a_reward_model_from_elsewhere_is_asked_for_its_objectives(
    tmp_path: Path, model_folder: Path, tiny_config: ModelConfig, tokenizer: Tokenizer
) -> None:
    judge = ScalarModel(tiny_config, labels=("kind", "true"))
    init_weights(judge, 1)
    save_model(tmp_path / "judge", judge, judge.state_dict(), tokenizer)
    values = tomllib.loads(job_file(tmp_path, model_folder).read_text())
    del values["reward"]
    values["ppo"]["reward"]["model"] = str(tmp_path / "judge")
    (tmp_path / "job.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(
        ValueError, match=r"judge: this reward model has the objectives kind, true, but weights are set for l"
    ):
        check_data(Run(load_job(tmp_path / "job.toml"), tmp_path, None, None))  # type: ignore[arg-type]
    right = load_job(tmp_path / "job.toml", ["ppo.reward.objective_weights={kind=1.0, true=-0.5}"])
    check_data(Run(right, tmp_path, None, None))  # type: ignore[arg-type]


def test_the_plan_counts_the_heads() -> None:
    setting = Setting(GPUS["h100"], 0.4, 10_000)
    rankings = ["reward.rankings.source=rankings.jsonl", "reward.objectives=['helpful','harmless','terse']"]
    weights = ["ppo.reward.objective_weights={helpful=1.0, harmless=1.0, terse=0.1}"]
    one, three = (
        {stage.name: stage for stage in make_plan(load_job(JOBS / "debug.toml", overrides), setting).stages}
        for overrides in (rankings[:1], rankings + weights)
    )
    width = 32
    held = {name: (one[name].memory[RANK].held, three[name].memory[RANK].held) for name in ("reward", "ppo")}
    more = sum(held["reward"][1].values()) - sum(held["reward"][0].values())
    assert more == 2 * width * (4 + 8)  # the weights and two moments
    assert held["ppo"][1]["reward model"] - held["ppo"][0]["reward model"] == 2 * width * 4
