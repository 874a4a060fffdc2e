"""`heed init`: the sections of a new job, and the messages about the rest. The tutorial's test runs such a job."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluation.inputs import can_show, samples_per_prompt
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import check_data, run_job
from heed.jobs.plan import Plan, Setting, make_plan
from heed.jobs.run import Run
from heed.jobs.starter import Starter
from heed.jobs.starter_sections import ALARM, POLICY_GRADIENTS, batch_for, batch_toml
from heed.jobs.times import GIB, Hardware
from lm.config import ModelConfig
from lm.encoder import MaskedLanguageModel
from lm.source import RandomInit, load
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from preferences.rankings import is_heldout
from reward.config import RankingsConfig
from reward.prepared import read_rankings
from tests.rows import jsonl
from training.data import DataConfig, read_prompts
from training.notices import speaking_through

ROOT = Path(__file__).parents[3]
LAPTOP = Hardware("cpu", 16 * GIB, 5e11, 4e10, 0.0, is_gpu=False)
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text(jsonl(rows))
    return str(path)


def prompt_rows(number: int) -> list[dict[str, str]]:
    return [{"prompt": f"Say {'very ' * (index % 3)}{index}."} for index in range(number)]


def pair_rows(number: int) -> list[dict[str, str]]:
    return [{"prompt": f"Say {index}.", "chosen": f"{index}!", "rejected": f"{index}?"} for index in range(number)]


def label_rows(number: int) -> list[dict[str, Any]]:
    """TRL's unpaired rows."""
    return [{"prompt": f"Say {index}.", "completion": f"{index}", "label": index % 3 > 0} for index in range(number)]


