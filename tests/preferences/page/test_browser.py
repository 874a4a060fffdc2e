"""The page in a real browser: two people at once, by keyboard alone, without JavaScript, on a narrow screen."""

import re
import shutil
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import event

from preferences.accounts import Accounts
from preferences.page.app import listening, make_app
from preferences.page.arena import ArenaSetup
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.page.site import COOKIE
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore

RANK = re.compile("Rank of")
RATED = LabelingConfig(task_order="arrival")
PLAIN = LabelingConfig(asks_ratings=False, task_order="arrival")


@pytest.fixture
def url(sqlite_tables, tmp_path):
    return str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))


class Site:
    """A server in a thread of this process with people in it, and perhaps an arena, visited by name."""

    def __init__(self, url: str, config: LabelingConfig, browser: Browser, arena: ArenaSetup | None = None) -> None:
        self.url, self.config, self.browser, self.pages = url, config, browser, []
        self.store, self.accounts = LabelStore(url), Accounts(url)
        listener = listening("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.closing = ExitStack()
        opened = self.closing.enter_context(arena.opened(url, self.store, config)) if arena else None
        app = make_app(self.store, self.accounts, config, arena=opened)
        settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()

    def close(self) -> None:
        for page in self.pages:
            page.context.close()
        self.server.should_exit = True
        self.thread.join()
        self.closing.close()
        self.store.close()
        self.accounts.close()

    def open_page(self, **options) -> Page:
        page = self.browser.new_context(**options).new_page()
        self.pages.append(page)
        return page

    def visit_by_link(self, name: str, **options) -> Page:
        """Sign in with the key of a fresh link, as labelers do, and read the instructions."""
        page = self.open_page(**options)
        page.goto(f"{self.address}/welcome/{self.accounts.invite(name, 'labeler')}")
        page.get_by_role("button", name="Give me my key").click()
        page.get_by_role("link", name="I have stored it: continue").click()
        page.get_by_role("button", name="I have read this: start").click()
        page.wait_for_url("**/task")  # keys are not for a page that is on its way
        return page

    def visit(self, name: str, role="labeler", path="", **options) -> Page:
        """Signs in without those pages."""
        self.accounts.accept(self.accounts.invite(name, role))
        if role == "labeler":
            self.accounts.confirm_reading(name, self.config.version)
        page = self.open_page(**options)
        page.context.add_cookies([{"name": COOKIE, "value": self.accounts.open_session(name), "url": self.address}])
        page.goto(self.address + (path or ("/task" if role == "labeler" else "/lead")))
        return page

    def judgments(self):
        return self.store.judgments("main")


@pytest.fixture
def site(url, browser):
    opened = []

    def open_site(tasks, config=PLAIN, num_labelers=1):
        opened.append(Site(url, config, browser))
        opened[-1].store.add_tasks(tasks, batch="main", num_labelers=num_labelers)
        return opened[-1]

    yield open_site
    for one in opened:
        one.close()


def make_task(name, num_responses=3, **fields):
    responses = tuple(f"{name} says {letter}" for letter in "uvwxyz"[:num_responses])
    return Task(name, (Message("user", f"Say {name}"),), responses, tuple("uvwxyz"[:num_responses]), **fields)


def shown_task(page: Page) -> str:
    return page.locator(".message.user .text").inner_text().removeprefix("Say ")


def rank(page: Page, *ranks: int) -> None:
    for place, value in enumerate(ranks):
        page.get_by_role("radio", name=f"Rank of {'ABCDEF'[place]}, 1 is the best: {value}").check(force=True)


def store_it(page: Page) -> None:
    """Saves, and waits for the next page, so that no later step acts on the old one."""
    with page.expect_navigation():
        page.get_by_role("button", name="Save and continue").click()


def as_shown(judgment):
    return [judgment.ranks[index] for index in judgment.shown_order]


def test_enter_saves_the_answer(site):
    opened = site([make_task("t1", 2)])
    page = opened.visit("ann")
    rank(page, 1, 2)
    with page.expect_navigation():
        page.get_by_role("radio", name="Rank of A, 1 is the best: 1").press("Enter")
    assert [as_shown(judgment) for judgment in opened.judgments()] == [[1, 2]]


def test_a_question_that_was_sent_is_not_typed_again(site):
    opened = site([make_task("t1")])
    page = opened.visit("ann")
    page.locator("details.ask > summary").click()
    page.locator("#question").fill("Is it a joke?")
    page.get_by_role("button", name="Send the question").click()
    expect(page.get_by_text("The lead has not replied yet.")).to_be_visible()
    expect(page.locator("#question")).to_have_value("")
    page.locator("textarea[name=note]").fill("half a note")
    page.goto(opened.address + "/task")
    expect(page.locator("textarea[name=note]")).to_have_value("half a note")
    expect(page.locator("#question")).to_have_value("")


def test_two_people_at_once_have_different_tasks_and_a_reload_keeps_them(site):
    opened = site([make_task("t1"), make_task("t2")])
    ann, bob = opened.visit_by_link("ann"), opened.visit("bob")
    first, second = shown_task(ann), shown_task(bob)
    assert {first, second} == {"t1", "t2"}
    responses = ann.locator(".response .text").all_inner_texts()
    ann.reload()
    assert (shown_task(ann), ann.locator(".response .text").all_inner_texts()) == (first, responses)
    for page in (ann, bob):
        rank(page, 1, 2, 3)
        store_it(page)
        expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    assert {(act.labeler, act.task_id) for act in opened.judgments()} == {("ann", first), ("bob", second)}


def test_by_keyboard_alone_with_a_tie(site):
    opened = site([make_task("t1"), make_task("t2")], config=RATED)
    page = opened.visit("ann")
    for key in ("a", "2", "Shift+Digit6", "b", "1", "Shift+Digit7", "c", "2", "Shift+Digit1"):
        page.keyboard.press(key)
    expect(page.get_by_role("status")).to_have_text("Rating of C, 1 very bad to 7 very good: 1")
    page.keyboard.press("m")
    page.keyboard.press("Space")  # the first mark of C
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("You have judged 1 task.")).to_be_visible()
    (judgment,) = opened.judgments()
    assert as_shown(judgment) == [2, 1, 2]
    assert [judgment.ratings[index] for index in judgment.shown_order] == [6, 7, 1]
    assert judgment.flags[judgment.shown_order[2]] == ("fails to follow the instruction",)


