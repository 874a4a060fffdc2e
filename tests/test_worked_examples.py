"""The preference loss and the kind of reward that CONTRIBUTING.md adds: each change touches one file and works, and the
tests of all losses pass for the added one.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from files.importing import PACKAGES

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# Two responses with log-ratios of 3 and 1 nats: with β = .1 the hinge is at 1 - .2. The third pair ties.
LOSS = """
import torch
from dpo.losses import PairSettings
from heed.jobs.job_file import load_job
from pathlib import Path

config = load_job(Path("configs/jobs/dpo.toml"), ["dpo.loss=hinge"]).dpo
ratios = torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 3.0], [30.0, 1.0]])
ranks = torch.tensor([[1, 2], [1, 2], [1, 1], [1, 2]])
hinge = config.preference_loss
loss, accuracy = hinge.per_comparison(ratios, torch.ones(4, 2), ranks, PairSettings(0.1))
torch.testing.assert_close(loss, torch.tensor([0.8, 1.2, 0.0, 0.0]))
assert accuracy.tolist() == [1.0, 0.0, 0.5, 1.0]
for setting, message in (("dpo.ties=davidson", "which has no probabilities"), ("dpo.margin=1", "has a margin")):
    try:
        load_job(Path("configs/jobs/dpo.toml"), ["dpo.loss=hinge", setting])
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(setting)
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
# What reads the table of losses, but for docs/reference, which `make reference` writes.
SUITE = """
import pytest
pages = "tests/heed/test_reference.py::test_the_pages_are_those_that_the_code_gives"
files = ["tests/dpo/test_dpo_loss.py", "tests/heed/test_reference.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--deselect", pages, *files]))
"""


def changed_tree(folder: Path, section: str, file: str) -> None:
    """Copy the packages into a folder, and apply the diff of a section, which changes one file."""
    found = re.search(rf"## {section}\n.*?```diff\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    assert re.findall(r"^\+\+\+ b/(\S+)$", found[1], re.MULTILINE) == [file]
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name)  # with what is compiled of it
    (folder / "change.diff").write_text(found[1], encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "--unsafe-paths", "change.diff"], cwd=folder, check=True)


def run_in(folder: Path, program: str) -> None:
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, '.')\n{program}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_preference_loss_is_added_in_one_file(tmp_path: Path) -> None:
    changed_tree(tmp_path, "Adding a preference loss", "dpo/losses.py")
    run_in(tmp_path, LOSS)
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "mkdocs.yml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    run_in(tmp_path, SUITE)


def test_a_kind_of_reward_is_added_in_one_file(tmp_path: Path) -> None:
    changed_tree(tmp_path, "Adding a kind of reward", "reward/sources.py")
    run_in(tmp_path, REWARD)
