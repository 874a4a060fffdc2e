"""The private parts of DeepSpeed, Accelerate and PyTorch that Heed uses exist and have not changed their meaning.

Each check is named after the attribute that it needs, so a failure says which one a new release removed or changed.
This file is also the ranks' program: `python test_internals.py FOLDER`. Two ranks run all checks; the tests read what
each rank found.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lm.config import ModelConfig
from lm.model import LanguageModel
from lm.source import RandomInit
from tests.models import full_weights
from training import internals
from training.checkpoint import ParamShard
from training.config import EngineConfig, OptimizerConfig
from training.distributed import zero_shards
from training.engine import Engine

# Odd sizes: with two ranks every parameter is split, and under ZeRO-3 its last part is padded.
CONFIG = ModelConfig(
    vocab_size=33, max_position_embeddings=8, hidden_size=10, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, intermediate_size=7,
)  # fmt: skip
NUM_RANKS = 2
RATE = 0.125


def start_engine(zero_stage: int) -> Engine[LanguageModel]:
    """In bf16, so that master weights differ from the weights of a pass."""
    config = EngineConfig.model_validate({"precision": "bf16", "zero_stage": zero_stage, "trackers": ()})
    optimizer = OptimizerConfig(learning_rate=RATE, schedule="constant", max_grad_norm=1e-3)
    return Engine(
        RandomInit(lambda: LanguageModel(CONFIG), seed=3), optimizer, config, world_size=NUM_RANKS, micro_batch=1
    )


def accumulate(engine: Engine[LanguageModel], num_micro_batches: int = 1) -> None:
    def loss(tokens_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return engine.model(tokens_BT).float().square().mean(), {}

    engine.accumulate([torch.tensor([[1, 2, 3]])] * num_micro_batches, loss)


# --- Accelerate and DDP, on two ranks without DeepSpeed ---------------------------------------------------------------


def check_gradient_state_set_sync_gradients(engine: Engine[LanguageModel]) -> None:
    accelerator = engine._accelerator
    for is_on in (False, True):
        internals.set_gradient_sync(accelerator, is_on)
        assert accelerator.sync_gradients == is_on


def check_ddp_set_params_and_buffers_to_ignore(engine: Engine[LanguageModel]) -> None:
    """A buffer that differs between ranks still differs after a forward pass."""

    class WithBuffer(nn.Module):
        rank: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("rank", torch.tensor(float(engine.rank)))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.rank

    left_alone, sent = WithBuffer(), WithBuffer()
    internals.do_not_broadcast_buffers(left_alone)
    for module in (left_alone, sent):
        with internals.without_dynamo():
            parallel = DistributedDataParallel(module)
        parallel(torch.zeros(1, 2)).sum().backward()
        parallel(torch.zeros(1, 2))
    assert float(sent.rank) == 0, "DDP no longer sends buffers by default: the function may have nothing left to do"
    assert float(left_alone.rank) == engine.rank


def check_accelerator_state_shared_state_and_reset_state(_: Engine[LanguageModel]) -> None:
    assert internals.is_accelerate_initialised()
    internals.reset_accelerate()
    assert not internals.is_accelerate_initialised()
    assert torch.distributed.is_initialized(), "the process group is gone with the settings"
    Accelerator(cpu=True)
    assert internals.is_accelerate_initialised()


def check_ddp_reducer_prepare_for_backward(engine: Engine[LanguageModel]) -> None:
    """Ranks' gradients of a pass that was run in `no_sync` are averaged, also if it is the only one."""
    module = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    with internals.without_dynamo():
        parallel = DistributedDataParallel(module)
    for is_expected in (False, True, True):
        module.zero_grad()
        with parallel.no_sync():
            outputs = [parallel(torch.full((1, 2), float(engine.rank))) for _ in range(2)]
        outputs[0].sum().backward()
        if is_expected:
            internals.expect_gradients(parallel)
        outputs[1].sum().backward()
        assert module.weight.grad is not None
        assert float(module.weight.grad.mean()) == (2 * 0.5 if is_expected else 2.0 * engine.rank)


def check_the_types_name_of_a_model_without_deepspeed(engine: Engine[LanguageModel]) -> None:
    assert not internals.is_deepspeed_engine(engine.model)


def check_disable_dynamo_and_get_optimize_ddp_mode_import_nothing(engine: Engine[LanguageModel]) -> None:
    """Also not DeepSpeed's Muon and `torch.compiler.disable`, nor saving the state and closing of earlier engines."""
    accumulate(engine, 2)
    engine.step()
    assert engine.state()
    assert "torch._dynamo" not in sys.modules


# --- DeepSpeed, at ZeRO 1, 2 and 3 ------------------------------------------------------------------------------------


def check_the_types_name_deepspeed_engine(engine: Engine[LanguageModel]) -> None:
    assert internals.is_deepspeed_engine(engine.model)


def check_data_parallel_group_set_timeout(engine: Engine[LanguageModel]) -> None:
    """tests/training/test_deadline.py shows that the time limit takes effect."""
    internals.set_collective_timeout(engine.model, timedelta(seconds=77))
    group = engine.model.data_parallel_group
    assert group._get_backend(engine.device).options._timeout == timedelta(seconds=77)


