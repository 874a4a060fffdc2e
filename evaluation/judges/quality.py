"""Measures how good a judge is before it is believed: how often it agrees with people on pairs that they judged, and
what moves it besides quality: the order shown, length, and who wrote the response.

A judge's ties count half; pairs that a person tied are left out of agreement, and counted. Shape letters: T pairs of
responses.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.inputs import named_specs
from evaluation.judges.judge import Judge, Pair, refuse_too_many_failures
from evaluation.judges.people import PeopleJudge
from evaluation.measures.reward_model import (
    Calibration,
    Judgments,
    accuracy_of,
    by_category,
    calibration,
    category_of_task,
    highest_accuracy,
    read_judged,
    scored_pairs,
)
from evaluation.statistics.results import Flips, PositionBias
from evaluation.statistics.significance import GainTest
from evaluation.statistics.summary import flips, position_bias
from evaluation.verdicts import Response, Verdict, comparisons_of
from files.hashes import json_hash
from files.records import as_json, read_record
from preferences.formats.parts import as_turns
from preferences.records import Task
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.estimates import UNKNOWN, Interval, Share
from preferences.statistics.intervals import prompt_numbers
from reward.endpoint import OnProgress
from training.data import Prompt

QUALITY = "quality.json"  # in the folder of `heed judge-quality`
DEPENDS = ("kind", "spec", "sha256", "template_sha256", "rubric_sha256")  # on these a judge's verdicts depend

Item = tuple[str, int, int]  # task, and the places of two of its responses


@dataclass(frozen=True)
class Effect:
    """How often the judge and how often people prefer one kind of response, on the same pairs; ties count half.

    `difference` is the judge's share minus people's, with a 95% interval over prompts; above 0, the judge prefers this
    kind more than people do.
    """

    judge: float
    people: float
    difference: Interval
    num_pairs: int


@dataclass(frozen=True)
class JudgeQuality:
    """All figures of one judge on pairs that people judged; `key` identifies the judge (`judge_key`).

    `agreement` counts a judge's ties as half; `decided` leaves them out. `by_group` is the agreement by file and
    category. `people` is how often two people order a pair alike, and `ceiling` the highest agreement that it allows.
    `length` is for the longer response, `own` for the response that the judge itself wrote. Only a reward model has a
    `calibration`. `num_tied` counts people's ties, and `num_failed` the tasks left out because the judge gave no
    verdict.
    """

    judge: Mapping[str, Any]
    key: str
    files: Mapping[str, str]
    agreement: Share
    decided: Share
    by_group: Mapping[str, Share]
    people: Share
    ceiling: Interval
    position: PositionBias
    flips: Flips
    length: Effect
    own: Effect
    calibration: Calibration | None
    num_tied: int
    num_failed: int
    warnings: Mapping[str, int]


def read_labelled(sources: Sequence[str]) -> Judgments:
    """Reads people's rankings of all files, FILE or NAME=FILE. A task's `subset` is then its file and category.

    Raises: ValueError as `read_judged` does.
    """
    tasks: dict[str, Task] = {}
    rankings, warnings = [], dict[str, int]()
    for name, source in named_specs(sources, "file"):
        judged = read_judged(source)
        for task in judged.tasks.values():
            category = category_of_task(task)
            group = category if len(sources) == 1 else name if category == task.objective else f"{name}: {category}"
            task_id = f"{name}/{task.task_id}"
            tasks[task_id] = replace(task, task_id=task_id, details={**task.details, "subset": group})
        rankings += [replace(ranking, task_id=f"{name}/{ranking.task_id}") for ranking in judged.rankings]
        warnings |= {kind: warnings.get(kind, 0) + num for kind, num in judged.warnings.items()}
    return Judgments(tasks, tuple(rankings), warnings)


def sampled(judged: Judgments, max_tasks: int) -> Judgments:
    """Keeps the rankings of at most this many tasks, evenly spread over all; 0 keeps all."""
    task_ids = list(dict.fromkeys(ranking.task_id for ranking in judged.rankings))
    num = min(max_tasks or len(task_ids), len(task_ids))
    kept = {task_ids[place * len(task_ids) // num] for place in range(num)}
    return replace(judged, rankings=tuple(ranking for ranking in judged.rankings if ranking.task_id in kept))


def measure_judge(
    judge: Judge, judged: Judgments, files: Mapping[str, str], max_failed_share: float, on_progress: OnProgress
) -> JudgeQuality:
    """Asks the judge about every pair of responses that people ranked.

    Raises: ValueError for people as the judge, if more than this share of its verdicts fail, and if people preferred no
    response.
    """
    if isinstance(judge, PeopleJudge):
        raise ValueError(f"judge {judge.name!r}: {judge.spec} are people; a judge to compare with people was expected")
    task_ids = list(dict.fromkeys(ranking.task_id for ranking in judged.rankings))
    verdicts = judge.judge([pair for task_id in task_ids for pair in _pairs(judged.tasks[task_id])], on_progress)
    refuse_too_many_failures(verdicts, max_failed_share)
    failed = {verdict.prompt_id for verdict in verdicts if verdict.failure}
    rankings = [ranking for ranking in judged.rankings if ranking.task_id not in failed]
    standing = [verdict for verdict in verdicts if verdict.prompt_id not in failed]
    wins, leads = _by_item(standing)
    pairs, num_tied = scored_pairs(judged.tasks, rankings, lambda task, i, j: _lead(leads, task, i, j))
    if not len(pairs):
        raise ValueError(f"{', '.join(files)}: people preferred no response to another; at least one pair was expected")
    votes: dict[Item, list[float]] = defaultdict(list)
    for ranking in rankings:
        for i, j in combinations(range(len(ranking.ranks)), 2):
            votes[ranking.task_id, i, j].append(float(np.sign(ranking.ranks[j] - ranking.ranks[i]) + 1) / 2)
    people = pairwise_agreement(rankings)
    clusters = _clusters([judged.tasks[task_id] for task_id in task_ids])
    effect = _Effects(judged.tasks, wins, votes)
    return JudgeQuality(
        judge=judge.describe(),
        key=judge_key(judge.describe()),
        files=files,
        agreement=accuracy_of(pairs, np.ones(len(pairs), dtype=bool)),
        decided=accuracy_of(pairs, pairs.lead_N != 0),
        by_group=by_category(pairs),
        people=people,
        ceiling=Interval(*(highest_accuracy(value) for value in (people.mean, people.low, people.high))),
        position=position_bias(comparisons_of(standing, clusters=clusters)),
        flips=flips(standing, clusters),
        length=effect.of(lambda task, i: len(task.responses[i])),
        own=effect.of(lambda task, i: _is_by(judge, task.sources[i])),
        calibration=calibration(pairs, seed=0) if judge.describe()["kind"] == "reward model" else None,
        num_tied=num_tied,
        num_failed=len(failed),
        warnings=judged.warnings,
    )


def judge_key(described: Mapping[str, Any]) -> str:
    """Returns a hash of what a judge is, from `Judge.describe` or its entry in compare.json; its name and the folder
    that it is in do not matter.
    """
    about = {name: described[name] for name in DEPENDS if name in described}
    if "sha256" in about:
        about["spec"] = Path(about["spec"]).name
    return json_hash(about)


def add_quality(entries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Adds the figures of `heed judge-quality` in each folder to the entries of compare.json of the judges that they
    are about.

    Raises: ValueError for a folder without figures, and for figures of a judge that has no entry.
    """
    for folder in folders:
        path = folder / QUALITY
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the folder of `heed judge-quality` was expected")
        quality = read_record(path, JudgeQuality)
        own = [entry for entry in entries if judge_key(entry) == quality.key]
        if not own:
            raise ValueError(
                f"{path}: it holds figures of the judge {quality.judge['spec']}, which is none of"
                f" {', '.join(entry['name'] for entry in entries)} (by kind, spec and the hashes of files); figures of"
                " one of these were expected"
            )
        for entry in own:
            entry["quality"] = as_json(quality)


