"""Exports of what labelers said beyond ranks: by one criterion, ratings by all criteria, labels of turns, and edits.

criteria   one row per response and labeler, with a field per criterion, as HelpSteer2 has them (arXiv 2406.08673)
turns      one row per response and labeler: the conversation with a label for each turn
grouped    a ranking of responses to one prompt that a labeler rated one at a time, for a reward model
edits      a labeler's better version of a response, preferred over the original, as TRL's preferences

`by_criterion` makes any other format one of a single criterion.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from preferences.formats.merging import final_judgments, final_rankings
from preferences.formats.native import ranking_row
from preferences.formats.parts import Format, Judged, Report, Stored, Written, as_turns, content_id, is_sound_prompt
from preferences.rankings import SAYS, criteria_in, current_judgments, judgment_by
from preferences.records import (
    MAX_RESPONSES,
    MIN_RESPONSES,
    Judgment,
    Message,
    Ranking,
    StoredTask,
    assistant_turns,
    dense_ranks,
)

WHOLE = ("heed", "criteria", "edits", "prompts")  # formats to which the ranks do not matter, or that hold everything
TURNS = "turns"
OWN_FIELDS = ("task_id", "prompt", "response", "source", "labeler")


class CriterionNeededError(ValueError):
    """There are ratings by several criteria, but a row of this format holds those by one."""

    def __init__(self, criteria: Sequence[str]) -> None:
        super().__init__(f"there are ratings by {', '.join(criteria)}; one of them was expected (--criterion)")
        self.criteria = tuple(criteria)


def by_criterion(
    form: Format, stored: Sequence[StoredTask], judgments: Sequence[Judgment], criterion: str, report: Report
) -> tuple[list[StoredTask], list[Judgment]]:
    """Returns the tasks with `criterion` as their objective, and the judgments by it alone.

    An answer without ratings by it, if it is a labeler's last word on a task, is left out and reported. So are all
    answers to a task whose adjudication has none, since it alone is final.

    Raises: ValueError if nobody rated by this criterion, and for a format that holds more than one criterion.
    """
    if form.name in WHOLE:
        raise ValueError(f"format {form.name!r} is not one of rankings by a criterion; another one was expected")
    names = criteria_in(judgments)
    if criterion not in names:
        expected = f"one of {', '.join(names)} was expected" if names else "no judgment has criteria"
        raise ValueError(f"criterion {criterion!r}: {expected}")
    last = {(one.task_id, one.labeler): one for one in sorted(judgments, key=lambda one: one.revision)}
    unrated = {key for key, one in last.items() if one.kind in SAYS and not one.annotations.ratings_by(criterion)}
    for task_id, labeler in sorted(unrated):
        where = f"task {task_id!r}, labeler {labeler!r}"
        report.add("no such criterion", where, f"the answer has no ratings by {criterion!r}", "left out")
    adjudications = current_judgments(judgments).adjudications
    decided = {one.task_id for one in adjudications if (one.task_id, one.labeler) in unrated}
    kept = [one for one in judgments if (one.task_id, one.labeler) not in unrated and one.task_id not in decided]
    if form.name == TURNS:
        return list(stored), [replace(one, annotations=one.annotations.by(criterion)) for one in kept]
    tasks = [replace(one, task=replace(one.task, objective=criterion)) for one in stored]
    return tasks, [judgment_by(one, criterion) for one in kept]


def write_criteria(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes one row per response and labeler. A criterion that the answer lacks is null.

    Raises: ValueError if a criterion has the name of another field.
    """
    names = criteria_in(judgments)
    taken = [name for name in names if name in OWN_FIELDS]
    if taken:
        raise ValueError(f"criterion {taken[0]!r} has the name of a field of these rows; another name was expected")
    for task, judgment in final_judgments([one.task for one in stored], judgments, report, keeps=("criteria",)):
        if not judgment.annotations.criteria:
            where = f"task {task.task_id!r}, labeler {judgment.labeler!r}"
            report.add("no criteria", where, "the answer has no criteria", "left out")
            continue
        for index, response in enumerate(task.responses):
            own = {name: judgment.annotations.ratings_by(name) for name in names}
            yield {
                "task_id": task.task_id,
                "prompt": _marked(task.prompt),
                "response": response,
                "source": task.sources[index],
                "labeler": judgment.labeler,
                **{name: float(ratings[index]) if ratings else None for name, ratings in own.items()},
            }


