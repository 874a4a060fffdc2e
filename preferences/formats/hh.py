"""Anthropic's HH-RLHF (Bai et al. 2022, arXiv 2204.05862): `chosen` and `rejected` are whole transcripts.

A transcript repeats "\\n\\nHuman: ...\\n\\nAssistant: ..."; its last turn is the response. The data does not say who
judged. Only the file's folder says whether labelers judged by helpfulness or harmlessness, so set it with --objective.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from files.conversations import SPEAKER, is_transcript, transcript_turns
from preferences.formats.merging import untied_pairs
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    content_id,
    in_hash_order,
    is_sound_prompt,
    judged_pair,
)
from preferences.records import OVERALL, Judgment, Message, StoredTask, Task

NAMES = {"user": "Human", "assistant": "Assistant"}


def recognise(row: Row) -> str:
    if is_transcript(row.get("chosen")) and is_transcript(row.get("rejected")):
        return "chosen and rejected begin with '\\n\\nHuman:'"
    return ""


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    chosen, rejected = (
        [Message(turn.role, turn.content) for turn in transcript_turns(where, row, field)]
        for field in ("chosen", "rejected")
    )
    if chosen[:-1] != rejected[:-1]:
        turn = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        found = f"{len(chosen)} and {len(rejected)} turns, which differ from turn {turn + 1} on"
        report.add("prompts differ", where, found, "left out")
        return
    for field, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1].role != "assistant":
            report.add("no reply", where, f"{field} ends with the human's turn", "left out")
            return
        if not turns[-1].content.strip():
            report.add("empty reply", where, f"{field} ends with an empty reply", "left out")
            return
    prompt = tuple(chosen[:-1])
    responses, ranks = in_hash_order(chosen[-1].content, rejected[-1].content)
    task = Task(
        task_id=content_id("hh", prompt, responses, ()),
        prompt=prompt,
        responses=responses,
        sources=(UNKNOWN, UNKNOWN),
        objective=objective or OVERALL,
    )
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])


def write(stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report) -> Iterator[dict[str, Any]]:
    """Writes one row per untied pair. Leaves out what a transcript cannot represent."""
    for pair in untied_pairs(stored, judgments, report):
        turns = [*pair.task.prompt, Message("assistant", pair.better), Message("assistant", pair.worse)]
        strange = next(
            (turn for turn in turns if turn.role not in NAMES or turn.more or SPEAKER.search(turn.content)), None
        )
        if strange is not None:
            found = f"{strange.role}: {strange.content[:40]!r}"
            report.add("not a transcript", pair.where, f"{found} cannot be part of a transcript", "left out")
        elif is_sound_prompt(pair.where, pair.task.prompt, report):
            prompt = _transcript(pair.task.prompt)
            yield {
                "chosen": prompt + _transcript([Message("assistant", pair.better)]),
                "rejected": prompt + _transcript([Message("assistant", pair.worse)]),
            }


def _transcript(turns: Sequence[Message]) -> str:
    return "".join(f"\n\n{NAMES[turn.role]}: {turn.content}" for turn in turns)
