"""Rating each turn of a conversation with tools in a real browser: by keyboard, without JavaScript, on a phone."""

import pytest
from playwright.sync_api import expect

from preferences.annotations import TurnRating
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.records import Message, Task
from tests.preferences.page.test_browser import axe, rank, site, store_it, url
from tests.preferences.test_turns import PROMPT

__all__ = ["site", "url"]  # fixtures

CONFIG = LabelingConfig(
    task_order="arrival",
    asks_ratings=False,
    flags=(),
    criteria=(
        LabelCriterion(name="right", kind="yes_no", each_turn=True),
        LabelCriterion(name="tone", highest=5, each_turn=True),
    ),
)
LONG = "row of a table " * 100
# Nine turns, three of them the assistant's: without ratings of turns, the first five would be folded.
TURNS = (
    *PROMPT,
    Message.of({
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "run", "arguments": {"code": "a = 1\nprint(a)"}}}],
    }),
    Message("tool", LONG),
    Message("user", "So?"),
)  # fmt: skip
TASK = Task("t1", TURNS, ("In Ravenna.", "In Florence."), ("x", "y"))
RATED = (
    TurnRating(2, "right", 1), TurnRating(2, "tone", 4), TurnRating(4, "right", 0), TurnRating(4, "tone", 5),
    TurnRating(6, "right", 1), TurnRating(6, "tone", 1),
)  # fmt: skip
KEYS = ("j", "Shift+Digit1", "Shift+Digit4", "Shift+Digit2", "Shift+Digit5", "Shift+Digit1", "Shift+Digit1")


def test_each_turn_by_keyboard(site):
    opened = site([TASK, Task("t2", PROMPT[1:2], ("a", "b"), ("x", "y"))], config=CONFIG)
    page = opened.visit("ann")
    for key in ("a", "1", "Shift+Digit1", "Shift+Digit3", "b", "2", "Shift+Digit2", "Shift+Digit1", *KEYS):
        page.keyboard.press(key)
    expect(page.locator("#said")).to_have_text("Turn 7: Tone (1 to 5): 1")
    page.keyboard.press("u")  # the turn before
    expect(page.locator(".message.chosen h3")).to_contain_text("turn 5 of 9")
    page.keyboard.press("m")  # there are no marks of a turn, and a digit ranks nothing
    page.keyboard.press("1")
    page.reload()  # the draft keeps the ratings of turns, which are outside of the form
    assert page.locator("input:checked").count() == 2 * 3 + 6 + 1  # with the box of the shortcuts
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    (judgment,) = opened.judgments()
    assert judgment.annotations.turns == RATED
    assert [judgment.ranks[index] for index in judgment.shown_order] == [1, 2]
    expect(page.get_by_text("choose the next and the previous turn")).to_have_count(0)  # nothing of the kind here


@pytest.mark.parametrize("width", [1280, 320])
def test_without_javascript_and_accessible(site, width):
    opened = site([TASK], config=CONFIG)
    page = opened.visit("ann", java_script_enabled=False, viewport={"width": width, "height": 640})
    rank(page, 1, 2)
    for letter in "AB":
        page.get_by_role("radio", name=f"{letter}: Right: yes").check(force=True)
        page.get_by_role("radio", name=f"{letter}: Tone (1 to 5): 3").check(force=True)
    for turn, right, tone in ((3, "yes", 4), (5, "no", 5)):
        page.get_by_role("radio", name=f"Turn {turn}: Right: {right}").check(force=True)
        page.get_by_role("radio", name=f"Turn {turn}: Tone (1 to 5): {tone}").check(force=True)
    store_it(page)
    expect(page.get_by_role("alert")).to_contain_text("Turn 7 has no right.")
    page.get_by_role("radio", name="Turn 7: Right: yes").check(force=True)
    page.get_by_role("radio", name="Turn 7: Tone (1 to 5): 1").check(force=True)
    store_it(page)
    assert opened.judgments()[0].annotations.turns == RATED


def test_no_barrier_and_nothing_wider_than_a_phone(site):
    opened = site([TASK], config=CONFIG)
    page = opened.visit("ann", viewport={"width": 320, "height": 640})
    expect(page.get_by_text("earlier turns")).to_have_count(0)  # they are rated, so they are not folded
    expect(page.get_by_text("print(a)")).to_be_visible()
    expect(page.get_by_text(LONG.strip(), exact=True)).to_be_hidden()
    page.get_by_text("(1,500 characters)").click()
    for box in page.locator("details.result").all():
        box.evaluate("box => { box.open = true; }")
    page.keyboard.press("j")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert axe(page) == []
    eve = opened.visit("eve", "lead", path="/lead/task?task=t1")
    assert axe(eve) == []
