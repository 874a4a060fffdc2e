"""The steps that run in a process forked for them, by name. Each notes its figures as soon as it has them."""

from collections.abc import Callable

from benchmarks.gpu.first_quarter.context import Context
from benchmarks.gpu.first_quarter.generate_steps import generation_05b, generation_8b, generation_13b, peers
from benchmarks.gpu.first_quarter.kernels import attention
from benchmarks.gpu.first_quarter.machine_steps import environment
from benchmarks.gpu.first_quarter.ppo_steps import ppo_05b, ppo_modes
from benchmarks.gpu.first_quarter.replacements import kernels
from benchmarks.gpu.first_quarter.train_steps import checkpoint, compiled, sft_05b, sft_8b_layers, sft_13b, zero

STEPS: dict[str, Callable[[Context], None]] = {
    "environment": environment,
    "kernels": kernels,
    "attention": attention,
    "sft_05b": sft_05b,
    "sft_13b": sft_13b,
    "sft_8b": sft_8b_layers,
    "checkpoint": checkpoint,
    "compiled": compiled,
    "zero": zero,
    "generation_05b": generation_05b,
    "generation_13b": generation_13b,
    "generation_8b": generation_8b,
    "peers": peers,
    "ppo_05b": ppo_05b,
    "ppo_modes": ppo_modes,
}
