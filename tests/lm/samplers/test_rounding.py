"""The limit that rounding sets between sampler and learner: a deep model in bf16 is within it, faults are not."""

from pathlib import Path

import pytest
import torch

from benchmarks.sampler_rounding import agreement, prompts_of
from lm.model import LanguageModel
from lm.samplers.engine import max_difference
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import Trial, verify_sampler, weights_of, with_exchanged, with_weights
from lm.source import load
from lm.tokenizer import Tokenizer
from lm.weights import ModelFolder
from tests.lm.samplers.faults import faults_found


# Mean differences of SmolLM2-135M's first layers in bf16, as docs/samplers.md has them.
@pytest.mark.parametrize(("num_layers", "measured"), [(2, 0.0221), (8, 0.0164), (16, 0.0299), (30, 0.0435)])
def test_the_limit_is_over_twice_what_a_trained_model_needs(num_layers: int, measured: float) -> None:
    assert 2 * measured < max_difference("bf16", num_layers) < 5 * measured


def test_the_limit_by_hand() -> None:
    assert max_difference("bf16", 28) == pytest.approx(4.5 / 256 * 6)
    assert max_difference("fp32", 1) == pytest.approx(3e-4)


@torch.no_grad()
def test_thirty_layers_in_bf16_are_well_within_it_and_faults_beyond(deep: Path) -> None:
    prompts, learner = prompts_of(Tokenizer.load(deep)), load(ModelFolder(deep, LanguageModel)).eval()
    sampling, limit = load(ModelFolder(deep, LanguageModel)).to(torch.bfloat16).eval(), max_difference("bf16", 30)
    found = agreement(prompts, learner, sampling)
    assert found.holds(limit)
    assert 0.001 < found.difference < limit / 2
    assert found.worst_response < limit
    exchanged = with_weights(sampling, with_exchanged(weights_of(sampling), 0, 1))
    assert not agreement(prompts, learner, exchanged).holds(limit)
    assert not agreement(prompts, learner, sampling, 0.7).holds(limit)


@pytest.mark.nightly
def test_a_deep_model_passes_the_test_of_samplers_and_every_fault_is_named(deep: Path) -> None:
    found = [*verify_sampler(HeedSampler.load, deep, precision="bf16")]
    assert all(check.passed for check in found), found
    for name, expected, message in faults_found(HeedSampler.load(deep, "bf16"), Trial(deep, "bf16")):
        assert message.startswith(expected), f"{name}: {message}"
