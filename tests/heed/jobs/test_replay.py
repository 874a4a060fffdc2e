"""`heed replay`: a response of a finished run is sampled again to the last bit, and its chain goes back to labels."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from heed.jobs.replay import checkpoint_before, replay_response
from lm.samplers.draws import ALARM
from lm.samplers.engine import max_difference
from ppo.rollout_log import ROLLOUTS
from tests.heed.jobs.conftest import HeedCommand
from tests.rows import jsonl


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy: replaying takes the run's lock."""
    return shutil.copytree(finished_run, tmp_path / "debug")


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "ppo" / ROLLOUTS).read_text().splitlines()]


def test_every_iteration_records_what_sampled_it(finished_run: Path) -> None:
    lines = records(finished_run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        sampled_by, responses, tensors = line["sampled_by"], line["responses"], line["tensors"]
        assert isinstance(sampled_by, list)
        assert isinstance(responses, list)
        scores = line["scores"]
        assert isinstance(scores, list)
        assert len(sampled_by) == len(responses) == len(scores) == 16
        assert len(set(responses)) == 16
        assert len(set(sampled_by)) == 1
        assert bool(tensors) == (line["step"] != 1)  # the first iteration has the model as loaded
    assert len({str(line["sampled_by"]) for line in lines}) == 3


@pytest.mark.nightly
def test_workers_that_sampled_as_a_team_are_replayed_with_the_same_bits(
    run: Path, run_debug: Callable[..., HeedCommand]
) -> None:
    """Replay loads a checkpoint and samples again, so a run that resumes has the same bits too."""
    alone = records(run)
    for stage in ("ppo", "compare"):
        shutil.rmtree(run / stage)
    together = ("workers=2", "ppo.sampler.tensor_parallel_size=2")
    command = run_debug(run.parent, ["--only", "ppo", *[word for value in together for word in ("--set", value)]])
    assert command.wait() == 0, command.output
    metrics = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    # In fp32 the sums over ranks round differently from the learner's, but by no more than one rank's kernels do.
    assert 0 < max(line["sampler_difference"] for line in metrics) < max_difference("fp32", 2) / 100
    assert max(line["draw_evidence"] for line in metrics) < ALARM
    assert records(run)[0]["sampled_by"] == alone[0]["sampled_by"]  # digests are of whole weights
    followed = [json.loads(line) for line in (run / "ppo" / "samples.jsonl").read_text().splitlines()]
    assert followed
    found, _ = replay_response(run, "ppo", 3, 2)
    assert (found.is_same, found.from_iteration) == (True, 3)


@pytest.mark.long
def test_a_replayed_response_has_the_recorded_bits_from_the_start_and_from_a_checkpoint(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (run / "ppo").rglob("*") if path.is_file()}
    told: list[tuple[int, int]] = []
    found, chain = replay_response(run, "ppo", 3, 2, lambda *progress: told.append(progress))
    assert (found.is_same, found.from_iteration, told) == (True, 3, [(1, 1)])
    assert found.sampled_by == found.recorded_sampled_by
    assert found.score == found.recorded_score
    assert {path: path.stat().st_mtime_ns for path in (run / "ppo").rglob("*") if path.is_file()} == before
    shutil.rmtree(run / "ppo" / "checkpoints")
    again, _ = replay_response(run, "ppo", 3, 2)
    assert again.from_iteration == 1
    assert again.is_same
    assert again.tokens == found.tokens

    ends = found.tokens[-1]
    assert sum(token.reward for token in found.tokens[:-1]) == pytest.approx(
        -0.1 * sum(token.kl for token in found.tokens[:-1]), abs=1e-6
    )
    assert all(token.ratio == pytest.approx(1, abs=1e-5) and token.weight > 0 for token in found.tokens)
    assert any(token.ratio_after != 1 for token in found.tokens)
    assert ends.logprob < 0
    assert [Path(link.name).name for link in chain] == ["ppo", "sft", "reward", "rankings.jsonl"]
    assert "90 judgments (labeler-1 " in chain[-1].what
    assert all(len(link.sha256) == 64 for link in chain)


@pytest.mark.nightly
def test_the_command_says_what_differs_from_the_record(run: Path, heed: Callable[..., HeedCommand]) -> None:
    path = run / "ppo" / ROLLOUTS
    lines = records(run)
    responses = lines[0]["responses"]
    assert isinstance(responses, list)
    responses[4], true = "0" * 16, responses[4]
    path.write_text(jsonl(lines))
    command = heed("replay", str(run), "--iteration", "1", "--response", "4")
    assert command.wait() == 1
    said = command.output
    assert f"response: {true}, recorded was {'0' * 16}" in said
    assert f"weights: {lines[0]['sampled_by'][0]}, the same bits as recorded" in said  # type: ignore[index]
    assert "computed again: iterations 1 to 1" in said
    assert f"score: {lines[0]['scores'][4]!r}, the same bits as recorded" in said  # type: ignore[index]
    assert "ratio after" in said


@pytest.mark.parametrize(
    ("stage", "iteration", "response", "message"),
    [
        ("dpo", 1, 0, "--stage dpo: ppo was expected"),
        ("ppo", 4, 0, r"--iteration 4: .*rollouts.jsonl has iterations 1 to 3"),
        ("ppo", 1, 16, "--response 16: iteration 1 has responses 0 to 15"),
    ],
)
def test_mistakes_are_named(run: Path, stage: str, iteration: int, response: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_response(run, stage, iteration, response)


@pytest.mark.long
def test_a_run_whose_job_or_labels_have_changed_is_named(run: Path) -> None:
    rankings = run / "collect" / "rankings.jsonl"
    whole = rankings.read_text()
    rankings.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    _, chain = replay_response(run, "ppo", 1, 0)
    assert "89 judgments (labeler-1 " in chain[-1].what
    assert chain[-1].what.endswith("; it has changed since the reward model learned from it")
    rankings.write_text(whole)
    job = run / "job.toml"
    text = job.read_text()
    assert "[ppo.kl]\ncoef = 0.1\n" in text
    job.write_text(text.replace("[ppo.kl]\ncoef = 0.1\n", "[ppo.kl]\ncoef = 0.2\n"))
    with pytest.raises(
        ValueError, match=r"job.toml or its inputs changed after this stage ran: changed: ppo\.kl\.coef$"
    ):
        replay_response(run, "ppo", 1, 0)


def test_rollouts_of_older_weights_are_sampled_again(tmp_path: Path) -> None:
    """A checkpoint holds the rollouts under way: one from which the wanted one would be read does not serve."""
    for step in (2, 4, 6):
        folder = tmp_path / f"step-{step:06d}"
        folder.mkdir()
        (folder / "manifest.json").write_text('{"sha256": {}}')
    assert checkpoint_before(tmp_path, 6) == tmp_path / "step-000004"
    assert checkpoint_before(tmp_path, 6 - 1) == tmp_path / "step-000004"
    assert checkpoint_before(tmp_path, 6 - 2) == tmp_path / "step-000002"
    assert checkpoint_before(tmp_path, 1) is None


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder of a run, with its job\.toml, was expected"):
        replay_response(tmp_path, "ppo", 1, 0)
