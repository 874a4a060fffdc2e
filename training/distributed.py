"""The engine's work across ranks: Accelerate's process group, DeepSpeed's config, and models sharded by ZeRO.

Models are sharded and reassembled one tensor at a time, so no rank needs room for two copies of a model.
"""

import functools
import gc
import itertools
import math
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn

from lm.progress import note_progress
from lm.samplers.engine import chunks
from lm.sequence_parallel import SequenceGroup
from lm.source import ModelSource
from training.checkpoint import ParamShard
from training.config import EngineConfig, ranks_sharing_weights
from training.internals import (
    do_not_send_initial_weights,
    forget_node_copy,
    full_shape,
    is_accelerate_initialised,
    node_group,
    require_deepspeed,
    shard_zero3,
    shard_zero12,
    update_deepspeed_config,
    without_operators,
    zero3_shard,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)
MAIN = 0  # the rank that reads models for all, and writes files
REDUCE_BUCKET = 500_000_000  # gradients reduced at once, at most; DeepSpeed allocates a buffer of that many numbers
BUCKET_BYTES = 1 << 28  # of whole weights gathered at once: few calls, and little memory next to any sharded model
OFFLOADED = {"optimizer": "optimizer", "parameters": "param"}  # Heed's names and those of DeepSpeed's config

# Returns every rank's value, by rank; a collective call.
Exchange = Callable[[Any], list[Any]]


def make_accelerator(
    config: EngineConfig, deepspeed: dict[str, Any], world_size: int, num_parameters: int
) -> Accelerator:
    """Create this rank's `Accelerator` in a process group of `world_size` ranks. `deepspeed` is used from ZeRO-1 up.
    At ZeRO-3 it is told how many ranks of a node share a second copy of the model's `num_parameters` weights.
    """
    accelerator = _make_accelerator(config, deepspeed)
    if config.zero_stage == 3 and world_size > 1:
        weight_bytes = (2 if config.resolved_precision() == "bf16" else 4) * num_parameters
        sharing = _ranks_sharing_weights(config, weight_bytes, world_size, accelerator.device)
        deepspeed["zero_optimization"]["zero_hpz_partition_size"] = sharing
        update_deepspeed_config(accelerator, deepspeed)
    # Accelerate falls back to worlds of one rank, or drops DeepSpeed, without a message.
    num_ranks = accelerator.num_processes
    assert num_ranks == world_size, f"the process group has {num_ranks} ranks where {world_size} were started"
    freeze_imports()
    return accelerator


@functools.cache
def freeze_imports() -> None:
    """Exclude imported objects from garbage collection, once per process. Each engine that closes triggers a full
    collection, which would take a second to visit them.
    """
    gc.freeze()


def _make_accelerator(config: EngineConfig, deepspeed: dict[str, Any]) -> Accelerator:
    on_cpu = not torch.cuda.is_available()
    if config.zero_stage > 0:
        require_deepspeed()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(config.zero_stage > 0).lower()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it at its first import
    precision = "bf16" if config.resolved_precision() == "bf16" else "no"
    _name_the_only_rank()
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    handlers = [InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=timeout)]
    if config.zero_stage == 0:
        # Gradients are views of DDP's buckets rather than copies.
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[*handlers, ddp])
    if on_cpu:
        without_operators()
    if is_accelerate_initialised():  # the plugin and its settings are still those of this process's first engine
        accelerator = Accelerator(kwargs_handlers=handlers)
        update_deepspeed_config(accelerator, deepspeed)
        return accelerator
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed)
    return Accelerator(mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers)


def _ranks_sharing_weights(config: EngineConfig, weight_bytes: int, world_size: int, device: torch.device) -> int:
    """Return `ranks_sharing_weights` for the ranks' machines and the least memory of one; a collective call."""
    if device.type == "cuda":
        own_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        own_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks: list[tuple[str, int]] = [("", 0)] * world_size
    dist.all_gather_object(ranks, (socket.gethostname(), own_bytes))
    sizes = {len([*of_host]) for _, of_host in itertools.groupby(host for host, _ in ranks)}
    per_node = sizes.pop() if len(sizes) == 1 else 0
    device_bytes = min(size for _, size in ranks)
    if device.type == "cpu":
        device_bytes //= max(1, per_node)
    return ranks_sharing_weights(weight_bytes, world_size, per_node, config.node_weights_limit(device_bytes))


