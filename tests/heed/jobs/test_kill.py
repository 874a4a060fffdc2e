"""A run that is killed at any time resumes and ends with the files of an uninterrupted run, bit for bit."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors import safe_open

from tests.heed.jobs.test_recovery import worker_of
from tests.tiers import in_ci

pytestmark = pytest.mark.long

NumSteps = Callable[[Path], int]
DEBUG_JOB = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
BY_ADAPTERS = """
base = "{base}"
name = "adapters"
without = ["pretrain", "collect", "compare", "model", "ppo.ptx"]
[sft]
init_from = "{parents}/pretrain/model"
lora = {{ rank = 3, alpha = 6 }}
[reward]
rankings = {{ source = "{parents}/collect/rankings.jsonl" }}
lora = {{ rank = 4, alpha = 8, targets = "attention" }}
[dpo]
rankings = {{ source = "{parents}/collect/rankings.jsonl" }}
lora = {{}}
[rejection]
prompts = {{ source = "world:ppo_prompts" }}
num_samples = 3
max_new_tokens = 96
seq_len = 100
heldout_share = 0.2
batch = {{ batch_size = 4, micro_batch_size = 2 }}
optimizer = {{ learning_rate = 1e-3 }}
dropout = 0.1
save_every_steps = 2
evaluate_every_steps = 5
[ppo]
lora = {{ rank = 2, alpha = 4, shared_body = true }}
num_iterations = 6
save_every_iterations = 2
"""

# Where the run is killed, in order; each point is reached after another restart. The other stages share pretraining's
# loop; test_recovery.py kills a worker in each.
KILLS: dict[str, Callable[[Path, NumSteps], bool]] = {
    "pretrain, two steps after a checkpoint": lambda folder, steps: steps(folder / "pretrain") >= 7,
    "collect, while labels arrive": lambda folder, _: (folder / "labels.sqlite").exists(),
    "ppo": lambda folder, steps: steps(folder / "ppo") >= 2,
}


def test_a_run_killed_in_every_kind_of_stage_ends_like_an_uninterrupted_run(
    started_run: tuple[Any, Path],
    run_debug: Callable[..., Any],
    hashes: Callable[[Path], dict[str, str]],
    num_steps: NumSteps,
    tmp_path: Path,
    request: Any,
) -> None:
    assert started_run[0].process.poll() in (None, 0)  # the two runs share the machine for a while
    folder = tmp_path / "debug"
    commands = []
    for where, is_reached in KILLS.items():
        command = run_debug(tmp_path)
        commands.append(command)
        while not is_reached(folder, num_steps):
            assert command.process.poll() is None, f"ended before {where}:\n{command.output}"
            time.sleep(0.005)
        command.kill_everything()
    last = run_debug(tmp_path)
    assert last.wait() == 0, last.output
    untouched = request.getfixturevalue("finished_run")
    assert hashes(folder) == hashes(untouched)
    # The logs contain every step once, as if nothing had happened; no stage started from scratch.
    for stage in ("pretrain", "sft", "reward", "dpo", "ppo"):
        logs = []
        for run in (folder, untouched):
            lines = [json.loads(line) for line in (run / stage / "metrics.jsonl").read_text().splitlines()]
            logs.append([{k: v for k, v in line.items() if "second" not in k} for line in lines])
        assert logs[0] == logs[1], stage
    assert not (folder / "replaced").exists()
    for command in [*commands, last]:
        assert command.wait_until_gone() == [], "processes of a killed run are left"


@pytest.fixture(scope="module")
def by_adapters(
    heed: Callable[..., Any], finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A job whose stages but rejection sampling train adapters, with a body that PPO's four roles share; and its
    uninterrupted run.
    """
    folder = tmp_path_factory.mktemp("adapters")
    job = folder / "adapters.toml"
    job.write_text(BY_ADAPTERS.format(base=DEBUG_JOB, parents=finished_run), encoding="utf-8")
    command = heed("run", str(job), "--runs", str(folder / "whole"))
    assert command.wait() == 0, command.output
    return job, folder / "whole" / job.stem


@pytest.mark.nightly  # in CI, real/test_training.py has adapters in three stages, and test_splits.py in the loop of all
def test_every_stage_trains_adapters(by_adapters: tuple[Path, Path]) -> None:
    _, whole = by_adapters
    for stage in ("sft", "reward", "dpo", "ppo"):
        assert all("lora_" in name or name.endswith(("score.weight", "bias")) for name in saved(whole / stage)), stage
    check_rejection(whole)
    assert list(json.loads((whole / "rejection" / "lineage.json").read_text())["parents"]) == ["sft", "reward"]
    assert rows(whole / "ppo" / "metrics.jsonl")[0]["kl_nats"] == pytest.approx(0, abs=0.05)
    report = (whole / "report.html").read_text(encoding="utf-8")
    for rank, alpha in ((3, 6), (4, 8), (16, 32), (2, 4)):
        assert f"adapters of rank {rank}, alpha {alpha}" in report


@pytest.mark.nightly
def test_a_killed_run_by_adapters_ends_like_an_uninterrupted_one(
    by_adapters: tuple[Path, Path], heed: Callable[..., Any], num_steps: NumSteps
) -> None:
    """Killed past a checkpoint of rejection sampling and one of PPO."""
    job, whole = by_adapters
    killed = killed_and_resumed(heed, job, ("rejection", "ppo"), num_steps)
    for stage in ("sft", "reward", "dpo", "ppo"):
        for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
            assert (killed / stage / name).read_bytes() == (whole / stage / name).read_bytes(), (stage, name)
        require_same_log(killed / stage, whole / stage)
    for name in ("best.jsonl", "model/model.safetensors"):
        assert (killed / "rejection" / name).read_bytes() == (whole / "rejection" / name).read_bytes(), name
    require_same_log(killed / "rejection", whole / "rejection")


