"""The PPO stage end to end in this process: metrics, checkpoints, resuming after a kill."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from cluster.remote import Pending
from lm.tokenizer import Tokenizer
from ppo import loop, stage
from ppo.config import PPOConfig
from ppo.rank import InitialModels
from ppo.roles import Roles
from ppo.rollout import Rollout
from reward.sampling import Sample
from stages.data import Fitting
from training.config import EngineConfig
from training.data import Prompt
from training.engine import StageContext

ENGINE = EngineConfig(precision="fp32", trackers=())
NUM_ROLLOUTS = 16


class Killed(BaseException):
    """Stands for a SIGKILL: no code above handles it."""


def make_mortal(roles: Roles) -> None:
    """Kills the stage in its third iteration."""
    rollouts, scores = [], roles.scorers.start_scores

    def die_in_time(rollout: Rollout) -> Pending[Tensor]:
        if len(rollout) == NUM_ROLLOUTS:  # others are samples to be read
            rollouts.append(rollout)
        if len(rollouts) == 3:
            roles.learners.finish_saving()  # on a slow disk the checkpoint of iteration 2 might not be written yet
            raise Killed
        return scores(rollout)

    roles.scorers.start_scores = die_in_time  # type: ignore[method-assign]


@pytest.fixture
def run(adapted: InitialModels, prompts: list[list[int]], ppo_config: Callable[..., PPOConfig]) -> Callable[..., None]:
    models = adapted
    tokenizer = Tokenizer.load(models.sft)
    # Prompts as in a file, with the texts that the encoded fixture was made from.
    asked = [
        Prompt(prompt_id=str(i), messages=({"role": "user", "content": tokenizer.decode(tokens).strip()},), kind="")
        for i, tokens in enumerate(prompts)
    ]

    def build(folder: Path, change: Callable[[Roles], None] = lambda _roles: None, **changes: object) -> None:
        config = ppo_config(kl={"target": {"horizon": 50}}, learning_rate=1e-2, **changes)
        own = replace(models, teachers=tuple(Path(teacher.model) for teacher in config.teachers))
        roles = Roles.in_process(config, ENGINE, own)
        change(roles)
        try:
            loop.train(StageContext(folder, 11, 1, ENGINE), config, roles, own, Fitting(asked, prompts))
        finally:
            roles.close()

    return build


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_run_ends_like_an_uninterrupted_run(
    run: Callable[..., None], tmp_path: Path, max_staleness: int
) -> None:
    # The stage accepts any roles as disaggregated generators; these sample at once.
    apart = {"kind": "asynchronous", "max_staleness": max_staleness} if max_staleness else {"kind": "disaggregated"}
    run(tmp_path / "whole", placement=apart)
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, placement=apart)
    held = sorted(path.name for path in (tmp_path / "killed" / "checkpoints" / "step-000002").glob("rollout-*"))
    assert held == ["rollout-000002.safetensors"] * max_staleness
    assert not (tmp_path / "killed" / "model").exists()
    # What a kill during a write leaves.
    (tmp_path / "killed" / "checkpoints" / ".writing-000003").mkdir()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "num_st')
    run(tmp_path / "killed", placement=apart)
    log = same_weights_and_log(tmp_path / "whole", tmp_path / "killed")
    assert len({line["kl_coef"] for line in log}) == 3  # the coefficient moved, and was resumed
    results = [json.loads((tmp_path / kind / "results.json").read_text()) for kind in ("whole", "killed")]
    assert results[0] == results[1]
    assert results[0]["num_iterations"] == 3
    samples = [(tmp_path / kind / "samples.jsonl").read_text() for kind in ("whole", "killed")]
    assert samples[0] == samples[1]
    require_samples([json.loads(line) for line in samples[0].splitlines()], log)
    checkpoints = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert checkpoints == ["step-000002", "step-000003"]


def test_a_killed_run_that_samples_continuously_ends_like_an_uninterrupted_run(
    run: Callable[..., None], tmp_path: Path
) -> None:
    changes = {"placement": {"kind": "continuous", "num_rows": 10, "round_tokens": 2}, "num_iterations": 4}
    run(tmp_path / "whole", **changes)
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, **changes)
    run(tmp_path / "killed", **changes)
    log = same_weights_and_log(tmp_path / "whole", tmp_path / "killed", num_iterations=4)
    work = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(0.5 < line["rows_in_use"] <= 1 for line in work)
    assert all(line["generators_waited_seconds"] >= 0 for line in work)
    assert work[0]["reread_tokens"] < min(line["reread_tokens"] for line in work[1:])
    rollouts = [(tmp_path / kind / "rollouts.jsonl").read_text() for kind in ("whole", "killed")]
    assert rollouts[0] == rollouts[1]
    sampled_by = [json.loads(line)["sampled_by"] for line in rollouts[0].splitlines()]
    assert [line["staleness"] for line in log] == [0, 1, 1, 1]
    assert log[0]["continued_share"] == 0
    for line, digests in zip(log, sampled_by, strict=True):
        assert line["continued_share"] == sum("@" in digest for digest in digests) / NUM_ROLLOUTS
    assert all(line["continued_share"] > 0 for line in log[2:])
    assert [line["token_age_max"] for line in log[:2]] == [0, 1]
    assert all(line["token_age_max"] >= 2 for line in log[2:])
    assert all(line["dropped_responses"] == 0 for line in log)


def require_samples(samples: list[dict[str, Any]], log: list[dict[str, float]]) -> None:
    """Four responses of each iteration, and in the first and the last one answers to the same eight prompts."""
    drawn = [sample for sample in samples if sample["kind"] == "drawn"]
    assert [sample["step"] for sample in drawn] == [1] * 4 + [2] * 4 + [3] * 4
    followed = {step: [s for s in samples if s["kind"] == "followed" and s["step"] == step] for step in (1, 2, 3)}
    asked = {step: [sample["prompt_id"] for sample in found] for step, found in followed.items()}
    assert len(set(asked[1])) == 8
    assert asked == {1: asked[1], 2: [], 3: asked[1]}
    assert [s["response"] for s in followed[1]] != [s["response"] for s in followed[3]]
    # The policy has not moved before the first update, and has before the third.
    assert log[0]["kl_nats"] == 0 == sum(sample["kl_nats"] for sample in followed[1])
    assert all(sample["kl_nats"] != 0 and 1 <= sample["num_tokens"] <= 6 for sample in followed[3])
    assert all(isinstance(sample["score"], float) for sample in samples)


@pytest.mark.parametrize(
    ("killed", "resumed"), [("balanced", "small"), pytest.param("small", "fast", marks=pytest.mark.nightly)]
)
def test_a_run_killed_in_one_memory_mode_ends_in_another_like_an_uninterrupted_run(
    run: Callable[..., None], tmp_path: Path, killed: str, resumed: str
) -> None:
    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, memory=killed)
    run(tmp_path / "killed", memory=resumed)
    same_weights_and_log(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("shared_body", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_run_by_adapters_ends_like_an_uninterrupted_run(
    run: Callable[..., None], tmp_path: Path, *, shared_body: bool
) -> None:
    lora = {"rank": 3, "alpha": 6, "shared_body": shared_body}
    run(tmp_path / "whole", lora=lora)
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, lora=lora)
    run(tmp_path / "killed", lora=lora)
    same_weights_and_log(tmp_path / "whole", tmp_path / "killed")
    first, second = (
        (tmp_path / kind / "adapter" / "adapter_model.safetensors").read_bytes() for kind in ("whole", "killed")
    )
    assert first == second


WORK = ("rows_in_use", "reread_tokens")  # of generators, which a resumed run does not repeat


def same_weights_and_log(*folders: Path, num_iterations: int = 3) -> list[dict[str, float]]:
    """Require that two runs left the same bits; returns their metrics without times."""
    for name in ("model", "model_ema"):
        first, second = ((folder / name / "model.safetensors").read_bytes() for folder in folders)
        assert first == second
    logs = []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(1, num_iterations + 1)]
        logs.append([{k: v for k, v in line.items() if "second" not in k and k not in WORK} for line in lines])
    assert logs[0] == logs[1]
    return logs[0]


def test_a_killed_run_with_teachers_ends_like_an_uninterrupted_run(
    run: Callable[..., None], teachers: tuple[Path, ...], tmp_path: Path
) -> None:
    """Also in another memory mode, in which teachers are sharded."""
    kinds = zip(teachers, ("token", "reward"), strict=True)
    changes = {"teachers": [{"model": str(folder), "kind": kind} for folder, kind in kinds], "score_coef": 0.5}
    run(tmp_path / "whole", **changes)
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, memory="balanced", **changes)
    run(tmp_path / "killed", **changes)
    log = same_weights_and_log(tmp_path / "whole", tmp_path / "killed")
    assert all({"teacher_kl_nats/1", "teacher_kl_nats/2", "score"} <= line.keys() for line in log)


def cut_the_policy(checkpoint: Path) -> None:
    (path,) = (checkpoint / "policy").iterdir()
    path.write_bytes(path.read_bytes()[:-3])


def test_damaged_checkpoints_are_passed_over_aloud_and_never_for_nothing(
    run: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ppo_2"
    run(folder)
    assert "ppo_2: starts from iteration 0 of 3 (no checkpoint yet)" in caplog.text
    weights = (folder / "model" / "model.safetensors").read_bytes()
    cut_the_policy(folder / "checkpoints" / "step-000003")
    run(folder)
    assert "ppo_2: checkpoint step-000003 is damaged, so it is skipped: files changed" in caplog.text
    assert "policy/rank-00000.safetensors" in caplog.text
    assert "ppo_2: resumes from iteration 2 of 3 (checkpoints/step-000002)" in caplog.text
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    for name in ("step-000002", "step-000003"):
        cut_the_policy(folder / "checkpoints" / name)
    with pytest.raises(ValueError, match=r"every checkpoint of ppo_2 is damaged .*--from ppo_2"):
        run(folder)


def test_policies_along_the_way_are_kept(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "killed", make_mortal, keep_policies_every=1)
    assert sorted(path.name for path in (tmp_path / "killed" / "policies").iterdir()) == ["000001", "000002"]
    (tmp_path / "killed" / "policies" / ".writing-000003").mkdir()  # what a kill in the middle of a write leaves behind
    run(tmp_path / "killed", keep_policies_every=1)
    monkeypatch.setattr(loop, "followed_rows", lambda *_: ())  # what is only read changes no bit
    run(tmp_path / "whole", keep_policies_every=2)
    assert '"followed"' not in (tmp_path / "whole" / "samples.jsonl").read_text()
    assert [path.name for path in (tmp_path / "whole" / "policies").iterdir()] == ["000002"]
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("killed/policies/000001", "killed/policies/000002", "killed/policies/000003", "killed/model")
    }
    assert weights["killed/policies/000003"] == weights["killed/model"]
    assert len(set(weights.values())) == 3
    kept = tmp_path / "whole" / "policies" / "000002"
    assert (kept / "model.safetensors").read_bytes() == weights["killed/policies/000002"]
    assert Tokenizer.load(kept) == Tokenizer.load(tmp_path / "whole" / "model")


def test_training_moved_the_weights_and_the_average_lags(
    run: Callable[..., None], models: InitialModels, tmp_path: Path
) -> None:
    run(tmp_path)
    name = "model.embed_tokens.weight"
    start, last, average = (
        load_file(folder / "model.safetensors")[name]
        for folder in (models.sft, tmp_path / "model", tmp_path / "model_ema")
    )
    assert 0 < float((average - start).norm()) < float((last - start).norm())


def test_a_finished_run_that_lost_its_model_writes_it_again(run: Callable[..., None], tmp_path: Path) -> None:
    run(tmp_path)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "model" / "model.safetensors").unlink()
    run(tmp_path)  # killed after the last checkpoint, before the export
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ((0.5,), r"^0 of 1 samples of the initial policy have no finite score; .* two scores are needed\.$"),
        ((0.5, nan, 1.0), r"^1 of 3 samples .* allows 0%, and .* needed\. The first: no answer$"),
    ],
)
def test_too_few_scores_are_refused_with_a_reason(
    scores: tuple[float, ...], said: str, model_folder: Path, ppo_config: Callable[..., PPOConfig], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def sampled(*_: Any, **__: Any) -> list[Sample]:
        (tmp_path / "samples" / "scale").mkdir(parents=True)
        return [
            Sample(str(n), 0, "Yes.", 2, True, 0.0, score, "no answer" if isnan(score) else "")
            for n, score in enumerate(scores)
        ]

    monkeypatch.setattr(stage, "sample_everywhere", sampled)
    run = SimpleNamespace(
        seed=1, folder=tmp_path, engine=EngineConfig(precision="fp32"), workers=lambda: SimpleNamespace(num_workers=1)
    )
    config = ppo_config(max_failed_share=0.0)
    with pytest.raises(ValueError, match=said):
        stage._measured_scale(run, model_folder, model_folder, (), config)  # type: ignore[arg-type]
    assert not (tmp_path / "samples" / "scale").exists()  # the next attempt scores again
