"""The page in a real browser: filters by keyboard, links to prompts, narrow screens, no JavaScript, no barriers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from evaluation.compare.folder import read_comparison
from evaluation.compare.report.page import render

STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture
def visit(browser: Browser) -> Iterator[object]:
    """Opens a folder's page; any complaint from the browser is an error."""
    contexts, complaints = [], []

    def open_page(folder: Path, fragment: str = "", **options: object) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{(folder / 'report.html').as_uri()}{fragment}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def expect_shown(page: Page, number: int) -> None:
    expect(page.locator("details.sample:visible")).to_have_count(number)


def field(page: Page, name: str) -> Locator:
    return page.get_by_role("combobox", name=name)


def expect_status(page: Page, text: str) -> None:
    expect(page.get_by_role("status")).to_have_text(text)


def test_a_number_leads_to_its_prompts(visit, two_policies):
    page = visit(two_policies)
    expect_status(page, "1 to 20 of 120 prompts that fit")
    for kind in ("wins", "ties", "losses"):
        link = page.get_by_role("link", name=f"{kind}: show the prompts")
        number = int(link.inner_text())
        link.click()
        expect_status(page, f"1 to {min(20, number)} of {number} prompts that fit")
    chips = page.locator("details.sample:visible > summary .chip").all_inner_texts()
    assert set(chips) == {"sft"}  # losses of ppo, the policy ahead


def test_filters_work_together_and_by_keyboard(visit, four_policies):
    page = visit(four_policies)
    field(page, "Verdict").focus()
    page.keyboard.press("f")  # failed
    expect(page.get_by_role("status")).to_contain_text("that fit")
    failed = page.locator("details.sample[data-outcomes*=':failed']").count()
    expect_status(page, f"1 to {min(20, failed)} of {failed} prompts that fit")
    page.keyboard.press("Tab")  # follow the link to the category
    page.keyboard.press("s")
    both = page.locator("details.sample[data-outcomes*=':failed'][data-category='2']").count()
    assert 0 < both < failed
    expect_status(page, f"1 to {both} of {both} prompts that fit")
    page.get_by_role("button", name="Clear").press("Enter")
    expect_status(page, "1 to 20 of 60 prompts that fit")
    page.get_by_role("searchbox", name="Words").press_sequentially("(17)")
    expect_status(page, "1 to 1 of 1 prompt that fit")
    page.get_by_role("searchbox", name="Words").fill("no such words")
    expect_status(page, "0 prompts that fit")


def test_a_page_that_holds_a_part_says_so_next_to_every_count(visit, two_policies, tmp_path):
    page_text, _ = render(read_comparison(two_policies), max_prompts=30)
    (tmp_path / "report.html").write_text(page_text, encoding="utf-8")
    page = visit(tmp_path)
    expect_status(page, "1 to 20 of 30 prompts that fit of the 30 here (120 in all)")


def test_disagreement_pair_and_judge(visit, four_policies):
    page = visit(four_policies)
    page.get_by_role("checkbox", name="Verdicts disagree").press("Space")
    disagree = page.locator("details.sample[data-disagree='1']").count()
    assert 0 < disagree <= 60
    expect(page.get_by_role("status")).to_contain_text(f"of {disagree} prompts")
    page.get_by_role("button", name="Clear").click()
    field(page, "Policies").select_option("sft and ppo")
    field(page, "Judge").select_option("people")
    field(page, "Verdict").select_option("ppo wins")
    fitting = page.locator("details.sample[data-outcomes~='1-3:1:3']").count()
    assert 0 < fitting < 60
    expect(page.get_by_role("status")).to_contain_text(f"of {fitting} prompts")


def test_pages_turn_and_keep_the_place_of_the_keyboard(visit, two_policies):
    page = visit(two_policies)
    assert page.get_by_role("button", name="Previous").is_disabled()
    page.get_by_role("button", name="Next").press("Enter")
    expect_status(page, "21 to 40 of 120 prompts that fit")
    expect_shown(page, 20)
    expect(page.locator(":focus")).to_contain_text("(20)")
    page.keyboard.press("Enter")  # opens the first sample
    expect(page.get_by_role("link", name="Link to this prompt").locator("visible=true")).to_have_count(1)
    page.get_by_role("button", name="Open or close all shown").click()
    expect(page.get_by_role("link", name="Link to this prompt").locator("visible=true")).to_have_count(20)


def test_a_link_to_a_prompt_shows_it_whatever_the_filters_say(visit, two_policies):
    page = visit(two_policies, "#prompt-p-0077")
    expect(page.locator("#prompt-p-0077")).to_be_visible()
    expect(page.locator("#prompt-p-0077")).to_be_in_viewport()
    expect_status(page, "61 to 80 of 120 prompts that fit")
    page.get_by_role("searchbox", name="Words").fill("nothing")
    expect_status(page, "0 prompts that fit")
    page.evaluate("location.hash = '#prompt-p-0003'")
    expect(page.locator("#prompt-p-0003")).to_be_visible()
    expect_status(page, "1 to 20 of 120 prompts that fit")


def test_without_javascript_the_samples_are_readable(visit, two_policies):
    page = visit(two_policies, "#prompt-p-0050", java_script_enabled=False)
    assert not page.locator(".filters").is_visible()
    expect_shown(page, 120)
    expect(page.locator("#prompt-p-0050")).to_be_in_viewport()  # the browser opens the samples that a link points into
    page.locator("details.sample > summary").nth(70).click()
    expect(page.locator("#prompt-p-0070 .responses")).to_be_visible()


@pytest.mark.parametrize("name", ["two_policies", "four_policies"])
def test_nothing_scrolls_sideways_on_a_narrow_screen(visit, name, request):
    page = visit(request.getfixturevalue(name), viewport={"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for summary in page.locator("details:not(.sample):not(.rest) > summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


@pytest.fixture
def small(make_folder):
    """A page with every element but few of each, because axe checks every element."""
    folder = make_folder(
        policies={"sft": 0.0, "ppo": 1.0, "other": 0.5}, judges={"gpt": ["gpt"], "people": ["ada", "bo"]},
        failing={"gpt": 0.1}, num_prompts=45,
    )  # fmt: skip
    page, _ = render(read_comparison(folder), max_prompts=4)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_barrier_that_axe_knows(visit, small, scheme):
    page = visit(small, color_scheme=scheme)
    page.locator("details:not(.sample):not(.rest) > summary").last.click()
    standards = STANDARDS if scheme == "light" else {"type": "rule", "values": ["color-contrast"]}
    violations = Axe().run(page, options={"runOnly": standards, "resultTypes": ["violations"]}).response["violations"]
    assert [(found["id"], [node["html"][:120] for node in found["nodes"][:3]]) for found in violations] == []


def test_paper_has_every_table_and_no_filters(visit, two_policies):
    page = visit(two_policies)
    page.emulate_media(media="print")
    expect(page.locator(".filters")).to_be_hidden()
    expect(page.get_by_text("compare.json, as resolved.")).to_be_visible()
    expect_shown(page, 20)
    assert len(page.pdf()) > 20_000
