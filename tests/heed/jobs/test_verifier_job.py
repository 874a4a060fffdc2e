"""Jobs whose reward is a verifier or a sum: they run, score by the prompts' rows, and refuse rows that say nothing."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluation.compare.stage import start_of
from heed.jobs import recovery
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.jobs.run import Run
from heed.jobs.submission import named_paths
from heed.worlds.instructions import ListRequest, checks_of
from lm.tokenizer import CHAT_TEMPLATES, Tokenizer
from ppo.stage import preflight
from reward.verifiers import sandbox, verifier
from reward.verifiers.verifier import Verifier
from tests.heed.jobs.test_external_reward import JOBS, SMALL, ppo_job
from tests.rows import jsonl
from training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_ray")


def job_with(tmp_path: Path, model: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    path = ppo_job(tmp_path, model, **changes)
    (tmp_path / "prompts.jsonl").write_text(jsonl(rows))
    return path


def test_a_list_passes_its_own_checks_and_no_other_list_does() -> None:
    short = ListRequest(2, "animals", ("cat", "dog"), "")
    reward, row = Verifier(), {"checks": checks_of(short)}
    texts = [
        "1. cow\n2. horse",
        "1. cow",
        "1. cow\n2. horse\n3. bird",
        "1. cat\n2. horse",
        "1. cow\n2. red",
        "1. cow\n2. cow",
    ]
    assert [one.score for one in reward.score([()] * 6, texts, [row] * 6)] == [1, 0, 0, 0, 0, 0]
    begun = {"checks": checks_of(ListRequest(2, "animals", (), "cat"))}
    assert [one.score for one in reward.score([()] * 2, ["1. cat\n2. cow", "1. cow\n2. cat"], [begun] * 2)] == [1, 0]


@pytest.mark.long
def test_the_example_job_runs_and_scores_by_its_rows(tmp_path: Path) -> None:
    """So small a policy writes no list: the verifier scores all 0, and a function of the rows is added to it."""
    (tmp_path / "rewards.py").write_text(
        "def vowels(prompts, responses, rows):\n"
        "    assert all(prompt[-1]['content'] == row['messages'][0]['content'] for prompt, row in zip(prompts, rows))\n"
        "    return [sum(text.count(v) for v in 'aeiou') for text in responses]\n"
    )
    vowels = f"{{kind='function', function='{tmp_path}/rewards.py:vowels'}}"
    sources = f"{{vowels={vowels}, right={{kind='verifier'}}}}"
    reward = f"{{kind='sum', objective_weights={{vowels=0.5, right=1.0}}, sources={sources}}}"
    small = [*SMALL, "ppo.minibatch.batch_size=32", "ppo.minibatch.micro_batch_size=32"]
    job = load_job(JOBS / "verifier.toml", [*small, "world.num_verified_prompts=40", f"ppo.reward={reward}"])
    run = run_job(job, tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert [(line["failed/vowels"], line["failed/right"], line["score/right"]) for line in metrics] == [(0, 0, 0)] * 2
    assert all(line["score"] == pytest.approx(0.5 * line["score/vowels"]) for line in metrics)
    samples = read_metrics(run / "ppo" / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["score"] == 0.5 * sum(sample["response"].count(vowel) for vowel in "aeiou")
    lineage = json.loads((run / "ppo" / "lineage.json").read_text())
    assert f"{tmp_path}/rewards.py:vowels" in lineage["data"]  # another function means another stage


@pytest.mark.long
def test_the_example_of_mixed_prompts_runs_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """A function that the test can predict stands for the world's judge. The policies are compared on its prompts."""
    (tmp_path / "mine.py").write_text("def vowels(prompts, responses):\n    return [len(text) for text in responses]\n")
    small = [
        *SMALL, "ppo.minibatch.batch_size=32", "ppo.minibatch.micro_batch_size=32", "world.num_verified_prompts=40",
        "ppo.rollout_batch_size=64", "ppo.save_every_iterations=1", "world.num_compare_prompts=8",
        f"ppo.reward.sources.gold.function={tmp_path}/mine.py:vowels",
        "compare={prompts={source='world:compare_prompts'}, max_new_tokens=8, best_of=2, judge_reward=true}",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"compare_prompts\.jsonl: line 1: found .*; a field 'answer', 'checks' or"):
        run_job(load_job(JOBS / "mixture.toml", small), tmp_path / "runs")
    with pytest.raises(ValueError, match=r"compare\.scored_by has 'god'; some of right, gold were expected"):
        load_job(JOBS / "mixture.toml", [*small, "compare.scored_by=['god']"])
    job = load_job(JOBS / "mixture.toml", [*small, "compare.scored_by=['gold']"])
    run = run_job(job, tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert [(line["source_share/lists"], line["source_share/questions"]) for line in metrics] == [(0.25, 0.75)] * 2
    for line in metrics:
        assert (line["failed/gold"], line["failed/right"], line["failed_scores"]) == (0, 0, 0)
        assert line["source_score/lists"] == line["score/right"]
        assert line["source_score/questions"] == pytest.approx(line["score/gold"])
        assert line["score"] == pytest.approx(0.25 * line["score/right"] + 0.75 * line["score/gold"])
    samples = read_metrics(run / "ppo" / "samples.jsonl")
    assert {sample["prompt_id"].partition("/")[0] for sample in samples} == {"lists", "questions"}
    followed = {sample["prompt_id"] for sample in samples if sample["kind"] == "followed"}
    assert sum(name.startswith("lists/") for name in followed) == len(followed) / 4 == 2
    assert json.loads((run / "ppo" / "results.json").read_text())["num_prompts"] == {"lists": 40, "questions": 32}
    report = (run / "report.html").read_text()
    assert "Sources of prompts" in report
    assert "Score, questions" in report
    rollouts = (run / "ppo" / "rollouts.jsonl").read_text()
    (run / "ppo" / "lineage.json").unlink()
    shutil.rmtree(sorted((run / "ppo" / "checkpoints").glob("*2"))[-1])
    run_job(job, tmp_path / "runs")  # from the first iteration on
    assert (run / "ppo" / "rollouts.jsonl").read_text() == rollouts


@pytest.mark.long
def test_the_example_of_an_environment_runs_on_workers(tmp_path: Path) -> None:
    """Its policy, which has learned to call the calculator, gets results. A verifier scores the last turn."""
    steps = ["sft.num_epochs=20", "sft.optimizer.learning_rate=1e-2", "pretrain.num_steps=4"]
    job = load_job(JOBS / "environment.toml", [*steps, "ppo.num_iterations=2"])
    run = run_job(job, tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(0 <= line["score"] <= 1 and line["failed_scores"] == 0 for line in metrics)
    assert max(line["turns"] for line in metrics) > 1
    samples = read_metrics(run / "ppo" / "samples.jsonl")
    assert any("\n[environment] " in sample["response"] for sample in samples)
    assert "environment" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("reward", "score"),
    [
        ({"kind": "verifier"}, 0.0),
        pytest.param({"kind": "function", "function": "FILE:never"}, 3.0, marks=pytest.mark.nightly),
        pytest.param(
            {
                "kind": "sum",
                "sources": {"right": {"kind": "verifier"}},
                "objective_weights": {"right": 1.0},
            },
            0.0,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_first_policy_whose_responses_all_score_the_same_may_learn(
    tmp_path: Path, model_folder: Path, reward: dict[str, Any], score: float
) -> None:
    (tmp_path / "mine.py").write_text("def never(prompts, responses):\n    return [3.0] * len(responses)\n")
    reward = {name: f"{tmp_path}/mine.py:never" if name == "function" else value for name, value in reward.items()}
    rows = [{"prompt": "How many?", "answer": 98_765_432 + n} for n in range(16)]
    run = run_job(load_job(job_with(tmp_path, model_folder, rows, reward=reward)), tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert {line["score"] for line in metrics} == {score}
    if reward["kind"] != "function":  # so small a policy writes hardly any number
        num_unclear = sum(line["failures/unclear"] for line in metrics)
        assert num_unclear > 0
        report = (run / "report.html").read_text()
        assert "Responses without a clear number or choice" in report
        assert f"{num_unclear:.0f}" in report
        assert "Unclear answers" in report
        assert "score of the verifier" in report or reward["kind"] == "sum"
    results = json.loads((run / "ppo" / "results.json").read_text())
    assert (results["score_scale_mean"], results["score_scale_std"]) == (score, 1.0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Where?"}, r"a field 'answer', 'checks' or 'tests' was expected, which says what to verify"),
        ({"prompt": "Where?", "answer": "nowhere"}, r"field 'answer': no number in 'nowhere'"),
        ({"prompt": "Where?", "tests": "assert"}, r"field 'tests\[0\]' is not Python"),
    ],
)
def test_every_row_is_checked_before_the_run(
    tmp_path: Path, model_folder: Path, row: dict[str, Any], words: str
) -> None:
    rows = [{"prompt": f"Is it {n}?", "answer": n} for n in range(15)]
    path = job_with(tmp_path, model_folder, [*rows, row], reward={"kind": "verifier"})
    with pytest.raises(ValueError, match=rf"prompts\.jsonl: line 16: .*{words}"):
        run_job(load_job(path), tmp_path / "runs")
    with pytest.raises(
        ValueError, match=rf"prompts\.jsonl: line 16: .*{words}"
    ):  # nothing of the first attempt is kept
        run_job(load_job(path), tmp_path / "runs")


def test_the_quick_start_of_the_documentation_runs(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows and job, with a tiny model that writes short responses."""
    page = (JOBS.parents[1] / "docs" / "verifiers.md").read_text()
    section = page.partition("### A quick start with a published model\n")[2].partition("\n### ")[0]
    (rows, job) = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("json", "toml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math.jsonl").write_text(rows)
    (tmp_path / "math.toml").write_text(job)
    small = [f"ppo.init_from={model_folder}", "ppo.max_new_tokens=8", "ppo.on_overlong=truncate", "ppo.lora.rank=2"]
    run = run_job(load_job(tmp_path / "math.toml", [*small, "engine.precision=fp32"]), tmp_path / "runs")
    metrics = read_metrics(run / "ppo" / "metrics.jsonl")
    assert [line["failed_scores"] for line in metrics] == [0, 0]
    assert all(0 <= line["score"] <= 1 for line in metrics)


def test_a_model_without_a_template_for_tools_is_named_with_what_to_do(tmp_path: Path, model_folder: Path) -> None:
    """Its own template writes only texts, and so does another that the job names."""
    model = shutil.copytree(model_folder, tmp_path / "published")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATES["continuation"])
    rows = [{"prompt": f"What is {n} plus 1?", "answer": n + 1} for n in range(16)]
    path = job_with(
        tmp_path, model, rows, reward={"kind": "verifier"}, environment={"kind": "calculator"}, max_new_tokens=8
    )
    with pytest.raises(ValueError, match=r"prompts\.jsonl: line 1: chat_template leaves out tools\[0\];") as caught:
        run_job(load_job(path), tmp_path / "runs")
    assert f"[ppo] uses the template of ppo.init_from, which is in {model}. Start from a model" in str(caught.value)
    assert 'or set ppo.chat_template, such as to "chat"' in str(caught.value)
    with pytest.raises(ValueError, match=r"leaves out tools\[0\];.*\[ppo\] uses the template ppo\.chat_template$"):
        run_job(load_job(path, ["ppo.chat_template=plain"]), tmp_path / "runs")


def test_a_conversation_is_not_scored_by_a_reward_model_of_another_template(tmp_path: Path, model_folder: Path) -> None:
    """Such a model reads texts, and a conversation with an environment is not one."""
    rows = [{"prompt": f"What is {n} plus 1?"} for n in range(16)]
    own = {"reward": {"kind": "model"}, "environment": {"kind": "calculator"}, "max_new_tokens": 8}
    path = job_with(tmp_path, model_folder, rows, chat_template="chat", **own)
    path.write_text(
        path.read_text()
        + f"""
        [reward]
        init_from = "{model_folder}"
        chat_template = "plain"
        rankings = {{ source = "{tmp_path}/rankings.jsonl" }}
        batch = {{ batch_size = 2, micro_batch_size = 2 }}
        optimizer = {{ learning_rate = 1e-3 }}
        """
    )
    job = load_job(path)
    run = Run(job, tmp_path / "run", None, None).of("ppo")  # type: ignore[arg-type]  # no worker is asked
    assert job.ppo is not None
    with pytest.raises(ValueError, match=r"^ppo.environment: the tokenizer or chat template of \[reward\] differs"):
        preflight(run, job.ppo)


def test_the_template_of_the_job_goes_into_the_policy_and_the_comparison(tmp_path: Path, model_folder: Path) -> None:
    """Its prompts come from two files, of which one has a prompt that is too long."""
    model = shutil.copytree(model_folder, tmp_path / "published")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATES["continuation"])
    (tmp_path / "mine.py").write_text("def length(prompts, responses):\n    return [len(text) for text in responses]\n")
    reward = {"kind": "function", "function": f"{tmp_path}/mine.py:length"}
    (tmp_path / "long.csv").write_text(f"prompt\nWhy?\n{'~' * 400}\n")
    files = [{"source": f"{tmp_path}/prompts.jsonl"}, {"source": f"{tmp_path}/long.csv"}]
    path = ppo_job(tmp_path, model, max_new_tokens=8, chat_template="chat", reward=reward, prompts=files)
    with pytest.raises(ValueError, match=r"long\.csv: line 3: prompt '1' has \d+ tokens; at most 88 leave room"):
        run_job(load_job(path), tmp_path / "runs")
    run = run_job(load_job(path, ["ppo.on_overlong=skip"]), tmp_path / "runs")
    results = json.loads((run / "ppo" / "results.json").read_text())
    assert results["num_prompts"] == {"prompts": 16, "long": 1}
    assert results["overlong_by_source"] == {"long": {"num_rows": 2, "num_truncated": 0, "num_skipped": 1}}
    assert "Prompts read, long" in (run / "report.html").read_text()
    trained = Tokenizer.load(run / "ppo" / "model")
    assert trained.chat_template == CHAT_TEMPLATES["chat"] != Tokenizer.load(model).chat_template
    (tmp_path / "compare.toml").write_text(
        f'base = "job.toml"\nname = "debug"\n[compare]\njudge_reward = true\nmax_new_tokens = 8\n'
        f'prompts = {{ source = "{tmp_path}/prompts.jsonl" }}\n'
    )
    job = load_job(tmp_path / "compare.toml")
    start = start_of(Run(job, run, None, recovery.Workers((1,), run, job.cluster)).of("compare"))
    assert (start.tokenizer, start.chat_template) == (trained, "chat")


def test_a_machine_without_a_sandbox_refuses_a_job_with_tests(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SCRIPT", Path("/nowhere/sandboxed.py"))
    monkeypatch.setattr(verifier, "check_sandbox", sandbox.check_sandbox.__wrapped__)
    rows = [{"prompt": f"double({n})?", "tests": f"assert double({n}) == {2 * n}"} for n in range(16)]
    path = job_with(tmp_path, model_folder, rows, reward={"kind": "verifier"})
    with pytest.raises(ValueError, match="unit tests of code: in the sandbox code cannot run; Linux on x86_64"):
        run_job(load_job(path), tmp_path / "runs")


def test_a_function_of_a_source_is_loaded_before_the_run_and_shipped(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompts, responses):\n    return [0.0] * len(responses)\n")
    sources = {"mine": {"kind": "function", "function": f"{tmp_path}/mine.py:score"}}
    reward = {"kind": "sum", "sources": sources, "objective_weights": {"mine": 1.0}}
    path = job_with(tmp_path, model_folder, [{"prompt": "?"}] * 16, reward=reward)
    assert dict(named_paths(load_job(path)))["ppo.reward.sources.mine.function"] == f"{tmp_path}/mine.py"
    other = load_job(path, [f"ppo.reward.sources.mine.function={tmp_path}/mine.py:other"])
    with pytest.raises(ValueError, match=r"reward function '.*mine.py:other': .* has no function 'other'"):
        run_job(other, tmp_path / "runs")
