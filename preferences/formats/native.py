"""Heed's own formats.

heed            everything in a label store: one row per task with its judgments, including revised and undone ones
rankings        one row per final ranking, as the reward stage reads them
consensus       one ranking per task, combining all its labelers; write-only
demonstrations  the best responses, for SFT; write-only
prompts         the prompts, for PPO; write-only
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from files.fields import (
    any_text,
    kind_of,
    list_field,
    names,
    number_field,
    numbers_field,
    objects_field,
    optional_text,
    present,
    shown,
    text_field,
    whole_field,
)
from files.strict_json import parse_json
from preferences.annotations import Annotations, CriterionRatings, TurnRating, require_annotations
from preferences.formats.merging import final_judgments, final_rankings
from preferences.formats.parts import (
    CONSENSUS,
    UNKNOWN,
    Judged,
    JudgedTask,
    Report,
    Row,
    Stored,
    Vote,
    Written,
    as_turns,
    is_sound_prompt,
    plain,
    prompt_field,
)
from preferences.rankings import why_excluded
from preferences.records import (
    GOLD,
    KINDS,
    MAX_LABELERS,
    MAX_MILLISECONDS,
    MAX_RESPONSES,
    MAX_REVISION,
    OVERALL,
    Flags,
    Judgment,
    Ranking,
    Task,
    assistant_turns,
    dense_ranks,
    require_moment,
)

MAX_FLAGS = 100  # per response
REQUIRED = ("task_id", "prompt", "responses")  # of a row of `heed`; the other fields have defaults
OPTIONAL = (
    "batch",
    "num_labelers",
    "sources",
    "objective",
    "gold_ranks",
    "repeat_of",
    "details",
    "warning",
    "judgments",
)
FIELDS = (*REQUIRED, *OPTIONAL)


# ---- heed ----


def read_heed(where: str, row: Row, _report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a task as it was stored, with every event on it, or a new task, which may have only the fields REQUIRED."""
    row = _given(where, row)
    missing = [name for name in REQUIRED if name not in row]
    if len(missing) > 1:
        raise ValueError(f"{where}: fields {', '.join(map(repr, missing))} are missing; found {names(row)}")
    responses, details = _texts(where, row, "responses", 1, MAX_RESPONSES), _details(where, row)
    num_responses = len(responses)
    task = Task(
        task_id=text_field(where, row, "task_id"),
        prompt=prompt_field(where, row),
        responses=responses,
        sources=_texts(where, {"sources": (UNKNOWN,) * num_responses, **row}, "sources", num_responses, num_responses),
        objective=objective or any_text(where, {"objective": OVERALL, **row}, "objective"),
        gold_ranks=_gold_ranks(where, row, details, num_responses),
        repeat_of=optional_text(where, row, "repeat_of"),
        details=details,
        warning=optional_text(where, row, "warning"),
    )
    judgments = []
    for number, judged in enumerate(objects_field(where, {"judgments": (), **row}, "judgments")):
        judgments.append(_judgment(f"{where}: judgments[{number}]", judged, task))
    yield JudgedTask(
        where,
        task,
        judgments=tuple(judgments),
        batch=text_field(where, row, "batch") if "batch" in row else "",
        num_labelers=whole_field(where, row, "num_labelers", 1, MAX_LABELERS) if "num_labelers" in row else 0,
    )


def _given(where: str, row: Row) -> dict[str, Any]:
    """Returns a row's fields that are not null. A prompt that is a text becomes the user's turn.

    Unknown fields are ignored, except that a likely misspelling is refused: the task would silently lack the field.
    """
    given = {name: value for name, value in row.items() if value is not None}
    absent = [name for name in FIELDS if name not in given]
    for name in given.keys() - set(FIELDS):
        if near := get_close_matches(name, absent, n=1, cutoff=0.85):
            raise ValueError(f"{where}: unknown field {name!r}; did you mean {near[0]!r}?")
    if isinstance(given.get("prompt"), str):
        given["prompt"] = [{"role": "user", "content": text_field(where, given, "prompt")}]
    return given


