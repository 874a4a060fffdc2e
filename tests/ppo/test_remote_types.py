"""mypy checks calls to ranks: wrong arguments, results and methods are errors, correct ones are not."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
# What the snippet needs; everything else is Any, so the check takes only seconds.
READ = ["cluster/remote.py", "cluster/calls.py", "ppo/rank.py", "ppo/rollout.py", "ppo/learner.py", "ppo/generator.py"]
SNIPPET = """
from pathlib import Path

from cluster.remote import Remote
from ppo.generator import Generator
from ppo.learner import Learner
from ppo.rollout import PolicyBatch, Share


def call(
    learners: Remote[Learner], generators: Remote[Generator], batch: PolicyBatch, split: list[Share]
) -> float:
    learners.call_all(Learner.finish_saving)
    learners.call_all(Learner.finish_saving, 1)  # wrong: takes no argument
    learners.call_all(Learner.keep_policy, folder=Path("kept"))
    learners.call_all(Learner.keep_policy, folder="kept")  # wrong: str for Path
    learners.call_all(Generator.receive_broadcast)  # wrong: no method of a Learner
    learners.call_split(Learner.update_policy, [(batch, 1e-3, 7)])
    learners.call_split(Learner.update_policy, [(batch, "fast", 7)])  # wrong: str for float
    learners.call_split(Learner.update_policy, [(batch, 1e-3)])  # wrong: one argument is missing
    shares = [(share, 1e-3, 7) for share in batch.shares(split)]
    names: list[str] = learners.call_split(Learner.update_policy, shares)  # wrong: results are mappings
    learners.pass_on(Learner.send, generators, Generator.receive)
    learners.pass_on(Learner.on_gpu, generators, Generator.receive)  # wrong: gives bool, takes SentWeights
    return learners.start_split(Learner.update_policy, shares)()[0]["policy_loss"]
"""


def test_mypy_finds_wrong_calls_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "snippet.py"
    path.write_text(SNIPPET)
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path}", "--python-version=3.11"]
    output, _, _ = api.run([*options, *READ, str(path)])
    found = {int(number) for number in re.findall(r"snippet\.py:(\d+): error", output)}
    assert found == {number for number, line in enumerate(SNIPPET.splitlines(), start=1) if "# wrong" in line}, output
