"""What a job says of its compare stage."""

from pydantic import Field

from training.config import Config
from training.data import DataConfig


class CompareConfig(Config):
    """Responses of each policy to the same prompts, judged by the world's gold judge."""

    prompts: DataConfig = Field(description="Prompts that all policies answer.")
    num_samples: int = Field(default=1, ge=1, description="Responses per prompt and policy.")
    best_of: int = Field(default=16, ge=2, description="Samples per prompt of the SFT policy, for best-of-n.")
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 = greedy.")
    num_shown: int = Field(default=12, ge=0, description="Prompts whose responses the report shows next to each other.")
