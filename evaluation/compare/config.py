"""The config of a job's compare stage."""

from pydantic import Field

from training.config import Config
from training.data import DataConfig, OnOverlong, overlong_field


class CompareConfig(Config):
    """Judges each policy's responses to the same prompts by what training never used: the world's gold judge, a reward
    model, a function, or people, for whom the stage waits. The reward used in training may judge too, on prompts
    that it has not seen.
    """

    prompts: DataConfig = Field(description="Prompts that all policies answer.")
    cluster_by: str = Field(
        default="",
        description="Field of the prompts' rows that says which prompts depend on each other, such as the template they"
        " were made from; intervals and tests are then over these clusters. Empty = the prompts are independent.",
    )
    scored_by: tuple[str, ...] = Field(
        default=(),
        description='Names of the sources of a `reward` of kind "sum" that score responses to these prompts, as in'
        " ppo.prompts; empty = all. A row's own `scored_by` replaces it.",
    )
    judge_from: str = Field(
        default="", description="Model directory or hub id of a reward model that judges; empty = the world's judge."
    )
    judge_function: str = Field(
        default="",
        pattern=r"^(|[^:]+:[^:]+)$",
        description='Python function that judges, "MODULE:FUNCTION" or "FILE.py:FUNCTION"; higher is better.',
    )
    judge_people: str = Field(
        default="",
        description="Label store whose labelers judge: a file, or a PostgreSQL URL without a password.",
    )
    judge_reward: bool = Field(
        default=False,
        description="Whether the job's own reward judges, its reward model or PPO's function. It cannot show that the"
        " reward was gamed; any other judge can.",
    )
    num_labelers: int = Field(default=1, ge=1, description="Labelers per task of `judge_people`.")
    judged_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the tasks of `judge_people` that must have all their judgments; labelers skip some.",
    )
    on_overlong: OnOverlong = overlong_field()
    num_samples: int = Field(default=1, ge=1, description="Responses per prompt and policy.")
    best_of: int = Field(default=16, ge=2, description="Samples per prompt of the SFT policy, for best-of-n.")
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 = greedy.")
    num_shown: int = Field(default=12, ge=0, description="Prompts whose responses the report shows next to each other.")
