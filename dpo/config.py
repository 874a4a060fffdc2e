"""The DPO stage's settings. All but the rankings have a default; docs/dpo.md says where each default comes from."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from dpo.losses import DEFAULT, LOSSES, KTOConfig, PreferenceLoss
from reward.config import ComparisonsConfig
from training.config import BatchConfig, OptimizerConfig

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]

OPTIMIZER = {"learning_rate": 1e-6, "schedule": "linear", "warmup_steps": 20}
LORA_LEARNING_RATE = 1e-5  # ten times as much (`lm.lora.LoRAConfig`)


def _other_defaults(key: str) -> str:
    """Returns the losses with a default of their own for a key, for its description."""
    own = [f"{loss.defaults[key]:g} with `{loss.name}`" for loss in LOSSES.values() if key in loss.defaults]
    return f"the default is {' and '.join(own)}"


class DPOConfig(ComparisonsConfig):
    """`init_from` names the policy to start from, which is also the reference."""

    section = "dpo"
    objectives_key = "dpo.objective"

    objective: str = Field(
        default="", description="Objective to learn if the rankings have several; empty = the only one."
    )
    loss: LossName = Field(
        default=DEFAULT.name,
        description="; ".join(f"`{loss.name}` {loss.description}" for loss in LOSSES.values()) + ".",
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description="Weight of the KL from the reference: smaller lets the policy move further;"
        f" {_other_defaults('beta')}.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="Lead that the better response's implicit reward should have, for"
        f" {' and '.join(f'`{loss.name}`' for loss in LOSSES.values() if loss.has_margin)} alone;"
        f" {_other_defaults('margin')}.",
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
        loss = LOSSES.get(str(values.get("loss")))
        values = {**(loss.defaults if loss is not None else {}), **values}
        if values.get("lora") is not None:
            values = {"optimizer": {**OPTIMIZER, "learning_rate": LORA_LEARNING_RATE}, **values}
        return values

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        loss = self.preference_loss
        if self.margin and not loss.has_margin:
            with_margin = " and ".join(f'"{other.name}"' for other in LOSSES.values() if other.has_margin)
            raise ValueError(f'margin is {self.margin:g} with loss "{loss.name}"; only {with_margin} has a margin')
        if self.kto != KTOConfig() and not loss.is_unpaired:
            unpaired = " or ".join(f'"{other.name}"' for other in LOSSES.values() if other.is_unpaired)
            raise ValueError(f'kto is set, but loss is "{loss.name}"; loss = {unpaired} was expected')
        loss.refuse(self)
        return self

    @property
    def preference_loss(self) -> PreferenceLoss:
        return LOSSES[self.loss]

    @property
    def least_responses(self) -> int:
        return self.preference_loss.min_responses

    @property
    def named_objectives(self) -> tuple[str, ...]:
        return (self.objective,) if self.objective else ()
