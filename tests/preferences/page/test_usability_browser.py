"""The questionnaire in a real browser: by keyboard, without JavaScript, on a narrow screen, and without barriers."""

import shutil

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from preferences import usability
from preferences.accounts import Accounts
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.page.site import COOKIE
from preferences.page.study_config import StudyConfig
from preferences.questionnaire import LOAD, SUS
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore

FORM = {"batch": "b", "flags": [], "asks_ratings": False}
ASKED = {
    "name": "edits",
    "labelers": ["ann", "bob"],
    "tasks_per_condition": 1,
    "practice_tasks": 0,
    "conditions": [{**FORM, "name": "ranks"}, {**FORM, "name": "ranks and edits", "asks_edits": True}],
}


@pytest.fixture
def site(sqlite_tables, tmp_path, browser, serve_app):
    """Returns a function that opens a page as somebody, and the store."""
    url = str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))
    store, accounts, config = LabelStore(url), Accounts(url), LabelingConfig()
    for name, role in (("ann", "labeler"), ("bob", "labeler"), ("eve", "lead")):
        accounts.accept(accounts.invite(name, role))
    tasks = [Task(f"t{n}", (Message("user", f"{n}?"),), ("a", "b"), ("x", "y")) for n in range(4)]
    store.add_tasks(tasks, batch="b", num_labelers=2)
    asked = StudyConfig.model_validate(ASKED)
    with store.writing() as connection:
        usability.start(connection, asked.study(config)[0], asked.labelers, 1.0)
    address, stop = serve_app(make_app(store, accounts, config), config.server)
    pages = []

    def visit(name: str, path: str, **options) -> Page:
        pages.append(browser.new_context(**options).new_page())
        cookie = {"name": COOKIE, "value": accounts.open_session(name), "url": address}
        pages[-1].context.add_cookies([cookie])
        pages[-1].goto(address + path)
        return pages[-1]

    def judge(name: str) -> None:
        with store.reading() as connection:
            stage = usability.stage_of(connection, name)
        version = stage.condition.version
        accounts.confirm_reading(name, version)
        lease = store.lease(name, seconds=60, batch="b")
        store.submit(lease, Answer((1, 2), 9), client="t", instructions_version=version)

    yield visit, judge, store
    for page in pages:
        page.context.close()
    stop()
    accounts.close()
    store.close()


def barriers(page: Page) -> list[str]:
    return [f"{found['id']}: {found['nodes'][0]['html']}" for found in Axe().run(page).response["violations"]]


def test_a_questionnaire_by_keyboard(site):
    visit, judge, store = site
    judge("ann")
    page = visit("ann", "/usability")
    assert barriers(page) == []
    page.get_by_role("radio", name="Mental demand: 0", exact=True).focus()
    for number in range(len(LOAD) + len(SUS)):
        page.keyboard.press("Space")
        for _ in range(number % 3):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Tab")
    page.keyboard.type("Fine by me")
    page.keyboard.press("Tab")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.url.endswith("/instructions")
    with store.reading() as connection:
        (said,) = usability.answers(connection, "edits")
    assert said.load == tuple(5 * (number % 3) for number in range(6))
    assert said.sus == tuple(1 + number % 3 for number in range(6, 16))
    assert said.comment == "Fine by me"


def test_without_javascript_on_a_narrow_screen(site):
    visit, judge, store = site
    judge("ann")
    page = visit("ann", "/usability", java_script_enabled=False, viewport={"width": 320, "height": 700})
    page.get_by_label("What made it hard or easy").fill("Hm")
    page.get_by_role("button", name="Save and continue").click()
    assert page.get_by_role("alert").inner_text().count("Not answered") == 2
    assert page.get_by_label("What made it hard or easy").input_value() == "Hm"
    for index in range(len(LOAD)):
        page.locator(f'label:has(input[name="load_{index}"][value="55"])').click()
    for index in range(len(SUS)):
        page.locator(f'label:has(input[name="sus_{index}"][value="2"])').click()
    page.get_by_role("button", name="Save and continue").click()
    page.wait_for_url("**/instructions")
    with store.reading() as connection:
        (said,) = usability.answers(connection, "edits")
    assert (said.load, said.sus, said.comment) == ((55,) * 6, (2,) * 10, "Hm")


def test_no_page_of_a_study_has_a_barrier(site):
    visit, judge, store = site
    narrow = {"viewport": {"width": 320, "height": 700}}
    judge("ann")
    with store.reading() as connection:
        first = usability.stage_of(connection, "ann")
    said = usability.QuestionnaireAnswer("ann", first.conditions[0], (5,) * 6, (3,) * 10, comment="long " * 40)
    with store.writing() as connection:
        usability.store_answer(connection, "ann", said, 9.0)
    judge("ann")
    last, lead = visit("ann", "/usability", **narrow), visit("eve", "/lead/usability", **narrow)
    last.get_by_role("button", name="Save and finish").click()
    expect(last.get_by_text("Say which form you would rather work with")).to_have_count(1)
    for page in (last, lead):
        assert barriers(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
