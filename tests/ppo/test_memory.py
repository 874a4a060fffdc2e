"""`ppo.memory`: what is on the device in each phase, and that the results are the same bits in every mode."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppo.controller
from lm.layers import MLP
from ppo.config import PPOConfig
from ppo.controller import PPOController
from ppo.rank import InitialModels
from ppo.scorer import ShardedModel
from tests.models import full_weights
from tests.ppo.one_rank import OneRank
from tests.ppo.phases import PHASES
from training.config import EngineConfig
from training.distributed import freeze_imports
from training.optimizers import Offload
from training.packing import stream_rows


def _nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def hosts(offload: Offload) -> list[Tensor]:
    """Returns all buffers of an offload in CPU memory, in use or kept for reuse."""
    spare = [host for of_size in offload._spare.values() for host in of_size]
    return [host for _, host in offload._away] + spare


def _live_bytes() -> dict[int, int]:
    """Bytes of every tensor storage of this process, by address."""
    tensors = [
        found
        for found in gc.get_objects()
        if isinstance(found, Tensor) and found.layout == torch.strided and not found.is_meta
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class Measured:
    """One rank, with the most bytes of the device that each phase has in use whenever an MLP has computed.

    What is kept for other phases in CPU memory is not counted; on this machine it lies in the same memory.
    """

    def __init__(self, worker: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.peaks, self._phase = worker, defaultdict[str, int](int), ""
        for role in (worker.learner, worker.generator, worker.scorer):
            for name in PHASES:
                if hasattr(role, name):
                    monkeypatch.setattr(role, name, self._in_phase(PHASES[name], getattr(role, name)))

    def _in_phase(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if phase == "sample":  # the last iteration is compared: others have responses of other lengths
                self.peaks.clear()
            self._phase = phase
            return method(*args)

        return run

    def look(self, module: nn.Module, _args: object, _out: object) -> None:
        if isinstance(module, MLP):
            live = _live_bytes()
            for address in self._kept_by_the_host():
                live.pop(address, None)
            self.peaks[self._phase] = max(self.peaks[self._phase], sum(live.values()))

    def _kept_by_the_host(self) -> Iterator[int]:
        scorer, learner = self.worker.scorer, self.worker.learner
        for model in (scorer.reference, scorer.network):
            if isinstance(model, ShardedModel):
                yield from (bundle.share.data_ptr() for bundle in model.bundles)
        for engine in (learner.policy, learner.value):
            yield from (host.data_ptr() for host in hosts(engine.offload))
        if learner.config.memory != "fast":
            yield from (shard.storage.data_ptr() for shard in learner.average.shards.values())


def _run(worker: OneRank, prompts: list[list[int]], num_iterations: int) -> list[dict[str, float]]:
    models = worker.models
    assert models.pretraining is not None
    num_rows = len(stream_rows(models.pretraining.path, models.pretraining.seq_len))
    controller = PPOController(
        worker.config, worker.roles, prompts, models.scale, num_pretraining_rows=num_rows, seed=5
    )
    return [controller.step(iteration) for iteration in range(num_iterations)]


@dataclass(frozen=True)
class Outcome:
    metrics: list[dict[str, float]]
    weights: dict[str, bytes]
    peaks: dict[str, int]  # bytes by phase, without those that were there before
    sizes: dict[str, list[int]]  # bytes of each model, or of its parts


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def outcomes(
    models: InitialModels,
    prompts: list[list[int]],
    ppo_config: Callable[..., PPOConfig],
    request: pytest.FixtureRequest,
) -> dict[str, Outcome]:
    """Runs two iterations on one rank in every mode."""
    engine = EngineConfig.model_validate({"precision": request.param, "trackers": ()})
    found = {}
    freeze_imports()  # else the first engine does, and `gc.get_objects` leaves out the models made before it
    for memory in ("fast", "balanced", "small"):
        gc.collect()
        before = sum(_live_bytes().values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo.controller, "CHECK_RATIO_EVERY", 1)  # no passes are kept, which only "fast" does
            worker = OneRank(ppo_config(memory=memory, num_epochs=1), engine, models)
            measured = Measured(worker, patch)
            hook = nn.modules.module.register_module_forward_hook(measured.look)
            metrics = _run(worker, prompts, 2)
            hook.remove()
        weights = {name: w.numpy().tobytes() for name, w in full_weights(worker.learner.policy).items()}
        peaks = {phase: peak - before for phase, peak in measured.peaks.items()}
        found[memory] = Outcome(metrics, weights, peaks, _sizes(worker))
        worker.close()
        del worker, measured, hook
    return found


def _sizes(worker: OneRank) -> dict[str, list[int]]:
    trained = [p for engine in (worker.learner.policy, worker.learner.value) for p in engine.module.parameters()]
    sizes = {"generator": [_nbytes(worker.generator.sampler.policy)], "moments": [8 * p.numel() for p in trained]}
    sizes["average"] = [shard.storage.nbytes for shard in worker.learner.average.shards.values()]
    for name, model in {"reference": worker.scorer.reference, "reward": worker.scorer.network}.items():
        is_sharded = isinstance(model, ShardedModel)
        sizes[name] = [b.share.nbytes for b in model.bundles] if is_sharded else [_nbytes(model.module)]
    return sizes


def test_every_mode_gives_the_same_bits(outcomes: dict[str, Outcome]) -> None:
    fast = outcomes["fast"]
    for outcome in outcomes.values():
        assert outcome.metrics == fast.metrics
        assert outcome.weights == fast.weights


def test_each_phase_has_on_the_device_what_it_needs(outcomes: dict[str, Outcome]) -> None:
    fast, balanced, small = (outcomes[memory] for memory in ("fast", "balanced", "small"))
    held = {name: sum(parts) for name, parts in fast.sizes.items()}
    frozen = held["reference"] + held["reward"] + held["average"]
    models = held["generator"] + frozen
    saved = {phase: fast.peaks[phase] - peak for phase, peak in balanced.peaks.items()}
    assert saved == {
        "sample": frozen,
        "score": models - sum(balanced.sizes["reward"]),
        "reference": models - sum(balanced.sizes["reference"]),
        "measure": models,
        "learn": models,
    }

    saved = {phase: fast.peaks[phase] - peak for phase, peak in small.peaks.items()}
    assert saved.pop("learn") >= models  # while the policy learns, the value function's moments are away
    (rest_of_reward, *reward_layers), (rest_of_reference, *reference_layers) = (
        small.sizes[name] for name in ("reward", "reference")
    )
    assert saved == {
        "sample": frozen + held["moments"],
        "score": models - rest_of_reward - max(reward_layers) + held["moments"],
        "reference": models - rest_of_reference - max(reference_layers) + held["moments"],
        "measure": models + held["moments"],
    }


def test_a_checkpoint_is_loaded_and_written_while_optimizer_states_are_away(
    models: InitialModels, prompts: list[list[int]], ppo_config: Callable[..., PPOConfig], tmp_path: Path
) -> None:
    engine = EngineConfig(precision="fp32", trackers=())
    worker = OneRank(ppo_config(memory="small", num_epochs=1), engine, models)
    _run(worker, prompts, 1)
    for name in ("first", "second"):
        worker.roles.learners.make_room()
        assert sum(host.nbytes for host in hosts(worker.learner.policy.offload)) > 0
        worker.roles.learners.save(tmp_path / name, 1, {}, {})
        worker.roles.learners.finish_saving()
        worker.roles.learners.make_room()
        worker.roles.load(tmp_path / name / "step-000001")
    worker.close()
    first, second = (tmp_path / name / "step-000001" for name in ("first", "second"))
    files = [path.relative_to(first) for path in first.rglob("*.safetensors")]
    assert len(files) >= 3
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
