"""Runs a job: checks its data, decides which stages must run, in which order, and records what each was made from.

Mistakes that can be found before training are reported before it: rows that do not parse, prompts that are too long.
"""

import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import tenacity
import tomli_w
from rich.markup import escape

from cluster.connection import call_on_lost_head, disconnect, resolve_precision
from cluster.failures import WorkerError
from cluster.processes import call_on_sigterm
from cluster.worker import send_by_value
from files.atomic import lock, write_text
from files.fields import last_job, no_such_file
from files.hashes import file_hash
from files.importing import load_function
from files.rows import LOADERS
from heed.jobs.job import JobConfig
from heed.jobs.job_file import line_of
from heed.jobs.models import hub_models
from heed.jobs.recovery import Workers, missing_in_one_line, run_to_end, saving_on_interrupt
from heed.jobs.registry import PREPARED, WORLD, AnyStage
from heed.jobs.report import StatusFile, write_run_report
from heed.jobs.run import Run, inputs_of, is_replaced, open_folder, put_aside, words, world_hash
from heed.jobs.submission import named_paths
from stages.contract import Preparation, Stage, StageWaitsError
from stages.data import SAMPLES
from stages.lineage import LINEAGE, Inputs, finished_with, forced_by, require_outputs, write_lineage
from stages.progress import console, follow, print_notice
from stages.run import StageRun
from training.checkpoint import step_folders
from training.config import Config, values_at
from training.metrics import read_metrics, refuse_missing_trackers
from training.notices import RunError, in_one_line, speaking_through

AnyConfig = TypeVar("AnyConfig", bound=Config)

STATUS_SECONDS = 5.0  # how long a run whose head is lost waits to write its status
FOLDER_SECONDS = 30.0  # how long a stage waits if its folder is missing


def run_job(job: JobConfig, runs: Path, *, first: str = "", only: str = "", submission: str = "") -> Path:
    """Run the unfinished stages in order, and write the report. Returns the run folder.

    `first` forces that stage and all after it; a `submission` forces each of them once, since a scheduler that starts
    the same command again means to continue it. `only` considers no other stage, and skips that one if it is unchanged.
    A stage that waits for people ends the run, and a later run continues it.
    Raises: ValueError for mistakes that the user can fix, if possible before any training.
    """
    with opened_run(job, runs) as folder:
        run_stages(job, folder, first=first, only=only, submission=submission)
    return folder


