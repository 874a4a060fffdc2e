"""How many comparisons a stage will learn from, before anything runs."""

from pathlib import Path

from reward.comparisons import RankingsConfig, read_judgments
from reward.config import ComparisonsConfig
from stages.planner import Planner

FIRST_ROWS = 100  # of a rankings file, to see how many responses its tasks have


def comparison_steps(planner: Planner, config: ComparisonsConfig) -> tuple[int, int]:
    """Steps of training, and responses of a comparison, the most that the first rows have."""
    num_tasks, num_responses = _num_tasks(planner, config.rankings), _responses_per_task(planner, config.rankings)
    planner.sizes.assume("assumes one ranking per task (several rankings of a task are one comparison)")
    steps = config.num_epochs * num_tasks * (1 - config.heldout_share) / config.batch.batch_size
    return max(1, round(steps)), num_responses


def _num_tasks(planner: Planner, rankings: RankingsConfig) -> int:
    """Tasks of a file that is here: a row may hold several, and several rows one."""
    if Path(rankings.source).exists():
        return len(read_judgments(rankings).tasks)
    return planner.sizes.num_rows(rankings)


def _responses_per_task(planner: Planner, rankings: RankingsConfig) -> int:
    written = planner.sizes.stage_size(rankings.source)
    if written is not None:
        return written.responses_per_row
    if Path(rankings.source).exists():
        first = read_judgments(rankings.model_copy(update={"max_rows": FIRST_ROWS}))
        return max(len(task.responses) for task in first.tasks.values())
    planner.sizes.assume("assumes two responses per task")
    return 2
