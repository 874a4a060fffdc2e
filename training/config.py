"""What every trained stage configures: precision, sharding, optimisation, batch sizes."""

import math
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lm.config import exact_div

Precision = Literal["fp32", "bf16"]


class Config(BaseModel):
    """Base of all configs: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Config):
    """How the work is computed and sharded. `precision = "auto"` is bf16 where the hardware multiplies it faster.

    `offload` names what waits in the CPU's memory while the device computes: the optimizer's states, with the fp32
    weights that it moves, and the parameters' shards. `checkpoint_activations` keeps of each block its input alone and
    computes the rest again in the backward (arXiv 1604.06174). Ranks wait `collective_timeout_seconds` for each other.
    """

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: tuple[Literal["optimizer", "parameters"], ...] = ()
    checkpoint_activations: bool = False
    collective_timeout_seconds: float = Field(default=1800.0, gt=0)
    keep_checkpoints: int = Field(default=2, ge=1)  # should the newest be damaged
    max_failed_saves: int = Field(default=3, ge=1)  # checkpoints in a row that cannot be written before a run stops
    max_skipped_steps: int = Field(default=10, ge=0)  # steps in a row without a finite gradient before a run stops
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        for name, lowest in (("optimizer", 1), ("parameters", 3)):
            if name in self.offload and self.zero_stage < lowest:
                raise ValueError(
                    f"offload of {name!r} with zero_stage {self.zero_stage}; at least zero_stage {lowest} was expected"
                )
        return self

    def resolved_precision(self) -> Precision:
        if self.precision != "auto":
            return self.precision
        return "bf16" if torch.cuda.is_available() or cpu_multiplies_bf16() else "fp32"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself (AMX, AVX-512 BF16); without that, bf16 is slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class OptimizerConfig(Config):
    """AdamW (arXiv 1711.05101) with gradient clipping and a learning rate that is a function of the step alone.

    "muon" moves the matrices of the blocks by Muon (Jordan et al. 2024), the rest by AdamW. Its updates are scaled to
    the size of AdamW's, so that one learning rate serves both (arXiv 2502.16982, section 2.2); `betas` and `eps` are
    AdamW's. With `trained_layers` only that many of the last blocks move, and what follows them.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(gt=0)
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    trained_layers: int | None = Field(default=None, ge=0)

    def check_sharding(self, engine: EngineConfig) -> None:
        """Errors: ValueError for Muon under ZeRO."""
        if self.kind == "muon" and engine.zero_stage > 0:
            raise ValueError(
                f"optimizer kind 'muon' needs whole matrices, which ZeRO {engine.zero_stage} cuts up;"
                " 'adamw', or engine.zero_stage = 0, was expected"
            )

    def rate(self, step: int, num_steps: int) -> float:
        """Learning rate of step 0 .. num_steps - 1: linear warm-up, then down to `min_lr_ratio` of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        fall = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall[self.schedule])


class BatchConfig(Config):
    """`batch_size` is global, in the stage's unit; `micro_batch_size` is what one rank holds at once."""

    batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact_div(self.batch_size, self.micro_batch_size, "batch_size over micro_batch_size")
        return self

    def num_micro_batches(self, num_ranks: int) -> int:
        """Micro-batches a rank and step. Errors: ValueError unless the division is whole."""
        return exact_div(self.batch_size, num_ranks * self.micro_batch_size, "batch_size over ranks x micro_batch_size")


class TrainingConfig(Config):
    """What pretraining, SFT and the reward model share. `batch.batch_size` counts rows of the stage's own kind."""

    batch: BatchConfig
    optimizer: OptimizerConfig
    dropout: float = Field(default=0.0, ge=0, lt=1)
    save_every_steps: int = Field(ge=1)
    evaluate_every_steps: int = Field(ge=1)


class InitConfig(Config):
    """`init_from` names a model directory or a hub id that a stage starts from, in place of the stage before it.

    `end_token` and `pad_token` replace those that its tokenizer names.
    """

    init_from: str = ""
    end_token: str = ""
    pad_token: str = ""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        for name in ("end_token", "pad_token"):
            if getattr(self, name) and not self.init_from:
                raise ValueError(f"{name} is given without init_from; a vocabulary learned here has its own")
        return self
