"""The DeepSpeed side of the engine: its config, models built in shards, and where ZeRO keeps weights and optimizer."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lm.source import ModelSource
from training.config import EngineConfig
from training.internals import shard_zero3, shard_zero12, write_back_zero3, write_back_zero12
from training.state import ParamShard

AnyModule = TypeVar("AnyModule", bound=nn.Module)
READER = 0  # the rank that reads models for all
REDUCE_BUCKET = 500_000_000  # gradients reduced at once, at most; DeepSpeed allocates a buffer of that many numbers
OFFLOADED = {"optimizer": "optimizer", "parameters": "param"}  # Heed's names and those of DeepSpeed's config


def deepspeed_config(config: EngineConfig, max_grad_norm: float, micro_batch: int, num_trained: int) -> dict[str, Any]:
    """DeepSpeed's own config, derived from Heed's, for a model of which `num_trained` numbers are trained."""
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
def build_sharded(source: ModelSource[AnyModule], config: Mapping[str, Any]) -> AnyModule:
    """Build a model in ZeRO-3's shards; a collective call. A rank holds its shards and one whole tensor at a time.

    Rank 0 alone reads the source, and all ranks get their shards from it.
    """
    from deepspeed import zero

    with zero.Init(config_dict_or_path=dict(config)):
        model = source.build()
    is_reader = dist.get_rank() == READER
    tensors = source.tensors() if is_reader else iter(())
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter], modifier_rank=READER):  # broadcasts what rank 0 has written
            if is_reader:
                found, tensor = next(tensors)
                assert found == name, f"the source yields {found} where a {type(model).__name__} has {name}"
                parameter.copy_(tensor)
                del tensor  # before the next one is read
    buffers = dict(model.named_buffers())
    if buffers:
        rest = [dict(tensors)]
        dist.broadcast_object_list(rest, READER)
        for name, buffer in buffers.items():
            buffer.copy_(rest[0][name])
    return model


def zero_shards(module: nn.Module, zero_optimizer: Any, zero_stage: int, rank: int) -> list[ParamShard]:
    """This rank's part of every trained parameter."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if zero_stage == 3:
        found = [shard_zero3(zero_optimizer, name, parameter, rank) for name, parameter in trained]
    else:
        found = [shard_zero12(zero_optimizer, name, parameter) for name, parameter in trained]
    return [shard for shard in found if shard is not None]


@torch.no_grad()
def write_back(zero_optimizer: Any, zero_stage: int) -> None:
    """After ZeRO's fp32 weights have changed: round them into the parameters, as a step does. A collective call."""
    if zero_stage == 3:
        write_back_zero3(zero_optimizer)
    else:
        write_back_zero12(zero_optimizer)
