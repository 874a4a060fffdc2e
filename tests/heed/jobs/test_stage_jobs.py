"""Jobs with only some stages: each starts from models named in its section, and missing ones are named."""

import html
import json
import re
import shutil
import tomllib
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import tomli_w
import torch

from benchmarks.label_client import answer_in_turns
from files.hashes import derive_seed
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import check_data, run_job
from heed.jobs.replay import replay_response
from heed.jobs.run import Run
from lm.encoder import SequenceClassifier
from lm.model import LanguageModel, ScalarModel
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import WithNewHead, load_model, save_model
from ppo.people import PeopleChecks
from ppo.stage import was_measured
from preferences.page.config import LabelingConfig
from reward.sampling import SamplingSpec, sample_policy
from tests.models import load_language_model
from tests.ppo.test_people import Person
from tests.preferences.page.conftest import Running
from tests.rows import jsonl
from training.data import DataConfig, read_prompts

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"


def job_of(tmp_path: Path, *stages: str, **changes: dict[str, Any]) -> Path:
    """The debug job with only these stages, without world and model; `changes` update sections."""
    values = tomllib.loads(DEBUG.read_text())
    kept = {key: value for key, value in values.items() if key in ("name", "engine", *stages)}
    for section, update in changes.items():
        kept[section] = {**kept.get(section, {}), **update}
    if "ppo" in kept and "pretrain" not in kept:
        kept["ppo"].pop("ptx", None)  # its rows are the pretraining stage's
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(kept))
    return path


def rows(path: Path, values: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text(jsonl(values))
    return {"source": str(path)}


@pytest.mark.long
@pytest.mark.usefixtures("one_ray")
def test_stages_run_alone_from_directories(tmp_path: Path, model_folder: Path, encoder_folder: Path) -> None:
    """SFT from a model, a reward model on an encoder from a file of rankings, and PPO from both."""
    demonstrations = [{"prompt": f"Where is dog {i}?", "completion": "Far."} for i in range(24)]
    sft = {
        "demonstrations": [rows(tmp_path / "train.jsonl", demonstrations)],
        "heldout": [rows(tmp_path / "heldout.jsonl", demonstrations[:4])],
        "seq_len": 64,
        "init_from": str(model_folder),
    }
    run = run_job(load_job(job_of(tmp_path, "sft", sft=sft)), tmp_path / "runs-sft")
    tuned = load_language_model(run / "sft" / "model")
    assert not torch.equal(tuned.head.weight, load_language_model(model_folder).head.weight)
    assert not (run / "pretrain").exists()
    assert "sft" in json.loads((run / "report.json").read_text())

    rankings = [
        {
            "task_id": f"t{i}", "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": ["Far", "Far!!", "Far!"], "ranks": [3, 1, 2], "labeler": "ann",
        }
        for i in range(24)
    ]  # fmt: skip
    reward = {
        "rankings": rows(tmp_path / "rankings.jsonl", rankings),
        "demonstrations": sft["demonstrations"],
        "init_from": str(encoder_folder),
    }
    judged = run_job(load_job(job_of(tmp_path, "reward", reward=reward)), tmp_path / "runs-reward")
    assert load_model(judged / "reward" / "model", SequenceClassifier).labels == ("score",)
    assert 0 <= json.loads((judged / "reward" / "results.json").read_text())["heldout_accuracy"]["mean"] <= 1

    prompts = rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in demonstrations])
    ppo = {
        "init_from": str(run / "sft" / "model"),
        "reward": {"kind": "model", "model": str(judged / "reward" / "model")},
        "prompts": prompts,
        "num_iterations": 1,
    }
    done = run_job(load_job(job_of(tmp_path, "ppo", ppo=ppo)), tmp_path / "runs-ppo")
    policy = load_language_model(done / "ppo" / "model")
    assert not torch.equal(policy.head.weight, tuned.head.weight)
    lineage = json.loads((done / "ppo" / "lineage.json").read_text())
    assert {str(run / "sft" / "model"), str(judged / "reward" / "model")} <= set(lineage["data"])


