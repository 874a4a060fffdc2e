"""What Heed needs of DeepSpeed, Accelerate and PyTorch beyond their public interfaces.

Each such attribute is used by one function of this file and nowhere else. tests/training/test_internals.py has a test
per function, which names the attribute that a new release removed or changed. docs/architecture.md lists the supported
versions.
"""

import inspect
import mmap
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from training.checkpoint import ParamShard
from training.notices import say

DEEPSPEED = "0.19.8"


def use_supported_segments() -> str:
    """Turn expandable segments of GPU memory off where the driver does not support them, as on some virtual GPUs.

    PyTorch would raise at the process's first tensor on the GPU. Returns the driver's reason; "" if they work, or if
    there is no GPU.
    """
    if not torch.cuda.is_available():
        return ""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            return ""  # not about segments, which alone call the driver: whoever uses the GPU next reports it
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        return str(error).splitlines()[0]
    return ""


def set_gradient_sync(accelerator: Accelerator, is_on: bool) -> None:
    """Tell Accelerate whether the next backward ends a global batch.

    Under DeepSpeed, that backward then reduces gradients and steps.
    """
    accelerator.gradient_state._set_sync_gradients(is_on)


def is_accelerate_initialised() -> bool:
    """Whether an `Accelerator` of this process has set the settings that all later ones share."""
    return bool(AcceleratorState._shared_state)


def reset_accelerate() -> None:
    """Forget the settings that all `Accelerator`s of this process share; its process group stays."""
    AcceleratorState._reset_state()


def update_deepspeed_config(accelerator: Accelerator, config: dict[str, Any]) -> None:
    """Replace settings in the DeepSpeed config that an `Accelerator` passes to the next model it prepares."""
    accelerator.deepspeed_plugin.deepspeed_config.update(config)


def do_not_broadcast_buffers(model: nn.Module) -> None:
    """Keep DDP from sending rank 0's buffers to all ranks with every forward pass."""
    names = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def expect_gradients(model: Any) -> None:
    """Tell DDP to reduce the gradients of the next backward, as its forward does. Calling it twice does no harm."""
    model.reducer.prepare_for_backward([])


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Wrap a model for training without importing TorchDynamo, which takes each process a second or two.

    PyTorch and DeepSpeed need it only for settings and to exclude functions from tracing. Heed compiles nothing but
    blocks (`engine.compile_blocks`), and then TorchDynamo is imported before. DeepSpeed also imports its own Muon,
    which Heed never uses and which compiles a function on import. With a GPU, PyTorch stays as it is: jobs there take
    hours.
    """
    if "torch._dynamo" in sys.modules or torch.cuda.is_available():
        yield
        return

    def as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
        return as_it_is if function is None else function

    ddp_settings = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # PyTorch's default
    compiler, torch_itself = vars(torch.compiler), vars(torch)
    disable, compile_ = compiler["disable"], torch_itself["compile"]
    compiler["disable"] = torch_itself["compile"] = as_it_is
    torch_itself["_dynamo"] = SimpleNamespace(utils=ddp_settings)
    try:
        yield
    finally:
        compiler["disable"], torch_itself["compile"] = disable, compile_
        del torch_itself["_dynamo"]


def step_without_dynamo(zero_stage: int) -> None:
    """Keep optimizers, DDP and, at stage 3, ZeRO's hooks from importing TorchDynamo at their first call, where they
    need it only to be excluded from its graphs. With a GPU, nothing is changed.
    """
    if torch.cuda.is_available():
        return
    _run_as_it_is(Optimizer, DistributedDataParallel)
    setattr(AdamW, "step", torch.no_grad()(inspect.unwrap(AdamW.step)))  # noqa: B010 - mypy refuses to assign a method
    if zero_stage == 3:
        from deepspeed.runtime.zero import partitioned_param_coordinator

        _run_as_it_is(partitioned_param_coordinator, partitioned_param_coordinator.PartitionedParameterCoordinator)


def _run_as_it_is(*owners: Any) -> None:
    excluded: Any = _disable_dynamo(_run_as_it_is)
    for function in [value for owner in owners for value in vars(owner).values()]:
        while (wrapped := getattr(function, "__wrapped__", None)) is not None:
            if getattr(function, "__code__", None) is excluded.__code__:
                wrapped.__dynamo_disable = wrapped
            function = wrapped


def without_operators() -> None:
    """Keep DeepSpeed from checking, in every process, which operators the compiler can build. On CPUs it would also
    build a shared-memory all-reduce, which takes a minute and which only its inference engine calls.
    """
    import deepspeed.ops

    vars(deepspeed.ops)["__compatible_ops__"] = {}


def require_deepspeed() -> None:
    """Raises: ValueError for another version of DeepSpeed than the one whose private attributes this file uses."""
    found = version("deepspeed")
    if found != DEEPSPEED:
        raise ValueError(f"engine.zero_stage: deepspeed {found} is installed; {DEEPSPEED} was expected")


def is_deepspeed_engine(model: Any) -> bool:
    """Whether a prepared model is DeepSpeed's. Looks at the name, since importing DeepSpeed takes seconds."""
    return type(model).__name__ == "DeepSpeedEngine"


def set_collective_timeout(deepspeed_engine: Any, timeout: timedelta) -> None:
    """Set the time limit of the process group that DeepSpeed creates for its own collectives."""
    deepspeed_engine.data_parallel_group.set_timeout(timeout)