def killed_and_resumed(heed: Callable[..., Any], job: Path, stages: tuple[str, ...], num_steps: NumSteps) -> Path:
    """Run a job that is killed in each of the stages, past a checkpoint, and resumed. Returns its run folder."""
    killed = job.parent / "killed" / job.stem
    for stage in stages:
        command = heed("run", str(job), "--runs", str(killed.parent))
        while num_steps(killed / stage) < 3:
            assert command.process.poll() is None, command.output
            time.sleep(0.005)
        command.kill_everything()
    again = heed("run", str(job), "--runs", str(killed.parent))
    assert again.wait() == 0, again.output
    assert "ppo: resumes from" in again.output
    return killed


ONE_STAGE = {
    "rejection": """
base = "{jobs}/debug.toml"
name = "rejection"
without = ["pretrain", "sft", "collect", "reward", "dpo", "ppo", "compare", "model"]
[rejection]
init_from = "{parents}/sft/model"
reward_from = "{parents}/reward/model"
prompts = {{ source = "world:ppo_prompts" }}
num_samples = 3
max_new_tokens = 96
seq_len = 100
heldout_share = 0.2
batch = {{ batch_size = 4, micro_batch_size = 2 }}
optimizer = {{ learning_rate = 1e-3 }}
dropout = 0.1
save_every_steps = 2
evaluate_every_steps = 5
""",
    "classify": """
base = "{jobs}/classify.toml"
name = "classify"
[world]
num_grammar = 200
[pretrain]
num_steps = 2
[classify]
dropout = 0.1
save_every_steps = 2
evaluate_every_steps = 10
""",
}


@pytest.mark.parametrize("stage", in_ci(ONE_STAGE, ["rejection"]))
def test_a_rank_that_is_killed_changes_no_file_of_the_stage(
    stage: str,
    heed: Callable[..., Any],
    processes: Callable[[str], list[int]],
    num_steps: NumSteps,
    tmp_path: Path,
    request: Any,
) -> None:
    """Killed before a checkpoint, which for rejection sampling is while it samples, and past one."""
    job = tmp_path / f"{stage}.toml"
    parents = request.getfixturevalue("finished_run") if "{parents}" in ONE_STAGE[stage] else ""
    job.write_text(ONE_STAGE[stage].format(jobs=DEBUG_JOB.parent, parents=parents), encoding="utf-8")
    calm, killed = (tmp_path / name / stage / stage for name in ("calm", "killed"))
    command = heed("run", str(job), "--runs", str(calm.parents[1]))
    assert command.wait() == 0, command.output
    command = heed("run", str(job), "--runs", str(killed.parents[1]))
    moments = (lambda: (killed / "samples").exists() or num_steps(killed) >= 1, lambda: num_steps(killed) >= 3)
    for num, is_reached in enumerate(moments):
        worker = None
        while worker is None or not is_reached() or command.output.count("was lost") < num:
            assert command.process.poll() is None, command.output
            worker = worker_of(processes(command.mark))
        os.kill(worker, signal.SIGKILL)
    assert command.wait() == 0, command.output
    assert command.output.count("was lost") == 2, command.output
    if stage == "rejection":
        check_rejection(calm.parent)
    outputs = {"rejection": ("best.jsonl", "model/model.safetensors"), "classify": ("model/model.safetensors",)}
    for name in outputs[stage]:
        assert (killed / name).read_bytes() == (calm / name).read_bytes(), name
    require_same_log(killed, calm)


def require_same_log(*stages: Path) -> None:
    """Two stages' metrics without times are the same."""
    for lines in zip(*(rows(stage / "metrics.jsonl") for stage in stages), strict=True):
        first, second = ({k: v for k, v in line.items() if "second" not in k} for line in lines)
        assert first == second


def saved(stage: Path) -> set[str]:
    """Names of what the newest checkpoint of a stage has."""
    newest, names = max((stage / "checkpoints").glob("step-*")), set[str]()
    for path in newest.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    assert names, f"{newest} is empty"
    return names


def check_rejection(run: Path) -> None:
    best, results = rows(run / "rejection" / "best.jsonl"), json.loads((run / "rejection/results.json").read_text())
    chosen, trained = results["chosen"], results["trained"]
    assert chosen["num_kept"] == len(best) == len({row["prompt_id"] for row in best}) > 2
    assert chosen["kept_score"] == pytest.approx(fmean(row["score"] for row in best))
    assert chosen["kept_score"] > chosen["sample_score"]
    # A model this small often does not end its responses, and some that end are too long for a row.
    assert 0 < chosen["num_truncated"] < chosen["num_prompts"] * chosen["num_samples"] == 64 * 3
    assert results["overlong_kept"]["num_rows"] == len(best) > results["overlong_kept"]["num_skipped"] > 0
    assert trained["num_steps"] == len(rows(run / "rejection" / "metrics.jsonl"))
    assert trained["heldout_loss"] < trained["heldout_loss_before"]
    assert json.loads((run / "report.json").read_text())["rejection"]["chosen"] == chosen
    assert "Samples that reached max_new_tokens" in (run / "report.html").read_text(encoding="utf-8")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