def test_shortcuts_can_be_switched_off_and_stay_off(site):
    opened = site([make_task("t1")])
    page = opened.visit("ann")
    page.get_by_label("Single-key shortcuts").uncheck()
    page.reload()
    for key in ("a", "1"):
        page.keyboard.press(key)
    assert page.locator("input:checked").count() == 0
    # Radio buttons need no shortcuts: Tab goes from group to group, arrows within.
    page.get_by_role("radio", name=RANK).first.focus()
    for _ in range(3):
        page.keyboard.press("Space")
        page.keyboard.press("Tab")
        while page.evaluate("document.activeElement.type") not in ("radio", "textarea"):
            page.keyboard.press("Tab")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    assert opened.judgments()[0].ranks == (1, 1, 1)


def test_typing_a_note_gives_no_ranks(site):
    page = site([make_task("t1")]).visit("ann")
    page.get_by_label("Note to the lead").press_sequentially("a1 b2 s m")
    assert page.locator("input[type=radio]:checked").count() == 0


def test_without_javascript(site):
    opened = site([make_task("t1"), make_task("t2")])
    page = opened.visit_by_link("ann", java_script_enabled=False)
    assert not page.locator("#keys").is_visible()
    store_it(page)
    expect(page.get_by_text("Responses A, B and C have no rank.")).to_be_visible()
    rank(page, 3, 1, 2)
    store_it(page)
    expect(page.get_by_text("You have judged 1 task.")).to_be_visible()
    page.get_by_text("I cannot judge this").click()
    page.get_by_label("In your own words").fill("too hard")
    page.get_by_role("button", name="Skip it").click()
    expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    assert [act.kind for act in opened.judgments()] == ["answer", "skip"]
    assert as_shown(opened.judgments()[0]) == [3, 1, 2]


