"""Rows as data sets publish them, read as demonstrations, as prompts and, where they are pairs, as preferences.

Every layout is written out here with the fields of its data set; texts are made up.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from files.conversations import ConversationReader
from files.rows import InvalidRows, read_source, valid_rows
from reward.config import RankingsConfig
from reward.prepared import read_rankings

QUESTION, ANSWER, WORSE = "What is 2 + 2?", "It is 4.", "It is 5."


def user(text: str = QUESTION) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str = ANSWER) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def reply(text: str, role: str, rank: int | None = None, **fields: Any) -> dict[str, Any]:
    """A message of one of Open-Assistant's trees."""
    return {"message_id": text, "parent_id": "p", "text": text, "role": role, "lang": "en", "rank": rank, **fields}


H4 = {
    "prompt": QUESTION,
    "prompt_id": "f0e3",
    "chosen": [user(), assistant()],
    "rejected": [user(), assistant(WORSE)],
    "messages": [user(), assistant()],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}
H4_CHAT = {  # of H4's UltraChat: the prompt is the first of several questions
    "prompt": QUESTION,
    "prompt_id": "a1",
    "messages": [user(), assistant(), user("And 3 + 3?"), assistant("6")],
}
TREE = {
    "message_tree_id": "t1",
    "tree_state": "ready_for_export",
    "prompt": reply(
        QUESTION,
        "prompter",
        replies=[
            reply(WORSE, "assistant", 1),
            reply("Deleted.", "assistant", 0, deleted=True),
            reply(ANSWER, "assistant", 0, replies=[reply("Thanks!", "prompter", replies=[])]),
        ],
    ),
}
LAYOUTS: dict[str, tuple[dict[str, Any], list[dict[str, str]], list[dict[str, str]]]] = {
    "UltraFeedback, binarized by H4": (H4, [user(), assistant()], [user()]),
    "UltraChat by H4": (H4_CHAT, H4_CHAT["messages"], H4_CHAT["messages"][:3]),
    "ShareGPT": (
        {"id": "x_0", "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        [user(), assistant()],
        [user()],
    ),
    "HH-RLHF": (
        {
            "chosen": f"\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: {QUESTION}\n\nAssistant: {ANSWER}",
            "rejected": f"\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: {QUESTION}\n\nAssistant: {WORSE}",
        },
        [user("Hi"), assistant("Hello!"), user(), assistant()],
        [user("Hi"), assistant("Hello!"), user()],
    ),
    "Open-Assistant's trees": (TREE, [user(), assistant()], [user(), assistant(), user("Thanks!")]),
    "TRL, conversational with an implicit prompt": (
        {"chosen": [user(), assistant()], "rejected": [user(), assistant(WORSE)], "score_chosen": 9.0},
        [user(), assistant()],
        [user()],
    ),
    "TRL, conversational": (
        {"prompt": [user()], "chosen": [assistant()], "rejected": [assistant(WORSE)]},
        [user(), assistant()],
        [user()],
    ),
    "TRL, texts": ({"prompt": QUESTION, "chosen": ANSWER, "rejected": WORSE}, [user(), assistant()], [user()]),
    "TRL, texts with an implicit prompt": (
        {"chosen": f"{QUESTION} {ANSWER}", "rejected": f"{QUESTION} No idea."},
        [user(), assistant(f" {ANSWER}")],
        [user()],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "output": ANSWER, "text": "Below is an instruction ..."},
        [user("Add.\n\n2 and 2"), assistant()],
        [user("Add.\n\n2 and 2")],
    ),
}
PAIRS = [name for name, (row, *_) in LAYOUTS.items() if "chosen" in row]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_row_gives_a_demonstration_and_a_prompt(name: str) -> None:
    row, demonstration, prompt = LAYOUTS[name]
    assert ConversationReader("demonstration").read("d.jsonl: line 1", row) == demonstration
    assert ConversationReader("prompt").read("d.jsonl: line 1", row) == prompt


@pytest.mark.parametrize("name", PAIRS)
def test_the_prompt_is_that_of_the_preference(name: str, tmp_path: Path) -> None:
    row, _, prompt = LAYOUTS[name]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    (ranking,) = read_rankings(RankingsConfig(source=str(path)))
    assert [message.turn for message in ranking.prompt] == prompt
    assert ranking.responses[ranking.ranks.index(1)].strip() == ANSWER


