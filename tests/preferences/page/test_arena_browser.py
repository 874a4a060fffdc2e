"""The arena in a real browser: streaming, by keyboard alone, without JavaScript, on a narrow screen, with axe."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from preferences.page import arena as arena_module
from preferences.page.arena import NO_ANSWER, ArenaPrompt, ArenaSetup
from preferences.page.config import LabelingConfig
from preferences.records import Message
from tests.preferences.page.arenas import SECRETS, ScriptedWriters
from tests.preferences.page.test_browser import Site

CONFIG = LabelingConfig(title="Arena", flags=("wrong", "rude"))
PROMPTS = [ArenaPrompt("p", (Message("user", "A prompt from the list?"),))]


class ArenaSite(Site):
    """A server with scripted policies."""

    def __init__(self, url: str, browser: Browser) -> None:
        self.writers = ScriptedWriters()
        super().__init__(url, CONFIG, browser, ArenaSetup(self.writers, "arena", PROMPTS))

    def visit(self, name: str, **options: Any) -> Page:
        return super().visit(name, path="/", **options)


@pytest.fixture
def site(sqlite_tables: Path, tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaSite]:
    monkeypatch.setattr(arena_module, "USUAL_PACE", 1e6)
    opened = ArenaSite(str(shutil.copy(sqlite_tables, tmp_path / "labels.db")), browser)
    yield opened
    opened.close()


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your message").fill(question)
    page.get_by_role("button", name="Ask both").click()


def require_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_both_answers_grow_together_and_are_then_judged(site: ArenaSite) -> None:
    site.writers.is_waiting = True
    page = site.visit("ann")
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    ask(page, "Why is the sky blue?")
    expect(page.get_by_text("Both models are writing.")).to_be_visible()
    boxes = page.locator(".growing")
    first, second = site.writers.of(0), site.writers.of(1)
    first.write("x" * 40)
    page.wait_for_timeout(400)
    assert boxes.all_inner_texts() == ["", ""]
    second.write("y" * 10)
    expect(boxes.nth(first.side)).to_have_text("x" * 10)
    expect(boxes.nth(second.side)).to_have_text("y" * 10)
    require_accessible(page)
    first.end("It *scatters*.")
    second.end("It is the sea.")
    expect(page.get_by_role("button", name="Save the verdict")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("Both models have stopped writing.")
    expect(page.locator(".response em")).to_have_text("scatters")
    require_accessible(page)
    page.get_by_role("radio", name="A is much better").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("A is much better. Saved.")).to_be_visible()
    (judgment,) = site.store.judgments("arena")
    assert judgment.ranks[judgment.shown_order[0]] == 1
    assert judgment.flags[judgment.shown_order[0]] == ("much better",)
    require_accessible(page)
    assert not any(secret in page.content() for secret in SECRETS)
    assert errors == []


def test_a_conversation_by_keyboard_alone(site: ArenaSite) -> None:
    page = site.visit("ann")
    page.get_by_label("Your message").focus()
    page.keyboard.type("One?")
    page.keyboard.press("Control+Enter")
    page.wait_for_url("**/arena/*")
    page.get_by_role("radio", name="B is better").focus()
    page.keyboard.press("Space")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("B is better. Saved.")).to_be_visible()
    expect(page.get_by_role("radio", name="answer B")).to_be_checked()  # the better one, unless they say otherwise
    page.wait_for_load_state()  # keys work once the page is whole
    page.get_by_label("Your message").focus()
    page.keyboard.type("Two?")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("after answer B")).to_be_visible()
    assert len(site.writers.asked[-1].messages) == 3


def test_a_typed_message_survives_a_reload_and_a_refusal(site: ArenaSite) -> None:
    page = site.visit("ann")
    page.get_by_label("Your message").fill("A long thought")
    page.reload()
    expect(page.get_by_label("Your message")).to_have_value("A long thought")
    site.writers.is_waiting = True
    page.get_by_role("button", name="Ask both").click()
    expect(page.get_by_text("Both models are writing.")).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{site.address}/arena")
    ask(other, "At the same time")
    expect(other.get_by_role("alert")).to_contain_text("A turn of yours is still being written")
    expect(other.get_by_label("Your message")).to_have_value("At the same time")


def test_a_closed_tab_frees_the_work_and_the_turn_can_be_sampled_again(
    site: ArenaSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preferences.page.arena.UNSEEN_SECONDS", 3.0)
    site.writers.is_waiting = True
    page = site.visit("ann")
    ask(page, "One?")
    expect(page.get_by_text("Both models are writing.")).to_be_visible()
    address = page.url
    page.wait_for_timeout(6_000)
    assert site.writers.stopped == []  # somebody is looking
    page.goto("about:blank")
    deadline = time.monotonic() + 60
    while not site.writers.stopped:
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)
    page.goto(address)
    expect(page.get_by_text("This turn is unfinished.")).to_be_visible()
    require_accessible(page)
    site.writers.is_waiting = False
    page.get_by_role("button", name="Sample it again").click()
    expect(page.get_by_role("button", name="Save the verdict")).to_be_visible()


def test_a_failure_is_a_sentence(site: ArenaSite) -> None:
    site.writers.is_waiting = True
    page = site.visit("ann")
    ask(page, "One?")
    expect(page.get_by_text("Both models are writing.")).to_be_visible()
    site.writers.of(1).to.failed(NO_ANSWER)
    expect(page.get_by_role("alert")).to_contain_text("One of the two answers could not be sampled")
    expect(page.locator(".message.user .text")).to_have_text("One?")


def test_without_javascript(site: ArenaSite) -> None:
    site.writers.is_waiting = True
    page = site.visit("ann", java_script_enabled=False)
    page.get_by_role("button", name="Take a prompt from the list").click()
    expect(page.locator(".message.user .text")).to_have_text("A prompt from the list?")
    for policy in (0, 1):
        site.writers.of(policy).end("Whole.")
    expect(page.get_by_role("button", name="Save the verdict")).to_be_visible()  # the page reloads by itself
    page.get_by_role("button", name="Save the verdict").click()
    expect(page.get_by_role("alert")).to_have_text("Say which answer is better.")
    page.get_by_role("radio", name="They are equally good").check(force=True)
    page.get_by_role("button", name="Save the verdict").click()
    expect(page.get_by_text("They are equally good. Saved.")).to_be_visible()
    assert [act.ranks for act in site.store.judgments("arena")] == [(1, 1)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_narrow_screen(site: ArenaSite, scheme: Any) -> None:
    site.writers.answers = ("word " * 30 + "x" * 200, "`code` " * 30)
    page = site.visit("ann", viewport={"width": 320, "height": 640}, color_scheme=scheme)
    require_accessible(page)
    ask(page, "q" * 100)
    expect(page.get_by_role("button", name="Save the verdict")).to_be_visible()
    page.get_by_text("Why?").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    require_accessible(page)
    page.goto(f"{site.address}/arena")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    require_accessible(page)
