"""Jobs as a user runs them in a folder of their own, whose files have the names of Heed's packages and of others."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

from tests.rows import jsonl

ROOT = Path(__file__).parents[3]
HEED = (str(Path(sys.executable).with_name("heed")),)
MODULE = (sys.executable, "-m", "heed")

# Heed's packages, a dependency of every worker, and modules of Python that are imported late.
HIDING = ("sft", "dpo", "training", "files", "cluster", "stages", "datasets", "tokenizers", "statistics", "queue")
REWARD = """
from liked_words import LIKED

def score(prompts, responses):
    return [sum(text.count(word) for word in LIKED) for text in responses]
"""


@dataclass
class Folder:
    """A user's folder with a job: SFT of a tiny model, then PPO on the reward of `reward.py`."""

    path: Path
    ray: Path  # where Ray keeps its files

    def heed(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own: Mapping[str, str] = {"RAY_TMPDIR": str(self.ray), "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "400"}
        inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PYTHONPATH")}
        return subprocess.run(
            command, cwd=self.path, env={**inherited, **own, **environment}, capture_output=True, text=True,
            timeout=400, check=False,
        )  # fmt: skip

    @property
    def ray_sessions(self) -> int:
        return len([*self.ray.glob("ray/session_2*")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Folder]:
    path, ray = tmp_path_factory.mktemp("shop"), Path(tempfile.mkdtemp(prefix="heed-ray-"))
    for name in HIDING:
        (path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the current folder was imported')\n")
    for name in ("jobs", "lm", "ppo"):
        (path / name).mkdir()
        (path / name / "__init__.py").write_text(f"raise RuntimeError('{name}/ was imported')\n")
    (path / "reward.py").write_text(REWARD)
    (path / "liked_words.py").write_text("LIKED = 'aeiou'\n")
    (path / "data").mkdir()
    turns = [{"prompt": f"Where is {i}?", "completion": "The dog sleeps."} for i in range(16)]
    (path / "data" / "turns.jsonl").write_text(jsonl(turns))
    debug = tomllib.loads((ROOT / "configs" / "jobs" / "debug.toml").read_text())
    source = {"source": "data/turns.jsonl"}
    sft = debug["sft"] | {
        "init_from": str(model_folder), "demonstrations": [source], "heldout": [source], "seq_len": 96,
    }  # fmt: skip
    reward = {"kind": "function", "function": "reward.py:score"}
    ppo = debug["ppo"] | {"prompts": source, "reward": reward, "num_iterations": 1}
    del ppo["ptx"]
    values = {"name": "shop", "engine": debug["engine"], "cluster": debug["cluster"], "sft": sft, "ppo": ppo}
    (path / "job.toml").write_text(tomli_w.dumps(values))
    yield Folder(path, ray)
    shutil.rmtree(ray, ignore_errors=True)


@pytest.fixture(scope="module")
def finished(folder: Folder) -> Folder:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by the ranks of a launcher that the driver must not join
        port = str(taken.getsockname()[1])
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = folder.heed(*HEED, "run", "job.toml", **launched)
    assert done.returncode == 0, done.stderr
    assert "sft: done in" in done.stderr
    assert "ppo: done in" in done.stderr
    return folder


def test_files_with_the_names_of_packages_change_nothing(finished: Folder) -> None:
    """The run of the fixture has imported none of them, on the driver or in a worker."""
    (line,) = (finished.path / "runs/shop/ppo/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["failed_scores"] == 0


def test_a_run_in_which_nothing_has_changed_does_not_start_ray(finished: Folder) -> None:
    before = finished.ray_sessions
    assert before == 1
    done = finished.heed(*MODULE, "run", "job.toml")
    assert done.returncode == 0, done.stderr
    assert "sft, ppo: unchanged, skipped" in done.stderr
    assert finished.ray_sessions == before


@pytest.mark.nightly  # in CI, cluster/test_connect.py has such a Ray, and the last test a run that fails
def test_where_ray_does_not_start_the_earlier_result_stays(finished: Folder, tmp_path: Path) -> None:
    model = finished.path / "runs/shop/ppo/model/model.safetensors"
    before = model.read_bytes()
    too_long = str(tmp_path / ("x" * 100))  # for the sockets that Ray keeps there
    done = finished.heed(*HEED, "run", "job.toml", "--set", "ppo.kl.coef=0.2", RAY_TMPDIR=too_long)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "trying once more" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: Ray did not start in two tries: "), done.stderr
    assert "run the same command again" in last
    assert model.read_bytes() == before
    assert not (finished.path / "runs/shop/replaced").exists()


def test_what_a_new_run_could_not_begin_leaves_the_earlier_result(finished: Folder) -> None:
    """The workers are there, and the model that the stage starts from is damaged."""
    result = finished.path / "runs/shop/sft/model/model.safetensors"
    before = result.read_bytes()
    values = tomllib.loads((finished.path / "job.toml").read_text())
    shutil.copytree(values["sft"]["init_from"], finished.path / "damaged")
    weights = finished.path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = finished.heed(*HEED, "run", "job.toml", "--set", "sft.init_from=damaged")
    assert done.returncode == 2, done.stderr
    assert "incomplete or damaged" in done.stderr
    assert "restored the earlier result in runs/shop/sft" in done.stderr
    assert result.read_bytes() == before
    assert not (finished.path / "runs/shop/replaced").exists()
