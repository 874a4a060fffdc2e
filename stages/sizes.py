"""How much data a job has, for `heed plan` and `heed init`: rows of its sources, and tokens of the rows.

Rows are counted if the data exists, and otherwise assumed; assumptions are reported. Tokens are counted, or estimated
from a sample if the source is large. Times depend on the mean; memory depends on the longest row, which must not be
underestimated.
"""

import heapq
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

from files.rows import InvalidRows
from training.data import Overlong, SourceConfig, read_valid, sum_of
from training.tokens import SKIPPED, TRUNCATED

SAMPLE_ROWS = 1000  # the longest in bytes, plus one to two times as many rows spread evenly over the source

Row = TypeVar("Row")
Value = TypeVar("Value")


@dataclass(frozen=True)
class SourceSize:
    """Rows of a source, and if rows are comparisons, the responses in each."""

    num_rows: int
    responses_per_row: int = 1


@dataclass(frozen=True)
class Measures:
    """Measurements of a job's data, made once and shared by all plans of the job."""

    known: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """Returns the value of `make`, which is called at most once per key."""
        if key not in self.known:
            self.known[key] = make()
        value: Value = self.known[key]
        return value


@dataclass(frozen=True)
class ResponseTokens:
    """Lengths of responses, each drawn with a probability in proportion to its weight."""

    weights: Mapping[int, float]

    @classmethod
    def parse(cls, text: str) -> "ResponseTokens":
        """Read lengths with weights, such as "100:9,1000:1". Raises: ValueError naming the option."""
        pairs = [re.fullmatch(r"([1-9]\d*):(\d+(?:\.\d+)?)", part.strip()) for part in text.split(",")]
        weights = {int(pair[1]): float(pair[2]) for pair in pairs if pair is not None}
        if len(weights) < len(pairs) or not all(weights.values()):
            raise ValueError(
                f"--response-tokens {text!r}: different lengths with weights above 0, TOKENS:WEIGHT,TOKENS:WEIGHT,...,"
                " were expected, such as 100:9,1000:1"
            )
        return cls(weights)

    @property
    def mean(self) -> float:
        return sum(tokens * weight for tokens, weight in self.weights.items()) / sum(self.weights.values())

    def draw(self, number: int, chance: Random) -> list[int]:
        return chance.choices([*self.weights], [*self.weights.values()], k=number)


class Sizes:
    """Rows and tokens of one job's data. A source that cannot be counted is assumed to have `assumed_rows`.

    `response_tokens` are the lengths of PPO's responses; None = all as long as they may be. `measures` keeps counts for
    other plans of the same job. `world_rows` returns the rows that the world's section gives for a source, and
    `stage_size` what a stage of the job will write for it; both return None for any other source. `longest` bounds the
    tokens of the conversations that the job teaches; 0 = bounded only by the context.
    """

    def __init__(
        self,
        max_position_embeddings: int,
        assumed_rows: int,
        *,
        longest: int = 0,
        response_tokens: ResponseTokens | None = None,
        measures: Measures | None = None,
        world_rows: Callable[[str], int | None] = lambda _: None,
        stage_size: Callable[[str], SourceSize | None] = lambda _: None,
    ) -> None:
        self.max_position_embeddings, self.assumed_rows, self.longest = max_position_embeddings, assumed_rows, longest
        self.response_tokens, self.world_rows, self.stage_size = response_tokens, world_rows, stage_size
        self.measures = measures or Measures()
        self.assumptions: list[str] = []

    def assume(self, what: str) -> None:
        """Report this assumption with the stage that is being planned."""
        self.assumptions.append(what)

    def taken(self) -> tuple[str, ...]:
        """Return the assumptions made since the last call, each once."""
        assumptions, self.assumptions = tuple(dict.fromkeys(self.assumptions)), []
        return assumptions

    def num_rows(self, data: SourceConfig) -> int:
        """Return the rows of a source: counted if the file exists, else known from the job or assumed."""
        limit, skipped = data.max_rows or math.inf, data.skip_rows
        written, named = self.stage_size(data.source), self.world_rows(data.source)
        if written is not None:
            return int(min(limit, max(0, written.num_rows - skipped)))
        if named is not None:
            return int(min(limit, max(0, named - skipped)))
        if Path(data.source).exists():
            return self.measures.get(f"rows {data.model_dump_json()}", lambda: _count_rows(data))
        if data.max_rows:
            return data.max_rows
        self.assume(f"assumes that {data.source} has {self.assumed_rows:,} rows (--rows)")
        return self.assumed_rows

    def conversation_tokens(self, response_tokens: int = 0) -> int:
        """Return a bound on the tokens of a prompt with its response, for data that does not exist yet: the longest
        conversation that the job teaches, or the context.
        """
        if not self.longest:
            return self.max_position_embeddings
        return max(min(self.max_position_embeddings, self.longest), response_tokens + 1)


