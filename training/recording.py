"""Micro-batches recorded as CUDA graphs: forward pass, loss and backward pass of one shape are one launch.

A GPU computes a small model's pass in less time than Python takes to launch its thousands of kernels. A recording
launches them all at once, on the memory that they had: so all that differs between micro-batches of the same shapes is
copied into `Inputs` first, also denominators and seeds, and gradients add up in buffers that stay.

On a CPU the same code runs the pass itself.

Shape letters: B rows, T tokens, C selected positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.attention import FixedSegments, segment_starts
from lm.decoding import Step, record
from lm.progress import note_progress
from lm.transfer import uploaded
from training.packing import bucket

# What a micro-batch's loss reads besides weights, by name: in CPU memory, or uploaded.
Inputs = Mapping[str, Tensor]
MAX_RECORDINGS = 64  # of an engine; they share the memory of intermediate results


def packed_inputs(tokens_BT: Tensor, segments_BT: Tensor, selected_BT: Tensor, targets_C: Tensor) -> dict[str, Tensor]:
    """Returns what a pass over packed rows reads, in few shapes: selected positions are padded to a `bucket` by the
    first token, and sequences to a power of two by empty ones.
    """
    starts, places_C = segment_starts(segments_BT), selected_BT.flatten().nonzero()[:, 0]
    num_sequences, num_padding = 1 << (len(starts) - 2).bit_length(), bucket(len(places_C)) - len(places_C)
    return {
        "tokens_BT": tokens_BT,
        "segments_BT": segments_BT,
        "starts": F.pad(starts, (0, num_sequences + 1 - len(starts)), value=segments_BT.numel()),
        "places_C": F.pad(places_C, (0, num_padding)),
        "targets_C": F.pad(targets_C, (0, num_padding)),
    }


def segments_of(inputs: Inputs) -> FixedSegments:
    return FixedSegments(inputs["segments_BT"], inputs["starts"])


@runtime_checkable
class RecordableObjective(Protocol):
    """An objective whose passes have few shapes, and whose loss reads nothing of a pass but some tensors."""

    def inputs(self, rows: NDArray[np.int64], seed: int) -> Inputs:
        """Return what `loss_of` reads, in CPU memory."""
        ...

    def loss_of(self, model: Any, inputs: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return what `training.loop.Objective.loss` does, given inputs on the device. Neither shapes nor values in
        Python depend on what is in them.
        """
        ...


@dataclass(frozen=True)
class RecordableLoss:
    """A micro-batch's share of the mean over a global batch, and its metrics, as a function of inputs alone."""

    objective: RecordableObjective
    model: nn.Module

    def inputs(self, micro_batches: Iterable[NDArray[np.int64]], count: float, seed: int) -> Iterator[Inputs]:
        """Yield the inputs of micro-batches, given by their rows; `count` is that of the whole batch."""
        for rows in micro_batches:
            yield {**self.objective.inputs(rows, seed), "count": torch.tensor(float(count or 1))}

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss_sum, metrics = self.objective.loss_of(self.model, inputs)
        return loss_sum / inputs["count"], metrics


class RecordedMicroBatches:
    """Runs micro-batches by replaying a recording per shape of their inputs, and adds up their metrics.

    `run` computes a micro-batch's gradients, adds them to those in memory, and returns its metrics. Nothing that it
    does may depend on its inputs' values, only on their shapes and types. Micro-batches of further shapes than
    `MAX_RECORDINGS` are run as they are.
    """

    def __init__(self, run: Callable[[Inputs], Mapping[str, Tensor]], device: torch.device) -> None:
        self._run, self._device = run, device
        self._recordings: dict[Any, tuple[Inputs, Step]] = {}  # by the inputs' shapes and types
        self._pool: Any = None
        self._sums: dict[str, Tensor] = {}

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def add(self, inputs: Inputs) -> None:
        """Run a micro-batch, given by inputs in CPU memory. Does not wait for the GPU."""
        note_progress()
        kind = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        if kind in self._recordings:
            buffers, replay = self._recordings[kind]
            for name, value in inputs.items():
                buffers[name].copy_(_pinned(value, self._device), non_blocking=True)
            replay()
            return
        own = {name: value.clone() if value.is_cpu else value for name, value in uploaded(inputs, self._device).items()}
        step = partial(self._step, own)
        if len(self._recordings) == MAX_RECORDINGS:
            step()
            return
        replay, self._pool = record(step, self._device, self._pool)
        self._recordings[kind] = own, replay

    def _step(self, inputs: Inputs) -> None:
        for name, value in self._run(inputs).items():
            if name in self._sums:  # always so in a recording, before which the step has run
                self._sums[name] += value.detach()
            else:
                self._sums[name] = value.detach().clone()

    def take(self) -> dict[str, Tensor]:
        """Returns the metrics summed over the micro-batches since the last call."""
        taken = {name: total.clone() for name, total in self._sums.items()}
        for total in self._sums.values():
            total.zero_()
        return taken


def _pinned(value: Tensor, device: torch.device) -> Tensor:
    return value.pin_memory() if device.type == "cuda" else value
