"""A judge from the file of the reward is described as such: it overlooks whatever the reward overlooks."""

import json
from pathlib import Path

import pytest

from evaluation.compare.report.stage import judge_sentence
from evaluation.compare.results import JudgeResults
from evaluation.compare.stage import judge_of, preflight
from evaluation.inputs import can_show
from files.hashes import file_hash
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.run import Run
from lm.model import LanguageModel, ScalarModel
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, save_model
from reward.verifiers import verifier
from tests.rows import jsonl
from training.notices import speaking_through

ALONE = '{ kind = "function", function = "FOLDER/reward.py:score" }'
SUM = (
    f'{{ kind = "sum", sources = {{ a = {ALONE}, b = {{ kind = "function", function = "FOLDER/logged.py:score" }} }},'
    " objective_weights = { a = 1.0, b = 0.0 } }"
)


def compared(tmp_path: Path, model_folder: Path, reward: str, judge: str) -> JobConfig:
    """A job that trains by `reward`, and compares by `judge`."""
    function = "def {}(prompts, responses):\n    return [1.0] * len(responses)\n"
    (tmp_path / "reward.py").write_text(function.format("score") + "\n\n" + function.format("strict"))
    (tmp_path / "judge.py").write_text(function.format("score"))
    (tmp_path / "logged.py").write_text(function.format("score") + "# another file\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    (tmp_path / "job.toml").write_text(
        f"""
        name = "judged"
        [ppo]
        init_from = "{model_folder}"
        reward = {reward.replace("FOLDER", str(tmp_path))}
        prompts = {{ source = "{tmp_path}/prompts.jsonl" }}
        num_iterations = 1
        rollout_batch_size = 2
        advantage = {{ kind = "group_mean", samples_per_prompt = 2 }}
        minibatch = {{ batch_size = 2, micro_batch_size = 2 }}
        max_new_tokens = 4
        policy_optimizer = {{ learning_rate = 1e-3 }}
        [compare]
        prompts = {{ source = "{tmp_path}/prompts.jsonl" }}
        {judge.replace("FOLDER", str(tmp_path))}
        max_new_tokens = 4
        """
    )
    return load_job(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("reward", "judge", "is_reward"),
    [
        (ALONE, "reward.py:strict", True),
        (ALONE, "judge.py:score", False),
        (SUM, "reward.py:strict", True),
        (SUM, "logged.py:score", False),  # its weight is 0
    ],
)
def test_a_judge_from_the_rewards_file_cannot_show_gaming(
    tmp_path: Path, model_folder: Path, reward: str, judge: str, is_reward: bool
) -> None:
    job = compared(tmp_path, model_folder, reward, f'judge_function = "FOLDER/{judge}"')
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]  # no worker is asked
    assert job.compare is not None
    described = judge_of(run, job.compare).describe()
    assert bool(described.get("is_reward")) == is_reward
    assert ("comes from the same file as the reward" in described["description"]) == is_reward
    results = JudgeResults("judge", described["description"], "function", is_reward)
    assert ("took no part in training" in judge_sentence(results)) != is_reward


@pytest.mark.parametrize("same", [True, False])
def test_a_reward_model_that_learned_from_dpos_labels_is_not_called_independent(
    tmp_path: Path, model_folder: Path, tokenizer: Tokenizer, same: bool
) -> None:
    row = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    for name, response in (("pairs", "So."), ("others", "Just so.")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | {"chosen": response}) + "\n")
    (tmp_path / "copy.jsonl").write_text((tmp_path / "pairs.jsonl").read_text())
    network = load(WithNewHead(model_folder, LanguageModel, ScalarModel, 0))
    (tmp_path / "reward").mkdir()
    save_model(tmp_path / "reward" / "model", network, network.state_dict(), tokenizer)
    training = """
        batch = { batch_size = 1, micro_batch_size = 1 }
        optimizer = { learning_rate = 1e-3 }
        save_every_steps = 1
        evaluate_every_steps = 1"""
    (tmp_path / "job.toml").write_text(
        f"""
        name = "judged"
        [reward]
        init_from = "{model_folder}"
        rankings = {{ source = "{tmp_path}/{"copy" if same else "others"}.jsonl" }}{training}
        [dpo]
        init_from = "{model_folder}"
        rankings = {{ source = "{tmp_path}/pairs.jsonl" }}{training}
        [compare]
        prompts = {{ source = "{tmp_path}/pairs.jsonl" }}
        judge_reward = true
        max_new_tokens = 4
        """
    )
    job = load_job(tmp_path / "job.toml")
    assert job.compare is not None
    entry = judge_of(Run(job, tmp_path, None, None).of("compare"), job.compare).describe()  # type: ignore[arg-type]
    said = judge_sentence(JudgeResults.of(entry))
    if same:
        assert said == (
            "The judge: the run's reward model; it learned from the same comparisons as DPO, so it shares their errors"
            " and is not independent."
        )
    else:
        assert said == "The judge: the run's reward model; it took no part in training."
    # The same model as another run's, which says in its lineage what it learned from, or of unknown origin.
    folder = tmp_path / "reward"
    other = load_job(
        tmp_path / "job.toml", ["reward=none", "compare.judge_reward=false", f"compare.judge_from={folder}/model"]
    )
    assert other.compare is not None
    run = Run(other, tmp_path / "other", None, None).of("compare")  # type: ignore[arg-type]
    unknown = judge_sentence(JudgeResults.of(judge_of(run, other.compare).describe()))
    assert unknown.endswith("; what it learned from is not known, so it may share the policies' errors.")
    learned_from = file_hash(tmp_path / ("pairs.jsonl" if same else "others.jsonl"))
    (folder / "lineage.json").write_text(json.dumps({"data": {"elsewhere.jsonl": learned_from}}))
    known = judge_sentence(JudgeResults.of(judge_of(run, other.compare).describe()))
    assert ("it learned from the same comparisons as DPO" in known) == same
    assert known.endswith("; it took no part in training.") != same


