"""What a comparison knows about a run's policies, from what their trainers say of themselves."""

import json
from pathlib import Path

import pytest

from evaluation.compare.stage import policies_in, scorer_in
from heed.jobs.job_file import load_job
from heed.jobs.run import Run
from training.data import Prompt

JOB = """
name = "both"
[rejection]
init_from = "{model}"
reward_from = "{model}"
prompts = {{ source = "{folder}/first.jsonl" }}
num_samples = 2
max_new_tokens = 4
seq_len = 32
batch = {{ batch_size = 2, micro_batch_size = 2 }}
optimizer = {{ learning_rate = 1e-3 }}
[ppo]
init_from = "{model}"
reward = {{ kind = "function", function = "{folder}/reward.py:score" }}
prompts = {{ source = "{folder}/second.jsonl" }}
num_iterations = 1
rollout_batch_size = 2
advantage = {{ kind = "group_mean", samples_per_prompt = 2 }}
minibatch = {{ batch_size = 2, micro_batch_size = 2 }}
max_new_tokens = 4
policy_optimizer = {{ learning_rate = 1e-3 }}
[compare]
prompts = {{ source = "{folder}/first.jsonl" }}
judge_function = "{folder}/judge.py:score"
max_new_tokens = 4
"""


def write(path: Path, numbers: range) -> None:
    path.write_text("".join(json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in numbers))


@pytest.mark.parametrize(("second", "of_ppo"), [(range(20, 30), []), (range(2, 8), ["c2", "c3", "c4", "c5"])])
def test_each_policy_says_which_prompts_its_own_stage_trained_on(
    tmp_path: Path, model_folder: Path, second: range, of_ppo: list[str]
) -> None:
    """[rejection] trained on prompts 0 to 3 of the six that are compared, [ppo] on none of them, or on 2 to 5."""
    write(tmp_path / "first.jsonl", range(4))
    write(tmp_path / "second.jsonl", second)
    for name in ("reward", "judge"):
        (tmp_path / f"{name}.py").write_text(
            "def score(prompts, responses):\n    return [1.0] * len(responses)\n" + f"# {name}\n"
        )
    (tmp_path / "job.toml").write_text(JOB.format(model=model_folder, folder=tmp_path))
    job = load_job(tmp_path / "job.toml")
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]  # no worker is asked
    prompts = [
        Prompt(prompt_id=f"c{number}", messages=({"role": "user", "content": f"Question {number}?"},), kind="")
        for number in range(6)
    ]
    initial, rejection, ppo = policies_in(run, prompts)
    assert (initial.kind, initial.title) == ("initial", "initial policy")
    assert (rejection.title, ppo.title) == ("Rejection sampling", "GRPO")
    assert dict(rejection.seen) == {"rejection": ["c0", "c1", "c2", "c3"]}
    assert dict(ppo.seen) == {"ppo": of_ppo}
    assert (rejection.raises_score, ppo.raises_score) == (False, True)
    assert scorer_in(job)[0] == "ppo"
