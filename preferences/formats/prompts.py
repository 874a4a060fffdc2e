"""What SFT and PPO read, out of a label store: the best responses as demonstrations, the prompts. Written only."""

from collections.abc import Iterator, Sequence
from typing import Any

from preferences.current import why_excluded
from preferences.formats.merging import final_rankings
from preferences.formats.parts import Report, as_turns, is_sound_prompt
from preferences.records import Judgment
from preferences.results import StoredTask


def write_demonstrations(
    stored: Sequence[StoredTask], judgments: Sequence[Judgment], report: Report
) -> Iterator[dict[str, Any]]:
    """{"messages"}: of each task the response that its first standing ranking puts alone at the top."""
    told = set[str]()
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        where = f"task {task.task_id!r}, labeler {ranking.labeler!r}"
        best = [response for response, rank in zip(task.responses, ranking.ranks, strict=True) if rank == 1]
        if task.task_id in told:
            continue
        if len(best) > 1 or not best[0].strip():
            found = f"{len(best)} responses share the first place" if len(best) > 1 else "the best reply is empty"
            report.add("no best response", where, found, "left out")
        elif is_sound_prompt(where, task.prompt, report):
            told.add(task.task_id)
            yield {"messages": [*as_turns(task.prompt), {"role": "assistant", "content": best[0]}]}


def write_prompts(
    stored: Sequence[StoredTask], _judgments: Sequence[Judgment], report: Report
) -> Iterator[dict[str, Any]]:
    """{"prompt_id", "messages"}: every prompt once, but those of gold tasks and repeats alone."""
    told = set[tuple[Any, ...]]()
    for one in stored:
        task = one.task
        if why := why_excluded(task):
            report.add(why, f"task {task.task_id!r}", "it measures labelers and is no training data", "left out")
        elif task.prompt not in told and is_sound_prompt(f"task {task.task_id!r}", task.prompt, report):
            told.add(task.prompt)
            yield {"prompt_id": task.task_id, "messages": as_turns(task.prompt)}
