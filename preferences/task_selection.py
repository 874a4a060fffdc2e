"""Selecting which candidate responses become tasks: at random, or where reward models are least certain.

Selecting by score gives a biased sample of the candidates. So every task records the probability with which it was
selected (`details["propensity"]`), and `uniform_mean` uses it to correct for the selection. Some prompts, drawn before
any score is read, get uniformly selected tasks for evaluation (`details["slice"]`).
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Message, Task
from preferences.statistics.estimates import LEVEL, Floats, Interval
from preferences.statistics.intervals import NUM_RESAMPLES, percentiles, resampled_sums
from preferences.statistics.panel import prompt_numbers

MAX_SETS = 5_000  # sets of responses per prompt; each has its own probability
UNIFORM_PART = 0.1  # the uniform part of the "uncertainty" probability, which keeps weights at ten or less

Method = Literal["uniform", "uncertainty"]


@dataclass(frozen=True)
class Candidate:
    """A response that labelers could judge, who wrote it, and the score that each reward model gives it."""

    response: str
    source: str
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class PromptCandidates:
    """All candidates of one prompt."""

    prompt_id: str
    prompt: tuple[Message, ...]
    candidates: tuple[Candidate, ...]


def choose_tasks(
    prompts: Sequence[PromptCandidates],
    *,
    batch: str,
    method: Method,
    responses_per_task: int,
    tasks_per_prompt: int,
    evaluation_share: float,
    seed: int,
) -> list[Task]:
    """Returns tasks of `responses_per_task` distinct responses each, up to `tasks_per_prompt` per prompt.

    Responses that differ only in white space at their ends are duplicates; the first one is kept. A prompt with too few
    distinct responses gets no task. A task's `details` are: `method`, how its prompt's tasks were drawn; `slice`
    ("evaluation" for a share of the prompts, whose tasks are always drawn uniformly, else "training"); `propensity`,
    the probability of selecting this set of responses; and `num_sets`, how many sets the prompt has.

    Raises: ValueError, naming the field or prompt, for numbers out of range, for scores that are missing, not finite,
    or not equally many for every candidate, and for more than MAX_SETS sets.
    """
    _check(responses_per_task, tasks_per_prompt, evaluation_share)
    tasks = []
    for prompt in prompts:
        candidates = distinct(prompt.candidates)
        if method == "uncertainty":
            _check_scores(prompt.prompt_id, candidates)
        if len(candidates) < responses_per_task:
            continue
        num_sets = math.comb(len(candidates), responses_per_task)
        if num_sets > MAX_SETS:
            raise ValueError(
                f"prompt {prompt.prompt_id!r}: {len(candidates)} candidates make {num_sets} sets of"
                f" {responses_per_task}; at most {MAX_SETS} were expected"
            )
        sets = list(combinations(range(len(candidates)), responses_per_task))
        is_evaluation = _uniform_number("slice", seed, prompt.prompt_id) < evaluation_share
        used: Method = "uniform" if is_evaluation else method
        weights = np.ones(num_sets) if used == "uniform" else _uncertainties(candidates, sets)
        propensities = inclusion_probabilities(weights, tasks_per_prompt)
        start = _uniform_number("choice", seed, prompt.prompt_id)
        for index in systematic_sample(propensities, start, _order(num_sets, seed, prompt.prompt_id)):
            members = [candidates[number] for number in sets[index]]
            tasks.append(
                Task(
                    task_id=f"{batch}/{prompt.prompt_id}/{'-'.join(map(str, sets[index]))}",
                    prompt=prompt.prompt,
                    responses=tuple(member.response for member in members),
                    sources=tuple(member.source for member in members),
                    details={
                        "method": used,
                        "slice": "evaluation" if is_evaluation else "training",
                        "propensity": float(propensities[index]),
                        "num_sets": num_sets,
                    },
                )
            )
    return tasks


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drops candidates whose response came before, ignoring white space at the ends. Keeps the order."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.response.strip(), candidate)
    return list(first.values())


def uncertainty(one: Candidate, other: Candidate) -> float:
    """Returns how uncertain the reward models are about which of two responses is better, from 0 to 1.

    By Bradley-Terry, a model with scores s prefers the first with probability p = σ(s_one - s_other). With p̄ the mean
    over models, the result is 4·p̄(1 - p̄), the variance of the predicted answer scaled to at most 1. It is high if
    scores are close and if models contradict each other.
    """
    chances = [_sigmoid(a - b) for a, b in zip(one.scores, other.scores, strict=True)]
    mean = sum(chances) / len(chances)
    return 4 * mean * (1 - mean)


def inclusion_probabilities(weights: Floats, num_chosen: int) -> Floats:
    """Returns each set's probability of being among the `num_chosen`: proportional to `weights`, at most 1.

    They sum to `num_chosen`, or are all 1 if there are no more sets than that. Any excess above 1 goes to other sets.
    """
    if num_chosen >= len(weights):
        return np.ones(len(weights))
    sure = np.zeros(len(weights), dtype=bool)
    while True:
        rest = num_chosen - sure.sum()
        probabilities = np.where(sure, 1.0, rest * weights / weights[~sure].sum())
        if (probabilities <= 1).all():
            return np.asarray(probabilities)
        sure |= probabilities >= 1


def systematic_sample(probabilities: Floats, start: float, order: Sequence[int]) -> list[int]:
    """Returns the sets whose interval of the running sum, taken in `order`, contains `start + k` for an integer k >= 0.

    If `start` is uniform in 0 to 1, set i is chosen with probability exactly `probabilities[i]`, no set is chosen
    twice, and the number of chosen sets is the sum of the probabilities. Madow 1949, Annals of Mathematical Statistics
    20(3).
    """
    ends = np.cumsum(probabilities[list(order)])
    ends[-1] = round(float(ends[-1]))  # the sum is an integer up to rounding
    marks = start + np.arange(int(ends[-1]))
    return sorted(int(order[index]) for index in np.searchsorted(ends, marks, side="right"))


def uniform_mean(tasks: Sequence[Task], values: Sequence[float], *, seed: int) -> Interval:
    """Estimates the mean value under uniform selection of tasks, with a 95% interval over prompts.

        Σ_i w_i·value_i / Σ_i w_i,   w_i = 1/(propensity_i · num_sets_i)

    Each prompt then has weight 1 in expectation, whichever of its sets were selected (Hájek 1971).

    Raises: ValueError for a task without propensity, and if there are no tasks.
    """
    if len(tasks) != len(values) or not tasks:
        raise ValueError(
            f"values has {len(values)} entries for {len(tasks)} tasks; one per task, and at least one, was expected"
        )
    for task in tasks:
        if "propensity" not in task.details or "num_sets" not in task.details:
            raise ValueError(f"task {task.task_id!r}: details has no propensity or num_sets; choose_tasks writes both")
    weights = np.array([1 / (task.details["propensity"] * task.details["num_sets"]) for task in tasks])
    cluster = prompt_numbers([task.prompt for task in tasks])
    table = np.zeros((int(cluster.max()) + 1, 2))
    np.add.at(table, cluster, np.stack([weights * np.asarray(values, dtype=np.float64), weights], axis=1))
    mean = float(table[:, 0].sum() / table[:, 1].sum())
    if len(table) == 1:
        return Interval(mean, math.nan, math.nan)
    sums = resampled_sums(table, seed=seed, num_resamples=NUM_RESAMPLES)
    return Interval(mean, *percentiles(sums[:, 0] / sums[:, 1], LEVEL))


def _uncertainties(candidates: Sequence[Candidate], sets: Sequence[tuple[int, ...]]) -> Floats:
    """Returns each set's weight: the mean uncertainty of its pairs, normalised, mixed with a uniform part."""
    pairs = {(i, j): uncertainty(candidates[i], candidates[j]) for i, j in combinations(range(len(candidates)), 2)}
    means = np.array([np.mean([pairs[pair] for pair in combinations(members, 2)]) for members in sets])
    total = means.sum()
    shares = means / total if total > 0 else np.full(len(sets), 1 / len(sets))
    return (1 - UNIFORM_PART) * shares + UNIFORM_PART / len(sets)