def _name_the_only_rank() -> None:
    """Set the variables for a world of one process if no launcher has set them.

    With port 0, the operating system chooses a free one. So a child process that inherits these variables gets its own
    port.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def make_sequence_group(config: EngineConfig) -> SequenceGroup | None:
    """Create the group of adjacent ranks that split their rows' tokens; None if rows are whole. A collective call."""
    if config.sequence_parallel_size == 1:
        return None
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    group, _ = dist.new_subgroups(config.sequence_parallel_size, timeout=timeout)
    return SequenceGroup(group)


def deepspeed_config(config: EngineConfig, max_grad_norm: float, micro_batch: int, num_trained: int) -> dict[str, Any]:
    """Derive DeepSpeed's config from Heed's, for a model with `num_trained` trained parameters."""
    on_gpu = torch.cuda.is_available()
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,  # `Engine.accumulate` marks the boundaries itself
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": config.resolved_precision() == "bf16"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": config.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": config.zero_stage == 3,
            **({"overlap_comm": True} if on_gpu else {}),  # gradients are reduced while the next ones are computed
            "reduce_bucket_size": min(REDUCE_BUCKET, num_trained),
            **{f"offload_{OFFLOADED[name]}": {"device": "cpu", "pin_memory": on_gpu} for name in config.offload},
        },
        "steps_per_print": 1_000_000_000,
    }


@torch.no_grad()
def build_sharded(source: ModelSource[AnyModule], config: Mapping[str, Any], device: torch.device) -> AnyModule:
    """Build a model sharded by ZeRO-3; a collective call. Rank 0 alone reads the source, one whole tensor at a time,
    and sends each rank its shards over `device`, and nothing else.
    """
    from deepspeed import zero

    shares_weights = config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
    group = node_group() if shares_weights else None
    initialising = zero.Init(config_dict_or_path=dict(config), zero_param_parallel_group=group)
    do_not_send_initial_weights(initialising)
    with initialising:
        model = source.build()
    is_main = dist.get_rank() == MAIN
    tensors = source.tensors() if is_main else iter(())
    for name, parameter in model.named_parameters():
        shard = zero3_shard(parameter)
        received, parts = torch.empty_like(shard, device=device), None
        if is_main:
            source_name, tensor = next(tensors)
            assert (source_name, tuple(tensor.shape)) == (name, full_shape(parameter)), (
                f"the source yields {source_name} {tuple(tensor.shape)} where {type(model).__name__} expects {name}"
                f" {full_shape(parameter)}"
            )
            flat, num_padded = tensor.to(device, shard.dtype).flatten(), dist.get_world_size() * len(shard)
            parts = [*F.pad(flat, (0, num_padded - len(flat))).chunk(dist.get_world_size())]
            del tensor, flat  # before the next one is read
        dist.scatter(received, parts, MAIN)
        shard.copy_(received)
        forget_node_copy(parameter)
    buffers = dict(model.named_buffers())
    if buffers:
        rest = [dict(tensors)]
        dist.broadcast_object_list(rest, MAIN)
        for name, buffer in buffers.items():
            buffer.copy_(rest[0][name])
    return model


