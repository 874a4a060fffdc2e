"""`heed study`: tests published findings in the playground world, over several seeds (docs/findings.md).

Every arm is an ordinary job, run by `heed.jobs.pipeline`. Finished work is reused, so an interrupted study continues,
and a later finding reuses the arms that it shares with others.

    runs/study/
      seed-0/jobs/ARM.toml     the arms as job files
      seed-0/ARM/              their run folders
      seed-0/rankings/         subsets of the base's comparisons, one per reward model
      seed-0/teacher-samples/  what the teacher of `heed study distillation` wrote
      seed-0/measured/         samples and scores
      measures/seed-0.npz      what the findings are computed from (heed/studies/measures.py)
      findings.json, findings.md, figures/
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from evaluation.compare.stage import STAGE as COMPARE
from evaluation.measures.overoptimisation import MIN_POLICIES
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from heed.studies.arms import (
    LABELERS_PER_TASK,
    TEACHER,
    Arm,
    arm_job,
    every_arm,
    indifferent,
    with_those_before,
    write_cuts,
    write_indifferent,
)
from heed.studies.distillation import DISTILLATION, write_teacher_samples
from heed.studies.findings import (
    ALARM,
    ALGORITHMS,
    CONTROL,
    FINDINGS,
    JUDGED,
    LORA_FINDINGS,
    Finding,
    Found,
    Measures,
)
from heed.studies.label_choice import CHOICES, choice_arm, choice_stamps, choices_of_seeds, gold_by_round, num_labels
from heed.studies.measures import Recorded, SeedMeasures, StoredMeasures, measures_file, stamps_of
from heed.studies.report import write_findings, write_gold_by_labels
from ppo.stage import STAGE as PPO
from preferences.task_selection import RULES
from stages.progress import console

# The debug job's pool and number of policies are too small for a curve.
QUICK = ("compare.best_of=8", "ppo.keep_policies_every=1", "world.num_graded=1800")


def run_study(
    wanted: str,
    job_file: Path,
    runs: Path,
    *,
    num_seeds: int,
    overrides: Sequence[str] = (),
    stored: Path | None = None,
) -> list[Found]:
    """Runs unfinished arms, measures them, and writes findings.json, findings.md and figures into `runs`.

    `wanted` names findings, separated by commas, "all" for the first five, or a group: "algorithms", "lora" or
    "label-choice". Seeds 0, 1, ... replace the job's, except that those of "label-choice" share the policy of the job's
    own seed. A seed whose measures are in the folder `stored` is not run.
    Raises: ValueError for an unknown finding, an invalid job, or stored measures of another study, before anything
    runs.
    """
    findings = _named(wanted)
    if any(finding in CHOICES for finding in findings):
        return _run_choices(findings, load_job(job_file, overrides, opens_models=False), runs, num_seeds, stored)
    seeds = [
        (runs / f"seed-{seed}", load_job(job_file, [*overrides, f"seed={seed}"], opens_models=False))
        for seed in range(num_seeds)
    ]
    arms = {folder: every_arm(job, folder) for folder, job in seeds}
    _check(seeds[0][1], findings)
    names = [name for finding in findings for name in finding.arms]
    known = _read_stored(stored, {job.seed: stamps_of(job) for _, job in seeds} if stored else {})
    measures: list[Measures] = []
    found: list[Found] = []
    for folder, job in seeds:
        measures.append(known[job.seed] if job.seed in known else _run_seed(folder, job, arms[folder], names))
        found = [finding.evaluate(measures) for finding in findings]
        if isinstance(recorded := measures[-1], Recorded):
            recorded.write(measures_file(runs / "measures", job.seed), stamps_of(job))
        write_findings(runs, found, len(measures))  # after each seed, so that a stopped study has reported its results
    return found


def _run_choices(
    findings: Sequence[Finding], policy: JobConfig, runs: Path, num_seeds: int, stored: Path | None
) -> list[Found]:
    """As `run_study`, for findings on the choice of labels. Raises: ValueError if there are others among them."""
    others = [finding.name for finding in findings if finding not in CHOICES]
    if others:
        raise ValueError(
            f"{', '.join(others)}: only findings of label-choice were expected, since one of them is asked"
        )
    every_arm(policy, runs)  # refuses a job without the sections of a study
    stamps = {seed: choice_stamps(policy, seed) for seed in range(num_seeds)}
    known = _read_stored(stored, stamps)
    computed = choices_of_seeds(runs / "policy", policy, [seed for seed in stamps if seed not in known])
    measures: list[Measures] = []
    found: list[Found] = []
    rules = [rule for rule in RULES if any(choice_arm(rule, 1) in finding.arms for finding in findings)]
    for seed in stamps:
        measures.append(known[seed] if seed in known else Recorded(next(computed)))
        found = [finding.evaluate(measures) for finding in findings]
        gold = {rule: np.stack([gold_by_round(of, rule).mean(axis=1) for of in measures]) for rule in rules}
        sizes = num_labels(measures[-1], "uniform")
        if isinstance(recorded := measures[-1], Recorded):
            recorded.write(measures_file(runs / "measures", seed), stamps[seed])
        write_findings(runs, found, len(measures))
        write_gold_by_labels(runs, sizes, gold)
    return found


def _run_seed(folder: Path, job: JobConfig, arms: Mapping[str, Arm], names: Sequence[str]) -> Recorded:
    """Runs the named arms of a seed, and those that they read. Returns their measures, each computed on first use."""
    needed = with_those_before(arms, names)
    for number, arm in enumerate(needed, 1):
        console.print(f"[bold]{folder.name}: {arm.name}[/] ({number} of {len(needed)})")
        run_job(arm_job(job, arm, folder), folder)
        if arm.name == "base":
            write_cuts(folder)
        if arm.name == "reward-full" and not indifferent(folder).is_dir():
            write_indifferent(folder)
        if arm.name == TEACHER:
            write_teacher_samples(folder, job)
    return Recorded(SeedMeasures.of(folder, job))


def _read_stored(folder: Path | None, stamps: Mapping[int, Mapping[str, str]]) -> dict[int, StoredMeasures]:
    """Reads the stored measures of the seeds with these stamps by arm. Raises: ValueError if there are none, and as
    `StoredMeasures.read`.
    """
    if folder is None:
        return {}
    paths = {seed: measures_file(folder, seed) for seed in stamps}
    found = {seed: StoredMeasures.read(path, seed, stamps[seed]) for seed, path in paths.items() if path.is_file()}
    if not found:
        raise ValueError(f"{folder}: no measures of these seeds; {', '.join(map(str, paths.values()))} were expected")
    return found


def _check(job: JobConfig, findings: Sequence[Finding]) -> None:
    """Raise ValueError for a job with too few labelers, with too few policies per curve for a fit, or without the
    graded answers that a judge learns from.
    """
    if JUDGED in findings and not getattr(job.world, "num_graded", 0):
        raise ValueError("world.num_graded is 0; graded answers, as in configs/jobs/study-judge.toml, were expected")
    compare, ppo = job.section_of(COMPARE), job.section_of(PPO)  # every_arm refuses jobs without them
    world = job.open_world()
    assert world is not None
    num_labelers = len(world.labelers(job.seed))
    if num_labelers < max(LABELERS_PER_TASK):
        raise ValueError(f"the world has {num_labelers} labelers; {max(LABELERS_PER_TASK)} per task were expected")
    if compare.best_of < 2**MIN_POLICIES:
        raise ValueError(f"compare.best_of is {compare.best_of}; at least {2**MIN_POLICIES} was expected")
    every = ppo.keep_policies_every
    if not every or ppo.num_iterations // every < MIN_POLICIES:
        raise ValueError(
            f"ppo.keep_policies_every is {every} with {ppo.num_iterations} iterations; at least"
            f" {MIN_POLICIES} policies must be kept"
        )


def _named(wanted: str) -> list[Finding]:
    groups = {"all": FINDINGS, "algorithms": ALGORITHMS, "lora": LORA_FINDINGS, "label-choice": CHOICES}
    if wanted in groups:
        return list(groups[wanted])
    others = (CONTROL, ALARM, *LORA_FINDINGS, JUDGED, DISTILLATION, *CHOICES)
    known = {finding.name: finding for finding in (*FINDINGS, *ALGORITHMS, *others)}
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(
                f"finding {name!r}: one of {', '.join(known)}, or all, algorithms, lora or label-choice, was expected"
            )
    return [known[name] for name in names]
