"""Measures the labeling server's response times with many tasks and many concurrent labelers.

    python -m benchmarks.label_load [STORE_URL | --postgres]

Labelers in one process each open a task, think, and answer, over HTTP as a browser does; the server is a separate
process. With --lead, a lead meanwhile opens all of the leads' pages. Afterwards a labeler opens a task, and the lead
each page, alone. That gives the server's CPU time per request, whatever else the machine does. Without a URL the store
is a SQLite file in a temporary folder, or with --postgres a PostgreSQL server started for the measurement.
"""

import argparse
import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.postgres_server import postgres_programs, running_postgres
from preferences.accounts import Accounts
from preferences.page.config import LabelingConfig
from preferences.records import Judgment, Message, Task
from preferences.store import LabelStore

NUM_RESPONSES = 4
RESPONSE = "A response of some length, as people get to read it. " * 8
RANKS = ((1, 2, 2, 3), (3, 2, 2, 1), (2, 1, 3, 3))
NUM_ALONE = 10  # requests of each page when nothing else is asked
FLAGS = ((), (("hallucinates",), (), (), ()))
HIDDEN = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]*)">')
LEAD_PAGES = {  # what a lead opens, with --lead: rare and frequent words, sparse and dense filters
    "progress": "/lead",
    "queue": "/lead/queue?batch=main&disagreement=0.3",
    "queue, a task": "/lead/task?task=task-4&queue=batch%3Dmain%26disagreement%3D0.3",
    "search, a rare word": "/lead/search?words=d{number}",
    "search, frequent words": "/lead/search?words=people+response",
    "search, no such word": "/lead/search?words=zebra",
    "search, batch and state": "/lead/search?batch=main&state=open",
    "search, disagreement": "/lead/search?disagreement=0.9",
    "search, gold": "/lead/search?sort=gold",
    "search, labeler": "/lead/search?labeler=labeler-3",
    "search, labeler and word": "/lead/search?labeler=labeler-3&words=d{number}",
    "search, mark": "/lead/search?mark=hallucinates",
    "search, note": "/lead/search?note=dull",
    "search, no such note": "/lead/search?note=zebra",
    "search, a day": "/lead/search?since={day}&until={day}",
    "answers": "/lead/search?kind=any",
    "answers, labeler": "/lead/search?batch=main&labeler=labeler-3",
    "quality": "/lead/quality",
    "people": "/lead/people",
    "questions": "/questions",
}
CONFIG = LabelingConfig(task_order="arrival")
SERVER = (
    "import sys; from preferences.page.config import LabelingConfig; from preferences.page.app import serve;"
    " serve(sys.argv[1], LabelingConfig(task_order='arrival'), host='127.0.0.1', port=int(sys.argv[2]), announce=print)"
)


def fill(url: str, num_tasks: int, num_labelers: int, judged_share: float, *, with_lead: bool = False) -> list[str]:
    """Creates a store with tasks, the first of them already judged; returns one session per labeler.

    `with_lead` adds a lead, whose session is the last.
    """
    tasks = [
        Task(
            f"task-{number}",
            (Message("user", f"Question {number}: what would you say?"),),
            tuple(f"{RESPONSE}{letter}{number}" for letter in "abcd"),
            ("one", "two", "three", "four"),
        )
        for number in range(num_tasks)
    ]
    accounts = Accounts(url)
    with LabelStore(url) as store:
        store.add_tasks(tasks, batch="main", num_labelers=2)
        store.import_judgments("main", judged(tasks[: int(judged_share * num_tasks)], num_labelers))
    sessions = []
    for number in range(num_labelers):
        name = f"labeler-{number}"
        accounts.accept(accounts.invite(name, "labeler"))
        accounts.confirm_reading(name, CONFIG.version)
        sessions.append(accounts.open_session(name))
    if with_lead:
        accounts.accept(accounts.invite("lead", "lead"))
        sessions.append(accounts.open_session("lead"))
    accounts.close()
    return sessions


def judged(tasks: Sequence[Task], num_labelers: int) -> list[Judgment]:
    """Returns two labelers' judgments per task, in turn, one task per ten seconds until now.

    They disagree on two of three tasks; some have marks or a note.
    """
    started = time.time() - 10.0 * len(tasks)
    return [
        Judgment(
            task.task_id, f"labeler-{(number + turn) % num_labelers}", 0, "answer", RANKS[(number * turn) % 3], (),
            FLAGS[(number + turn) % 20 == 0], "Both are dull." if (number + turn) % 10 == 0 else "",
            (0, 1, 2, 3), CONFIG.version, 20_000, "benchmark", started + 10.0 * number,
        )
        for number, task in enumerate(tasks)
        for turn in range(2)
    ]  # fmt: skip


