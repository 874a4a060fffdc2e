"""Passes that are kept for the first update: the same bits as computing them twice, fewer passes, and when none is."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppo.controller
import ppo.kept_passes
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.kept_passes import NOT_REPEATED, Repeated
from ppo.learner import Learner
from ppo.rank import InitialModels
from ppo.rollout import PolicyBatch, Rollout
from tests.models import full_weights
from tests.ppo.one_rank import OneRank
from training.config import BatchConfig, EngineConfig
from training.packing import stream_rows
from training.recording import MAX_RECORDINGS

Start = Callable[..., OneRank]
NUM_ITERATIONS = 3


@pytest.fixture
def start(models: InitialModels, ppo_config: Callable[..., PPOConfig]) -> Iterator[Start]:
    """As in conftest.py, with settings of the engine."""
    workers: list[OneRank] = []

    def build(engine: dict[str, Any] | None = None, **changes: object) -> OneRank:
        settings = EngineConfig.model_validate({"precision": "fp32", "trackers": (), **(engine or {})})
        workers.append(OneRank(ppo_config(**changes), settings, models))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


@dataclass(frozen=True)
class Result:
    weights: dict[str, Tensor]  # of policy and value function
    metrics: list[dict[str, float]]  # of each iteration
    passes: list[Counter[str]]  # likewise; as `counted`


@pytest.fixture
def run(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs iterations; with `repeated_every=1`, none keeps passes."""

    def build(worker: OneRank, repeated_every: int = 16) -> Result:
        monkeypatch.setattr(ppo.controller, "CHECK_RATIO_EVERY", repeated_every)
        stream = worker.models.pretraining
        assert stream is not None
        num_rows = len(stream_rows(stream.path, stream.seq_len))
        controller = PPOController(
            worker.config, worker.roles, prompts, worker.models.scale, num_pretraining_rows=num_rows, seed=5
        )
        counts, metrics, passes = counted(worker), list[dict[str, float]](), list[Counter[str]]()
        for iteration in range(NUM_ITERATIONS):
            counts.clear()
            metrics.append(controller.step(iteration))
            passes.append(counts.copy())
        engines = worker.learner.engines
        weights = {f"{name}.{w}": t.clone() for name in engines for w, t in full_weights(engines[name]).items()}
        return Result(weights, metrics, passes)

    return build


def counted(worker: OneRank) -> Counter[str]:
    """Counts forward passes of the trained models from here on: "policy" those with gradients, "policy, measuring" the
    others, and so on.
    """
    found: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, _out: object) -> None:
            found[name if torch.is_grad_enabled() else f"{name}, measuring"] += 1

        return hook

    for name, engine in worker.learner.engines.items():
        engine.module.register_forward_hook(count(name))
    return found


def same_weights(one: Result, other: Result) -> bool:
    return all(torch.equal(one.weights[name], tensor) for name, tensor in other.weights.items())


NO_PTX: dict[str, object] = {"ptx": None}
ONE_UPDATE: dict[str, object] = {"minibatch": 16, "micro": 4, "num_epochs": 1, **NO_PTX}
NO_VALUE: dict[str, object] = {"advantage": {"kind": "group_mean", "samples_per_prompt": 4, "oversample": 1.5}}
SETTINGS: dict[str, dict[str, object]] = {
    "one update": ONE_UPDATE,
    "pretraining rows, several updates of one pass each, two epochs": {"minibatch": 4, "micro": 4, "num_epochs": 2},
    "bf16": {"minibatch": 8, "micro": 2, "engine": {"precision": "bf16"}, **NO_PTX},
    "bf16, pretraining rows": {"minibatch": 8, "micro": 2, "engine": {"precision": "bf16"}},
    "bf16, pretraining rows, adapters": {"minibatch": 8, "engine": {"precision": "bf16"}, "lora": {"rank": 3}},
    "adapters": {"minibatch": 8, "lora": {"rank": 3, "alpha": 6}},
    "frozen layers": {"minibatch": 8, "policy_optimizer": {"learning_rate": 1e-3, "trained_layers": 1, "eps": 1e-3}},
    "no value function, KL in the loss, oversampling": {**ONE_UPDATE, **NO_VALUE, "kl": {"kind": "loss"}},
}


