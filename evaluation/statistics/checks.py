"""Validates verdicts before anything is counted, and sorts them."""

import math
from collections.abc import Sequence

from evaluation.verdicts import Verdict


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sorts verdicts, regardless of their original order and of which policy is called a.

    Raises: ValueError, naming the row, for a duplicate (same prompt, policies and samples, judge, labeler and display
    order), a score that is infinite or missing on one side, a negative sample, and a prompt with two categories.
    """
    seen: dict[tuple[object, ...], int] = {}
    category: dict[str, tuple[str, int]] = {}
    for number, verdict in enumerate(verdicts):
        _refuse_odd(verdict, _row(verdict, number))
        key = _key(verdict)
        if key in seen:
            earlier = _row(verdicts[seen[key]], seen[key])
            raise ValueError(f"{_row(verdict, number)}: the same verdict is given twice, first at {earlier}")
        seen[key] = number
        named, place = category.setdefault(verdict.prompt_id, (verdict.category, number))
        if named != verdict.category:
            raise ValueError(
                f"{_row(verdict, number)}: category is {verdict.category!r}, but {named!r} at"
                f" {_row(verdicts[place], place)}; one category per prompt was expected"
            )
    return sorted(verdicts, key=_key)


def _refuse_odd(verdict: Verdict, row: str) -> None:
    if math.isinf(verdict.score_a) or math.isinf(verdict.score_b):
        raise ValueError(f"{row}: scores are {verdict.score_a} and {verdict.score_b}; finite numbers were expected")
    if not verdict.failure and math.isnan(verdict.score_a) != math.isnan(verdict.score_b):
        raise ValueError(
            f"{row}: scores are {verdict.score_a} and {verdict.score_b}; a verdict that did not fail must have both"
            " scores or neither"
        )
    if min(verdict.index_a, verdict.index_b) < 0:
        raise ValueError(f"{row}: samples are {verdict.index_a} and {verdict.index_b}; 0 or more was expected")
    if min(verdict.length_a, verdict.length_b) < 0:
        raise ValueError(f"{row}: lengths are {verdict.length_a} and {verdict.length_b}; 0 or more was expected")


def _row(verdict: Verdict, number: int) -> str:
    place = verdict.where or f"verdict {number} (from 0)"
    return (
        f"{place}, prompt {verdict.prompt_id!r}, {verdict.policy_a!r} against {verdict.policy_b!r},"
        f" judge {verdict.judge!r}, labeler {verdict.labeler!r}"
    )


def _key(verdict: Verdict) -> tuple[object, ...]:
    a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
    first = {"a": verdict.policy_a, "b": verdict.policy_b, "": ""}[verdict.first]
    return (verdict.prompt_id, verdict.judge, verdict.labeler, min(a, b), max(a, b), first)
