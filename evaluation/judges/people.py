"""Uses people as judges: comparisons become tasks in a label store, and the judgments so far become verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evaluation.judges.judge import SAME_TEXT, Pair
from evaluation.verdicts import Side, Verdict
from files.hashes import json_hash
from preferences.rankings import current_judgments
from preferences.records import MAX_RESPONSES, Judgment, Message, Task
from reward.endpoint import OnProgress
from stages.world import OpenLabels


@dataclass(frozen=True)
class Coverage:
    """The labelers' progress. An open task has fewer judgments than wanted."""

    num_tasks: int
    num_open: int
    num_judgments: int


def are_people(entry: Mapping[str, Any]) -> bool:
    """Whether a judge's entry in compare.json is of people: by its kind, or by the name of external judgments."""
    return entry.get("kind") == "people" or (entry.get("kind") == "external" and entry["name"] == "people")


@dataclass(frozen=True)
class PeopleJudge:
    """People who judge in a label store.

    `open_labels` opens the store by `store_url`, which is never written to a file; `spec` names the store in files.

    All policies' i-th samples for a prompt form one task, which `num_labelers` people rank. A text that several
    policies wrote is shown once, and those policies tie. Verdicts name labelers by the store's pseudonyms.
    """

    name: str
    spec: str
    store_url: str = field(repr=False)
    batch: str
    num_labelers: int
    seed: int
    open_labels: OpenLabels = field(repr=False)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "people",
            "spec": self.spec,
            "batch": self.batch,
            "num_labelers": self.num_labelers,
        }

    def put_tasks(self, pairs: Sequence[Pair]) -> Coverage:
        """Adds missing tasks to the store and returns the labelers' progress.

        Raises: ValueError for more policies than a task can hold, and for anything that the store refuses.
        """
        tasks = list({task.task_id: task for pair in _groups(pairs) if (task := self._task(pair))}.values())
        with self.open_labels(self.store_url) as store:
            store.add_tasks(tasks, batch=self.batch, num_labelers=self.num_labelers)
            ours = {task.task_id for task in tasks}
            covered = [one for one in store.coverage(self.batch) if one.task_id in ours]
        num_judgments = sum(len(one.judged_by) for one in covered)
        num_open = sum(len(one.judged_by) < one.num_labelers for one in covered)
        return Coverage(len(covered), num_open, num_judgments)

    def judge(self, pairs: Sequence[Pair], on_progress: OnProgress) -> list[Verdict]:
        """Returns the store's current verdicts on these pairs, one per labeler; a skip is a failure with its reason.

        Identical responses are ties without a labeler. Tasks that nobody has judged yet give no verdict, and before
        the first judgment there are no verdicts at all.
        """
        coverage = self.put_tasks(pairs)
        on_progress(coverage.num_tasks - coverage.num_open, coverage.num_tasks)
        with self.open_labels(self.store_url) as store:
            stands = current_judgments(store.judgments(self.batch, with_names=False))
        acts: dict[str, list[Judgment]] = {}
        for act in sorted((*stands.final, *stands.skips), key=lambda act: act.labeler):
            acts.setdefault(act.task_id, []).append(act)
        verdicts: list[Verdict] = []
        for group in _groups(pairs) if acts else []:
            task = self._task(group)
            for pair in group:
                if task is None:
                    verdicts.append(pair.verdict(self.name, SAME_TEXT))
                else:
                    verdicts += [self._verdict(pair, task, act) for act in acts.get(task.task_id, ())]
        return verdicts

    def _task(self, group: Sequence[Pair]) -> Task | None:
        """Returns the task for one prompt's pairs; None if all responses are the same text."""
        texts = list(dict.fromkeys(side.text for pair in group for side in (pair.a, pair.b)))
        # The stored order must carry no information; labelers see yet another order.
        texts.sort(key=lambda text: json_hash(self.seed, text))
        if len(texts) == 1:
            return None
        if len(texts) > MAX_RESPONSES:
            raise ValueError(
                f"judge {self.name!r}: {len(texts)} policies; people rank at most {MAX_RESPONSES} responses"
            )
        prompt = group[0].prompt
        sides = [side for pair in group for side in (pair.a, pair.b)]
        wrote = [list(dict.fromkeys(side.policy for side in sides if side.text == text)) for text in texts]
        turns = [[message["role"], message["content"]] for message in prompt.messages]
        return Task(
            task_id=f"compare/{json_hash(self.batch, prompt.prompt_id, turns, texts, wrote)[:24]}",
            prompt=tuple(Message.of(message) for message in prompt.messages),
            responses=tuple(texts),
            sources=tuple(", ".join(policies) for policies in wrote),
            details={"prompt_id": prompt.prompt_id, "category": prompt.kind, "policies": wrote},
        )

    def _verdict(self, pair: Pair, task: Task, act: Judgment) -> Verdict:
        if act.kind == "skip":
            reason = act.note or "no reason given"
            return pair.verdict(self.name, 0.0, labeler=act.labeler, failure=f"skipped: {reason}")
        a, b = task.responses.index(pair.a.text), task.responses.index(pair.b.text)
        if a == b:
            return pair.verdict(self.name, SAME_TEXT, labeler=act.labeler)
        preference_a = 0.5 if act.ranks[a] == act.ranks[b] else float(act.ranks[a] < act.ranks[b])
        first: Side = ""  # unknown for some imported judgments
        if act.shown_order:
            first = "a" if act.shown_order.index(a) < act.shown_order.index(b) else "b"
        scores = (act.ratings[a], act.ratings[b]) if act.ratings else (float("nan"), float("nan"))
        return pair.verdict(self.name, preference_a, labeler=act.labeler, first=first, scores=scores)


def _groups(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Groups pairs by prompt and position: the i-th comparisons of all policies, which one ranking answers."""
    groups: dict[tuple[str, int], list[Pair]] = {}
    seen: dict[tuple[str, str, str], int] = {}
    for pair in pairs:
        key = (pair.prompt.prompt_id, pair.a.policy, pair.b.policy)
        seen[key] = seen.get(key, -1) + 1
        groups.setdefault((pair.prompt.prompt_id, seen[key]), []).append(pair)
    return list(groups.values())
