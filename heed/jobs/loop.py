"""The controller of `heed loop`: runs one round after another, and decides after each whether another is worth it.

A round is run as a job with that many rounds, so earlier ones are skipped as unchanged, and lineage, resuming and the
report are those of any job. While a round waits for people, no worker runs.
"""

import time
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from files.atomic import write_json
from files.records import as_json, read_record
from heed.jobs.job import JobConfig
from heed.jobs.pipeline import run_job, run_stages
from heed.jobs.report import write_run_report
from heed.loop.collect import LabelsWaitError, RoundResults
from heed.loop.config import GAIN, LoopConfig, name_of_round
from heed.loop.gain import GainResults
from heed.loop.report import STATE, LoopState
from stages.progress import console
from stages.reports.text import count_of, number

POLL_SECONDS = 2.0  # between looks at the label store while a round waits for people


def run_loop(load: Callable[[int], JobConfig], runs: Path, *, waits: bool = True) -> Path:
    """Run the loop of a job until it stops, then compare all policies. Returns the run folder.

    `load` returns the job with a number of rounds; with 0, the number that its file gives. Without `waits`, the loop
    ends when it needs people's labels, and a later call continues it.
    Raises: ValueError for mistakes that the user can fix, if possible before any training.
    """
    job = load(0)
    if job.loop is None:
        raise ValueError(f"job {job.name!r} has no [loop]; a table [loop] with labels and rounds was expected")
    if job.rounds != job.loop.rounds:
        raise ValueError(f"rounds is {job.rounds}; only loop.rounds was expected in a job with [loop]")
    loop, folder = job.loop, runs / job.name
    for round_number in range(1, loop.rounds + 1):
        job = load(round_number)
        _say_round(loop, job, round_number)
        if not _run_round(job, runs, round_number, waits=waits):
            return folder
        stopped = why_stopped(folder, loop, round_number)
        if stopped:
            break
    _write_state(folder, LoopState(round_number, 0, stopped))
    console.print(f"the loop has stopped: {stopped}", markup=False)
    return run_job(job, runs)


def why_stopped(folder: Path, loop: LoopConfig, round_number: int) -> str:
    """Says why no round follows this one; "" if one does."""
    found = read_record(folder / name_of_round(GAIN, round_number) / "results.json", GainResults)
    gain = found.per_hundred
    if gain.high < loop.least_gain:
        return (
            f"the gain of round {round_number} per hundred labels, {gain.low:.3g} to {gain.high:.3g}, lies below"
            f" loop.least_gain = {loop.least_gain:g}."
        )
    if round_number == loop.rounds:
        return f"the budget of {count_of(loop.labels, 'label')} is spent."
    return ""


def _say_round(loop: LoopConfig, job: JobConfig, round_number: int) -> None:
    models = loop.models_for(round_number, has_reward=job.part("reward") is not None)
    why = ""
    if loop.rule.num_models and not models:
        why = f"; {loop.choose} starts once {count_of(loop.rule.num_models, 'reward model')} can score"
    rule = loop.choose if models else "uniform"
    labels = number(loop.labels_until(round_number))
    console.print(f"round {round_number} of {loop.rounds}: up to {labels} labels, chosen by {rule}{why}", markup=False)


def _run_round(job: JobConfig, runs: Path, round_number: int, *, waits: bool) -> bool:
    """Run a round, and wait for people's labels where it needs them. Returns whether it has finished."""
    folder = runs / job.name
    folder.mkdir(parents=True, exist_ok=True)
    _write_state(folder, LoopState(round_number))
    while (waiting := run_stages(job, runs, last=name_of_round(GAIN, round_number))) is not None:
        # A stage of the job's own may wait for something that only a person can see.
        if not isinstance(waiting, LabelsWaitError) or not _wait(folder, round_number, waiting, waits=waits):
            return False
        _write_state(folder, LoopState(round_number))
    collected = read_record(folder / name_of_round("collect", round_number) / "results.json", RoundResults)
    gain = read_record(folder / name_of_round(GAIN, round_number) / "results.json", GainResults)
    console.print(
        f"round {round_number}: {number(collected.num_labels)} labels; gain {gain.gain.mean:+.3f}"
        f" ({gain.gain.low:.3f} to {gain.gain.high:.3f}), {gain.per_hundred.mean:+.4f} per hundred labels",
        markup=False,
    )
    return True


def _wait(folder: Path, round_number: int, waiting: LabelsWaitError, *, waits: bool) -> bool:
    """Show how many labels are missing until none is. Returns whether none is; False at once without `waits`."""
    missing, shown = waiting.count_missing(), -1
    try:
        while missing:
            if missing != shown:
                _write_state(folder, LoopState(round_number, missing))
                write_run_report(folder)
                console.print(f"waiting for {count_of(missing, 'label')}", markup=False)
                shown = missing
            if not waits:
                console.print("the same command continues once they have come", markup=False)
                return False
            time.sleep(POLL_SECONDS)
            missing = waiting.count_missing()
    except KeyboardInterrupt:
        console.print(f"{escape(folder.name)}: stopped while waiting for labels; the same command continues")
        raise
    return True


def _write_state(folder: Path, state: LoopState) -> None:
    write_json(folder / STATE, as_json(state))