def test_a_lease_that_ran_out(site):
    opened = site([make_task("t1")], config=LabelingConfig(asks_ratings=False, lease_seconds=1))
    ann = opened.visit("ann")
    while opened.store.lease("bob", seconds=60, batch="main") is None:
        ann.wait_for_timeout(200)
    rank(ann, 1, 2, 3)
    store_it(ann)
    expect(ann.get_by_role("heading", name="Too late")).to_be_visible()
    assert opened.judgments() == []


def test_a_double_click_stores_once_and_the_back_button_nothing_else(site):
    opened = site([make_task("t1"), make_task("t2")])
    page = opened.visit("ann")
    rank(page, 1, 2, 3)
    page.get_by_role("button", name="Save and continue").dblclick()
    expect(page.get_by_text("You have judged 1 task.")).to_be_visible()
    page.go_back()  # pages are not kept: the task at hand comes, not the one that was judged
    expect(page.locator(".message.user .text")).to_have_text("Say t2")
    assert page.locator("input[type=radio]:checked").count() == 0
    assert [as_shown(act) for act in opened.judgments()] == [[1, 2, 3]]


NOTE = "so <close>\nthat" + " it takes half a page of SQLite" * 60


def fill_in(page):
    rank(page, 2, 1, 2)
    page.get_by_text("Mark what applies to response B").click()
    page.get_by_label("violent content").locator("visible=true").check()
    page.get_by_label("Note to the lead").fill(NOTE)


def require_filled_in(page):
    found = page.locator("input:checked").evaluate_all("all => all.map(one => `${one.name}=${one.value}`)")
    assert [one for one in found if "=on" not in one] == ["rank_0=2", "rank_1=1", "flags_1=violent content", "rank_2=2"]
    assert page.get_by_label("Note to the lead").input_value() == NOTE


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_failed_save_keeps_what_was_entered(site, has_scripts):
    """Keeps SQLite from growing for a while, as on a full disk."""
    is_full = []

    def limit(connection, _record, _proxy):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages if is_full else 2**30}")

    opened = site([make_task(f"t{n}", 3) for n in range(60)])
    event.listen(opened.store._reader, "checkout", limit)
    page = opened.visit("ann", java_script_enabled=has_scripts)
    is_full.append(True)
    alert = page.get_by_role("alert")
    while True:
        task = shown_task(page)
        fill_in(page)
        store_it(page)
        if alert.count():
            break
        assert shown_task(page) != task
    num_stored = len(opened.judgments())
    expect(alert).to_contain_text("This was not saved, but nothing was lost")
    if has_scripts:
        assert axe(page) == []
    assert len(opened.judgments()) == num_stored
    is_full.clear()
    with page.expect_navigation():
        page.get_by_role("button", name="Save again").click()
    expect(page.get_by_text(f"You have judged {num_stored + 1} task")).to_be_visible()
    assert shown_task(page) != task
    assert page.locator("input[type=radio]:checked").count() == 0
    assert as_shown(opened.judgments()[-1]) == [2, 1, 2]
    assert opened.judgments()[-1].note.split("\r\n") == NOTE.split("\n")


def test_a_server_that_is_away_and_a_reload_lose_nothing(site):
    opened = site([make_task("t1"), make_task("t2")])
    page = opened.visit("ann")
    fill_in(page)
    page.reload()
    require_filled_in(page)
    page.context.set_offline(True)
    page.get_by_role("button", name="Save and continue").click()
    page.wait_for_url("chrome-error://**")
    page.context.set_offline(False)
    page.goto(f"{opened.address}/task")
    require_filled_in(page)
    store_it(page)
    expect(page.locator(".message.user .text")).to_have_text("Say t2")
    assert page.locator("input[type=radio]:checked").count() == 0
    assert page.get_by_label("Note to the lead").input_value() == ""
    assert [as_shown(act) for act in opened.judgments()] == [[2, 1, 2]]


