"""NVIDIA's HelpSteer3 (Wang et al. 2025, arXiv 2505.11475) and the preferences of HelpSteer2 (2410.01257).

Scores range from -3 to 3, negative if the first response is better. A score becomes the ratings (-score, score).
HelpSteer3 has every annotator's score, HelpSteer2 only the consensus.
"""

import re
from collections.abc import Iterator

from files.fields import any_messages, any_text, objects_field, whole_field
from preferences.formats.parts import (
    CONSENSUS,
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    as_messages,
    as_note,
    content_id,
    judged_pair,
    ranks_of,
    rest,
)
from preferences.records import OVERALL, Message, Task

MARK = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")  # between the turns of a HelpSteer2 prompt
STRONGEST = 3


def read_3(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    prompt = as_messages(any_messages(where, row.get("context"), "context"))
    overall = whole_field(where, row, "overall_preference", -STRONGEST, STRONGEST)
    votes = []
    given = row.get("individual_preference") is not None
    for index, judged in enumerate(objects_field(where, row, "individual_preference") if given else []):
        place = f"{where}: individual_preference[{index}]"
        score = whole_field(place, judged, "score", -STRONGEST, STRONGEST)
        votes.append(_vote(f"annotator{index + 1}", score, as_note(rest(judged, "score"))))
    task = _task(
        "helpsteer3", prompt, row, ("response1", "response2"), where, objective, "context", "individual_preference"
    )
    yield from judged_pair(where, report, task, votes or [_vote(CONSENSUS, overall, "")])


def read_2(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    first, *turns = MARK.split(any_text(where, row, "prompt"))
    later = zip(turns[::2], turns[1::2], strict=True)
    prompt = (Message("user", first), *(Message(name.lower(), text) for name, text in later))
    strength = whole_field(where, row, "preference_strength", -STRONGEST, STRONGEST)
    task = _task(
        "helpsteer2", prompt, row, ("response_1", "response_2"), where, objective, "prompt", "preference_strength"
    )
    yield from judged_pair(where, report, task, [_vote(CONSENSUS, strength, "")])


def _task(
    name: str,
    prompt: tuple[Message, ...],
    row: Row,
    fields: tuple[str, str],
    where: str,
    objective: str,
    *read: str,
) -> Task:
    responses = (any_text(where, row, fields[0]), any_text(where, row, fields[1]))
    return Task(
        task_id=content_id(name, prompt, responses, ()),
        prompt=prompt,
        responses=responses,
        sources=(UNKNOWN, UNKNOWN),
        objective=objective or OVERALL,
        details=rest(row, *fields, *read),
    )


def _vote(labeler: str, score: int, note: str) -> Vote:
    ratings = (float(-score), float(score))
    return Vote(labeler, ranks_of(ratings), ratings, note=note)