def zero_shards(module: nn.Module, zero_optimizer: Any, zero_stage: int, rank: int) -> list[ParamShard]:
    """Return this rank's part of every trained parameter."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if zero_stage == 3:
        shards = [shard_zero3(zero_optimizer, name, parameter, rank) for name, parameter in trained]
    else:
        shards = [shard_zero12(zero_optimizer, name, parameter) for name, parameter in trained]
    return [shard for shard in shards if shard is not None]


class Gatherer:
    """Gathers fp32 tensors that are split across ranks. Each rank holds consecutive numbers, laid out as in `shards`.

    The constructor and the methods that gather are collective calls. Ranks exchange tensors on `device`.
    """

    def __init__(self, shards: Iterable[ParamShard], rank: int, device: torch.device, exchange: Exchange) -> None:
        self._rank, self._device = rank, device
        ranges = {shard.name: (shard.offset, shard.length) for shard in shards if shard.length}
        self._ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # (rank, first number, length)
        for owner, held in enumerate(exchange(ranges)):
            for name, (offset, length) in held.items():
                self._ranges[name].append((owner, offset, length))

    def whole(self, name: str, parameter: nn.Parameter, own: Tensor | None) -> Tensor | None:
        """Gather a whole tensor on rank 0 from every rank's `own` shard of it [n]. Returns None on other ranks."""
        note_progress()
        if self._rank != MAIN:
            if own is not None:
                _exchanged([dist.P2POp(dist.isend, own.to(self._device).contiguous(), MAIN)])
            return None
        whole = torch.empty(full_shape(parameter), dtype=torch.float32, device=self._device)
        parts = [(owner, whole.view(-1).narrow(0, first, length)) for owner, first, length in self._ranges[name]]
        for owner, part in parts:
            if owner == MAIN:
                assert own is not None, f"no values for the {len(part)} numbers of {name} that this rank holds"
                part.copy_(own)
        _exchanged([dist.P2POp(dist.irecv, part, owner) for owner, part in parts if owner != MAIN])
        return whole

    def tensors(
        self, module: nn.Module, own: Mapping[str, Tensor], originals: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `module` on rank 0's CPU, one at a time, tied ones once; nothing on other ranks.

        Trained weights come from the `own` shards. Frozen ones have no fp32 shards and come from `originals`, which
        are in the order of `named_parameters`.
        """
        is_main, cpu, frozen = self._rank == MAIN, torch.device("cpu"), iter(originals)
        for name, parameter in module.named_parameters():
            whole_tensor: Tensor | None = None
            if parameter.requires_grad:
                whole_tensor = self.whole(name, parameter, own.get(name))
            elif is_main:
                whole_tensor = next(tensor for original, tensor in frozen if original == name).detach()
            if whole_tensor is not None:
                whole_tensor = whole_tensor.to(cpu)
                yield name, whole_tensor
            del whole_tensor  # before the next one is gathered
        if is_main:
            yield from ((name, buffer.detach().to(cpu)) for name, buffer in module.named_buffers())


def _exchanged(operations: list[dist.P2POp]) -> None:
    """Wait for transfers between pairs of ranks. Sent as one batch, they need no separate NCCL connection per pair."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def whole_zero3_weights(
    named: Iterable[tuple[str, nn.Parameter]], rank: int, num_ranks: int, device: torch.device, *, on_main_alone: bool
) -> Iterator[tuple[str, Tensor]]:
    """Gather parameters whole on `device`, as passes of ZeRO-3 use them, as many in one call as fit in `BUCKET_BYTES`.

    A collective call; with `on_main_alone`, ranks other than 0 take part but yield nothing.
    """
    shapes, shards = dict[str, tuple[int, ...]](), list[tuple[str, Tensor]]()
    for name, parameter in named:
        shapes[name] = tuple(full_shape(parameter))
        shards.append((name, zero3_shard(parameter)))
    for bucket in chunks(shards, -(-BUCKET_BYTES // num_ranks)):
        note_progress()
        own = torch.cat([shard.to(device) for shard in bucket.values()])
        if on_main_alone and rank != MAIN:
            dist.gather(own, dst=MAIN)
            continue
        by_rank = own.new_empty(num_ranks, len(own))
        if on_main_alone:
            dist.gather(own, [*by_rank], dst=MAIN)
        else:
            dist.all_gather_into_tensor(by_rank.view(-1), own)
        parts = by_rank.split([len(shard) for shard in bucket.values()], dim=1)
        for name, part in zip(bucket, parts, strict=True):
            yield name, part.flatten()[: math.prod(shapes[name])].view(shapes[name])
        del own, by_rank, parts, part  # before the next ones are gathered