async def label(
    address: str, session: str, num_answers: int, think_seconds: float, seed: int, took: dict[str, list[float]]
) -> None:
    """One labeler: opens the page, thinks, answers, and gets the next one."""
    draw = random.Random(seed)
    # verify=False: loading certificates, which nothing needs here, would delay all labelers of this process
    async with httpx.AsyncClient(
        base_url=address,
        cookies={"heed_session": session},
        timeout=600,
        verify=False,
        limits=httpx.Limits(keepalive_expiry=2.0),  # the server closes idle connections after 5 s, maybe mid-request
    ) as client:
        await asyncio.sleep(draw.uniform(0, think_seconds))
        for _ in range(num_answers):
            page = await timed(took["a task"], client.get("/task"))
            fields = dict(HIDDEN.findall(page.text.split('id="answer"')[1].split("</form>")[0]))
            await asyncio.sleep(draw.uniform(0.5, 1.5) * think_seconds)
            for place in range(NUM_RESPONSES):
                fields |= {f"rank_{place}": str(draw.randint(1, 4)), f"rating_{place}": str(draw.randint(1, 7))}
            stored = await timed(took["an answer"], client.post("/task/answer", data=fields))
            assert stored.status_code == 303, stored.text


async def lead(address: str, session: str, num_tasks: int, took: dict[str, list[float]], seconds: float) -> None:
    """A lead: opens each page in turn, again and again, a second after the last one came."""
    draw, started = random.Random(0), time.monotonic()
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86_400))
    cookies = {"heed_session": session}
    async with httpx.AsyncClient(base_url=address, cookies=cookies, timeout=600, verify=False) as client:
        while time.monotonic() - started < seconds:
            for name, path in LEAD_PAGES.items():
                number = draw.randrange(num_tasks)
                page = await timed(took.setdefault(name, []), client.get(path.format(number=number, day=day)))
                assert page.status_code == 200, page.text
                await asyncio.sleep(0.3)


async def cpu_times(
    address: str, session: str, pages: Mapping[str, str], num_tasks: int, server: int
) -> dict[str, float]:
    """Opens each page alone. Returns milliseconds of the server's CPU time per request, by page."""
    draw, found = random.Random(1), {}
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 86_400))
    cookies = {"heed_session": session}
    async with httpx.AsyncClient(base_url=address, cookies=cookies, timeout=600, verify=False) as client:
        for name, path in pages.items():
            await client.get(path.format(number=0, day=day))
            used = cpu_seconds(server)
            for _ in range(NUM_ALONE):
                page = await client.get(path.format(number=draw.randrange(num_tasks), day=day))
                assert page.status_code == 200, page.text
            found[name] = round(1_000 * (cpu_seconds(server) - used) / NUM_ALONE, 1)
    return found


def cpu_seconds(process: int) -> float:
    """Returns the CPU time that a process has used in all its threads, those that have ended included (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


async def timed(took: list[float], asked: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    started = time.perf_counter()
    response = await asked
    took.append(time.perf_counter() - started)
    return response


def figures(took: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Returns milliseconds at percentiles, by request."""
    return {
        name: {"number": len(seconds)}
        | {f"p{q}_ms": round(1000 * float(np.percentile(seconds, q)), 1) for q in (50, 95, 99)}
        for name, seconds in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", default="", help="an empty store's URL")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--judged-share", type=float, default=0.5, help="share of tasks judged before the start")
    parser.add_argument("--labelers", type=int, default=50)
    parser.add_argument("--answers", type=int, default=20, help="answers per labeler")
    parser.add_argument("--think-seconds", type=float, default=5.0)
    parser.add_argument("--lead", action="store_true", help="a lead opens the leads' pages at the same time")
    parser.add_argument("--postgres", action="store_true", help="start a PostgreSQL server and use that")
    given = parser.parse_args()
    with ExitStack() as opened:
        url = given.store or str(Path(opened.enter_context(tempfile.TemporaryDirectory())) / "labels.db")
        if given.postgres:
            programs = postgres_programs()
            if programs is None:
                parser.error("--postgres: PostgreSQL's server programs (initdb, postgres) are not installed")
            url = opened.enter_context(running_postgres(programs)).new_database("template1")
        measure(url, given)


def measure(url: str, given: argparse.Namespace) -> None:
    """Fill the store, serve it, and print the response times."""
    started = time.perf_counter()
    sessions = fill(url, given.tasks, given.labelers, given.judged_share, with_lead=given.lead)
    print(f"filled in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER, url, str(port)], stdout=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        found = figures(asyncio.run(work(address, sessions, given)))
        alone = [(sessions[0], {"a task": "/task"}), *([(sessions[-1], LEAD_PAGES)] if given.lead else [])]
        for session, pages in alone:
            for name, used in asyncio.run(cpu_times(address, session, pages, given.tasks, server.pid)).items():
                found[name]["cpu_ms"] = used
        print(json.dumps(found, indent=2))
    finally:
        server.terminate()  # so that it also ends the process that computes statistics
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def work(address: str, sessions: Sequence[str], given: argparse.Namespace) -> dict[str, list[float]]:
    """Runs all labelers at once. Returns the seconds that each request took, by kind."""
    async with httpx.AsyncClient(base_url=address) as client:
        while True:
            try:
                await client.get("/sign-in")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.1)
    took: dict[str, list[float]] = {"a task": [], "an answer": []}
    labelers = [
        label(address, session, given.answers, given.think_seconds, seed, took)
        for seed, session in enumerate(sessions[: given.labelers])
    ]
    seconds = given.answers * given.think_seconds
    leads = [lead(address, session, given.tasks, took, seconds) for session in sessions[given.labelers :]]
    await asyncio.gather(*labelers, *leads)
    return took


if __name__ == "__main__":
    main()
