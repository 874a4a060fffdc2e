"""Formats with two responses per row, compared by judges or with a known answer.

PandaLM (Wang et al. 2023, arXiv 2306.05087), AlpacaEval and Chatbot Arena (Zheng et al. 2023, arXiv 2306.05685) have
two models' responses with verdicts. MT-Bench's judgments share Chatbot Arena's format.

RewardBench (Lambert et al. 2024, arXiv 2403.13787) and LLMBar (Zeng et al. 2023, arXiv 2310.07641) are test sets for
reward models and judges. Each row is a pair of responses, one of which is right.
"""

import math
from collections.abc import Iterator

from files.fields import (
    any_messages,
    any_text,
    is_number,
    name_field,
    number_field,
    optional_text,
    present,
    shown,
    text_field,
    whole_field,
)
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    as_messages,
    as_note,
    content_id,
    in_hash_order,
    judged_pair,
    ranks_of,
    rest,
    user,
)
from preferences.records import OVERALL, Task, require_moment

ANNOTATORS = ("annotator1", "annotator2", "annotator3")
PANDALM = {0: (1, 1), 1: (1, 2), 2: (2, 1)}  # 0 = tie, otherwise the better response
WINNERS = {"model_a": (1, 2), "model_b": (2, 1), "tie": (1, 1), "tie (bothbad)": (1, 1)}
BOTH_ORDERS = ("gpt4_pair",)  # MT-Bench's judge that was asked in both orders, and whose disagreements are ties
BOTH_BAD = "bad"  # the flag for both responses in a "tie (bothbad)"


# ---- verdicts on two models ----


def read_pandalm(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `cmp_key` names both models. Each of the three annotators is a labeler."""
    prompt = user(_instruction(where, row, report))
    responses = tuple(_response(where, row, name, report) for name in ("response1", "response2"))
    models = tuple(optional_text(where, row, "cmp_key").split("_"))
    sources = models if len(models) == 2 else (UNKNOWN, UNKNOWN)
    votes = [Vote(name, PANDALM[whole_field(where, row, name, 0, 2)]) for name in ANNOTATORS]
    number = name_field(where, row, "idx")
    identity = f"pandalm/{number}" if number else content_id("pandalm", prompt, responses, sources)
    task = Task(
        task_id=identity,
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details=rest(row, "response1", "response2", *ANNOTATORS),
    )
    yield from judged_pair(where, report, task, votes)


def _response(where: str, row: Row, field: str, report: Report) -> str:
    """Reads a response. In the published file a response "True" has become the JSON value true."""
    value = present(where, row, field)
    if type(value) is bool or is_number(value):
        report.add("response is no text", where, f"{field} is the JSON value {value!r}", "kept as its text")
        return str(value)
    return any_text(where, row, field)


def _instruction(where: str, row: Row, report: Report) -> str:
    """Returns the instruction, with its input if there is one."""
    instruction, given = any_text(where, row, "instruction"), optional_text(where, row, "input")
    if not instruction.strip() and given.strip():
        report.add("empty instruction", where, f"only an input, {given[:40]!r}", "the input is the prompt")
    return "\n\n".join(part for part in (instruction, given) if part.strip())


def read_alpacaeval(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `preference` goes from 1 (the first is better) to 2; 1.5 is a tie.

    A response's rating is its probability of being preferred.
    """
    preference = present(where, row, "preference")
    if preference is None or (isinstance(preference, float) and math.isnan(preference)):
        report.add("no preference", where, "preference is empty: the judge gave none", "left out")
        return
    preference = number_field(where, row, "preference")
    if not 1 <= preference <= 2:
        raise ValueError(f"{where}: field 'preference' is {preference}; a number from 1 to 2 was expected")
    prompt = user(_instruction(where, row, report))
    responses = (any_text(where, row, "output_1"), any_text(where, row, "output_2"))
    sources = tuple(name_field(where, row, name) or UNKNOWN for name in ("generator_1", "generator_2"))
    ratings = (2 - preference, preference - 1)
    dataset = name_field(where, row, "dataset")
    read = ("instruction", "input", "output_1", "output_2", "generator_1", "generator_2", "dataset", "annotator")
    task = Task(
        task_id=content_id("alpacaeval", prompt, responses, sources),
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details={"dataset": dataset} if dataset else {},
    )
    note = as_note(rest(row, *read, "preference"))
    vote = Vote(name_field(where, row, "annotator") or UNKNOWN, ranks_of(ratings), ratings, note=note)
    yield from judged_pair(where, report, task, [vote])


def read_arena(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. If it has a `turn`, the dialogues were judged up to that turn. People saw `model_a` first.

    Dialogues that differ before their last reply are left out: they do not compare two responses to one prompt.
    """
    sides = [as_messages(any_messages(where, row.get(name), name)) for name in ("conversation_a", "conversation_b")]
    if "turn" in row:
        num_turns = whole_field(where, row, "turn", 1, 10_000)
        sides = [side[: 2 * num_turns] for side in sides]
    winner = any_text(where, row, "winner")
    if winner not in WINNERS:
        raise ValueError(f"{where}: field 'winner' is {shown(winner)}; one of {', '.join(WINNERS)} was expected")
    if sides[0][:-1] != sides[1][:-1]:
        found = f"dialogues of {len(sides[0])} and {len(sides[1])} turns differ before the last reply"
        report.add("dialogues part early", where, found, "left out")
        return
    if any(side[-1].role != "assistant" for side in sides):
        report.add("no reply", where, "a conversation ends with the user's turn", "left out")
        return
    prompt, responses = sides[0][:-1], (sides[0][-1].content, sides[1][-1].content)
    sources = (text_field(where, row, "model_a"), text_field(where, row, "model_b"))
    task = Task(
        task_id=content_id("arena", prompt, responses, sources),
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details=rest(row, "model_a", "model_b", "winner", "judge", "conversation_a", "conversation_b", "tstamp"),
    )
    vote = Vote(
        name_field(where, row, "judge") or UNKNOWN,
        WINNERS[winner],
        shown_order=() if row.get("judge") in BOTH_ORDERS else (0, 1),
        flags=((BOTH_BAD,), (BOTH_BAD,)) if winner == "tie (bothbad)" else (),
        created_at=(
            require_moment(where, "field 'tstamp'", number_field(where, row, "tstamp"))
            if row.get("tstamp") is not None
            else 0.0
        ),
    )
    yield from judged_pair(where, report, task, [vote])


# ---- test sets with a right answer ----


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
