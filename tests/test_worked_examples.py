"""The preference loss and the kind of reward that CONTRIBUTING.md adds: each change touches few files, and works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from files.importing import PACKAGES

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# Two responses with log-ratios of 3 and 1 nats: with β = .1 the hinge is at 1 - .2. The third pair ties.
LOSS = """
import torch
from dpo.objective import preference_loss
from heed.jobs.job_file import load_job
from pathlib import Path

config = load_job(Path("configs/jobs/dpo.toml"), ["dpo.loss=hinge"]).dpo
ratios = torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 3.0], [30.0, 1.0]])
ranks = torch.tensor([[1, 2], [1, 2], [1, 1], [1, 2]])
loss, accuracy = preference_loss(config.loss, ratios, torch.ones(4, 2), ranks, 0.1, None)
torch.testing.assert_close(loss, torch.tensor([0.8, 1.2, 0.0, 0.0]))
assert accuracy.tolist() == [1.0, 0.0, 0.5, 1.0]
"""
REWARD = """
from evaluation.compare.judges import reward_judge
from heed.jobs.job_file import load_job
from pathlib import Path
from reward.external import score_in_parts

path = Path("configs/jobs/function.toml")
ppo = load_job(path, ["ppo.reward={kind='pattern', pattern='[a-z .]+'}"]).ppo
found = score_in_parts(ppo.external_reward, [()] * 3, ["all lower.", "Not", ""], size=2)
assert [scored.score for scored in found] == [1.0, 0.0, 0.0]
assert reward_judge("reward", ppo.external_reward, {}).details["description"].startswith("the pattern [a-z .]+, which")
try:
    load_job(path, ["ppo.reward={kind='pattern', pattern='['}"])
except ValueError as error:
    assert "ppo.reward.pattern: " in str(error), error
else:
    raise AssertionError("a pattern that is none was accepted")
"""


@pytest.mark.parametrize(
    ("section", "files", "program"),
    [
        ("Adding a preference loss", {"dpo/objective.py"}, LOSS),
        ("Adding a kind of reward", {"reward/sources.py"}, REWARD),
    ],
)
def test_the_change_touches_few_files_and_works(tmp_path: Path, section: str, files: set[str], program: str) -> None:
    found = re.search(rf"## {section}\n.*?```diff\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    assert set(re.findall(r"^\+\+\+ b/(\S+)$", found[1], re.MULTILINE)) == files
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "change.diff").write_text(found[1], encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "--unsafe-paths", "change.diff"], cwd=tmp_path, check=True)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-P", "-c", "import sys; sys.path.insert(0, '.'); exec(open('program.py').read())"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
