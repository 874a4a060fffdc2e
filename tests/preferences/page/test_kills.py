"""SIGKILL to the server, and to the database, while labelers are answering: what was acknowledged is there, once."""

import random
import threading
import time

import httpx
import pytest

from preferences.accounts import Accounts
from preferences.page.config import LabelingConfig
from preferences.records import Message, Task
from preferences.store import LabelStore

pytestmark = pytest.mark.long

NUM_KILLS, NUM_LABELERS, NUM_TASKS = 3, 4, 4_000
CONFIG = LabelingConfig(asks_ratings=False)


class Labeler(threading.Thread):
    """Answers through the API until told to stop; remembers what the server acknowledged."""

    def __init__(self, name, address, token):
        super().__init__(daemon=True)
        self.name, self.address, self.headers = name, address, {"Authorization": f"Bearer {token}"}
        self.acknowledged, self.is_over, self.surprises = {}, threading.Event(), []

    def run(self):
        draw = random.Random(self.name)
        while not self.is_over.is_set():
            try:
                with httpx.Client(base_url=self.address, headers=self.headers, timeout=30) as client:
                    while not self.is_over.is_set():
                        self.answer(client, draw)
            except httpx.TransportError:
                time.sleep(0.2)  # the server is gone; it comes back

    def answer(self, client, draw):
        asked = client.post("/api/lease")
        if asked.status_code >= 500:
            return time.sleep(0.05)  # the database is gone; it comes back
        if "form" not in asked.json():
            return self.is_over.set()
        form = asked.json()["form"]
        ranks = [draw.randint(1, 3) for _ in asked.json()["responses"]]
        while not self.is_over.is_set():
            try:
                answer = client.post("/api/answers", json={"form": form, "ranks": ranks})
            except httpx.TransportError:
                return None  # perhaps stored, perhaps not: nobody was told
            if answer.status_code == 204:
                self.acknowledged[form["task"]] = ranks
                return None
            if answer.status_code < 500:
                return self.surprises.append((answer.status_code, answer.text))
            time.sleep(0.05)
        return None


def put_under_load(url, server, strike):
    """Kills by `strike` while labelers answer; returns what was acknowledged, by (task, labeler)."""
    accounts = Accounts(url)
    with LabelStore(url) as store:
        tasks = [Task(f"t{n}", (Message("user", "?"),), ("a", "b", "c"), ("x", "y", "z")) for n in range(NUM_TASKS)]
        store.add_tasks(tasks, batch="main", num_labelers=2)
    labelers = []
    for number in range(NUM_LABELERS):
        name = f"labeler-{number}"
        accounts.accept(accounts.invite(name, "labeler"))
        accounts.confirm_reading(name, CONFIG.version)
        labelers.append(Labeler(name, server.address, accounts.open_session(name)))
    accounts.close()
    for labeler in labelers:
        labeler.start()
    draw = random.Random(0)
    try:
        for _ in range(NUM_KILLS):
            wanted = sum(len(labeler.acknowledged) for labeler in labelers) + draw.randint(5, 40)
            while sum(len(labeler.acknowledged) for labeler in labelers) < wanted:
                time.sleep(0.002)
                assert any(labeler.is_alive() for labeler in labelers)
            strike()
    finally:
        for labeler in labelers:
            labeler.is_over.set()
        for labeler in labelers:
            labeler.join()
    assert [labeler.surprises for labeler in labelers] == [[]] * NUM_LABELERS
    with LabelStore(url) as store:
        ids = {one.handle: one.task.task_id for one in store.tasks("main")}
    return {(ids[task], labeler.name): ranks for labeler in labelers for task, ranks in labeler.acknowledged.items()}


def require_all(url, acknowledged):
    """Every acknowledged label is there, once and as it was given; no task has more than it wants."""
    with LabelStore(url) as store:
        stored = store.judgments("main")
        assert len({(act.task_id, act.labeler) for act in stored}) == len(stored)
        shown = {(act.task_id, act.labeler): [act.ranks[index] for index in act.shown_order] for act in stored}
        dense = lambda ranks: [sorted(set(ranks)).index(rank) + 1 for rank in ranks]  # noqa: E731
        assert len(acknowledged) > 10 * NUM_KILLS / 2
        for key, ranks in acknowledged.items():
            assert shown[key] == dense(ranks), key
        assert all(len(task.judged_by) <= 2 for task in store.coverage("main"))


@pytest.mark.timeout(600)
def test_labels_outlive_the_server(new_database, serve):
    url = new_database()
    server = serve(url)

    def strike():
        server.kill()
        server.start()

    require_all(url, put_under_load(url, server, strike))


@pytest.mark.timeout(600)
def test_labels_outlive_the_database(postgres, postgres_tables, serve):
    url = postgres.new_database(postgres_tables)
    server = serve(url)

    def strike():
        postgres.kill()
        postgres.start()

    require_all(url, put_under_load(url, server, strike))
