"""`python -m research.over_optimisation` as a user types it, on small models of random weights."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from files.atomic import write_json
from ppo.report import PPOResults
from research.over_optimisation.__main__ import app
from research.over_optimisation.run import kept_policies


def over_optimisation(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_policies_of_a_run_are_those_that_were_kept_and_the_last(run_folder: Path, tmp_path: Path) -> None:
    assert list(kept_policies(run_folder / "ppo")) == ["iteration 2", "iteration 4", "iteration 6", "final"]
    shutil.copytree(run_folder / "ppo", tmp_path / "ppo")
    write_json(tmp_path / "ppo" / "results.json", asdict(PPOResults(6, 0.05, 0.0, 1.0)))
    assert list(kept_policies(tmp_path / "ppo")) == ["iteration 2", "iteration 4", "iteration 6"]
    with pytest.raises(ValueError, match=r"no results.json; a finished PPO stage was expected"):
        kept_policies(tmp_path)


def test_over_optimisation_of_a_run(
    run_folder: Path, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gold.py").write_text("def shortest(prompts, responses):\n    return [-len(r) for r in responses]\n")
    how = (run_folder, "--prompts", prompts, "--samples", 2, "--pool", 8)
    shown = over_optimisation(*how, "--gold", "gold.py:shortest", "--json", "found.json")
    assert "iteration 6" in shown
    found = json.loads((tmp_path / "found.json").read_text())
    assert [point["name"] for point in found["rl_points"]] == ["iteration 2", "iteration 4", "iteration 6", "final"]
    assert [point["name"] for point in found["best_of_n_points"]] == ["best of 2", "best of 4", "best of 8"]
    twin, last = found["rl_points"][1], found["rl_points"][3]
    assert {**twin, "name": ""} == {**last, "name": ""}  # the same weights, the same seeds
    again = over_optimisation(*how, "--gold", "gold.py:shortest", "--json", "again.json")
    assert again.splitlines()[:-1] == shown.splitlines()[:-1]
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "found.json").read_bytes()


def test_a_run_that_kept_no_policies_is_refused_before_anything_is_sampled(
    run_folder: Path, prompts: str, tmp_path: Path
) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ppo" / "policies")
    with pytest.raises(ValueError, match=r"1 of PPO's policies are kept; at least 3 .* set ppo.keep_policies_every"):
        over_optimisation(tmp_path / "run", "--prompts", prompts)


def test_mistakes_are_reported(run_folder: Path, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder of a run was expected"):
        over_optimisation(tmp_path, "--prompts", prompts)
    (tmp_path / "gold.py").write_text("")
    with pytest.raises(ValueError, match="has no function 'missing'"):
        over_optimisation(run_folder, "--prompts", prompts, "--gold", f"{tmp_path / 'gold.py'}:missing")