def write_heed(stored: Stored, judgments: Judged, _report: Report) -> Written:
    """Writes one row per task. `details` is JSON in a string, because each Parquet column has a single type."""
    by_task: dict[str, list[Judgment]] = {}
    for judgment in judgments:
        by_task.setdefault(judgment.task_id, []).append(judgment)
    for one in stored:
        task = one.task
        yield {
            "task_id": task.task_id,
            "batch": one.batch,
            "num_labelers": one.num_labelers,
            "prompt": as_turns(task.prompt),
            "responses": list(task.responses),
            "sources": list(task.sources),
            "objective": task.objective,
            "gold_ranks": list(task.gold_ranks),
            "repeat_of": task.repeat_of,
            "details": json.dumps(dict(task.details), ensure_ascii=False),
            "warning": task.warning,
            "judgments": [_judgment_row(judgment) for judgment in by_task.get(task.task_id, [])],
        }


def _judgment_row(judgment: Judgment) -> dict[str, Any]:
    left_out = ("task_id", "annotations")
    row = {field.name: getattr(judgment, field.name) for field in fields(judgment) if field.name not in left_out}
    lists = {
        "ranks": list(judgment.ranks),
        "ratings": [float(rating) for rating in judgment.ratings],
        "flags": [list(flags) for flags in judgment.flags],
        "shown_order": list(judgment.shown_order),
    }
    return row | lists | judgment.annotations.as_dict()


def _annotations(where: str, row: Row, task: Task) -> Annotations:
    """Reads a judgment's `criteria`, `turns` and `edits`, as far as it has them."""
    given = {name: row[name] for name in ("criteria", "turns", "edits") if row.get(name) is not None}
    criteria = tuple(
        CriterionRatings(text_field(where, one, "name"), numbers_field(where, one, "ratings"))
        for one in objects_field(where, {"criteria": (), **given}, "criteria")
    )
    turns = tuple(
        TurnRating(
            whole_field(where, one, "turn", 0, len(task.prompt) - 1),
            text_field(where, one, "name"),
            number_field(where, one, "rating"),
        )
        for one in objects_field(where, {"turns": (), **given}, "turns")
    )
    edits = _texts(where, given, "edits", 0, MAX_RESPONSES) if "edits" in given else ()
    found = Annotations(criteria, edits, turns)
    require_annotations(where, found, len(task.responses), turns=assistant_turns(task.prompt))
    return found


def _judgment(where: str, row: Row, task: Task) -> Judgment:
    num_responses = len(task.responses)
    kind = text_field(where, row, "kind")
    if kind not in KINDS:
        raise ValueError(f"{where}: field 'kind' is {shown(kind)}; one of {', '.join(KINDS)} was expected")
    ratings = numbers_field(where, row, "ratings")
    flags = list_field(where, row, "flags")
    order = list_field(where, row, "shown_order")
    for name, entries in (("ratings", ratings), ("flags", flags), ("shown_order", order)):
        if entries and len(entries) != num_responses:
            raise ValueError(f"{where}: field {name!r} has {len(entries)} entries for {num_responses} responses")
    if order and {index for index in order if type(index) is int} != set(range(num_responses)):
        last = num_responses - 1
        raise ValueError(f"{where}: field 'shown_order' is {shown(order)}; each of 0 to {last} once was expected")
    return Judgment(
        task_id=task.task_id,
        labeler=text_field(where, row, "labeler"),
        revision=whole_field(where, row, "revision", 0, MAX_REVISION),
        kind=kind,
        ranks=_ranks(where, row, "ranks", num_responses, may_be_empty=kind in ("skip", "undo", "void")),
        ratings=ratings,
        flags=_flags(where, flags),
        note=any_text(where, row, "note"),
        shown_order=tuple(order),
        instructions_version=any_text(where, row, "instructions_version"),
        milliseconds=whole_field(where, row, "milliseconds", 0, MAX_MILLISECONDS),
        client=any_text(where, row, "client"),
        created_at=require_moment(where, "field 'created_at'", number_field(where, row, "created_at")),
        annotations=_annotations(where, row, task),
    )


def _gold_ranks(where: str, row: Row, details: Mapping[str, Any], num_responses: int) -> tuple[int, ...]:
    """Returns the right ranks. A single response's is 1 if its details say what is right, so the row may omit it."""
    given = _ranks(where, {"gold_ranks": (), **row}, "gold_ranks", num_responses, may_be_empty=True)
    return (1,) if num_responses == 1 and GOLD in details else given


