"""Pairs of a chosen and a rejected response.

TRL's preference type: `chosen` and `rejected`, with a `prompt` field or with the prompt inside both; and its unpaired
type: `prompt`, `completion` and `label`. Both are texts (standard) or lists of {role, content} (conversational). An
implicit prompt is their common beginning, as in TRL's extract_prompt. `ultrafeedback_binarized` adds `prompt_id`,
`score_chosen` and `score_rejected`.

Anthropic's HH-RLHF (Bai et al. 2022, arXiv 2204.05862): `chosen` and `rejected` are whole transcripts. A transcript
repeats "\\n\\nHuman: ...\\n\\nAssistant: ..."; its last turn is the response. The data does not say who judged. Only
the file's folder says whether labelers judged by helpfulness or harmlessness, so set it with --objective.
"""

from collections.abc import Iterator, Sequence

from files.conversations import SPEAKER, implicit_prompt, is_transcript, tool_messages, transcript_turns
from files.fields import (
    any_messages,
    any_text,
    checked_messages,
    number_field,
    present,
    shown,
    text_field,
    text_or_messages,
)
from preferences.formats.merging import final_rankings, single_turn, untied_pairs
from preferences.formats.parts import (
    UNKNOWN,
    Judged,
    JudgedTask,
    Report,
    Row,
    Stored,
    Vote,
    Written,
    as_messages,
    as_turns,
    imported_task,
    in_hash_order,
    is_sound_prompt,
    judged_pair,
    report_empty_replies,
    rest,
    user,
)
from preferences.records import Message

SPEAKERS = {"user": "Human", "assistant": "Assistant"}
Sides = tuple[tuple[Message, ...], str, str]  # prompt, chosen, rejected


# ---- TRL ----


def recognise(row: Row) -> str:
    if {"chosen", "rejected"} <= row.keys():
        return "chosen and rejected" + (" and prompt" if "prompt" in row else "")
    return ""


def read_unpaired(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads one response with a label: true if it is desirable. The label becomes a rating of 1 or 0."""
    label = present(where, row, "label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise ValueError(f"{where}: field 'label' is {shown(label)}; true or false was expected")
    given = text_or_messages(where, row, "prompt")
    prompt = (
        user(text_field(where, row, "prompt"))
        if isinstance(given, str)
        else as_messages(checked_messages(where, given, "prompt", ends_with="user"))
    )
    completion = text_or_messages(where, row, "completion")
    if not isinstance(completion, str):
        turns = as_messages(any_messages(where, completion, "completion"))
        if [turn.role for turn in turns] != ["assistant"]:
            raise ValueError(f"{where}: field 'completion' has {len(turns)} turns; one of the assistant was expected")
        completion = turns[0].content
    task = imported_task("trl", prompt, (completion,), objective, rest(row, "prompt", "completion", "label"))
    if is_sound_prompt(where, prompt, report):
        report_empty_replies(where, task, report)
        yield JudgedTask(where, task, (Vote(UNKNOWN, (1,), (float(label),)),))


def write_unpaired(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes {"prompt", "completion", "label"}, one row per response and labeler: true for a rating of 1, false for 0.

    With a yes-or-no criterion (`by_criterion`), its ratings are these.
    """
    for task, ranking in final_rankings([one.task for one in stored], judgments, report):
        where = f"task {task.task_id!r}, labeler {ranking.labeler!r}"
        if not ranking.ratings:
            report.add("no ratings", where, "the responses were not rated", "left out")
        elif others := {*ranking.ratings} - {0, 1}:
            found = f"a rating is {max(others):g}, and a label is true (1) or false (0)"
            report.add("no yes or no", where, found, "left out")
        elif is_sound_prompt(where, task.prompt, report):
            for response, rating in zip(task.responses, ranking.ratings, strict=True):
                completion = [{"role": "assistant", "content": response}]
                yield {"prompt": as_turns(task.prompt), "completion": completion, "label": rating == 1}


def read(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    sides = _sides(where, row, report)
    if sides is None:
        return
    prompt, chosen, rejected = sides
    responses, ranks = in_hash_order(chosen, rejected)
    ratings: tuple[float, ...] = ()
    if "score_chosen" in row and "score_rejected" in row:
        scores = number_field(where, row, "score_chosen"), number_field(where, row, "score_rejected")
        if scores[0] == scores[1]:
            report.add("tied scores", where, f"chosen and rejected both have {scores[0]}", "kept as a tie")
            ratings, ranks = scores, (1, 1)
        else:
            ratings = scores if ranks == (1, 2) else scores[::-1]
        if scores[0] < scores[1]:
            report.add("scores against the choice", where, f"{scores[0]} was chosen over {scores[1]}", "kept as chosen")
    read_fields = ("prompt", "chosen", "rejected", "messages", "score_chosen", "score_rejected")
    task = imported_task("trl", prompt, responses, objective, rest(row, *read_fields))
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks, ratings)])