@contextmanager
def opened_run(job: JobConfig, runs: Path) -> Iterator[Path]:
    """Yields the job's run folder, locked against other commands.

    Raises: ValueError if a data file is missing, the folder cannot be made, or another process works in it.
    """
    folder = runs / job.name
    refuse_missing(job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--runs {runs}: {folder} cannot be created: {error.strerror}") from None
    with missing_in_one_line(folder), lock(folder):
        yield folder


def run_stages(
    job: JobConfig, folder: Path, *, first: str = "", only: str = "", last: str = "", submission: str = ""
) -> StageWaitsError | None:
    """Like `run_job`, in an opened folder, but runs no stage after `last`.

    Returns what a stage waits for; None if all have finished.
    """
    started, waits = time.monotonic(), None
    try:
        _work(job, folder, first, only, last, submission)
    except StageWaitsError as waiting:
        console.print(str(waiting), markup=False)
        waits = waiting
    report = write_run_report(folder)
    console.print(escape(report["verdict"]))
    console.print(f"report: {folder / 'report.html'}  ({time.monotonic() - started:.0f} s)")
    return waits


def _work(job: JobConfig, folder: Path, first: str, only: str, last: str, submission: str) -> None:
    """Prepare the run's workers and data, and run the stages."""
    with ExitStack() as closing:
        closing.enter_context(speaking_through(print_notice))
        _say_what_will_run(job, folder, only)
        refuse_missing_trackers(job.engine.trackers)
        workers = Workers(job.world_sizes, folder, job.cluster, job.extra_ranks, hub_models(job))
        status = closing.enter_context(StatusFile(folder, workers.num_ranks))
        closing.enter_context(call_on_lost_head(partial(_end_without_head, status)))
        if os.environ.get("RAY_ADDRESS"):
            closing.callback(disconnect)
        closing.callback(workers.close)
        bundle = workers.check()
        status.works_on("GPU" if "GPU" in bundle else "CPU", is_meant=not job.cluster.use_gpus)
        engine = resolve_precision(job.engine, bundle, job.fewest_ranks, job.cluster.start_seconds)
        job = job.model_copy(update={"engine": engine})
        run = Run(job, folder, job.open_world(), workers)
        wanted = [stage for stage in _until(job.stages, last) if stage.name == only or not only]
        if first or not all((run.stage_folder(stage.name) / LINEAGE).exists() for stage in wanted):
            workers.begin()
        for stage in job.stages:
            if stage.module is not None:
                send_by_value(stage.module)
        if job.world_module is not None:
            send_by_value(job.world_module)
        _write_job(job, folder / "job.toml")
        _prepare_world(run)
        _prepare_stages(run)
        if not all(_is_finished_with(run, stage, inputs_of(run, stage)) for stage in wanted):
            workers.begin()  # Ray is not started for a run in which nothing has changed
        with speaking_through(_unrepeated(print_notice)):
            check_data(run)
        _run_stages(run, workers, status, first, only, last, submission)


def _until(stages: Sequence[AnyStage], last: str) -> Sequence[AnyStage]:
    """Returns the stages up to `last`; all if it is ""."""
    names = [stage.name for stage in stages]
    return stages[: names.index(last) + 1] if last else stages


def _end_without_head(status: StatusFile, line: str) -> None:
    """End this process, whatever its main thread is doing, because Ray's own calls would never return."""
    console.print(f"[bold red]error:[/] {escape(line)}")
    writing = threading.Thread(target=status.failed, args=(line,), daemon=True)
    writing.start()
    writing.join(STATUS_SECONDS)  # the head's machine may have had the disk, too
    os._exit(1)


def _say_what_will_run(job: JobConfig, folder: Path, only: str) -> None:
    stages = only or ", ".join(job.stage_names)
    ranks = "1 worker" if job.workers == 1 else f"{job.workers} workers"
    console.print(f"{escape(job.name)}: {stages} on {ranks}; results in {escape(str(folder))}")
    console.print("[dim]checking the data")


def _unrepeated(speaker: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a speaker that says each line only once, since several stages may read the same source."""
    already_said: set[str] = set()

    def say_once(notice: str) -> None:
        if notice not in already_said:
            already_said.add(notice)
            speaker(notice)

    return say_once


def _run_stages(
    run: Run, workers: Workers, status: StatusFile, first: str, only: str, last: str, submission: str
) -> None:
    is_after, skipped = False, list[str]()
    for stage in _until(run.job.stages, last):
        if only and stage.name != only:
            continue
        is_after = is_after or stage.name == first
        forced = is_after and not (submission and forced_by(run.stage_folder(stage.name)) == submission)
        _require_parents(run, stage)
        if only:
            _say_stale_parents(run, stage)
        inputs = inputs_of(run, stage)
        if not forced and _is_finished_with(run, stage, inputs):
            skipped.append(stage.name)
            continue
        _say_skipped(skipped)
        with _tracebacks_in_file(run.folder / "failure.log"):
            _run_stage(run, stage, inputs, workers, status, forced=forced, submission=submission)
    _say_skipped(skipped)


def _say_skipped(stages: list[str]) -> None:
    """Print the skipped stages on one line, since a late round of a loop skips dozens, and empty the list."""
    if stages:
        console.print(f"[dim]{', '.join(stages)}: unchanged, skipped", soft_wrap=True)
        stages.clear()


def _run_stage(
    run: Run,
    stage: AnyStage,
    inputs: Inputs,
    workers: Workers,
    status: StatusFile,
    *,
    forced: bool,
    submission: str,
) -> None:
    """Run a stage to its end. An earlier result stays in its place until the stage's workers have started."""
    folder, begun = run.stage_folder(stage.name), time.monotonic()
    workers.take_back()
    if is_replaced(folder, inputs, forced=forced):
        run_to_end(stage.name, folder, workers.start, workers.abandon, status.restarted)
    command = "the same command without --from" if forced and not submission else "the same command"
    say_stopped = _once(partial(_say_stopped, status, stage.name, folder, command))
    try:
        with (
            open_folder(folder, inputs, forced=forced, submission=submission),
            saving_on_interrupt(stage.name, (folder / "metrics.jsonl").is_file),
            call_on_sigterm(say_stopped),
            follow(stage.name, folder) as progress,
            status.stage(progress),
        ):
            work = partial(_work_in_folder, run.of(stage.name, progress), stage, inputs, begun, workers)
            run_to_end(stage.name, folder, work, workers.abandon, status.restarted)
    except KeyboardInterrupt:
        say_stopped()
        raise
    shutil.rmtree(folder / SAMPLES, ignore_errors=True)  # the finished outputs contain these parts
    console.print(f"{stage.name}: done in {time.monotonic() - begun:.0f} s")


@contextmanager
def _tracebacks_in_file(log: Path) -> Iterator[None]:
    """Write a worker's tracebacks to `log`. Raises: RunError, in one line, instead of the worker's exception."""
    try:
        yield
    except WorkerError as error:
        if in_one_line(error):
            raise
        try:
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:  # the folder may be what failed
            raise error from None
        raise RunError(f"{str(error).splitlines()[0]} (tracebacks: {log})") from error


def _work_in_folder(run: StageRun, stage: AnyStage, inputs: Inputs, begun: float, workers: Workers) -> None:
    """Run a stage once its folder is there. Without the folder, it would start over and ignore what it has saved.

    Raises:
        RunError: the folder stays missing, for example because its file system is no longer mounted.
    """
    folder = run.folder
    is_there = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda found: not found),
        stop=tenacity.stop_after_delay(FOLDER_SECONDS),
        wait=tenacity.wait_fixed(0.5),
        retry_error_callback=lambda _: False,
    )((folder / "inputs.json").is_file)
    if not is_there:
        raise RunError(f"{folder} is missing; bring the folder back and run the same command again")
    config = run.job.section(stage)
    assert config is not None
    stage.run(run, run.resolve(config))
    require_outputs(folder, (stage.output, *stage.also_required))
    write_lineage(folder, inputs, stage.output, time.monotonic() - begun, workers.hosts)


