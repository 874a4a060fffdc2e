"""`research.study label-choice`: arithmetic by hand, verdicts on planted curves, and a run at the debug size."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preferences.records import Answer, Message, ShownTask, Task
from preferences.statistics.estimates import Floats
from preferences.task_selection import RULES
from research.over_optimisation.curves import Curve
from research.studies.label_choice import CHOICES, Answered, HeadPosterior, Pool, doublings_saved, judged, rounds
from research.studies.study import QUICK, run_study
from tests.research.studies.test_study import DEBUG, JOBS, TINY

NUM_PROMPTS = 200
ROOT = Path(__file__).parents[3]


def named(arm: str) -> tuple[str, int]:
    """Returns the rule and the round of an arm."""
    rule, _, number = arm.rpartition("-")
    return (rule, int(number)) if rule else ("", 0)


@dataclass(frozen=True)
class Planted:
    """Gold of best-of-n grows by .02 per doubling of the labels, plus a rule's own gain after the first round."""

    seed: int
    gains: dict[str, float]

    def best_of_n(self, judge: str) -> Curve:
        rule, number = named(judge)
        gold = 0.4 + 0.02 * number + (self.gains.get(rule, 0.0) + 0.001 * (self.seed - 1) if number else 0)
        gold_KP = np.array([[gold - 0.1], [gold]]) + np.random.default_rng(self.seed).normal(0, 0.1, NUM_PROMPTS)
        kl_KP, start_P = np.ones((2, NUM_PROMPTS)) * [[0.2], [2.5]], np.full(NUM_PROMPTS, 0.4)
        return Curve("best_of_n", ("best of 2", "best of 32"), kl_KP, gold_KP, gold_KP, start_P, start_P)

    def right_pairs(self, judge: str) -> tuple[Floats, Floats]:
        rule, _ = named(judge)
        return np.full(50, 7 + 10 * self.gains.get(rule, 0.0) + 0.001 * self.seed * len(rule)), np.full(50, 10.0)

    def labels(self, arm: str) -> tuple[Floats, Floats]:
        rule, number = named(arm)
        num = 256 << max(0, number - 1)
        num_right = round(num * (0.7 + self.gains.get(rule, 0.0))) + self.seed
        return np.full(num, 0.1), (np.arange(num) < num_right).astype(np.float64)


def test_verdicts_follow_the_planted_gains() -> None:
    seeds = [Planted(seed, {"large-gap": 0.04, "near-tie": -0.04}) for seed in range(3)]
    large_gap, near_tie, ensemble = (finding.evaluate(seeds) for finding in CHOICES)  # type: ignore[arg-type]
    assert large_gap.claims[0].text == "large-gap minus uniform: gold of best of 32, with 1,024 labels"
    assert [claim.verdict for claim in large_gap.claims] == ["replicates"] * 4
    gold, accuracy, saved, righter = (claim.over_seeds.mean for claim in large_gap.claims)
    assert [gold, accuracy, righter] == pytest.approx([0.04] * 3, abs=0.01)
    assert saved == pytest.approx(2, abs=0.15)  # .04 is what two doublings bring
    verdicts = [claim.verdict for claim in near_tie.claims]
    assert verdicts == ["does not replicate"] * 3 + ["replicates"]  # its labels are right less often
    assert ensemble.verdict == "does not replicate"
    assert set(large_gap.curves[0]) == {"uniform", "large-gap"}


def test_doublings_by_hand() -> None:
    uniform_R = np.array([0.40, 0.42, 0.44, 0.46])
    # Ahead by .01, .02 and .03 after the first round: .02 on average, as much as one doubling.
    assert doublings_saved(np.array([0.40, 0.43, 0.46, 0.49]), uniform_R) == pytest.approx(1)
    assert doublings_saved(uniform_R, uniform_R) == pytest.approx(0)
    assert np.isnan(doublings_saved(uniform_R, uniform_R[::-1]))


def test_heads_are_drawn_from_the_posterior() -> None:
    """With one feature: two labels of difference 2 and 0 under a head of .5."""
    posterior = HeadPosterior.laplace(np.array([0.5]), np.array([[2.0], [0.0]]))
    chance = 1 / (1 + np.exp(-1))
    assert posterior.precision_DD == pytest.approx(np.array([[2 + chance * (1 - chance) * 4]]))
    drawn = posterior.draw(20_000, seed=1)
    assert drawn.shape == (20_000, 1)
    assert (drawn.mean(), drawn.var()) == (
        pytest.approx(0.5, abs=0.02),
        pytest.approx(1 / posterior.precision_DD[0, 0], rel=0.05),
    )
    # With two features, draws vary least along what the labels have shown.
    shown = HeadPosterior.laplace(np.zeros(2), np.array([[3.0, 3.0]] * 40)).draw(20_000, seed=2)
    assert (shown @ [1, 1]).std() < 0.2 * (shown @ [1, -1]).std()
    assert np.cov(shown.T) == pytest.approx(np.linalg.inv(3 * np.eye(2) + 40 * 0.25 * 9 * np.ones((2, 2))), abs=0.01)


@dataclass(frozen=True)
class Longer:
    """Prefers the longer response, and remembers which response was shown first."""

    name: str
    first: list[str]

    def judge(self, shown: ShownTask) -> Answer:
        one, other = map(len, shown.responses)
        self.first.append(shown.responses[0])
        return Answer((1, 1) if one == other else (1, 2) if one > other else (2, 1), 1000)


