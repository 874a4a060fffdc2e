"""The settings of rejection sampling."""

from pydantic import Field

from training.config import FineTuningConfig
from training.data import DataConfig, OnOverlong, overlong_field


class RejectionConfig(FineTuningConfig):
    """`batch.batch_size` counts packed rows of `seq_len` tokens."""

    prompts: DataConfig = Field(description="Prompts to sample responses to.")
    on_overlong: OnOverlong = overlong_field()
    reward_from: str = Field(
        default="", description="Model directory or hub id of the reward model that chooses; empty = [reward]'s."
    )
    objective_weights: dict[str, float] = Field(
        default={}, description="Weight of each objective of a reward model with several."
    )
    num_samples: int = Field(default=8, ge=2, description="Responses per prompt, of which the best is kept.")
    max_new_tokens: int = Field(
        ge=1, description="Length limit of a response, in tokens; responses that reach it are not kept."
    )
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    heldout_share: float = Field(default=0.05, gt=0, le=0.5, description="Fraction of the kept responses held out.")
    seq_len: int = Field(
        ge=2, description="Tokens per packed row; a longer prompt with its response is left out and counted."
    )
    num_epochs: float = Field(default=1.0, gt=0, description="Passes over the kept responses.")
