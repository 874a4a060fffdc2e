"""Settings of the stages that learn from rankings, and those that only the reward model's stage has."""

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from files.conversations import AUTO
from lm.model import SCORE
from preferences.records import MIN_RESPONSES
from reward.objective import Ties
from training.config import FineTuningConfig, LayersConfig
from training.data import DataConfig, OnOverlong, SourceConfig, overlong_field


class RankingsConfig(SourceConfig):
    """Where rankings come from, and their format."""

    format: str = Field(
        default=AUTO,
        description="Format of the rows, one of those in docs/labels-formats.md; `auto` recognises it by the fields.",
    )

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        from preferences.formats.registry import format_to_read  # needs SQLAlchemy, which a bare GPU machine lacks

        return name if name == AUTO else format_to_read(name).name


class ComparisonsConfig(FineTuningConfig):
    """What the reward model and DPO share: rankings of K responses, and how they become a loss.

    `batch.batch_size` counts comparisons: one prompt's K responses and all rankings that labelers gave them.
    """

    packs_sequences = True
    section: ClassVar[str]  # of the job file, for messages
    objectives_key: ClassVar[str]  # the field that names objectives
    keeps_end: ClassVar[bool] = False  # whether a truncated response still ends with the end token

    chat_template: str = Field(
        default="",
        description="Chat template: `chat`, `plain`, a Jinja template, or `non-thinking`, the model's own with thoughts"
        " turned off; empty = the model's own.",
    )
    rankings: RankingsConfig = Field(description="Rankings to learn from.")
    on_overlong: OnOverlong = overlong_field()
    heldout_share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Fraction of the conversations whose rankings are held out. The split depends only on the"
        " messages up to the user's first one, so all turns of a conversation are on the same side.",
    )
    num_epochs: float = Field(default=1.0, gt=0, description="Passes over the comparisons.")
    ties: Ties = Field(
        default="soft",
        description="How ties are learned: `soft` counts a tie as half a win, `davidson` as an outcome with its own"
        " probability.",
    )
    labeler_weights: Literal["equal", "reliability"] = Field(
        default="equal",
        description="How labelers' rankings are weighted: `equal`, or `reliability`, by how often other labelers agree"
        " with them (counted on training rankings only). Training loss and accuracy are then weighted means; held-out"
        " metrics weigh all rankings the same.",
    )

    @property
    def least_responses(self) -> int:
        """How many responses a task must have to be learned from."""
        return MIN_RESPONSES

    @property
    def named_objectives(self) -> tuple[str, ...]:
        """The objectives whose rankings are learned; () = the only one that the rankings have."""
        raise NotImplementedError


class RewardConfig(LayersConfig, ComparisonsConfig):
    """`init_from` may name a language model, a reward model, or an encoder."""

    section = "reward"
    keeps_end = True
    objectives_key = "reward.objectives"

    demonstrations: tuple[DataConfig, ...] = Field(
        default=(),
        description="Conversations whose mean score is set to 0; empty = the best responses of the rankings.",
    )
    objectives: tuple[str, ...] = Field(
        default=(),
        description="Objectives to learn if the rankings have several; each gets its own head on the shared trunk,"
        " trained on the rankings of that objective. Empty = the only objective.",
    )
    rating_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the loss on labelers' ratings, relative to the ranking loss; 0 = none.",
    )
    margin_coef: float = Field(
        default=0.0,
        ge=0,
        description="By how much the better response's score should exceed the other's, per standard deviation of the"
        " ratings by which they differ (Llama 2, arXiv 2307.09288, eq. 2); 0 = no margin.",
    )

    @field_validator("objectives")
    @classmethod
    def _are_distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"objectives is {list(names)}; distinct names that are not empty were expected")
        return names

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.margin_coef and self.ties == "davidson":
            raise ValueError('margin_coef with ties "davidson", which has no margins; ties = "soft" was expected')
        return self

    @property
    def named_objectives(self) -> tuple[str, ...]:
        return self.objectives

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the model's heads; a single head is called "score"."""
        return self.objectives if len(self.objectives) > 1 else (SCORE,)
