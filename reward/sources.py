"""All kinds of rewards, which are the tables that `[ppo.reward]` may be, and the weighted sum of several of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, Tag, model_validator

from files.rows import Row
from lm.tokenizer import Messages
from reward.external import ExternalReward, ModelReward, NoReward, RemoteReward, RewardFunction, Scored
from reward.judge import JudgeReward
from reward.verifiers.verifier import Verifier
from training.config import by_kind

Source = Annotated[
    Annotated[Verifier, Tag("verifier")]
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[JudgeReward, Tag("judge")],
    by_kind("verifier", "function", "url", "judge"),
]


class RewardSum(ExternalReward):
    """The weighted sum of several sources that score texts. A response has a score if every source with a weight other
    than 0 scores it; a source with weight 0 is only logged.
    """

    model_config = ConfigDict(title="Reward sum")
    source_key: ClassVar[str] = "sources"
    noun: ClassVar[str] = "sum"

    kind: Literal["sum"] = Field(default="sum", description="The kind of this table.")
    sources: dict[str, Source] = Field(
        min_length=1, description="The sources by name: tables of kind `verifier`, `function`, `url` or `judge`."
    )
    objective_weights: dict[str, FiniteFloat] = Field(description="Weight of each source's score in the reward.")

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.objective_weights.keys() != self.sources.keys():
            raise ValueError(
                f"objective_weights has {', '.join(self.objective_weights) or 'no names'}; the names of the sources,"
                f" {', '.join(self.sources)}, were expected"
            )
        in_steps = next((name for name, source in self.sources.items() if getattr(source, "steps", None)), "")
        if in_steps:
            raise ValueError(
                f"sources.{in_steps}.steps: scores of whole responses are summed; a source without `steps` was expected"
            )
        if not any(self.objective_weights.values()):
            raise ValueError("objective_weights are all 0; a weight other than 0 was expected")
        return self

    def score(
        self, conversations: Sequence[Messages], responses: Sequence[str], rows: Sequence[Row] = ()
    ) -> list[Scored]:
        weights = {name: weight for name, weight in self.objective_weights.items() if weight}
        columns = [self.parts[name].score(conversations, responses, rows) for name in weights]
        return [self._sum(dict(zip(weights, of_response, strict=True))) for of_response in zip(*columns, strict=True)]

    def _sum(self, scored: Mapping[str, Scored]) -> Scored:
        failure = next((f"{name}: {one.failure}" for name, one in scored.items() if one.failure), "")
        if failure:
            kind = next(one.failure_kind for one in scored.values() if one.failure)
            return Scored(math.nan, failure, kind)
        return Scored(sum(self.objective_weights[name] * one.score for name, one in scored.items()))

    @property
    def reads_rows(self) -> bool:
        return any(source.reads_rows for source in self.sources.values())

    def fields_of(self, where: str, row: Row) -> Row:
        fields: Row = {}
        for source in self.sources.values():
            fields |= source.fields_of(where, row) if source.reads_rows else {}
        return fields

    def check(self, rows: Sequence[Row]) -> None:
        for source in self.sources.values():
            source.check(rows)

    @property
    def parts(self) -> Mapping[str, ExternalReward]:
        """The sources in the order of their weights, which is that of the scores."""
        return {name: self.sources[name] for name in self.objective_weights}

    @property
    def waits(self) -> bool:
        return all(source.waits for source in self.sources.values())

    def prepared(self, folder: Path) -> Self:
        return self.model_copy(update={"sources": {name: of.prepared(folder) for name, of in self.sources.items()}})

    def close(self) -> None:
        for source in self.sources.values():
            source.close()

    @property
    def source(self) -> str:
        return " + ".join(f"{self.objective_weights[name]:g} x {name}" for name in self.sources)

    @property
    def num_parallel(self) -> int:
        return 0


Reward = Annotated[
    Annotated[ModelReward, Tag("model")]
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[NoReward, Tag("none")]
    | Annotated[Verifier, Tag("verifier")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[RewardSum, Tag("sum")],
    by_kind("model", "function", "url", "none", "verifier", "judge", "sum"),
]
REWARD_KEYS = tuple(
    f"reward.{kind.source_key}" for kind in (ModelReward, RewardFunction, RemoteReward, Verifier, RewardSum)
)
