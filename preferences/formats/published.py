"""Published preference data: OpenAI's comparisons of summaries (Stiennon et al. 2020, arXiv 2009.01325) and of answers
(WebGPT, Nakano et al. 2021, arXiv 2112.09332), UltraFeedback (Cui et al. 2023, arXiv 2310.01377), HelpSteer3 (Wang et
al. 2025, arXiv 2505.11475), HelpSteer2's preferences (arXiv 2410.01257) and Open-Assistant's trees (Köpf et al. 2023,
arXiv 2304.07327).

PandaLM (Wang et al. 2023, arXiv 2306.05087), AlpacaEval and Chatbot Arena (Zheng et al. 2023, arXiv 2306.05685) have
two models' responses with verdicts of judges. MT-Bench's judgments share Chatbot Arena's format. RewardBench (Lambert
et al. 2024, arXiv 2403.13787) and LLMBar (Zeng et al. 2023, arXiv 2310.07641) are test sets for reward models and
judges: a row is a pair of responses, one of which is right.
"""

import math
import re
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from files.fields import (
    any_messages,
    any_text,
    as_number,
    is_number,
    name_field,
    names,
    number_field,
    object_field,
    objects_field,
    optional_text,
    present,
    shown,
    text_field,
    whole_field,
)
from preferences.formats.parts import (
    CONSENSUS,
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    as_messages,
    as_note,
    content_id,
    imported_task,
    in_hash_order,
    is_sound_prompt,
    judged_pair,
    plain,
    ranks_of,
    report_empty_replies,
    rest,
    user,
)
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Message, Task, dense_ranks, require_moment

ASPECTS = ("instruction_following", "honesty", "truthfulness", "helpfulness")
GPT_4 = "gpt-4"
HIGHEST, LOW = 10, 2  # an overall_score and a mean rating (1 to 5) that contradict each other
HELPSTEER_MARK = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")  # between the turns of a HelpSteer2 prompt
STRONGEST = 3  # of HelpSteer's scores
TREE_ROLES = {"prompter": "user", "assistant": "assistant"}
PERSON = "person"
LAST_RANK = 10_000
SHOWN_ID = 80  # characters
ANNOTATORS = ("annotator1", "annotator2", "annotator3")
PANDALM = {0: (1, 1), 1: (1, 2), 2: (2, 1)}  # 0 = tie, otherwise the better response
WINNERS = {"model_a": (1, 2), "model_b": (2, 1), "tie": (1, 1), "tie (bothbad)": (1, 1)}
BOTH_ORDERS = ("gpt4_pair",)  # MT-Bench's judge that was asked in both orders, and whose disagreements are ties
BOTH_BAD = "bad"  # the flag for both responses in a "tie (bothbad)"


# ---- OpenAI ----


def read_summaries(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `choice` is the better of two `summaries`, by `worker`. Other facts go into the judgment's note.

    The prompt is formatted as in TRL (trl-lib/tldr, trl-lib/tldr-preference), so that policy and reward model see the
    same text. `details` has the original post.
    """
    info = object_field(where, row, "info")
    summaries = objects_field(where, row, "summaries")
    if len(summaries) != 2:
        raise ValueError(f"{where}: field 'summaries' has {len(summaries)} entries; two objects were expected")
    places = [f"{where}: summaries[{index}]" for index in range(2)]
    choice = whole_field(where, row, "choice", 0, 1)
    prompt = user(_article(where, info))
    responses = tuple(any_text(place, summary, "text") for place, summary in zip(places, summaries, strict=True))
    sources = tuple(any_text(place, summary, "policy") for place, summary in zip(places, summaries, strict=True))
    notes = [summary.get("note") or "" for summary in summaries]
    note = as_note(rest(row, "info", "summaries", "choice", "worker") | {"notes": notes if any(notes) else None})
    task = imported_task("openai", prompt, responses, objective, {"info": rest(info)}, sources)
    vote = Vote(name_field(where, row, "worker") or UNKNOWN, (1, 2) if choice == 0 else (2, 1), note=note)
    yield from judged_pair(where, report, task, [vote])


def _article(where: str, info: Row) -> str:
    place = f"{where}: info"
    title = optional_text(place, info, "title")
    if info.get("post") is not None:
        post = any_text(place, info, "post").replace("\n\n", "\n")
        return f"SUBREDDIT: r/{text_field(place, info, 'subreddit')}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    if info.get("article") is not None:
        article = any_text(place, info, "article").replace("\n\n", "\n")
        return f"TITLE: {title}\n\n{article}\n\nTL;DR:"
    raise ValueError(f"{place}: neither 'post' nor 'article' is there; found {names(info)}")


def read_webgpt(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. Scores from -1 to 1 sum to 0; both 0 is a tie. Leaves out GPT-2's `tokens_0` and `tokens_1`."""
    question = object_field(where, row, "question")
    prompt = user(text_field(f"{where}: question", question, "full_text"))
    responses = (any_text(where, row, "answer_0"), any_text(where, row, "answer_1"))
    scores = (number_field(where, row, "score_0"), number_field(where, row, "score_1"))
    if abs(scores[0] + scores[1]) > 1e-6:
        report.add("scores do not mirror", where, f"{scores[0]} and {scores[1]} do not sum to 0", "kept by their order")
    details = plain({"question": question, "quotes": [row.get("quotes_0"), row.get("quotes_1")]})
    task_id = content_id("webgpt", prompt, responses, ())
    task = imported_task("webgpt", prompt, responses, objective, details, ("webgpt", "webgpt"), task_id)
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks_of(scores), scores)])


# ---- UltraFeedback ----