def toy_pool(num_prompts: int = 40) -> Pool:
    """Prompts with five responses of 1 to 5 letters, whose only feature and gold score are their length."""
    responses = tuple("abcde"[: length + 1] for length in range(5))
    length_C = np.arange(5) / 4
    made = [
        Answered(f"p{n}", (Message("user", f"question {n}"),), responses, length_C[:, None] - 0.5, length_C)
        for n in range(num_prompts)
    ]
    return Pool(made[8:], made[:8], made[:8])


def test_labelers_take_turns_and_see_responses_in_either_order() -> None:
    pool, labelers = toy_pool(), [Longer("one", []), Longer("two", [])]
    of = pool.train[0]
    tasks = [Task(f"batch/{of.prompt_id}/{n}", of.prompt, ("a", "abcd"), ("sft", "sft")) for n in range(40)]
    labels = judged(pool, tasks, labelers, seed=0)
    # Whichever was shown first, the second is better, by a gold score of .75.
    assert [(label.vote, label.gap) for label in labels] == [(0.0, -0.75)] * 40
    assert labels[0].difference_D == pytest.approx([-0.75])
    assert all(len(labeler.first) == 20 for labeler in labelers)
    assert 8 < sum(text == "a" for labeler in labelers for text in labeler.first) < 32


def test_rounds_double_the_labels_and_rules_choose_what_they_say() -> None:
    pool = toy_pool()
    assert pool.num_first == 4  # 32 prompts: 4, 8, 16 and 32 labels
    gaps = {}
    for rule in RULES:
        made = rounds(pool, [Longer("one", [])], rule, seed=3)
        assert [len(of.labels) for of in made] == [4, 4, 8, 16]
        # Longer is better, so the head has the sign of the length, and more labels make it larger and surer.
        heads = [float(of.posterior.mean_D[0]) for of in made]
        assert 0 < heads[0] < heads[-1]
        assert made[0].posterior.precision_DD[0, 0] < made[-1].posterior.precision_DD[0, 0]
        gaps[rule] = np.mean([abs(label.gap) for of in made[1:] for label in of.labels])
    assert gaps["large-gap"] > gaps["uniform"] + 0.2
    assert gaps["near-tie"] <= gaps["uniform"] + 0.05
    first = [rounds(pool, [Longer("one", [])], rule, seed=3)[0].labels for rule in ("uniform", "near-tie")]
    assert [label.gap for label in first[0]] == [label.gap for label in first[1]]


def test_a_fitted_head_solves_its_equation() -> None:
    """The gradient of the log posterior is 0: Σ (vote - p)·x = (D + 1)·w."""
    rng = np.random.default_rng(0)
    difference_LD, vote_L = rng.normal(size=(30, 3)), rng.choice([0.0, 0.5, 1.0], 30)
    head_D = HeadPosterior.fitted(difference_LD, vote_L).mean_D
    chance_L = 1 / (1 + np.exp(-difference_LD @ head_D))
    assert difference_LD.T @ (vote_L - chance_L) == pytest.approx(4 * head_D, abs=1e-6)


@pytest.mark.long
def test_the_documented_results_come_from_the_stored_measures(tmp_path: Path) -> None:
    page = (ROOT / "research" / "findings" / "label-choice.md").read_text(encoding="utf-8")
    stored = ROOT / "research" / "findings" / "measures-choice"
    num_seeds = len(list(stored.glob("seed-*.npz")))
    for found in run_study("label-choice", JOBS / "study-choice.toml", tmp_path, num_seeds=num_seeds, stored=stored):
        for claim in found.claims:
            digits = 2 if "doublings" in claim.text else 3
            seeds = ", ".join(f"{value.mean:.{digits}f}".replace("0.", ".", 1) for value in claim.by_seed)
            verdict = claim.verdict if claim.verdict == "undecided" else f"**{claim.verdict}**"
            (row,) = [line for line in page.splitlines() if line.startswith(f"| {claim.text} | {seeds} |")]
            assert row.endswith(f" | {verdict} |")
    assert not (tmp_path / "policy").exists()


@pytest.mark.long
@pytest.mark.usefixtures("_shared_workers")
def test_the_study_runs_on_one_policy_and_reads_its_own_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")

    def study(folder: Path, **more: Path) -> list[dict[str, Any]]:
        run_study("label-choice", DEBUG, folder, num_seeds=2, overrides=(*QUICK, *TINY), **more)
        return list(json.loads((folder / "findings.json").read_text())["findings"])

    found = study(runs)
    assert [len(finding["claims"]) for finding in found] == [4, 4, 8]
    assert "with 8 labels" in found[0]["claims"][0]["claim"]  # 21 prompts to label: 2, 4, 8 and 16
    assert found[0]["curves"][0] != found[0]["curves"][1]  # the seeds' labels differ
    assert [path.name for path in sorted(runs.iterdir())] == [
        "figures",
        "findings.json",
        "findings.md",
        "measures",
        "policy",
    ]
    assert study(Path("again"), stored=runs / "measures") == found
    assert not Path("again/policy").exists()
    with pytest.raises(ValueError, match="measures of another job"):
        run_study("label-choice", DEBUG, runs, num_seeds=1, overrides=QUICK, stored=runs / "measures")
    with pytest.raises(ValueError, match="rloo: only findings of label-choice were expected"):
        run_study("choose-near-tie,rloo", DEBUG, runs, num_seeds=1)
