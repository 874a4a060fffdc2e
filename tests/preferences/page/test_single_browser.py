"""A single response in a real browser: by keyboard, without JavaScript, on a phone, and on the leads' pages."""

import pytest
from playwright.sync_api import expect

from preferences.annotations import TurnRating
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.records import Message, Task
from tests.preferences.page.test_browser import axe, site, store_it, url

__all__ = ["site", "url"]  # fixtures

CONFIG = LabelingConfig(
    task_order="arrival",
    flags=("rude", "wrong"),
    criteria=(LabelCriterion(name="right", kind="yes_no", each_turn=True),),
)
PROMPT = (Message("user", "Why?"), Message("assistant", "Who asks?"), Message("user", "I do."))
TASKS = [Task(f"t{number}", PROMPT, (f"So {number}.",), ("x",)) for number in range(2)]


def said(judgment):
    (right,) = judgment.annotations.criteria
    return judgment.ranks, judgment.ratings, right.ratings, judgment.annotations.turns, judgment.flags


def test_a_recorded_conversation_by_keyboard(site):
    opened = site(TASKS, config=CONFIG)
    page = opened.visit("ann")
    expect(page.get_by_role("heading", level=1)).to_have_text("How good is this response?")
    expect(page.locator("#answer").get_by_text("cannot tell apart")).to_have_count(0)
    for key in ("6", "1", "j", "Shift+Digit2"):  # a digit rates, because there is nothing to rank
        page.keyboard.press(key)
    expect(page.locator("#said")).to_have_text("Turn 2: Right: no")
    page.keyboard.press("a")
    page.keyboard.press("m")
    page.keyboard.press("Space")
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    (judgment,) = opened.judgments()
    assert said(judgment) == ((1,), (6,), (1,), (TurnRating(1, "right", 0),), (("rude",),))
    page.goto(f"{opened.address}/answers")
    expect(page.get_by_text("rating 6, right 1")).to_be_visible()
    page.get_by_role("link", name="Change").click()
    expect(page.get_by_role("radio", name="Rating, 1 very bad to 7 very good: 6")).to_be_checked()
    page.keyboard.press("2")
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    assert said(opened.judgments()[-1])[:3] == ((1,), (2,), (1,))


@pytest.mark.parametrize("width", [1280, 320])
def test_without_javascript_and_accessible(site, width):
    opened = site(TASKS, config=CONFIG)
    page = opened.visit("ann", java_script_enabled=False, viewport={"width": width, "height": 640})
    page.get_by_role("radio", name="Right: yes", exact=True).check(force=True)
    page.get_by_role("radio", name="Turn 2: Right: yes").check(force=True)
    store_it(page)
    expect(page.get_by_role("alert")).to_contain_text("The response has no rating.")
    page.get_by_role("radio", name="Rating, 1 very bad to 7 very good: 4").check(force=True)
    store_it(page)
    assert said(opened.judgments()[0]) == ((1,), (4,), (1,), (TurnRating(1, "right", 1),), ())


def test_no_barrier_on_a_phone_and_on_the_leads_pages(site):
    opened = site(TASKS, config=CONFIG)
    page = opened.visit("ann", viewport={"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert axe(page) == []
    for key in ("6", "1", "j", "1"):
        page.keyboard.press(key)
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    lead = opened.visit("eve", "lead", path="/lead/task?task=t0")
    expect(lead.get_by_role("region", name="Answers").get_by_text("rating 6")).to_be_visible()
    for path in ("", "/lead/quality", "/lead/search?kind=any", "/lead/export?batch=main&format=turns"):
        if path:
            lead.goto(opened.address + path)
        assert axe(lead) == []
    lead.goto(f"{opened.address}/lead/quality")
    expect(lead.get_by_text("Labelers agree on ratings and marks")).to_be_visible()
    expect(lead.get_by_text("shown first")).to_have_count(0)
