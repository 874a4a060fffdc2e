"""What every trained stage configures: precision, sharding, optimisation, batch sizes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Discriminator, Field, model_validator

from lm.config import ModelConfig, Precision, exact_div
from lm.lora import LoRAConfig

AnyTable = TypeVar("AnyTable", bound=BaseModel)


class Config(BaseModel):
    """Base of all configs: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def by_kind(default: str, *others: str) -> Discriminator:
    """Returns what tells a union of tables apart: their key `kind`. Without it, a table is of the default kind."""

    def kind_of(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return getattr(value, "kind", None)
        return value.get("kind", default) if isinstance(value, Mapping) else None

    kinds = ", ".join(f'"{kind}"' for kind in (default, *others[:-1]))
    message = f'a table with kind {kinds} or "{others[-1]}" was expected'
    return Discriminator(kind_of, custom_error_type="kind", custom_error_message=message)


def value_at(config: BaseModel, key: str) -> Any:
    """Returns what a dotted key names in a section; "" if a table on the way is absent, or of a kind without it."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, "")
    return value


def values_at(config: BaseModel, key: str) -> list[Any]:
    """Returns what a dotted key names, as `value_at`, without what is absent. A part "*" stands for every table of a
    list or under a name, so there may be several values.
    """
    before, star, after = key.partition(".*.")
    value = value_at(config, before)
    if not star:
        return [value] if value else []
    tables = value.values() if isinstance(value, Mapping) else value or ()
    return [inner for table in tables for inner in values_at(table, after)]


def tables_in(config: BaseModel, kind: type[AnyTable], prefix: str = "") -> Iterator[tuple[str, AnyTable]]:
    """Yields the dotted keys and the values of all tables of a kind in a section, at any depth."""
    for name, value in config:
        if isinstance(value, kind):
            yield f"{prefix}{name}", value
        elif isinstance(value, BaseModel):
            yield from tables_in(value, kind, f"{prefix}{name}.")


class EngineConfig(Config):
    """How the work is computed and sharded. The section may be absent."""

    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Number type of matrix products and activations; `auto` is bf16 where the hardware multiplies it"
        " faster than fp32.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="ZeRO stage (arXiv 1910.02054): 1 shards optimizer states, 2 also gradients, 3 also weights. One"
        " rank shards nothing and runs as with 0, unless something is offloaded.",
    )
    offload: tuple[Literal["optimizer", "parameters"], ...] = Field(
        default=(),
        description="What is kept in CPU memory instead of on the device: `optimizer` (its states and the fp32"
        " weights; needs ZeRO 1 or higher) and `parameters` (the weight shards; needs ZeRO 3).",
    )
    node_weights: bool = Field(
        default=True,
        description="With ZeRO 3 on several nodes, keep a second copy of the weights on each node, sharded over its"
        " GPUs, if it takes at most a quarter of their memory (hpZ: arXiv 2306.10209). Then only the first pass after a"
        " step gathers weights over the network.",
    )
    checkpoint_activations: bool = Field(
        default=False,
        description="Keep only each block's input and recompute the rest in the backward pass (arXiv 1604.06174).",
    )
    sequence_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Split each row's tokens among this many ranks, which exchange them for heads around attention"
        " (DeepSpeed-Ulysses, arXiv 2309.14509); 1 = none. For rows too long for one GPU: activations and logits per"
        " rank shrink by this factor, and so does the number of ranks that share a batch. It divides `workers`, the"
        " attention heads, and the key-value heads or is a multiple of them. For decoders.",
    )
    compile_blocks: bool = Field(
        default=False,
        description="Compile each block with `torch.compile`: fewer kernels on GPUs, after 16 seconds of compilation"
        " for a 0.5B model on an H200. For long runs on GPUs; no help on CPUs. All blocks share a graph; with adapters"
        " or `trained_layers` there are two or three, as some need fewer gradients. It works with recomputation and up"
        " to ZeRO 2, and PPO keeps no passes. Refused are ZeRO 3, sequence parallelism, mixtures of experts and"
        " attention sinks.",
    )
    record_micro_batches: bool = Field(
        default=False,
        description="Record micro-batches, forward to backward, as CUDA graphs, which a GPU repeats without waiting"
        " for Python. For models so small that launches take longer than kernels, on one GPU, in pretraining on token"
        " streams, SFT of decoders, and the updates of PPO, which then keeps no passes. Other stages run as without it."
        " It works with adapters, dropout, recomputation and `compile_blocks`. Refused are several workers, offloading"
        " and mixtures of experts. Memory of recorded passes stays in use between steps. Not measured on a GPU yet.",
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of a loss that balances the load of a mixture's experts in each sequence (arXiv"
        " 2101.03961), as a mean over tokens and layers, in every stage; of PPO's models, in the policy. `transformers`"
        " adds it if `output_router_logits` is set; published values are 0.001 (Qwen) to 0.02 (Mixtral).",
    )
    router_z_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of a loss that keeps routers' logits small (arXiv 2202.08906), likewise; OLMoE: 0.001.",
    )
    router_bias_speed: float = Field(
        default=0.0,
        ge=0,
        description="How much each step raises `model.router_bias` for experts with less than the mean load of the"
        " batch, and lowers it for those with more; DeepSeek-V3: 0.001.",
    )
    deterministic: bool = Field(
        default=False,
        description="Use only deterministic GPU kernels, so that runs can be compared bit by bit; slower. Training on"
        " CPUs is always deterministic (docs/reliability.md).",
    )
    collective_timeout_seconds: float = Field(
        default=1800.0, gt=0, description="How long a rank waits for the others in a collective, in seconds."
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="Checkpoints kept per stage; an older one is used if the newest is damaged."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("tensorboard",), description="Where metrics are logged in addition to metrics.jsonl."
    )

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        for name, lowest in (("optimizer", 1), ("parameters", 3)):
            if name in self.offload and self.zero_stage < lowest:
                raise ValueError(
                    f"offload of {name!r} with zero_stage {self.zero_stage}; at least zero_stage {lowest} was expected"
                )
        return self

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.router_aux_loss_coef and self.sequence_parallel_size > 1:
            raise ValueError(
                f"router_aux_loss_coef {self.router_aux_loss_coef} with sequence_parallel_size"
                f" {self.sequence_parallel_size}, whose ranks see only parts of a sequence; only one of the two was"
                " expected"
            )
        return self

    @model_validator(mode="after")
    def _check_compilation(self) -> Self:
        if self.compile_blocks and self.zero_stage == 3:
            raise ValueError(
                "compile_blocks with zero_stage 3, which must gather each layer's weights within a block;"
                " zero_stage 0 to 2 was expected"
            )
        if self.compile_blocks and self.sequence_parallel_size > 1:
            raise ValueError(
                f"compile_blocks with sequence_parallel_size {self.sequence_parallel_size}, whose exchanges between"
                " ranks are not compiled; only one of the two was expected"
            )
        return self

    @model_validator(mode="after")
    def _check_recording(self) -> Self:
        if self.record_micro_batches and self.offload:
            raise ValueError(
                f"record_micro_batches with offload of {self.offload[0]!r}, which DeepSpeed moves from Python in every"
                " pass; only one of the two was expected"
            )
        return self

    def on_ranks(self, num_ranks: int) -> Self:
        """Return the config as this many ranks run it. One rank shards nothing, so without offloading it needs no ZeRO,
        whose hooks would take time.

        Raises: ValueError if micro-batches are to be recorded on several ranks.
        """
        if self.record_micro_batches and num_ranks > 1:
            raise ValueError(
                f"record_micro_batches with {num_ranks} ranks, whose gradients meet in hooks of the backward pass, or"
                " whose tokens meet in attention; one rank was expected"
            )
        is_plain = num_ranks == 1 and self.zero_stage > 0 and not self.offload
        return self.model_copy(update={"zero_stage": 0}) if is_plain else self

    def node_weights_limit(self, device_bytes: int) -> int:
        """Return the most bytes of a rank's memory that its part of a node's copy of the weights may take."""
        return device_bytes // 4 if self.node_weights else 0

    def data_parallel_size(self, num_workers: int) -> int:
        """Return how many shares a batch has: one per group of ranks that read the same rows.

        Raises: ValueError unless the workers divide into groups.
        """
        return exact_div(num_workers, self.sequence_parallel_size, "workers over engine.sequence_parallel_size")

    def resolved_precision(self) -> Precision:
        if self.precision != "auto":
            return self.precision
        return "bf16" if torch.cuda.is_available() or cpu_multiplies_bf16() else "fp32"


def ranks_sharing_weights(weight_bytes: int, num_ranks: int, ranks_per_node: int, most_bytes: int) -> int:
    """Return how many ranks of a node share a second copy of ZeRO-3's weights (`engine.node_weights`), with at most
    `most_bytes` of it each; 1 = there is none.

    Ranks must fill several nodes. DeepSpeed expects equal nodes; 0 `ranks_per_node` = unequal.
    """
    if not 1 < ranks_per_node < num_ranks or num_ranks % ranks_per_node:
        return 1
    return ranks_per_node if weight_bytes <= ranks_per_node * most_bytes else 1


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 instructions (AMX, AVX-512 BF16); without them, bf16 is slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class OptimizerConfig(Config):
    """AdamW (arXiv 1711.05101) or Muon, with gradient clipping and a learning rate that depends on the step alone."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="`muon` trains the blocks' matrices by Muon (Jordan et al. 2024) and the rest by AdamW. Muon's"
        " updates are scaled to the size of AdamW's, so one learning rate serves both (arXiv 2502.16982, section 2.2).",
    )
    learning_rate: float = Field(gt=0, description="Peak learning rate, reached after warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="How the learning rate falls from its peak to `min_lr_ratio` of it."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up; 0 = none.")
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the end, as a fraction of the peak."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices; 0 = none.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="AdamW's decay rates of the first and second moments."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's ε, added to the root of the second moment.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this global L2 norm.")
    trained_layers: int | None = Field(
        default=None,
        ge=0,
        description="Train only the last N blocks and what follows them; all parameters by default.",
    )

    def check_sharding(self, engine: EngineConfig) -> None:
        """Raises: ValueError for Muon under ZeRO."""
        if self.kind == "muon" and engine.zero_stage > 0:
            raise ValueError(
                f"optimizer kind 'muon' needs whole matrices, but ZeRO {engine.zero_stage} shards them;"
                " 'adamw', or engine.zero_stage = 0, was expected"
            )

    def rate(self, step: int, num_steps: int) -> float:
        """Return the rate of step 0 .. num_steps - 1: linear warm-up, then down to `min_lr_ratio` of the peak."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        fall = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall[self.schedule])


class BatchConfig(Config):
    """A batch and how it is split.

    Rows of one length: gradient accumulation steps follow, batch_size / (ranks x micro_batch_size). Sequences of
    different lengths (the reward model, PPO): they are packed into rows, as many passes as that takes, the same number
    on every rank and of about as many tokens.
    """

    batch_size: int = Field(ge=1, description="Global batch size over all ranks, in the stage's unit.")
    micro_batch_size: int = Field(
        default=0,
        ge=0,
        description="Size of one rank's forward and backward pass, in the stage's unit; where sequences are packed,"
        " a pass has room for this many of the batch's longest. Set either this or `micro_batch_tokens`.",
    )
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens in one rank's forward and backward pass, including padding; only for the reward model,"
        " DPO and PPO.",
    )
    forward_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens in one rank's pass without gradients; 0 = as many as with gradients. Passes whose"
        " log-probabilities are compared with an update's always have as many as the update.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.micro_batch_size) == bool(self.micro_batch_tokens):
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size} and micro_batch_tokens is {self.micro_batch_tokens};"
                " exactly one of them was expected"
            )
        if self.micro_batch_size:
            exact_div(self.batch_size, self.micro_batch_size, "batch_size over micro_batch_size")
        return self

    @property
    def given_size(self) -> dict[str, int]:
        """The size of a pass, by the name of the key that gives it."""
        name = "micro_batch_size" if self.micro_batch_size else "micro_batch_tokens"
        return {name: getattr(self, name)}

    def num_micro_batches(self, num_ranks: int) -> int:
        """Return the micro-batches per rank and step, for rows of one length; an upper bound if sequences are packed.

        With `micro_batch_tokens` it is the number of sequences per rank. Raises: ValueError unless the division is
        exact.
        """
        if not self.micro_batch_size:
            return exact_div(self.batch_size, num_ranks, "batch_size over ranks")
        return exact_div(self.batch_size, num_ranks * self.micro_batch_size, "batch_size over ranks x micro_batch_size")


class TrainingConfig(Config):
    """What pretraining, SFT and the reward model share. `batch.batch_size` counts rows of the stage's own kind."""

    packs_sequences: ClassVar[bool] = False  # False: it trains on rows of one length

    batch: BatchConfig = Field(description="Batch sizes.")
    optimizer: OptimizerConfig = Field(description="Optimizer and learning rate.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability during training; 0 = none.")
    save_every_steps: int = Field(
        default=500, ge=1, description="Steps between checkpoints; the last step always writes one."
    )
    evaluate_every_steps: int = Field(
        default=500, ge=1, description="Steps between held-out evaluations; the last step always ends with one."
    )

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        for name in ("micro_batch_tokens", "forward_tokens"):
            if getattr(self.batch, name) and not self.packs_sequences:
                raise ValueError(
                    f"batch.{name}: all rows of this stage have the same length; micro_batch_size was expected"
                )
        return self


