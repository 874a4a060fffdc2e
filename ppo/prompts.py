"""Prompts from several sources: the tables of `ppo.prompts`, which prompts each iteration draws, and metrics by source.

Without weights, the prompts of all sources form one list, and each epoch visits every prompt once. With weights, each
source has its own order, and its weight sets how many prompts an iteration takes from it.

Shape letters: B responses, S sources.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Discriminator, Field, FiniteFloat, Tag
from torch import Tensor

from files.hashes import derive_seed
from files.rows import is_file_name
from ppo.groups import group_metrics
from ppo.rollout import Rollout
from reward.sources import unmet_scorers
from training.data import DataConfig
from training.packing import Sampler


class PromptSource(DataConfig):
    """One of several sources of PPO's prompts (docs/rewards.md)."""

    model_config = ConfigDict(title="Prompt source")

    name: str = Field(
        default="",
        pattern=r"^[\w.-]*$",
        description="Name of the source in metrics, reports and ids of prompts; empty = that of its file or data set.",
    )
    weight: FiniteFloat = Field(
        default=0.0,
        ge=0,
        description="Share of each iteration's prompts that come from this source, relative to the other weights. If no"
        " source has a weight, all prompts form one list, and each epoch visits every prompt once.",
    )
    scored_by: tuple[str, ...] = Field(
        default=(),
        description="Names in `ppo.reward.sources` of the rewards that score responses to these prompts; empty = all of"
        " them. A row's own `scored_by` takes precedence.",
    )

    @property
    def title(self) -> str:
        """The source's name, or that of its file or data set: "math" for data/math.jsonl.gz, "gsm8k" for a hub id."""
        own = Path(self.source.rpartition(":")[2])
        if is_file_name(self.source):
            own = Path(own.name.removesuffix(".gz")).with_suffix("")
        return self.name or re.sub(r"[^\w.-]", "-", own.name)


