"""Serves a run's report while it runs: the same page, made from the run's folder, plus what the run is doing now.

The server works on any machine that sees the folder, whether or not the job runs there. It only reads, except for an
empty file that it creates for a moment if the job seems to be silent.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from files.records import record_of
from heed.jobs.report import live_run_page
from stages.progress import STATUS, RunStatus
from stages.reports.page import Live, Now, Page, render, render_now
from stages.reports.parts import Answer
from stages.reports.text import clean_text, count_of, duration, number
from training.notices import cause_of

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
SILENT_SECONDS = 30.0  # without a sign of life from a job whose status says that it runs
ANSWER_SECONDS = 10.0  # how long a command waits for a run's folder
RENDER_SHARE = 0.1  # the largest share of a core that drawing pages takes
TAIL_BYTES = 65_536  # of metrics.jsonl, read to estimate how long steps take
NUM_STEPS = 20  # the estimate is the median over this many last steps
PARTS = ("job.toml", "loop.json", "*/results.json", "*/lineage.json", "*/metrics.jsonl", "*/samples.jsonl")
# The page itself has a policy too, which allows its scripts by hash; browsers apply both.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
    " frame-ancestors 'none'"
)


def watch(folder: Path, *, port: int, announce: Callable[[str], None]) -> None:
    """Serve a run's live page on this machine until interrupted.

    Raises: ValueError for a folder that holds no run, and for a port that is taken.
    """
    # `heed jobs status` reads runs without the extra `labels`, which has the server.
    import uvicorn

    from preferences.page.app import listening

    if not any((folder / name).is_file() for name in ("job.toml", STATUS)):
        raise ValueError(f"{folder}: not a run; the folder of a run, such as runs/demo, was expected")
    with listening(HOST, port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}"
        announce(f"{folder.resolve().name} is at {address}; Ctrl-C ends this page, not the run")
        settings = uvicorn.Config(
            make_app(folder), ws="none", lifespan="off", log_level="warning", timeout_graceful_shutdown=1
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run([listener])


def make_app(folder: Path) -> "Starlette":
    """The server as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    from preferences.page.security import Harden

    watched = Watched(folder)

    # Starlette runs plain functions in threads, so drawing a page delays no other request.
    def page(_request: "Request") -> "Response":
        return HTMLResponse(watched.page(), headers={"Content-Security-Policy": POLICY})

    def now(_request: "Request") -> "Response":
        return JSONResponse({"html": render_now(watched.now()), "version": watched.version()})

    # Accept only this machine's names: another site must not read a run through a name that resolves to this address.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=[Route("/", page), Route("/now", now)], middleware=[Middleware(Harden), hosts])


class Watched:
    """A run's page, drawn again when its files have changed, but not so often that it takes a core from the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._html, self._version, self._due = "", "", 0.0

    def version(self) -> str:
        """Returns a hash of the files' current state; until the next page is due, that of the last page."""
        if time.monotonic() >= self._due:
            return self._files()
        return self._version

    def page(self) -> str:
        """The page as HTML."""
        with self._lock:
            version = self.version()
            if version != self._version or not self._html:
                started = time.monotonic()
                self._html, self._version = self._draw(version), version
                ended = time.monotonic()
                self._due = ended + (ended - started) / RENDER_SHARE
            return self._html

    def _files(self) -> str:
        """Returns a hash that changes whenever a file that the page is made from does."""
        paths = sorted(path for part in PARTS for path in self.folder.glob(part))
        parts: list[tuple[str, int, int]] = []
        for path in paths:
            with suppress(FileNotFoundError):  # it is being replaced
                stat = path.stat()
                parts.append((str(path.relative_to(self.folder)), stat.st_mtime_ns, stat.st_size))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _draw(self, version: str) -> str:
        live = Live(self.now(), version)
        try:
            return live_run_page(self.folder, live)
        except (ValueError, OSError) as error:  # files that are being written, or a share that is away for a moment
            name = self.folder.resolve().name
            waiting = Answer("unclear", f"There is no report yet: {clean_text(str(error))}")
            return render(Page("Heed report", name, (), waiting, (), skip_to=("now", "what the run does"), live=live))

    def now(self) -> Now:
        """What the run is doing."""
        try:
            values = json.loads((self.folder / STATUS).read_text(encoding="utf-8"))
            status = record_of(values, RunStatus, STATUS)
        except (OSError, ValueError):
            return Now("unclear", "This run has written no status; below is what its files show.")
        return now_of(status, self._lines(status.stage), status.updated + _age(self.folder / STATUS))

    def _lines(self, stage: str) -> list[dict[str, Any]]:
        """Returns the last lines of a stage's metrics, without an incomplete one."""
        path = self.folder / stage / "metrics.jsonl"
        if not stage or not path.is_file():
            return []
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        whole = lines[1:] if size > TAIL_BYTES else lines
        whole_lines = [json.loads(line) for line in whole[-NUM_STEPS - 1 :]]
        return [line for line in whole_lines if {"step", "num_steps", "seconds"} <= line.keys()]