def text_rows(number: int) -> list[dict[str, str]]:
    return [{"text": f"It is {index}.", "label": "odd" if index % 2 else "even"} for index in range(number)]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Options of `heed init`: small files of each kind."""
    answers = [{"prompt": f"Say {index}.", "completion": f"{index}!"} for index in range(60)]
    (tmp_path / "r.py").write_text(
        "def score(prompts, responses):\n    return [float(len(text)) for text in responses]\n"
    )
    return {
        "demonstrations": write(tmp_path / "demos.jsonl", *answers),
        "preferences": write(tmp_path / "pairs.jsonl", *pair_rows(60)),
        "prompts": write(tmp_path / "prompts.jsonl", *prompt_rows(40)),
        "labels": write(tmp_path / "labels.jsonl", *label_rows(60)),
        "texts": write(tmp_path / "texts.jsonl", *text_rows(60)),
        "reward": f"{tmp_path}/r.py:score",
    }


def starter(model: Path, data: dict[str, str], *names: str, algorithm: str = "") -> Starter:
    return Starter(str(model), **{name: data[name] for name in names}, algorithm=algorithm)


@pytest.mark.parametrize(
    ("names", "algorithm", "stages", "num_missing"),
    [
        (("prompts", "reward"), "", ("ppo", "compare"), 1),
        (("prompts", "reward"), "rloo", ("ppo", "compare"), 1),
        (("preferences",), "", ("reward", "dpo", "compare"), 1),
        (("preferences", "reward"), "dpo", ("dpo", "compare"), 1),
        (("preferences", "prompts"), "", ("reward", "ppo", "compare"), 1),
        (("demonstrations", "preferences", "prompts"), "grpo", ("sft", "reward", "ppo", "compare"), 0),
        (("demonstrations", "preferences", "prompts"), "dpo", ("sft", "reward", "dpo", "compare"), 0),
        (("demonstrations",), "", ("sft",), 2),
    ],
)
def test_stages_follow_from_what_there_is(
    tmp_path: Path,
    model_folder: Path,
    data: dict[str, str],
    names: tuple[str, ...],
    algorithm: str,
    stages: tuple[str, ...],
    num_missing: int,
) -> None:
    path, made = tmp_path / "job.toml", starter(model_folder, data, *names, algorithm=algorithm)
    made.write(path)
    job = load_job(path)
    assert job.stage_names == stages
    assert len(made.missing) == num_missing, made.missing
    assert all(f"# missing: {line}" in path.read_text() for line in made.missing)
    assert getattr(job, stages[0]).init_from == str(model_folder)
    if "compare" in stages:
        by_function = algorithm == "dpo" and "reward" in names
        assert (job.compare.judge_function, job.compare.judge_reward) == (
            data["reward"] if by_function else "",
            not by_function,
        )


def algorithms_of_the_docs() -> dict[str, tuple[str, ...]]:
    """advantage.kind, advantage.scale, loss.token_weight, kl.kind and loss.kind by name, of the table in
    docs/algorithms.md.
    """
    rows = re.findall(
        r"^\| (PPO|RLOO|GRPO) \(.*?\) \|(.*)\|$", (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE
    )
    return {name.lower(): tuple(re.findall(r"`(\w+)`", cells)) for name, cells in rows}


@pytest.mark.parametrize("algorithm", POLICY_GRADIENTS)
def test_an_algorithm_has_the_keys_of_its_row_in_the_docs(
    tmp_path: Path, model_folder: Path, data: dict[str, str], algorithm: str
) -> None:
    starter(model_folder, data, "prompts", "reward", algorithm=algorithm).write(tmp_path / "job.toml")
    ppo = load_job(tmp_path / "job.toml").ppo
    keys = (ppo.advantage.kind, ppo.advantage.scale, ppo.loss.token_weight, ppo.kl.kind, ppo.loss.kind)
    assert keys == algorithms_of_the_docs()[algorithm]
    assert (ppo.value_optimizer is None) == (algorithm != "ppo")


def test_the_comparisons_prompts_are_not_trained_on(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    starter(model_folder, data, "prompts", "reward").write(tmp_path / "ppo.toml")
    ppo_job = load_job(tmp_path / "ppo.toml")
    trained, compared = (
        {prompt.messages[0]["content"] for prompt in read_prompts(of)}
        for of in (ppo_job.ppo.prompts, ppo_job.compare.prompts)
    )
    assert (len(trained), len(compared)) == (30, 10)
    assert not trained & compared
    starter(model_folder, data, "preferences").write(tmp_path / "dpo.toml")
    job = load_job(tmp_path / "dpo.toml")
    asked = {prompt.messages[0]["content"] for prompt in read_prompts(job.compare.prompts)}
    heldout = {
        ranking.prompt[0].content
        for ranking in read_rankings(RankingsConfig(source=data["preferences"]))
        if is_heldout(ranking.prompt, job.dpo.heldout_share, job.seed)
    }
    assert asked == heldout
    assert asked


def test_a_single_prompt_is_trained_on_and_compared(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    data["prompts"] = write(tmp_path / "one.jsonl", {"prompt": "q"})
    starter(model_folder, data, "prompts", "reward").write(tmp_path / "job.toml")
    job = load_job(tmp_path / "job.toml")
    assert job.ppo.prompts == job.compare.prompts == DataConfig(source=data["prompts"])
    assert "training sees them too" in (tmp_path / "job.toml").read_text()


def test_prompts_of_the_comparison_that_are_trained_on_too_are_counted(
    tmp_path: Path, model_folder: Path, data: dict[str, str]
) -> None:
    """The first rows are left out of training, but two of them appear again further down."""
    data["prompts"] = write(tmp_path / "twice.jsonl", *prompt_rows(40), *prompt_rows(2))
    starter(model_folder, data, "prompts", "reward").write(tmp_path / "job.toml")
    heard: list[str] = []
    (tmp_path / "run").mkdir()
    with speaking_through(heard.append):
        check_data(Run(load_job(tmp_path / "job.toml"), tmp_path / "run", None, None))
    path = data["prompts"]
    assert f"{path}: 2 of 10 prompts of [compare] are also among those of [ppo] ({path}), so they are not held out" in (
        heard
    )


def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    path, before = tmp_path / "job.toml", sorted(tmp_path.iterdir())
    demos = write(tmp_path / "d.jsonl", {"prompt": "q", "answer": "a"})
    few = write(tmp_path / "few.jsonl", pair_rows(1)[0])
    before = sorted(tmp_path.iterdir())
    model = str(model_folder)
    for made, words in (
        (Starter(model), "--demonstrations, --preferences, or --prompts with --reward was expected"),
        (Starter(model, demonstrations=demos), r"d\.jsonl: line 1: field 'completion' is missing"),
        (Starter("no/such-model", demonstrations=demos), "no/such-model"),
        (Starter(model, demonstrations=demos, format="csv"), "--format is 'csv'; one of auto, messages,"),
        (
            Starter(model, prompts=data["prompts"], algorithm="trpo"),
            "'trpo': one of ppo, grpo, rloo, dpo, kto, loop, classify was expected",
        ),
        (Starter(model, prompts=data["prompts"], algorithm="grpo"), "grpo needs a reward: --reward, or --preferences"),
        (
            Starter(model, preferences=few, algorithm="grpo"),
            "grpo samples responses to prompts: --prompts was expected",
        ),
        (Starter(model, prompts=data["prompts"], algorithm="dpo"), "dpo learns from preferences: --preferences was"),
        (
            starter(model_folder, data, "prompts", "preferences", "reward"),
            "--reward and --preferences each define a reward",
        ),
        (Starter(model, preferences=few), r"few\.jsonl: 1 different prompt is too few to train on some and hold out"),
    ):
        with pytest.raises(ValueError, match=words):
            made.write(path)
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ValueError, match=r"nodir/job\.toml: there is no folder .*nodir$"):
        starter(model_folder, data, "preferences").write(tmp_path / "nodir" / "job.toml")
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"job\.toml already exists"):
        Starter(model, demonstrations=demos).write(path)
    assert path.read_text() == "mine"


def test_format_and_invalid_rows_are_those_of_the_sources(
    tmp_path: Path, model_folder: Path, data: dict[str, str]
) -> None:
    odd = {"prompt": "q", "messages": [{"role": "user", "content": "another"}, {"role": "assistant", "content": "a"}]}
    path = tmp_path / "odd.jsonl"
    path.write_text(jsonl((odd, {"messages": []}, odd, odd, odd)))
    with Path(data["preferences"]).open("a") as file:
        file.write('{"prompt": "Say 1."}\n')

    def made(form: str) -> Starter:
        pairs = data["preferences"]
        return Starter(str(model_folder), str(path), pairs, str(path), algorithm="grpo", format=form, on_invalid="skip")

    with pytest.raises(ValueError, match="5 of 5 rows are invalid"):
        made("auto").write(tmp_path / "job.toml")
    said = made("messages").write(tmp_path / "job.toml")
    assert f"{path}: of 5 rows, 1 x invalid (skipped), 3 x seen before (kept)" in said, "as demonstrations"
    assert (
        f"{path}: of 5 rows, 1 x invalid (skipped), 4 x ends with an answer (not read), 3 x seen before (kept)" in said
    )
    assert f"{path}: line 2: field 'messages' is list; a non-empty list was expected" in said
    assert f"{data['preferences']}: of 61 rows, 1 x invalid (skipped)" in said
    use = "the first 1 for the comparison, the others for GRPO"
    assert sum(line.startswith(f"{path}: 4 prompts, messages; {use}; ") for line in said) == 1, "of the rows left"
    job = load_job(tmp_path / "job.toml")
    for source in (*job.sft.demonstrations, job.ppo.prompts, job.compare.prompts):
        assert (source.format, source.on_invalid) == ("messages", "skip")
    assert (job.compare.prompts.max_rows, job.ppo.prompts.skip_rows) == (1, 1)
    assert (job.reward.rankings.format, job.reward.rankings.on_invalid) == ("auto", "skip")


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_few_preferences_are_split_so_that_some_are_held_out(
    tmp_path: Path, model_folder: Path, data: dict[str, str], algorithm: str
) -> None:
    data["preferences"] = write(tmp_path / "few.jsonl", *pair_rows(4))
    rankings = read_rankings(RankingsConfig(source=data["preferences"]))
    assert not any(is_heldout(ranking.prompt, 0.1, 0) for ranking in rankings), "the default share would not do"
    starter(model_folder, data, "preferences", "prompts", algorithm=algorithm).write(tmp_path / "job.toml")
    job = load_job(tmp_path / "job.toml")
    (tmp_path / "run").mkdir()
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked


def of_objectives(path: Path, *names: str) -> str:
    row = {"responses": ["Yes.", "No."], "ranks": [1, 2], "labeler": "ann"}
    prompts = [[{"role": "user", "content": f"Is it {number}?"}] for number in range(12)]
    rows = [
        {"task_id": f"{name}{number}", "prompt": prompt, "objective": name, **row}
        for name in names
        for number, prompt in enumerate(prompts)
    ]
    return write(path, *rows)


def test_each_objective_of_the_rankings_has_a_score_and_a_weight(
    tmp_path: Path, model_folder: Path, data: dict[str, str]
) -> None:
    data["preferences"] = of_objectives(tmp_path / "rankings.jsonl", "kind", "a true one")
    starter(model_folder, data, "preferences", "prompts").write(tmp_path / "job.toml")
    job = load_job(tmp_path / "job.toml")
    assert job.reward.objectives == ("a true one", "kind")
    assert job.ppo.reward.objective_weights == {"a true one": 1.0, "kind": 1.0}
    (tmp_path / "run").mkdir()
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked
    with pytest.raises(
        ValueError, match=r"rankings\.jsonl: the rankings have the objectives a true one, kind, and DPO learns one"
    ):
        starter(model_folder, data, "preferences").write(tmp_path / "dpo.toml")
    data["preferences"] = of_objectives(tmp_path / "one.jsonl", "kind")
    starter(model_folder, data, "preferences").write(tmp_path / "one.toml")
    assert load_job(tmp_path / "one.toml").reward.objectives == ()


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_names_of_any_characters_are_written_as_toml(
    tmp_path: Path, model_folder: Path, data: dict[str, str], algorithm: str
) -> None:
    folder = tmp_path / 'a "\\ 😀'
    folder.mkdir()
    model = shutil.copytree(model_folder, folder / "model")
    demonstrations, pairs, prompts = (
        str(Path(data[name]).rename(folder / f"{name}😀.jsonl"))
        for name in ("demonstrations", "preferences", "prompts")
    )
    made = Starter(str(model), demonstrations, pairs, prompts if algorithm == "grpo" else "", algorithm=algorithm)
    made.write(folder / "job.toml")
    job = load_job(folder / "job.toml")
    assert (job.sft.init_from, job.sft.demonstrations[0].source) == (str(model), demonstrations)
    assert job.reward.rankings.source == pairs
    if algorithm == "grpo":
        assert job.ppo.prompts.source == job.compare.prompts.source == prompts
    else:
        assert job.compare.prompts.source == str(folder / "job-heldout-prompts.jsonl")
    with pytest.raises(ValueError, match=r"name: letters, digits, .* were expected"):
        made.write(folder / 'job".toml')


def test_a_batch_leaves_ten_steps_in_an_epoch() -> None:
    assert [batch_for(rows) for rows in (1, 19, 20, 200, 100_000)] == [1, 1, 2, 16, 64]
    assert batch_toml(64, 100) == "{ batch_size = 64, micro_batch_size = 8 }"
    assert batch_toml(64, 2000) == "{ batch_size = 64, micro_batch_size = 2 }"


def planned(path: Path) -> Plan:
    return make_plan(load_job(path, opens_models=False), Setting(LAPTOP, share_of_peak=0.4, assumed_rows=100_000))


@pytest.mark.parametrize("algorithm", [*POLICY_GRADIENTS, "dpo"])
def test_a_job_of_short_data_fits_a_laptop(
    tmp_path: Path, tokenizer: Tokenizer, data: dict[str, str], algorithm: str
) -> None:
    """A model of SmolLM2-135M's shape, with a context of 8,192 tokens."""
    model = tmp_path / "model"
    tokenizer.save(model)
    (model / "config.json").write_text(json.dumps(SMOLLM2_135M))
    names = ("demonstrations", "preferences", "prompts")
    found = starter(model, data, *names, algorithm=algorithm).write(tmp_path / "job.toml")
    assert f"{model}: a context of 8,192 tokens" in found
    job = load_job(tmp_path / "job.toml")
    assert job.sft.seq_len == 256
    assert job.compare.max_new_tokens == 16, "the longest response has fewer tokens"
    plan = planned(tmp_path / "job.toml")
    assert plan.fits, {stage.name: stage.peak / GIB for stage in plan.stages}
    assert sum(stage.seconds for stage in plan.stages) < 4 * 3600


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != "grpo")) for name in (*POLICY_GRADIENTS, "dpo")],
)
@pytest.mark.timeout(600)
def test_a_job_runs_as_it_is_to_a_comparison(
    tmp_path: Path, model_folder: Path, data: dict[str, str], algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"grpo": ("prompts", "reward"), "rloo": ("prompts", "preferences")}.get(
        algorithm, ("preferences", "prompts")
    )
    starter(model_folder, data, *names, algorithm=algorithm).write(tmp_path / "job.toml")
    job = load_job(tmp_path / "job.toml", ["ppo.num_iterations=2"] if algorithm != "dpo" else [])
    run_job(job, tmp_path / "runs")
    results = json.loads((tmp_path / "runs" / "job" / "compare" / "results.json").read_text())
    policy = "dpo" if algorithm == "dpo" else "ppo"
    assert set(results["policies"]) == {"sft", "best_of_4", policy}
    assert results["judge"]["is_reward"] == (algorithm != "dpo")
    assert results["num_prompts"] == (40 if algorithm == "dpo" else 10)
    assert results["hacking"] is None, "the reward can't confirm itself"
    page = (tmp_path / "runs" / "job" / "report.html").read_text()
    assert ("The judge is the reward or comes from the same file" in page) == (algorithm != "dpo")


