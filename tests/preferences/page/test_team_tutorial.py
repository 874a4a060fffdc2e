"""Runs docs/tutorials/labeling-with-a-team.md from its text: two models' outputs, three labelers, a reward model."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster.processes import free_port
from lm.weights import purpose_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorials" / "labeling-with-a-team.md"
BLOCK = re.compile(r"^```(python|bash serve|bash|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def browse(link: str, prefers: str) -> int:
    """Opens a one-time link, reads the instructions, and answers every task; returns how many."""
    origin = link[: link.index("/welcome/")]
    with httpx.Client(base_url=origin, follow_redirects=True, timeout=120) as client:
        assert "Store it where you keep your passwords" in client.post(link).text
        page = client.post("/instructions", data=form(client.get("/").text, "/instructions")).text
        num_answers = 0
        while "Nothing to judge just now" not in page:
            likes = [prefers in part for part in page.split('<section class="response"')[1:]]
            ranks = {f"rank_{place}": "1" if like else "2" for place, like in enumerate(likes)}
            assert sorted(ranks.values()) == ["1", "2"], page
            page = client.post(
                "/task/answer", data=form(page, "/task/answer") | ranks | {"note": f"for {prefers}"}
            ).text
            num_answers += 1
        return num_answers


def form(page: str, action: str) -> dict[str, str]:
    """The hidden fields of a form."""
    text = page.split(f'action="{action}"')[1].split("</form>")[0]
    return {name: html.unescape(value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="(.*?)"', text)}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_tutorial(tmp_path: Path, model_folder: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "my-model")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    links: dict[str, str] = {}
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind in ("python", "toml"):
            (name,) = re.findall(r"\A# (\S+)\n", text)
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif kind == "bash serve":
            label(text, links, tmp_path, environment)
        else:
            done = subprocess.run(
                ["bash", "-e", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr
            links |= dict(re.findall(r"Send this link to (\w+)\..*\n(http://\S+)", done.stdout))
    rows = [json.loads(line) for line in (tmp_path / "rankings.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    # Two of three prefer the polite model, whichever place it has.
    assert {(tuple(row["ranks"]), row["num_labelers"], row["agreement"]) for row in rows} == {((1, 2), 3, 2 / 3)}
    assert purpose_of(tmp_path / "runs" / "team" / "reward" / "model") == "score"
    results = json.loads((tmp_path / "runs" / "team" / "reward" / "results.json").read_text())
    assert results["train_comparisons"] + results["heldout_comparisons"] == 12
    assert 0 <= results["heldout_accuracy"]["mean"] <= 1
    assert (tmp_path / "runs" / "team" / "report.html").is_file()


def answers(lead: httpx.Client) -> Iterator[str]:
    """The pages of all answers, newest first."""
    query: str | None = "?kind=any"
    while query is not None:
        page = lead.get(f"/lead/search{query}").text
        yield page
        older = re.search(r'href="(\?[^"]+)">Older', page)
        query = html.unescape(older[1]) if older else None


def label(command: str, links: dict[str, str], folder: Path, environment: dict[str, str]) -> None:
    """Serve the pages, on a free port, while three labelers answer and the lead reads."""
    log = folder / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command.split(), "--port", str(free_port())], cwd=folder, env=environment, stdout=out, stderr=out
        )
    try:
        while not (found := re.search(r"labeling page: (http://\S+)", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        own = {name: found[1] + link[link.index("/welcome/") :] for name, link in links.items()}
        assert set(own) == {"you", "ann", "bob", "cem"}
        with ThreadPoolExecutor() as pool:
            wishes = {"ann": "nice to see you", "bob": "nice to see you", "cem": "Oh, "}
            counts = list(pool.map(browse, (own[name] for name in wishes), wishes.values()))
        assert counts == [12, 12, 12]
        with httpx.Client(base_url=found[1], follow_redirects=True, timeout=120) as lead:
            lead.post(own["you"])
            assert "36 of 36 judgments" in lead.get("/lead").text
            assert sum(page.count("for nice to see you") for page in answers(lead)) == 24
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, log.read_text()
