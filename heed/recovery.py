"""Losing workers and going on: a stage whose group lost a rank is begun again from its newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

from cluster.group import WorkerGroup, WorkerLostError, disconnect
from heed.progress import console

# A stage that is lost so often without having saved anything new will not get further by another try.
MAX_LOSSES_IN_PLACE = 3


class Workers:
    """A job's workers: started when a stage first needs them, and anew after a loss."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._group: WorkerGroup | None = None

    def __call__(self) -> WorkerGroup:
        if self._group is None or not self._group.is_open:
            self._group = WorkerGroup(self.num_workers)
        return self._group

    def close(self) -> None:
        """End them, and leave the cluster."""
        if self._group is not None:
            self._group.close()
            disconnect()


def run_to_end(stage: str, folder: Path, work: Callable[[], None]) -> None:
    """`work()`, again after every loss of a worker: it finds in the stage's `folder` what was saved, and goes on.

    Errors: WorkerLostError after too many losses without progress; all others as they come.
    """
    saved, num_losses = milestones(folder), 0
    while True:
        try:
            work()
            return
        except WorkerLostError as loss:
            found = milestones(folder)
            num_losses = num_losses + 1 if found == saved else 1
            saved = found
            first_line = str(loss).split("\n")[0]
            if num_losses == MAX_LOSSES_IN_PLACE:
                raise WorkerLostError(
                    f"{loss}\n{stage} lost workers {num_losses} times {_since(found)} and was given up"
                ) from loss
            console.print(f"{first_line}\n{stage}: goes on {_since(found)}")


def milestones(folder: Path) -> list[str]:
    """What a stage has saved so far: its checkpoints, and the parts of its samples."""
    found = [*folder.glob("checkpoints/step-*"), *folder.glob("samples/*/*.jsonl")]
    return sorted(str(path.relative_to(folder)) for path in found)


def _since(saved: list[str]) -> str:
    return f"from {saved[-1]}" if saved else "from its start"
