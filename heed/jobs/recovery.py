"""Keeps a stage's work through lost workers, storage that fails for a while, and Ctrl-C.

A stage whose group lost a rank runs again from its newest checkpoint. If storage fails, the stage waits for it. At
Ctrl-C the ranks save a checkpoint first, if they can do so within seconds.
"""

import errno
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import tenacity

from cluster.config import ClusterConfig
from cluster.connection import Bundle, NoPlaceError, disconnect, has_room, require_room
from cluster.failures import WorkerLostError
from cluster.group import WorkerGroup
from cluster.hosts import difference, inspect_hosts, this_host
from cluster.messages import send_request, withdraw_request
from cluster.places import Places
from cluster.processes import end_by_sigterm
from heed.jobs.models import fetch_models
from lm.native import kernels
from stages.progress import console
from training.notices import (
    RunError,
    cause_of,
    request_stop,
    say,
    stop_requested,
    system_error,
    waiting,
    withdraw_stop,
)

# A stage that fails this often without saving anything new would not get further in another try.
MAX_LOSSES_IN_PLACE = 5
FEWER_SECONDS = 60.0  # how long a smaller group waits for places: processes of the last one may still be ending
STORAGE_SECONDS = 120.0  # how long a stage waits for space, or for its folder
WORKERS = "workers"  # name of the group that every job has
PROBE_BYTES = 1 << 20  # with less room than this a stage would soon fail again
_OF_STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
SAVE_SECONDS = 1800.0  # to finish a step, which may be minutes of PPO, and write its checkpoint


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
        self._places: defaultdict[str, Places] = defaultdict(Places)  # by group; kept when the group is replaced
        self._begun: Future[WorkerGroup] | None = None
        self._awaits_nodes = False  # True after a loss, since a node that was lost may come back
        # The versions that differ from the driver's, for each host that has worked for this run.
        self.hosts: dict[str, dict[str, str]] = {}
        this_host()  # called now, before anybody can change the code that this process has imported

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
        """Returns another group of workers, for roles that run in their own processes.

        `python` is an interpreter other than this one. With `on_workers`, each rank shares the place of a worker.
        """
        if name not in self._extra or not self._extra[name].is_open:
            host = self() if on_workers else None
            self._extra[name] = self._started(name, size, self.config, python=python, host=host)
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
        """Start Ray and the ranks in a thread, once, so that they load their libraries while data is prepared.

        Only on this machine: on a cluster, others wait for the places, and preparing data may take long.
        """
        bundle = self._bundle or self.check()
        if os.environ.get("RAY_ADDRESS") or self.models or self._group is not None or self._begun is not None:
            return
        end_by_sigterm()
        begun = self._begun = Future[WorkerGroup]()

        def start() -> None:
            try:
                places = self._places[WORKERS]
                begun.set_result(WorkerGroup(self.sizes[0], self.config, bundle=bundle, places=places, waits=False))
            except Exception as error:
                begun.set_exception(error)

        threading.Thread(target=start, name="begun workers").start()

    def _take_begun(self) -> WorkerGroup | None:
        """Returns the ranks that `begin` started; None if it started none. If it failed, the next try shows why.

        Raises: RunError if Ray did not start, which has already been retried.
        """
        begun, self._begun = self._begun, None
        error = None if begun is None else begun.exception()
        if isinstance(error, RunError):
            raise error
        return None if begun is None or error is not None else begun.result()

    def take_back(self) -> None:
        """Return to the full number of workers between stages, if lost machines have come back."""
        if self._group is None or not self._group.is_open or self._group.num_workers == self.sizes[0]:
            return
        assert self._bundle is not None
        if has_room(self.sizes[0] + self.num_extra_ranks, self._bundle):
            console.print(f"there is room for {self.sizes[0]} workers again")
            self.abandon()
            self._places[WORKERS].free()

    def _placed(self) -> WorkerGroup:
        config = self.config
        for size in self.sizes[:-1]:
            try:
                self._require_room_for_all(size, config.wait_for_nodes_seconds)
                return self._started(WORKERS, size, config)
            except NoPlaceError as error:
                console.print(f"{error}; trying with fewer workers")
                # That was the wait for missing machines. Fewer workers have room soon, or not at all.
                seconds = min(config.wait_for_nodes_seconds, FEWER_SECONDS)
                config = config.model_copy(update={"wait_for_nodes_seconds": seconds})
        return self._started(WORKERS, self.sizes[-1], config)

    def _require_room_for_all(self, size: int, seconds: float) -> None:
        """Wait, after a loss, until living nodes have room for this many workers and the ranks that follow in groups of
        their own. Raises: NoPlaceError if they never do.
        """
        if not (self.num_extra_ranks and self._awaits_nodes):
            return
        bundle, end = self._bundle or self.check(), time.monotonic() + seconds
        while not has_room(size + self.num_extra_ranks, bundle):
            if time.monotonic() >= end:
                raise NoPlaceError(f"no room for {size} workers and {self.num_extra_ranks} other ranks")
            time.sleep(1.0)

    def _started(
        self, name: str, size: int, config: ClusterConfig, *, python: str = "", host: WorkerGroup | None = None
    ) -> WorkerGroup:
        bundle, waits = self._bundle or self.check(), self._awaits_nodes
        group = WorkerGroup(
            size, config, name=name, bundle=bundle, waits_for_nodes=waits, python=python, host=host,
            places=self._places[name],
        )  # fmt: skip
        return self._checked(group, python)

    def _checked(self, group: WorkerGroup, python: str = "") -> WorkerGroup:
        """Returns the group once all its ranks see the run's folder, run the driver's code and have the models.

        Ranks on CPUs then also have their kernels. Closes the group if that fails. Reports which hosts have other
        versions of packages, unless the group has a `python` of its own, where that is intended.
        """
        try:
            for host in inspect_hosts(group, self.folder):
                name, versions = f"{host.name} {python}".strip(), host.unlike(this_host())
                if versions and not python and self.hosts.get(name) != versions:
                    say(difference(host))
                self.hosts[name] = versions
            fetch_models(group, self.models)
            if not python and "GPU" not in (self._bundle or {}):
                prepare_kernels(group)
        except Exception:
            group.close()  # nobody else has this group
            raise
        return group

    def abandon(self) -> None:
        """End all groups: after one group lost a rank, the others would wait for it in vain. Their places are kept.

        Groups that start later wait for missing nodes, since a lost node may come back.
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
        for places in self._places.values():
            places.free()
        if self._group is not None or begun is not None:
            disconnect()


def prepare_kernels(group: WorkerGroup) -> None:
    """Compile the CPU kernels on each host that lacks them, and report which hosts do and which cannot."""
    hosts = sorted({host for host in group.run("kernels", kernels.host_without_kernels) if host})
    with waiting() as wait_for:
        if hosts:
            wait_for(f"compiling kernels on {', '.join(hosts)}")
            say(f"compiling kernels on {', '.join(hosts)}, once for each kind of CPU")
        for line in sorted({line for line in group.run("compiling kernels", kernels.prepare) if line}):
            say(line)


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
            saved_now = milestones(folder)
            num_failures = num_failures + 1 if saved_now == saved else 1
            saved = saved_now
            if num_failures == MAX_LOSSES_IN_PLACE:
                raise _given_up(stage, num_failures, saved_now, error, trouble) from error
            first_line = trouble or str(error).split("\n")[0]
            restarted(first_line)
            console.print(f"{first_line}\n{stage}: continues {_since(saved_now)}", markup=False)


def _await_storage(stage: str, folder: Path, trouble: str, error: Exception) -> None:
    notice = f"{stage}: {trouble}; waiting up to {STORAGE_SECONDS:.0f} s for the storage"
    console.print(notice, markup=False)
    with waiting() as wait_for:
        wait_for(notice)
        if wait_for_storage(folder, STORAGE_SECONDS):
            return
    raise RunError(
        f"{stage}: {trouble}: {folder} is missing or full; fix that and run the same command again"
    ) from error


def _given_up(stage: str, number: int, saved: list[str], error: Exception, trouble: str) -> RuntimeError:
    if trouble:
        return RunError(
            f"{stage} failed {number} times in a row {_since(saved)}: {trouble}; fix that and run the same command"
            " again"
        )
    return WorkerLostError(f"{error}\n{stage} lost workers {number} times in a row {_since(saved)}, so the run stops")


def milestones(folder: Path) -> list[str]:
    """Returns what a stage has saved so far: its checkpoints and the parts of its samples."""
    paths = [*folder.glob("checkpoints/step-*"), *folder.glob("samples/*/*.jsonl")]
    return sorted(str(path.relative_to(folder)) for path in paths)


def _since(saved: list[str]) -> str:
    checkpoints = [name for name in saved if name.startswith("checkpoints/")]
    return f"from {(checkpoints or saved)[-1]}" if saved else "from its start"


def storage_trouble(error: BaseException, folder: Path) -> str:
    """Describes in one line what is wrong with the storage of a stage that failed; "" if the storage is not the cause.

    A missing file is the storage's fault if it lies in the run of the stage's `folder`; readers report it as a
    ValueError ("...: no such file"). The exceptions that `error` was raised from count too. A `RunError` is final.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RunError):
            return ""
        number = system_error(cause)
        is_missing = number == errno.ENOENT or (isinstance(cause, ValueError) and "no such file" in str(cause))
        if number in _OF_STORAGE or (is_missing and str(folder.parent) in str(cause)):
            return cause_of(cause) if number is not None else str(cause).splitlines()[0]
        cause = cause.__cause__
    return ""


