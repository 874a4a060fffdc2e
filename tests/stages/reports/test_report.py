"""The report of a made-up run: every number traced to its file, hostile text escaped, absent stages named."""

import hashlib
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from playwright.sync_api import Browser, expect

from evaluation.compare.report.answer import WEIGHTS_ONLY, answer_of_run
from evaluation.compare.report.stage import policy_table
from evaluation.compare.results import CompareResults
from files.records import read_record
from heed.jobs.registry import BUILT_IN
from preferences.statistics.estimates import Interval
from stages.progress import in_words
from stages.reports import report as run_report
from stages.reports import run_folder
from stages.reports.page import Glossary
from stages.reports.parts import Answer
from stages.reports.plots import running_mean
from stages.reports.text import clean_json, clean_text, duration, ends_of, number, percent, share_ends, styles_of
from tests.rows import jsonl

ReadPage = Callable[[str], Any]

REPORTERS = BUILT_IN.reporters
STAGES = tuple(name for name in BUILT_IN.names if name != "classify")  # the stage of an encoder, in a job of its own
HOSTILE = "<script>alert(1)</script>"
KINDS = ("story", "question", "list", "brief", "decline", "help")


def without_links(page: str) -> str:
    """Returns a page without its links to the glossary, which stand within sentences."""
    return re.sub(r'<a class="term"[^>]*>(.*?)</a>', r"\1", page)


def mean(value: float, half: float, **more: Any) -> dict[str, Any]:
    return {"mean": value, "low": value - half, "high": value + half, **more}


def share(value: float, half: float, **more: Any) -> dict[str, Any]:
    return {"mean": value, "low": max(0.0, value - half), "high": min(1.0, value + half), **more}


def rated(policy_a: str, policy_b: str, value: float, half: float, *, p: float = 0.001, holm_p: float = 0.001) -> Any:
    """Statistics of two policies with this win rate on 200 prompts, corrected for six pairs."""
    unknown = {"mean": None, "low": None, "high": None}
    changed = unknown | {"num_pairs": 0, "num_tasks": 0}
    return {
        "policy_a": policy_a,
        "policy_b": policy_b,
        "win_rate": share(value, half, over_labelers=unknown, num_prompts=200,
                          num_clusters=200, num_verdicts=400, num_labelers=1),
        "verdicts": {"wins": 200, "ties": 0, "losses": 200},
        "prompts": {"wins": 100, "ties": 0, "losses": 100},
        "num_failed": 0,
        "num_prompts_missing": 0,
        "significance": {"p": p, "num_permutations": 0, "holm_p": holm_p, "num_pairs": 6},
        "conclusion": {"kind": "undecided", "low": None, "high": None, "reason": ""},
        "different": holm_p < 0.05,
        "power": {"detectable": 0.1, "num_prompts_needed": None},
        "length_controlled": unknown | {"length_effect": unknown, "num_prompts": 0, "shrunk": False, "reason": "none"},
        "position_bias": unknown | {"num_prompts": 0, "num_verdicts": 0, "reason": "no order"},
        "flips": {"changed": changed, "reversed": changed},
        "categories": [],
    }  # fmt: skip