def _number_of_tables(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


Prompts = Annotated[
    Annotated[DataConfig, Tag("one")] | Annotated[tuple[PromptSource, ...], Tag("several")],
    Discriminator(
        _number_of_tables, custom_error_type="prompts", custom_error_message="a table or a list of tables was expected"
    ),
]


def unmet_needs(sources: Sequence[PromptSource], rewards: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with several sources of prompts. `rewards` are the names of the rewards in a sum."""
    titles = [source.title for source in sources]
    for number, source in enumerate(sources):
        if source.title in titles[:number]:
            yield (
                f"prompts.{titles.index(source.title)} and prompts.{number} are both called {source.title!r};"
                " different values of `name` were expected"
            )
        if not source.weight and any(other.weight for other in sources):
            yield (
                f"prompts.{number} has no `weight`, but others have one; a weight for every source, or for none, was"
                " expected"
            )
        if problem := unmet_scorers(f"prompts.{number}.scored_by", source.scored_by, rewards):
            yield problem


class Mixture:
    """The rows of each iteration's prompts, from several sources in fixed shares.

    Shares are proportional to `weights`, taken exactly as their decimals are written. A source whose share of
    `batch_size` is a whole number has exactly that many prompts in every iteration. For any source, the number of
    prompts drawn since the beginning differs from its share by less than one (the chairman assignment problem,
    R. Tijdeman, Discrete Mathematics 32 (1980) 323-330).

    A pure function of (seed, iteration), as `Sampler` is; each source has its own epochs.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int) -> None:
        """`sizes` are the numbers of prompts per source. Rows are numbered source by source."""
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [batch_size * weight / sum(exact) for weight in exact]
        self.seed, self._whole = seed, [int(share) for share in shares]
        self._rests = [share - int(share) for share in shares]
        self._starts = list(accumulate(sizes, initial=0))
        self._orders = [Sampler(size, 1, derive_seed(seed, "source", number)) for number, size in enumerate(sizes)]
        self._extra = [[0] * len(sizes)]  # by iteration: prompts of each source beyond `_whole`, before it

    def batch(self, step: int) -> NDArray[np.int64]:
        """Row numbers [batch_size] of iteration 0, 1, ...; sources are mixed at random."""
        spans = zip(self._orders, self.drawn(step), self.drawn(step + 1), self._starts, strict=False)
        rows = np.concatenate([first + order.rows(start, stop) for order, start, stop, first in spans])
        return np.random.default_rng([self.seed, step]).permutation(rows)

    def drawn(self, steps: int) -> list[int]:
        """Returns how many prompts of each source the first `steps` iterations draw."""
        while len(self._extra) <= steps:
            self._extra.append(self._more(self._extra[-1]))
        return [steps * whole + extra for whole, extra in zip(self._whole, self._extra[steps], strict=True)]

    def _more(self, extra: Sequence[int]) -> list[int]:
        """Returns the extra prompts after one more iteration: Tijdeman's rule chooses the source of each."""
        num_extra, drawn = int(sum(self._rests)), list(extra)
        places = [place for place, rest in enumerate(self._rests) if rest]
        for _ in range(num_extra):
            number = sum(drawn) + 1
            margin = Fraction(1, 2 * len(places) - 2)
            rate = {place: self._rests[place] / num_extra for place in places}
            behind = {place: number * rate[place] - drawn[place] for place in places}
            due = [place for place in places if behind[place] >= margin]
            drawn[min(due, key=lambda place: (1 - margin - behind[place]) / rate[place])] += 1
        return drawn


def order_of(sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int) -> Sampler | Mixture:
    """Returns the order of the prompts. `sizes` are the numbers of prompts per source; without weights, all form one
    list.
    """
    if weights:
        return Mixture(sizes, weights, batch_size, seed)
    return Sampler(sum(sizes), batch_size, seed)


def first_distinct(order: Sampler | Mixture, number: int) -> list[int]:
    """Returns the first `number` different rows of an order; fewer if `number` iterations do not have that many."""
    drawn = (int(row) for step in range(number) for row in order.batch(step))
    return list(islice(dict.fromkeys(drawn), number))


def before_repeat(order: Sampler | Mixture, number: int) -> list[int]:
    """Returns the first `number` rows of an order, or fewer: it stops before the first repeated row. So no row occurs
    twice, and the shares of the sources hold.
    """
    rows: dict[int, None] = {}
    for row in (int(row) for step in range(number) for row in order.batch(step)):
        if row in rows:
            break
        rows[row] = None
    return list(rows)[:number]


@dataclass(frozen=True)
class NamedSources:
    """The names of several sources, and how many prompts of each there are."""

    names: Sequence[str]
    sizes: Sequence[int]

    def metrics(
        self, rollout: Rollout, scores_B: Tensor, scaled_B: Tensor, samples_per_prompt: int, *, has_score: bool
    ) -> dict[str, float]:
        """Returns the metrics of each source's responses. A source without responses in this rollout has no metrics.

        `scores_B` are NaN where scoring failed; the K adjacent responses to a prompt form a group. Groups are compared
        by `scaled_B`, which is in the unit of the rewards.
        """
        ends_S = torch.tensor(self.sizes).cumsum(0)
        source_B = torch.searchsorted(ends_S, rollout.prompt_rows_B, right=True)
        found: dict[str, float] = {}
        for number, name in enumerate(self.names):
            rows = (source_B == number).nonzero()[:, 0]
            if not len(rows):
                continue
            scored = torch.isfinite(scores_B[rows])
            values = {
                "share": len(rows) / len(rollout),
                "tokens": float(rollout.num_written_B[rows].float().mean()),
                "eos_rate": float(rollout.finished_B[rows].float().mean()),
            }
            if has_score:
                values |= {"failed": float((~scored).float().mean()), "score": float(scores_B[rows][scored].mean())}
            if has_score and samples_per_prompt > 1:
                groups = group_metrics(scaled_B[rows], scored, samples_per_prompt)
                values["informative_share"] = groups["informative_share"]
            found |= {f"source_{metric}/{name}": value for metric, value in values.items()}
        return found
