"""External judgments: files of any format that preferences/formats reads, as rows of a comparison."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple, TypeGuard

from evaluation.inputs import cluster_of
from evaluation.verdicts import Response, Side, Verdict
from files.rows import read_source
from preferences.formats.merging import ImportedTask, clusters_of_arena, collect_all, report_excluded
from preferences.formats.parts import UNKNOWN, Report, as_turns
from preferences.formats.registry import AUTO, read_as
from preferences.rankings import current_judgments, why_excluded
from preferences.records import Judgment, Message, Task
from training.data import Prompt

CATEGORY_DETAILS = ("category", "kind", "dataset")


@dataclass(frozen=True)
class ExternalJudgments:
    """The contents of a file of judgments. `report` lists rows that were left out or had to be interpreted.

    `num_same_policy` counts pairs that compare a policy with itself, and `num_unknown` pairs that name no policy;
    neither gives a verdict. `num_again` counts verdicts that repeat an earlier one by the same labeler on the same two
    responses; they are averaged with it. `cluster_by` is the field of the prompts' clusters.
    """

    format: str
    policies: tuple[str, ...]
    judges: tuple[str, ...]
    prompts: Sequence[Prompt]
    responses: Sequence[Response]
    verdicts: Sequence[Verdict]
    report: Report
    num_same_policy: int
    num_unknown: int
    num_again: int
    cluster_by: str


def read_verdict_file(
    source: str, form: str = AUTO, *, judge: str, category: str = "", cluster_by: str = ""
) -> ExternalJudgments:
    """Reads judgments into prompts, responses and verdicts; a ranking of K responses gives all its pairs.

    Each of AlpacaEval's annotators becomes a judge, whose preferences between 0 and 1 are kept as they are. In other
    formats all annotators are labelers of the one `judge`. `category` names the field of the rows that holds the
    category; if "", it is the first of `category`, `kind` and `dataset`. `cluster_by` names the field of the prompts'
    cluster; "" means as `clusters_of_arena` says.
    Raises: ValueError naming file and line of a malformed row, and if no verdict on two policies is left.
    """
    chosen, file_rows = read_as(form, read_source(source), source)
    collected = collect_all(chosen, file_rows)
    cluster_by = cluster_by or clusters_of_arena([found.task for found in collected.found_tasks])
    rows = _Rows(judge, category, cluster_by, is_soft=chosen.name == "alpacaeval")
    acts: dict[str, list[Judgment]] = {}
    stands = current_judgments(collected.judgments)
    for act in (*stands.final, *stands.skips):
        acts.setdefault(act.task_id, []).append(act)
    report_excluded(collected)
    for task in collected.found_tasks:
        if not why_excluded(task.task):
            rows.add(task, acts.get(task.task.task_id, []))
    if not rows.verdicts:
        raise ValueError(
            f"{source}: {collected.report.num_rows} rows of {chosen.name} contain no verdict on two policies:"
            f" {rows.num_unknown} pairs name no policy, {rows.num_same_policy} compare a policy with itself"
        )
    verdicts = _once(rows.verdicts)
    return ExternalJudgments(
        format=chosen.name,
        policies=tuple(sorted({response.policy for response in rows.responses})),
        judges=tuple(dict.fromkeys(verdict.judge for verdict in rows.verdicts)),
        prompts=list(rows.prompts.values()),
        responses=rows.responses,
        verdicts=verdicts,
        report=collected.report,
        num_same_policy=rows.num_same_policy,
        num_unknown=rows.num_unknown,
        num_again=len(rows.verdicts) - len(verdicts),
        cluster_by=cluster_by,
    )


def _once(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Averages a labeler's verdicts on the same two responses in the same display order.

    Verdicts with an unknown order are averaged with each other, so a labeler who was shown both orders counts as often
    as others even if the data does not record the order.
    """
    alike: dict[tuple[Any, ...], list[Verdict]] = {}
    for verdict in verdicts:
        a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
        shown_first = {"a": a, "b": b, "": ("", 0)}[verdict.first]
        key = (verdict.prompt_id, verdict.judge, verdict.labeler, min(a, b), max(a, b), shown_first)
        alike.setdefault(key, []).append(verdict)
    return [_mean(same) for same in alike.values()]


def _mean(same: Sequence[Verdict]) -> Verdict:
    """Averages verdicts; the other fields come from the first that did not fail."""
    standing = [verdict for verdict in same if not verdict.failure]
    if len(same) == 1 or not standing:
        return same[0]
    first = standing[0]
    preferences = [v.preference_a if v.policy_a == first.policy_a else 1 - v.preference_a for v in standing]
    where = "; ".join(dict.fromkeys(verdict.where for verdict in standing))
    return replace(first, preference_a=sum(preferences) / len(preferences), where=where)


class _Wrote(NamedTuple):
    """A policy and the position of its response in a task."""

    policy: str
    place: int


