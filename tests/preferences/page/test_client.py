"""The API's client: its error messages; it neither loses nor repeats an answer."""

import functools
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from benchmarks.known_labelers import FLAG, TRAITS, KnownLabeler, Size, draw_tasks
from benchmarks.label_client import LabelClient, answer_in_turns
from cluster.processes import free_port
from preferences.page.config import LabelingConfig
from preferences.records import Labeler, Skip, dense_ranks
from preferences.store import LabelStore

CAREFUL = KnownLabeler(TRAITS[0], seed=0)
CONFIG = LabelingConfig(flags=(FLAG,), task_order="arrival")


@dataclass(frozen=True)
class Skipping:
    labeler: Labeler
    name: str

    def judge(self, shown):
        return Skip("no", self.labeler.judge(shown).milliseconds)


@dataclass(frozen=True)
class Flagging:
    """Marks everything."""

    labeler: Labeler
    name: str

    def judge(self, shown):
        return replace(self.labeler.judge(shown), flags=((FLAG,),) * len(shown.responses))


class Unacknowledged:
    """An application whose first reply on each of these paths is lost, after the request was carried out."""

    def __init__(self, app, paths):
        self.app, self.left = app, set(paths)

    async def __call__(self, scope, receive, send):
        is_lost = scope["path"] in self.left
        self.left.discard(scope["path"])
        await self.app(scope, receive, self.lose if is_lost else send)
        if is_lost:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def lose(self, message):
        """Drops the reply."""


def test_refusals_say_why(run_server, tmp_path):
    with run_server(str(tmp_path / "labels.db"), LabelingConfig(flags=("rude",), task_order="arrival")) as running:
        running.store.add_tasks([draw_tasks(Size(1, 0, 0), 0)[0][0]], batch="b", num_labelers=1)
        running.join(CAREFUL.name)
        with pytest.raises(ValueError, match=r"status 403: .*name and key do not match"):
            LabelClient(running.address, CAREFUL, "no key")
        with LabelClient(running.address, CAREFUL, running.keys[CAREFUL.name]) as client:
            assert client.answer_next() == "instructions"
            client.confirm_reading()
            client.labeler = Flagging(CAREFUL, CAREFUL.name)
            with pytest.raises(ValueError, match=rf"status 422: .*{FLAG}"):
                client.answer_next()


def test_a_door_waits_for_a_server_that_is_away(run_server, tmp_path):
    drawn = draw_tasks(Size(num_ordinary=4, num_gold=0, num_repeats=0), 0)
    port = free_port()
    away = run_server(str(tmp_path / "labels.db"), CONFIG, port=port)
    away.store.add_tasks([task for task, _ in drawn], batch="b", num_labelers=1)
    away.join("careful")
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(httpx.ConnectError):
        LabelClient(address, CAREFUL, away.keys["careful"], patience_seconds=0.1)
    back = threading.Timer(0.5, away.__enter__)
    back.start()
    try:
        with LabelClient(address, CAREFUL, away.keys["careful"]) as client:
            client.confirm_reading()
            assert answer_in_turns([client]) == {"careful": "nothing open"}
        assert [judgment.kind for judgment in away.store.judgments("b")] == ["answer"] * 4
    finally:
        back.join()
        away.__exit__(None, None, None)


def test_what_was_not_acknowledged_is_sent_again_and_stored_once(run_server, tmp_path):
    drawn = draw_tasks(Size(num_ordinary=4, num_gold=0, num_repeats=0), 0)
    for labeler, kind, path in (
        (CAREFUL, "answer", "/api/answers"),
        (Skipping(CAREFUL, "careful"), "skip", "/api/skips"),
    ):
        around = functools.partial(Unacknowledged, paths=("/api/session", "/api/lease", path))
        with run_server(str(tmp_path / f"{kind}.db"), CONFIG, around=around) as running:
            running.store.add_tasks([task for task, _ in drawn], batch="b", num_labelers=1)
            running.join("careful")
            with running.client(labeler) as client:
                answer_in_turns([client])
            assert running.app.left == set()
            assert [judgment.kind for judgment in running.store.judgments("b")] == [kind] * 4


def test_the_labeler_in_the_docs_labels(tmp_path):
    text = (Path(__file__).parents[3] / "docs/labels-server.md").read_text(encoding="utf-8")
    (code,) = (block for block in text.split("```") if block.startswith("python\nfrom preferences.records "))
    with LabelStore(str(tmp_path / "labels.sqlite")) as store:
        store.add_tasks([task for task, _ in draw_tasks(Size(2, 0, 0), 0)[:2]], batch="main", num_labelers=1)
        exec(code.removeprefix("python").replace("labels.sqlite", str(tmp_path / "labels.sqlite")), {})
        judged = {one.task_id: one.ranks for one in store.judgments("main")}
        for stored in store.tasks("main"):
            shorter = [sum(len(other) < len(text) for other in stored.task.responses) for text in stored.task.responses]
            assert judged[stored.task.task_id] == dense_ranks([1 + count for count in shorter])
