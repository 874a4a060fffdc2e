"""`heed watch`: the page of a running run, and its messages about runs in any state."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from starlette.testclient import TestClient

from files.atomic import write_json
from files.records import as_json
from heed.jobs.report import StatusFile
from heed.jobs.watch import Watched, make_app, now_in_words, now_of, watch
from stages.progress import Restart, RunStatus
from stages.reports.page import Now
from tests.rows import jsonl

STATUS = RunStatus(
    "running", "node-1", 42, started=1_000.0, updated=1_600.0, stage="ppo", stage_started=1_500.0, phase="sampling",
    workers={"workers": 4, "generators": 2},
)  # fmt: skip


def test_a_run_is_followed_to_its_end(
    started_run: tuple[Any, Path], heed: Callable[..., Any], browser: Browser
) -> None:
    command, folder = started_run
    while not (folder / "status.json").exists():
        assert command.process.poll() is None, command.output
        time.sleep(0.05)
    watching = heed("watch", str(folder), "--port", "0")
    while not (found := re.search(r"debug is at (http://127\.0\.0\.1:\d+);", watching.output)):
        assert watching.process.poll() is None, watching.output
        time.sleep(0.05)
    page = browser.new_context(viewport={"width": 390, "height": 800}).new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(found[1], timeout=60_000)
    page.evaluate("window.isTheSamePage = true")
    now = page.get_by_role("region", name="Now")
    expect(now).to_contain_text("This run has finished.", timeout=240_000)
    # What has changed meanwhile appears without reloading the page.
    expect(page.get_by_role("heading", name="The comparison")).to_be_visible(timeout=120_000)
    assert page.evaluate("window.isTheSamePage")
    section = page.get_by_role("region", name="Samples during training").locator(".samples").first
    expect(section.get_by_role("status")).to_have_text("1 to 8 of 8 prompts that fit")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert (status["state"], status["workers"], status["restarts"]) == ("finished", {}, [])
    page.context.close()
    watching.process.send_signal(signal.SIGINT)
    assert watching.wait(120) == 0
    assert len(watching.output.splitlines()) == 1  # no traceback, no log


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a run; the folder of a run, such as runs/demo, was expected"):
        watch(tmp_path, port=0, announce=print)


def lines_of(steps: range, seconds: float) -> str:
    return jsonl({"step": step, "num_steps": 80, "score": step / 10, "seconds": step * seconds} for step in steps)


def test_a_run_that_has_only_begun_and_half_written_files(tmp_path: Path) -> None:
    """Before the job is written, before a stage has begun, and while a line is being written."""
    (tmp_path / "status.json").write_text(json.dumps(as_json(replace(STATUS, stage="", updated=time.time()))))
    client = TestClient(make_app(tmp_path), base_url="http://127.0.0.1:8200")
    page = client.get("/").text
    assert "Starting, or between stages" in page
    assert "There is no report yet: " in page
    (tmp_path / "job.toml").write_text('name = "demo"\n[sft]\n[ppo]\n', encoding="utf-8")
    client = TestClient(make_app(tmp_path), base_url="http://127.0.0.1:8200")
    assert client.get("/").text.count("This stage has not run.") == 2
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "metrics.jsonl").write_text(
        lines_of(range(1, 21), 3.0) + '{"step": 21, "num_', encoding="utf-8"
    )
    (tmp_path / "ppo" / "samples.jsonl").write_text('{"step": 1, "kind": "fo', encoding="utf-8")
    (tmp_path / "status.json").write_text(json.dumps(as_json(replace(STATUS, updated=time.time()))))
    watched = Watched(tmp_path)
    assert watched.now().text == "ppo, sampling: 20 of 80; about 3 min 00 s left in this stage."
    assert "Curves of ppo, score" in watched.page()
    # Drawing a page takes time, so the next one waits; the current status does not.
    version = watched.version()
    (tmp_path / "ppo" / "metrics.jsonl").write_text(lines_of(range(1, 41), 3.0), encoding="utf-8")
    assert watched.version() == version
    assert watched.now().share == 0.5
    watched._due = 0.0
    assert watched.version() != version
    (tmp_path / "status.json").write_text('{"state": "runn')
    assert "no status" in watched.now().text


def test_only_this_machine_may_ask(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('name = "demo"\n[sft]\n', encoding="utf-8")
    client = TestClient(make_app(tmp_path), base_url="http://127.0.0.1:8200")
    found = client.get("/now")
    assert found.status_code == 200
    assert "script-src 'sha256-" in client.get("/").text
    assert "connect-src 'self'" in client.get("/").headers["content-security-policy"]
    assert client.get("/now", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/../job.toml").status_code == 404


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (STATUS, "ppo, sampling: 20 of 80; about 3 min 00 s left in this stage."),
        (replace(STATUS, updated=1_500.0), "No update in ppo for 1 min 50 s: the job may have been killed"),
        (replace(STATUS, message="waiting up to 90 s for places"), "ppo: waiting up to 90 s for places"),
        (replace(STATUS, state="stopped"), "This run was stopped in ppo; the same command continues it."),
        (replace(STATUS, state="waiting", message="collect waits for labels"), "collect waits for labels."),
        (
            replace(STATUS, state="waiting", message="collect waits for labels", updated=1_500.0),
            "collect waits for labels. The waiting command ended or was killed 1 min 50 s ago. Run it again",
        ),
        (replace(STATUS, state="failed", message="disk full"), "This run has failed: disk full"),
        (replace(STATUS, state="finished"), "This run has finished."),
    ],
)
def test_what_a_run_does_in_words(status: RunStatus, text: str) -> None:
    metrics = [json.loads(line) for line in lines_of(range(1, 21), 3.0).splitlines()]
    assert now_of(status, metrics, 1_610.0).text.startswith(text)


def test_time_left_without_metrics_ranks_and_restarts() -> None:
    """100 s for 5 of 20 prompts leave 300 s for the others."""
    counted = replace(STATUS, stage="compare", phase="", done=5, total=20, restarts=(Restart(0.0, "ppo", "rank 1"),))
    found = now_of(counted, [], 1_600.0)
    assert found.text == "compare: 5 of 20; about 5 min 00 s left in this stage."
    assert ("Ranks", "4 workers, 2 generators") in found.facts
    assert ("Ranks", "1 worker") in now_of(replace(counted, workers={"workers": 1}), [], 1_600.0).facts
    assert ("Restarts", "1") in found.facts
    assert found.events[0].endswith("ppo continued after: rank 1")
    # Seconds that restart at 0 after a resumption are not the duration of a step.
    resumed = [{"step": s, "num_steps": 10, "seconds": t} for s, t in ((1, 50.0), (2, 60.0), (3, 10.0), (4, 20.0))]
    assert "about 1 min 00 s left" in now_of(STATUS, resumed, 1_610.0).text


@pytest.mark.parametrize(("viewer", "host", "silent"), [(3600, 0, 0), (-7200, 0, 3600), (0, 3600, 3600), (0, -3600, 0)])
def test_clocks_that_differ_do_not_change_how_long_a_run_has_been_silent(
    viewer: float, host: float, silent: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds by which the clocks of the viewer and of the run's host are ahead of the file system's."""
    now, path = time.time(), tmp_path / "status.json"
    write_json(path, as_json(replace(STATUS, stage="", updated=now + host - silent)))
    os.utime(path, times=(now - silent,) * 2)
    monkeypatch.setattr(time, "time", lambda: now + viewer)
    assert Watched(tmp_path).now().text.startswith("No update for 1 h 00 min" if silent else "Starting, or between")
    assert [found.name for found in tmp_path.iterdir()] == ["status.json"]


