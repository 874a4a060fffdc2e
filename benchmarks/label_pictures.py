"""Takes the pictures of the labeling pages in docs/, or of every page in light and dark colours and at a phone's width.

    python -m benchmarks.label_pictures docs           # label-task.png, label-quality.png and arena.png
    python -m benchmarks.label_pictures FOLDER --all   # every page, to look at

The pages are real: a server in this process, with labelers that are known by construction. It needs Chromium.
"""

import argparse
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.known_labelers import Size, draw_world
from preferences.accounts import Accounts
from preferences.page.app import make_app
from preferences.page.arena import ArenaSetup, Listener
from preferences.page.config import LabelingConfig
from preferences.records import Message, Task
from preferences.store import LabelStore

CONFIG = LabelingConfig(title="Science answers", batches=("open", "warned"))
SIZE, SEED = Size(num_ordinary=48, num_gold=24, num_repeats=12), 0
NAMES = {"careful": "ann", "noisy": "bob", "opinionated": "cem", "lazy": "dia", "biased": "eli"}
FIRST_ANSWER, SECONDS_BETWEEN = 1_795_000_000.0, 45.0  # seconds since the epoch; between two answers of a labeler
ROOTS = r"""The roots are

$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

```python
import cmath

def roots(a, b, c):
    d = cmath.sqrt(b * b - 4 * a * c)  # the discriminant
    return (-b - d) / (2 * a), (-b + d) / (2 * a)
```"""
OTHERS = (
    "It depends on the *discriminant* $b^2 - 4ac$: two real roots if it is positive, one if it is 0.",
    "Use `numpy.roots([a, b, c])`.\n\n1. It is one line.\n2. See `__init__.py` in C:\\*temp.",
    "I cannot help with that.",
)
QUESTION = (Message("user", "Write a Python function that returns the roots of a·x² + b·x + c, and give the formula."),)
TASK = Task("roots", QUESTION, (ROOTS, *OTHERS), ("x", "y", "z", "w"))
WARNED = replace(TASK, task_id="warned", warning="A question from a chemistry forum that describes an accident.")
LABELER_PAGES = ("/task", "/answers", "/questions", "/instructions")
LEAD_PAGES = (
    "/lead", "/lead/quality?batch=science", "/lead/search?batch=science&kind=any", "/lead/people",
    "/lead/person?name=ann", "/lead/export?batch=science&format=trl", "/lead/task?task=warned", "/lead/task?task=roots",
    "/answers", "/questions",
)  # fmt: skip
ARENA_ANSWERS = (
    "Light enters a drop and **bends**, each colour by another angle.\n\n1. It bends on the way in.\n2. The back of the"
    " drop reflects it.\n3. It bends again on the way out: at about 42° for red, 40° for blue.",
    "A rainbow is sunlight, split by drops of rain. You see it opposite the Sun, as an arc, because every drop at the"
    " same angle sends you the same colour.",
)
LOOKS = {"light": ("light", 1200), "dark": ("dark", 1200), "phone": ("light", 320)}


def fill(url: str) -> None:
    """Stores a batch that five known labelers have judged, and two tasks that are open."""
    tasks, judgments = draw_world(SIZE, SEED)
    named = [
        replace(one, labeler=NAMES[one.labeler], created_at=FIRST_ANSWER + SECONDS_BETWEEN * one.created_at)
        for one in judgments
    ]
    with LabelStore(url) as store:
        store.add_tasks(tasks, batch="science", num_labelers=len(NAMES))
        store.import_judgments("science", named)
        store.add_tasks([TASK], batch="open", num_labelers=len(NAMES))
        store.add_tasks([WARNED], batch="warned", num_labelers=len(NAMES))


class WrittenAnswers:
    """Two policies of the arena whose answers are there already."""

    identities = ("one", "two")

    def start(
        self, key: str, policy: int, messages: Sequence[Message], seed_of: Sequence[str | int], side: int, to: Listener
    ) -> None:
        del key, messages, seed_of
        to.ended(side, ARENA_ANSWERS[policy], {"policy": policy, "name": self.identities[policy], "kind": "endpoint"})

    def stop(self, key: str) -> None:
        del key