def test_taking_an_answer_back(site):
    opened = site([make_task("t1"), make_task("t2")])
    page = opened.visit("ann")
    rank(page, 1, 2, 3)
    store_it(page)
    page.get_by_role("link", name="My answers").click()
    page.get_by_role("button", name="Take back the answer to “Say t1”").click()
    expect(page.locator(".message.user .text")).to_have_text("Say t1")
    assert page.locator("input[name^=rank]:checked").evaluate_all("all => all.map(one => one.value)") == ["1", "2", "3"]
    rank(page, 2, 2, 1)
    store_it(page)
    expect(page.locator(".message.user .text")).to_have_text("Say t2")
    assert [act.kind for act in opened.judgments()] == ["answer", "undo", "answer"]


def test_taking_back_fits_a_narrow_phone(site):
    opened = site([make_task("t1"), make_task("t2")])
    page = opened.visit("ann")
    rank(page, 1, 2, 3)
    store_it(page)
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("link", name="My answers").click()
    box = page.get_by_role("button", name="Take back").bounding_box()
    table = page.locator(".scroll").evaluate("one => one.scrollWidth <= one.clientWidth")
    assert (box["x"] + box["width"] <= 360, table) == (True, True)


@pytest.mark.parametrize("has_touch", [False, True])
def test_a_phone_shows_responses_on_the_first_screen(site, has_touch):
    question = "Explain to a child of five why the sky is blue, and why it is red in the evening."
    opened = site([Task("t1", (Message("user", question),), ("Air scatters it. " * 20, "Dust. " * 40), ("x", "y"))])
    page = opened.visit("ann", viewport={"width": 390, "height": 844}, has_touch=has_touch, is_mobile=has_touch)
    first = page.locator(".response .text").first
    line = first.evaluate("one => parseFloat(getComputedStyle(one).lineHeight)")
    assert first.bounding_box()["y"] + 3 * line <= 844
    if not has_touch:  # a narrow window of a computer: the shortcuts are one click away
        expect(page.locator("#keys-on")).not_to_be_visible()
        page.get_by_text("Keyboard shortcuts").click()
        expect(page.locator("#keys-on")).to_be_visible()


def test_hostile_text_does_nothing(site):
    evil = '<script>document.title="hit"</script><img src=x onerror=alert(1)>[x](javascript:alert(1)) ‮'
    opened = site([Task("t1", (Message("user", evil),), (evil, evil + " 2"), ("x", "y"))])
    page = opened.visit("ann")
    said = []
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda message: said.append(message.text))
    page.reload()
    assert page.locator("main img, main script, main a").count() == 0
    assert "hit" not in page.title()
    assert said == []


EVIL = (
    "<script>document.title='hit'</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "javascript:alert(1)",
    "</annotation></semantics></math><img src=x onerror=alert(1)>",
    "</code></pre><script>alert(1)</script>",
    "<mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table></mtext>",
    "&lt;img src=x onerror=alert(1)&gt;",
    "<annotation-xml encoding='text/html'><img src=x onerror=alert(1)></annotation-xml>",
    "' onmouseover='alert(1)",
    '" autofocus onfocus="alert(1)',
    "<iframe src=javascript:alert(1)>",
    "<a href=//evil.example>x</a>",
    "\\href{javascript:alert(1)}{x}",
    "\\style{x}{y}",
    "{{7*7}}",
)
AROUND = (
    "{}", "${}$", "$${}$$", "$\\text{{{}}}$", "\\({}\\)", "\\[\n{}\n\\]", "\\begin{{align}}{}\\end{{align}}", "`{}`",
    "```html\n{}\n```", "```{}\ncode\n```", "```python\n'{}'\n```", "~~~js\n{}\n~~~", "> {}",
    "| a |\n|---|\n| {} |", "# {}",
)  # fmt: skip


