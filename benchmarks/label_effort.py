"""Counts what judging one task takes on the labeling page: keystrokes, or clicks with a mouse.

    python -m benchmarks.label_effort

Chromium judges real tasks on a real server, once by keyboard and once by mouse; every answer must be stored as meant.
Seconds are what the keystroke-level model predicts for an average typist, without reading and thinking (Card,
Moran & Newell 1980, "The keystroke-level model for user performance time with interactive systems", CACM 23(7)).
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from playwright.sync_api import Page, sync_playwright

from benchmarks import label_pictures
from preferences.page.config import LabelCriterion, LabelingConfig
from preferences.records import Message, Task
from preferences.store import LabelStore

KEY_SECONDS, POINT_SECONDS, BUTTON_SECONDS, HOME_SECONDS = 0.28, 1.1, 0.2, 0.4  # K, P, B and H of the model
NUM_RESPONSES = (2, 4, 8)
NAMED = ("helpful", "harmless", "honest")
WHAT = {
    "ranks": LabelingConfig(asks_ratings=False),
    "ranks and ratings": LabelingConfig(asks_ratings=True),
    "ranks and three criteria": LabelingConfig(
        asks_ratings=False, criteria=tuple(LabelCriterion(name=name) for name in NAMED)
    ),
}


@dataclass(frozen=True)
class Effort:
    """What one task took. A letter with Shift is two keystrokes, as in the model."""

    num_responses: int
    num_keys: int
    num_clicks: int

    @property
    def key_seconds(self) -> float:
        return self.num_keys * KEY_SECONDS

    @property
    def click_seconds(self) -> float:
        return HOME_SECONDS + self.num_clicks * (POINT_SECONDS + BUTTON_SECONDS)


def judge_by_keyboard(page: Page, num_responses: int, num_lines: int) -> int:
    """Ranks responses in the order shown and rates each with 5 in every line. Returns the number of keystrokes."""
    keys = []
    for place in range(num_responses):
        keys += ["abcdefghi"[place], str(place + 1), *["Shift+Digit5"] * num_lines]
    keys.append("Control+Enter")
    with page.expect_navigation():
        for key in keys:
            page.keyboard.press(key)
    return sum(1 + key.count("+") for key in keys)


def judge_by_mouse(page: Page, num_responses: int, fields: Sequence[str]) -> int:
    """Does the same by mouse. Returns the number of clicks."""
    boxes = [(f"rank_{place}", str(place + 1)) for place in range(num_responses)]
    boxes += [(f"{field}_{place}", "5") for place in range(num_responses) for field in fields]
    for name, value in boxes:
        page.locator(f'label:has(input[name="{name}"][value="{value}"])').click()
    with page.expect_navigation():
        page.get_by_role("button", name="Save and continue").click()
    return len(boxes) + 1


def measure(config: LabelingConfig, num_responses: int) -> Effort:
    """Judges one task by keyboard and another by mouse. Raises: AssertionError if an answer is not stored as meant."""
    fields = [f"criterion_{number}" for number in range(len(config.criteria))] + ["rating"] * config.asks_ratings
    responses = tuple(f"Response {number} says what it says." for number in range(num_responses))
    sources = tuple("m" for _ in responses)
    tasks = [Task(name, (Message("user", f"Say {name}"),), responses, sources) for name in ("first", "second")]
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        url = f"{temporary}/labels.sqlite"
        with LabelStore(url) as store:
            store.add_tasks(tasks, batch="main", num_labelers=1)
            browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
            with label_pictures.served(url, config) as (address, accounts):
                page = label_pictures.visit(browser, address, accounts.invite("ann", "labeler"))
                page.wait_for_url("**/task")
                num_keys = judge_by_keyboard(page, num_responses, len(fields))
                num_clicks = judge_by_mouse(page, num_responses, fields)
            browser.close()
            for judgment in store.judgments("main"):
                ranks = [judgment.ranks[index] for index in judgment.shown_order]
                assert ranks == list(range(1, num_responses + 1)), ranks
                said = [judgment.ratings] if config.asks_ratings else []
                said += [one.ratings for one in judgment.annotations.criteria]
                assert len(said) == len(fields)
                assert all(set(ratings) == {5} for ratings in said), said
            assert store.num_current_answers("ann") == len(tasks)
    return Effort(num_responses, num_keys, num_clicks)


def main() -> None:
    print("| asked | responses | keystrokes | seconds by keyboard | clicks | seconds by mouse |")
    print("|---|---|---|---|---|---|")
    for name, config in WHAT.items():
        for num_responses in NUM_RESPONSES:
            found = measure(config, num_responses)
            by_key = f"{found.num_keys} | {found.key_seconds:.1f}"
            print(f"| {name} | {num_responses} | {by_key} | {found.num_clicks} | {found.click_seconds:.1f} |")


if __name__ == "__main__":
    main()