@contextmanager
def served(url: str, config: LabelingConfig = CONFIG, *, with_arena: bool = False) -> Iterator[tuple[str, Accounts]]:
    """Serves the store; gives the server's address, and the accounts."""
    accounts = Accounts(url)
    with ExitStack() as closing:
        store = closing.enter_context(LabelStore(url))
        listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        setup = ArenaSetup(WrittenAnswers(), "arena")
        arena = closing.enter_context(setup.opened(url, store, config)) if with_arena else None
        app = make_app(store, accounts, config, arena=arena)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", accounts
        server.should_exit = True
        thread.join()
    accounts.close()


def visit(browser: Browser, address: str, link: str) -> Page:
    """Signs in by a one-time link, as people do, and confirms reading the instructions."""
    page = browser.new_context(viewport={"width": 1200, "height": 900}).new_page()
    page.goto(f"{address}/welcome/{link}")
    page.get_by_role("button", name="Give me my key").click()
    with page.expect_navigation():
        page.get_by_role("link", name="I have stored it: continue").click()
    start = page.get_by_role("button", name="I have read this: start")
    if start.count():
        with page.expect_navigation():
            start.click()
    return page


def take(page: Page, path: Path, look: str, *, max_height: int = 0) -> None:
    scheme, width = LOOKS[look]
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": max_height or 900})
    page.screenshot(path=path, full_page=not max_height)


def take_all(page: Page, folder: Path, address: str, who: str, paths: tuple[str, ...]) -> None:
    for path in paths:
        page.goto(address + path)
        for look in LOOKS:
            name = path.strip("/").replace("/", "-").partition("?")[0] + "-" + path.rpartition("=")[2].strip("/")
            take(page, folder / f"{who}-{name.replace('/', '-')}-{look}.png", look)


def talk(page: Page, address: str) -> str:
    """Has a conversation in the arena, with a verdict, and returns its path."""
    page.goto(f"{address}/arena")
    page.get_by_label("Your message").fill("How does a rainbow form?")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("radio", name="A is better").check(force=True)
    return urlsplit(page.url).path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every page, in light and dark colours and at 320 pixels")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        url = f"{temporary}/labels.sqlite"
        fill(url)
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        with served(url) as (address, accounts):
            lead = visit(browser, address, accounts.invite("eve", "lead"))
            labeler = visit(browser, address, accounts.invite("ann", "labeler"))
            if asked.all:
                take_all(labeler, asked.folder, address, "labeler", LABELER_PAGES)
                other = visit(browser, address, accounts.invite("bob", "labeler"))
                with LabelStore(url) as store:  # bob has judged the first task, so he gets the one with a warning
                    lease = store.lease("bob", seconds=60, batch="open")
                    assert lease is not None
                    store.skip(lease, "It is not my field", 9_000, client="page", instructions_version=CONFIG.version)
                take_all(other, asked.folder, address, "warned", ("/task", "/answers"))
                take_all(lead, asked.folder, address, "lead", LEAD_PAGES)
                take_all(browser.new_context().new_page(), asked.folder, address, "nobody", ("/sign-in", "/welcome/x"))
            else:
                take(labeler, asked.folder / "label-task.png", "light")
                lead.goto(f"{address}/lead/quality?batch=science")
                take(lead, asked.folder / "label-quality.png", "light", max_height=1_500)
        with served(url, with_arena=True) as (address, accounts):
            person = visit(browser, address, accounts.invite("cem", "labeler"))
            path = talk(person, address)
            if asked.all:
                take_all(person, asked.folder, address, "person", ("/arena", path))
            else:
                take(person, asked.folder / "arena.png", "light")
        browser.close()


if __name__ == "__main__":
    main()
