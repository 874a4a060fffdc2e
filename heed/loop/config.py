"""The [loop] section of a job, and what it asks of each round."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from preferences.task_selection import RULES, Rule
from reward.collect import CollectConfig
from training.config import Config

UNIFORM = "uniform"
GAIN = "gain"  # the stage that compares a round's policy with the one before


def name_of_round(stage: str, number: int) -> str:
    """Returns the name of a stage in a round: "ppo", "ppo_2", "ppo_3"."""
    return stage if number == 1 else f"{stage}_{number}"


class LoopConfig(Config):
    """Rounds of collect, reward model, policy and comparison (`heed loop`), within a budget of labels. A label is one
    labeler's judgment of one task.
    """

    labels: int = Field(ge=1, description="Labels to ask for in all rounds together.")
    rounds: int = Field(ge=1, description="Rounds at most.")
    labels_per_round: tuple[int, ...] = Field(
        default=(), description="Labels to ask for in each round; empty = the budget in equal parts."
    )
    least_gain: float = Field(
        default=0.0,
        description="Stop if the interval of the last round's gain lies below this, per hundred labels and in the"
        " judge's unit (for people, the share of comparisons won above one half).",
    )
    choose: str = Field(
        default=UNIFORM,
        description="Rule that chooses what to label by the scores of the newest reward models:"
        f" {', '.join(RULES)} (docs/labels-tasks.md). Rounds with too few reward models use uniform.",
    )
    evaluation_share: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the prompts whose tasks are always chosen uniformly."
    )
    num_samples: int = Field(
        default=8, ge=2, description="Samples per prompt, among which a task's responses are chosen."
    )
    prompts_per_task: float = Field(default=1.5, ge=1, description="Prompts that compete for each task.")
    store: str = Field(
        default="",
        description="Label store of the people who label: a file, or a PostgreSQL URL without a password; empty = the"
        " world's labelers answer.",
    )
    enough_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the labels asked for so far that people must have given before a round trains; tasks"
        " without an answer stay open, and their labels count later.",
    )

    @field_validator("choose")
    @classmethod
    def _is_a_rule(cls, name: str) -> str:
        if name not in RULES:
            raise ValueError(f"one of {', '.join(RULES)} was expected")
        return name

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.rounds > self.labels:
            raise ValueError(
                f"rounds is {self.rounds} and labels is {self.labels}; at least one label per round was expected"
            )
        if self.labels_per_round and len(self.labels_per_round) != self.rounds:
            raise ValueError(
                f"labels_per_round has {len(self.labels_per_round)} entries; one for each of rounds = {self.rounds} was"
                " expected"
            )
        if any(number < 1 for number in self.labels_per_round) or sum(self.labels_per_round) > self.labels:
            raise ValueError(
                f"labels_per_round is {list(self.labels_per_round)}; numbers from 1 whose sum is at most labels ="
                f" {self.labels} were expected"
            )
        return self

    @property
    def rule(self) -> Rule:
        return RULES[self.choose]

    def labels_until(self, number: int) -> int:
        """Returns the labels that rounds 1 to `number` ask for together."""
        if self.labels_per_round:
            return sum(self.labels_per_round[:number])
        return self.labels * min(number, self.rounds) // self.rounds

    def asked_until(self, number: int) -> int:
        """Returns the labels that round `number` has tasks in the store for. People get their tasks a round ahead, so
        that they have some while models train.
        """
        return self.labels_until(number + 1 if self.store else number)

    def models_for(self, number: int, *, has_reward: bool) -> tuple[int, ...]:
        """Returns the rounds whose reward models choose the tasks of round `number`, newest first; () = uniformly."""
        num_models = self.rule.num_models
        if not has_reward or number - 1 < num_models:
            return ()
        return tuple(range(number - 1, number - 1 - num_models, -1))


class RoundConfig(CollectConfig):
    """[collect] with what the loop asks of one round. It is derived from [loop], so that lineage sees every setting."""

    round: int = Field(ge=1, description="Number of the round, from 1.")
    labels: int = Field(ge=1, description="Labels that this and earlier rounds ask for.")
    asked: int = Field(ge=1, description="Labels that the store has tasks for, including those of later rounds.")
    asked_before: int = Field(ge=0, description="Labels that earlier rounds have tasks for.")
    choose: str = Field(description="Rule that chooses the tasks.")
    models: tuple[str, ...] = Field(description="Stages whose reward models the rule reads, newest first.")
    evaluation_share: float = Field(description="As in [loop].")
    num_samples: int = Field(description="As in [loop].")
    prompts_per_task: float = Field(description="As in [loop].")
    store: str = Field(description="As in [loop].")
    enough_share: float = Field(description="As in [loop].")

    @property
    def labels_per_task(self) -> float:
        return 1 + self.overlap_share * (self.overlap_labelers - 1)

    def num_tasks(self, num_labels: int) -> int:
        """Returns how many new tasks ask for at most this many labels."""
        found = int(num_labels / self.labels_per_task)
        while sum(self.quotas(found)) > num_labels:
            found -= 1
        return found

    def quotas(self, num_tasks: int) -> list[int]:
        """Returns how many labelers each new task wants."""
        overlapping = round(self.overlap_share * num_tasks)
        return [self.overlap_labelers if place < overlapping else 1 for place in range(num_tasks)]

    def num_prompts(self, num_tasks: int) -> int:
        """Returns how many prompts compete for this many tasks."""
        return round(self.prompts_per_task * num_tasks)


def round_settings(loop: LoopConfig, number: int, *, has_reward: bool) -> dict[str, object]:
    """Returns the fields of `RoundConfig` that come from the loop."""
    models = loop.models_for(number, has_reward=has_reward)
    return {
        "round": number,
        "labels": loop.labels_until(number),
        "asked": loop.asked_until(number),
        "asked_before": loop.asked_until(number - 1) if number > 1 else 0,
        "choose": loop.choose if models else UNIFORM,
        "models": tuple(name_of_round("reward", earlier) for earlier in models),
        "evaluation_share": loop.evaluation_share,
        "num_samples": loop.num_samples,
        "prompts_per_task": loop.prompts_per_task,
        "store": loop.store,
        "enough_share": loop.enough_share,
    }