@pytest.mark.long
def test_hostile_formulas_and_code_do_nothing(site):
    texts = ["\n\n".join(form.format(evil) for evil in EVIL) for form in AROUND]
    tasks = [Task(f"t{n}", (Message("user", text),), (text, text + "."), ("x", "y")) for n, text in enumerate(texts)]
    opened = site(tasks)
    page = opened.visit("ann")
    said, hosts = [], set()
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.reload()
    for number in range(len(texts)):
        expect(page.get_by_text(f"You have judged {number} task")).to_be_visible()
        evil = page.locator("main").locator("img, script, svg, iframe, a, style, mglyph, annotation-xml")
        assert evil.count() == 0
        found = page.evaluate(
            "[...document.querySelectorAll('main *')].flatMap(e => [...e.attributes].map(a => a.name))"
            ".filter(name => name.startsWith('on') || ['style', 'href', 'src', 'xlink:href'].includes(name))"
        )
        assert (found, said, page.title()) == ([], [], "Which response is best? · Labeling")
        rank(page, 1, 2)
        store_it(page)
    expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    assert hosts == {opened.address.split("/")[2]}


RICH = "The root:\n\n$$x = \\frac{-b}{2a}$$\n\n```python\ndef f(x):  # why\n    return '1'\n```\n\nin C:\\*temp, $f$"
DEEP = "> " * 25 + "far down"


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_exact_text_is_one_click_away(site, has_scripts):
    opened = site([Task("t1", (Message("user", RICH),), (DEEP, "  a\n\n\n  b\\_c"), ("x", "y"))])
    page = opened.visit("ann", java_script_enabled=has_scripts)
    formula = page.locator(".message.user math mfrac")
    assert formula.bounding_box()["height"] > 20  # drawn as a fraction
    assert page.locator(".message.user annotation").first.is_hidden()
    expect(page.get_by_text("Formatting hides backslashes here")).to_be_visible()
    expect(page.get_by_text("not formatted: its quotes or lists are nested too deeply")).to_be_visible()
    assert page.locator(".response .text.raw").inner_text() == DEEP
    exact = page.locator(".message.user .exact .raw")
    assert exact.is_hidden()
    page.get_by_text("Exact text of the user’s turn 1").click()
    assert (exact.inner_text(), formula.is_visible()) == (RICH, False)
    page.get_by_text("Exact text of response").click()
    assert page.locator(".response .exact .raw").inner_text() == "  a\n\n\n  b\\_c"
    if has_scripts:
        page.keyboard.press("x")
        assert formula.is_visible()
        page.keyboard.press("x")
        assert not formula.is_visible()


@pytest.mark.parametrize(
    ("num_responses", "rows"), [(2, [2]), pytest.param(3, [3], marks=pytest.mark.nightly), (4, [2, 2])]
)
def test_four_responses_stand_two_by_two(site, num_responses, rows):
    page = site([make_task("t1", num_responses)]).visit("ann", viewport={"width": 1280, "height": 800})
    tops = [round(one.bounding_box()["y"]) for one in page.locator(".response").all()]
    assert [tops.count(top) for top in sorted(set(tops))] == rows


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_warning_is_read_before_the_task_by_keyboard(site, has_scripts):
    tasks = [replace(make_task(name), warning="Describes " + "violence " * 40) for name in ("t1", "t2")]
    opened = site(tasks)
    page = opened.visit("ann", java_script_enabled=has_scripts, viewport={"width": 320, "height": 640})
    expect(page.get_by_role("heading", name="Content warning")).to_be_visible()
    assert "response" not in page.locator("main").inner_text()
    if has_scripts:
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_role("button", name="Show the task").press("Enter")
    expect(page.get_by_role("heading", name="Which response is best?")).to_be_visible()
    expect(page.get_by_text("Content warning: Describes violence")).to_be_visible()
    if has_scripts:
        assert axe(page) == []
    rank(page, 1, 2, 3)
    store_it(page)
    page.get_by_role("button", name="Skip it: I do not want to judge this").press("Enter")
    expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    assert [act.kind for act in opened.judgments()] == ["answer", "skip"]