# ---- what init refuses and says ----


def test_too_few_conversations_are_refused_as_the_run_would(tmp_path: Path, model_folder: Path) -> None:
    """One of twenty conversations is held out, the first one first."""
    path = tmp_path / "job.toml"
    for number in (0, 1):
        rows = [{"prompt": "q", "completion": "a"}] * number
        demos = write(tmp_path / f"{number}.jsonl", *rows)
        with pytest.raises(ValueError, match=rf"{number}\.jsonl: {number} conversations; at least two were expected"):
            Starter(str(model_folder), demonstrations=demos).write(path)
    assert not path.exists()


def test_each_file_has_one_line_that_says_what_it_is_for(
    tmp_path: Path, model_folder: Path, data: dict[str, str]
) -> None:
    names = ("demonstrations", "preferences", "prompts")
    said = starter(model_folder, data, *names, algorithm="grpo").write(tmp_path / "grpo.toml")
    lines = {name: [line for line in said if line.startswith(f"{data[name]}: ")] for name in names}
    assert {name: len(found) for name, found in lines.items()} == dict.fromkeys(names, 1)
    starts = {name: found[0].removeprefix(f"{data[name]}: ").rpartition(";")[0] for name, found in lines.items()}
    assert starts == {
        "demonstrations": "60 conversations, prompt and completion; for SFT",
        "preferences": "60 pairs, TRL's preferences, conversational or texts; for a reward model, with 9 prompts held"
        " out",
        "prompts": "40 prompts, prompt; the first 10 for the comparison, the others for GRPO",
    }
    said = starter(model_folder, data, "preferences").write(tmp_path / "dpo.toml")
    assert sum("for DPO and a reward model that judges it, with 1" in line for line in said) == 1