def test_answers_that_a_prompt_leaves_out_and_repeated_rows_are_counted() -> None:
    reader = ConversationReader("prompt")
    for number, row in enumerate([H4, H4 | {"prompt": "1?", "messages": [user("1?"), assistant("")]}, H4], start=1):
        reader.read(f"ultra.jsonl: line {number}", row)
    assert reader.summary("ultra.jsonl") == "ultra.jsonl: 3 prompts, messages"
    assert reader.unusual() == {"ends with an answer (not read)": 3, "seen before (kept)": 1}
    reader = ConversationReader("demonstration")
    reader.read("ultra.jsonl: line 1", H4)
    assert reader.unusual() == {}


def sharegpt(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


@pytest.mark.parametrize(
    ("part", "row", "words"),
    [
        ("demonstration", sharegpt(("human", "q")), r"'conversations\[0\].from' is 'human'; the last turn must be"),
        ("demonstration", sharegpt(("human", " "), ("gpt", "a")), r"field 'conversations\[0\].value' is empty"),
        ("demonstration", {"conversations": [{"from": "human"}]}, r"conversations\[0\]: field 'value' is missing"),
        ("demonstration", sharegpt(), "field 'conversations' is empty; at least one turn"),
        ("prompt", sharegpt(("gpt", "a")), r"'conversations\[0\].from' is 'gpt'; the last turn must be the user's"),
        ("prompt", {"prompt": [user(), assistant()]}, r"'prompt\[1\].role' is 'assistant'; the last turn must be"),
        ("demonstration", {"chosen": "\n\nHuman: q\n\nAssistant:", "rejected": "x"}, r"'chosen \(turn 2\)' is empty"),
        ("demonstration", {"chosen": "yes", "rejected": "no"}, "'chosen' and 'rejected' begin differently"),
        ("demonstration", {"chosen": 3, "rejected": "b"}, "'chosen' is int; a text or a list of messages"),
        ("prompt", reply("q", "prompter"), "a single message of one of Open-Assistant's trees; a whole tree"),
        (
            "demonstration",
            {"message_tree_id": "t", "prompt": reply(QUESTION, "prompter")},
            "field 'prompt.role' is 'prompter'; the last turn must be the assistant's",
        ),
        (
            "demonstration",
            {"message_tree_id": "t", "prompt": reply("q", "prompter", replies=[reply("a", "bot")])},
            r"field 'prompt.replies\[0\].role' is 'bot'; prompter or assistant",
        ),
    ],
)
def test_errors_name_the_fields_as_the_file_does(part: Any, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"d\.jsonl: line 1: .*{words}"):
        ConversationReader(part).read("d.jsonl: line 1", row)


def test_a_prompt_that_begins_otherwise_than_the_messages_is_ambiguous() -> None:
    row = H4 | {"prompt": "Another question?"}
    with pytest.raises(ValueError, match=r"messages \(messages\) and prompt \(prompt\), with different results"):
        ConversationReader("prompt").read("d.jsonl: line 1", row)
    assert ConversationReader("prompt", "prompt").read("d.jsonl: line 1", row) == [user("Another question?")]


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "part", "num_valid", "invalid_lines"),
    [
        # Transcripts whose last reply was cut off: the lines that `tests/preferences/test_formats_real.py` counts.
        ("hh-rlhf/harmless-base/test.jsonl.gz", "demonstration", 1996, [87, 517, 926, 1104]),
        ("hh-rlhf/harmless-base/test.jsonl.gz", "prompt", 2000, []),
        ("oasst_en_100_tree.jsonl", "demonstration", 100, []),
        ("oasst_en_100_tree.jsonl", "prompt", 100, []),
    ],
)
def test_whole_published_files_are_read(name: str, part: Any, num_valid: int, invalid_lines: list[int]) -> None:
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"the real data ({path}) is not on this machine")
    invalid, reader = InvalidRows(str(path), "skip"), ConversationReader(part)
    read = [turns for _, turns in valid_rows(read_source(str(path), invalid=invalid), reader.read, invalid)]
    assert len(read) == num_valid
    assert [int(message.split(": ")[1].split()[-1]) for message in invalid.first] == invalid_lines
    last = {"demonstration": "assistant", "prompt": "user"}[part]
    assert {turns[-1]["role"] for turns in read} == {last}
