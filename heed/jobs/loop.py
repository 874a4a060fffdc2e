"""The controller of `heed loop`: runs one round after another, and decides after each whether another is worth it.

A round is run as a job with that many rounds, so earlier ones are skipped as unchanged, and lineage, resuming and the
report are those of any job. While a round waits for people, no worker runs.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from files.atomic import write_json
from files.records import as_json, read_record
from heed.jobs.job import JobConfig
from heed.jobs.pipeline import opened_run, run_stages
from heed.jobs.report import renew_status, write_run_report
from heed.loop.collect import LabelsWaitError, RoundResults
from heed.loop.config import GAIN, LoopConfig, name_of_round
from heed.loop.gain import GainResults
from heed.loop.report import STATE, LoopState
from preferences.database import STORE_AWAY, reason_of
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
    with opened_run(job, runs) as folder:  # also while the loop waits, so that no second command disturbs it
        _run_rounds(load, job.loop, folder, waits=waits)
    return folder


def _run_rounds(load: Callable[[int], JobConfig], loop: LoopConfig, folder: Path, *, waits: bool) -> None:
    for round_number in range(1, loop.rounds + 1):
        job = load(round_number)
        _say_round(loop, job, round_number)
        if not _run_round(job, folder, round_number, waits=waits):
            return
        stopped = why_stopped(folder, loop, round_number)
        if stopped:
            break
    console.print(f"the loop has stopped: {stopped}", markup=False)
    _run_until(job, folder, LoopState(round_number, stopped=stopped), waits=waits)


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
    labels = f"{number(loop.labels_until(round_number))} labels{' in all' if round_number > 1 else ''}"
    console.print(f"round {round_number} of {loop.rounds}: up to {labels}, chosen by {rule}{why}", markup=False)


def _run_round(job: JobConfig, folder: Path, round_number: int, *, waits: bool) -> bool:
    """Run a round, and wait for people's labels where it needs them. Returns whether it has finished."""
    if not _run_until(job, folder, LoopState(round_number), last=name_of_round(GAIN, round_number), waits=waits):
        return False
    collected = read_record(folder / name_of_round("collect", round_number) / "results.json", RoundResults)
    gain = read_record(folder / name_of_round(GAIN, round_number) / "results.json", GainResults)
    console.print(
        f"round {round_number}: {number(collected.num_labels)} labels; gain {gain.gain.mean:+.3f}"
        f" ({gain.gain.low:.3f} to {gain.gain.high:.3f}), {gain.per_hundred.mean:+.4f} per hundred labels",
        markup=False,
    )
    return True


def _run_until(job: JobConfig, folder: Path, state: LoopState, *, waits: bool, last: str = "") -> bool:
    """Run the stages up to `last` ("" = all), and wait for people where one needs them. `state` is the loop's while it
    does not wait. Returns whether the stages have finished.
    """
    _write_state(folder, state)
    while (waiting := run_stages(job, folder, last=last)) is not None:
        # A stage of the job's own may wait for something that only a person can see.
        if not isinstance(waiting, LabelsWaitError) or not _wait(folder, state, waiting, waits=waits):
            return False
        _write_state(folder, state)
    return True


def _wait(folder: Path, unblocked: LoopState, waiting: LabelsWaitError, *, waits: bool) -> bool:
    """Show how many labels are missing until none is, including while their store cannot be used.

    Returns True once none is missing; False at once without `waits`. `unblocked` is the state of a loop that does not
    wait.
    """
    shown, failure = unblocked, waiting.__cause__
    # A store that opens again may fail at the same place, as on a full disk, so this waits at least once.
    if isinstance(failure, STORE_AWAY):
        state = replace(unblocked, store_away=reason_of(failure))
    else:
        state = _state_of(waiting, unblocked, shown)
    try:
        while state != unblocked:
            if state != shown:
                _write_state(folder, state)
                write_run_report(folder)
                console.print(_in_words(state, shown), markup=False)
                shown = state
            if not waits:
                console.print("the same command continues later", markup=False)
                return False
            renew_status(folder)
            time.sleep(POLL_SECONDS)
            state = _state_of(waiting, unblocked, shown)
    except KeyboardInterrupt:
        console.print(f"{escape(folder.name)}: stopped while waiting for labels; the same command continues")
        raise
    if shown.store_away:
        console.print("the label store is back")
    return True


def _state_of(waiting: LabelsWaitError, unblocked: LoopState, shown: LoopState) -> LoopState:
    """Returns what a loop waits for now. Keeps the first reason why the store is away; later ones are only reworded."""
    try:
        return replace(unblocked, waits_for=waiting.count_missing())
    except STORE_AWAY as error:
        return shown if shown.store_away else replace(shown, store_away=reason_of(error))


def _in_words(state: LoopState, before: LoopState) -> str:
    if state.store_away:
        return f"the label store cannot be used ({state.store_away}); the loop continues once it can"
    back = "the label store is back; " if before.store_away else ""
    return f"{back}waiting for {count_of(state.waits_for, 'label')}"


def _write_state(folder: Path, state: LoopState) -> None:
    write_json(folder / STATE, as_json(state))
