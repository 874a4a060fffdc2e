"""Measures a reward model against labelers' judgments, in any preference format including RewardBench and LLMBar."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import scipy

from evaluation.measures.calibration import Calibration, ScoredPairs, by_category, calibration
from files.rows import read_source
from preferences.formats.merging import Found, collect_all, report_excluded
from preferences.formats.registry import AUTO, read_as
from preferences.rankings import is_heldout
from preferences.records import Ranking, Task
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.estimates import LEVEL, Floats, Interval, Share
from preferences.statistics.panel import prompt_numbers
from reward.comparisons import encode_response
from reward.scoring import RewardModel

CATEGORY_FIELDS = ("subset", "category", "domain", "kind")  # of a task's details; the first present one counts
REWARDBENCH = "rewardbench"

# RewardBench's sections and the weights of their subsets, from its published code (rewardbench/constants.py). A weight
# is the subset's number of prompts, except that the 447 prompts of math-prm count as 984, the number of code prompts.
SECTIONS: Mapping[str, Mapping[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28, "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154, "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984, "hep-cpp": 164, "hep-go": 164, "hep-java": 164, "hep-js": 164, "hep-python": 164,
        "hep-rust": 164,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Judgments:
    """Tasks with their valid rankings, and the name of the format that they came in."""

    form: str
    tasks: Mapping[str, Task]
    rankings: tuple[Ranking, ...]
    warnings: Mapping[str, int]


@dataclass(frozen=True)
class RewardBenchScore:
    """Accuracy per section and their mean, 0 to 1, with 95% intervals over prompts within subsets.

    If subsets are `missing`, the score covers the others only and does not compare with published ones.
    """

    sections: Mapping[str, Interval]
    score: Interval
    missing: tuple[str, ...]


@dataclass(frozen=True)
class RewardMeasures:
    """`agreement` is how often two labelers order a pair alike (unknown if no task has two), and `ceiling` the highest
    accuracy that it allows. `rewardbench` is None for other files.

    Pairs that a labeler tied and tasks that are too long for the model are left out and counted; `too_long` names the
    first such task.
    """

    form: str
    num_tasks: int
    num_labelers: int
    num_tied_pairs: int
    num_too_long: int
    too_long: str
    warnings: Mapping[str, int]
    calibration: Calibration
    agreement: Share
    ceiling: Interval
    by_category: Mapping[str, Share]
    rewardbench: RewardBenchScore | None


def read_judged(source: str, form: str = AUTO) -> Judgments:
    """Reads a file's valid rankings; `form` is a format named in docs/labels.md, or "auto".

    Raises: ValueError naming file, line and field; for rows in an unknown format, and if none holds a judgment.
    """
    chosen, rows = read_as(form, read_source(source), source)
    found: Found = collect_all(chosen, rows)
    report_excluded(found)
    rankings = tuple(found.rankings)
    if not rankings:
        raise ValueError(f"{source}: {found.report.num_rows} rows, but no valid ranking")
    return Judgments(chosen.name, found.tasks, rankings, found.report.counts())


def heldout_only(judged: Judgments, share: float, seed: int) -> Judgments:
    """Keeps rankings on prompts that a reward stage with this `heldout_share` and seed did not train on.

    Raises: ValueError if there are none.
    """
    kept = tuple(ranking for ranking in judged.rankings if is_heldout(ranking.prompt, share, seed))
    if not kept:
        raise ValueError(f"a held-out share of {share} with seed {seed} keeps none of {len(judged.rankings)} rankings")
    return Judgments(judged.form, judged.tasks, kept, judged.warnings)


def measure_reward_model(
    folder: Path, judged: Judgments, *, seed: int, weights: Mapping[str, float] | None = None
) -> RewardMeasures:
    """Scores every response once and compares the scores with the rankings. `weights` apply to a model with several
    objectives.

    Raises: ValueError for a folder without a reward model, for weights that do not fit it, and if nothing is left to
    measure.
    """
    judge = RewardModel.load(folder, weights)
    ranked = {ranking.task_id: ranking for ranking in judged.rankings}
    encoded = {
        task_id: [encode_response(judge.tokenizer, ranking.prompt, response) for response in ranking.responses]
        for task_id, ranking in ranked.items()
    }
    too_long = [task_id for task_id, sequences in encoded.items() if not all(map(judge.fits, sequences))]
    for task_id in too_long:
        del encoded[task_id]
    flat = judge.score_sequences([sequence for sequences in encoded.values() for sequence in sequences])
    scores: dict[str, list[float]] = {}
    for task_id, sequences in encoded.items():
        scores[task_id], flat = flat[: len(sequences)], flat[len(sequences) :]
    return measures_of_scores(judged, scores, too_long, seed=seed)


def measures_of_scores(
    judged: Judgments, scores: Mapping[str, Sequence[float]], too_long: Sequence[str] = (), *, seed: int
) -> RewardMeasures:
    """Computes the measures from scores by task, one per response in canonical order; `too_long` tasks have none."""
    rankings = [ranking for ranking in judged.rankings if ranking.task_id in scores]
    pairs, num_tied = scored_pairs(judged.tasks, rankings, scores)
    agreement = pairwise_agreement(rankings)
    return RewardMeasures(
        form=judged.form,
        num_tasks=len(scores),
        num_labelers=len({ranking.labeler for ranking in rankings}),
        num_tied_pairs=num_tied,
        num_too_long=len(too_long),
        too_long=next(iter(too_long), ""),
        warnings=judged.warnings,
        calibration=calibration(pairs, seed=seed),
        agreement=agreement,
        ceiling=Interval(*(highest_accuracy(value) for value in (agreement.mean, agreement.low, agreement.high))),
        by_category=by_category(pairs),
        rewardbench=rewardbench_score(pairs) if judged.form == REWARDBENCH else None,
    )


def highest_accuracy(agreement: float) -> float:
    """Returns the highest possible accuracy if two labelers agree with each other this often: (1 + √(2a - 1)) / 2.

    If a share p of labelers prefers one response of a pair, two of them agree with probability p² + (1 - p)², and
    someone who knows p predicts one with probability max(p, 1 - p). With q = |2p - 1| these are (1 + q²)/2 and
    (1 + q)/2, and by Jensen E q ≤ √(E q²). The result is at least the agreement itself.
    """
    return (1 + math.sqrt(max(0.0, 2 * agreement - 1))) / 2 if not math.isnan(agreement) else math.nan


def scored_pairs(
    tasks: Mapping[str, Task], rankings: Sequence[Ranking], scores: Mapping[str, Sequence[float]]
) -> tuple[ScoredPairs, int]:
    """Returns every untied pair of every ranking as columns, and the number of tied ones."""
    task_ids = list(dict.fromkeys(ranking.task_id for ranking in rankings))
    place = {task_id: number for number, task_id in enumerate(task_ids)}
    prompt_of = prompt_numbers([tasks[task_id].prompt for task_id in task_ids])
    categories = tuple(dict.fromkeys(_category(tasks[task_id]) for task_id in task_ids))
    category_place = {name: number for number, name in enumerate(categories)}
    num_labelers = Counter(ranking.task_id for ranking in rankings)
    leads: list[float] = []
    task_N: list[int] = []
    num_tied = 0
    for ranking in rankings:
        of_task = scores[ranking.task_id]
        for i, j in combinations(range(len(ranking.ranks)), 2):
            if ranking.ranks[i] == ranking.ranks[j]:
                num_tied += 1
                continue
            better, worse = (i, j) if ranking.ranks[i] < ranking.ranks[j] else (j, i)
            leads.append(of_task[better] - of_task[worse])
            task_N.append(place[ranking.task_id])
    of_pair = np.array(task_N, dtype=np.int64)
    pairs = ScoredPairs(
        lead_N=np.array(leads, dtype=np.float64),
        prompt_N=prompt_of[of_pair],
        task_N=of_pair,
        responses_N=np.array([len(tasks[task_id].responses) for task_id in task_ids], dtype=np.int64)[of_pair],
        labelers_N=np.array([num_labelers[task_id] for task_id in task_ids], dtype=np.int64)[of_pair],
        category_N=np.array([category_place[_category(tasks[t])] for t in task_ids], dtype=np.int64)[of_pair],
        categories=categories,
    )
    return pairs, num_tied


def _category(task: Task) -> str:
    named = (task.details[field] for field in CATEGORY_FIELDS if isinstance(task.details.get(field), str))
    return next(named, task.objective)


def rewardbench_score(pairs: ScoredPairs) -> RewardBenchScore:
    """Returns the mean of four sections of weighted subsets (Lambert et al. 2024, arXiv 2403.13787).

    The second half of RewardBench, older test sets, is not scored.
    Raises: ValueError for a category that is not a subset of RewardBench.
    """
    known = {subset for section in SECTIONS.values() for subset in section}
    present = {name for place, name in enumerate(pairs.categories) if (pairs.category_N == place).any()}
    if present - known:
        raise ValueError(f"{', '.join(sorted(present - known))}: not a subset of RewardBench")
    of_subset = {name: _subset_accuracy(pairs, name) for name in present}
    sections: dict[str, tuple[float, float]] = {}
    for name, weights in SECTIONS.items():
        used = {subset: weight for subset, weight in weights.items() if subset in present}
        if used:
            share = {subset: weight / sum(used.values()) for subset, weight in used.items()}
            mean = sum(share[subset] * of_subset[subset][0] for subset in used)
            sections[name] = mean, sum(share[subset] ** 2 * of_subset[subset][1] for subset in used)
    found = list(sections.values())
    overall = sum(mean for mean, _ in found) / len(found), sum(variance for _, variance in found) / len(found) ** 2
    return RewardBenchScore(
        sections={name: _normal_interval(*section) for name, section in sections.items()},
        score=_normal_interval(*overall),
        missing=tuple(sorted(known - present)),
    )


def _subset_accuracy(pairs: ScoredPairs, subset: str) -> tuple[float, float]:
    """Returns mean and variance of a subset's accuracy. The variance is over prompts; for one prompt it is 0.25."""
    chosen_N = pairs.category_N == pairs.categories.index(subset)
    right: Floats = pairs.right_N[chosen_N]
    _, place = np.unique(pairs.prompt_N[chosen_N], return_inverse=True)
    num_prompts, mean = int(place.max()) + 1, float(right.mean())
    if num_prompts == 1:
        return mean, 0.25
    off_P = np.bincount(place, right - mean) / len(right)
    return mean, num_prompts / (num_prompts - 1) * float((off_P**2).sum())


def _normal_interval(mean: float, variance: float) -> Interval:
    half = float(scipy.special.ndtri((1 + LEVEL) / 2)) * float(np.sqrt(variance))
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))
