"""`research.study distillation`: its arms, its rules on planted students, one run end to end, and the kept measures."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from heed.jobs.job_file import load_job
from preferences.statistics.estimates import Floats
from research.over_optimisation.curves import Curve
from research.studies import distillation
from research.studies.arms import RUNS, arm_names, every_arm
from research.studies.distillation import DISTILLATION, TITLES, chosen, cost_table
from research.studies.findings import Distilled, Finding
from research.studies.measures import Recorded, StoredMeasures, stamps_of
from research.studies.study import QUICK, as_markdown, run_study
from research.studies.verdicts import Claim
from tests.research.studies.test_study import DEBUG, JOBS

NUM_PROMPTS = 200
KEPT = Path(__file__).parents[3] / "research" / "findings" / "measures-distillation"
EQUAL = dict.fromkeys(TITLES, 0.3)


@dataclass(frozen=True)
class Planted:
    """Each method's gold; the second rate is the best, the others lose .1. Teacher .5, start .1."""

    seed: int
    golds: dict[str, float]

    def distilled(self, arm: str) -> Distilled:
        rng = np.random.default_rng(self.seed)
        start_P = rng.normal(0, 0.2, NUM_PROMPTS)
        method, _, number = arm.rpartition("-")
        height = {"teacher": 0.5, "student": 0.1}.get(arm) or self.golds[method] - 0.1 * (number != "2")
        gold_KP = np.stack([0 * start_P, height + start_P + rng.normal(0, 0.02, NUM_PROMPTS)])
        kl = 8.0 if method == "samples" else 5.0
        return Distilled(gold_KP, kl + 0 * gold_KP, 20 + 0 * gold_KP, np.array([[0.0] * 5, [4e3, 2e3, 0, 2e3, 9.0]]))

    def best_of_n(self, judge: str) -> Curve:
        raise NotImplementedError

    def rl(self, arm: str) -> Curve:
        raise NotImplementedError

    def tokens(self, arm: str) -> Floats:
        raise NotImplementedError

    def bits(self, stage: str) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def spot_checks(self, arm: str) -> tuple[Floats, Floats, Floats]:
        raise NotImplementedError


def seeds(**golds: float) -> list[Planted]:
    return [
        Planted(seed, {**EQUAL, **{name.replace("_", "-"): gold for name, gold in golds.items()}}) for seed in range(3)
    ]


def test_every_verdict_follows_from_the_planted_golds() -> None:
    on_policy_wins = DISTILLATION.evaluate(seeds(token=0.42, samples_token=0.45, more_samples=0.36, samples=0.24))
    values = [claim.over_seeds.mean for claim in on_policy_wins.claims]
    # Differences of gold, nats, and shares: (.42 - .1) / .4 - .5, and so on.
    assert values == pytest.approx([0.18, 0.21, 0.09, 0.12, 0.12, 3.0, 0.3, -0.15, 0.375], abs=0.02)
    verdicts = [claim.verdict for claim in on_policy_wins.claims]
    assert verdicts == [*["replicates"] * 7, "does not replicate", "replicates"]
    samples_win = DISTILLATION.evaluate(seeds(token=0.2, samples=0.4))
    assert [claim.verdict for claim in samples_win.claims[:2]] == ["does not replicate"] * 2
    assert samples_win.figure.count("student's start") >= 1
    assert len(samples_win.table.splitlines()) == 2 + 2 + len(TITLES)


def test_one_half_of_the_prompts_chooses_for_the_other() -> None:
    """Where no rate is better, the best of three by the same prompts would be better than it is."""

    class Even(Planted):
        def distilled(self, arm: str) -> Distilled:
            rng = np.random.default_rng([self.seed, RUNS.index(int(arm[-1]))])
            gold_KP = rng.normal(0.3, 1.0, (1, NUM_PROMPTS))
            return Distilled(gold_KP, 0 * gold_KP, 0 * gold_KP, np.zeros((1, 5)))

    worlds = [Even(seed, EQUAL) for seed in range(300)]
    own = np.mean([max(world.distilled(f"token-{run}").gold_KP.mean() for run in RUNS) for world in worlds])
    crossed = np.mean([chosen(world, "token").gold_P.mean() for world in worlds])
    assert own > 0.34
    assert crossed == pytest.approx(0.3, abs=0.02)  # 300 worlds: a standard error of .004