def _details(where: str, row: Row) -> dict[str, Any]:
    details = plain(row.get("details", {}))
    if isinstance(details, str):  # as exports have it, because each Parquet column has a single type
        details = parse_json(f"{where}: field 'details'", details)
    if not isinstance(details, dict):
        raise ValueError(f"{where}: field 'details' holds {type(details).__name__}; a JSON object was expected")
    return details


# ---- rankings ----


def read_rankings(where: str, row: Row, _report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads {"task_id", "prompt", "responses", "ranks", "labeler"}, and "objective", "ratings", "flags" if present."""
    prompt = prompt_field(where, row, is_asked=True)
    responses = _texts(where, row, "responses", 1, MAX_RESPONSES)
    ranks = _ranks(where, row, "ranks", len(responses))
    ratings = numbers_field(where, row, "ratings") if row.get("ratings") is not None else ()
    flags = list_field(where, row, "flags") if row.get("flags") is not None else []
    for name, entries in (("ratings", ratings), ("flags", flags)):
        if entries and len(entries) != len(responses):
            raise ValueError(f"{where}: field {name!r} has {len(entries)} entries for {len(responses)} responses")
    task = Task(
        task_id=text_field(where, row, "task_id"),
        prompt=prompt,
        responses=responses,
        sources=(UNKNOWN,) * len(responses),
        objective=objective or (text_field(where, row, "objective") if row.get("objective") is not None else OVERALL),
    )
    yield JudgedTask(where, task, (Vote(text_field(where, row, "labeler"), ranks, ratings, _flags(where, flags)),))


def write_rankings(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes one row per final ranking."""
    for _, ranking in final_rankings([one.task for one in stored], judgments, report):
        yield ranking_row(ranking)


def ranking_row(ranking: Ranking) -> dict[str, Any]:
    row = {**asdict(ranking), "prompt": as_turns(ranking.prompt), "ratings": [float(r) for r in ranking.ratings]}
    if not any(ranking.flags):
        del row["flags"]
    return row


def _flags(where: str, flags: Sequence[Any]) -> Flags:
    return tuple(_texts(f"{where}: flags", {str(i): of}, str(i), 0, MAX_FLAGS) for i, of in enumerate(flags))


def _texts(where: str, row: Row, field: str, low: int, high: int) -> tuple[str, ...]:
    texts = present(where, row, field)
    if not isinstance(texts, list | tuple) or not low <= len(texts) <= high:
        found = f"{len(texts)} entries" if isinstance(texts, list | tuple) else kind_of(texts)
        size = f"{low}" if low == high else f"{low} to {high}"
        raise ValueError(f"{where}: field {field!r} has {found}; a list of {size} was expected")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: field {field!r}: strings were expected")
    return tuple(texts)


def _ranks(where: str, row: Row, field: str, num_responses: int, *, may_be_empty: bool = False) -> tuple[int, ...]:
    ranks = present(where, row, field)
    if not isinstance(ranks, list | tuple) or not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ValueError(f"{where}: field {field!r} is {shown(ranks)}; a list of whole numbers from 1 was expected")
    if len(ranks) != num_responses and not (may_be_empty and not ranks):
        raise ValueError(f"{where}: field {field!r} has {len(ranks)} entries for {num_responses} responses")
    return dense_ranks(ranks)


# ---- consensus ----


def write_consensus(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes one ranking per task: the consensus of its labelers. Ratings are means, and flags are those that more than
    half of the labelers set.

    Responses are ordered by their mean rank over labelers; tied responses share the mean of their places (Borda count,
    which treats all labelers alike). Equal means are a tie. A lead's adjudication replaces all answers to its task.

    Rows are those of the format `rankings` plus `num_labelers` and `agreement`, the share of the labelers' untied pairs
    of responses that are ordered as in the consensus (null if every pair is tied).
    """
    by_task: dict[str, tuple[Task, list[Ranking]]] = {}
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        by_task.setdefault(task.task_id, (task, []))[1].append(ranking)
    for task, rankings in by_task.values():
        ranks = consensus_of([ranking.ranks for ranking in rankings])
        if len(set(ranks)) == 1 and not task.is_single:
            where = f"task {task.task_id!r}"
            report.add(
                "written as a tie", where, f"all responses share one mean rank of {len(rankings)} labelers", "kept"
            )
        ratings, flags = _mean_ratings(rankings), _flags_of_most(rankings)
        row = ranking_row(replace(rankings[0], labeler=CONSENSUS, ranks=ranks, ratings=ratings, flags=flags))
        yield row | {"num_labelers": len(rankings), "agreement": _agreement(ranks, rankings)}


def consensus_of(rankings: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks responses, from 1, by their mean rank. Means are exact, so rounding cannot make or break a tie."""
    means = [sum(places) for places in zip(*(_places(ranks) for ranks in rankings), strict=True)]
    return tuple(sorted(set(means)).index(mean) + 1 for mean in means)


def _places(ranks: Sequence[int]) -> list[Fraction]:
    """Returns ranks in which ties share the mean of their places: 1, 1, 2 gives 1.5, 1.5, 3."""
    return [
        Fraction(2 * sum(other < rank for other in ranks) + sum(other == rank for other in ranks) + 1, 2)
        for rank in ranks
    ]


def _mean_ratings(rankings: Sequence[Ranking]) -> tuple[float, ...]:
    rated = [ranking.ratings for ranking in rankings if ranking.ratings]
    return tuple(sum(ratings) / len(rated) for ratings in zip(*rated, strict=True)) if rated else ()


def _flags_of_most(rankings: Sequence[Ranking]) -> Flags:
    counts = [Counter(flag for own in rankings if own.flags for flag in {*own.flags[place]})
              for place in range(len(rankings[0].responses))]  # fmt: skip
    found = tuple(tuple(sorted(flag for flag, n in of.items() if 2 * n > len(rankings))) for of in counts)
    return found if any(found) else ()


def _agreement(ranks: Sequence[int], rankings: Sequence[Ranking]) -> float | None:
    pairs = [(i, j) for i in range(len(ranks)) for j in range(i) if ranks[i] != ranks[j]]
    votes = [
        (own.ranks[i] < own.ranks[j]) == (ranks[i] < ranks[j])
        for own in rankings
        for i, j in pairs
        if own.ranks[i] != own.ranks[j]
    ]
    return sum(votes) / len(votes) if votes else None


# ---- for SFT and PPO ----


def write_demonstrations(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes {"messages"}: each task's best response, from its first final judgment with a single best response.

    If the labeler wrote a better version of that response, it is the demonstration.
    """
    written = set[str]()
    for task, judgment in final_judgments([one.task for one in stored], judgments, report, keeps=("edits",)):
        where = f"task {task.task_id!r}, labeler {judgment.labeler!r}"
        edits = judgment.annotations.edits or ("",) * len(task.responses)
        said = zip(task.responses, edits, judgment.ranks, strict=True)
        # The rank of a single response does not say whether it is good, but a better version by a labeler is.
        best = [edit if task.is_single else edit or response for response, edit, rank in said if rank == 1]
        others = sum(1 for edit, rank in zip(edits, judgment.ranks, strict=True) if edit and rank > 1)
        if others:
            found = f"{others} of a response that is not the best; the format `edits` holds them"
            report.add("edits", where, found, "left out")
        if task.task_id in written:
            continue
        if len(best) > 1 or not best[0].strip():
            alone = "a single response without a better version" if task.is_single else "the best reply is empty"
            found = f"{len(best)} responses share the first place" if len(best) > 1 else alone
            report.add("no best response", where, found, "left out")
        elif is_sound_prompt(where, task.prompt, report):
            written.add(task.task_id)
            yield {"messages": [*as_turns(task.prompt), {"role": "assistant", "content": best[0]}]}


def write_prompts(stored: Stored, _judgments: Judged, report: Report) -> Written:
    """Writes {"prompt_id", "messages"}: every prompt once, except those that occur only in gold tasks or repeats."""
    written = set[tuple[Any, ...]]()
    for one in stored:
        task = one.task
        if why := why_excluded(task):
            report.add(why, f"task {task.task_id!r}", "it measures labelers and is not training data", "left out")
        elif task.prompt not in written and is_sound_prompt(f"task {task.task_id!r}", task.prompt, report):
            written.add(task.prompt)
            yield {"prompt_id": task.task_id, "messages": as_turns(task.prompt)}