def write_stage(run: Path, stage: str, results: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    folder = run / stage
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    if metrics:
        lines = jsonl(metrics)
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    before = STAGES[: STAGES.index(stage)]
    lineage = {
        "stage": stage,
        "fingerprint": hashlib.sha256(stage.encode()).hexdigest(),
        "seed": 7,
        "parents": {name: hashlib.sha256(name.encode()).hexdigest() for name in before[-2:]},
        "data": {f"{stage}.jsonl": hashlib.sha256(b"data" + stage.encode()).hexdigest()},
        "code_version": "b022d30",
        "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
        "hosts": {"node-1": {}, "node-2": {"numpy": "2.4.5"}},
        "seconds": 10.0 * (1 + STAGES.index(stage)) ** 1.5,
        "finished_at": "2026-01-02T03:04:05Z",
    }
    (folder / "lineage.json").write_text(json.dumps(lineage), encoding="utf-8")


def language_metrics(rng: random.Random, steps: int, first: float, last: float) -> list[dict[str, Any]]:
    lines = []
    for step in range(1, steps + 1):
        loss = last + (first - last) * math.exp(-5 * step / steps)
        line = {"step": step, "num_steps": steps, "loss": loss + rng.gauss(0, 0.05), "learning_rate": 1e-3}
        line |= {"gradient_norm": 0.6 + 2 * math.exp(-step / 30) + rng.expovariate(6)}
        line |= {"tokens_per_second": 21000 + rng.gauss(0, 300), "seconds": step * 0.2}
        if step % (steps // 10) == 0:
            line["heldout_loss"] = loss + 0.06
        lines.append(line)
    return lines


def reward_metrics(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    lines = language_metrics(rng, steps, 0.69, 0.44)
    for line in lines:
        line["accuracy"] = 0.8 - 0.28 * math.exp(-4 * line["step"] / steps) + rng.gauss(0, 0.03)
        if "heldout_loss" in line:
            line["heldout_accuracy"] = 0.78 - 0.2 * math.exp(-4 * line["step"] / steps)
    return lines


def dpo_metrics(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    lines = reward_metrics(rng, steps)
    for line in lines:
        done = line["step"] / steps
        line |= {"chosen_reward": -0.3 * done, "rejected_reward": -0.8 * done, "margin": 0.5 * done}
        line |= {"chosen_logprob": -10.8 - 3.1 * done, "rejected_logprob": -13.2 - 8 * done}
    return lines


def ppo_metrics(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    lines = []
    for step in range(1, steps + 1):
        done = 1 - math.exp(-3 * step / steps)
        line = {"step": step, "num_steps": steps, "score": 2.4 * done + rng.gauss(0, 0.12), "kl_nats": 5.4 * done**1.5}
        line |= {"scaled_score": 1.9 * done, "kl_coef": 0.05, "eos_rate": min(1.0, 0.86 + 0.13 * done)}
        line |= {"response_tokens": 26 - 7 * done + rng.gauss(0, 0.6), "entropy_estimate": 1.6 - 0.9 * done}
        line |= {"policy_loss": -0.01, "value_loss": 0.2, "clip_share": 0.1, "approx_kl": 0.01, "value_explained": 0.5}
        line |= {"failed_scores": 1 if step == 3 else 0, "tokens_per_second": 5100.0, "seconds": 0.9 * step}
        lines.append(line)
    return lines


def ppo_samples() -> list[dict[str, Any]]:
    """Three prompts answered in three iterations, whose scores change by 1, 0 and 2; and a response that failed."""
    lines = []
    for step, scores in ((1, (0.0, 1.0, 2.0)), (40, (0.5, 1.0, 2.5)), (80, (1.0, 1.0, 4.0))):
        for place, score in enumerate(scores):
            line = {"step": step, "kind": "followed", "prompt_id": f"p{place}", "category": KINDS[place]}
            line |= {"messages": [{"role": "user", "content": f"Question {place}?"}], "response": f"At {step} {place}."}
            line |= {"score": score, "kl_nats": step / 50, "num_tokens": 5, "finished": place < 2}
            lines.append(line)
        drawn = {"step": step, "kind": "drawn", "prompt_id": "p9", "response": HOSTILE, "score": None, "kl_nats": None}
        lines.append(lines[-1] | drawn)
    return lines


def compare_results() -> dict[str, Any]:
    figures = {
        "pretrained": (0.08, None, -2.1, 0.83, 0.31, 47.0),
        "sft": (0.52, 0.0, -0.02, 0.78, 0.86, 26.2),
        "best_of_16": (0.72, None, 1.62, 0.77, 0.95, 23.8),
        "ppo": (0.84, 5.21, 2.31, 0.71, 0.99, 19.4),
    }
    about = {
        "pretrained": {"kind": "pretrained", "title": "pretrained"},
        "sft": {"kind": "initial", "title": "SFT"},
        "best_of_16": {"kind": "best of n", "title": "best of 16", "n": 16, "of": "sft"},
        "ppo": {"kind": "trained", "title": "PPO", "trainer": "ppo", "raises_score": True},
    }
    policies, strength = {}, {"pretrained": 0.08, "sft": 0.5, "best_of_16": 0.72, "ppo": 0.86}
    for place, (name, (gold, kl, proxy, distinct, ends, tokens)) in enumerate(figures.items()):
        policies[name] = {
            "policy": {"name": name, **about[name]},
            "gold_score": mean(gold, 0.028),
            "kl_nats": None if kl is None else mean(kl, 0.3 if kl else 0.0),
            "proxy_score": mean(proxy, 0.15),
            "pass_share": share(min(0.97, gold + 0.05), 0.03),
            "distinct_2": distinct,
            "end_rate": ends,
            "mean_tokens": tokens,
            "by_kind": {kind: gold - 0.05 + 0.03 * ((i + place) % 4) for i, kind in enumerate(KINDS)},
        }
    pairs = {}
    for a in strength:
        for b in strength:
            if a != b:
                rate = 1 / (1 + math.exp(-4.7 * (strength[a] - strength[b])))
                pairs[f"{a}/{b}"] = rated(a, b, rate, 0.038)
    curve = [
        {
            "n": n,
            "kl_bound_nats": math.log(n) - (n - 1) / n,
            "gold_score": mean(gold, 0.02),
            "proxy_score": mean(p, 0.1),
        }
        for n, gold, p in ((1, 0.52, 0.0), (2, 0.59, 0.55), (4, 0.65, 1.0), (8, 0.69, 1.35), (16, 0.72, 1.62))
    ]
    return {
        "judge": {"name": "playground gold", "description": "Scores what was asked, without noise, from 0 to 1."},
        "num_prompts": 200, "num_samples": 2, "temperature": 1.0,
        "policies": policies, "pairs": pairs, "best_of_n": curve, "samples": compare_samples(),
    }  # fmt: skip


def asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def compare_samples() -> list[dict[str, Any]]:
    story = "Anna had a red kite. She took the kite to the hill and met a fox. The fox was kind. They played all day."
    texts = {
        "pretrained": "The dog ran to the house and the house was big. The dog ran to the",
        "sft": "Anna had a kite. She went to the hill. The cat was happy.",
        "best_of_16": story,
        "ppo": story.replace("They played all day.", "The kite flew high over the hill."),
    }
    samples = []
    for place in range(9):
        prompt = (
            f"Please write a short story that uses the words kite, fox and hill. It should have {place + 3} sentences."
        )
        responses = {
            name: {"text": text, "gold_score": 0.2 + 0.2 * i + 0.01 * place, "proxy_score": -1.2 + i}
            for i, (name, text) in enumerate(texts.items())
        }
        samples.append(
            {"prompt_id": f"c-{place:05d}", "kind": KINDS[place % 6], "messages": asked(prompt), "responses": responses}
        )
    samples[1]["responses"]["sft"]["text"] = f"{HOSTILE}<img src=https://evil.example/x onerror=alert(2)>"
    samples[2]["messages"] = asked(f"{HOSTILE} What does Tom like?\nTom likes tea. Ann likes milk.")
    samples[2]["responses"]["pretrained"]["text"] = ""
    return samples


def make_run(run: Path, *, note: str = "") -> Path:
    """A whole run with plausible numbers."""
    rng = random.Random(3)
    run.mkdir(parents=True)
    job = f'name = "demo"\nnote = "{note}"\nseed = 7\nworkers = 2\n\n[ppo.kl]\ncoef = 0.05\n'
    job += "".join(f"[{stage}]\n" for stage in STAGES if stage != "ppo")
    (run / "job.toml").write_text(job, encoding="utf-8")
    write_stage(
        run, "pretrain",
        {"heldout_loss": 1.61, "heldout_bits_per_byte": 0.734, "num_parameters": 1_843_200, "vocab_size": 1024,
         "train_tokens": 2_113_004, "trained_tokens": 6_553_600},
        language_metrics(rng, 400, 6.9, 1.55),
    )  # fmt: skip
    write_stage(
        run, "sft",
        {"heldout_loss": 0.912, "heldout_loss_before": 2.83, "num_steps": 150, "num_rows": 4000,
         "packing_efficiency": 0.963},
        language_metrics(rng, 150, 2.8, 0.85),
    )  # fmt: skip
    write_stage(
        run, "collect",
        {"num_prompts": 600, "num_identical": 0, "responses_per_prompt": 4, "num_judgments": 1200, "tie_share": 0.06,
         "agreement": mean(0.731, 0.014, num_pairs=3311, num_tasks=600),
         "gold_accuracy": mean(0.794, 0.012, num_pairs=6720, num_tasks=600), "labelers": ["ada", "bo", "cleo"]},
        [],
    )  # fmt: skip
    write_stage(
        run, "reward",
        {"heldout_accuracy": mean(0.776, 0.02, num_pairs=1344, num_tasks=120), "heldout_comparisons": 120,
         "train_comparisons": 1080, "train_rankings": 1190,
         "score_bias": -0.4, "sample_score_mean": -0.3, "sample_score_std": 1.27,
         "gold_accuracy": mean(0.861, 0.017, num_pairs=1100, num_tasks=300)},
        reward_metrics(rng, 120),
    )  # fmt: skip
    chosen = {
        "num_prompts": 600, "num_samples": 8, "num_kept": 590, "num_truncated": 210, "num_empty": 3, "num_failed": 2,
        "num_identical": 11, "num_tied": 4, "sample_score": -0.3, "kept_score": 1.1,
    }  # fmt: skip
    trained = {"num_steps": 60, "heldout_loss_before": 0.51, "heldout_loss": 0.46}
    write_stage(run, "rejection", {"chosen": chosen, "trained": trained}, language_metrics(rng, 60, 0.5, 0.46))
    write_stage(
        run, "dpo",
        {"loss": "sigmoid", "beta": 0.1, "num_steps": 120, "train_comparisons": 1080, "train_rankings": 1190,
         "heldout_comparisons": 120, "heldout_accuracy": mean(0.73, 0.02, num_pairs=1344, num_tasks=120),
         "margin": mean(0.49, 0.05), "length_correlation": -0.26, "num_pairs": 6480, "num_equal_pairs": 12,
         "pairs": {"chosen_logprob_before": -10.8, "chosen_logprob": -13.9, "rejected_logprob_before": -13.2,
                   "rejected_logprob": -21.2, "chosen_tokens": 21.3, "rejected_tokens": 22.2}},
        dpo_metrics(rng, 120),
    )  # fmt: skip
    scale = {"score_scale_mean": -0.3, "score_scale_std": 1.27}
    write_stage(run, "ppo", {"num_iterations": 80, "final_kl_coef": 0.0512, **scale}, ppo_metrics(rng, 80))
    lines = jsonl(ppo_samples())
    (run / "ppo" / "samples.jsonl").write_text(lines, encoding="utf-8")
    write_stage(run, "compare", compare_results(), [])
    return run


def write_report(run: Path) -> dict[str, Any]:
    return run_report.write_report(run, REPORTERS)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "demo")
    write_report(run)
    return run


def read(path: Path) -> Any:
    """Strict JSON: NaN and Infinity are refused."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{path} holds {name}"))


def at(value: Any, path: str) -> Any:
    """The value at a dotted path. Keys here hold no dots."""
    for key in path.split("."):
        value = value[key]
    return value


def change(run: Path, file: str, path: str, value: Any) -> None:
    content = json.loads((run / file).read_text(encoding="utf-8"))
    *parents, leaf = path.split(".")
    (at(content, ".".join(parents)) if parents else content)[leaf] = value
    (run / file).write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(whole_run, tmp_path / "demo"))


def test_promised_fields(whole_run: Path) -> None:
    report = read(whole_run / "report.json")
    assert report["pretrain"]["heldout_bits_per_byte"] == 0.734
    assert report["sft"]["heldout_loss"] == 0.912
    assert report["reward"]["heldout_accuracy"]["mean"] == 0.776
    assert report["ppo"]["kl_nats"] == 5.21
    rate = report["compare"]["pairs"]["ppo/sft"]["win_rate"]
    assert {"mean", "low", "high", "num_prompts"} <= set(rate)
    assert rate == read(whole_run / "compare/results.json")["pairs"]["ppo/sft"]["win_rate"]
    for policy in ("pretrained", "sft", "best_of_16", "ppo"):
        assert set(report["compare"]["policies"][policy]["gold_score"]) == {"mean", "low", "high"}
    assert report["stages_missing"] == []
    assert report["job"]["config"]["ppo"]["kl"]["coef"] == 0.05


def test_every_number_is_traced(whole_run: Path) -> None:
    report = read(whole_run / "report.json")
    for field, source in report["sources"].items():
        file = whole_run / source["file"]
        assert report["files"][source["file"]] == hashlib.sha256(file.read_bytes()).hexdigest(), field
        if field in STAGES:
            copied = {name: value for name, value in report[field].items() if (field, name) != ("ppo", "kl_nats")}
            assert copied == read(file)
        else:
            assert at(report, field) == at(read(file), source["field"]), field
    for stage in STAGES:
        assert report["lineage"][stage] == read(whole_run / stage / "lineage.json")
        assert report["seconds"][stage] == report["lineage"][stage]["seconds"]
    assert report["seconds"]["total"] == pytest.approx(sum(report["seconds"][stage] for stage in STAGES))


def test_returns_what_it_writes(run: Path) -> None:
    assert write_report(run) == read(run / "report.json")


def test_same_directory_same_bytes(whole_run: Path, run: Path) -> None:
    write_report(run)
    for name in ("report.json", "report.html"):
        assert (run / name).read_bytes() == (whole_run / name).read_bytes()


def test_page_is_sound_and_loads_nothing(whole_run: Path, read_page: ReadPage) -> None:
    page = (whole_run / "report.html").read_text(encoding="utf-8")
    outline = read_page(page)
    assert outline.open == []
    assert not {"img", "link", "iframe", "object", "image"} & set(outline.tags)
    assert outline.tags.count("script") == 1  # that which searches samples
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.references) <= {*outline.ids, "compare/report.html"}
    without_text = re.sub(r">[^<]*<", "><", page)
    assert not re.search(r"https?://|@import|url\((?!#)", without_text)
    assert outline.tags.count("table") == outline.tags.count("caption")
    assert page.count('role="img" aria-label="') == outline.tags.count("figure") == 30


def test_hostile_text_is_escaped(run: Path, read_page: ReadPage) -> None:
    for path in ("judge.description", "judge.name"):
        change(run, "compare/results.json", path, HOSTILE)
    results = read(run / "compare/results.json")
    hostile = f'"{HOSTILE} $\\frac{{'
    results["policies"][hostile] = results["policies"]["sft"] | {"policy": {"name": hostile, "kind": "trained"}}
    results["policies"]["sft"]["by_kind"][HOSTILE] = 0.1
    results["samples"][0] |= {"messages": asked(HOSTILE * 500), "kind": HOSTILE, "prompt_id": HOSTILE}
    results["samples"][0]["responses"]["ppo"]["text"] = "a\x00b\ud800c\u202ed</p></section>"
    (run / "compare/results.json").write_text(json.dumps(results), encoding="utf-8")
    change(run, "sft/lineage.json", "packages", {HOSTILE: HOSTILE})
    change(run, "collect/results.json", "labelers", [HOSTILE])
    job = (run / "job.toml").read_text(encoding="utf-8").replace('note = ""', f"note = '{HOSTILE}'")
    (run / "job.toml").write_text(job, encoding="utf-8")
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("<script") == 1  # our own
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a\ufffdb\ufffdc\u202ed&lt;/p&gt;" in page
    assert read_page(page).open == []


GRPO_JOB = """name = "checked"
seed = 7
workers = 2

[ppo]
init_from = "models/base"
reward = { kind = "function", function = "configs/checks.py:reward" }
prompts = { source = "prompts.jsonl" }
num_iterations = 80
rollout_batch_size = 8
advantage = { kind = "group_mean", samples_per_prompt = 4 }
minibatch = { batch_size = 8, micro_batch_size = 4 }
max_new_tokens = 16
policy_optimizer = { learning_rate = 1e-5 }

[compare]
prompts = { source = "held-out.jsonl" }
max_new_tokens = 16
"""


def test_names_are_those_of_what_the_job_has(run: Path) -> None:
    """A job of GRPO on a function, from a published model: no SFT, no PPO and no reward model are on the page."""
    for stage in STAGES:
        if stage not in ("ppo", "compare"):
            shutil.rmtree(run / stage)
    (run / "job.toml").write_text(GRPO_JOB, encoding="utf-8")
    results = read(run / "compare/results.json")
    del results["policies"]["pretrained"]
    results["pairs"] = {pair: found for pair, found in results["pairs"].items() if "pretrained" not in pair}
    results["policies"]["sft"]["policy"]["title"] = "initial policy"
    results["policies"]["ppo"]["policy"]["title"] = "GRPO"
    results["scorer"] = "checks.py:reward"
    gain = {"category": "", "num_prompts": 200, "proxy": mean(1.0, 0.2), "judge": mean(-0.5, 0.1), "holm_p": 0.001}
    results["hacking"] = {"overall": gain, "categories": [gain | {"category": "verbs"}], "training": []}
    results["hacking"] |= {"late_judge": mean(-0.2, 0.1), "late_proxy": mean(0.2, 0.1)}
    (run / "compare/results.json").write_text(json.dumps(results), encoding="utf-8")
    report = write_report(run)
    page = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", (run / "report.html").read_text(), flags=re.DOTALL)
    assert report["verdict"].startswith("GRPO is preferred to the initial policy")
    assert "KL from the initial policy" in page
    assert "Score of checks.py:reward" in page
    assert "trained to raise the score of checks.py:reward, held near the initial policy" in page
    assert re.findall(r".{30}\b(?:SFT|PPO)\b.{30}|.{30}[Rr]eward model.{30}", page) == []
    shutil.rmtree(run / "compare")
    assert write_report(run)["verdict"].startswith("No policies have been compared. In GRPO the score of checks.py:rew")


def test_the_head_of_an_unfinished_run_says_what_is_unfinished(run: Path) -> None:
    assert "in all stages" in (run / "report.html").read_text(encoding="utf-8")
    shutil.rmtree(run / "compare")
    (run / "ppo/results.json").unlink()
    (run / "ppo/lineage.json").unlink()
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "in all stages" not in page
    assert "in finished stages" in page
    assert "not finished: ppo (unfinished: step 80 of 80) and compare (not run)" in page


def change_metrics(run: Path, **values: float) -> None:
    path = run / "ppo/metrics.jsonl"
    lines = [json.loads(line) | values for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text(jsonl(lines), encoding="utf-8")


def test_a_kl_that_stays_at_0_or_is_below_it_is_explained(run: Path) -> None:
    still, below = "The KL from SFT stayed at 0", "The KL is estimated from samples"
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert (still in page, below in page) == (False, False)
    for kl, shown in ((0.001, (True, False)), (-0.001, (True, True)), (-1.0, (False, True))):
        change_metrics(run, kl_nats=kl)
        write_report(run)
        page = (run / "report.html").read_text(encoding="utf-8")
        assert (still in page, below in page) == shown, kl


def test_an_estimate_of_the_kl_below_0_is_about_0(run: Path) -> None:
    change(run, "compare/results.json", "policies.ppo.kl_nats", mean(-0.2, 0.3))
    report = write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "PPO's KL from SFT is about 0 (\u22120.50 to 0.10) nats." in report["verdict"]
    assert report["ppo"]["kl_nats"] == -0.2  # raw
    assert page.count("about 0") >= 3  # the answer, the card and the table
    assert "\u22120.2 nats" not in page
    assert in_words({"kl_nats": -0.01, "tokens_per_second": 9.0}) == "kl_nats about 0  9 tokens/s"


def test_the_reward_models_card_has_an_interval(run: Path) -> None:
    write_report(run)
    assert "95% interval 76 to 80%, 1,344 held-out pairs" in (run / "report.html").read_text(encoding="utf-8")


def test_it_says_next_to_a_comparison_whether_the_alarm_rang(run: Path) -> None:
    assert "alarm" not in write_report(run)["verdict"]
    change_metrics(run, spot_check=0.5, alarm_nats=0.1)
    never = write_report(run)["verdict"]
    assert never.startswith("PPO is preferred to SFT")
    assert "Spot checks in 80 iterations went from 0.50 to 0.50 and never rang the alarm" in never
    rang = {"policy": 12, "fall": 7, "num_checks": 448, "nats": 3.1, "result": 6, "by_people": False}
    change(run, "ppo/results.json", "alarm", rang)
    assert "Spot checks rang the alarm after iteration 12 and 448 spot checks: " in write_report(run)["verdict"]


def test_a_sample_shows_its_whole_conversation(run: Path, read_page: ReadPage) -> None:
    """The system message and the last turns are open, the turns between them folded."""
    turns = [("user" if place % 2 == 0 else "assistant", f"Turn number {place}.") for place in range(7)]
    messages = [{"role": role, "content": text} for role, text in [("system", "Speak like a pirate."), *turns]]
    results = read(run / "compare/results.json")
    results["samples"][0]["messages"] = messages
    (run / "compare/results.json").write_text(json.dumps(results), encoding="utf-8")
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    body = page[page.index('id="prompt-c-00000"') : page.index('id="prompt-c-00001"')]
    shown = re.findall(r'<p class="role">(\w+)</p><div class="text" dir="auto">(.*?)</div>', body)
    assert shown == [(message["role"], message["content"]) for message in messages]
    folded = body[body.index("<details") : body.index("</details>")]
    assert "3 earlier turns" in folded
    assert re.findall(r"Turn number \d", folded) == [f"Turn number {place}" for place in range(3)]
    assert read_page(page).open == []


@pytest.mark.parametrize("num_finished", range(len(STAGES)))
def test_stages_that_have_not_run(run: Path, num_finished: int, read_page: ReadPage) -> None:
    missing = STAGES[num_finished:]
    for stage in missing:
        shutil.rmtree(run / stage)
    report = write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert report["stages_missing"] == list(missing)
    assert [stage for stage in STAGES if stage in report] == list(STAGES[:num_finished])
    assert page.count("This stage has not run.") == len(missing)
    assert "have been compared" in report["verdict"]
    assert read_page(page).open == []


def test_a_job_of_one_stage_is_about_that_stage(run: Path, read_page: ReadPage) -> None:
    for stage in STAGES:
        if stage != "reward":
            shutil.rmtree(run / stage)
    (run / "job.toml").write_text('name = "demo"\nseed = 7\nworkers = 2\n\n[reward]\n', encoding="utf-8")
    report = write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert report["stages"] == {"reward": {"status": "finished"}}
    assert report["stages_missing"] == []
    assert report["verdict"].startswith("No policies have been compared. The reward model orders")
    assert "has not run" not in page
    assert "The comparison" not in page
    assert read_page(page).open == []


def test_kl_of_training_until_the_comparison_has_run(run: Path) -> None:
    shutil.rmtree(run / "compare")
    last = json.loads((run / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    report = write_report(run)
    assert report["ppo"]["kl_nats"] == last["kl_nats"]
    assert report["sources"]["ppo.kl_nats"]["file"] == "ppo/metrics.jsonl"


def test_unfinished_stage_shows_its_curves(run: Path) -> None:
    shutil.rmtree(run / "compare")
    for name in ("results.json", "lineage.json"):
        (run / "ppo" / name).unlink()
    whole = (run / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "ppo/metrics.jsonl").write_text("".join(whole[:40]) + whole[40][:25], encoding="utf-8")
    report = write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "ppo" not in report
    assert report["stages"]["ppo"] == {"status": "unfinished", "step": 40, "num_steps": 80}
    assert "Unfinished: step 40 of 80." in page
    assert "Curves of ppo, score" in page


def test_answers_to_the_same_prompts_during_training(whole_run: Path, browser: Browser) -> None:
    """The table by hand: changes of 1, 0 and 2 have mean 1 ± 4.303/√3, by Student's t with 2 degrees of freedom."""
    page = browser.new_context(viewport={"width": 390, "height": 800}).new_page()
    page.goto((whole_run / "report.html").as_uri())
    rows = page.get_by_role("table", name="The same 3 prompts").get_by_role("row").all_inner_texts()
    assert [" ".join(text.split()) for text in rows[1:]] == [
        "1 1.00 \u22121.48 to 3.48 – 0.02 0.02 to 0.02 5 67%",
        "40 1.33 \u22121.25 to 3.92 0.33 \u22120.38 to 1.05 0.80 0.80 to 0.80 5 67%",
        "80 2.00 \u22122.30 to 6.30 1.00 \u22121.48 to 3.48 1.60 1.60 to 1.60 5 67%",
    ]
    section = page.get_by_role("region", name="Samples during training")
    followed, drawn = section.locator(".samples").all()
    notes = ["score 0.00 → 1.00", "score 1.00 → 1.00", "score 2.00 → 4.00"]
    assert followed.locator(".sample .by").all_inner_texts() == notes
    assert followed.locator(".sample").first.locator(".response h3").all_inner_texts() == [
        "Iteration 1", "Iteration 40", "Iteration 80",
    ]  # fmt: skip
    assert not drawn.is_visible()
    # Each browser of samples is searched by itself, and a link opens what hides its sample.
    followed.get_by_role("searchbox").fill("at 40 2.")
    expect(followed.get_by_role("status")).to_have_text("1 to 1 of 1 prompt that fit")
    page.evaluate("location.hash = '#prompt-training-40-1'")
    expect(drawn.get_by_text(HOSTILE).nth(1)).to_be_visible()
    expect(drawn.get_by_role("status")).to_have_text("1 to 3 of 3 prompts that fit")
    expect(page.get_by_role("navigation", name="Contents").get_by_role("link")).to_have_text(
        ["The comparison", "Samples side by side", "Samples during training", "The loop, stage by stage",
         "Where the numbers come from", "Glossary"]
    )  # fmt: skip
    page.locator("details.folded").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # A wide table is scrolled; its caption can be read without scrolling.
    ends = page.locator(".scroll caption").evaluate_all("all => all.map(one => one.getBoundingClientRect().right)")
    assert len(ends) > 3
    assert max(ends) <= 390
    page.context.close()


def test_a_run_without_a_comparison_says_what_its_figures_do_not(run: Path) -> None:
    shutil.rmtree(run / "compare")
    verdict = write_report(run)["verdict"]
    assert "this does not show whether they got better or only exploit the score (reward hacking)" in verdict


def test_nan_becomes_null(run: Path) -> None:
    change(run, "reward/results.json", "heldout_accuracy.mean", math.nan)
    change(run, "compare/results.json", "policies.ppo.gold_score.high", math.inf)
    change(run, "compare/results.json", "pairs.ppo/sft.win_rate.mean", math.nan)
    lines = (run / "pretrain/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines[5] = lines[5].replace('"loss": ', '"loss": NaN, "was": ')
    (run / "pretrain/metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_report(run)
    report = read(run / "report.json")
    assert report["reward"]["heldout_accuracy"]["mean"] is None
    assert report["compare"]["policies"]["ppo"]["gold_score"]["high"] is None
    page = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\b(nan|NaN|None|inf)\b", page)


def test_broken_files_are_named(run: Path) -> None:
    with (run / "sft/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("{]\n")
    with pytest.raises(ValueError, match=r"sft/metrics\.jsonl:151: not JSON"):
        write_report(run)
    (run / "sft/results.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"sft/results\.json: a JSON object was expected, not list"):
        write_report(run)
    (run / "job.toml").write_text("name = ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"job\.toml: not TOML"):
        write_report(run)
    with pytest.raises(ValueError, match=r"job\.toml: no such file"):
        write_report(run / "sft")


def answer(run: Path) -> Answer:
    results = read_record(run / "compare/results.json", CompareResults)
    return answer_of_run(results)


def answer_with(run: Path, mean: float, half: float, *, p: float = 0.001, holm_p: float = 0.001) -> tuple[str, str]:
    change(run, "compare/results.json", "pairs.ppo/sft", rated("ppo", "sft", mean, half, p=p, holm_p=holm_p))
    return answer(run).tone, answer(run).text


def test_the_verdict_is_that_of_the_results(run: Path) -> None:
    """Such as one that the KL rules out: nothing decides it again from the win rate."""
    assert answer_with(run, 0.31, 0.1)[0] == "worse"
    conclusion = {"kind": "none", "low": None, "high": None, "reason": "the KL allows only 10 points"}
    change(run, "compare/results.json", "pairs.ppo/sft.conclusion", conclusion)
    change(run, "compare/results.json", "pairs.ppo/sft.different", False)
    assert answer(run).tone == "unclear"
    assert answer(run).text.startswith("Cannot tell which of SFT and PPO is better: the KL allows only 10 points.")


def test_verdict_is_honest(run: Path) -> None:
    tone, text = answer_with(run, 0.83, 0.04)
    assert tone == "better"
    assert text.startswith(
        "PPO is preferred to SFT 83% of the time by the judge playground gold (95% interval 79 to 87%, ties counting"
        " half; p = .001; 200 held-out prompts)."
    )
    assert "PPO's KL from SFT is 5.2 (4.9 to 5.5) nats." in text
    change(run, "compare/results.json", "policies.ppo.policy.is_seen_known", False)
    assert "p = .001; 200 prompts)" in answer(run).text  # such as the prompts of DPO's rankings
    tone, text = answer_with(run, 0.54, 0.06, p=0.2, holm_p=0.2)
    assert tone == "unclear"
    assert text.startswith(
        "No difference between PPO and SFT is shown by the judge playground gold: PPO is preferred 54%"
    )
    assert "95% interval 48 to 60%" in text
    tone, text = answer_with(run, 0.31, 0.06)
    assert tone == "worse"
    assert text.startswith("SFT is preferred to PPO 69% of the time")
    for end in ("low", "high"):
        change(run, "compare/results.json", f"pairs.ppo/sft.win_rate.{end}", None)
    change(run, "compare/results.json", "pairs.ppo/sft.different", False)
    assert answer(run).tone == "unclear"
    assert "too few prompts for an interval" in answer(run).text


def test_an_interval_that_holm_widens_is_not_called_a_95_percent_interval(run: Path) -> None:
    """Of six pairs, p = .027 becomes .082: the interval has the level of that test, in the answer and on the card."""
    _, text = answer_with(run, 0.64, 0.145, p=0.027, holm_p=0.082)
    named = "98.4% interval, widened for 6 comparisons (Holm), 49"
    assert named in text
    assert "95% interval" not in text
    (card,) = [
        line
        for line in REPORTERS["compare"].report(run_folder.read_run(run, REPORTERS).stages["compare"]).headlines
        if line.title == "PPO over SFT"
    ]
    assert card.detail.startswith(named)


def test_prompts_that_several_stages_trained_on_are_counted_once_and_the_stages_named(run: Path) -> None:
    """Rejection sampling trained on 40 prompts and PPO on 20, of which it shares 5: together on 55 of 200."""
    file = "compare/results.json"
    content = read(run / file)
    first, second = [f"p{n}" for n in range(40)], [f"p{n}" for n in range(35, 55)]
    ppo = content["policies"]["ppo"]
    rejection = {"name": "rejection", "kind": "trained", "title": "Rejection sampling", "trainer": "rejection"}
    content["policies"]["rejection"] = ppo | {"policy": rejection | {"seen": {"rejection": first}}}
    content["pairs"]["rejection/sft"] = rated("rejection", "sft", 0.6, 0.04)
    ppo["policy"]["seen"] = {"ppo": []}
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    found = answer(run).text
    assert found.count("200 prompts, not held out: Rejection sampling trains on 40 of 200)") == 2
    assert "PPO trains on" not in found
    ppo["policy"]["seen"] = {"ppo": second}
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    assert "not held out: PPO and Rejection sampling train on 55 of 200)" in answer(run).text


def test_verdict_of_three_policies_is_on_the_newest_and_lists_the_others(run: Path) -> None:
    """As after three rounds: in one paragraph, nobody would find the sentence on a policy."""
    file = "compare/results.json"
    content = read(run / file)
    for name, value in (("ppo_2", 0.6), ("ppo_3", 0.7)):
        about = {"name": name, "kind": "trained", "trainer": name, "raises_score": True}
        content["policies"] = {**content["policies"], name: content["policies"]["ppo"] | {"policy": about}}
        content["pairs"][f"{name}/sft"] = rated(name, "sft", value, 0.04)
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    found = answer(run)
    starts = [text.partition("%")[0] for text in (found.text, *found.more[:2])]
    assert starts == ["ppo_3 is preferred to SFT 70", "ppo_2 is preferred to SFT 60", "PPO is preferred to SFT 84"]
    assert "ppo_2" not in found.text


def test_verdict_of_two_policies_compares_them_too(run: Path) -> None:
    """DPO next to PPO: each against SFT, and one against the other; headlines of both."""
    file = "compare/results.json"
    content = read(run / file)
    about = {"name": "dpo", "kind": "trained", "title": "DPO", "trainer": "dpo", "is_seen_known": False}
    content["policies"] = {**content["policies"], "dpo": content["policies"]["ppo"] | {"policy": about}}
    content["pairs"]["dpo/sft"] = rated("dpo", "sft", 0.7, 0.04)
    content["pairs"]["dpo/ppo"] = rated("dpo", "ppo", 0.48, 0.04, p=0.3, holm_p=0.5)
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    found = answer(run)
    assert (found.tone, found.text.index("DPO is preferred to SFT 70%")) == ("better", 0)
    assert "PPO is preferred to SFT" in found.text
    assert found.text.endswith(
        "No difference between PPO and DPO is shown by the judge playground gold: PPO is preferred 52% of the time"
        " (95% interval 48 to 56%, ties counting half; p = .50; 200 prompts)."
    )
    report = write_report(run)
    assert report["verdict"].startswith("DPO is preferred to SFT 70%")
    page = without_links((run / "report.html").read_text(encoding="utf-8"))
    assert all(title in page for title in ("DPO over SFT", "PPO over SFT", "KL from SFT, DPO"))


def test_verdict_warns_of_what_a_win_rate_hides(run: Path) -> None:
    change(run, "compare/results.json", "policies.ppo.distinct_2", 0.31)
    change(run, "compare/results.json", "policies.ppo.end_rate", 0.42)
    change(run, "compare/results.json", "pairs.ppo/best_of_16", rated("ppo", "best_of_16", 0.4, 0.05))
    text = answer(run).text
    assert "less varied: distinct-2 fell from 0.78 to 0.31" in text
    assert "Only 42% of PPO's responses end" in text
    assert "Best of 16 is still ahead of PPO, which wins 40% against it." in text


def test_one_sentence_says_why_a_score_is_clear_where_the_win_rate_is_not(run: Path) -> None:
    gain = {"category": "", "num_prompts": 200, "proxy": mean(1.0, 0.2), "judge": mean(0.46, 0.4), "holm_p": 0.04}
    hacking = {"overall": gain, "categories": [], "training": [], "late_proxy": mean(0, 1), "late_judge": mean(0, 1)}
    change(run, "compare/results.json", "hacking", hacking)
    answer_with(run, 0.54, 0.06, p=0.2, holm_p=0.2)
    why = "A win rate counts which response is better, a mean score also by how much:"
    assert answer(run).more[-2].startswith(why)
    assert answer(run).more[-1] == WEIGHTS_ONLY
    answer_with(run, 0.6, 0.06)
    assert len(answer(run).more) == 2  # both are clear


def test_the_glossary_has_the_terms_that_the_page_uses(run: Path) -> None:
    write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    linked = set(re.findall(r'href="#glossary-([a-z0-9-]+)"', page))
    assert {"kl-from-sft", "nats", "distinct-2", "win-rate", "best-of-n"} <= linked
    assert set(re.findall(r'id="glossary-([a-z0-9-]+)"', page)) == linked
    shutil.rmtree(run / "compare")
    write_report(run)
    assert 'id="glossary-distinct-2"' not in (run / "report.html").read_text(encoding="utf-8")


def test_a_glossary_escapes_what_it_links() -> None:
    found = Glossary().link(f"{HOSTILE} at 2 nats & <b>")
    assert found == f'{escape(HOSTILE)} at 2 <a class="term" href="#glossary-nats">nats</a> &amp; &lt;b&gt;'


def test_note_is_a_caution(tmp_path: Path) -> None:
    run = make_run(tmp_path / "debug", note="Too small to mean anything.")
    report = write_report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert report["job"]["note"] == "Too small to mean anything."
    page = without_links(page)
    assert page.index("Too small to mean anything.") < page.index(report["verdict"][:40])


def test_rows_that_were_too_long_are_counted_where_they_were_left_out(run: Path) -> None:
    for stage in ("sft", "collect", "reward", "ppo", "compare"):
        change(run, f"{stage}/results.json", "overlong", {"num_rows": 90, "num_truncated": 2, "num_skipped": 1})
    write_report(run)
    text = (run / "report.html").read_text()
    assert text.count("3 of 90 too long: 2 truncated, 1 skipped") == 5


def test_unusual_rows_are_counted_where_they_were_read(run: Path) -> None:
    rows = {"source": "data/shop.jsonl", "num_rows": 96, "unusual": {"invalid (skipped)": 7, "empty reply (kept)": 1}}
    stages = ("pretrain", "sft", "collect", "reward", "ppo", "compare")
    for stage in stages:
        change(run, f"{stage}/results.json", "sources", [rows])
    write_report(run)
    text = (run / "report.html").read_text()
    assert text.count("Rows of shop.jsonl") == len(stages)
    assert text.count("of 96 rows, 7 x invalid (skipped), 1 x empty reply (kept)") == len(stages)


def test_prompts_without_kinds_have_no_table_of_kinds(run: Path) -> None:
    write_report(run)
    assert "Kinds of prompt" in (run / "report.html").read_text()
    for name, found in compare_results()["policies"].items():
        change(run, "compare/results.json", f"policies.{name}.by_kind", {"": found["gold_score"]["mean"]})
    write_report(run)
    assert "Kinds of prompt" not in (run / "report.html").read_text()


def test_numbers_as_people_read_them() -> None:
    assert [number(value) for value in (-1.5, 12345, 0.005, None)] == ["\u22121.50", "12,345", "0.01", "–"]
    assert [number(-0.04, 1), number(-0.05, 1), number(0.0)] == ["0.0", "\u22120.1", "0.00"]
    assert [percent(value) for value in (0.826, 0.999, 1.0, 0.0, 0.001)] == ["83%", "99.9%", "100%", "0%", "0.1%"]
    assert [duration(value) for value in (3.21, 48.2, 252.0, 7500.0)] == ["3.2 s", "48 s", "4 min 12 s", "2 h 05 min"]
    assert [number(math.nan), percent(math.nan)] == ["–", "–"]
    assert [share_ends(0.79, 0.87), share_ends(0.79, math.nan)] == ["79 to 87%", "unknown"]
    assert ends_of(Interval(0, -0.2, 0.1)) == "\u22120.20 to 0.10"
    assert ends_of(Interval(0.8, math.nan, math.nan)) == ""


@pytest.mark.parametrize("window", [1, 3, 4, 50])
def test_running_mean(window: int) -> None:
    values = np.random.default_rng(0).normal(size=20)
    reach = window // 2
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(20)]
    np.testing.assert_allclose(running_mean(values, window), [part.sum() / len(part) for part in around])


def test_best_of_n_stands_at_its_bound(run: Path) -> None:
    # log 16 - 15/16, whatever KL the results name: a selected sample's log ratio says nothing of selection.
    change(run, "compare/results.json", "policies.best_of_16.kl_nats", mean(0.0, 0.0))
    results = read_record(run / "compare/results.json", CompareResults)
    table = policy_table(results, styles_of(list(results.policies)))
    (row,) = [row for row in table.rows if row.heads == ("KL from SFT, nats",)]
    assert [cell.text for cell in row.cells] == ["–", "0.00", "≤ 1.8", "5.2"]


def test_policies_keep_their_colour() -> None:
    styles = styles_of(["ppo", "odd", "best_of_64", "sft", "best_of_4", "pretrained"])
    assert list(styles) == ["ppo", "odd", "best_of_64", "sft", "best_of_4", "pretrained"]
    assert len({style.tone for style in styles.values()}) == len({style.marker for style in styles.values()}) == 6
    known = styles_of(["sft", "ppo"])
    assert [styles[name] for name in known] == list(known.values())


def test_text_that_no_page_can_carry() -> None:
    assert clean_text("a\tb\r\nc\x1b[31m\ufffe\U0001ffff é 😀") == "a\tb\nc\ufffd[31m\ufffd\ufffd é 😀"
    assert clean_json({"a": [1, math.nan, True], "b\x00": math.inf}) == {"a": [1, None, True], "b\ufffd": None}
