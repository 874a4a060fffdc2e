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
from typing import Any, NamedTuple

import numpy as np

from evaluation.inputs import named_specs
from evaluation.judges.judge import Judge, Pair, refuse_too_many_failures
from evaluation.judges.people import PeopleJudge
from evaluation.measures.reward_model import (
    Calibration,
    ScoredPairs,
    accuracy_of,
    by_category,
    calibration,
    category_of_task,
    highest_accuracy,
)
from evaluation.statistics.results import Flips, PositionBias
from evaluation.statistics.significance import GainTest
from evaluation.statistics.summary import flips, position_bias
from evaluation.verdicts import Response, Verdict, comparisons_of
from files.hashes import file_hash, json_hash
from files.records import as_json, read_record
from files.rows import read_source
from preferences.formats.merging import collect_all, report_excluded
from preferences.formats.parts import as_turns
from preferences.formats.registry import AUTO, read_as
from preferences.records import Ranking, Task
from preferences.statistics.agreement import pairwise_agreement
from preferences.statistics.estimates import UNKNOWN, Interval, Share
from preferences.statistics.intervals import prompt_numbers
from reward.endpoint import OnProgress
from training.data import Prompt

QUALITY = "quality.json"  # in the folder of `heed judge-quality`
DEPENDS = ("kind", "spec", "sha256", "template_sha256", "rubric_sha256")  # on these a judge's verdicts depend


@dataclass(frozen=True)
class Judgments:
    """Tasks with people's valid rankings, the files' SHA-256 by path, and their readers' warnings, counted by kind."""

    tasks: Mapping[str, Task]
    rankings: tuple[Ranking, ...]
    files: Mapping[str, str]
    warnings: Mapping[str, int]


@dataclass(frozen=True)
class Effect:
    """How often the judge and people prefer one kind of response (ties: half), and the difference, judge - people."""

    judge: float
    people: float
    difference: Interval
    num_pairs: int


