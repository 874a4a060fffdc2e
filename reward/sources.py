"""All kinds of rewards, which are the tables that `[ppo.reward]` may be, and the weighted sum of several of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import ConfigDict, Field, FiniteFloat, Tag, model_validator

from files.fields import shown
from files.rows import Row
from lm.tokenizer import Messages
from reward.external import ExternalReward, ModelReward, NoReward, RemoteReward, RewardFunction, Scored, score_in_parts
from reward.judge import JudgeReward
from reward.verifiers.verifier import Verifier
from training.config import by_kind
from training.data import RowFields

Source = Annotated[
    Annotated[Verifier, Tag("verifier")]
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[JudgeReward, Tag("judge")],
    by_kind("verifier", "function", "url", "judge"),
]


SCORED_BY = "scored_by"  # the field in which a prompt's row names the rewards of a sum that score its responses


class RewardSum(ExternalReward):
    """The weighted sum of several rewards that score texts. All of them score a response, or only those that its
    prompt's row names in `scored_by`. A response has a score if each of these with a weight other than 0 scores it; a
    reward with weight 0 is only logged.
    """

    model_config = ConfigDict(title="Reward sum")
    source_key: ClassVar[str] = "sources"
    noun: ClassVar[str] = "sum"

    kind: Literal["sum"] = Field(default="sum", description="The kind of this table.")
    sources: dict[str, Source] = Field(
        min_length=1, description="The rewards by name: tables of kind `verifier`, `function`, `url` or `judge`."
    )
    objective_weights: dict[str, FiniteFloat] = Field(description="Weight of each named reward in the sum.")

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.objective_weights.keys() != self.sources.keys():
            raise ValueError(
                f"objective_weights has {', '.join(self.objective_weights) or 'no names'}; the names of the sources,"
                f" {', '.join(self.sources)}, were expected"
            )
        if not any(self.objective_weights.values()):
            raise ValueError("objective_weights are all 0; a weight other than 0 was expected")
        return self

    def score(
        self, conversations: Sequence[Messages], responses: Sequence[str], rows: Sequence[Row] = ()
    ) -> list[Scored]:
        of_responses: list[dict[str, Scored]] = [{} for _ in responses]
        for name in (name for name, weight in self.objective_weights.items() if weight):
            column = self._column(name, conversations, responses, max(1, len(responses)), rows)
            for place in self._scored_by(name, len(responses), rows):
                of_responses[place][name] = column[place]
        return [self._sum(of_response) for of_response in of_responses]

    def columns(
        self, conversations: Sequence[Messages], responses: Sequence[str], size: int, rows: Sequence[Row] = ()
    ) -> list[list[Scored]]:
        return [self._column(name, conversations, responses, size, rows) for name in self.parts]

    def _column(
        self, name: str, conversations: Sequence[Messages], responses: Sequence[str], size: int, rows: Sequence[Row]
    ) -> list[Scored]:
        """Returns a source's scores; NaN without a failure for responses that it does not score."""
        places, column = self._scored_by(name, len(responses), rows), [Scored(math.nan)] * len(responses)
        asked, answered = [conversations[place] for place in places], [responses[place] for place in places]
        own_rows = [rows[place] for place in places] if rows else ()
        for place, scored in zip(
            places, score_in_parts(self.parts[name], asked, answered, size, own_rows), strict=True
        ):
            column[place] = scored
        return column

    def _scored_by(self, name: str, num_responses: int, rows: Sequence[Row]) -> list[int]:
        """Returns the places of the responses that a source scores."""
        return [place for place in range(num_responses) if not rows or name in self.parts_for(rows[place])]

    def parts_for(self, row: Row) -> Sequence[str]:
        named: Sequence[str] = row.get(SCORED_BY) or ()
        return [name for name in self.parts if name in named] if named else list(self.parts)

    def _sum(self, scored: Mapping[str, Scored]) -> Scored:
        failure = next((f"{name}: {one.failure}" for name, one in scored.items() if one.failure), "")
        if failure:
            kind = next(one.failure_kind for one in scored.values() if one.failure)
            return Scored(math.nan, failure, kind)
        return Scored(sum(self.objective_weights[name] * one.score for name, one in scored.items()))

    @property
    def reads_rows(self) -> bool:
        return True  # at least `scored_by`

    def fields_of(self, where: str, row: Row) -> Row:
        named = row.get(SCORED_BY)
        fields: Row = {} if named is None else {SCORED_BY: self._checked_names(where, named)}
        for name in self.parts_for(fields):
            source = self.sources[name]
            fields |= source.fields_of(where, row) if source.reads_rows else {}
        return fields

    def _checked_names(self, where: str, named: Any) -> list[str]:
        """Returns the sources that a row names. Raises: ValueError unless they exist and one of them has a weight."""
        if (
            not isinstance(named, list)
            or not named
            or not all(isinstance(name, str) and name in self.sources for name in named)
        ):
            raise ValueError(
                f"{where}: field {SCORED_BY!r} is {shown(named)}; a list of sources of the reward was expected:"
                f" {', '.join(self.sources)}"
            )
        if not any(self.objective_weights[name] for name in named):
            raise ValueError(
                f"{where}: field {SCORED_BY!r} is {shown(named)}, whose objective_weights are all 0; a name with a"
                " weight other than 0 was expected"
            )
        return named

    def check(self, rows: Iterable[Row]) -> None:
        for name, source in self.sources.items():
            source.check(row for row in rows if name in self.parts_for(row))

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


Kinds = (
    Annotated[ModelReward, Tag("model")]  # also a table without `kind`
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[NoReward, Tag("none")]
    | Annotated[Verifier, Tag("verifier")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[RewardSum, Tag("sum")]
)
_BY_NAME = {tag.tag: kind for kind, tag in map(get_args, get_args(Kinds))}
Reward = Annotated[Kinds, by_kind(*_BY_NAME)]
# The keys that name where scores come from, in place of a reward stage.
REWARD_KEYS = tuple(dict.fromkeys(f"reward.{kind.source_key}" for kind in _BY_NAME.values() if kind is not NoReward))


def unmet_scorers(field: str, scored_by: Sequence[str], rewards: Sequence[str]) -> str:
    """Returns what is wrong with the names of rewards in `scored_by`; "" if nothing is."""
    unknown = next((name for name in scored_by if name not in rewards), "")
    wanted = f"some of {', '.join(rewards)}" if rewards else 'names in the `sources` of a reward of kind "sum"'
    return f"{field} has {unknown!r}; {wanted} were expected" if unknown else ""


def with_scored_by(fields: RowFields, scored_by: Sequence[str]) -> RowFields:
    """Returns the fields that a source's rows keep. A row without a `scored_by` of its own gets the source's."""
    if not scored_by:
        return fields
    names = list(scored_by)
    return RowFields(
        lambda where, row: fields.of(where, row if row.get(SCORED_BY) is not None else {**row, SCORED_BY: names}),
        f"{fields.key}{SCORED_BY} {names}",
    )