def test_a_narrow_screen_long_words_and_right_to_left(site):
    arabic = "مرحبا بالعالم، هذا نص من اليمين إلى اليسار"
    opened = site(
        [Task("t1", (Message("user", "x" * 400),), (arabic, "y" * 900, "z"), ("x", "y", "z"))], config=LabelingConfig()
    )
    page = opened.visit("ann", viewport={"width": 320, "height": 640})
    for path in ("/task", "/answers", "/instructions"):
        page.goto(opened.address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, path
    page.goto(opened.address + "/task")
    text = page.locator(".response .text", has_text="مرحبا").locator("p")
    assert text.evaluate("element => getComputedStyle(element).direction") == "rtl"


@pytest.mark.long
def test_no_page_has_a_barrier_that_axe_knows(site):
    code = "".join(f"```{name}\n{text}\n```\n\n" for name, text in CODE.items())
    rich = Task("t3", (Message("user", RICH),), (code, DEEP, "__init__ and\u202e"), ("u", "v", "w"))
    opened = site(
        [make_task("t1"), make_task("t2", gold_ranks=(1, 2, 3)), rich, replace(make_task("t4"), warning="Blood")],
        config=RATED,
        num_labelers=3,
    )
    for name in ("cy", "dee"):
        for number, lease in enumerate(opened.store.lease_many(name, 2, seconds=60, batch="main")):
            answer = Answer((1, 2, 2), 4_000 + number, (7, 3, 2))
            opened.store.submit(lease, answer, client="test", instructions_version="1")
    ann = opened.visit("ann")
    rank(ann, 1, 1, 2)
    store_it(ann)  # without ratings: the page with what is wrong
    expect(ann.get_by_role("alert")).to_be_visible()
    found = {"task with errors": axe(ann)}
    while ann.locator("math").count() == 0:
        rank(ann, 1, 1, 2)
        for letter in "ABC":
            ann.get_by_role("radio", name=f"Rating of {letter}, 1 very bad to 7 very good: 4").check(force=True)
        store_it(ann)
        expect(ann.get_by_role("alert")).to_have_count(0)
    found["formulas and code"] = axe(ann)
    ann.keyboard.press("x")
    found["exact texts"] = axe(ann)
    for path in ("/task", "/answers", "/instructions", "/lead"):  # the last one is refused
        ann.goto(opened.address + path)
        found[path] = axe(ann)
    eve = opened.visit("eve", "lead", viewport={"width": 320, "height": 640})
    paths = [
        "/lead",
        "/lead/quality",
        "/lead/people",
        "/lead/task?task=t1",
        "/lead/task?task=none",
        "/lead/search?kind=any",
    ]
    paths += ["/lead/person?name=ann", "/lead/task?task=t4", "/lead/queue?disagreement=0", "/lead/search"]
    paths += ["/lead/search?labeler=cy", "/lead/search?disagreement=2", "/lead/task?task=t1&queue=disagreement%3D0"]
    for path in (*paths, "/lead/export?batch=main&format=trl", "/lead/export?batch=main&format=heed"):
        eve.goto(opened.address + path)
        found[f"lead: {path}"] = axe(eve)
        assert eve.evaluate("document.documentElement.scrollWidth") <= 320, path
    stranger = opened.browser.new_context().new_page()
    opened.pages.append(stranger)
    for path in ("/sign-in", "/welcome/none"):
        stranger.goto(opened.address + path)
        found[path] = axe(stranger)
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_adjudication_queue(site, has_scripts):
    opened = site([make_task(name, 2) for name in ("t1", "t2", "t3")], num_labelers=2)
    for name, ranks in (("cy", (1, 2)), ("dee", (2, 1))):
        for lease in opened.store.lease_many(name, 3, seconds=60, batch="main"):
            answer = Answer(tuple(ranks[index] for index in lease.order), 4_000)
            opened.store.submit(lease, answer, client="test", instructions_version="1")
    eve = opened.visit("eve", "lead", "/lead/queue", java_script_enabled=has_scripts)
    with eve.expect_navigation():  # keys work once the page is whole
        eve.get_by_role("link", name="Start with the first").click()
    assert shown_task(eve) == "t1"
    if has_scripts:
        with eve.expect_navigation():
            eve.keyboard.press("n")
        assert shown_task(eve) == "t2"
        with eve.expect_navigation():
            eve.keyboard.press("r")
        assert shown_task(eve) == "t1"
    expect(eve.get_by_text("3 tasks left in it")).to_be_visible()
    rank(eve, 1, 2)
    store_it(eve)
    assert shown_task(eve) == "t2"
    expect(eve.get_by_text("2 tasks left in it")).to_be_visible()
    assert [one.task_id for one in opened.judgments() if one.kind == "adjudication"] == ["t1"]


def test_a_lead_changes_a_batch_and_tasks_without_javascript(site):
    opened = site([make_task("t1"), make_task("t2")])
    eve = opened.visit("eve", "lead", java_script_enabled=False)
    eve.get_by_text("Change the batch main").click()
    eve.get_by_label("Labelers for each task of main").fill("2")
    eve.get_by_role("button", name="Set the number").click()
    eve.get_by_role("link", name="Search", exact=True).first.click()
    eve.get_by_label("Words of the prompt or a response").fill("t2")
    eve.get_by_role("button", name="Search").click()
    eve.get_by_role("checkbox").check()
    eve.get_by_text("Change tasks").click()
    eve.get_by_role("button", name="Archive", exact=True).click()
    expect(eve.get_by_role("cell", name="archived")).to_be_visible()
    (counts,) = opened.store.batch_counts()
    assert (counts.num_tasks, counts.num_wanted) == (1, 2)


# Forms with a field and several buttons in which Enter would press the first of them, which is one of the visible ones.
AMBIGUOUS = """[...document.forms].filter((form) => {
  const buttons = [...form.elements].filter((one) => one.type === "submit");
  return form.querySelector("input:not([type=hidden])") && buttons.length > 1 && !buttons[0].matches(".unseen");
}).map((form) => form.action)"""


@pytest.mark.parametrize("has_scripts", [True, pytest.param(False, marks=pytest.mark.long)])
def test_enter_in_a_field_of_the_search_sets_what_was_typed(site, has_scripts):
    opened = site([make_task("t1"), make_task("t2")])
    opened.store.write_message("t1", "cy", "cy", "question", "Why?")
    eve = opened.visit("eve", "lead", "/lead/search", java_script_enabled=has_scripts)
    eve.get_by_role("checkbox").first.check()
    with eve.expect_navigation():
        eve.get_by_role("checkbox").first.press("Enter")  # nothing was typed, so nothing is set
    eve.get_by_role("checkbox").first.check()
    eve.get_by_text("Change tasks").click()
    tags = eve.get_by_label("Tags that a labeler needs, separated by commas")
    tags.fill("chess")
    with eve.expect_navigation():
        tags.press("Enter")
    assert opened.store.lease("dee", seconds=60, batch="main").task_id == "t2"
    assert [one.num_labelers for one in opened.store.tasks("main")] == [1, 1]
    if has_scripts:
        for path in ("/lead", "/lead/people", "/lead/queue", "/lead/search?kind=any", "/lead/search", "/questions"):
            eve.goto(opened.address + path)
            assert eve.evaluate(AMBIGUOUS) == [], path


def axe(page: Page) -> list[str]:
    """Runs axe in light colours, and its colour rules in dark ones too."""
    problems = []
    for scheme, only in (("light", STANDARDS), ("dark", COLOURS)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # a colour may not be halfway to the other
        for found in Axe().run(page, options={"runOnly": only, "resultTypes": ["violations"]}).response["violations"]:
            problems += [f"{scheme}: {found['id']}: {node['html'][:120]}" for node in found["nodes"]]
    page.emulate_media(color_scheme="light")
    return problems


CODE = {
    "python": "@dec\nclass A(B):\n    'doc'\n    def f(self, x: int = 0x1F) -> None:  # note\n        return f'{x}\n'",
    "c": "#include <a.h>\nint main(void) { return 'c' + 1.5e3; } /* note */",
    "html": "<!-- note --><p class='a'>&amp;</p>",
    "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new",
    "bash": "export A=$HOME; echo \"$A\" | grep -v 'x' # note",
    "sql": "SELECT a, 'b' FROM t WHERE c = 1.5 -- note",
    "json": '{"a": [1, true, null, "b"]}',
}
COLOURS = ["color-contrast", "link-in-text-block"]
STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


# ---- criteria and edits ----

ANNOTATED = LabelingConfig(
    task_order="arrival",
    asks_ratings=False,
    criteria=(LabelCriterion(name="helpful"), LabelCriterion(name="correct", kind="yes_no")),
    asks_edits=True,
)


def test_criteria_and_an_edit_by_keyboard(site):
    task = Task("t1", (Message("user", "Say it"),), ("It is **so**, and so on.", "No."), ("x", "y"))
    opened = site([task], config=ANNOTATED)
    page = opened.visit("ann")
    first = page.locator(".said-here .text").first.inner_text()
    long = 0 if first.startswith("It") else 1
    keys = ("a", "1", "Shift+Digit5", "Shift+Digit1", "b", "2", "k", "Shift+Digit2", "Shift+Digit7")
    for key in keys:
        page.keyboard.press(key)
    page.keyboard.press("ab"[long])
    page.keyboard.press("w")
    page.keyboard.press("Control+Home")
    page.keyboard.type("Yes: ")
    page.reload()  # the draft keeps all of it
    assert axe(page) == []
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    expect(page.get_by_role("heading", name="Nothing to judge just now")).to_be_visible()
    (judgment,) = opened.judgments()
    said = judgment.annotations.as_shown(judgment.shown_order)
    assert [one.ratings for one in said.criteria] == [(5, 7), (1, 0)]
    assert judgment.annotations.edits == ("Yes: It is **so**, and so on.", "")


def test_criteria_at_a_phones_width(site):
    opened = site([make_task("t1", 2)], config=ANNOTATED)
    page = opened.visit("ann", viewport={"width": 320, "height": 640})
    for box in page.locator("details.edit").all():
        box.evaluate("box => { box.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert axe(page) == []


def test_new_instructions_and_a_change_are_accessible_at_a_phones_width(site):
    turns = tuple(Message(("user", "assistant")[number % 2], f"Turn {number}") for number in range(9))
    config = ANNOTATED.model_copy(update={"instructions": "Rank.\n\nTies are fine."})
    opened = site([replace(make_task("t1", 2), prompt=turns)], config=config)
    narrow = {"viewport": {"width": 320, "height": 640}}
    found = {}

    def look(page, name):
        found[name] = axe(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320, name

    page = opened.visit("ann", **narrow)
    older = config.model_copy(update={"instructions": "Rank.\n\nNo ties."})
    opened.accounts.store_instructions(older.version, older.instructions, older.flags)
    opened.accounts.confirm_reading("ann", older.version)
    page.goto(opened.address + "/task")
    look(page, "what is new")
    page.get_by_role("button", name="I have read this: start").click()
    expect(page.locator("#earlier .text").first).to_be_hidden()
    page.keyboard.press("t")
    expect(page.locator("#earlier .text").first).to_be_visible()
    page.locator("details.ask > summary").click()
    page.locator("#question").fill("Is turn 3 a joke?")
    page.get_by_role("button", name="Send the question").click()
    look(page, "a question on the task")
    eve = opened.visit("eve", role="lead", path="/questions", **narrow)
    look(eve, "lead: questions")
    eve.get_by_label("Your reply to ann").fill("No.")
    eve.get_by_role("button", name="Send").click()
    eve.goto(opened.address + "/lead/task?task=t1")
    look(eve, "lead: a task with a thread")
    page.goto(opened.address + "/questions")
    look(page, "questions")
    page.goto(opened.address + "/task")
    for key in ("a", "1", "Shift+Digit5", "Shift+Digit1", "b", "2", "Shift+Digit4", "Shift+Digit2"):
        page.keyboard.press(key)
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    page.goto(opened.address + "/answers")
    look(page, "my answers")
    page.get_by_role("link", name="Change the answer").click()
    look(page, "a change")
    with page.expect_navigation():
        page.keyboard.press("Control+Enter")
    assert [judgment.kind for judgment in opened.judgments()] == ["answer", "answer"]
    assert {name: problems for name, problems in found.items() if problems} == {}