def release_zero3(module: nn.Module) -> None:
    """Drop the references to a module that ZeRO-3 keeps after its engine is destroyed.

    They are the list of modules in a forward pass, which keeps every root module, and a method's result cache, whose
    keys hold the method's object. They would keep weights, master weights and moments alive.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [kept for kept in stack if kept is not module]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    for cell in cached.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()  # other engines fill it again


def gradient_norm(deepspeed_engine: Any) -> float:
    """The global gradient norm before clipping of the last step; infinite if DeepSpeed skipped that step."""
    return float(deepspeed_engine.get_global_grad_norm() or 0.0)


def find_overflow_in_norm(zero_optimizer: Any) -> None:
    """Keep ZeRO-1 and 2 from searching each gradient for infinities and NaN: 13 kernels per tensor, and a wait. The
    norm, which is computed next, shows them too and skips the step. An offloaded optimizer tracks overflow itself.
    """
    if not zero_optimizer.cpu_offload:
        assert zero_optimizer.compute_grad_norm, "without the norm, nothing finds overflow"
        zero_optimizer.check_overflow = lambda **_: None


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole parameter's shape. Under ZeRO-3, `parameter.shape` is that of a flat shard."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def shard_zero12(zero_optimizer: Any, name: str, parameter: nn.Parameter) -> ParamShard | None:
    """This rank's fp32 master weights of a parameter under ZeRO-1 and 2.

    A group's weights are concatenated and cut into equal parts, one per rank. Returns None if this rank's part has no
    number of the parameter.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    storage = zero_optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    return ParamShard(name, there.start, storage, here.start, here.numel, zero_optimizer.optimizer.state[storage])


def shard_zero3(zero_optimizer: Any, name: str, parameter: nn.Parameter, rank: int) -> ParamShard | None:
    """This rank's fp32 master weights of a parameter under ZeRO-3.

    Every parameter is cut into equal parts, one per rank, the last of them padded. Returns None if this rank's part is
    all padding.
    """
    group, start, padded_length = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
    storage, offset = zero_optimizer.fp32_partitioned_groups_flat[group], rank * padded_length
    length = min(padded_length, vars(parameter)["ds_numel"] - offset)
    if length <= 0:
        return None
    return ParamShard(name, offset, storage, start, length, zero_optimizer.optimizer.state[storage])


def node_group() -> Any:
    """The process group of the ranks that share a second copy of ZeRO-3's weights; None before the first engine that
    has one. DeepSpeed refuses to create it twice in a process.
    """
    from deepspeed.utils import groups

    return groups._get_zero_param_intra_parallel_group()


def zero3_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's part [n] of a parameter as ZeRO-3's passes use it, padded to the same length on all ranks.

    It is one of equal parts over all ranks, also if the ranks of a node share a second copy.
    """
    shard: Tensor = vars(parameter)["ds_tensor"]
    return shard.detach().view(-1)


def do_not_send_initial_weights(init: Any) -> None:
    """Keep `deepspeed.zero.Init` from broadcasting each parameter, whose initial values nobody reads."""

    def shard(parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        vars(parameter)["partition"]()

    init._zero_init_param = shard


def forget_node_copy(parameter: nn.Parameter) -> None:
    """Drop the node's second copy of a parameter whose shard was written; the next pass makes it from the shards."""
    vars(parameter)["ds_secondary_tensor"] = None


@torch.no_grad()
def write_back(zero_optimizer: Any, zero_stage: int) -> None:
    """Round ZeRO's fp32 weights into the parameters, as a step does. Call it after changing them; a collective call."""
    if zero_stage < 3:
        zero_optimizer.update_lp_params()
        return
    zero_optimizer._partition_all_parameters()  # some stay whole between passes; they are gathered again below
    for group in range(len(zero_optimizer.fp32_partitioned_groups_flat)):
        zero_optimizer._reassign_or_swap_out_partitioned_parameters(group)
    zero_optimizer.invalidate_secondary_tensor()  # a node's second copy still has the old weights
    if zero_optimizer.persistent_parameters:
        zero_optimizer.persistent_parameters[0].all_gather(zero_optimizer.persistent_parameters)


# --- CPU memory, locked in place (pinned) where the system allows it ---

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_refused = False  # whether this process has said that memory could not be pinned


def host_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    """Returns zeros [num_bytes] uint8 in CPU memory, for copies to and from a GPU; `pinned` needs a GPU.

    PyTorch rounds pinned memory up to a power of two (2.1 GB take 4) and keeps it for later requests when it is freed.
    This function locks ordinary pages instead, as many as are needed, and releases them when they are freed. If the
    system does not allow so much locked memory, the pages stay unlocked, which is slower, and one notice says so.
    """
    cudart = torch.cuda.cudart() if pinned else None
    if cudart is None or not num_bytes:  # a device without CUDA's library has its own allocator
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages alive
    address = held.data_ptr()
    error = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE))
    if error:
        _note_refusal(num_bytes, error)
    else:
        pages.unlock = lambda: cudart.cudaHostUnregister(address)
    return held


def _note_refusal(num_bytes: int, error: int) -> None:
    """Say once per process that memory could not be pinned, and clear CUDA's error."""
    global _refused
    with suppress(RuntimeError):  # CUDA reports the refusal again after the next kernel; let it be this one
        torch.ones(1, device="cuda")
    if _refused:
        return
    _refused = True
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.2f} GiB"
    say(
        f"{num_bytes / 2**30:.2f} GiB of CPU memory could not be pinned (CUDA error {error}; `ulimit -l` is {allowed}):"
        " copies between it and the GPU are slower"
    )


class _Pages(mmap.mmap):
    """Anonymous memory, unlocked before it is released."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()
