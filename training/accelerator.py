"""The process group, and Accelerate's view of it: with its DeepSpeed plugin from ZeRO-1 up."""

import functools
import gc
import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs

from files.ports import free_port
from training.config import EngineConfig
from training.internals import is_accelerate_initialised, update_deepspeed_config, without_operators


def make_accelerator(config: EngineConfig, deepspeed: dict[str, Any], world_size: int) -> Accelerator:
    """This rank's `Accelerator`, in a process group of `world_size` ranks; `deepspeed` are settings from ZeRO-1 up."""
    accelerator = _make_accelerator(config, deepspeed)
    # Accelerate falls back to worlds of one rank, or drops DeepSpeed, without a message.
    found = accelerator.num_processes
    assert found == world_size, f"the process group has {found} ranks where {world_size} were started"
    freeze_imports()
    return accelerator


@functools.cache
def freeze_imports() -> None:
    """Spare the garbage collector, once per process, what imports have made: each engine that closes makes it look at
    everything, which takes a second.
    """
    gc.freeze()


def _make_accelerator(config: EngineConfig, deepspeed: dict[str, Any]) -> Accelerator:
    on_cpu = not torch.cuda.is_available()
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
    if is_accelerate_initialised():  # the first engine of this process brought the plugin, with its own settings
        accelerator = Accelerator(kwargs_handlers=handlers)
        update_deepspeed_config(accelerator, deepspeed)
        return accelerator
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed)
    return Accelerator(mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers)


def _name_the_only_rank() -> None:
    """If no launcher named ranks, this process is a world of one."""
    if "RANK" in os.environ:
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", **address)
