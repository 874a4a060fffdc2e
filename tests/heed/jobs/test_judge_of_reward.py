"""A judge from the file of the reward is described as such: it overlooks whatever the reward overlooks."""

import json
from pathlib import Path

import pytest

from evaluation.compare.report.stage import judge_sentence
from evaluation.compare.results import JudgeResults
from evaluation.compare.stage import judge_of
from heed.jobs.job_file import load_job
from heed.jobs.run import Run


@pytest.mark.parametrize(("judge", "is_reward"), [("reward.py:strict", True), ("judge.py:score", False)])
def test_a_judge_from_the_rewards_file_cannot_show_gaming(
    tmp_path: Path, model_folder: Path, judge: str, is_reward: bool
) -> None:
    function = "def {}(prompts, responses):\n    return [1.0] * len(responses)\n"
    (tmp_path / "reward.py").write_text(function.format("score") + "\n\n" + function.format("strict"))
    (tmp_path / "judge.py").write_text(function.format("score"))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    (tmp_path / "job.toml").write_text(
        f"""
        name = "judged"
        [ppo]
        init_from = "{model_folder}"
        reward = {{ kind = "function", function = "{tmp_path}/reward.py:score" }}
        prompts = {{ source = "{tmp_path}/prompts.jsonl" }}
        num_iterations = 1
        rollout_batch_size = 2
        advantage = {{ kind = "group_mean", samples_per_prompt = 2 }}
        minibatch = {{ batch_size = 2, micro_batch_size = 2 }}
        max_new_tokens = 4
        policy_optimizer = {{ learning_rate = 1e-3 }}
        [compare]
        prompts = {{ source = "{tmp_path}/prompts.jsonl" }}
        judge_function = "{tmp_path}/{judge}"
        max_new_tokens = 4
        """
    )
    job = load_job(tmp_path / "job.toml")
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]  # no worker is asked
    assert job.compare is not None
    described = judge_of(run, job.compare).describe()
    assert bool(described.get("is_reward")) == is_reward
    assert ("comes from the same file as the reward" in described["description"]) == is_reward
    results = JudgeResults("judge", described["description"], "function", is_reward)
    assert ("took no part in training" in judge_sentence(results)) != is_reward
