"""UltraFeedback (Cui et al. 2023, arXiv 2310.01377): four completions per instruction, rated by GPT-4 on four aspects.

Completions are ranked by the mean of the aspects, or by the aspect that the objective names. `overall_score` is not
used: many of its 10s should be 1s (OpenBMB/UltraFeedback, issue 8).
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from files.fields import any_text, as_number, object_field, objects_field, shown
from preferences.formats.parts import (
    JudgedTask,
    Report,
    Row,
    Vote,
    content_id,
    is_sound_prompt,
    ranks_of,
    report_empty_replies,
    rest,
    user,
)
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, OVERALL, Task

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")
LABELER = "gpt-4"
HIGHEST, LOW = 10, 2  # an overall_score and a mean rating (1 to 5) that contradict each other


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    prompt = user(any_text(where, row, "instruction"))
    completions = objects_field(where, row, "completions")
    aspects = (objective,) if objective in ASPECTS else ASPECTS
    rated: list[tuple[dict[str, Any], float]] = []
    for index, completion in enumerate(completions):
        place = f"{where}: completions[{index}]"
        ratings = _ratings(place, completion, aspects, report)
        if ratings:
            rated.append((completion, fmean(ratings)))
            _check_overall(place, completion, rated[-1][1], report)
        else:
            report.add("no rating", place, f"no number for {', '.join(aspects)}", "this completion left out")
    if not MIN_RESPONSES <= len(rated) <= MAX_RESPONSES:
        report.add("nothing to rank", where, f"{len(rated)} rated completions", "left out")
        return
    if not is_sound_prompt(where, prompt, report):
        return
    responses = tuple(any_text(where, completion, "response") for completion, _ in rated)
    means = tuple(mean for _, mean in rated)
    sources = tuple(any_text(where, completion, "model") for completion, _ in rated)
    task = Task(
        task_id=content_id("ultrafeedback", prompt, responses, sources) + (f"/{objective}" if objective else ""),
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details=rest(row, "instruction", "completions", "models")
        | {"completions": [rest(completion, "response", "model") for completion, _ in rated]},
    )
    report_empty_replies(where, task, report)
    yield JudgedTask(where, task, (Vote(LABELER, ranks_of(means), means),))


def _ratings(place: str, completion: Row, aspects: tuple[str, ...], report: Report) -> list[float]:
    """Returns the aspects' ratings that are numbers. They are written as strings, some of them "N/A"."""
    annotations = object_field(place, completion, "annotations")
    found = []
    for aspect in aspects:
        annotation = object_field(f"{place}: annotations", annotations, aspect)
        rating = annotation.get("Rating")
        number = as_number(rating)
        if number is None:
            report.add("rating is no number", place, f"{aspect} is {shown(rating)}", "the others count")
        else:
            found.append(number)
    return found


def _check_overall(place: str, completion: Row, mean: float, report: Report) -> None:
    given = completion.get("overall_score")
    overall = as_number(given)
    if overall is None and given is not None:
        raise ValueError(f"{place}: field 'overall_score' is {shown(given)}; a number was expected")
    if overall is not None and overall >= HIGHEST and mean <= LOW:
        found = f"overall_score is {given}, but the ratings' mean is {mean:g}"
        report.add("overall_score against ratings", place, found, "ranked by the ratings")