# Between them: with and without adapters, bf16 and rows of pretraining.
SHORT = ("one update", "bf16, pretraining rows, adapters")


@pytest.mark.parametrize(
    "setting", [name if name in SHORT else pytest.param(name, marks=pytest.mark.nightly) for name in SETTINGS]
)
def test_the_results_are_the_same_bits(start: Start, run: Callable[..., Result], setting: str) -> None:
    found, expected = run(start(**SETTINGS[setting])), run(start(**SETTINGS[setting]), repeated_every=1)
    assert found.metrics == expected.metrics
    assert same_weights(found, expected)
    assert all(m["policy_gradient_norm"] > 1e-3 for m in found.metrics)
    assert found.passes[0] == expected.passes[0]
    for ours, theirs in zip(found.passes[1:], expected.passes[1:], strict=True):
        assert ours["policy"] == theirs["policy"]
        assert ours["policy, measuring"] < theirs["policy, measuring"]


def test_other_modes_of_memory_keep_nothing_and_give_the_same_bits(start: Start, run: Callable[..., Result]) -> None:
    fast, balanced = run(start(**ONE_UPDATE)), run(start(**ONE_UPDATE, memory="balanced"))
    assert fast.metrics == balanced.metrics
    assert same_weights(fast, balanced)
    assert balanced.passes[1]["policy, measuring"] == balanced.passes[1]["policy"]


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_first_update_computes_nothing_twice(
    start: Start, run: Callable[..., Result], num_minibatches: int
) -> None:
    """Responses are measured in the passes of the first epoch. The first update's passes serve both."""
    found = run(start(**{**ONE_UPDATE, "minibatch": 16 // num_minibatches, "micro": 2}))
    for iteration, counts in enumerate(found.passes):
        for name in ("policy", "value"):
            share = 1 if iteration == 0 else 1 - 1 / num_minibatches
            assert counts[name] >= 6
            assert counts[f"{name}, measuring"] == pytest.approx(share * counts[name], abs=num_minibatches - 1)


def test_passes_are_kept_while_there_is_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's first, then the value function's."""
    kept = start(**ONE_UPDATE).learner.kept
    repeated = Repeated(num_passes=4, padded_tokens=64, row_width=16, response_tokens=24)
    policy, value = (kept.pass_bytes(name, repeated) for name in ("policy", "value"))
    assert policy == value + 4 * 24 * 300  # the logits, in fp32
    monkeypatch.setattr(ppo.kept_passes, "KEPT_BYTES", 3 * policy + value)
    assert [kept.reserve(name, repeated) for name in ("policy", "value")] == [3, 1]
    assert kept.reserve("policy", NOT_REPEATED) == 0  # other measurements leave them where they are
    kept.take("policy")
    assert kept.reserve("value", repeated) == 4
    assert kept.reserve("policy", repeated) == 3 - -(-3 * value // policy)


def test_the_rest_is_computed_twice(start: Start, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, worker = run(start(**ONE_UPDATE), repeated_every=1), start(**ONE_UPDATE)
    repeated = Repeated(num_passes=4, padded_tokens=80, row_width=20, response_tokens=24)
    room = 2 * worker.learner.kept.pass_bytes("policy", repeated)
    monkeypatch.setattr(ppo.kept_passes, "KEPT_BYTES", room)
    found = run(worker)
    assert same_weights(found, expected)
    for counts in found.passes[1:]:
        assert 0 < counts["policy, measuring"] < counts["policy"]
        assert counts["value"] >= counts["value, measuring"] > 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"memory": "balanced"}, set()),
        ({"engine": {"checkpoint_activations": True}}, set()),
        ({"engine": {"precision": "bf16"}}, {"policy", "value"}),
        ({"ptx": {"coef": 0.3, "rows": 4}}, {"policy", "value"}),
        (NO_VALUE, {"policy"}),
    ],
)
def test_who_keeps_passes(start: Start, changes: dict[str, object], found: set[str]) -> None:
    worker = start(**{**ONE_UPDATE, **changes})
    assert worker.learner.kept.engines.keys() == found


def test_without_kernels_bf16_with_pretraining_rows_keeps_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo.kept_passes, "library", lambda: None)
    bf16, ptx = {"engine": {"precision": "bf16"}}, {"ptx": {"coef": 0.3, "rows": 4}}
    found = [{**ONE_UPDATE, **changes} for changes in ({**bf16, **ptx}, bf16, ptx)]
    assert [len(start(**changes).learner.kept.engines) for changes in found] == [0, 2, 2]


@pytest.mark.parametrize(
    ("device", "deterministic", "rows", "keeps"),
    [("cuda", False, 0, True), ("cuda", True, 0, False), ("cuda", False, 4, False), ("cpu", True, 0, True)],
)
def test_a_gpu_keeps_none_where_bits_would_depend_on_it(
    ppo_config: Callable[..., PPOConfig], device: str, deterministic: bool, rows: int, keeps: bool
) -> None:
    """With deterministic kernels, or with pretraining rows in bf16."""
    config = ppo_config(**{**ONE_UPDATE, "ptx": {"coef": 0.3, "rows": rows} if rows else None})
    engine = EngineConfig(precision="bf16", deterministic=deterministic)
    policy: Any = SimpleNamespace(runs_ahead=True, device=torch.device(device), config=engine)
    assert ppo.kept_passes.keeps_passes(config, policy) == keeps


def test_values_measured_in_passes_of_their_own_are_not_kept(start: Start, prompts: list[list[int]]) -> None:
    batch = {"batch_size": 16, "micro_batch_tokens": 60, "forward_tokens": 500}
    worker = start(num_epochs=1, **NO_PTX)
    worker.roles.learners.batch = BatchConfig.model_validate(batch)
    rollout, whole = worker.sample(prompts, range(16)), [torch.arange(16)]
    counts = counted(worker)
    worker.roles.start_forward_passes(rollout, whole, keeps=True)()
    assert (counts["policy, measuring"], counts["value, measuring"], counts["value"]) == (0, 1, 0)
    assert counts["policy"] > 1


def test_kept_passes_are_refused_for_other_responses_and_other_weights(start: Start, prompts: list[list[int]]) -> None:
    worker = start(**ONE_UPDATE)
    rollout, whole = worker.sample(prompts, range(16)), [torch.arange(16)]
    learners, mask_BR = worker.roles.learners, rollout.response_mask_BR
    none = torch.empty(0, dtype=torch.int64)

    def update(own: Rollout) -> None:
        ones_BR = torch.ones_like(own.behaviour_logprobs_BR)
        learners.update(
            Learner.update_policy, PolicyBatch(own, ones_BR, ones_BR, mask_BR, int(mask_BR.sum()), none, 0), 1e-3, 0
        )

    learners.start_policy_logprobs(rollout, whole, keeps=True)()
    other = worker.sample(prompts, range(16, 32))
    with pytest.raises(AssertionError, match="reads other responses than were measured first"):
        update(other)
    learners.start_policy_logprobs(rollout, whole, keeps=True)()
    with torch.no_grad():
        worker.learner.policy.module.decoder.blocks[0].mlp.down.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        update(rollout)


@pytest.mark.parametrize(
    "setting",
    [
        "no value function, KL in the loss, oversampling",
        pytest.param("adapters", marks=pytest.mark.long),
        pytest.param("one update", marks=pytest.mark.nightly),
    ],
)
def test_recorded_updates_keep_no_passes_and_give_the_same_numbers(
    start: Start, run: Callable[..., Result], setting: str
) -> None:
    """Responses, their tokens and pretraining rows are read from buffers, and padded (`training.recording`). Attention
    within sequences rounds otherwise here.
    """
    expected = run(start(**SETTINGS[setting]), repeated_every=1)
    worker = start(**{**SETTINGS[setting], "engine": {"record_micro_batches": True}})
    found = run(worker)
    assert found.passes == expected.passes
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-5)
    for engine in worker.learner.engines.values():
        assert engine._recorded is not None
        assert 1 <= engine._recorded.num_recordings <= MAX_RECORDINGS
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-3, atol=1e-5)