def test_the_status_of_a_run_elsewhere_waits_for_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert now_in_words(tmp_path / "of another machine") == ""
    write_json(tmp_path / "status.json", as_json(replace(STATUS, updated=time.time() - 300)))
    os.utime(tmp_path / "status.json", times=(time.time() - 300,) * 2)
    words = r"No update in ppo for 5 min \d\d s: the job may have been killed, or its storage or head may hang\."
    assert re.fullmatch(words, now_in_words(tmp_path))
    back = threading.Event()

    def hang(_watched: Watched) -> Now:
        back.wait(60)
        return Now("unclear", "")

    monkeypatch.setattr(Watched, "now", hang)
    assert now_in_words(tmp_path, 0.1) == f"{tmp_path} has not answered for 0 s: its storage hangs."
    back.set()


def test_a_write_that_does_not_return_is_reported_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job's log is on the head's own disk, so `heed jobs logs` and `status` show the line."""
    back, writes = threading.Event(), list[int]()

    def write(path: Path, value: Any) -> None:
        writes.append(1)
        if len(writes) == 2:
            back.wait(60)
        write_json(path, value)

    monkeypatch.setattr("heed.jobs.report.write_json", write)
    monkeypatch.setattr("heed.jobs.report.WRITE_EVERY_SECONDS", 0.01)
    monkeypatch.setattr("heed.jobs.report.HANG_SECONDS", 0.2)
    said = ""
    with StatusFile(tmp_path, dict):
        end = time.monotonic() + 30
        while "has not returned" not in said and time.monotonic() < end:
            time.sleep(0.02)
            said += capsys.readouterr().err
        back.set()
    # On a busy disk, the write before may take as long, and be reported too.
    assert {*said.splitlines()} == {f"{tmp_path}: a write has not returned for 0 s; the run waits for its storage"}