def _age(path: Path) -> float:
    """Returns the seconds since a file was written; of old ones by a new file's date, since clocks may differ."""
    written = path.stat().st_mtime
    age = time.time() - written
    if not 0 <= age <= SILENT_SECONDS:
        with suppress(OSError), TemporaryFile(dir=path.parent) as probe:  # unless nothing can be written there
            age = os.fstat(probe.fileno()).st_mtime - written
    return max(0.0, age)


def now_in_words(folder: Path, seconds: float = ANSWER_SECONDS) -> str:
    """Returns a sentence about what a run is doing; "" if its folder is not on this machine. If the folder's storage
    does not answer within `seconds`, the sentence says so.
    """
    found: list[str] = []

    def read() -> None:
        try:
            found.append(Watched(folder).now().text if (folder / STATUS).exists() else "")
        except OSError as error:
            found.append(f"{folder} cannot be read: {cause_of(error)}")

    reading = threading.Thread(target=read, name="status of a run", daemon=True)
    reading.start()
    reading.join(seconds)
    return found[0] if found else f"{folder} has not answered for {seconds:.0f} s: its storage hangs."


def now_of(status: RunStatus, lines: list[dict[str, Any]], at: float) -> Now:
    """Puts a status into words. `lines` are its stage's last metrics; `at` is the time, in seconds since the epoch."""
    restarts = tuple(
        f"{time.strftime('%H:%M:%S', time.localtime(one.at))} {one.stage} continued after: {clean_text(one.why)}"
        for one in reversed(status.restarts)
    )
    is_running = status.state == "running"
    ranks = ", ".join(count_of(num, name.removesuffix("s")) for name, num in (status.workers or {}).items())
    facts = (
        *((("Ranks", ranks or "none yet"),) if is_running else ()),
        ("Restarts", number(len(status.restarts))),
        ("Running for" if is_running else "Ran for", duration(max(0.0, status.updated - status.started))),
        ("Process", f"{status.pid} on {status.host}"),
    )
    if status.state == "finished":
        return Now("better", "This run has finished.", None, facts, restarts)
    if status.state == "failed":
        return Now("worse", clean_text(f"This run has failed: {status.message}"), None, facts, restarts)
    silent = at - status.updated
    if status.state == "waiting":
        # A loop that waits looks every few seconds; other commands end when they have to wait.
        ended = f"The waiting command ended or was killed {duration(silent)} ago. Run it again to continue."
        text = f"{status.message}.{f' {ended}' if silent > SILENT_SECONDS else ''}"
        return Now("unclear", clean_text(text), None, facts, restarts)
    where = f" in {status.stage}" if status.stage else ""
    if status.state == "stopped":
        return Now("unclear", f"This run was stopped{where}; the same command continues it.", None, facts, restarts)
    if silent > SILENT_SECONDS:
        text = (
            f"No update{where} for {duration(silent)}: the job may have been killed, or its storage or head may hang."
        )
        return Now("worse", text, None, facts, restarts)
    if status.message:
        return Now("unclear", clean_text(f"{status.stage or 'start'}: {status.message}"), None, facts, restarts)
    return _running(status, lines, at, facts, restarts)


def _running(
    status: RunStatus,
    lines: list[dict[str, Any]],
    at: float,
    facts: tuple[tuple[str, str], ...],
    events: tuple[str, ...],
) -> Now:
    if not status.stage:
        return Now("unclear", "Starting, or between stages: processes, data and checks.", None, facts, events)
    phase = f", {status.phase}" if status.phase else ""
    done, total = (lines[-1]["step"], lines[-1]["num_steps"]) if lines else (status.done, status.total)
    if not total:
        return Now("unclear", f"{status.stage}{phase}: preparing.", None, facts, events)
    left = _seconds_left(lines) if lines else _left_of(done, total, at - status.stage_started)
    in_words = f"; about {duration(left)} left in this stage" if left is not None and done < total else ""
    text = f"{status.stage}{phase}: {number(done)} of {number(total)}{in_words}."
    return Now("unclear", text, done / total, facts, events)


def _seconds_left(lines: list[dict[str, Any]]) -> float | None:
    """Estimates from the median time of the last steps. A stage that resumed counts its seconds from 0 again."""
    steps = [(new["seconds"] - old["seconds"]) / (new["step"] - old["step"]) for old, new in pairwise(lines)]
    positive = [seconds for seconds in steps if seconds > 0]
    last = lines[-1]
    return median(positive) * (last["num_steps"] - last["step"]) if positive else None


def _left_of(done: int, total: int, seconds: float) -> float | None:
    return seconds * (total - done) / done if done else None
