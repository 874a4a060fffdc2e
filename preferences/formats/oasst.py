"""Open-Assistant's trees (Köpf et al. 2023, arXiv 2304.07327): every set of ranked sibling replies is one ranking.

The prompt is the path to them. `rank` 0 is best and aggregates several labelers' rankings. Users' turns are not
responses, and a reply without siblings is ranked against nothing; neither is reported.
"""

from collections.abc import Iterator
from typing import Any

from files.fields import (
    any_text,
    name_field,
    object_field,
    objects_field,
    optional_text,
    shown,
    text_field,
    whole_field,
)
from preferences.formats.parts import (
    CONSENSUS,
    JudgedTask,
    Report,
    Row,
    Vote,
    is_sound_prompt,
    report_empty_replies,
    rest,
)
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL, Message, Task, dense_ranks

ROLES = {"prompter": "user", "assistant": "assistant"}
PERSON = "person"
LAST_RANK = 10_000
SHOWN_ID = 80  # characters


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    tree = {
        "message_tree_id": text_field(where, row, "message_tree_id"),
        "tree_state": optional_text(where, row, "tree_state") or None,
    }
    num_before = len(report.warnings)
    judged = list(_walk(where, object_field(where, row, "prompt"), (), tree, report, objective))
    if not judged and len(report.warnings) == num_before:
        report.add("nothing to rank", where, "no reply of the tree has siblings", "left out")
    yield from judged


def _walk(
    where: str, message: dict[str, Any], path: tuple[Message, ...], tree: Row, report: Report, objective: str
) -> Iterator[JudgedTask]:
    """Yields the rankings of a message's replies, then those further down the tree."""
    place = f"{where}: message {text_field(where, message, 'message_id')[:SHOWN_ID]}"
    role = any_text(place, message, "role")
    if role not in ROLES:
        raise ValueError(f"{place}: field 'role' is {shown(role)}; prompter or assistant was expected")
    path = (*path, Message(ROLES[role], any_text(place, message, "text")))
    replies = objects_field(place, message, "replies") if message.get("replies") is not None else []
    if role == "prompter" and len(replies) >= MIN_RESPONSES:
        yield from _siblings(place, message, replies, path, tree, report, objective)
    for reply in replies:
        yield from _walk(where, reply, path, tree, report, objective)


def _siblings(
    place: str,
    parent: Row,
    replies: list[dict[str, Any]],
    prompt: tuple[Message, ...],
    tree: Row,
    report: Report,
    objective: str,
) -> Iterator[JudgedTask]:
    kept = [reply for reply in replies if not reply.get("deleted")]
    if len(kept) < len(replies):
        report.add("deleted reply", place, f"{len(replies) - len(kept)} of {len(replies)} replies", "left out")
    ranked = [reply for reply in kept if reply.get("rank") is not None]
    if len(ranked) < len(kept):
        found = f"{len(kept) - len(ranked)} of {len(kept)} sibling replies have no rank"
        done = "the others are kept" if len(ranked) >= MIN_RESPONSES else "left out"
        report.add("unranked siblings", place, found, done)
    if len(ranked) > MAX_RESPONSES:
        report.add("too many siblings", place, f"{len(ranked)} ranked; at most {MAX_RESPONSES} fit a task", "left out")
    if not MIN_RESPONSES <= len(ranked) <= MAX_RESPONSES or not is_sound_prompt(place, prompt, report):
        return
    ranks = dense_ranks([whole_field(place, reply, "rank", 0, LAST_RANK) for reply in ranked])
    task = Task(
        task_id=f"oasst/{parent['message_id']}",
        prompt=prompt,
        responses=tuple(any_text(place, reply, "text") for reply in ranked),
        sources=tuple(_source(place, reply) for reply in ranked),
        objective=objective or OVERALL,
        details={**tree, "replies": [rest(reply, "text", "replies", "rank", "role") for reply in ranked]},
    )
    report_empty_replies(place, task, report)
    yield JudgedTask(place, task, (Vote(CONSENSUS, ranks),))


def _source(place: str, reply: Row) -> str:
    return (name_field(place, reply, "model_name") or "model") if reply.get("synthetic") else PERSON
