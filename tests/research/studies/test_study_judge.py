"""`research.study judge` end to end at the debug job's size, and its rules on curves with planted truths."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heed.jobs.job_file import load_job
from heed.worlds.gold import RUBRIC, graded_rows, judge
from heed.worlds.instructions import read_prompt
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from research.over_optimisation.curves import Curve
from research.studies.findings import JUDGED
from research.studies.study import QUICK, run_study
from reward.rubric import Rubric
from tests.research.studies.test_study import DEBUG, JOBS, TINY
from training.metrics import read_metrics


def curve(golds: list[float], proxies: list[float], seed: int) -> Curve:
    """A curve of these gains at growing distance, with noise on each of 100 prompts."""
    noise_P = np.random.default_rng(seed).normal(0, 0.01, 100)
    names = tuple(f"iteration {n}" for n in range(len(golds)))
    kl_KP = np.arange(1.0, len(golds) + 1)[:, None] * np.ones(100)
    gold_KP, proxy_KP = (0.4 + np.array(gains)[:, None] + noise_P for gains in (golds, proxies))
    return Curve("rl", names, kl_KP, gold_KP, proxy_KP, np.full(100, 0.4), np.full(100, 0.4))


class Planted:
    """Measures of one seed of this study."""

    def __init__(self, seed: int, **golds: list[float]) -> None:
        self.seed, self.golds = seed, golds

    def rl(self, arm: str) -> Curve:
        return curve(self.golds[arm.removeprefix("ppo-")], [0.1, 0.2, 0.3, 0.4], self.seed)


def test_every_verdict_follows_from_its_rule() -> None:
    fallen, kept = [0.1, 0.15, 0.05, -0.1], [0.1, 0.2, 0.2, 0.2]
    shift = [0.0, 0.001, -0.001]
    found = JUDGED.evaluate([Planted(seed, judge=fallen, dropout=[g + shift[seed] for g in kept]) for seed in range(3)])  # type: ignore[misc]
    assert found.verdict == "replicates"
    judge_rise, fall, lead = (claim.over_seeds.mean for claim in found.claims)
    assert (judge_rise, fall) == (pytest.approx(0.4, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert lead == pytest.approx(
        np.mean(np.interp(np.linspace(1, 4, 8), [1, 2, 3, 4], np.array(kept) - fallen)), abs=0.03
    )
    other = JUDGED.evaluate([Planted(seed, judge=kept, dropout=kept) for seed in range(3)])  # type: ignore[misc]
    assert [claim.verdict for claim in other.claims] == ["replicates", "does not replicate", "does not replicate"]
    assert JUDGED.evaluate([Planted(0, judge=fallen, dropout=kept)]).verdict == "undecided"  # type: ignore[misc]


def test_the_worlds_grades_are_those_of_the_rubric(tmp_path: Path) -> None:
    """The questions are what a judge with that rubric is asked, and without noise the grades are the gold's factors."""
    sizes = dict.fromkeys(("num_pretrain_texts", "num_demonstrations", "num_ppo_prompts", "num_compare_prompts"), 20)
    world = PlaygroundWorld(PlaygroundConfig(num_graded=119, num_collect_prompts=20, **sizes))
    world.write_data(tmp_path, 3)
    rubric = Rubric.model_validate(RUBRIC)
    names = {criterion.text: name for name, criterion in rubric.criteria.items()}
    rows = [json.loads(line) for line in (tmp_path / "graded_heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 180
    for row in rows:
        question, grade = (turn["content"] for turn in row["messages"])
        prompt, rest = question.split("\n", 1)
        response, criterion = rest.rsplit("\n", 1)
        asked: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        assert question == rubric.question(names[criterion], asked, response)
        factor = getattr(judge(read_prompt(prompt), response), names[criterion])
        assert abs(int(grade) - (1 + 4 * factor)) <= 0.5
    noisy = (tmp_path / "graded.jsonl").read_text().splitlines()
    assert len(noisy) == 119


def test_noise_is_the_share_of_random_grades() -> None:
    import random

    prompt = "Name three animals and begin with cat."
    request = read_prompt(prompt)
    rows = [[graded_rows(prompt, request, random.Random(n), noise) for n in range(300)] for noise in (0.0, 0.5)]
    # A random grade is another one in four of five cases. The draws of grades change no answer of the same seed.
    first = [(a[0], b[0]) for a, b in zip(*rows, strict=True)]
    assert all(a["messages"][0] == b["messages"][0] for a, b in first)
    differing = np.mean([a["messages"][1] != b["messages"][1] for a, b in first])
    assert differing == pytest.approx(0.5 * 4 / 5, abs=0.09)


@pytest.mark.nightly
@pytest.mark.usefixtures("_shared_workers")
def test_the_study_runs_and_measures_both_arms_by_the_same_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    run_study("judge", DEBUG, runs, num_seeds=1, overrides=(*QUICK, *TINY))
    (finding,) = json.loads((runs / "findings.json").read_text())["findings"]
    assert (finding["verdict"], len(finding["claims"])) == ("undecided", 3)  # one seed
    assert [len(curve) for curve in finding["curves"][0].values()] == [3, 3]
    seed = runs / "seed-0"
    metrics = {arm: read_metrics(seed / arm / "ppo" / "metrics.jsonl") for arm in ("ppo-judge", "ppo-dropout")}
    for arm, lines in metrics.items():
        assert all(line["failed_scores"] == 0 for line in lines)
        assert all(0 <= line[f"score/{name}"] <= 1 for line in lines for name in ("form", "fit", "asked"))
        assert ("failed/form" in lines[0]) == (arm == "ppo-judge")
    assert metrics["ppo-judge"][0]["score"] != metrics["ppo-dropout"][0]["score"]


def test_a_world_without_grades_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"world\.num_graded is 0; graded answers, as in .*study-judge\.toml"):
        run_study("judge", JOBS / "study.toml", tmp_path, num_seeds=1)
    assert load_job(JOBS / "study-judge.toml").world is not None