def _count_rows(data: SourceConfig) -> int:
    """Count the rows of a file that can be parsed. Raises: ValueError as `InvalidRows.finish` for the others."""
    return sum(1 for _ in read_valid(data, lambda _, row: row, InvalidRows(data.source, data.on_invalid)))


@dataclass(frozen=True)
class Lengths:
    """Tokens of a source's rows. `longest` is an upper bound if only a sample was measured.

    `response_share` is the largest fraction of a row's tokens that belongs to its response; `spread` has the token
    counts of rows spread evenly over the source. Skipped rows count only in `overlong`, which is about measured rows.
    """

    num_rows: int
    num_measured: int
    mean: float
    shortest: int
    longest: int
    longest_response: int = 0
    response_share: float = 1.0
    spread: tuple[int, ...] = ()
    overlong: Overlong = field(default_factory=Overlong)

    @classmethod
    def bound(cls, num_tokens: int) -> "Lengths":
        """Stands for rows that could not be read, each assumed to be this long."""
        return cls(0, 0, num_tokens, num_tokens, num_tokens)

    def plus(self, num_tokens: int) -> "Lengths":
        """Returns the lengths of the rows with a response of `num_tokens` added to each."""
        return replace(
            self,
            mean=self.mean + num_tokens,
            shortest=self.shortest + num_tokens,
            longest=self.longest + num_tokens,
            longest_response=num_tokens,
            spread=tuple(length + num_tokens for length in self.spread),
        )

    def line(self, source: str, what: str) -> str:
        """Describe what was measured, such as "p.jsonl: 1,000 prompts of 61 tokens on average, 118 at most".

        Raises: ValueError if all rows are too long.
        """
        return f"{source}: {self.num_rows:,} {what} of {self.tokens(source, what)}"

    def tokens(self, source: str, what: str) -> str:
        """Describe the rows' lengths, such as "61 tokens on average, 118 at most". Raises: as `line`."""
        if self.overlong and not self.num_measured:
            raise ValueError(
                f"{source}: all {self.overlong.num_rows:,} measured {what} are too long; shorter ones were expected"
            )
        text = f"{self.mean:,.0f} tokens on average, {self.longest:,} at most"
        sampled = f" (estimated from {self.num_measured:,} of them, the longest texts included)"
        overlong = f"; {self.overlong}" if self.overlong else ""
        return text + (sampled if self.num_measured < self.num_rows else "") + overlong


def mixed(parts: Sequence[Lengths], weights: Sequence[float]) -> Lengths:
    """Returns the lengths of rows that are drawn from several sources in proportion to `weights`."""
    total = sum(weights)
    return Lengths(
        num_rows=sum(part.num_rows for part in parts),
        num_measured=sum(part.num_measured for part in parts),
        mean=sum(weight * part.mean for weight, part in zip(weights, parts, strict=True)) / total,
        shortest=min(part.shortest for part in parts),
        longest=max(part.longest for part in parts),
        longest_response=max(part.longest_response for part in parts),
        response_share=max(part.response_share for part in parts),
        overlong=sum_of(part.overlong for part in parts),
    )