def test_arms_of_a_method_differ_in_the_rate_and_have_the_same_budget(tmp_path: Path) -> None:
    job = load_job(JOBS / "study-distillation.toml")
    arms = every_arm(job, tmp_path)
    rates = {
        method: [
            arms[arm].changes.get("ppo.policy_optimizer.learning_rate")
            or arms[arm].changes["sft.optimizer.learning_rate"]
            for arm in arm_names(method)
        ]
        for method in TITLES
    }
    assert all(found == pytest.approx([2e-3 / 3, 2e-3, 6e-3]) for found in rates.values())
    assert arms["student"].changes["model.hidden_size"] == 48  # of 72
    assert arms["samples-token-1"].changes["ppo.num_iterations"] * 2 == job.section_of(distillation.PPO).num_iterations
    assert arms["token-1"].changes["ppo.teachers"] == [
        {"model": str(tmp_path / "teacher" / "ppo" / "model"), "kind": "token"}
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("_shared_workers")
def test_the_study_runs_and_its_measures_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rate per method: that is what differs between the arms that are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distillation, "arm_names", lambda method: (f"{method}-2",))
    arms = ("teacher", "student", *(f"{method}-2" for method in TITLES))
    short = Finding("distillation", "", "", arms, DISTILLATION.contrasts, lambda _of: {}, table=cost_table)
    monkeypatch.setattr("research.studies.study.DISTILLATION", short)
    # Not `TINY`: after so little SFT, the teacher would end no response.
    overrides = (
        *QUICK,
        "world.num_collect_prompts=30",
        "world.num_counting=150",
        "sft.demonstrations=[{source='world:counting_demonstrations'}]",
        "ppo.prompts.source=world:counting_prompts",
        "ppo.num_epochs=1",
        "compare.prompts={source='world:counting_compare',max_rows=10}",
        "compare.judge_function=heed.worlds.rewards:solved",
    )
    (found,) = run_study("distillation", DEBUG, Path("runs"), num_seeds=1, overrides=overrides)
    seed = Path("runs/seed-0")
    written = {
        name: [json.loads(line) for line in (seed / "teacher-samples" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("one", "half", "more")
    }
    prompts = {row["messages"][0]["content"] for row in written["one"]}
    assert 0 < len(written["half"]) < len(written["one"]) <= 48  # responses of an on-policy arm
    assert prompts <= {row["messages"][0]["content"] for row in written["more"]}
    assert len(written["one"]) < len(written["more"]) <= 4 * 48
    costs = json.loads((seed / "teacher-samples" / "samples.json").read_text())["costs"]
    stored = StoredMeasures.read(
        Path("runs/measures/seed-0.npz"), 0, stamps_of(load_job(DEBUG, [*overrides, "seed=0"]))
    )
    teacher = stored.distilled("teacher")
    assert teacher.kl_KP.max() < 1e-3  # it is its own teacher
    assert teacher.gold_KP.shape == (1, 10)
    trained, by_student, sampled, scored, _ = stored.distilled("samples-2").costs_K5[-1]
    assert (trained, by_student, sampled, scored) == (2 * costs["one"][1], 0, costs["one"][0], 0)
    trained, by_student, sampled, scored, _ = stored.distilled("token-2").costs_K5[-1]
    assert trained == by_student == scored > 0 == sampled  # one epoch
    again = short.evaluate([Recorded(stored)])
    assert as_markdown([again], 1) == as_markdown([found], 1)


def test_the_documented_results_follow_from_the_kept_measures(tmp_path: Path) -> None:
    num_seeds = len(list(KEPT.glob("seed-*.npz")))
    job = JOBS / "study-distillation.toml"
    (found,) = run_study("distillation", job, tmp_path, num_seeds=num_seeds, stored=KEPT)
    documented = (KEPT.parent / "distillation.md").read_text(encoding="utf-8")
    assert [claim.text for claim in found.claims if documented_row(claim) not in documented] == []
    assert found.table in documented
    assert not list(tmp_path.glob("seed-*"))  # nothing ran


def documented_row(claim: Claim) -> str:
    """A claim's row in distillation.md, such as "| claim | .011, .008 | .010 (.005 to .015) | **replicates** |"."""
    mean, low, high = (plain(value) for value in (claim.over_seeds.mean, claim.over_seeds.low, claim.over_seeds.high))
    seeds = ", ".join(plain(value.mean) for value in claim.by_seed)
    verdict = claim.verdict if claim.verdict == "undecided" else f"**{claim.verdict}**"
    return f"| {claim.text} | {seeds} | {mean} ({low} to {high}) | {verdict} |"


def plain(value: float) -> str:
    """Three decimals without a zero before the point."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"
