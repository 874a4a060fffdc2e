"""The tutorials are run from their text: each block as it stands, one after another, in an empty folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lm.weights import purpose_of

ROOT = Path(__file__).parents[1]
ONE_GPU = ROOT / "docs" / "tutorials" / "one-gpu.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(page: Path, folder: Path, num_blocks: int | None = None) -> list[str]:
    """Writes each Python block to the file that its first line names, runs each shell block; returns what those say.

    With `num_blocks`, only that many blocks, from the first.
    """
    said = []
    bins = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{bins}:{os.environ['PATH']}", "COLUMNS": "200", "OMP_WAIT_POLICY": "PASSIVE"}
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8"))[:num_blocks]:
        if language == "python":
            (name,) = re.findall(r"\A# (\S+\.py)\n", text)
            (folder / name).write_text(text, encoding="utf-8")
            continue
        done = subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        said.append(done.stdout + done.stderr)
    return said


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_your_own_model(tmp_path: Path) -> None:
    said = run_blocks(ROOT / "docs" / "tutorials" / "your-own-model.md", tmp_path)
    job = next(text for text in said if 'name = "mine"' in text)
    for line in (
        "demos.jsonl: 1,152 conversations, prompt and completion",
        "pairs.jsonl: 72 pairs, TRL's preferences",
        "prompts.jsonl: 24 prompts, prompt",
    ):
        assert line in job
    assert len(job.splitlines()) < 60
    assert [purpose_of(tmp_path / "runs" / "mine" / stage / "model") for stage in ("sft", "reward", "ppo")] == [
        "language",
        "score",
        "language",
    ]
    results = json.loads((tmp_path / "runs" / "mine" / "sft" / "results.json").read_text())
    assert results["heldout_loss"] < 0.6 < results["heldout_loss_before"]  # nats; three endings alone leave 0.2 a token
    compared = json.loads((tmp_path / "runs" / "mine" / "compare" / "results.json").read_text())
    assert compared["judge"]["kind"] == "function"
    assert set(compared["policies"]) == {"sft", "best_of_4", "ppo"}
    scores = {name: found["gold_score"]["mean"] for name, found in compared["policies"].items()}
    assert scores["ppo"] > scores["sft"] + 0.1  # of 2 points; .14 and more, as a CPU rounds
    assert "Thank you, " in said[-2]  # what heed chat answered
    assert (tmp_path / "runs" / "sft-or-ppo" / "report.html").is_file()


@pytest.mark.long
def test_plans_for_one_gpu(tmp_path: Path) -> None:
    _, planned, refused = run_blocks(ONE_GPU, tmp_path, 3)
    assert re.search(r"fits on h100: ppo needs most, 56\.00 GiB of 79\.00 GiB", planned)
    assert re.search(r"does not fit on h100: ppo needs most, 302\.91 GiB of 79\.00 GiB", refused)
    assert refused.rstrip().endswith("exit code 1")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_one_gpu(tmp_path: Path) -> None:
    ran, left, compared = run_blocks(ONE_GPU, tmp_path)[3:]
    assert "ppo: done in" in ran
    assert "adapter_config.json" in left
    assert "same logits" in compared
    assert [purpose_of(tmp_path / "runs" / "tiny" / stage / "model") for stage in ("sft", "reward", "ppo")] == [
        "language",
        "score",
        "language",
    ]