Measured = tuple[int, int, int]  # tokens of a sequence, of its response, and its fate


class RowSample(Generic[Row]):
    """The longest rows of a stream, in bytes of text, and rows spread evenly over it. A short stream is kept whole."""

    def __init__(self, num_rows: int = SAMPLE_ROWS) -> None:
        self.limit, self.num_rows, self.step = num_rows, 0, 1
        self._spread: dict[int, tuple[int, Row]] = {}  # by number: its bytes, and the row
        self._longest: list[tuple[int, int, Row]] = []  # a heap of bytes, number, row

    def add(self, row: Row, num_bytes: int) -> None:
        """Take the next row into account."""
        number = self.num_rows
        self.num_rows += 1
        if number % self.step == 0:
            self._spread[number] = (num_bytes, row)
        if len(self._spread) > 2 * self.limit:
            self.step *= 2
            self._spread = {number: kept for number, kept in self._spread.items() if number % self.step == 0}
        if len(self._longest) < self.limit:
            heapq.heappush(self._longest, (num_bytes, -number, row))
        elif num_bytes > self._longest[0][0]:
            heapq.heapreplace(self._longest, (num_bytes, -number, row))

    def lengths(self, encode: Callable[[Sequence[Row]], Iterable[Sequence[Measured]]], most_tokens: int) -> Lengths:
        """Returns the lengths of the sequences that are not skipped. `encode` returns, for each of the given rows, its
        sequences: how many tokens are kept, at most `most_tokens`, how many of them are the response's, and the fate:
        FITS, TRUNCATED or SKIPPED. A row has one sequence at least.
        """
        rows = self._spread | {-number: (num_bytes, row) for num_bytes, number, row in self._longest}
        counted = list(zip(rows, encode([row for _, row in rows.values()]), strict=True))
        fates = [fate for _, sequences in counted for *_, fate in sequences]
        overlong = Overlong(len(fates), fates.count(TRUNCATED), fates.count(SKIPPED))
        kept = {number: [of[:2] for of in sequences if of[2] != SKIPPED] for number, sequences in counted}
        sizes = [of for sequences in kept.values() for of in sequences]
        if not sizes:
            return Lengths(0, 0, 0.0, 0, 0, overlong=overlong)
        spread = tuple(total for number in self._spread for total, _ in kept[number])
        num_others, is_sample = self.num_rows - len(rows), len(rows) < self.num_rows
        longest = max(total for total, _ in sizes)
        if is_sample:
            of_rows = {number: max(total for total, _ in of) for number, of in kept.items() if of}
            longest = most_tokens if overlong else self._bound({n: (rows[n][0], of_rows[n]) for n in of_rows})
        return Lengths(
            num_rows=len(sizes) + round(num_others * len(spread) / len(self._spread)),
            num_measured=len(sizes),
            mean=sum(spread) / max(1, len(spread)),
            shortest=min(total for total, _ in sizes),
            longest=min(longest, most_tokens),
            longest_response=max(response for _, response in sizes),
            response_share=1.0 if is_sample else max(response / total for total, response in sizes if total),
            spread=spread,
            overlong=overlong,
        )

    def _bound(self, measured: Mapping[int, tuple[int, int]]) -> int:
        """Returns the most tokens that any row may have, given (bytes, tokens) of the measured rows.

        A row that was not measured has at most as many bytes as the shortest row in `_longest`. It is assumed to have
        at most as many tokens per byte as the densest measured row with more bytes than the longest row has tokens.
        Rows of fewer bytes need not be considered: a token has at least one byte, so they cannot be longer. What a
        template adds is the same for all rows.
        """
        tokens = [total for _, total in measured.values()]
        longest, template = max(tokens), min(tokens)
        dense = [(total - template) / size for size, total in measured.values() if size and size >= longest - template]
        return max(longest, template + math.ceil(self._longest[0][0] * max(dense, default=1.0)))