def _pairs(task: Task) -> list[Pair]:
    """Returns every two responses of a task; a response's policy is its place, from 1."""
    prompt = Prompt(prompt_id=task.task_id, messages=tuple(as_turns(task.prompt)), kind=category_of_task(task))
    responses = [Response(str(place), task.task_id, 0, text) for place, text in enumerate(task.responses, 1)]
    return [Pair(prompt, a, b) for a, b in combinations(responses, 2)]


def _by_item(verdicts: Sequence[Verdict]) -> tuple[dict[Item, float], dict[Item, float]]:
    """Returns, over both orders, the mean preference for the first response of each pair, and the first one's lead: its
    score minus the other's, or twice the preference minus 1 for a judge without scores.
    """
    found: dict[Item, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        found[verdict.prompt_id, int(verdict.policy_a) - 1, int(verdict.policy_b) - 1].append(verdict)
    wins = {item: float(np.mean([row.preference_a for row in rows])) for item, rows in found.items()}
    scores = {item: rows[0].score_a - rows[0].score_b for item, rows in found.items()}
    return wins, {item: 2 * wins[item] - 1 if math.isnan(lead) else lead for item, lead in scores.items()}


def _lead(leads: Mapping[Item, float], task_id: str, i: int, j: int) -> float:
    return leads[task_id, i, j] if i < j else -leads[task_id, j, i]


def _clusters(tasks: Sequence[Task]) -> dict[str, str]:
    """Returns the first task that has each task's prompt."""
    first: dict[Any, str] = {}
    return {task.task_id: first.setdefault(task.prompt, task.task_id) for task in tasks}


def _is_by(judge: Judge, source: str) -> bool:
    """Whether the judge wrote a response: its name, or its model's, is the source's."""
    described = judge.describe()
    spec = str(described.get("spec", ""))
    names = {str(described["name"]), spec.rpartition("#")[2], Path(spec).stem}
    return source.casefold() in {name.casefold() for name in names}


@dataclass(frozen=True)
class _Effects:
    """Computes effects from the preferences [0, 1] of the judge and of people for the first response of each pair."""

    tasks: Mapping[str, Task]
    wins: Mapping[Item, float]
    votes: Mapping[Item, Sequence[float]]

    def of(self, value: Callable[[Task, int], float]) -> Effect:
        """Returns the effect for the response of a pair with the larger value; pairs with equal values are left out."""
        rows, prompts = [], []
        for item, votes in self.votes.items():
            task_id, i, j = item
            one, other = value(self.tasks[task_id], i), value(self.tasks[task_id], j)
            if one != other:
                both = self.wins[item], float(np.mean(votes))
                rows.append(both if one > other else (1 - both[0], 1 - both[1]))
                prompts.append(self.tasks[task_id].prompt)
        if not rows:
            return Effect(math.nan, math.nan, UNKNOWN, 0)
        judge_T, people_T = np.array(rows, dtype=np.float64).T
        difference = GainTest(judge_T - people_T, prompt_numbers(prompts), seed=0).interval()
        return Effect(float(judge_T.mean()), float(people_T.mean()), difference, len(rows))