class InitConfig(Config):
    """What a stage starts from."""

    init_from: str = Field(
        default="",
        description="Model directory, .gguf file or hub id to start from; empty = the model of the stage before.",
    )
    end_token: str = Field(
        default="",
        description="End-of-text token, if the files of `init_from` name none or the wrong one; a response also ends"
        " with the token that closes a turn in the chat template.",
    )

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.end_token and not self.init_from:
            raise ValueError(
                "end_token is set without init_from; a vocabulary that this job learns has its own end token"
            )
        return self


def lora_field() -> Any:
    return Field(
        default=None,
        description="Train low-rank adapters on a frozen model (arXiv 2106.09685) instead of all weights. adapter/ has"
        " them in PEFT's layout, model/ has them merged. They need about ten times the learning rate.",
    )


def check_lora(lora: LoRAConfig | None, optimizers: Mapping[str, OptimizerConfig]) -> None:
    """Raises: ValueError if an optimizer, given by its section's name, does not work with adapters."""
    for name, optimizer in optimizers.items() if lora is not None else ():
        if optimizer.trained_layers is not None:
            raise ValueError(
                f"lora with {name}.trained_layers {optimizer.trained_layers}: LoRA freezes every layer and adds"
                " adapters to all of them; only one of the two keys was expected"
            )
        if optimizer.kind == "muon":
            raise ValueError(f'lora with {name}.kind "muon", whose updates have full rank; "adamw" was expected')


class FineTuningConfig(InitConfig, TrainingConfig):
    """What stages share that start from a model, and train all of it or adapters to it."""

    lora: LoRAConfig | None = lora_field()

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        check_lora(self.lora, {"optimizer": self.optimizer})
        return self


class LayersConfig(FineTuningConfig):
    """What stages share that may change the last blocks of the model they start from (transfer learning)."""

    leaves_policy: ClassVar[bool] = False  # whether later stages start from the model that has these blocks

    dropped_layers: int = Field(
        default=0, ge=0, description="Leave out the initial model's last N blocks, which know most about its own task."
    )
    added_layers: int = Field(default=0, ge=0, description="Then add N new blocks, with random weights.")

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.lora is not None and (self.dropped_layers or self.added_layers):
            raise ValueError(
                f"lora with dropped_layers {self.dropped_layers} and added_layers {self.added_layers}: adapters are"
                " additions to a frozen model as its files have it; only one of them was expected"
            )
        return self

    def reshaped(self, shape: ModelConfig) -> ModelConfig:
        """Return the shape of the trained model, given the initial model's. Raises: ValueError if no block is left."""
        return shape.with_blocks(self.dropped_layers, self.added_layers)
