"""What stages learn from: a world (data for every stage, a gold scorer, and labelers; the demos' are in `heed.worlds`),
and label stores as training sees them (tasks go in, judgments come out).

`preferences.store` implements label stores, and the driver hands in what opens one. Leaves out: leases, search,
questions and all else that only the labeling page needs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from pydantic import BaseModel

from preferences.records import Coverage, Judgment, Labeler, Progress, Ranking, StoredTask, Task


class Labels(Protocol):
    """An open label store. Each call is one transaction; once it returns, its data is on disk."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add_tasks(self, new_tasks: Sequence[Task], *, batch: str, num_labelers: int | Sequence[int]) -> None:
        """Add all tasks or none; those that are stored already are left alone. Raises: ValueError naming a bad task."""

    def answer_all(
        self,
        labelers: Sequence[Labeler],
        *,
        batch: str,
        client: str,
        instructions_version: str,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Progress:
        """Let scripted labelers answer a batch. Safe to call again after a kill."""

    def batches(self) -> list[str]:
        """The batches' names, in order of arrival."""

    def single_response_batches(self) -> list[str]:
        """The batches whose tasks have one response each, in order of arrival."""

    def tasks(self, batch: str) -> list[StoredTask]:
        """A batch's tasks, in order of arrival."""

    def coverage(self, batch: str) -> list[Coverage]:
        """Who has judged each task of the batch, in order of arrival."""

    def judgments(self, batch: str, *, with_names: bool = True) -> list[Judgment]:
        """Every event on the batch's tasks, in order; without names, labelers appear under their pseudonyms."""

    def rankings(self, batch: str) -> list[Ranking]:
        """Each labeler's current answer, or only the adjudication of an adjudicated task, by task and labeler."""


OpenLabels = Callable[[str | Path], Labels]  # takes a file's path or a database's URL

# ---- worlds ----


Turns = list[dict[str, str]]  # messages of role and content


class World(Protocol):
    """What stages and reports need from a world. A world is made from its section of the job, a `config_type`."""

    config_type: ClassVar[type[BaseModel]]

    def __init__(self, config: Any) -> None: ...

    @property
    def judge_names(self) -> tuple[str, ...]:
        """Names of the judges that the report shows next to reward models, the gold scorer first."""

    def describe(self) -> str:
        """Say in one sentence what the gold scorer measures."""

    @property
    def pass_mark(self) -> float:
        """The gold score above which a response counts as good."""

    def write_data(self, folder: Path, seed: int) -> None:
        """Write the JSONL files of every stage into the folder.

        pretrain, pretrain_heldout: {"text"}; demonstrations, demonstrations_heldout: {"messages"};
        collect_prompts, ppo_prompts, compare_prompts: {"prompt_id", "messages", "kind"}. A world may write more.
        No prompt's text occurs twice, within or across the files.
        """

    def gold_scores(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Gold scores, higher is better. Stateless: they depend on the texts alone."""

    def label_truth(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Scores by which labelers without noise, position bias or personal taste would rank. Higher is better."""

    def labelers(self, seed: int) -> Sequence[Labeler]:
        """The scripted labelers. Their judgments depend on the seed and on what they are shown, not on call order."""

    def judged_pairs(self) -> list[tuple[Turns, Turns]]:
        """Pairs of (better, worse) conversations, as people judged them; empty if the world has none."""


def label_truth(rankings: Sequence[Ranking], world: World) -> dict[str, list[float]]:
    """Return, by task id, the scores by which noiseless labelers would rank the task's responses."""
    unique = {ranking.task_id: ranking for ranking in rankings}
    prompts = [r.prompt[-1].content for r in unique.values() for _ in r.responses]
    responses = [response for r in unique.values() for response in r.responses]
    scores = iter(world.label_truth(prompts, responses))
    return {task_id: [next(scores) for _ in ranking.responses] for task_id, ranking in unique.items()}
