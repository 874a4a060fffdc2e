"""What to change in a job that does not fit: the changes that cost least time, tried by planning the job with them."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.plan import COMFORTABLE, Plan, make_plan
from stages.planning.hardware import GIB, GPUS
from training.config import BatchConfig

MOST_WORKERS = 1024
MODES = ("fast", "balanced", "small")  # of ppo.memory, the fastest first


def advice(path: Path | None, overrides: Sequence[str], plan: Plan) -> list[str]:
    """Lines for the user: what makes a job fit, and for one that fits which mode of `ppo.memory` suits it."""
    if plan.fits:
        return _mode_line(path, overrides, plan)
    lines = [f"{stage.name} needs {what}, which Heed does not have" for stage in plan.stages for what in stage.missing]
    if not plan.excess:
        return lines
    found = changes_that_fit(path, overrides, plan)
    if found is not None:
        options = " ".join(f"--set {escape(shlex.quote(change))}" for change in found[0])
        lines.append(f"[bold]fits with[/] {options}: {_peaks(found[1])}")
    larger = next((name for name in _larger(plan) if not _on(plan, name).excess), "")
    if larger:
        lines.append(f"[bold]fits as it is[/] on {larger} (--gpu {larger})")
    lines = lines or ["no setting makes it fit; a smaller model or more workers would"]
    if not plan.setting.hardware.is_gpu:
        lines.append("this is a plan for this machine's CPU; `--gpu h100` plans for GPUs")
    return lines


def _mode_line(path: Path | None, overrides: Sequence[str], plan: Plan) -> list[str]:
    """The fastest mode of `ppo.memory` that fits with room, on GPUs: on a CPU there is no other memory to go to."""
    chosen = _mode(plan.job)
    if not chosen or not plan.setting.hardware.is_gpu:
        return []
    available = plan.setting.hardware.memory_bytes
    for mode in MODES:
        tried = plan if mode == chosen else _replanned(path, [*overrides, f"ppo.memory={mode}"], plan)
        if tried is None or tried.excess:
            continue
        peak = next(stage.peak for stage in tried.stages if stage.name == "ppo")
        if peak <= COMFORTABLE * available:
            what = f"{mode}, as set," if mode == chosen else f"{mode} (--set ppo.memory={mode})"
            room = f"ppo {peak / GIB:.1f} of {available / GIB:.0f} GiB"
            return [f"[bold]ppo.memory[/]: {what} is the fastest mode that fits with room: {room}"]
    return []


def _mode(job: JobConfig) -> str:
    """`ppo.memory`; "" without PPO."""
    return str(getattr(job.section_of(job.stage("ppo")), "memory", "")) if "ppo" in job.stage_names else ""


def changes_that_fit(path: Path | None, overrides: Sequence[str], plan: Plan) -> tuple[list[str], Plan] | None:
    """The fewest of the cheapest changes with which the job fits, as `--set` takes them, and its plan; None if there
    are none. Cheapest first, each that helps is kept; then those that were not needed after all are dropped.
    """
    kept: list[str] = []
    best = plan
    while best.excess:
        better = next(_improvements(path, overrides, kept, best), None)
        if better is None:
            return None
        kept, best = better
    for change in list(kept):
        fewer = [other for other in kept if other != change]
        tried = _replanned(path, [*overrides, *fewer], plan)
        if tried is not None and not tried.excess:
            kept, best = fewer, tried
    return kept, best


def _improvements(
    path: Path | None, overrides: Sequence[str], kept: list[str], best: Plan
) -> Iterator[tuple[list[str], Plan]]:
    """Each next change with which the job exceeds memory by less."""
    for change in _changes(best):
        key = change.partition("=")[0]
        changed = [*(other for other in kept if other.partition("=")[0] != key), change]
        tried = _replanned(path, [*overrides, *changed], best)
        if tried is not None and tried.excess < best.excess:
            yield changed, tried


def _changes(plan: Plan) -> Iterator[str]:
    """Changes from the one that costs least time to the one that costs most."""
    job, engine = plan.job, plan.job.engine
    available = plan.setting.hardware.memory_bytes
    for stage in plan.stages:
        if stage.peak > available:
            yield from _smaller_micro_batch(job, stage.name)
    mode = _mode(job)
    if mode == "fast":
        yield "ppo.memory=balanced"
    if not engine.checkpoint_activations:
        yield "engine.checkpoint_activations=true"
    if job.workers > 1 and engine.zero_stage < 3:
        yield f"engine.zero_stage={engine.zero_stage + 1}"
    if mode == "balanced":
        yield "ppo.memory=small"
    if engine.zero_stage and "optimizer" not in engine.offload:
        yield 'engine.offload=["optimizer"]'
    if engine.zero_stage == 3 and "parameters" not in engine.offload:
        yield 'engine.offload=["optimizer", "parameters"]'
    if job.workers < MOST_WORKERS:
        yield f"workers={2 * job.workers}"


def _smaller_micro_batch(job: JobConfig, name: str) -> Iterator[str]:
    section = job.section_of(job.stage(name))
    for field in ("batch", "minibatch"):
        batch = getattr(section, field, None)
        for key, size in batch.given_size.items() if isinstance(batch, BatchConfig) else ():
            if size > 1:
                yield f"{name}.{field}.{key}={size // 2}"


def _replanned(path: Path | None, overrides: Sequence[str], plan: Plan) -> Plan | None:
    """The plan with these overrides; None if the job does not allow them."""
    try:
        return make_plan(load_job(path, overrides, opens_models=False), plan.setting)
    except ValueError:
        return None


def _larger(plan: Plan) -> list[str]:
    """GPUs with more memory, the smallest and cheapest first."""
    chosen = plan.setting.hardware
    larger = [gpu for gpu in GPUS.values() if chosen.is_gpu and gpu.memory_bytes > chosen.memory_bytes]
    return [gpu.name for gpu in sorted(larger, key=lambda gpu: (gpu.memory_bytes, gpu.dollars_per_hour))]


def _on(plan: Plan, name: str) -> Plan:
    return make_plan(plan.job, replace(plan.setting, hardware=GPUS[name]))


def _peaks(plan: Plan) -> str:
    """The peak of each stage."""
    return ", ".join(f"{stage.name} {stage.peak / GIB:.1f} GiB" for stage in plan.stages)