def check_deepspeed_plugin_deepspeed_config(engine: Engine[LanguageModel]) -> None:
    """The next model that is prepared clips at the new value."""
    assert engine.model.gradient_clipping() == engine.optimizer_config.max_grad_norm
    internals.update_deepspeed_config(engine._accelerator, {"gradient_clipping": 0.25})
    assert engine._accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] == 0.25


def check_get_global_grad_norm(engine: Engine[LanguageModel]) -> None:
    """The norm before clipping, of the gradient averaged over ranks, which here equals the gradient of each rank."""
    accumulate(engine)
    norm = internals.gradient_norm(engine.model)
    engine.step()
    assert norm > engine.optimizer_config.max_grad_norm
    alone = RandomInit(lambda: LanguageModel(CONFIG), seed=3).build()
    with torch.no_grad():
        for name, weight in full_weights(engine).items():
            alone.get_parameter(name).copy_(weight)
    # The step was tiny, so the gradient is nearly unchanged: fp32 here, bf16 there.
    alone(torch.tensor([[1, 2, 3]])).square().mean().backward()
    expected = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm() * NUM_RANKS
    assert 0.5 < norm / float(expected) < 2


def check_get_global_grad_norm_of_a_skipped_step(engine: Engine[LanguageModel]) -> None:
    engine.accumulate([None], lambda _: (next(engine.module.parameters()).float().sum() * torch.nan, {}))
    assert not torch.isfinite(torch.tensor(internals.gradient_norm(engine.model)))


def shards_of(engine: Engine[LanguageModel]) -> list[ParamShard]:
    return zero_shards(engine.module, engine.model.optimizer, engine.config.zero_stage, engine.rank)


def check_shards_are_all_fp32_weights_once(engine: Engine[LanguageModel]) -> None:
    whole = full_weights(engine)
    own = {shard.name: (shard.offset, shard.view(shard.storage).tolist()) for shard in shards_of(engine)}
    found: dict[str, dict[int, float]] = {name: {} for name, _ in engine.module.named_parameters()}
    for ranges in engine.gather(own):
        for name, (offset, values) in ranges.items():
            for place, value in enumerate(values, start=offset):
                assert place not in found[name], f"two ranks hold number {place} of {name}"
                found[name][place] = value
    for name, values in found.items():
        assert values == dict(enumerate(whole[name].flatten().tolist())), name
    assert any(len(values) < whole[name].numel() for name, (_, values) in own.items()), "no parameter is cut"


def check_optimizer_state_of_a_shards_storage(engine: Engine[LanguageModel]) -> None:
    """After the first step, AdamW's second moment is (1 - β₂) g², as large as the storage, and the step is counted."""
    accumulate(engine)
    engine.step()
    for shard in shards_of(engine):
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(shard.optimizer_state)
        assert shard.optimizer_state["exp_avg_sq"].shape == shard.storage.shape
        assert bool((shard.view(shard.optimizer_state["exp_avg_sq"]) >= 0).all())


def check_writing_back_rounds_fp32_weights_into_the_parameters(engine: Engine[LanguageModel]) -> None:
    """Passes then compute with the new weights."""
    for shard in shards_of(engine):
        shard.view(shard.storage).fill_(0.5)
    internals.write_back(engine.model.optimizer, engine.config.zero_stage)
    with torch.no_grad():
        logits = engine.model(torch.tensor([[1, 2, 3]])).float()
    alone = RandomInit(lambda: LanguageModel(CONFIG), seed=3).build()
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.fill_(0.5)
        torch.testing.assert_close(logits, alone(torch.tensor([[1, 2, 3]])), rtol=0.05, atol=0.05)


def check_ds_shape_is_the_whole_parameters(engine: Engine[LanguageModel]) -> None:
    expected = RandomInit(lambda: LanguageModel(CONFIG), seed=3).build()
    for name, parameter in engine.module.named_parameters():
        assert internals.full_shape(parameter) == tuple(expected.get_parameter(name).shape), name


