"""How much data a job has, counted where it is here and assumed where it is not; assumptions are reported."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from files.rows import InvalidRows
from stages.lengths import Measures
from training.data import SourceConfig, read_valid


@dataclass(frozen=True)
class SourceSize:
    """Rows of a source, and the responses that each holds, where rows are comparisons."""

    num_rows: int
    responses_per_row: int = 1


class Sizes:
    """Rows and tokens of one job's data. A source that cannot be counted is taken to have `assumed_rows`.

    `measures` keeps what was counted for other plans of the same job. `world_rows` gives the rows that the world's
    section names for a source, `stage_size` what a stage of the job will write for one; both are None for any other
    source. `longest` bounds the conversations that the job teaches, 0 for no bound but the context.
    """

    def __init__(
        self,
        max_position_embeddings: int,
        assumed_rows: int,
        *,
        longest: int = 0,
        measures: Measures | None = None,
        world_rows: Callable[[str], int | None] = lambda _: None,
        stage_size: Callable[[str], SourceSize | None] = lambda _: None,
    ) -> None:
        self.max_position_embeddings, self.assumed_rows, self.longest = max_position_embeddings, assumed_rows, longest
        self.world_rows, self.stage_size = world_rows, stage_size
        self.measures = measures or Measures()
        self.assumptions: list[str] = []

    def assume(self, what: str) -> None:
        """Report this with the stage that is being planned."""
        self.assumptions.append(what)

    def taken(self) -> tuple[str, ...]:
        """What was assumed since the last call, each once."""
        said, self.assumptions = tuple(dict.fromkeys(self.assumptions)), []
        return said

    def num_rows(self, data: SourceConfig) -> int:
        """Rows of a source: counted where the file is here, known from the job, or assumed."""
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
        """A bound on what a prompt and its response take together where the data is not here: the context, or the
        longest conversation that was taught.
        """
        if not self.longest:
            return self.max_position_embeddings
        return max(min(self.max_position_embeddings, self.longest), response_tokens + 1)


def _count_rows(data: SourceConfig) -> int:
    """Rows of a file that can be parsed. Raises: ValueError as `InvalidRows.finish`, for those that cannot."""
    return sum(1 for _ in read_valid(data, lambda _, row: row, InvalidRows(data.source, data.on_invalid)))
