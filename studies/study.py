"""`heed study`: published findings tried again in the playground world, over several seeds (docs/findings.md).

Every arm is an ordinary job, run by `jobs.pipeline`; what is done is not done again, so a study that was killed goes
on, and a finding that is asked for later finds the arms that it shares with others.

    runs/study/
      seed-0/jobs/ARM.toml     the arms as job files
      seed-0/ARM/              their run folders
      seed-0/rankings/         the base's comparisons, cut for each reward model
      seed-0/measured/         what was sampled and scored
      findings.json, findings.md, figures/
"""

from collections.abc import Sequence
from pathlib import Path

from compare.stage import STAGE as COMPARE
from evaluation.measures.overoptimisation import MIN_POLICIES
from jobs.job import JobConfig
from jobs.job_file import load_job
from jobs.pipeline import run_job
from ppo.stage import STAGE as PPO
from stages.progress import console
from studies.arms import LABELERS_A_TASK, arm_job, arms_of, with_those_before, write_cuts
from studies.findings import FINDINGS, Finding, Found
from studies.measures import SeedMeasures
from studies.report import write_findings

# What the debug job lacks for a study: enough of a pool and of policies for a curve.
QUICK = ("compare.best_of=8", "ppo.keep_policies_every=1")


def run_study(wanted: str, job_file: Path, runs: Path, *, num_seeds: int, overrides: Sequence[str] = ()) -> list[Found]:
    """Run the arms that are not done, measure, and write findings.json, findings.md and figures into `runs`.

    `wanted` names a finding, or "all". Seeds are 0, 1, ... in place of the job's. Errors: ValueError for an unknown
    finding and whatever is wrong with the job, before anything runs.
    """
    findings = _named(wanted)
    seeds = [
        (runs / f"seed-{seed}", load_job(job_file, [*overrides, f"seed={seed}"], opens_models=False))
        for seed in range(num_seeds)
    ]
    arms = {folder: arms_of(job, folder) for folder, job in seeds}
    _check(seeds[0][1])
    names = [name for finding in findings for name in finding.arms]
    measures: list[SeedMeasures] = []
    found: list[Found] = []
    for folder, job in seeds:
        needed = with_those_before(arms[folder], names)
        for number, arm in enumerate(needed, 1):
            console.print(f"[bold]{folder.name}: {arm.name}[/] ({number} of {len(needed)})")
            run_job(arm_job(job, arm, folder), folder)
            if arm.name == "base":
                write_cuts(folder)
        measures.append(SeedMeasures.of(folder, job))
        found = [finding.look(measures) for finding in findings]
        write_findings(runs, found, len(measures))  # after each seed: a study that is stopped has told what it knew
    return found


def _check(job: JobConfig) -> None:
    """Errors: ValueError for a job with too few labelers, or whose curves would have too few policies to be fitted."""
    compare, ppo = job.section_of(COMPARE), job.section_of(PPO)  # arms_of lets no job in without them
    world = job.open_world()
    assert world is not None
    num_labelers = len(world.labelers(job.seed))
    if num_labelers < max(LABELERS_A_TASK):
        raise ValueError(f"the world has {num_labelers} labelers; {max(LABELERS_A_TASK)} a task were expected")
    if compare.best_of < 2**MIN_POLICIES:
        raise ValueError(f"compare.best_of is {compare.best_of}; {2**MIN_POLICIES} at least was expected")
    every = ppo.keep_policies_every
    if not every or ppo.num_iterations // every < MIN_POLICIES:
        raise ValueError(
            f"ppo.keep_policies_every is {every} of {ppo.num_iterations} iterations; {MIN_POLICIES} policies at"
            " least were expected to be kept"
        )


def _named(wanted: str) -> list[Finding]:
    chosen = [finding for finding in FINDINGS if wanted in (finding.name, "all")]
    if not chosen:
        names = ", ".join(finding.name for finding in FINDINGS)
        raise ValueError(f"finding {wanted!r}: one of {names}, or all, was expected")
    return chosen