def check_fwd_module_stack_holds_the_module(engine: Engine[LanguageModel]) -> None:
    """tests/training/test_close.py shows that memory is then released."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    assert any(held is engine.module for held in stack), "DeepSpeed no longer keeps it: there may be nothing to release"
    other = nn.Linear(1, 1)
    stack.append(other)
    internals.release_zero3(other)
    assert any(held is engine.module for held in stack)
    assert not any(held is other for held in stack)


def check_params_to_release_is_cached(engine: Engine[LanguageModel]) -> None:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    function = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    (cache,) = [cell.cell_contents for cell in function.__closure__ if hasattr(cell.cell_contents, "cache_clear")]
    for _ in range(3):  # the first pass is recorded; later ones look up what they may release
        engine.accumulate([None], lambda _: (engine.model(torch.tensor([[1, 2, 3]])).float().square().mean(), {}))
        engine.step()
    assert cache.cache_info().currsize > 0
    internals.release_zero3(engine.module.head)
    assert cache.cache_info().currsize == 0


def check_compatible_ops_decides_what_is_built(_engine: Engine[LanguageModel]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op

    assert vars(deepspeed.ops)["__compatible_ops__"] == {}
    assert get_accelerator().create_op_builder("ShareMemCommBuilder") is not None  # it would be built
    assert build_shm_op() is None
    assert deepspeed.comm.comm.cdb.shm_comm_op is None
    assert "torch.utils.cpp_extension" not in sys.modules


def check_overflow_is_found_in_the_norm_alone(engine: Engine[LanguageModel]) -> None:
    """No gradient is searched, and if one rank's is infinite, both skip the step."""
    accumulate(engine)
    engine.step()
    with torch.autograd.profiler.profile() as profile:  # a dispatch mode would import TorchDynamo
        accumulate(engine)
        engine.step()
    assert not engine.has_skipped
    operators = {event.key for event in profile.key_averages()}
    assert "aten::linalg_vector_norm" in operators
    assert not operators & {"aten::amax", "aten::amin"}
    before = {name: weight.clone() for name, weight in full_weights(engine).items()}
    factor = torch.inf if engine.rank == 1 else 1.0

    def loss(tokens_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = engine.model(tokens_BT).float()
        logits.register_hook(lambda gradient: gradient * factor)  # the loss itself stays finite
        return logits.square().mean(), {}

    engine.accumulate([torch.tensor([[1, 2, 3]])], loss)
    engine.step()
    assert engine.has_skipped
    assert all(torch.equal(weight, before[name]) for name, weight in full_weights(engine).items())


Check = Callable[[Engine[LanguageModel]], None]
WITHOUT_DEEPSPEED: list[Check] = [
    check_gradient_state_set_sync_gradients,
    check_ddp_set_params_and_buffers_to_ignore,
    check_ddp_reducer_prepare_for_backward,
    check_the_types_name_of_a_model_without_deepspeed,
    check_disable_dynamo_and_get_optimize_ddp_mode_import_nothing,
    check_accelerator_state_shared_state_and_reset_state,
]
WITH_DEEPSPEED: list[Check] = [
    check_the_types_name_deepspeed_engine,
    check_data_parallel_group_set_timeout,
    check_ds_shape_is_the_whole_parameters,
    check_shards_are_all_fp32_weights_once,
    check_get_global_grad_norm,
    check_optimizer_state_of_a_shards_storage,
    check_get_global_grad_norm_of_a_skipped_step,
    check_writing_back_rounds_fp32_weights_into_the_parameters,
    check_deepspeed_plugin_deepspeed_config,
    check_compatible_ops_decides_what_is_built,
    check_disable_dynamo_and_get_optimize_ddp_mode_import_nothing,
]
ZERO12: list[Check] = [*WITH_DEEPSPEED, check_overflow_is_found_in_the_norm_alone]
ZERO3: list[Check] = [check_fwd_module_stack_holds_the_module, check_params_to_release_is_cached]
CHECKS = {0: WITHOUT_DEEPSPEED, 1: ZERO12, 2: ZERO12, 3: [*WITH_DEEPSPEED, *ZERO3]}


def rank_program(folder: Path) -> None:
    found = {}
    for zero_stage, checks in CHECKS.items():
        engine = start_engine(zero_stage)
        for check in checks:
            try:
                check(engine)
                found[f"{check.__name__}-{zero_stage}"] = ""
            except Exception:  # a check that fails does not hide others
                found[f"{check.__name__}-{zero_stage}"] = traceback.format_exc()
        engine.close()
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, start_two_ranks: Callable[..., None]) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("internals")
    start_two_ranks(__file__, folder)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", [f"{check.__name__}-{stage}" for stage, checks in CHECKS.items() for check in checks])
def test_an_attribute_is_there_and_means_what_it_meant(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        assert not of_rank[name], f"rank {rank}: {of_rank[name]}"


def test_another_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.require_deepspeed()
    monkeypatch.setattr(internals, "version", lambda _: "0.20.1")
    with pytest.raises(ValueError, match=r"engine\.zero_stage: deepspeed 0\.20\.1 is installed; 0\.19\.8 was expected"):
        start_engine(1)


@pytest.mark.parametrize(
    ("refusal", "reason", "settings"),
    [
        ("", "", []),
        (
            "CUDA driver error: operation not supported\nCUDA kernel errors might be reported later",
            "CUDA driver error: operation not supported",
            ["expandable_segments:False"],
        ),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "", []),
    ],
)
def test_segments_that_a_driver_lacks_are_turned_off(
    monkeypatch: pytest.MonkeyPatch, refusal: str, reason: str, settings: list[str]
) -> None:
    def ones(*_: Any, **__: Any) -> None:
        if refusal:
            raise RuntimeError(refusal)

    set_to = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append)
    assert internals.use_supported_segments() == reason
    assert set_to == settings


if __name__ == "__main__":
    rank_program(Path(sys.argv[1]))