def write_grouped(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes rows of `rankings`: the single responses to one prompt that a labeler rated, ranked by their ratings.

    Equal ratings tie. If two responses are the same text, the first one counts.
    """
    groups: dict[tuple[Any, ...], dict[str, Ranking]] = {}
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        where = f"task {task.task_id!r}, labeler {ranking.labeler!r}"
        if not task.is_single:
            report.add("ranked already", where, "its responses were ranked; the format `rankings` has them", "left out")
        elif not ranking.ratings:
            report.add("no ratings", where, "the response was not rated", "left out")
        else:
            own = groups.setdefault((task.prompt, task.objective, ranking.labeler), {})
            if own.setdefault(ranking.responses[0], ranking) is not ranking:
                report.add("rated twice", where, "the same response, in another task", "the first rating is kept")
    for (prompt, objective, labeler), own in groups.items():
        found = list(own.values())[:MAX_RESPONSES]
        where = f"task {found[0].task_id!r}, labeler {labeler!r}"
        if len(found) < MIN_RESPONSES:
            report.add("nothing to rank", where, "no other response to its prompt was rated", "left out")
            continue
        if len(own) > MAX_RESPONSES:
            report.add("too many responses", where, f"{len(own)} to one prompt", f"the first {MAX_RESPONSES} are kept")
        responses, ratings = tuple(own)[:MAX_RESPONSES], tuple(one.ratings[0] for one in found)
        flags = tuple(one.flags[0] if one.flags else () for one in found)
        task_id = content_id("grouped", prompt, responses, ())  # labelers may have rated different responses
        ranks = dense_ranks([-rating for rating in ratings])
        yield ranking_row(Ranking(task_id, prompt, responses, ranks, labeler, objective, ratings, flags))


def write_turns(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes {"messages", "labels"}: a conversation with one response, and whether each assistant's turn is right.

    An earlier turn's label is only in the row of the first response (null in the others), so that it counts once.

    Raises: CriterionNeededError if turns were rated by several criteria; `by_criterion` chooses one.
    """
    final = list(final_judgments([one.task for one in stored], judgments, report, keeps=("criteria", "turns")))
    names = sorted({one.name for _, judgment in final for one in judgment.annotations.turns})
    names = names or [*criteria_in(judgment for _, judgment in final)]  # no conversation has earlier turns
    if len(names) > 1:
        raise CriterionNeededError(names)
    for task, judgment in final:
        where, said = f"task {task.task_id!r}, labeler {judgment.labeler!r}", judgment.annotations
        rated = said.turn_ratings_by(names[0]) if names else {}
        of_responses = said.ratings_by(names[0]) if names else ()
        if not rated and not of_responses:
            report.add("no ratings of turns", where, "the answer rates no turn", "left out")
        elif others := {*rated.values(), *of_responses} - {0, 1}:
            found = f"{names[0]!r} has {max(others):g}, and a label is yes (1) or no (0)"
            report.add("no yes or no", where, found, "left out")
        elif is_sound_prompt(where, task.prompt, report):
            earlier = [rated.get(turn) for turn in assistant_turns(task.prompt)]
            for index, response in enumerate(task.responses):
                given = [
                    *(earlier if index == 0 else [None] * len(earlier)),
                    of_responses[index] if of_responses else None,
                ]
                if any(label is not None for label in given):
                    messages = [*as_turns(task.prompt), {"role": "assistant", "content": response}]
                    labels = [None if label is None else bool(label) for label in given]
                    yield {"task_id": task.task_id, "messages": messages, "labels": labels, "labeler": judgment.labeler}


def _marked(prompt: Sequence[Message]) -> str:
    """Returns a conversation as HelpSteer2 writes it: the first turn, then each further one under a mark."""
    first, *later = prompt
    return first.text + "".join(f"\n<extra_id_1>{turn.role.capitalize()}\n{turn.text}" for turn in later)


def write_edits(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes one row per edit: the edit is chosen, the response that it improves is rejected."""
    for task, judgment in final_judgments([one.task for one in stored], judgments, report, keeps=("edits",)):
        where = f"task {task.task_id!r}, labeler {judgment.labeler!r}"
        if not judgment.annotations.edits:
            report.add("no edits", where, "no response was edited", "left out")
        elif is_sound_prompt(where, task.prompt, report):
            for response, edit in zip(task.responses, judgment.annotations.edits, strict=True):
                if edit:
                    replies = {"chosen": edit, "rejected": response}
                    turns = {name: [{"role": "assistant", "content": text}] for name, text in replies.items()}
                    yield {"prompt": as_turns(task.prompt), **turns}