def _sigmoid(difference: float) -> float:
    return 0.5 * (1 + math.tanh(difference / 2))


def _uniform_number(*key: object) -> float:
    """Returns a number in 0 to 1 that depends on the key alone, on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big") / 2.0**64


def _order(num_sets: int, seed: int, prompt_id: str) -> list[int]:
    """Returns a random order. In a fixed order neighbouring sets, which share responses, would exclude each other."""
    digest = hashlib.sha256(json.dumps(["order", seed, prompt_id]).encode()).digest()
    return [int(index) for index in np.random.default_rng(list(digest)).permutation(num_sets)]


def _check(responses_per_task: int, tasks_per_prompt: int, evaluation_share: float) -> None:
    if not MIN_RESPONSES <= responses_per_task <= MAX_RESPONSES:
        raise ValueError(
            f"responses_per_task is {responses_per_task}; {MIN_RESPONSES} to {MAX_RESPONSES} were expected"
        )
    if tasks_per_prompt < 1:
        raise ValueError(f"tasks_per_prompt is {tasks_per_prompt}; at least 1 was expected")
    if not 0 <= evaluation_share <= 1:
        raise ValueError(f"evaluation_share is {evaluation_share}; a share from 0 to 1 was expected")


def _check_scores(prompt_id: str, candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        if not candidate.scores or len(candidate.scores) != len(candidates[0].scores):
            raise ValueError(
                f"prompt {prompt_id!r}, source {candidate.source!r}: scores has {len(candidate.scores)} entries;"
                " one per reward model was expected, for every candidate"
            )
        if not all(math.isfinite(score) for score in candidate.scores):
            raise ValueError(
                f"prompt {prompt_id!r}, source {candidate.source!r}: scores is {list(candidate.scores)}; finite numbers"
                " were expected"
            )