@pytest.mark.long
@pytest.mark.usefixtures("one_ray")
def test_kto_learns_from_the_ratings_of_scripted_labelers(tmp_path: Path) -> None:
    """The debug job, with the shipped job's labelers and loss."""
    shipped, debug = (tomllib.loads((DEBUG.parent / name).read_text()) for name in ("kto.toml", "debug.toml"))
    kept = {name: debug[name] for name in ("name", "world", "engine", "model", "pretrain", "sft", "collect")}
    kept["world"] |= shipped["world"]
    batch, optimizer = {"batch_size": 8, "micro_batch_size": 4}, {"learning_rate": 1e-3}
    counts = {"save_every_steps": 4, "evaluate_every_steps": 4, "heldout_share": 0.3}
    rankings = {"source": "collect:rankings"}
    kept["dpo"] = {"rankings": rankings, "batch": batch, "optimizer": optimizer, **counts, **shipped["dpo"]}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(kept))
    run = run_job(load_job(tmp_path / "job.toml"), tmp_path)
    results = json.loads((run / "dpo" / "results.json").read_text())
    found = results["unpaired"]
    assert min(found["train_desirable"], found["train_undesirable"]) > 0
    assert 0 <= found["heldout_accuracy"]["mean"] <= 1
    report = (run / "report.html").read_text()
    assert "Held-out responses on the right side of the baseline" in report
    assert re.search(r"KTO puts [\d.]+% of \d+ held-out labels on the right side of the baseline", report)
    assert "KTO's estimate of the" in html.unescape(report)
    assert "Desirable and undesirable responses, train" in report
    assert "Comparisons, train" not in report
    assert "The policy learns from labels of single responses" in report
    assert "DPO" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", report, flags=re.DOTALL)


@pytest.mark.long
@pytest.mark.usefixtures("one_ray")
def test_a_student_of_half_the_width_learns_from_a_teacher_without_a_reward(finished_run: Path, tmp_path: Path) -> None:
    """The shipped job's settings at the debug job's size: no labels, no reward model; then a response again."""
    debug = tomllib.loads(DEBUG.read_text())
    names = ("name", "world", "engine", "cluster", "model", "pretrain", "sft")
    kept = {name: debug[name] for name in names}
    teacher = finished_run / "sft" / "model"
    shipped = tomllib.loads((DEBUG.parent / "distil.toml").read_text())
    kept["model"] |= {"hidden_size": 16, "intermediate_size": 32}
    left_out = {name.partition(".")[2] for name in shipped["without"]}
    kept["ppo"] = {**{key: value for key, value in debug["ppo"].items() if key not in left_out}, **shipped["ppo"]}
    kept["ppo"]["teachers"] = [{"model": str(teacher)}]
    kept["compare"] = debug["compare"]
    (tmp_path / "job.toml").write_text(tomli_w.dumps(kept))
    run = run_job(load_job(tmp_path / "job.toml"), tmp_path)
    log = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["teacher_kl_nats"] > 0 and "score" not in line for line in log)
    assert set(json.loads((run / "ppo" / "lineage.json").read_text())["data"]) >= {str(teacher)}
    report = (run / "report.html").read_text()
    assert "KL from the teacher" in report
    assert "The policy is trained to write what its teacher finds likely." in report
    assert "raise the" not in report
    found, chain = replay_response(run, "ppo", 3, 2)
    assert found.is_same
    assert found.tokens[0].teacher != 0
    assert [token.reward for token in found.tokens] == [0.0] * len(found.tokens)  # of the kind "token"
    assert [link.what.partition(",")[0] for link in chain if "teacher" in link.what] == ["a teacher"]