def test_a_small_comparison_says_what_it_can_show(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    """The exact figures: six of six agree with probability .8 at a win rate of .8^(1/6)."""
    only = "can show only a win rate above"
    assert can_show(6, 1) == f"6 prompts with 1 sample each {only} {0.8 ** (1 / 6):.0%} (80% power)"
    says = f"6 prompts with 8 samples each {only} 66% to 96%, the more the verdicts on a prompt agree (80% power)"
    assert can_show(6, 8) == says
    of_clusters = f"48 prompts in 6 clusters with 1 sample each {only} 66% to 96%, the more the verdicts on a cluster"
    assert can_show(48, 1, 6).startswith(of_clusters)
    assert can_show(5, 8) == "5 prompts cannot show any difference; at least 6 were expected"
    assert [samples_per_prompt(number) for number in (1, 25, 50, 100, 300)] == [8, 8, 4, 2, 1]
    said = starter(model_folder, data, "preferences").write(tmp_path / "dpo.toml")
    job = load_job(tmp_path / "dpo.toml")
    num_prompts = len(read_prompts(job.compare.prompts))
    assert num_prompts >= 8, "more than a tenth of 60 is held out, since the comparison uses it"
    assert job.compare.num_samples == 8
    (line,) = (line for line in said if line.startswith("comparison: "))
    assert line == f"comparison: {can_show(num_prompts, 8)}"
    assert line.removeprefix("comparison: ") in (tmp_path / "dpo.toml").read_text()


def test_a_reward_next_to_dpo_only_judges(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    said = starter(model_folder, data, "preferences", "reward", algorithm="dpo").write(tmp_path / "job.toml")
    assert f"{data['reward']}: only judges the comparison; DPO does not learn from it" in said
    text = (tmp_path / "job.toml").read_text()
    assert "no training has seen it" in text
    assert "replace that line" not in text
    assert "best_of" not in text, "no reward picks the best"


@pytest.mark.parametrize("algorithm", ["", "kto"])
def test_labels_of_single_responses_are_for_kto(
    tmp_path: Path, model_folder: Path, data: dict[str, str], algorithm: str
) -> None:
    made = Starter(str(model_folder), preferences=data["labels"], reward=data["reward"], algorithm=algorithm)
    said = made.write(tmp_path / "job.toml")
    assert any("60 labeled responses, TRL's unpaired labels" in line and "; for KTO, with 1" in line for line in said)
    job = load_job(tmp_path / "job.toml")
    assert (job.stage_names, job.dpo.loss, job.compare.judge_function) == (("dpo", "compare"), "kto", data["reward"])
    (tmp_path / "run").mkdir()
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked
    made = Starter(str(model_folder), preferences=data["labels"], algorithm=algorithm)
    made.write(tmp_path / "without.toml")
    assert load_job(tmp_path / "without.toml").stage_names == ("dpo",)
    assert "a comparison, which needs a judge: --reward" in made.missing


def test_kto_needs_both_labels_and_dpo_needs_pairs(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    good = write(tmp_path / "good.jsonl", *({**row, "label": True} for row in label_rows(30)))
    with pytest.raises(ValueError, match="0 undesirable; both kinds were expected"):
        Starter(str(model_folder), preferences=good).write(tmp_path / "job.toml")
    with pytest.raises(ValueError, match="0 are desirable and 0 undesirable; both kinds were expected"):
        Starter(str(model_folder), preferences=data["preferences"], algorithm="kto").write(tmp_path / "job.toml")
    with pytest.raises(ValueError, match=r"labels\.jsonl: line 1: a single response, which ranks nothing"):
        Starter(str(model_folder), preferences=data["labels"], algorithm="dpo").write(tmp_path / "job.toml")
    assert not (tmp_path / "job.toml").exists()


def test_a_loop_has_people_label(
    tmp_path: Path, model_folder: Path, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = starter(model_folder, data, "demonstrations", "prompts", algorithm="loop")
    made.write(tmp_path / "job.toml")
    job = load_job(tmp_path / "job.toml")
    assert job.stage_names[:4] == ("sft", "collect", "dpo", "gain")
    assert (job.rounds, job.loop.labels, job.loop.store) == (3, 30, "job-labels.sqlite")
    assert job.compare.judge_people == "job-labels.sqlite"
    assert made.command == "heed loop"
    assert not made.missing
    (tmp_path / "run").mkdir()
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked
    with pytest.raises(ValueError, match="--preferences: nothing in a job of loop reads this"):
        starter(
            model_folder, data, *data.keys() & {"demonstrations", "prompts", "preferences"}, algorithm="loop"
        ).write(tmp_path / "other.toml")


def test_the_alarm_in_the_comment_can_be_switched_on(tmp_path: Path, model_folder: Path, data: dict[str, str]) -> None:
    for algorithm in POLICY_GRADIENTS:
        path = tmp_path / f"{algorithm}.toml"
        starter(model_folder, data, "prompts", "reward", algorithm=algorithm).write(path)
        text = path.read_text()
        assert f"# {ALARM}" in text
        path.write_text(text.replace(f"# {ALARM}", ALARM.replace("FILE.py:NAME", "other.py:score")))
        assert load_job(path).ppo.alarm.source.function == "other.py:score"


@pytest.fixture
def encoder(tmp_path: Path, tokenizer: Tokenizer) -> str:
    folder = tmp_path / "encoder"
    shape = ModelConfig(
        kind="encoder", vocab_size=tokenizer.vocab_size, max_position_embeddings=64, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    model = load(RandomInit(lambda: MaskedLanguageModel(shape), 0))
    save_model(folder, model, model.state_dict(), tokenizer)
    return str(folder)


def test_an_encoder_classifies(tmp_path: Path, encoder: str, data: dict[str, str]) -> None:
    said = Starter(encoder, demonstrations=data["texts"]).write(tmp_path / "job.toml")
    assert sum(line.startswith(f"{data['texts']}: 60 texts, text and label; for [classify], with 6 ") for line in said)
    job = load_job(tmp_path / "job.toml")
    assert (job.stage_names, job.classify.init_from) == (("classify",), encoder)
    assert (job.classify.data[0].skip_rows, job.classify.heldout[0].max_rows) == (6, 6)
    (tmp_path / "run").mkdir()
    check_data(Run(job, tmp_path / "run", None, None))  # type: ignore[arg-type]  # no worker is asked
    data["texts"] = write(tmp_path / "sorted.jsonl", *sorted(text_rows(60), key=lambda row: row["label"]))
    with pytest.raises(ValueError, match=r"the first 6 of 60 rows, .* the labels even, the others even, odd; at least"):
        Starter(encoder, demonstrations=data["texts"]).write(tmp_path / "sorted.toml")


def test_a_model_of_another_kind_is_named_with_what_it_is_for(
    tmp_path: Path, encoder: str, model_folder: Path, data: dict[str, str]
) -> None:
    decoder = r"a decoder \(for \[pretrain\], \[sft\], \[collect\], \[reward\], .*\[ppo\]"
    with pytest.raises(
        ValueError, match=rf"--model .*model is {decoder}.*; an encoder \(for \[pretrain\], \[classify\]"
    ):
        Starter(str(model_folder), demonstrations=data["texts"], algorithm="classify").write(tmp_path / "a.toml")
    with pytest.raises(
        ValueError, match=r"--model .*encoder is an encoder \(for \[pretrain\], \[classify\], or the body"
    ):
        Starter(encoder, preferences=data["preferences"], algorithm="dpo").write(tmp_path / "a.toml")