def wait_for_storage(folder: Path, seconds: float = STORAGE_SECONDS) -> bool:
    """Wait until a stage's folder is there and has room. Returns False if that does not happen in time."""
    is_usable: bool = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda usable: not usable),
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_fixed(0.5),
        retry_error_callback=lambda _: False,
    )(_is_usable, folder)
    return is_usable


@contextmanager
def missing_in_one_line(run: Path) -> Iterator[None]:
    """Report missing files of the run's folder in one line, because between stages nothing waits for the storage.

    Raises: RunError if a file is missing.
    """
    try:
        yield
    except FileNotFoundError as error:
        if str(run) not in str(error):
            raise
        raise RunError(f"{cause_of(error)}; bring the folder back and run the same command again") from error


def _is_usable(folder: Path) -> bool:
    """Check for room and for `inputs.json`, which is written first: a folder that somebody has recreated lacks it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE_BYTES))  # random, so no file system can compress it
            file.flush()
            os.fsync(file.fileno())
        return (folder / "inputs.json").is_file()
    except OSError:
        return False


@contextmanager
def saving_on_interrupt(stage: str, can_save: Callable[[], bool]) -> Iterator[None]:
    """At the first Ctrl-C, ask the ranks to save and stop. A second one, or `SAVE_SECONDS`, ends the wait.

    `can_save` returns whether there is anything to save yet. Outside the main thread, and if Ctrl-C is ignored, nothing
    changes.
    Raises: KeyboardInterrupt after such a request, however the block ends.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # ignored, as in a shell's background
        yield
        return
    last_call = threading.Timer(SAVE_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    last_call.daemon = True

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop_requested() or not can_save():
            raise KeyboardInterrupt
        request_stop()
        last_call.start()
        threading.Thread(target=send_request, name="interrupt", daemon=True).start()
        notice = f"{stage}: will save a checkpoint and stop when its current step ends; Ctrl-C again stops at once"
        console.print(notice, markup=False)

    earlier = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        if stop_requested():  # the block was finishing anyway
            raise KeyboardInterrupt
    except Exception as error:  # the ranks' StoppedError, or another failure meanwhile
        if stop_requested():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, earlier)
        last_call.cancel()
        if stop_requested():
            withdraw_stop()
            withdraw_request()