@pytest.mark.usefixtures("one_ray")
def test_an_alarm_goes_back_to_the_initial_policy(
    finished_run: Path, overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped job's settings at the debug job's size, and a spot checker that likes the first texts alone."""
    debug = tomllib.loads(DEBUG.read_text())
    shipped = tomllib.loads((DEBUG.parent / "alarm.toml").read_text())
    (tmp_path / "checks.py").write_text(
        "seen = []\n\ndef check(prompts, responses):\n"
        "    seen.extend(responses)\n    return [float(len(seen) <= 16)] * len(responses)\n"
    )
    left_out = {name.partition(".")[2] for name in shipped["without"]}
    debug["ppo"] = {key: value for key, value in debug["ppo"].items() if key not in left_out} | shipped["ppo"]
    debug["ppo"]["num_iterations"] = 14  # each has one bet, so fewer cannot ring
    debug["ppo"]["alarm"] |= {
        "source": {"kind": "function", "function": f"{tmp_path / 'checks.py'}:check"},
        "initial_checks": 16,
    }
    (tmp_path / "job.toml").write_text(tomli_w.dumps(debug))
    shutil.copytree(finished_run, tmp_path / "debug", ignore=shutil.ignore_patterns("ppo", "compare"))
    run = run_job(load_job(tmp_path / "job.toml", overrides), tmp_path)
    assert "dpo: unchanged, skipped" in capsys.readouterr().err
    alarm = json.loads((run / "ppo" / "results.json").read_text())["alarm"]
    assert alarm["result"] == 0 < alarm["policy"]
    first, result = (run / "ppo" / "policies" / "000000", run / "ppo" / "model")
    assert (first / "model.safetensors").read_bytes() == (result / "model.safetensors").read_bytes()
    report = html.unescape((run / "report.html").read_text())
    assert "The result is the policy after iteration 0" in report
    assert "Evidence for the alarm" in report


@pytest.mark.long
@pytest.mark.usefixtures("one_ray", "cheap_hashes")
def test_people_ring_the_alarm_of_the_shipped_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped job's settings at the debug job's size. A labeler who prefers the initial policy answers all tasks on
    a real label server after each iteration.
    """
    debug, alarm = tomllib.loads(DEBUG.read_text()), tomllib.loads((DEBUG.parent / "alarm.toml").read_text())
    shipped = tomllib.loads((DEBUG.parent / "alarm-people.toml").read_text())["ppo"]["alarm"]
    assert shipped["source"] == {"kind": "people", "store": "labels.sqlite"}
    store = str(tmp_path / "labels.sqlite")
    left_out = {name.partition(".")[2] for name in alarm["without"]}
    debug["ppo"] = {key: value for key, value in debug["ppo"].items() if key not in left_out} | alarm["ppo"]
    debug["ppo"] |= {"num_iterations": 14, "alarm": {**shipped, "source": {"kind": "people", "store": store}}}
    (tmp_path / "job.toml").write_text(tomli_w.dumps(debug))
    with Running(store, LabelingConfig(asks_ratings=False)) as page:
        page.join("ann")
        client, add = page.client(Person("ann", page.store, "alarm")), PeopleChecks.add

        def add_and_answer(self: PeopleChecks, *arguments: Any, **names: Any) -> dict[str, float]:
            metrics = add(self, *arguments, **names)
            answer_in_turns([client])
            return metrics

        monkeypatch.setattr(PeopleChecks, "add", add_and_answer)
        with client:
            run = run_job(load_job(tmp_path / "job.toml"), tmp_path)
        assert page.store.progress("alarm").num_judgments > 0
    results = json.loads((run / "ppo" / "results.json").read_text())["alarm"]
    assert (results["result"], results["by_people"]) == (0, True)
    report = html.unescape((run / "report.html").read_text())
    assert "people prefer the initial policy" in report
    assert "The result is the policy after iteration 0" in report


@pytest.mark.parametrize("problem", ["tokenizer", "missing", "kind", "short", "narrow"])
def test_a_teacher_that_cannot_teach_is_refused_before_anything_runs(
    tmp_path: Path, model_folder: Path, encoder_folder: Path, problem: str
) -> None:
    teacher, tokenizer = tmp_path / "teacher", Tokenizer.load(model_folder)
    model = load_language_model(model_folder)
    if problem == "tokenizer":
        tokenizer = Tokenizer.train(["other words than those"] * 9, 300, "chat")
    if problem == "short":
        model = LanguageModel(model.config.model_copy(update={"max_position_embeddings": 32}))
    if problem == "narrow":
        model = LanguageModel(model.config.model_copy(update={"vocab_size": model.config.vocab_size - 1}))
    if problem != "missing":
        save_model(teacher, model, model.state_dict(), tokenizer)
    named = encoder_folder if problem == "kind" else teacher
    prompts = rows(tmp_path / "prompts.jsonl", [{"prompt": f"Where is cat {i}?"} for i in range(16)])
    teachers = [{"model": str(model_folder)}, {"model": str(named)}]
    ppo = {"init_from": str(model_folder), "prompts": prompts, "reward": {"kind": "none"}, "teachers": teachers}
    words = {
        "tokenizer": rf"the tokenizer of {teacher} differs from that of the policy, {model_folder}",
        "missing": rf"{teacher}",
        "kind": rf"{encoder_folder}/config.json: architectures is .* was expected",
        "short": rf"{teacher} reads at most 32 tokens, and the policy 96; a teacher that",
        "narrow": rf"{teacher} has embeddings of \d+ tokens, and the policy, .*, of \d+; a teacher with",
    }  # fmt: skip
    with pytest.raises(ValueError, match=rf"^ppo.teachers.1.model: {words[problem]}"):
        check_data(Run(load_job(job_of(tmp_path, "ppo", ppo=ppo)), tmp_path / "run", None, None))


@pytest.mark.nightly
@pytest.mark.usefixtures("one_ray")
def test_published_rankings_do_not_set_the_scale_of_scores(tmp_path: Path, model_folder: Path) -> None:
    """PPO's scores are in units of the starting policy's own samples, whatever a published file says."""
    demonstrations = rows(
        tmp_path / "d.jsonl", [{"prompt": f"Where is dog {i}?", "completion": "Far."} for i in range(24)]
    )
    rankings = [
        {
            "task_id": f"t{i}", "prompt": [{"role": "user", "content": f"Where is dog {i}?"}],
            "responses": ["Far", "Far far far far far far", "Far!"], "ranks": [3, 1, 2], "labeler": "ann",
        }
        for i in range(24)
    ]  # fmt: skip
    prompts = rows(tmp_path / "prompts.jsonl", [{"prompt": f"Where is cat {i}?"} for i in range(16)])
    start = {"init_from": str(model_folder)}
    reward = {"rankings": rows(tmp_path / "r.jsonl", rankings), "demonstrations": [demonstrations], **start}
    ppo = {**start, "prompts": prompts, "num_iterations": 1}
    job = load_job(job_of(tmp_path, "reward", "ppo", reward=reward, ppo=ppo))
    assert not was_measured(Run(job, tmp_path, None, None).of("ppo"))
    run = run_job(job, tmp_path / "runs")
    published, found = (json.loads((run / stage / "results.json").read_text()) for stage in ("reward", "ppo"))
    assert job.ppo is not None
    spec = SamplingSpec(
        policy=model_folder, num_samples=1, temperature=1.0, max_new_tokens=job.ppo.max_new_tokens,
        seed=derive_seed(job.seed, "ppo", "scale"), precision=job.engine.resolved_precision(),
        reward=str(run / "reward" / "model"),
    )  # fmt: skip
    scores = [sample.score for sample in sample_policy(spec, read_prompts(DataConfig(source=prompts["source"])))]
    assert found["score_scale_mean"] == pytest.approx(mean(scores), abs=1e-3)
    assert found["score_scale_std"] == pytest.approx(stdev(scores), rel=1e-2)
    assert found["score_scale_mean"] != pytest.approx(published["sample_score_mean"], abs=1e-2)


def test_collected_rankings_set_the_scale_of_scores() -> None:
    """[collect] samples the same policy that PPO starts from, so the reward stage's measurements on them can be
    used."""
    assert was_measured(Run(load_job(DEBUG), Path(), None, None).of("ppo"))


@pytest.mark.usefixtures("one_ray")
def test_a_reward_model_that_tells_nothing_apart_is_refused(
    tmp_path: Path, model_folder: Path, tokenizer: Tokenizer
) -> None:
    flat = load(WithNewHead(model_folder, LanguageModel, ScalarModel, 0))
    with torch.no_grad():
        flat.score.weight.zero_()
    save_model(tmp_path / "flat", flat, flat.state_dict(), tokenizer)
    prompts = rows(tmp_path / "prompts.jsonl", [{"prompt": f"Where is {i}?"} for i in range(16)])
    reward = {"kind": "model", "model": str(tmp_path / "flat")}
    job = load_job(job_of(tmp_path, "ppo", ppo={"init_from": str(model_folder), "reward": reward, "prompts": prompts}))
    with pytest.raises(ValueError, match=r"flat: the scores of the initial policy's samples have a spread of 0"):
        run_job(job, tmp_path / "runs")
    in_groups = job_of(
        tmp_path,
        "ppo",
        ppo={
            "init_from": str(model_folder), "reward": reward, "prompts": prompts, "num_iterations": 1,
            "advantage": {"kind": "group_mean", "samples_per_prompt": 2, "scale": "group"},
        },
    )  # fmt: skip
    run = run_job(load_job(in_groups), tmp_path / "groups")  # which divides by the spread of each group
    assert json.loads((run / "ppo" / "results.json").read_text())["score_scale_std"] == 1


@pytest.mark.parametrize(
    ("stages", "changes", "words"),
    [
        ((), {}, r"the job has no stage; at least one section of pretrain, classify, sft, .* was expected"),
        (("sft",), {}, r"sft needs pretrain: \[pretrain\] or sft.init_from was expected"),
        (("model", "pretrain", "sft", "reward"), {}, r"reward needs collect: \[collect\] was expected"),
        (("model", "pretrain", "sft", "collect"), {}, r"world: missing; collect needs it"),
        (("model", "pretrain"), {}, r"world: missing; pretrain needs it"),
        (("world", "pretrain"), {}, r"model: missing; pretrain needs \[model\] or pretrain.init_from"),
        (("world", "model", "pretrain", "ppo"), {}, r"ppo needs sft: \[sft\] or ppo.init_from was expected"),
    ],
)
def test_what_a_job_lacks_is_named(
    tmp_path: Path, stages: tuple[str, ...], changes: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(job_of(tmp_path, *stages, **changes))


def test_two_starts_are_refused(tmp_path: Path, model_folder: Path) -> None:
    start = {"init_from": str(model_folder)}
    path = job_of(tmp_path, "world", "model", "pretrain", "sft", sft=start)
    with pytest.raises(ValueError, match=r"sft.init_from and \[pretrain\] are both set; only one of them was expected"):
        load_job(path)


@pytest.mark.parametrize(
    ("model", "stages", "words"),
    [
        ({"kind": "encoder"}, ("pretrain", "sft"), r"model.kind is an encoder \(for .*\), but \[sft\] takes a decoder"),
        (
            {"kind": "encoder-decoder", "num_encoder_layers": 1},
            ("pretrain", "sft", "collect"),
            r"model.kind is an encoder-decoder \(for \[pretrain\], \[sft\]\), but \[collect\] takes a decoder",
        ),
    ],
)
def test_a_kind_has_its_stages(tmp_path: Path, model: dict[str, Any], stages: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_job(job_of(tmp_path, "world", "model", *stages, model=model))
    assert load_job(job_of(tmp_path, "world", "model", *stages[:-1], model=model)).stage_names == stages[:-1]


def test_a_stage_does_not_start_from_what_is_no_language_model(tmp_path: Path, encoder_folder: Path) -> None:
    path = job_of(tmp_path, "world", "sft", sft={"init_from": str(encoder_folder)})
    good_for = r"an encoder \(for \[pretrain\], \[classify\], or the body of a reward model \(reward.init_from\)\)"
    with pytest.raises(
        ValueError, match=rf"sft.init_from is {good_for}, but \[sft\] takes a decoder .* or an encoder-"
    ):
        load_job(path)


def test_a_classifier_does_not_start_from_a_language_model(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "job.toml"
    rows = '[{ source = "rows.jsonl" }]'
    path.write_text(
        f'name = "c"\n[classify]\ninit_from = "{model_folder}"\ntask = "sequence"\ndata = {rows}\nheldout = {rows}\n'
    )
    with pytest.raises(
        ValueError, match=r"classify.init_from is a decoder \(for .*\), but \[classify\] takes an encoder"
    ):
        load_job(path)
