"""SIGKILL to the arena's server while people talk and judge: nothing that was acknowledged is lost."""

import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from preferences.accounts import Accounts
from preferences.arena_records import Conversations
from preferences.page.arena import CHOICES
from preferences.page.config import LabelingConfig
from preferences.page.site import COOKIE
from preferences.store import LabelStore
from tests.preferences.page import conftest

pytestmark = pytest.mark.long
NUM_KILLS, NUM_PEOPLE = 3, 4
PROGRAM = Path(__file__).parent / "arena_server.py"
CONFIG = LabelingConfig(asks_ratings=False)
FIELD = 'name="{}" value="([^"]*)"'


class Person(threading.Thread):
    """Asks, judges and continues until told to stop; remembers what the server acknowledged."""

    def __init__(self, name: str, address: str, token: str) -> None:
        super().__init__(daemon=True)
        self.name, self.address, self.cookies = name, address, {COOKIE: token}
        self.questions: dict[str, list[str]] = {}  # by the conversation's path
        self.verdicts: dict[tuple[str, int], str] = {}
        self.is_over = threading.Event()
        self.surprises: list[tuple[int, str]] = []

    def run(self) -> None:
        draw = random.Random(self.name)
        while not self.is_over.is_set():
            try:
                with httpx.Client(
                    base_url=self.address, cookies=self.cookies, timeout=30, follow_redirects=True
                ) as client:
                    while not self.is_over.is_set():
                        self.talk(client, draw)
            except httpx.TransportError:
                time.sleep(0.2)  # the server is gone; it comes back

    def talk(self, client: httpx.Client, draw: random.Random) -> None:
        csrf = re.findall(FIELD.format("csrf"), client.get("/arena").text)[0]
        question = f"{self.name} asks {draw.random()}"
        begun = client.post("/arena", data={"csrf": csrf, "question": question})
        path = begun.url.path
        if begun.status_code != 200 or not path.startswith("/arena/"):
            self.surprises.append((begun.status_code, begun.text))
            return
        self.questions[path] = [question]
        for turn in range(2):
            while "Save the verdict" not in (page := client.get(path).text):
                if "Sample it again" in page:  # the server was killed, and came back before this thread noticed
                    return
                time.sleep(0.01)
            choice = draw.choice(list(CHOICES))
            form = {"csrf": csrf, "turn": turn, "revision": 0, "choice": choice, "note": f"{path} {turn}"}
            judged = client.post(f"{path}/verdict", data=form)
            if judged.status_code != 200:
                self.surprises.append((judged.status_code, judged.text))
                return
            self.verdicts[path, turn] = choice
            if turn == 0:
                question = f"{self.name} asks on {draw.random()}"
                if client.post(
                    f"{path}/ask", data={"csrf": csrf, "turn": 1, "question": question, "continues": "a"}
                ).is_success:
                    self.questions[path].append(question)


@pytest.mark.timeout(600)
def test_conversations_and_verdicts_outlive_the_server(
    sqlite_tables: Path, tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "PROGRAM", PROGRAM)
    url = str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))
    server = serve(url)
    accounts, people = Accounts(url), []
    for number in range(NUM_PEOPLE):
        name = f"person-{number}"
        accounts.accept(accounts.invite(name, "labeler"))
        accounts.confirm_reading(name, CONFIG.version)
        people.append(Person(name, server.address, accounts.open_session(name)))
    accounts.close()
    for person in people:
        person.start()
    try:
        for _ in range(NUM_KILLS):
            wanted = sum(len(person.verdicts) for person in people) + 5
            while sum(len(person.verdicts) for person in people) < wanted:
                time.sleep(0.005)
                assert all(not person.surprises for person in people), [person.surprises for person in people]
                assert all(person.is_alive() for person in people)
            server.kill()
            server.start()
    finally:
        for person in people:
            person.is_over.set()
        for person in people:
            person.join()
    _require_all(url, people)


def _require_all(url: str, people: list[Person]) -> None:
    conversations = Conversations(url)
    with LabelStore(url) as store:
        notes = {act.note: act for act in store.judgments("arena")}
        assert len(store.judgments("arena")) == len(notes)
        for person in people:
            for (path, turn), choice in person.verdicts.items():
                act = notes[f"{path} {turn}"]
                assert tuple(act.ranks[index] for index in act.shown_order) == CHOICES[choice].ranks
            for path, questions in person.questions.items():
                kept = conversations.get(person.name, path.rpartition("/")[2])
                assert kept is not None
                assert [turn.question for turn in kept.turns][: len(questions)] == questions
    conversations.close()
    assert sum(len(person.verdicts) for person in people) >= 5 * NUM_KILLS


@pytest.mark.timeout(600)
def test_a_turn_that_was_being_written_is_marked_and_sampled_again(
    sqlite_tables: Path, tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "PROGRAM", PROGRAM)
    url = str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))
    server = serve(url)
    accounts = Accounts(url)
    accounts.accept(accounts.invite("ann", "labeler"))
    accounts.confirm_reading("ann", CONFIG.version)
    cookies = {COOKIE: accounts.open_session("ann")}
    accounts.close()
    with httpx.Client(base_url=server.address, cookies=cookies, timeout=30, follow_redirects=True) as client:
        csrf = re.findall(FIELD.format("csrf"), client.get("/arena").text)[0]
        path = client.post("/arena", data={"csrf": csrf, "question": "slow one"}).url.path
        with client.stream("GET", f"{path}/events") as stream:
            assert "Only the beginn" in next(stream.iter_lines())
            server.kill()
        server.start()
        page = client.get(path).text
        assert "slow one" in page
        assert "This turn is unfinished" in page
        assert "Sample it again" in page
        again = client.post(f"{path}/again", data={"csrf": csrf})
        assert "Both models are writing" in again.text
