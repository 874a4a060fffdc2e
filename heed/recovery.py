"""Losing workers and going on: a stage whose group lost a rank is begun again from its newest checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.group import NoPlaceError, WorkerGroup, WorkerLostError, disconnect
from cluster.shared_folder import require_shared
from heed.progress import console

# A stage that is lost so often without having saved anything new will not get further by another try.
MAX_LOSSES_IN_PLACE = 5


class Workers:
    """A job's workers: started when a stage first needs them, and anew after a loss.

    `sizes` are the numbers of workers that the job can do with, the largest first; it takes the first that the cluster
    has room for. All of them must see the run's `folder`.
    """

    def __init__(self, sizes: Sequence[int], folder: Path) -> None:
        self.sizes, self.folder = sizes, folder
        self._group: WorkerGroup | None = None
        self._beside: dict[str, WorkerGroup] = {}

    def __call__(self) -> WorkerGroup:
        if self._group is None or not self._group.is_open:
            self._group = self._placed(after_loss=self._group is not None)
        return self._group

    def beside(self, name: str, size: int) -> WorkerGroup:
        """Another group, for roles that have workers of their own."""
        if name not in self._beside or not self._beside[name].is_open:
            self._beside[name] = self._started(size, after_loss=name in self._beside)
        return self._beside[name]

    def _placed(self, *, after_loss: bool) -> WorkerGroup:
        for size in self.sizes[:-1]:
            try:
                return self._started(size, after_loss=after_loss)
            except NoPlaceError as error:
                console.print(f"{error}; trying fewer")
        return self._started(self.sizes[-1], after_loss=after_loss)

    def _started(self, size: int, *, after_loss: bool) -> WorkerGroup:
        group = WorkerGroup(size, waits_for_nodes=after_loss)
        require_shared(group, self.folder)
        return group

    def abandon(self) -> None:
        """End all of them: where one group lost a rank, the others wait for what will not come."""
        for group in (*self._beside.values(), *([self._group] if self._group is not None else [])):
            group.close()

    def close(self) -> None:
        """End them, and leave the cluster."""
        if self._group is not None:
            self.abandon()
            disconnect()


def run_to_end(stage: str, folder: Path, work: Callable[[], None], abandon: Callable[[], None]) -> None:
    """`work()`, again after every loss of a worker: it finds in the stage's `folder` what was saved, and goes on.

    `abandon` ends what is left of the workers.

    Errors: WorkerLostError after too many losses without progress; all others as they come.
    """
    saved, num_losses = milestones(folder), 0
    while True:
        try:
            work()
            return
        except WorkerLostError as loss:
            abandon()
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
