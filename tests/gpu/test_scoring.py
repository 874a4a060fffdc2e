"""Scores, samples and log-probs of model folders are computed on the GPU, and are the CPU's to bf16's rounding."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lm.model import LanguageModel, ScalarModel
from lm.sampling import LOGITS_AT_ONCE
from lm.sequence_logprobs import logits_function, predicting_states, sequence_logprobs
from lm.source import RandomInit, load, load_for_inference
from lm.tokenizer import Tokenizer
from lm.weights import save_model
from reward.metrics import scores_on_all_ranks
from reward.objective import AuxiliaryParameters, LearnerSource
from reward.sampling import Sampler, SamplingSpec
from reward.scoring import RewardModel, head_scores
from tests.gpu.models import prompts, shape
from training.config import EngineConfig, OptimizerConfig
from training.data import Prompt
from training.engine import Engine

TEXTS = ("The quick brown fox jumps over the lazy dog.", "A bird in the hand is worth two in the bush.")
SEQUENCES = prompts(9, 60)
NEAR = 0.05  # bf16 has 8 bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy` and `reward`."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(TEXTS, 280, "chat")
    for name, kind in (("policy", LanguageModel), ("reward", ScalarModel)):
        model = load(RandomInit(partial(kind, shape()), seed=0))
        if isinstance(model, ScalarModel):
            model.bias.fill_(1000.1)  # bf16 would make 1000 of it
        save_model(folder / name, model, model.state_dict(), tokenizer)
    return folder


def test_a_reward_model_scores_on_the_gpu_in_bf16(folder: Path) -> None:
    judge = RewardModel.load(folder / "reward")
    assert {(p.device.type, p.dtype) for p in judge.network.parameters()} == {("cuda", torch.bfloat16)}
    expected = load(RandomInit(partial(ScalarModel, shape()), seed=0)).eval()
    expected_BO = head_scores(expected, SEQUENCES) + 1000.1
    assert torch.tensor(judge.score_sequences(SEQUENCES)) == pytest.approx(expected_BO[:, 0], abs=NEAR)


def test_the_stage_scores_with_the_engines_model() -> None:
    source = RandomInit(partial(ScalarModel, shape()), seed=0)
    config = EngineConfig.model_validate({"precision": "bf16", "trackers": []})
    optimizer = OptimizerConfig(learning_rate=1e-3)
    engine = Engine(LearnerSource(source, AuxiliaryParameters()), optimizer, config, world_size=1, micro_batch=1)
    found_BO = scores_on_all_ranks(engine, SEQUENCES)
    engine.close()
    expected_BO = head_scores(load(source).eval(), SEQUENCES)
    assert found_BO.device.type == "cpu"
    torch.testing.assert_close(found_BO, expected_BO, atol=NEAR, rtol=0)


def test_a_policy_is_sampled_and_measured_on_the_gpu(folder: Path) -> None:
    asked = [Prompt(prompt_id=t, messages=({"role": "user", "content": t},), kind="") for t in ("dog", "the lazy fox")]
    policy, reward = str(folder / "policy"), str(folder / "reward")
    sampler = Sampler(SamplingSpec(folder / "policy", 3, 12, 1.0, 5, "bf16", reference=policy, reward=reward))
    samples = sampler.sample(asked)
    assert [(s.prompt_id, s.index) for s in samples] == [(p.prompt_id, i) for p in asked for i in range(3)]
    assert {s.log_ratio for s in samples} == {0.0}
    assert all(990 < s.score < 1010 and not s.failure for s in samples)
    assert sampler.sample(asked) == samples
    unmeasured = Sampler(replace(sampler.spec, reference="", reward="")).sample(asked[1:])
    assert [s.response for s in unmeasured] == [s.response for s in samples[3:]]


def test_a_closed_sampler_holds_nothing(folder: Path) -> None:
    asked = [Prompt(prompt_id="p", messages=({"role": "user", "content": "dog"},), kind="")]
    spec = SamplingSpec(
        folder / "policy", 3, 12, 1.0, 5, "bf16", reference=str(folder / "policy"), reward=str(folder / "reward")
    )
    held = []
    for _ in range(3):
        sampler = Sampler(spec)
        sampler.sample(asked)
        sampler.close()
        held.append(torch.cuda.memory_allocated())
    assert held[2] <= held[0] + 2**16, f"bytes held after each: {held}"


def test_log_probs_have_logits_in_fp32_for_a_chunk_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 model differs from the fp32 model of the same rounded weights by its hidden states alone."""
    source = RandomInit(partial(LanguageModel, shape()), seed=0)
    queries, responses = [tokens[:1] for tokens in SEQUENCES], [tokens[1:] for tokens in SEQUENCES]
    found = sequence_logprobs(load_for_inference(source), queries, responses, 0.7)
    model = load_for_inference(source)
    states_CD = predicting_states(model, [(SEQUENCES[0][:1], SEQUENCES[0][1:])])
    assert (states_CD.dtype, logits_function(model)(states_CD).dtype) == (torch.bfloat16, torch.float32)
    exact = load(source, dtype=torch.bfloat16).float()
    expected = sequence_logprobs(exact, queries, responses, 0.7)
    per_token = [(a - b) / len(r) for a, b, r in zip(found, expected, responses, strict=True)]
    assert per_token == pytest.approx([0.0] * len(responses), abs=NEAR)
    monkeypatch.setitem(LOGITS_AT_ONCE, "cuda", 7 * 512)  # seven positions
    assert sequence_logprobs(load_for_inference(source), queries, responses, 0.7) == pytest.approx(found, abs=1e-3)
