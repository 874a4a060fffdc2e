"""OpenAI's published comparisons: of summaries (Stiennon et al. 2020, arXiv 2009.01325) and of answers (WebGPT, Nakano
et al. 2021, arXiv 2112.09332).

The prompt of a summary is formatted as in TRL (trl-lib/tldr, trl-lib/tldr-preference), so that policy and reward model
see the same text. `details` has the original post.
"""

from collections.abc import Iterator

from files.fields import (
    any_text,
    name_field,
    names,
    number_field,
    object_field,
    objects_field,
    optional_text,
    text_field,
    whole_field,
)
from preferences.formats.parts import (
    UNKNOWN,
    JudgedTask,
    Report,
    Row,
    Vote,
    as_note,
    content_id,
    judged_pair,
    plain,
    ranks_of,
    rest,
    user,
)
from preferences.records import OVERALL, Task


def read_summaries(where: str, row: Row, report: Report, objective: str) -> Iterator[JudgedTask]:
    """Reads a row. `choice` is the better of two `summaries`, by `worker`. Other facts go into the judgment's note."""
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
    task = Task(
        task_id=content_id("openai", prompt, responses, sources),
        prompt=prompt,
        responses=responses,
        sources=sources,
        objective=objective or OVERALL,
        details={"info": rest(info)},
    )
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
    task = Task(
        task_id=content_id("webgpt", prompt, responses, ()),
        prompt=prompt,
        responses=responses,
        sources=("webgpt", "webgpt"),
        objective=objective or OVERALL,
        details=plain({"question": question, "quotes": [row.get("quotes_0"), row.get("quotes_1")]}),
    )
    yield from judged_pair(where, report, task, [Vote(UNKNOWN, ranks_of(scores), scores)])