def _sides(where: str, row: Row, report: Report) -> Sides | None:
    """Returns the prompt and both replies, or None and a warning if they cannot be separated."""
    if isinstance(present(where, row, "chosen"), str) or isinstance(present(where, row, "rejected"), str):
        return _of_texts(where, row, any_text(where, row, "chosen"), any_text(where, row, "rejected"), report)
    chosen, rejected = text_or_messages(where, row, "chosen"), text_or_messages(where, row, "rejected")
    turns = [
        as_messages(tool_messages(where, side, name)) for name, side in (("chosen", chosen), ("rejected", rejected))
    ]
    given = row.get("prompt")
    prompt: tuple[Message, ...] = ()
    if isinstance(given, list) and given:
        prompt = as_messages(tool_messages(where, given, "prompt"))
    elif given is not None and given != []:
        is_alone = len(turns[0]) == len(turns[1]) == 1
        prompt = user(text_field(where, row, "prompt")) if is_alone else ()
    if prompt and len(turns[0]) == len(turns[1]) == 1:
        turns = [(*prompt, *side) for side in turns]
    if not turns[0][:-1] and not turns[1][:-1]:
        _refuse_empty_prompt(where, row)
    if turns[0][:-1] != turns[1][:-1] or not turns[0][:-1]:
        found = f"{len(turns[0])} and {len(turns[1])} turns, which differ before the last"
        report.add("prompts differ", where, found if turns[0][:-1] or turns[1][:-1] else "no prompt", "left out")
        return None
    for name, side in zip(("chosen", "rejected"), turns, strict=True):
        if side[-1].role != "assistant":
            report.add("no reply", where, f"{name} ends with {side[-1].role}'s turn", "left out")
            return None
        if side[-1].more:
            report.add("reply that calls a tool", where, f"{name} ends with a call, which no text holds", "left out")
            return None
    return turns[0][:-1], turns[0][-1].content, turns[1][-1].content


def _of_texts(where: str, row: Row, chosen: str, rejected: str, report: Report) -> Sides | None:
    if row.get("prompt") is not None:
        return user(text_field(where, row, "prompt")), chosen, rejected
    length = implicit_prompt(chosen, rejected)
    if not length:
        _refuse_empty_prompt(where, row)
        report.add("prompts differ", where, f"{chosen[:30]!r} and {rejected[:30]!r} begin differently", "left out")
        return None
    return user(chosen[:length]), chosen[length:], rejected[length:]


def _refuse_empty_prompt(where: str, row: Row) -> None:
    """Raise ValueError if a row has the field, but no prompt in it. (A null is fine if `chosen` and `rejected` begin
    with the prompt, as in tables that mix both kinds of rows.)
    """
    if "prompt" in row:
        what = "null" if row["prompt"] is None else "empty"
        raise ValueError(f"{where}: field 'prompt' is {what}, and 'chosen' and 'rejected' do not begin with one")


def write(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes the conversational type with an explicit prompt, one row per untied pair."""
    for pair in untied_pairs(stored, judgments, report):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (pair.better, pair.worse))
        yield {"prompt": as_turns(pair.task.prompt), "chosen": chosen, "rejected": rejected}


def write_text(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes texts with an explicit prompt, only for prompts with a single user turn."""
    for pair in untied_pairs(stored, judgments, report):
        if prompt := single_turn(pair, report):
            yield {"prompt": prompt, "chosen": pair.better, "rejected": pair.worse}


# ---- transcripts of HH-RLHF ----


def recognise_hh(row: Row) -> str:
    if is_transcript(row.get("chosen")) and is_transcript(row.get("rejected")):
        return "chosen and rejected begin with '\\n\\nHuman:'"
    return ""


def read_hh(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
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
    task = imported_task("hh", prompt, responses, objective)
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])


def write_hh(stored: Stored, judgments: Judged, report: Report) -> Written:
    """Writes one row per untied pair. Leaves out what a transcript cannot represent."""
    for pair in untied_pairs(stored, judgments, report):
        turns = [*pair.task.prompt, Message("assistant", pair.better), Message("assistant", pair.worse)]
        strange = next(
            (turn for turn in turns if turn.role not in SPEAKERS or turn.more or SPEAKER.search(turn.content)), None
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
    return "".join(f"\n\n{SPEAKERS[turn.role]}: {turn.content}" for turn in turns)
