"""Instructions: what is new in a version, and long conversations on the task's page."""

import re

from preferences.page.config import LabelingConfig
from preferences.page.labeler_pages import Line, changes
from preferences.records import Message, Task

CONFIG = LabelingConfig(asks_ratings=False, task_order="arrival", instructions="Rank.\n\nTies are fine.")
TASK = Task("t1", (Message("user", "Say it"),), ("one response", "another"), ("x", "y"))


def hidden(page):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', page.text))


def test_what_is_new_is_shown_first(world, visit):
    world.add(TASK)
    plain = CONFIG
    visit("ann", plain)
    newer = plain.model_copy(update={"instructions": "Rank.\n\nTies are <b>rare</b>.\nLength does not count."})
    page = visit("ann", newer, has_read=False).get("/instructions")
    assert "What is new since you read them" in page.text
    assert '<del><span class="unseen">Removed: </span>Ties are fine.</del>' in page.text
    assert '<ins><span class="unseen">Added: </span>Ties are &lt;b&gt;rare&lt;/b&gt;.</ins>' in page.text
    assert "What is new" not in visit("bob", newer, has_read=False).get("/instructions").text  # who reads it first
    marks = plain.model_copy(update={"flags": ("rude",)})
    assert "The text is the same." in visit("ann", marks, has_read=False).get("/instructions").text


def test_changes_leave_out_what_is_the_same():
    before = "\n".join("abcdefghij")
    after = before.replace("b", "B").replace("i\n", "")
    assert changes(before, before) == []
    assert changes(before, after) == [
        Line("kept", "a"), Line("removed", "b"), Line("added", "B"), Line("kept", "c"),
        Line("kept", "h", is_after_gap=True), Line("removed", "i"), Line("kept", "j"),
    ]  # fmt: skip


def test_a_long_conversation_is_folded_but_for_its_last_turns(world, visit):
    turns = [Message(("user", "assistant")[number % 2], f"word{number}") for number in range(9)]
    world.add(Task("t1", tuple(turns), ("a", "b"), ("x", "y")), Task("t2", tuple(turns[:5]), ("a", "b"), ("x", "y")))
    plain = CONFIG
    ann = visit("ann", plain)
    text = ann.get("/task").text
    folded, last = re.search(r'id="earlier">(.*?)</details>\s*<div class="message \w+">(.*)', text, re.DOTALL).groups()
    assert "5 earlier turns" in folded
    assert [f"word{number}" in last for number in range(9)] == [False] * 5 + [True] * 4
    assert '<span class="turn-number">turn 9 of 9</span>' in last
    page = ann.get("/task")
    ann.post("/task/skip", data=hidden(page) | {"reason": "x"})
    assert 'id="earlier"' not in ann.get("/task").text