def test_a_judge_that_is_the_reward_model_cannot_show_gaming(
    tmp_path: Path, model_folder: Path, tokenizer: Tokenizer
) -> None:
    reward_folder = tmp_path / "reward"
    network = load(WithNewHead(model_folder, LanguageModel, ScalarModel, 0))
    save_model(reward_folder, network, network.state_dict(), tokenizer)
    job = compared(
        tmp_path, model_folder, f'{{ kind = "model", model = "{reward_folder}" }}', f'judge_from = "{reward_folder}"'
    )
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]  # no worker is asked
    assert job.compare is not None
    assert judge_of(run, job.compare).describe()["is_reward"]


def test_tests_of_the_compared_prompts_need_a_sandbox_too(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = compared(tmp_path, model_folder, '{ kind = "verifier" }', 'judge_function = "FOLDER/judge.py:score"')
    row = {"prompt": "Double it.", "tests": "assert double(2) == 4"}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")

    def refuse() -> None:
        raise ValueError("no sandbox here")

    monkeypatch.setattr(verifier, "check_sandbox", refuse)
    (tmp_path / "run").mkdir()
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]
    assert job.compare is not None
    with pytest.raises(ValueError, match="no sandbox here"):
        preflight(run, job.compare)


def test_a_comparison_says_before_it_samples_what_it_could_show(tmp_path: Path, model_folder: Path) -> None:
    """15 prompts get 8 samples each unless the job says otherwise; people and greedy policies get one."""
    job = compared(tmp_path, model_folder, ALONE, 'judge_function = "FOLDER/judge.py:score"')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(jsonl({"prompt": f"Why {number}?"} for number in range(15)))
    (tmp_path / "run").mkdir()
    run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]
    config, said = job.compare, list[str]()
    assert config is not None
    with speaking_through(said.append):
        preflight(run, config)
    assert f"{prompts}: for [compare], {can_show(15, 8)}" in said
    changes = ({}, {"num_samples": 3}, {"judge_people": "labels.sqlite"}, {"temperature": 0.0})
    assert [config.model_copy(update=change).sized(15).num_samples for change in changes] == [8, 3, 1, 1]


def test_policies_that_train_in_different_chat_templates_are_not_compared(tmp_path: Path, model_folder: Path) -> None:
    """All would be sampled in the first one's."""
    compared(tmp_path, model_folder, ALONE, 'judge_function = "FOLDER/judge.py:score"')
    path = tmp_path / "job.toml"
    path.write_text(
        path.read_text()
        + f"""
        [dpo]
        init_from = "{model_folder}"
        chat_template = "plain"
        rankings = {{ source = "{tmp_path}/rankings.jsonl" }}
        batch = {{ batch_size = 2, micro_batch_size = 2 }}
        optimizer = {{ learning_rate = 1e-3 }}
        """
    )
    (tmp_path / "run").mkdir()
    for template in ("", "plain"):
        job = load_job(path, [f'ppo.chat_template="{template}"'])
        run = Run(job, tmp_path / "run", None, None).of("compare")  # type: ignore[arg-type]
        assert job.compare is not None
        if template:
            preflight(run, job.compare)
            continue
        with pytest.raises(ValueError, match=r"^compare: \[ppo\] is trained in another chat template than \[dpo\]"):
            preflight(run, job.compare)