def _say_stopped(status: StatusFile, stage: str, folder: Path, command: str) -> None:
    console.print(f"{stage}: stopped{_last_step(folder)}; {command} continues")
    status.stopped()  # last, because it waits for the disk, and Ray may end this process meanwhile


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call` the first time only, whichever thread is first."""
    lock, calls = threading.Lock(), [call]

    def call_once() -> None:
        with lock:
            if calls:
                calls.pop()()

    return call_once


def _last_step(folder: Path) -> str:
    """Returns " at step 85 of 112" and where the stage will resume; "" for a stage without steps."""
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        return ""
    saved = [checkpoint.name for checkpoint in step_folders(folder / "checkpoints")]
    where = f" (its newest checkpoint is {saved[0]})" if saved else " (no checkpoint yet)"
    return f" at step {lines[-1]['step']} of {lines[-1]['num_steps']}{where}"


def _require_parents(run: Run, stage: AnyStage) -> None:
    for parent in run.job.parents(stage.name):
        if not _is_finished(run, parent):
            raise ValueError(f"stage {stage.name} needs {parent}, which is not finished in {run.folder}")


def _is_finished_with(run: Run, stage: AnyStage, inputs: Inputs) -> bool:
    finished = finished_with(run.stage_folder(stage.name), stage.output)
    return finished is not None and finished[0] == inputs.fingerprint


def _is_finished(run: Run, name: str) -> bool:
    return finished_with(run.stage_folder(name), run.job.registry.output(name)) is not None


def _say_stale_parents(run: Run, stage: AnyStage) -> None:
    """Report which parents this job would run again. A stage that runs alone uses its parents as they are."""
    for parent in (other for other in run.job.stages if other.name in run.job.parents(stage.name)):
        finished = finished_with(run.stage_folder(parent.name), parent.output)
        grandparents = run.job.parents(parent.name)
        is_known = all(_is_finished(run, name) for name in grandparents)
        if finished is not None and is_known and finished[0] != inputs_of(run, parent).fingerprint:
            console.print(f"{parent.name}: its settings differ from this job's; {stage.name} uses it anyway (--only)")


def refuse_missing(job: JobConfig) -> None:
    """Raise ValueError, naming the job's line and field, if a data file is missing."""
    path = last_job()
    for field, name in named_paths(job):
        is_file = field.endswith(".source") and Path(name.removesuffix(".gz")).suffix in LOADERS
        if is_file and not Path(name).exists():
            place = f"{line_of(path, field)}: " if path is not None else ""
            raise ValueError(f"{place}{field}: {name}: {no_such_file(name)}")


def check_data(run: Run) -> None:
    """Read every row that a stage will read, with the tokenizer that it will use. Training data is tokenized here, once
    and for all, before any rank takes up a place.

    Raises: ValueError naming file, line and field.
    """
    job = run.job
    for stage in job.stages:  # first, because this takes no time
        for field in stage.function_fields:
            for name in values_at(job.section_of(stage), field):
                load_function(name, words(field))
    # Later stages first. The first ones have the most data, so a mistake elsewhere shows before hours of tokenizing.
    for stage in reversed(job.stages):
        stage_run = run.of(stage.name)
        stage.preflight(stage_run, stage_run.resolve(job.section_of(stage)))


def _prepare_world(run: Run) -> None:
    """Write the world's data files."""
    section, world = run.job.world, run.opened_world
    if section is None:
        return
    assert world is not None
    config = {WORLD: section.model_dump(mode="json")}
    files = [value for value in config[WORLD].values() if isinstance(value, str) and Path(value).is_file()]
    hashes = {path: file_hash(Path(path)) for path in files} | world_hash(run)
    inputs = Inputs(WORLD, run.job.seed, config, {}, hashes)
    _prepare(run, inputs, lambda folder: world.write_data(folder, run.job.seed))


def _prepare_stages(run: Run) -> None:
    """Write what stages need before any training, such as the vocabulary that lengths are checked with."""
    for stage in run.job.stages:
        if stage.preparation is not None:
            _prepare_stage(run, stage, stage.preparation)


def _prepare_stage(run: Run, stage: Stage[AnyConfig], preparation: Preparation[AnyConfig]) -> None:
    stage_run = run.of(stage.name)
    config = stage_run.resolve(run.job.section_of(stage))
    values, hashes = preparation.inputs(stage_run, config)
    inputs = Inputs(preparation.name, run.job.seed, values, {}, hashes)
    _prepare(run, inputs, lambda folder: preparation.write(stage_run, config, folder))


def _prepare(run: Run, inputs: Inputs, write: Callable[[Path], None]) -> None:
    """Write a preparation's `data/`, unless it is already there and made from the same inputs."""
    folder = run.stage_folder(inputs.stage)
    finished = finished_with(folder, PREPARED)
    if finished is not None and finished[0] == inputs.fingerprint:
        return
    if folder.exists():
        put_aside(folder)
    begun = time.monotonic()
    (folder / PREPARED).mkdir(parents=True)
    write(folder / PREPARED)
    write_lineage(folder, inputs, PREPARED, time.monotonic() - begun, hosts={})


def _write_job(job: JobConfig, path: Path) -> None:
    """Write the resolved job, defaults included."""
    values = job.model_dump(mode="json", exclude_none=True)  # TOML has no null
    values["engine"]["precision"] = job.engine.resolved_precision()
    write_text(path, tomli_w.dumps(values))