@dataclass(frozen=True)
class JudgeQuality:
    """All figures of one judge (`judge_key`) on pairs that people judged.

    `agreement` counts the judge's ties as half, `decided` leaves them out. `people` is how often two people order a
    pair alike, and `ceiling` the highest agreement that this allows. `length` is for the longer response, `own` for one
    that the judge wrote. Only a reward model has a `calibration`. `num_tied` counts people's ties.
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


def read_labelled(sources: Sequence[str], max_tasks: int = 0) -> Judgments:
    """Reads people's rankings of all files, FILE or NAME=FILE, in any format of docs/labels-formats.md. A task's
    `subset` is then its file and category. `max_tasks` of them are kept, evenly spread over all; 0 keeps all.

    Raises: ValueError naming file, line and field; for rows in an unknown format, and if a file holds no judgment.
    """
    tasks: dict[str, Task] = {}
    rankings: dict[str, list[Ranking]] = defaultdict(list)
    files, warnings = dict[str, str](), Counter[str]()
    for name, source in named_specs(sources, "file"):
        chosen, rows = read_as(AUTO, read_source(source), source)
        collected = collect_all(chosen, rows)
        report_excluded(collected)
        files[source] = file_hash(Path(source)) if Path(source).is_file() else ""
        warnings.update(collected.report.counts())
        found, known = collected.rankings, collected.tasks
        if not found:
            raise ValueError(f"{source}: {collected.report.num_rows} rows, but no valid ranking")
        for ranking in found:
            task_id, task = f"{name}/{ranking.task_id}", known[ranking.task_id]
            rankings[task_id].append(replace(ranking, task_id=task_id))
            category = category_of_task(task)
            group = category if len(sources) == 1 else name if category == task.objective else f"{name}: {category}"
            tasks[task_id] = replace(task, task_id=task_id, details={**task.details, "subset": group})
    num = min(max_tasks or len(tasks), len(tasks))
    kept = [[*tasks][place * len(tasks) // num] for place in range(num)]
    of_kept = tuple(ranking for one in kept for ranking in rankings[one])
    return Judgments({one: tasks[one] for one in kept}, of_kept, files, warnings)


def measure_judge(judge: Judge, judged: Judgments, max_failed_share: float, on_progress: OnProgress) -> JudgeQuality:
    """Asks the judge about every two responses that people ranked.

    Raises: ValueError for people as the judge, if more than this share of its verdicts fail, and if people preferred no
    response.
    """
    if isinstance(judge, PeopleJudge):
        raise ValueError(f"judge {judge.name!r}: {judge.spec} are people; a judge to compare with people was expected")
    verdicts = judge.judge([pair for task in judged.tasks.values() for pair in _pairs(task)], on_progress)
    refuse_too_many_failures(verdicts, max_failed_share)
    failed = {verdict.prompt_id for verdict in verdicts if verdict.failure}
    standing = [verdict for verdict in verdicts if verdict.prompt_id not in failed]
    rankings = [ranking for ranking in judged.rankings if ranking.task_id not in failed]
    votes, tasks, described = _votes(rankings, standing), judged.tasks, judge.describe()
    pairs, people = _scored_pairs([vote for vote in votes if vote.people != 0.5], tasks), pairwise_agreement(rankings)
    first: dict[Any, str] = {}
    clusters = {task.task_id: first.setdefault(task.prompt, task.task_id) for task in tasks.values()}
    return JudgeQuality(
        judge=described,
        key=judge_key(described),
        files=judged.files,
        agreement=accuracy_of(pairs, np.ones(len(pairs), dtype=bool)),
        decided=accuracy_of(pairs, pairs.lead_N != 0),
        by_group=by_category(pairs),
        people=people,
        ceiling=Interval(*(highest_accuracy(value) for value in (people.mean, people.low, people.high))),
        position=position_bias(comparisons_of(standing, clusters=clusters)),
        flips=flips(standing, clusters),
        length=_effect(votes, lambda ranking, place: len(ranking.responses[place])),
        own=_effect(votes, lambda ranking, place: _is_by(described, tasks[ranking.task_id].sources[place])),
        calibration=calibration(pairs, seed=0) if described["kind"] == "reward model" else None,
        num_tied=len(votes) - len(pairs),
        num_failed=len(failed),
        warnings=judged.warnings,
    )


class _Vote(NamedTuple):
    """Preferences, from 0 to 1, for the response at `i` over that at `j`, and by how much its score leads (without
    scores, twice the judge's preference minus 1).
    """

    ranking: Ranking
    i: int
    j: int
    people: float
    judge: float
    lead: float


def _votes(rankings: Sequence[Ranking], verdicts: Sequence[Verdict]) -> list[_Vote]:
    """Returns a row per person and pair. The judge's preference is its mean over both orders."""
    found: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        found[verdict.prompt_id, verdict.policy_a, verdict.policy_b].append(verdict)
    votes = []
    for ranking in rankings:
        for i, j in combinations(range(len(ranking.ranks)), 2):
            both = found[ranking.task_id, str(i), str(j)]
            judge, lead = float(np.mean([one.preference_a for one in both])), both[0].score_a - both[0].score_b
            people = (1 + float(np.sign(ranking.ranks[j] - ranking.ranks[i]))) / 2
            votes.append(_Vote(ranking, i, j, people, judge, 2 * judge - 1 if math.isnan(lead) else lead))
    return votes


def _scored_pairs(votes: Sequence[_Vote], tasks: Mapping[str, Task]) -> ScoredPairs:
    """Returns votes without ties as columns. Raises: ValueError if there are none."""
    if not votes:
        raise ValueError("people preferred no response to another; at least one pair was expected")
    task_ids = [vote.ranking.task_id for vote in votes]
    judged_by = Counter((vote.ranking.task_id, vote.i, vote.j) for vote in votes)
    groups = [category_of_task(tasks[task_id]) for task_id in task_ids]
    return ScoredPairs(
        lead_N=np.array([vote.lead * (2 * vote.people - 1) for vote in votes]),
        prompt_N=prompt_numbers([vote.ranking.prompt for vote in votes]),
        task_N=prompt_numbers(task_ids),
        responses_N=np.array([len(vote.ranking.responses) for vote in votes]),
        labelers_N=np.array([judged_by[vote.ranking.task_id, vote.i, vote.j] for vote in votes]),
        category_N=prompt_numbers(groups),
        categories=tuple(dict.fromkeys(groups)),
    )


def _effect(votes: Sequence[_Vote], value: Callable[[Ranking, int], float]) -> Effect:
    """Returns the effect for the response with the larger value; pairs with equal values are left out."""
    ahead = [float(value(vote.ranking, vote.i)) - value(vote.ranking, vote.j) for vote in votes]
    rows = [(vote.judge, vote.people) if lead > 0 else (1 - vote.judge, 1 - vote.people)
            for vote, lead in zip(votes, ahead, strict=True) if lead]  # fmt: skip
    if not rows:
        return Effect(math.nan, math.nan, UNKNOWN, 0)
    judge_N, people_N = np.array(rows).T
    prompts = [vote.ranking.prompt for vote, lead in zip(votes, ahead, strict=True) if lead]
    difference = GainTest(judge_N - people_N, prompt_numbers(prompts), seed=0).interval()
    return Effect(float(judge_N.mean()), float(people_N.mean()), difference, len(rows))


def judge_key(described: Mapping[str, Any]) -> str:
    """Returns a hash of what a judge is, from its entry in compare.json; its name and folder do not matter."""
    about = {name: described[name] for name in DEPENDS if name in described}
    if "sha256" in about:
        about["spec"] = Path(about["spec"]).name
    return json_hash(about)


def add_quality(entries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Adds the figures in folders of `heed judge-quality` to the entries of compare.json of the same judges.

    Raises: ValueError for a folder without figures, and for figures of a judge that has no entry.
    """
    for path in (folder / QUALITY for folder in folders):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the folder of `heed judge-quality` was expected")
        quality = read_record(path, JudgeQuality)
        own = [entry for entry in entries if judge_key(entry) == quality.key]
        if not own:
            names = ", ".join(entry["name"] for entry in entries)
            expected = f"those of one of {names}, with the same kind, spec and hashes, were expected"
            raise ValueError(f"{path}: it holds figures of the judge {quality.judge['spec']}; {expected}")
        for entry in own:
            entry["quality"] = as_json(quality)


def _pairs(task: Task) -> list[Pair]:
    """Returns every two responses of a task; a response's policy is its place."""
    prompt = Prompt(prompt_id=task.task_id, messages=tuple(as_turns(task.prompt)), kind=category_of_task(task))
    responses = [Response(str(place), task.task_id, 0, text) for place, text in enumerate(task.responses)]
    return [Pair(prompt, a, b) for a, b in combinations(responses, 2)]


def _is_by(described: Mapping[str, Any], source: str) -> bool:
    """Whether the judge wrote a response: its name, or its model's, is the source's."""
    spec = str(described["spec"])
    names = (str(described["name"]), spec.rpartition("#")[2], Path(spec).stem)
    return source.casefold() in {name.casefold() for name in names}
