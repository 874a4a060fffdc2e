"""`python -m research.study` end to end at the debug job's size, and the arms that it is made of."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from heed.jobs.job_file import load_job
from preferences.records import Message, Ranking
from research.studies.arms import arm_job, basic_arms, cut_rankings, with_those_before
from research.studies.measures import pairs_right
from research.studies.study import NAMES, QUICK, run_study
from research.study import app
from reward.config import RankingsConfig
from reward.prepared import read_rankings

# The debug job, smaller still.
TINY = (
    "pretrain.num_steps=4",
    "world.num_pretrain_texts=150",
    "world.num_demonstrations=40",
    "world.num_collect_prompts=30",
    "world.num_ppo_prompts=16",
    "world.num_compare_prompts=10",
    "ppo.rollout_batch_size=8",
    "ppo.num_epochs=1",
)
ROOT = Path(__file__).parents[3]
JOBS, DEBUG = ROOT / "research" / "jobs", ROOT / "configs" / "jobs" / "debug.toml"


def results(runs: Path) -> dict[str, tuple[int, int]]:
    """Everything that arms and measures left, and when it was written."""
    files = [path for name in ("lineage.json", "*.npz", "*.safetensors") for path in runs.rglob(name)]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)}


@pytest.mark.nightly
@pytest.mark.usefixtures("_shared_workers")
def test_a_study_runs_its_arms_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")

    def study() -> dict[str, Any]:
        run_study("over-optimisation", DEBUG, runs, num_seeds=1, overrides=(*QUICK, *TINY))
        return json.loads((runs / "findings.json").read_text())

    first = study()
    said = capsys.readouterr().err
    order = [line.split()[1] for line in said.splitlines() if line.startswith("seed-0:") and " of 8)" in line]
    assert order == [
        "base", "small-base", "reward-full", "reward-few", "reward-small", "ppo-full", "ppo-few", "ppo-small",
    ]  # fmt: skip
    (finding,) = first["findings"]
    assert finding["verdict"] == "undecided"  # one seed
    assert len(finding["claims"]) == 8
    curves = finding["curves"][0]
    assert [point["name"] for point in curves["best-of-n, full"]] == ["best of 2", "best of 4", "best of 8"]
    assert all(point["kl_nats"]["mean"] > 0 for point in curves["PPO, full"])
    # Three reward models, so three choices from one pool and three ways of training.
    for what in ("best-of-n", "PPO"):
        names = [name for name in curves if name.startswith(what)]
        assert len({json.dumps([point["proxy"] for point in curves[name]]) for name in names}) == 3
    assert (runs / "figures" / "over-optimisation.svg").read_text().count("PPO, full") == 1
    assert "| PPO: gold rises to its maximum by |" in (runs / "findings.md").read_text()
    collected = read_rankings(RankingsConfig(source=str(runs / "seed-0" / "base" / "collect" / "rankings.jsonl")))
    assert set(Counter(ranking.task_id for ranking in collected).values()) == {4}  # labelers a task
    sizes = {
        arm: (runs / "seed-0" / arm / "reward" / "model" / "model.safetensors").stat().st_size
        for arm in ("reward-full", "reward-small")
    }
    assert sizes["reward-small"] < sizes["reward-full"] / 2

    left = results(runs)
    shutil.rmtree(runs / "figures")
    (runs / "seed-0" / "measured" / "ppo-few.npz").unlink()  # as if it was killed before this
    assert study() == first
    said = capsys.readouterr().err
    assert "done in" not in said
    assert [line for line in said.splitlines() if "measuring" in line] == ["seed-0: measuring ppo-few"]
    again = results(runs)
    changed = {Path(name).name for name in left if left[name] != again[name]}
    assert changed <= {"ppo-few.npz", "seed-0.npz"}
    assert list(left) == list(again)
    assert (runs / "figures" / "over-optimisation.svg").is_file()


def test_refusals_come_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"finding 'gao': one of over-optimisation, kl-penalty, .*; or a group: all, .*was expected"
    ):
        run_study("gao", JOBS / "study.toml", tmp_path, num_seeds=1)
    assert NAMES in str(get_command(app).params[0].help)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"compare.best_of is 4; at least 8"):
        run_study("all", DEBUG, tmp_path, num_seeds=1)
    with pytest.raises(ValueError, match=r"keep_policies_every is 2 with 3 iterations; at least 3 policies"):
        run_study(
            "all", DEBUG, tmp_path, num_seeds=1,
            overrides=["compare.best_of=8", "ppo.keep_policies_every=2"],
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"the world has 3 labelers; 4 per task were expected"):
        run_study("all", JOBS / "study.toml", tmp_path, num_seeds=1, overrides=["world.num_labelers=3"])
    with pytest.raises(ValueError, match=r"a study needs \[world\], \[model\], \[pretrain\], \[sft\], "):
        run_study("all", ROOT / "configs" / "jobs" / "function.toml", tmp_path, num_seeds=1)
    assert not list(tmp_path.iterdir())


def test_arms_are_jobs_that_differ_in_what_they_are_named_for(tmp_path: Path, model_folder: Path) -> None:
    for stage in ("base/pretrain", "base/sft", "small-base/sft"):
        shutil.copytree(model_folder, tmp_path / stage / "model")
    job = load_job(JOBS / "study.toml", ["pretrain.seq_len=65", "sft.seq_len=65"])  # what the tiny model holds
    arms = basic_arms(job, tmp_path)
    jobs = {name: arm_job(job, arm, tmp_path).model_dump(exclude={"name"}) for name, arm in arms.items()}
    assert {name: arm.stages for name, arm in arms.items() if name.startswith("reward")} == {
        f"reward-{name}": ("reward",) for name in ("full", "few", "small", "2", "4")
    }

    def differing(one: str, other: str, section: str) -> set[str]:
        first, second = jobs[one][section], jobs[other][section]
        return {key for key in first if first[key] != second[key]}

    assert differing("ppo-full", "ppo-kl-high", "ppo") == {"kl"}
    assert differing("ppo-kl-low", "ppo-ptx", "ppo") == {"ptx"}
    assert differing("ppo-full", "ppo-few", "ppo") == {"reward"}
    assert differing("reward-full", "reward-small", "reward") == {"init_from"}
    assert differing("reward-full", "reward-4", "reward") == {"rankings", "num_epochs"}
    assert jobs["ppo-full"]["ppo"]["kl"]["coef"] == 0
    assert jobs["ppo-ptx"]["pretrain"]["num_steps"] == 0
    assert jobs["base"]["collect"]["overlap_labelers"] == 4
    assert jobs["small-base"]["model"]["hidden_size"] == jobs["base"]["model"]["hidden_size"] / 2
    assert [arm.name for arm in with_those_before(arms, ["ppo-small"])] == [
        "base", "small-base", "reward-small", "ppo-small",
    ]  # fmt: skip


def test_cuts_have_as_many_judgments_from_every_labeler() -> None:
    prompt = (Message("user", "q"),)
    rankings = [
        Ranking(f"task-{task}", prompt, ("a", "b"), (1, 2), f"labeler-{labeler}")
        for task in range(16)
        for labeler in range(4)
    ]
    for count in (1, 2, 4):
        cut = cut_rankings(rankings, count, 1 / count)
        assert len(cut) == 16
        assert sorted({ranking.task_id for ranking in cut}) == sorted(f"task-{n}" for n in range(16 // count))
        assert [sum(r.labeler == f"labeler-{n}" for r in cut) for n in range(4)] == [4, 4, 4, 4]
        assert len({(ranking.task_id, ranking.labeler) for ranking in cut}) == 16
    with pytest.raises(ValueError, match=r"task 'task-0' has 4 labelers; 5 were expected"):
        cut_rankings(rankings, 5, 1.0)


def test_pairs_that_a_reward_model_has_right() -> None:
    assert pairs_right([1.0, 2.0, 3.0], [0.1, 0.2, 0.3]) == (3, 3)
    assert pairs_right([1.0, 1.0, 0.0], [0.1, 0.2, 0.2]) == (0.5, 2)  # a tie of the truth is no pair
    assert np.isclose(pairs_right([3.0, 2.0, 1.0], [0.1, 0.2, 0.3])[0], 0)
