"""PPO against a judge: criteria are logged, failures are counted by kind, an endpoint answers while ranks compute."""

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from files.rows import Row
from lm.tokenizer import Tokenizer
from lm.weights import read_config
from ppo.config import PPOConfig
from ppo.controller import Observers, PPOController
from ppo.rank import InitialModels, ScoreScale
from ppo.report import report
from ppo.rollout import Rollout
from ppo.scorer import Scorer
from reward.external import ExternalReward, Scored
from reward.judge import JudgeReward
from reward.verifiers import verifier
from stages.reports.run_folder import StageFolder
from tests.grading import write_judge
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig

ASKED = [[{"role": "user", "content": f"the cat sat {i}"}] for i in range(16)]
CRITERIA = {"kind": {"text": "kind?", "weight": 2.0}, "short": {"text": "short?"}, "seen": {"text": "?", "weight": 0}}
RUBRIC = {"criteria": CRITERIA, "template": "$prompt $response $criterion"}


@pytest.fixture
def judge(models: InitialModels, tmp_path: Path) -> Path:
    """A language model with more room than the policy, which answers with digits."""
    tokenizer = Tokenizer.load(models.sft)
    config = read_config(models.sft, "language")[0].model_copy(update={"max_position_embeddings": 128})
    return write_judge(tmp_path / "judge", config, tokenizer, seed=9)


def controller_of(
    config: PPOConfig,
    models: InitialModels,
    gold: Callable[[Rollout], torch.Tensor] | None = None,
    rows: Sequence[Row] = (),
) -> tuple[PPOController, OneRank]:
    reward = config.external_reward
    assert reward is not None
    own = replace(models, reward=reward, scale=ScoreScale(0.5, 0.1), pretraining=None)
    worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), own, ASKED, rows)
    prompts = [worker.tokenizer.encode_prompt(asked) for asked in ASKED]
    own_controller = PPOController(
        config, worker.roles, prompts, own.scale, num_pretraining_rows=0, seed=5, observers=Observers(gold=gold)
    )
    return own_controller, worker


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_local_judge_trains_a_policy_and_its_criteria_are_logged(
    judge: Path, models: InitialModels, ppo_config: Callable[..., PPOConfig], dropout: float
) -> None:
    reward = {"kind": "judge", "model": str(judge), "rubric": RUBRIC, "dropout": dropout}
    golds = torch.linspace(0, 1, 16)
    controller, worker = controller_of(ppo_config(ptx=None, reward=reward), models, lambda _rollout: golds)
    metrics = controller.step(0)
    assert metrics["failed_scores"] == 0
    assert 0 < metrics["score"] < 1
    if not dropout:
        mean = (2 * metrics["score/kind"] + metrics["score/short"]) / 3
        assert metrics["score"] == pytest.approx(mean, abs=1e-6)
        assert [metrics[f"failed/{name}"] for name in ("rubric", "kind", "short", "seen")] == [0.0] * 4
    else:  # what was left out is no failure
        assert {name for name in metrics if name.startswith("failed/")} == {"failed/rubric"}
        assert {"score/kind", "score/short", "score/seen"} <= metrics.keys()
    assert metrics["score"] == pytest.approx(metrics["score/rubric"])
    assert metrics["gold"] == pytest.approx(0.5)
    assert metrics["judge_minus_gold"] == pytest.approx(metrics["score"] - 0.5)
    worker.close()


def test_failures_are_masked_and_counted_by_kind(
    judge: Path, models: InitialModels, ppo_config: Callable[..., PPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"kind": "judge", "model": str(judge), "rubric": RUBRIC}
    config = ppo_config(ptx=None, reward=reward, max_failed_share=0.5)
    graded = JudgeReward._grades

    def failing(self: JudgeReward, questions: Any) -> list[Scored]:
        bad = {" 3 ": "unreadable", " 13 ": "unreadable", " 5 ": "endpoint"}
        kinds = [next((kind for part, kind in bad.items() if f"sat{part}" in q.text), "") for q in questions]
        found = graded(self, questions)
        return [Scored(math.nan, "no", kind) if kind else one for kind, one in zip(kinds, found, strict=True)]

    monkeypatch.setattr(JudgeReward, "_grades", failing)
    controller, worker = controller_of(config, models)
    metrics = controller.step(0)
    assert metrics["failed_scores"] == 3
    assert (metrics["failures/unreadable"], metrics["failures/endpoint"]) == (2, 1)
    assert controller.batch is not None
    assert not controller.batch.rewards_BR[~controller.batch.scored_BR.any(dim=1)].any()
    worker.close()


def test_attempts_to_forge_the_result_of_tests_are_counted_and_shown(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = {
        "assert f(3)": "import os; os._exit(0)",
        "assert f(5)": "import os; os.closerange(3, 9)",
        "assert f(7)": "f = bool",
    }
    written = verifier.score_code
    monkeypatch.setattr(
        verifier, "score_code", lambda response, tests, limits: written(code.get(tests[0], response), tests, limits)
    )
    config = ppo_config(ptx=None, reward={"kind": "verifier"})
    rows = [{"tests": f"assert f({number})"} for number in range(16)]
    controller, worker = controller_of(config, models, rows=rows)
    metrics = controller.step(0)
    assert metrics["failures/forged"] == 2
    assert metrics["failed_scores"] == 0
    assert metrics["score"] == pytest.approx(1 / 16)
    worker.close()

    page = str(report(StageFolder("ppo", Path("run"), {}, [{"step": 1, **metrics}, {"step": 2, **metrics}], {})))
    assert "Forged results of tests" in page
    assert "No score: forged" not in page


def test_ranks_compute_while_an_endpoint_answers(
    models: InitialModels, ppo_config: Callable[..., PPOConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers come only after the policy's log-probs were computed, so scoring them first would never end."""
    config = ppo_config(ptx=None, reward={"kind": "judge", "model": "http://h/v1#m", "rubric": RUBRIC})
    computed = threading.Event()

    def columns(_self: ExternalReward, _asked: Any, responses: Any, *_: Any) -> list[list[Scored]]:
        assert computed.wait(60)
        return [[Scored(len(text) / 50) for text in responses]] * 4

    monkeypatch.setattr(JudgeReward, "columns", columns)
    controller, worker = controller_of(config, models)
    compute = Scorer.reference_logprobs

    def reference_logprobs(self: Scorer, *arguments: Any) -> torch.Tensor:
        computed.set()
        return compute(self, *arguments)

    monkeypatch.setattr(Scorer, "reference_logprobs", reference_logprobs)
    assert controller.step(0)["failed_scores"] == 0
    worker.close()


def test_what_a_judge_needs(ppo_config: Callable[..., PPOConfig], judge: Path) -> None:
    reward = {"kind": "judge", "model": str(judge), "rubric": RUBRIC}
    with pytest.raises(ValueError, match=r"memory 'balanced' moves .* the judge .*judge stays on it; \"fast\" was"):
        ppo_config(reward=reward, memory="balanced")
    source = {"kind": "sum", "sources": {"j": reward}, "objective_weights": {"j": 1.0}}
    with pytest.raises(ValueError, match=r"memory 'small' moves frozen models"):
        ppo_config(reward=source, memory="small")
    remote = {**reward, "model": "https://h/v1#m"}
    assert ppo_config(reward=remote, memory="small").local_judges == ()
    written = json.loads(ppo_config(reward=reward).model_dump_json())
    assert PPOConfig.model_validate(written) == ppo_config(reward=reward)
