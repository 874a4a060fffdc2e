"""What every step uses: a device and clock, a file for its figures, the models that it measures, and random weights."""

import contextlib
import gc
import json
import math
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from benchmarks.gpu.ceiling import by_events
from benchmarks.gpu.device import now, peak_bytes
from benchmarks.gpu.quarter.run import write_json
from benchmarks.gpu.rows import SMALL
from heed.jobs.times import GPUS, Hardware
from lm.config import ModelConfig
from lm.model import initial_weight
from lm.source import AnyModel, Rows, on_meta, rows_of
from training.config import OptimizerConfig

GIB = 2**30
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, schedule="constant")


@dataclass
class Context:
    """Where a step runs, and the file to which its figures are written as soon as they are known."""

    name: str
    device: torch.device
    tiny: bool
    path: Path
    found: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def note(self, **figures: Any) -> None:
        """Adds figures, replacing those of the same name, and writes and prints them."""
        self.found |= {name: _rounded(value) for name, value in figures.items()}
        self.found["seconds"] = round(time.monotonic() - self.started, 1)
        write_json(self.path, self.found)
        print(f"  [{self.name}] " + json.dumps({name: self.found[name] for name in figures})[:900], flush=True)

    @contextlib.contextmanager
    def attempt(self, part: str) -> Iterator[None]:
        """Notes an error in a part of a step as the figure `PART_failed`, and lets the next part begin."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.note(**{f"{part}_failed": f"{type(error).__name__}: {str(error)[:400]}"})

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def hardware(self) -> Hardware:
        """The data sheet that shares refer to: the H200's on an H200, and the H100's on anything else."""
        is_h200 = self.on_gpu and "H200" in torch.cuda.get_device_name(self.device)
        return GPUS["h200" if is_h200 else "h100"]

    def now(self) -> float:
        """The time in seconds, once the device has finished its work."""
        return now(self.device)

    def release_memory(self) -> None:
        """Returns unused memory to the device, and starts a new peak."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        return peak_bytes(self.device) / GIB

    def held_gib(self) -> float:
        return torch.cuda.memory_allocated(self.device) / GIB if self.on_gpu else 0.0


def _rounded(value: Any) -> Any:
    """Returns floats with five digits, which JSON can hold: infinities and NaN as text."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def device_seconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the GPU's seconds per call, after three calls that do not count."""
    for _ in range(3):
        work()
    return by_events(work, repeats)


@dataclass(frozen=True)
class Drawn(Generic[AnyModel]):
    """A model with random weights, as `lm.source.RandomInit` but drawn on the device.

    A CPU takes ten seconds to draw 10^9 numbers.
    """

    build: Callable[[], AnyModel]
    device: torch.device
    seed: int = 0

    def tensors(self, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
        model: Any = on_meta(self.build)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        shapes |= {name: buffer.shape for name, buffer in model.named_buffers()}
        buffers = {name for name, _ in model.named_buffers()}
        for name, shape in shapes.items():
            with self.device:
                value = torch.zeros(shape) if name in buffers else initial_weight(name, shape, model.config, generator)
            if rows is None or name in rows:
                yield name, rows_of(value, rows[name] if rows else None)


Fields = Mapping[str, Any]
PUBLISHED = Path(__file__).parents[3] / "configs" / "models"


def published(name: str) -> Fields:
    """Returns the fields of a shape in configs/models."""
    return tomllib.loads((PUBLISHED / f"{name}.toml").read_text(encoding="utf-8"))


QWEN = published("Qwen/Qwen2.5-0.5B")  # 0.49B weights, tied
QWEN3_30B = published("Qwen/Qwen3-30B-A3B")  # a mixture of 128 experts, of which a token takes 8
GPT_OSS = published("openai/gpt-oss-20b")  # sinks, windows in every second layer, and a mixture with biases
LLAMA8 = published("meta-llama/Meta-Llama-3-8B")
GPT2: Fields = SMALL.model_dump()  # 124M
# A Llama block at 1.3B: heads of 128, each with its own keys and values, and Llama 2's vocabulary.
LLAMA13: Fields = {
    "vocab_size": 32_000, "max_position_embeddings": 4096, "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5504, "tie_word_embeddings": False,
}  # fmt: skip
TINY: Fields = {
    "vocab_size": 512, "max_position_embeddings": 128, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
}  # fmt: skip


def shape(fields: Fields, *, tiny: bool, **changes: Any) -> ModelConfig:
    """Returns the model of these fields with some changed; `TINY` if `tiny`."""
    return ModelConfig.model_validate(dict(TINY) if tiny else {**fields, **changes})
