"""Test sets of reward models and judges: RewardBench (Lambert et al. 2024, arXiv 2403.13787), LLMBar (Zeng et al. 2023,
arXiv 2310.07641). One row is a pair of responses, one of which is right.
"""

from collections.abc import Iterator

from files.fields import any_text, name_field, text_field, whole_field
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    content_id,
    in_hash_order,
    judged_pair,
    rest,
    user,
)
from preferences.records import OVERALL, Task


def recognise_rewardbench(row: Row) -> str:
    is_one = {"prompt", "chosen", "rejected", "subset"} <= row.keys() and isinstance(row["chosen"], str)
    return "prompt, chosen, rejected and subset" if is_one else ""


def read_rewardbench(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `subset` goes into the details. Rows with the same `id` and subset are one task."""
    prompt = user(any_text(where, row, "prompt"))
    responses, ranks = in_hash_order(any_text(where, row, "chosen"), any_text(where, row, "rejected"))
    subset = text_field(where, row, "subset")
    models = tuple(name_field(where, row, name) or UNKNOWN for name in ("chosen_model", "rejected_model"))
    sources = models if ranks == (1, 2) else models[::-1]
    # A pair that is in several subsets counts in each of them.
    identity = f"{subset}/{name_field(where, row, 'id') or content_id('', prompt, responses, ())}"
    task = Task(
        task_id=f"rewardbench/{identity}",
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details=rest(row, "prompt", "chosen", "rejected", "chosen_model", "rejected_model", "id"),
    )
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])


def recognise_llmbar(row: Row) -> str:
    return "input, output_1, output_2 and label" if {"input", "output_1", "output_2", "label"} <= row.keys() else ""


def read_llmbar(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `label` 1 or 2 names the output that follows the instruction."""
    prompt = user(any_text(where, row, "input"))
    responses = tuple(any_text(where, row, name) for name in ("output_1", "output_2"))
    ranks = ((1, 2), (2, 1))[whole_field(where, row, "label", 1, 2) - 1]
    task = Task(
        task_id=content_id("llmbar", prompt, responses, ()),
        prompt=prompt,
        responses=responses,
        sources=(UNKNOWN, UNKNOWN),
        objective=objective or OVERALL,
        details=rest(row, "input", "output_1", "output_2", "label"),
    )
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])
