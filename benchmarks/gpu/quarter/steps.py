"""The steps that run in a process forked for them, by name. Each notes its figures as soon as it has them."""

from collections.abc import Callable

from benchmarks.gpu.quarter.attention import packed_attention
from benchmarks.gpu.quarter.context import Context
from benchmarks.gpu.quarter.machine_steps import environment
from benchmarks.gpu.quarter.peers import peers
from benchmarks.gpu.quarter.ppo_steps import draws, kept_steps
from benchmarks.gpu.quarter.sampling_steps import continuous, rows
from benchmarks.gpu.quarter.training_steps import mixtures, sft_05b, whole_8b, zero1_8b

RUN: dict[str, Callable[[Context], None]] = {
    step.__name__: step
    for step in (
        environment, draws, sft_05b, rows, zero1_8b, whole_8b, packed_attention, kept_steps, mixtures, continuous, peers
    )
}  # fmt: skip
