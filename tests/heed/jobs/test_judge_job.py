"""The jobs of a judge: one trains it, another trains a policy against it; what a job with a judge refuses."""

import json
import shutil
from pathlib import Path

import pytest

from evaluation.compare.judges import BY_RUBRIC, Asking, Judging, open_judges
from evaluation.judges.judge import pairs_of
from evaluation.verdicts import Response
from heed.jobs.job_file import load_job, open_world
from heed.jobs.pipeline import run_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.submission import named_paths
from heed.jobs.times import GPUS
from heed.worlds.gold import gold_score
from lm.config import ModelConfig
from lm.tokenizer import Tokenizer
from ppo.stage import STAGE as PPO
from preferences.store import LabelStore
from tests.grading import write_judge
from tests.heed.jobs.test_external_reward import JOBS, SMALL
from training.data import Prompt
from training.metrics import read_metrics


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, tiny_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge") / "model", tiny_config, tokenizer, seed=3)


@pytest.fixture
def trained_judge(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    """The judge of grader.toml at a small size."""
    small = [change for change in SMALL if not change.startswith("ppo.")]
    quick = ("sft.batch.batch_size=8", "sft.batch.micro_batch_size=8", "sft.optimizer.learning_rate=6e-3")
    job = load_job(JOBS / "grader.toml", [*small, "world.num_graded=1500", *quick])
    return run_job(job, tmp_path_factory.mktemp("grader")) / "sft" / "model"


def changes_for(judge: Path) -> list[str]:
    return [*SMALL, f"ppo.reward.model={judge}"]


@pytest.mark.long
def test_the_example_job_trains_against_the_judge(trained_judge: Path, tmp_path: Path) -> None:
    run = run_job(load_job(JOBS / "judge.toml", changes_for(trained_judge)), tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert len(metrics) == 2
    for line in metrics:
        assert line["failed_scores"] == 0
        assert {"score/form", "score/fit", "score/asked"} <= line.keys()
        assert line["judge_minus_gold"] == pytest.approx(line["score"] - line["gold"])
    samples = read_metrics(run / "ppo" / "samples.jsonl")
    golds = [gold_score(one["messages"][-1]["content"], one["response"]) for one in samples]
    assert all(0 <= gold <= 1 for gold in golds)
    page = (run / "report.html").read_text()
    assert "Judge minus gold" in page
    assert "Score, asked" in page
    lineage = json.loads((run / "ppo" / "lineage.json").read_text())
    assert str(trained_judge) in lineage["data"]  # another judge means another stage


def test_a_plan_counts_the_judge(judge: Path) -> None:
    plans = [
        make_plan(
            load_job(JOBS / "judge.toml", [*SMALL, f"ppo.reward.model={model}"]), Setting(GPUS["h100"], 0.4, 1000)
        )
        for model in (judge, "http://127.0.0.1:9/v1#grader")
    ]
    local, remote = (plan.stages[-1] for plan in plans)
    held = {part: size for part, size in local.memory["rank"].held.items() if part not in remote.memory["rank"].held}
    file = (judge / "model.safetensors").read_bytes()
    num_bytes = len(file) - 8 - int.from_bytes(file[:8], "little")  # after the header
    assert held == {"judge 1": num_bytes // 2}  # bf16 on a GPU, saved in fp32
    assert local.seconds_per_step > remote.seconds_per_step


def test_what_a_judge_lacks_is_said_before_anything_runs(judge: Path, tmp_path: Path) -> None:
    job = load_job(JOBS / "judge.toml", [*changes_for(judge), "ppo.reward.rubric.grades=[9, 10]"])
    with pytest.raises(ValueError, match=r"the judge .*: criteria\.form: this judge's vocabulary has no token for"):
        run_job(job, tmp_path / "runs")
    with pytest.raises(ValueError, match=r"ppo\.reward\.model: .*none: no such folder"):
        run_job(load_job(JOBS / "judge.toml", changes_for(tmp_path / "none")), tmp_path / "runs")
    (tmp_path / "rubric.toml").write_text("[criteria.a]\ntxt = 'x'\n")
    problems = r"line 1: criteria\.a\.text: missing; line 2: criteria\.a\.txt: unknown key"
    with pytest.raises(ValueError, match=rf"ppo\.reward\.rubric: .*rubric\.toml: {problems}"):
        load_job(JOBS / "judge.toml", [*changes_for(judge), f"ppo.reward.rubric={tmp_path}/rubric.toml"])


def test_a_judge_behind_an_endpoint_is_no_folder(judge: Path) -> None:
    """Neither `heed submit` nor the lineage looks for it on the disk."""
    job = load_job(JOBS / "judge.toml", [*SMALL, "ppo.reward.model=http://127.0.0.1:9/v1#grader"])
    assert not [field for field, _ in named_paths(job) if field.startswith("ppo.reward")]
    section = job.section(PPO)
    assert section is not None
    assert PPO.models_in(section) == []
    local = load_job(JOBS / "judge.toml", changes_for(judge))
    assert dict(named_paths(local))["ppo.reward.model"] == str(judge)


def test_heed_judge_compares_by_the_same_rubric(judge: Path, tmp_path: Path) -> None:
    """`--rubric` makes a language model's directory a judge of comparisons, with the scores that PPO trains on."""
    path = tmp_path / "rubric.toml"
    path.write_text('template = "$prompt\\n$response\\n$criterion"\n[criteria.asked]\ntext = "answer"\n')
    asking = Asking(tmp_path / "answers.sqlite", 1, 5.0, 0, 0.5)
    asked = {"role": "user", "content": "Name two animals and begin with cat."}
    prompts = [Prompt(prompt_id="a", messages=(asked,), kind="list")]
    judging = Judging(asking, None, 16, "batch", 1, 0, open_world, path, open_labels=LabelStore)
    (opened,) = open_judges([f"mine={judge}"], judging, prompts, 2)
    texts = {"one": "1. cat\n2. dog", "two": "It is"}
    pairs = pairs_of(prompts, {name: [Response(name, "a", 0, text)] for name, text in texts.items()})
    (verdict,) = opened.judge(pairs, lambda _done, _total: None)
    section = load_job(JOBS / "judge.toml", [*changes_for(judge), f"ppo.reward.rubric={path}", "ppo.reward.dropout=0"])
    reward = section.ppo.external_reward  # type: ignore[union-attr]
    assert reward is not None
    expected = [one.score for one in reward.score([prompts[0].messages] * 2, list(texts.values()))]
    assert (verdict.score_a, verdict.score_b) == pytest.approx(tuple(expected))
    assert verdict.preference_a == float(expected[0] > expected[1])
    assert opened.describe()["kind"] == BY_RUBRIC
    with pytest.raises(ValueError, match=r"--rubric .*: no judge is a language model"):
        open_judges(["gold:playground"], judging, prompts, 2)
    shutil.rmtree(tmp_path)
