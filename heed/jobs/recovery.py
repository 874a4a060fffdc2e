"""Recovery from lost workers: a stage whose group lost a rank runs again from its newest checkpoint."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.connection import Bundle, NoPlaceError, disconnect, has_room, require_room
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup, require_shared
from cluster.sigterm import end_by_sigterm
from heed.jobs.hub_models import fetch_models
from heed.jobs.storage import STORAGE_SECONDS, storage_trouble, wait_for_storage
from stages.progress import console
from training.notices import RunError

# A stage that fails this often without saving anything new would not get further in another try.
MAX_LOSSES_IN_PLACE = 5

FEWER_SECONDS = 60.0  # to wait for places for a smaller group while processes of the last one may still be ending


class Workers:
    """A job's workers, started when a stage first needs them and again after a loss.

    `sizes` are the numbers of workers that the job can run on, the largest first; the first one that the cluster has
    room for is used. Extra groups may have up to `num_extra_ranks` more ranks. All ranks must see the run's `folder`.
    Machines download `models`, the folders of hub models, before their ranks do anything else; no rank waits for
    another meanwhile.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        folder: Path,
        config: ClusterConfig,
        num_extra_ranks: int = 0,
        models: Sequence[Path] = (),
    ) -> None:
        self.sizes, self.folder, self.config, self.models = sizes, folder, config, models
        self.num_extra_ranks = num_extra_ranks
        self._bundle: Bundle | None = None
        self._group: WorkerGroup | None = None
        self._extra: dict[str, WorkerGroup] = {}
        self._begun: Future[WorkerGroup] | None = None
        self._awaits_nodes = False  # after a loss: a node that left with it may come back

    def num_ranks(self) -> dict[str, int]:
        """Returns the number of ranks of each open group."""
        groups = {"workers": self._group, **self._extra}
        return {name: group.num_workers for name, group in groups.items() if group is not None and group.is_open}

    def __call__(self) -> WorkerGroup:
        if self._group is None or not self._group.is_open:
            begun = self._take_begun()
            if begun is None:
                self._group = self._placed()
            else:
                begun.join()
                self._group = self._checked(begun)
        return self._group

    def start(self) -> None:
        """Start the workers unless they run."""
        self()

    def extra_group(self, name: str, size: int, python: str = "", *, on_workers: bool = False) -> WorkerGroup:
        """Returns a further group of workers, for roles that run in processes of their own.

        `python` is an interpreter other than this one. `on_workers`: each rank is a guest in the place of a worker.
        """
        if name not in self._extra or not self._extra[name].is_open:
            host = self() if on_workers else None
            self._extra[name] = self._started(size, self.config, python=python, host=host)
        return self._extra[name]

    def check(self) -> Bundle:
        """Check that the cluster, or this machine if there is none, could hold all of the job's ranks at once.

        Whether ranks use GPUs is decided here for the whole run. If it were decided after a loss, a cluster whose GPU
        machine is missing would look like a cluster of CPUs.

        Returns: the resources that each rank takes on its machine.

        Raises: ValueError stating what the job needs and what there is.
        """
        self._bundle = require_room(self.sizes[-1] + self.num_extra_ranks, use_gpus=self.config.use_gpus)
        return self._bundle

    def begin(self) -> None:
        """Start Ray and the ranks in a thread, once: on this machine they load their libraries while data is prepared.

        On a cluster others wait for the places, and data may take long.
        """
        bundle = self._bundle or self.check()
        if os.environ.get("RAY_ADDRESS") or self.models or self._group is not None or self._begun is not None:
            return
        end_by_sigterm()
        begun = self._begun = Future[WorkerGroup]()

        def start() -> None:
            try:
                begun.set_result(WorkerGroup(self.sizes[0], self.config, bundle=bundle, waits=False))
            except Exception as error:
                begun.set_exception(error)

        threading.Thread(target=start, name="begun workers").start()

    def _take_begun(self) -> WorkerGroup | None:
        """The ranks that `begin` started; None where it did not or could not, which then shows in another try.

        Raises: RunError where Ray did not start, which has been tried again already.
        """
        begun, self._begun = self._begun, None
        error = None if begun is None else begun.exception()
        if isinstance(error, RunError):
            raise error
        return None if begun is None or error is not None else begun.result()

    def take_back(self) -> None:
        """Return to the full number of workers between stages, if machines that were lost have come back."""
        if self._group is None or not self._group.is_open or self._group.num_workers == self.sizes[0]:
            return
        assert self._bundle is not None
        if has_room(self.sizes[0] + self.num_extra_ranks, self._bundle):
            console.print(f"{self.sizes[0]} workers have a place again")
            self.abandon()

    def _placed(self) -> WorkerGroup:
        config = self.config
        for size in self.sizes[:-1]:
            try:
                return self._started(size, config)
            except NoPlaceError as error:
                console.print(f"{error}; trying fewer")
                # The wait is for the machines that are missing. Fewer workers have room now, or will not get it.
                seconds = min(config.wait_for_nodes_seconds, FEWER_SECONDS)
                config = config.model_copy(update={"wait_for_nodes_seconds": seconds})
        return self._started(self.sizes[-1], config)

    def _started(
        self, size: int, config: ClusterConfig, *, python: str = "", host: WorkerGroup | None = None
    ) -> WorkerGroup:
        bundle, waits = self._bundle or self.check(), self._awaits_nodes
        return self._checked(WorkerGroup(size, config, bundle=bundle, waits_for_nodes=waits, python=python, host=host))

    def _checked(self, group: WorkerGroup) -> WorkerGroup:
        """The group, whose ranks all see the run's folder and have the models. Closes it if that fails."""
        try:
            require_shared(group, self.folder)
            fetch_models(group, self.models)
        except Exception:
            group.close()  # no one else holds this group, so its places would stay taken
            raise
        return group

    def abandon(self) -> None:
        """End all groups: after one group lost a rank, the others would wait for it in vain.

        Groups that start later wait for nodes that are missing: a node that was lost may come back.
        """
        self._awaits_nodes = True
        for group in (*self._extra.values(), *([self._group] if self._group is not None else [])):
            group.close()

    def close(self) -> None:
        """End all groups and leave the cluster, if any group was started."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.exception() is None:
            begun.result().close()
        self.abandon()
        if self._group is not None or begun is not None:
            disconnect()


def run_to_end(
    stage: str,
    folder: Path,
    work: Callable[[], None],
    abandon: Callable[[], None],
    restarted: Callable[[str], None] = lambda _why: None,
) -> None:
    """Call `work()`, and call it again after each loss of a worker and each failure of the storage.

    `work` resumes from what it finds in the stage's `folder`. `abandon` ends the remaining workers. `restarted` is
    called each time with the reason.

    Raises: WorkerLostError after too many losses without progress; RunError if the storage stays away or fails too
    often without progress; all other exceptions unchanged.
    """
    saved, num_failures = milestones(folder), 0
    while True:
        try:
            work()
            return
        except Exception as error:
            trouble = "" if isinstance(error, WorkerLostError) else storage_trouble(error, folder)
            if not isinstance(error, WorkerLostError) and not trouble:
                raise
            abandon()
            if trouble:
                _await_storage(stage, folder, trouble, error)
            found = milestones(folder)
            num_failures = num_failures + 1 if found == saved else 1
            saved = found
            if num_failures == MAX_LOSSES_IN_PLACE:
                raise _given_up(stage, num_failures, found, error, trouble) from error
            first_line = trouble or str(error).split("\n")[0]
            restarted(first_line)
            console.print(f"{first_line}\n{stage}: continues {_since(found)}", markup=False)


def _await_storage(stage: str, folder: Path, trouble: str, error: Exception) -> None:
    console.print(f"{stage}: {trouble}; waiting up to {STORAGE_SECONDS:.0f} s for the storage", markup=False)
    if not wait_for_storage(folder, STORAGE_SECONDS):
        raise RunError(
            f"{stage}: {trouble}: {folder} is missing or full; mend that and run the same command again"
        ) from error


def _given_up(stage: str, number: int, found: list[str], error: Exception, trouble: str) -> RuntimeError:
    if trouble:
        return RunError(f"{stage}: {trouble}: {number} times {_since(found)}; mend that and run the same command again")
    return WorkerLostError(f"{error}\n{stage} lost workers {number} times {_since(found)} and was given up")


def milestones(folder: Path) -> list[str]:
    """Returns what a stage has saved so far: its checkpoints and the parts of its samples."""
    found = [*folder.glob("checkpoints/step-*"), *folder.glob("samples/*/*.jsonl")]
    return sorted(str(path.relative_to(folder)) for path in found)


def _since(saved: list[str]) -> str:
    return f"from {saved[-1]}" if saved else "from its start"
