"""What the reward model's stage configures."""

from typing import Literal

from pydantic import Field, field_validator

from lm.model import SCORE
from reward.comparisons import RankingsConfig
from reward.learner import Ties
from training.config import InitConfig, TrainingConfig
from training.data import DataConfig


class RewardConfig(InitConfig, TrainingConfig):
    """`batch.batch_size` counts comparisons: one prompt's K responses and all rankings that labelers gave them.

    `init_from` may name a language model, a reward model, or an encoder; `chat_template` is for those that have none.
    `ties` = "soft" takes a tie for half a win, "davidson" for an outcome with a chance of its own (`reward.loss`). With
    `rating_coef` above 0 scores also learn the ratings that rankings carry: their loss's weight beside the rankings'.
    `labeler_weights` = "reliability" weighs each labeler's rankings by how often the others bear them out
    (`preferences.statistics.reliability`, from training rankings alone). `objectives` names those to learn, where the
    rankings are of several; each of several has a head of its own on the one body, and only its own rankings train it.
    """

    chat_template: str = ""  # "plain", a Jinja template, ..., or "" for the model's own
    rankings: RankingsConfig
    demonstrations: tuple[DataConfig, ...] = Field(min_length=1)
    objectives: tuple[str, ...] = ()  # () = the only one there is
    heldout_share: float = Field(gt=0, lt=1)
    num_epochs: float = Field(gt=0)
    ties: Ties = "soft"
    rating_coef: float = Field(default=0.0, ge=0)
    labeler_weights: Literal["equal", "reliability"] = "equal"
    # Demonstrations whose mean score becomes 0, and comparisons that a tie's chance is measured on.
    num_calibration: int = Field(default=512, ge=1)

    @field_validator("objectives")
    @classmethod
    def _are_distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"objectives is {list(names)}; names that differ were expected")
        return names

    @property
    def labels(self) -> tuple[str, ...]:
        """What the model's heads are called: a single one gives the score."""
        return self.objectives if len(self.objectives) > 1 else (SCORE,)