def _wrote(task: Task) -> list[_Wrote]:
    """Returns which policy wrote which response. Tasks of `heed compare` show a text that several policies wrote only
    once, and list those policies in their details.
    """
    policies = task.details.get("policies")
    if not _are_names(policies) or len(policies) != len(task.responses):
        policies = [[source] for source in task.sources]
    return [_Wrote(policy, place) for place, names in enumerate(policies) for policy in names]


def _are_names(policies: Any) -> TypeGuard[list[list[str]]]:
    """Returns whether `heed compare` wrote this `policies` field; other data may have a field of the same name."""
    return isinstance(policies, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in policies
    )


@dataclass
class _Rows:
    """Collects the rows of a comparison, task by task."""

    judge: str
    category_field: str
    cluster_field: str
    is_soft: bool  # True = ratings are probabilities of being preferred
    prompts: dict[str, Prompt] = field(default_factory=dict)
    responses: list[Response] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    num_same_policy: int = 0
    num_unknown: int = 0
    _places: dict[tuple[str, str, str], int] = field(default_factory=dict)  # (policy, prompt, text) -> index
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, task_found: ImportedTask, acts: Sequence[Judgment]) -> None:
        task = task_found.task
        pairs = list(self._pairs(task)) if acts else []
        if not pairs:
            return
        prompt = self._prompt(task, task_found.where)
        for act in sorted(acts, key=lambda act: act.labeler):
            where = task_found.places[act.labeler, act.revision]
            self.verdicts += [self._verdict(prompt, task, act, first, second, where) for first, second in pairs]

    def _pairs(self, task: Task) -> Iterator[tuple[_Wrote, _Wrote]]:
        """Yields pairs of responses of different, known policies; counts the others."""
        for first, second in combinations(_wrote(task), 2):
            if UNKNOWN in (first.policy, second.policy):
                self.num_unknown += 1
            elif first.policy == second.policy:
                self.num_same_policy += 1
            else:
                yield first, second

    def _prompt(self, task: Task, where: str) -> Prompt:
        """Returns the prompt of a task; tasks with the same prompt text share one."""
        prompt_id = _prompt_id(task.prompt)
        if prompt_id not in self.prompts:
            messages = tuple(as_turns(task.prompt))
            cluster = cluster_of(where, task.details, self.cluster_field) if self.cluster_field else ""
            kind = self._category(task)
            self.prompts[prompt_id] = Prompt(prompt_id=prompt_id, messages=messages, kind=kind, cluster=cluster)
        return self.prompts[prompt_id]

    def _category(self, task: Task) -> str:
        names = (self.category_field,) if self.category_field else CATEGORY_DETAILS
        category = next((task.details[name] for name in names if isinstance(task.details.get(name), str | int)), "")
        if self.category_field and category == "":
            raise ValueError(f"task {task.task_id!r}: the category field {self.category_field!r} is missing")
        return str(category)

    def _index(self, policy: str, prompt_id: str, text: str, where: str) -> int:
        """Returns the text's index among the policy's responses to the prompt, and adds a row for a new text."""
        key = (policy, prompt_id, text)
        if key not in self._places:
            self._places[key] = self._counts[policy, prompt_id]
            self._counts[policy, prompt_id] += 1
            self.responses.append(Response(policy, prompt_id, self._places[key], text, where=where))
        return self._places[key]

    def _verdict(self, prompt: Prompt, task: Task, act: Judgment, a: _Wrote, b: _Wrote, where: str) -> Verdict:
        texts = (task.responses[a.place], task.responses[b.place])
        has_scores = bool(act.ratings) and not self.is_soft
        failure = f"skipped: {act.note or 'no reason given'}" if act.kind == "skip" else ""
        return Verdict(
            prompt_id=prompt.prompt_id,
            policy_a=a.policy,
            policy_b=b.policy,
            index_a=self._index(a.policy, prompt.prompt_id, texts[0], where),
            index_b=self._index(b.policy, prompt.prompt_id, texts[1], where),
            judge=act.labeler if self.is_soft else self.judge,
            labeler=act.labeler,
            preference_a=float("nan") if failure else self._preference(act, a.place, b.place),
            first=_shown_first(act, a.place, b.place),
            score_a=act.ratings[a.place] if has_scores else float("nan"),
            score_b=act.ratings[b.place] if has_scores else float("nan"),
            length_a=len(texts[0]),
            length_b=len(texts[1]),
            category=prompt.kind,
            failure=failure,
            where=where,
        )

    def _preference(self, act: Judgment, first: int, second: int) -> float:
        if self.is_soft and act.ratings:
            return act.ratings[first]
        ranks = act.ranks[first], act.ranks[second]
        return 0.5 if ranks[0] == ranks[1] else float(ranks[0] < ranks[1])


def _shown_first(act: Judgment, first: int, second: int) -> Side:
    if not act.shown_order or first == second:
        return ""
    return "a" if act.shown_order.index(first) < act.shown_order.index(second) else "b"


def _prompt_id(prompt: Sequence[Message]) -> str:
    turns = [message.fields for message in prompt]
    return f"prompt-{hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]}"
