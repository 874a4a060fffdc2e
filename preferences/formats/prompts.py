"""Formats for SFT and PPO, written only: the best responses as demonstrations, and the prompts."""

from collections.abc import Iterator, Sequence
from typing import Any

from preferences.current import why_excluded
from preferences.formats.merging import final_rankings
from preferences.formats.parts import Report, as_turns, is_sound_prompt
from preferences.records import Judgment, StoredTask


def write_demonstrations(
    stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report
) -> Iterator[dict[str, Any]]:
    """Writes {"messages"}: for each task, the response that its first final ranking puts alone at the top."""
    written = set[str]()
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        where = f"task {task.task_id!r}, labeler {ranking.labeler!r}"
        best = [response for response, rank in zip(task.responses, ranking.ranks, strict=True) if rank == 1]
        if task.task_id in written:
            continue
        if len(best) > 1 or not best[0].strip():
            found = f"{len(best)} responses share the first place" if len(best) > 1 else "the best reply is empty"
            report.add("no best response", where, found, "left out")
        elif is_sound_prompt(where, task.prompt, report):
            written.add(task.task_id)
            yield {"messages": [*as_turns(task.prompt), {"role": "assistant", "content": best[0]}]}


def write_prompts(
    stored: Sequence[StoredTask], _judgments: Sequence[Judgment], report: Report
) -> Iterator[dict[str, Any]]:
    """Writes {"prompt_id", "messages"}: every prompt once, except those that only gold tasks or repeats have."""
    written = set[tuple[Any, ...]]()
    for one in stored:
        task = one.task
        if why := why_excluded(task):
            report.add(why, f"task {task.task_id!r}", "it measures labelers and is not training data", "left out")
        elif task.prompt not in written and is_sound_prompt(f"task {task.task_id!r}", task.prompt, report):
            written.add(task.prompt)
            yield {"prompt_id": task.task_id, "messages": as_turns(task.prompt)}
