"""Passes over packed rows: the same log-probabilities as in the updates, and no result depends on the token budget."""

from collections.abc import Callable, Iterator

import pytest
import torch

from ppo.config import PPOConfig
from ppo.learner import Learner
from ppo.rank import InitialModels
from ppo.rollout import PolicyBatch, Rollout
from tests.ppo.one_rank import OneRank
from training.config import BatchConfig, EngineConfig
from training.packing import pass_tokens

Start = Callable[..., OneRank]


@pytest.fixture
def start(models: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Start]:
    workers: list[OneRank] = []

    def build(batch: BatchConfig, precision: str = "fp32", **changes: object) -> OneRank:
        config = ppo_config(**changes).model_copy(update={"minibatch": batch})
        engine = EngineConfig.model_validate({"precision": precision, "trackers": ()})
        workers.append(OneRank(config, engine, models))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [{"micro_batch_tokens": 64, "forward_tokens": 200}, {"micro_batch_size": 2}])
def test_the_first_ratio_is_exactly_1(
    start: Start, prompts: list[list[int]], batch: dict[str, int], precision: str
) -> None:
    """Each minibatch is read in the rows in which its log-probabilities were measured."""
    worker = start(BatchConfig(batch_size=8, **batch), precision)
    rollout = worker.sample(prompts, range(16))
    minibatches = torch.randperm(16, generator=torch.Generator().manual_seed(3)).split(8)
    learners, scorers = worker.roles.learners, worker.roles.scorers
    logprobs_BR = learners.start_policy_logprobs(rollout, minibatches)()
    assert torch.equal(scorers.start_reference_logprobs(rollout, minibatches)(), logprobs_BR)  # the KL begins at 0
    mask_BR, none = rollout.response_mask_BR, torch.empty(0, dtype=torch.int64)
    for rows in minibatches:
        minibatch = PolicyBatch(rollout.rows(rows), logprobs_BR[rows], logprobs_BR[rows], mask_BR[rows], 40, none, 0)
        assert len(minibatch.shares(learners.shares(minibatch.rollout))[0].pass_sizes) > 1
        metrics = learners.update(Learner.update_policy, minibatch, 0.0, 0)  # the rate is 0: no weight moves
        assert (metrics["ratio_error"], metrics["approx_kl"]) == (0.0, 0.0)


def test_no_measurement_depends_on_the_budget(start: Start, prompts: list[list[int]]) -> None:
    def measured(batch: BatchConfig) -> tuple[Rollout, list[torch.Tensor]]:
        worker = start(batch)
        rollout = worker.sample(prompts, range(16))
        found = [worker.scores(rollout), worker.values(rollout)]
        return rollout, [*found, worker.policy_logprobs(rollout), worker.reference_logprobs(rollout)]

    rollout, one_by_one = measured(BatchConfig(batch_size=8, micro_batch_tokens=1))
    for batch in ({"micro_batch_size": 8}, {"micro_batch_tokens": 100}, {"micro_batch_tokens": 5000}):
        again, found = measured(BatchConfig(batch_size=8, **batch))
        assert torch.equal(rollout.tokens_BT, again.tokens_BT)
        torch.testing.assert_close(found, one_by_one, atol=2e-6, rtol=1e-5)


def test_a_pass_is_counted_in_sequences_or_in_tokens() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size is 4 and micro_batch_tokens is 64; exactly one of them"):
        BatchConfig(batch_size=8, micro_batch_size=4, micro_batch_tokens=64)
    with pytest.raises(ValueError, match="micro_batch_size is 0 and micro_batch_tokens is 0; exactly one of them"):
        BatchConfig(batch_size=8)
    units = [[30], [50], [7]]
    assert pass_tokens(BatchConfig(batch_size=8, micro_batch_size=4), units, with_gradients=True) == 4 * 52
    batch = BatchConfig(batch_size=8, micro_batch_tokens=64, forward_tokens=500)
    assert [pass_tokens(batch, units, with_gradients=with_gradients) for with_gradients in (True, False)] == [64, 500]
    with pytest.raises(ValueError, match="batch_size over ranks: 8 is not a multiple of 3"):
        batch.num_micro_batches(3)