def read_ultrafeedback(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row: four completions per instruction, rated by GPT-4 on four aspects.

    Completions are ranked by the mean of the aspects, or by the aspect that the objective names. `overall_score` is not
    used: many of its 10s should be 1s (OpenBMB/UltraFeedback, issue 8).
    """
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
    task_id = content_id("ultrafeedback", prompt, responses, sources) + (f"/{objective}" if objective else "")
    details = rest(row, "instruction", "completions", "models")
    details["completions"] = [rest(completion, "response", "model") for completion, _ in rated]
    task = imported_task("ultrafeedback", prompt, responses, objective, details, sources, task_id)
    report_empty_replies(where, task, report)
    yield JudgedTask(where, task, (Vote(GPT_4, ranks_of(means), means),))


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


# ---- HelpSteer ----


def read_helpsteer3(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row, with every annotator's score from -3 to 3, negative if the first response is better.

    A score becomes the ratings (-score, score).
    """
    prompt = as_messages(any_messages(where, row.get("context"), "context"))
    overall = whole_field(where, row, "overall_preference", -STRONGEST, STRONGEST)
    votes = []
    given = row.get("individual_preference") is not None
    for index, judged in enumerate(objects_field(where, row, "individual_preference") if given else []):
        place = f"{where}: individual_preference[{index}]"
        score = whole_field(place, judged, "score", -STRONGEST, STRONGEST)
        votes.append(_helpsteer_vote(f"annotator{index + 1}", score, as_note(rest(judged, "score"))))
    task = _helpsteer_task(
        "helpsteer3", prompt, row, ("response1", "response2"), where, objective, "context", "individual_preference"
    )
    yield from judged_pair(where, report, task, votes or [_helpsteer_vote(CONSENSUS, overall, "")])


def read_helpsteer2(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row, which has only the consensus's score."""
    first, *turns = HELPSTEER_MARK.split(any_text(where, row, "prompt"))
    later = zip(turns[::2], turns[1::2], strict=True)
    prompt = (Message("user", first), *(Message(name.lower(), text) for name, text in later))
    strength = whole_field(where, row, "preference_strength", -STRONGEST, STRONGEST)
    task = _helpsteer_task(
        "helpsteer2", prompt, row, ("response_1", "response_2"), where, objective, "prompt", "preference_strength"
    )
    yield from judged_pair(where, report, task, [_helpsteer_vote(CONSENSUS, strength, "")])


def _helpsteer_task(
    name: str, prompt: tuple[Message, ...], row: Row, fields: tuple[str, str], where: str, objective: str, *read: str
) -> Task:
    responses = (any_text(where, row, fields[0]), any_text(where, row, fields[1]))
    return imported_task(name, prompt, responses, objective, rest(row, *fields, *read))


def _helpsteer_vote(labeler: str, score: int, note: str) -> Vote:
    ratings = (float(-score), float(score))
    return Vote(labeler, ranks_of(ratings), ratings, note=note)


# ---- Open-Assistant ----


def read_oasst(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a tree: every set of ranked sibling replies is one ranking, and the path to them its prompt.

    `rank` 0 is best and aggregates several labelers' rankings. Users' turns are not responses. A reply without siblings
    has nothing to be ranked against. Both are skipped silently.
    """
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
    if role not in TREE_ROLES:
        raise ValueError(f"{place}: field 'role' is {shown(role)}; prompter or assistant was expected")
    path = (*path, Message(TREE_ROLES[role], any_text(place, message, "text")))
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
    responses = tuple(any_text(place, reply, "text") for reply in ranked)
    sources = tuple(_source(place, reply) for reply in ranked)
    details = {**tree, "replies": [rest(reply, "text", "replies", "rank", "role") for reply in ranked]}
    task = imported_task("oasst", prompt, responses, objective, details, sources, f"oasst/{parent['message_id']}")
    report_empty_replies(place, task, report)
    yield JudgedTask(place, task, (Vote(CONSENSUS, ranks),))


def _source(place: str, reply: Row) -> str:
    return (name_field(place, reply, "model_name") or "model") if reply.get("synthetic") else PERSON


# ---- verdicts on two models ----


def read_pandalm(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `cmp_key` names both models. Each of the three annotators is a labeler."""
    prompt = user(_instruction(where, row, report))
    responses = tuple(_response(where, row, name, report) for name in ("response1", "response2"))
    models = tuple(optional_text(where, row, "cmp_key").split("_"))
    sources = models if len(models) == 2 else (UNKNOWN, UNKNOWN)
    votes = [Vote(name, PANDALM[whole_field(where, row, name, 0, 2)]) for name in ANNOTATORS]
    number = name_field(where, row, "idx")
    details = rest(row, "response1", "response2", *ANNOTATORS)
    task = imported_task("pandalm", prompt, responses, objective, details, sources, number and f"pandalm/{number}")
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
    task = imported_task("alpacaeval", prompt, responses, objective, {"dataset": dataset} if dataset else {}, sources)
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
    details = rest(row, "model_a", "model_b", "winner", "judge", "conversation_a", "conversation_b", "tstamp")
    task = imported_task("arena", prompt, responses, objective, details, sources)
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
    details = rest(row, "prompt", "chosen", "rejected", "chosen_model", "rejected_model", "id")
    task = imported_task("rewardbench", prompt, responses, objective, details, sources, f"rewardbench/{identity}")
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])


def read_llmbar(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `label` 1 or 2 names the output that follows the instruction."""
    prompt = user(any_text(where, row, "input"))
    responses = tuple(any_text(where, row, name) for name in ("output_1", "output_2"))
    ranks = ((1, 2), (2, 1))[whole_field(where, row, "label", 1, 2) - 1]
    task = imported_task("llmbar", prompt, responses, objective, rest(row, "input", "output_1", "output_2", "label"))
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks)])
