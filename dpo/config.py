"""Settings of the DPO stage. All but the rankings have a default; docs/dpo.md says where each default comes from."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from reward.config import ComparisonsConfig
from training.config import BatchConfig, Config, OptimizerConfig

Loss = Literal["sigmoid", "ipo", "length_normalised", "ipo_length_normalised", "simpo", "kto"]
# Defaults of losses whose log-probs are per token, and so smaller than sums.
DEFAULTS = {
    "length_normalised": {"beta": 5.0},  # Tülu 3's (arXiv 2411.15124)
    "simpo": {"beta": 2.5, "margin": 1.375},  # for Llama 3 8B Instruct in SimPO's own repository
}

OPTIMIZER = {"learning_rate": 1e-6, "schedule": "linear", "warmup_steps": 20}
LORA_LEARNING_RATE = 1e-5  # ten times as much (`lm.lora.LoRAConfig`)


class KTOConfig(Config):
    """What `loss = "kto"` makes of ratings and flags, and how it weighs the two kinds of responses."""

    model_config = ConfigDict(title="KTO")

    desirable_above: float = Field(
        default=0.5,
        description="Responses rated above this are desirable, all other rated ones undesirable. The default suits"
        " labels of true and false, which are ratings of 1 and 0.",
    )
    undesirable_flags: tuple[str, ...] = Field(
        default=(), description="Flags of the labeling page that make a response undesirable, whatever its rating."
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of the loss of desirable responses.")
    undesirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="Weight of the loss of undesirable responses. The paper advises that the number of desirable"
        " responses times their weight be 1 to 4/3 times that of the undesirable ones.",
    )


class DPOConfig(ComparisonsConfig):
    """`init_from` names the policy to start from, which is also the reference."""

    section = "dpo"
    objectives_key = "dpo.objective"

    objective: str = Field(
        default="", description="Objective to learn if the rankings have several; empty = the only one."
    )
    loss: Loss = Field(
        default="sigmoid",
        description="`sigmoid` is DPO (arXiv 2305.18290, eq. 7); `ipo` its squared form (arXiv 2310.12036, eq. 17);"
        " `length_normalised` and `ipo_length_normalised` are these with log-probabilities per token (Tülu 3, arXiv"
        " 2411.15124; TRL's IPO); `simpo` has log-probabilities per token, a margin and no reference (arXiv 2405.14734,"
        " eq. 6); `kto` learns from labels of single responses (arXiv 2402.01306).",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Weight of the KL from the reference: smaller lets the policy move further. The default with"
        f" `length_normalised` is {DEFAULTS['length_normalised']['beta']:g}, and with `simpo`, where it scales"
        f" log-probabilities, {DEFAULTS['simpo']['beta']:g}.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="Lead that the better response's implicit reward should have, for `simpo` alone; its default there"
        f" is {DEFAULTS['simpo']['margin']:g}.",
    )
    kto: KTOConfig = Field(default=KTOConfig(), description="How `kto` reads labels; for that loss alone.")
    sft_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the SFT loss of the best responses, nats per token (arXiv 2404.19733); 0 = none.",
    )
    batch: BatchConfig = Field(
        default=BatchConfig(batch_size=64, micro_batch_tokens=8192),
        description="Batch sizes, in comparisons; by default 64, in passes of 8,192 tokens.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig.model_validate(OPTIMIZER),
        description="Optimizer and learning rate; by default 1e-6 (with `lora`"
        f" {LORA_LEARNING_RATE:g}) after 20 steps of warm-up, falling linearly.",
    )

    @model_validator(mode="before")
    @classmethod
    def _set_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**DEFAULTS.get(str(values.get("loss")), {}), **values}
        if values.get("lora") is not None:
            values = {"optimizer": {**OPTIMIZER, "learning_rate": LORA_LEARNING_RATE}, **values}
        return values

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.margin and self.loss != "simpo":
            raise ValueError(f'margin is {self.margin:g} with loss "{self.loss}"; only "simpo" has a margin')
        if self.kto != KTOConfig() and self.loss != "kto":
            raise ValueError(f'kto is set, but loss is "{self.loss}"; loss = "kto" was expected')
        if self.loss == "kto" and (self.ties == "davidson" or self.sft_coef):
            given = 'ties "davidson"' if self.ties == "davidson" else f"sft_coef {self.sft_coef:g}"
            raise ValueError(f'{given} with loss "kto", which learns from single responses; its default was expected')
        if self.margin and self.ties == "davidson":
            raise ValueError('ties is "davidson", which has no margins; ties = "soft" or margin = 0 was expected')
        if self.loss.startswith("ipo") and self.ties == "davidson":
            raise ValueError(
                f'ties is "davidson" with loss "{self.loss}", which has no probabilities; ties = "soft" was expected'
            )
        return self

    @property
    def least_responses(self) -> int:
        """A label of a single response is enough for KTO; other losses need pairs."""
        return 1 if self.loss == "kto" else super().least_responses

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with the model that it starts from."""
        return self.loss != "simpo"

    @property
    def named_objectives(self) -> tuple[str, ...]:
        return (self.objective,) if self.objective else ()
