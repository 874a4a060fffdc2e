"""Measures how good a judge is before it is believed: how often it agrees with people on pairs that they judged, and
what moves it besides quality: the order shown, length, and who wrote the response.

A judge's ties count half; pairs that a person tied are left out of agreement, and counted. Shape letters: N pairs of
responses, once for each person who judged them.
"""

import math
from collections import Counter, defaultdict
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
    ScoredPairs,
    accuracy_of,
    by_category,
    calibration,
    category_of_task,
    highest_accuracy,
    read_judged,
)
from evaluation.statistics.results import Flips, PositionBias
from evaluation.statistics.significance import GainTest
from evaluation.statistics.summary import flips, position_bias
from evaluation.verdicts import Response, Verdict, comparisons_of
from files.hashes import json_hash
from files.records import as_json, read_record
from preferences.formats.parts import as_turns
from preferences.records import Ranking, Task
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.estimates import UNKNOWN, Floats, Interval, Ints, Share
from preferences.statistics.intervals import prompt_numbers
from reward.endpoint import OnProgress
from training.data import Prompt

QUALITY = "quality.json"  # in the folder of `heed judge-quality`
DEPENDS = ("kind", "spec", "sha256", "template_sha256", "rubric_sha256")  # on these a judge's verdicts depend


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
    """Asks the judge about every two responses that people ranked.

    Raises: ValueError for people as the judge, if more than this share of its verdicts fail, and if people preferred no
    response.
    """
    if isinstance(judge, PeopleJudge):
        raise ValueError(f"judge {judge.name!r}: {judge.spec} are people; a judge to compare with people was expected")
    tasks = {ranking.task_id: judged.tasks[ranking.task_id] for ranking in judged.rankings}
    verdicts = judge.judge([pair for task in tasks.values() for pair in _pairs(task)], on_progress)
    refuse_too_many_failures(verdicts, max_failed_share)
    failed = {verdict.prompt_id for verdict in verdicts if verdict.failure}
    standing = [verdict for verdict in verdicts if verdict.prompt_id not in failed]
    rankings = [ranking for ranking in judged.rankings if ranking.task_id not in failed]
    votes = _Votes.of(rankings, tasks, standing)
    pairs, people, described = votes.untied(rankings, tasks), pairwise_agreement(rankings), judge.describe()
    first: dict[Any, str] = {}
    clusters = {task.task_id: first.setdefault(task.prompt, task.task_id) for task in tasks.values()}
    return JudgeQuality(
        judge=described,
        key=judge_key(described),
        files=files,
        agreement=accuracy_of(pairs, np.ones(len(pairs), dtype=bool)),
        decided=accuracy_of(pairs, pairs.lead_N != 0),
        by_group=by_category(pairs),
        people=people,
        ceiling=Interval(*(highest_accuracy(value) for value in (people.mean, people.low, people.high))),
        position=position_bias(comparisons_of(standing, clusters=clusters)),
        flips=flips(standing, clusters),
        length=votes.effect(lambda ranking, place: len(ranking.responses[place])),
        own=votes.effect(lambda ranking, place: _is_by(described, tasks[ranking.task_id].sources[place])),
        calibration=calibration(pairs, seed=0) if described["kind"] == "reward model" else None,
        num_tied=len(votes.rows) - len(pairs),
        num_failed=len(failed),
        warnings=judged.warnings,
    )


@dataclass(frozen=True)
class _Votes:
    """People's preferences for the first of two responses, one row per person and pair, with the judge's as columns.

    `rows` are rankings with the places of two responses; `lead_N` is the first one's score minus the second's, or for a
    judge without scores twice its preference minus 1.
    """

    rows: Sequence[tuple[Ranking, int, int]]
    people_N: Floats
    judge_N: Floats
    lead_N: Floats
    prompt_N: Ints

    @classmethod
    def of(cls, rankings: Sequence[Ranking], tasks: Mapping[str, Task], verdicts: Sequence[Verdict]) -> "_Votes":
        found: dict[tuple[str, int, int], list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            found[verdict.prompt_id, int(verdict.policy_a) - 1, int(verdict.policy_b) - 1].append(verdict)
        rows = [(ranking, i, j) for ranking in rankings for i, j in combinations(range(len(ranking.ranks)), 2)]
        of_rows = [found[ranking.task_id, i, j] for ranking, i, j in rows]
        judge_N = np.array([np.mean([one.preference_a for one in both]) for both in of_rows])
        score_N = np.array([both[0].score_a - both[0].score_b for both in of_rows])
        return cls(
            rows,
            np.array([(1 + np.sign(ranking.ranks[j] - ranking.ranks[i])) / 2 for ranking, i, j in rows]),
            judge_N,
            np.where(np.isnan(score_N), 2 * judge_N - 1, score_N),
            prompt_numbers([tasks[ranking.task_id].prompt for ranking, _, _ in rows]),
        )

    def untied(self, rankings: Sequence[Ranking], tasks: Mapping[str, Task]) -> ScoredPairs:
        """Returns the rows that people did not tie. Raises: ValueError if there are none."""
        kept_N = self.people_N != 0.5
        of_rows = [ranking for (ranking, _, _), kept in zip(self.rows, kept_N, strict=True) if kept]
        if not of_rows:
            raise ValueError("people preferred no response to another; at least one pair was expected")
        num_labelers = Counter(ranking.task_id for ranking in rankings)
        groups = [category_of_task(tasks[ranking.task_id]) for ranking in of_rows]
        return ScoredPairs(
            lead_N=(self.lead_N * (2 * self.people_N - 1))[kept_N],
            prompt_N=self.prompt_N[kept_N],
            task_N=prompt_numbers([ranking.task_id for ranking in of_rows]),
            responses_N=np.array([len(ranking.responses) for ranking in of_rows]),
            labelers_N=np.array([num_labelers[ranking.task_id] for ranking in of_rows]),
            category_N=prompt_numbers(groups),
            categories=tuple(dict.fromkeys(groups)),
        )

    def effect(self, value: Callable[[Ranking, int], float]) -> Effect:
        """Returns the effect for the response with the larger value; pairs with equal values are left out."""
        sign_N = np.array([np.sign(float(value(ranking, i)) - value(ranking, j)) for ranking, i, j in self.rows])
        kept_N = sign_N != 0
        if not kept_N.any():
            return Effect(math.nan, math.nan, UNKNOWN, 0)
        judge_N, people_N = (np.where(sign_N > 0, of_N, 1 - of_N)[kept_N] for of_N in (self.judge_N, self.people_N))
        difference = GainTest(judge_N - people_N, self.prompt_N[kept_N], seed=0).interval()
        return Effect(float(judge_N.mean()), float(people_N.mean()), difference, len(judge_N))


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


def _is_by(described: Mapping[str, Any], source: str) -> bool:
    """Whether the judge wrote a response: its name, or its model's, is the source's."""
    spec = str(described.get("spec", ""))
    names = (str(described["name"]), spec.rpartition("#")[2], Path(spec).stem)
    return source.casefold() in {name.casefold() for name in names}
