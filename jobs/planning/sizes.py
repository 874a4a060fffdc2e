"""How much data a job has, counted where it is here and assumed where it is not; what was assumed is said."""

import math
from pathlib import Path

from jobs.job import JobConfig
from reward.comparisons import RankingsConfig, read_judgments
from training.data import DataConfig, read_rows

FIRST_ROWS = 100  # of a rankings file, to see how many responses its tasks have


class Sizes:
    """Rows, tasks and tokens of one job; a source that cannot be counted has `assumed_rows`."""

    def __init__(self, job: JobConfig, max_position_embeddings: int, assumed_rows: int) -> None:
        self.job, self.max_position_embeddings, self.assumed_rows = job, max_position_embeddings, assumed_rows
        self.assumptions: list[str] = []

    def assume(self, what: str) -> None:
        """Say it with the stage that is being planned."""
        self.assumptions.append(what)

    def taken(self) -> tuple[str, ...]:
        """What was assumed since this was last asked, each once."""
        said, self.assumptions = tuple(dict.fromkeys(self.assumptions)), []
        return said

    def num_rows(self, data: DataConfig) -> int:
        """Rows of a source: counted where the file is here, as the world's section says, or assumed."""
        kind, _, name = data.source.partition(":")
        limit = data.max_rows or math.inf
        if data.source == "collect:rankings":
            assert self.job.collect is not None
            return int(min(limit, self.num_rows(self.job.collect.prompts)))
        if kind == "world":
            for field in (f"num_{name}", f"max_{name}"):
                if hasattr(self.job.world, field):
                    return int(min(limit, getattr(self.job.world, field)))
        elif Path(data.source).is_file():
            return sum(1 for _ in read_rows(data))
        if data.max_rows:
            return data.max_rows
        self.assume(f"{data.source} is taken to have {self.assumed_rows:,} rows (--rows)")
        return self.assumed_rows

    def num_tasks(self, rankings: RankingsConfig) -> int:
        """Tasks of a file that is here: a row may hold several, and several rows one."""
        if Path(rankings.source).exists():
            return len(read_judgments(rankings).tasks)
        return self.num_rows(rankings)

    def responses_per_task(self, rankings: RankingsConfig) -> int:
        if rankings.source == "collect:rankings" and self.job.collect is not None:
            return self.job.collect.responses_per_prompt
        if Path(rankings.source).exists():
            first = read_judgments(rankings.model_copy(update={"max_rows": FIRST_ROWS}))
            return max(len(task.responses) for task in first.tasks.values())
        self.assume("two responses a task")
        return 2

    def conversation_tokens(self, response_tokens: int = 0) -> int:
        """What a prompt and its response take at most: the context, or a row of SFT where that is shorter."""
        if self.job.sft is None:
            return self.max_position_embeddings
        self.assume("a prompt and its response fit a row of sft.seq_len")
        return max(min(self.max_position_embeddings, self.job.sft.seq_len), response_tokens + 1)
