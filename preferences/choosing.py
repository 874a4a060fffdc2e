"""From candidate responses to the tasks put to labelers: at random, or where a reward model is least sure.

What is chosen by a score is no fair sample of what there is. So every task says with what probability it was chosen
(`details["propensity"]`), which undoes the choice (`uniform_mean`), and some prompts, drawn before any score is looked
at, get uniform tasks for evaluation (`details["slice"]`).
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from intervals.bootstrap import NUM_RESAMPLES, percentiles, resampled_sums
from intervals.estimates import LEVEL, Floats, Interval
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Message, Task
from preferences.statistics.panel import prompt_numbers

MAX_SETS = 5_000  # of responses of one prompt; each has its probability
UNIFORM_PART = 0.1  # of the probability of "uncertainty" that is uniform, so that no weight is above ten

Method = Literal["uniform", "uncertainty"]


@dataclass(frozen=True)
class Candidate:
    """A response that could be put to labelers, who wrote it, and the score that each reward model gives it."""

    response: str
    source: str
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Candidates:
    """All candidates of one prompt."""

    prompt_id: str
    prompt: tuple[Message, ...]
    candidates: tuple[Candidate, ...]


def choose_tasks(
    prompts: Sequence[Candidates],
    *,
    batch: str,
    method: Method,
    responses_per_task: int,
    tasks_per_prompt: int,
    evaluation_share: float,
    seed: int,
) -> list[Task]:
    """Tasks of `responses_per_task` different responses each, `tasks_per_prompt` a prompt where there are as many.

    Of responses that are the same but for white space at their ends, the first stays. A prompt with too few
    different ones has no task. `details` of a task: `method` by which its prompt's tasks were drawn, `slice`
    ("evaluation" for a share of the prompts, always uniform; else "training"), `propensity` (the probability that this
    set of responses was chosen) and `num_sets` (how many sets the prompt has).

    Raises ValueError, naming the field or prompt, for numbers out of range, scores that are missing, not finite, or
    not as many for every candidate, and for more than MAX_SETS sets.
    """
    _check(responses_per_task, tasks_per_prompt, evaluation_share)
    tasks = []
    for prompt in prompts:
        candidates = different(prompt.candidates)
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
            members = [candidates[place] for place in sets[index]]
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


def different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, without those whose response was there before, white space at the ends aside."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.response.strip(), candidate)
    return list(first.values())


def uncertainty(one: Candidate, other: Candidate) -> float:
    """How unsure reward models are which of two responses is better, from 0 to 1.

    By Bradley-Terry a model with scores s prefers the first with probability p = σ(s_one - s_other). The mean p of all
    models gives 4·p̄(1 - p̄): the variance of the answer that is foreseen, in which both a small difference of scores
    and models that contradict each other count.
    """
    chances = [_sigmoid(a - b) for a, b in zip(one.scores, other.scores, strict=True)]
    mean = sum(chances) / len(chances)
    return 4 * mean * (1 - mean)


def inclusion_probabilities(weights: Floats, num_chosen: int) -> Floats:
    """The probabilities, in proportion to `weights` but at most 1, with which `num_chosen` of the sets are chosen.

    They sum to `num_chosen`; to all sets' 1 where there are no more sets. What is cut at 1 goes to the others.
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
    """Which sets are chosen: those in whose stretch of the running sum, in `order`, a number start + 0, 1, ... lies.

    `start` is uniform in 0 to 1; then set i is chosen with just `probabilities[i]`, once, and as many sets as these
    sum to. Madow 1949, Annals of Mathematical Statistics 20(3).
    """
    ends = np.cumsum(probabilities[list(order)])
    ends[-1] = round(float(ends[-1]))  # their sum is whole but for rounding
    marks = start + np.arange(int(ends[-1]))
    return sorted(int(order[place]) for place in np.searchsorted(ends, marks, side="right"))


def uniform_mean(tasks: Sequence[Task], values: Sequence[float], *, seed: int) -> Interval:
    """What the mean of a task's value would be had tasks been drawn uniformly, with a 95% interval over prompts.

        Σ_i w_i·value_i / Σ_i w_i,   w_i = 1/(propensity_i · num_sets_i)

    Each prompt then weighs 1 in expectation, whatever was chosen of it (Hájek 1971). Raises ValueError for a task
    without propensity, and for no tasks.
    """
    if len(tasks) != len(values) or not tasks:
        raise ValueError(f"values has {len(values)} entries for {len(tasks)} tasks; one each, and any, was expected")
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
    """Of each set the mean uncertainty of its pairs, as shares of all, beside a uniform part."""
    pairs = {(i, j): uncertainty(candidates[i], candidates[j]) for i, j in combinations(range(len(candidates)), 2)}
    means = np.array([np.mean([pairs[pair] for pair in combinations(members, 2)]) for members in sets])
    total = means.sum()
    shares = means / total if total > 0 else np.full(len(sets), 1 / len(sets))
    return (1 - UNIFORM_PART) * shares + UNIFORM_PART / len(sets)


def _sigmoid(difference: float) -> float:
    return 0.5 * (1 + math.tanh(difference / 2))


def _uniform_number(*key: object) -> float:
    """A number in 0 to 1, the same for the same key on every machine."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big") / 2.0**64


def _order(num_sets: int, seed: int, prompt_id: str) -> list[int]:
    """Random, so that sets that share a response are not chosen against each other by their places."""
    digest = hashlib.sha256(json.dumps(["order", seed, prompt_id]).encode()).digest()
    return [int(place) for place in np.random.default_rng(list(digest)).permutation(num_sets)]


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
                f" one of each reward model was expected, for every candidate"
            )
        if not all(math.isfinite(score) for score in candidate.scores):
            raise ValueError(
                f"prompt {prompt_id!r}, source {candidate.source!r}: scores is {list(candidate.scores)}; finite numbers"
                " were expected"
            )
