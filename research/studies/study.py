"""`python -m research.study`: tests published findings in the playground world, over several seeds (research/findings).

Every arm is an ordinary job, run by `heed.jobs.pipeline`. Finished work is reused, so an interrupted study continues,
and a later finding reuses the arms that it shares with others.

    runs/study/
      seed-0/jobs/ARM.toml     the arms as job files
      seed-0/ARM/              their run folders
      seed-0/rankings/         subsets of the base's comparisons, one per reward model
      seed-0/measured/         samples and scores
      measures/seed-0.npz      what the findings are computed from (research/studies/measures.py)
      findings.json, findings.md, figures/
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from evaluation.compare.stage import STAGE as COMPARE
from files.records import as_json
from heed.jobs.job import JobConfig
from heed.jobs.job_file import load_job
from heed.jobs.pipeline import run_job
from ppo.stage import STAGE as PPO
from preferences.statistics.estimates import Interval
from preferences.task_selection import RULES
from research.over_optimisation.curves import points
from research.over_optimisation.fits import MIN_POLICIES
from research.studies.arms import (
    LABELERS_PER_TASK,
    Arm,
    arm_job,
    every_arm,
    indifferent,
    with_those_before,
    write_cuts,
    write_indifferent,
)
from research.studies.findings import (
    ALARM,
    ALGORITHMS,
    CONTROL,
    FINDINGS,
    JUDGED,
    LORA_FINDINGS,
    Curves,
    Finding,
    Found,
    Measures,
)
from research.studies.label_choice import (
    CHOICES,
    choice_arm,
    choice_stamps,
    choices_of_seed,
    gold_by_round,
    num_labels,
)
from research.studies.measures import Recorded, SeedMeasures, StoredMeasures, measures_file, stamps_of
from research.studies.policy_runs import FRESHNESS, ROUTER_REPLAY, PolicyMeasures, policy_stamps
from research.studies.verdicts import Claim
from stages.progress import console
from stages.reports.plots import ROUND_STEPS, draw, tone
from stages.reports.text import number

# The debug job's pool and number of policies are too small for a curve.
TRIAL = "a trial with --quick, which means nothing"
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

    `wanted` names findings, separated by commas, "all" for the first five, or a group of `GROUPS`. Seeds 0, 1, ...
    replace the job's, except that those of "label-choice", "freshness" and "router-replay" share the models that the
    job's own seed trains. A seed whose measures are in the folder `stored` is not run.
    Raises: ValueError for an unknown finding, an invalid job, or stored measures of another study, before anything
    runs.
    """
    findings = _named(wanted)
    _require_one_kind(findings)
    note = TRIAL if set(QUICK) <= set(overrides) else ""
    own = load_job(job_file, overrides, opens_models=False)
    jobs = {seed: load_job(job_file, [*overrides, f"seed={seed}"], opens_models=False) for seed in range(num_seeds)}
    stamps, run = _kind_of(findings, own, jobs, runs)
    known = _read_stored(stored, {seed: stamps(job) for seed, job in jobs.items()} if stored else {})
    measures: list[Measures] = []
    results: list[Found] = []
    for seed, job in jobs.items():
        measures.append(known[seed] if seed in known else Recorded(run(job)))
        results = [finding.evaluate(measures) for finding in findings]
        if findings[0] in CHOICES:
            write_gold_by_labels(runs, findings, measures)
        if isinstance(recorded := measures[-1], Recorded):
            recorded.write(measures_file(runs / "measures", seed), stamps(job))
        # After each seed, so that a stopped study has reported its results.
        write_findings(runs, results, len(measures), note)
    return results


def _kind_of(
    findings: Sequence[Finding], own: JobConfig, jobs: Mapping[int, JobConfig], runs: Path
) -> tuple[Callable[[JobConfig], dict[str, str]], Callable[[JobConfig], Measures]]:
    """Returns what stamps the measures of a seed's job, and what runs it. `own` is the job with its own seed.

    Raises: ValueError for jobs that lack what the findings need.
    """
    folder = runs / "policy"
    if findings[0] in POLICIES:  # arms are trained when they are measured
        return policy_stamps, lambda job: replace(PolicyMeasures.of(folder, job), start_seed=own.seed)
    if findings[0] in CHOICES:
        every_arm(own, runs)
        return lambda job: choice_stamps(own, job.seed), lambda job: choices_of_seed(folder, own, job.seed)
    arms = {seed: every_arm(job, runs / f"seed-{seed}") for seed, job in jobs.items()}
    _check(jobs[0], findings)
    names = [name for finding in findings for name in finding.arms]
    return stamps_of, lambda job: _run_seed(runs / f"seed-{job.seed}", job, arms[job.seed], names)


def _require_one_kind(findings: Sequence[Finding]) -> None:
    """Check that no findings are asked for together whose arms other jobs make. Raises: ValueError."""
    for kind, group in {"label-choice": CHOICES, "freshness": FRESHNESS, "router-replay": ROUTER_REPLAY}.items():
        others = [finding.name for finding in findings if finding not in group]
        if others and len(others) < len(findings):
            raise ValueError(f"{', '.join(others)}: only findings of {kind} were expected, since one of them is asked")


def _run_seed(folder: Path, job: JobConfig, arms: Mapping[str, Arm], names: Sequence[str]) -> Measures:
    """Runs the named arms of a seed, and those that they read. Returns their measures, each computed on first use."""
    needed = with_those_before(arms, names)
    for position, arm in enumerate(needed, 1):
        console.print(f"[bold]{folder.name}: {arm.name}[/] ({position} of {len(needed)})")
        run_job(arm_job(job, arm, folder), folder)
        if arm.name == "base":
            write_cuts(folder)
        if arm.name == "reward-full" and not indifferent(folder).is_dir():
            write_indifferent(folder)
    return SeedMeasures.of(folder, job)


def _read_stored(folder: Path | None, stamps: Mapping[int, Mapping[str, str]]) -> dict[int, StoredMeasures]:
    """Reads the stored measures of the seeds with these stamps by arm. Raises: ValueError if there are none, and as
    `StoredMeasures.read`.
    """
    if folder is None:
        return {}
    paths = {seed: measures_file(folder, seed) for seed in stamps}
    stored = {seed: StoredMeasures(path, seed, stamps[seed]) for seed, path in paths.items() if path.is_file()}
    if not stored:
        raise ValueError(f"{folder}: no measures of these seeds; {', '.join(map(str, paths.values()))} were expected")
    return stored


def _check(job: JobConfig, findings: Sequence[Finding]) -> None:
    """Raise ValueError for a job with too few labelers, with too few policies per curve for a fit, or without the
    graded answers that a judge learns from.
    """
    if JUDGED in findings and not getattr(job.world, "num_graded", 0):
        raise ValueError("world.num_graded is 0; graded answers, as in research/jobs/study-judge.toml, were expected")
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


GROUPS = {
    "all": FINDINGS, "algorithms": ALGORITHMS, "lora": LORA_FINDINGS, "label-choice": CHOICES, "freshness": FRESHNESS,
    "router-replay": ROUTER_REPLAY,
}  # fmt: skip
POLICIES = (*FRESHNESS, *ROUTER_REPLAY)
OTHERS = (CONTROL, ALARM, *LORA_FINDINGS, JUDGED, *CHOICES, *POLICIES)
KNOWN = {finding.name: finding for finding in (*FINDINGS, *ALGORITHMS, *OTHERS)}
NAMES = f"{', '.join(KNOWN)}; or a group: {', '.join(GROUPS)}"


def own_job(wanted: str) -> str:
    """Returns the name of the job in research/jobs that the findings' arms are made of."""
    first = _named(wanted)[0]
    groups = {"choice": CHOICES, "judge": (JUDGED,), "freshness": FRESHNESS, "router-replay": ROUTER_REPLAY}
    return next((f"study-{name}.toml" for name, group in groups.items() if first in group), "study.toml")


def _named(wanted: str) -> list[Finding]:
    if wanted in GROUPS:
        return list(GROUPS[wanted])
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in KNOWN:
            raise ValueError(f"finding {name!r}: one of {NAMES}, was expected")
    return [KNOWN[name] for name in names]


LINE_TONES = ("ppo", "sft", "other-1")
TONES_OF_MANY = ("best-of-n", "ppo", "sft", "other-1", "other-2", "other-3", "pretrained", "muted")
MANY = 7  # from this many curves on, different kinds of curve must differ in tone
INTERVALS = (
    "Each seed's number has a 95% bootstrap interval over its held-out prompts (texts, tasks). The mean has a 95%"
    " Student's interval over seeds, and only that one decides, by the rules in `research/studies/verdicts.py`."
)


def write_findings(folder: Path, results: Sequence[Found], num_seeds: int, note: str = "") -> None:
    """Writes all findings, with the note at each verdict. Raises: OSError if the folder cannot be written."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for finding in results:
        if finding.curves[0]:
            svg = draw_curves(finding.finding.name, finding.finding.title, finding.curves)
            (figures / f"{finding.finding.name}.svg").write_text(standalone(svg), encoding="utf-8")
    report = {"num_seeds": num_seeds, "note": note, "intervals": INTERVALS, "findings": list(map(_as_json, results))}
    (folder / "findings.json").write_text(json.dumps(as_json(report), indent=2) + "\n", encoding="utf-8")
    (folder / "findings.md").write_text(as_markdown(results, num_seeds, note), encoding="utf-8")
    console.print(str(folder / "findings.md"))


def _as_json(result: Found) -> dict[str, Any]:
    finding = result.finding
    return {
        "name": finding.name,
        "title": finding.title,
        "source": finding.source,
        "arms": finding.arms,
        "verdict": result.verdict,
        "claims": [
            {
                "claim": claim.text,
                "expected": claim.rule.text,
                "by_seed": claim.by_seed,
                "over_seeds": claim.over_seeds,
                "verdict": claim.verdict,
            }
            for claim in result.claims
        ],
        "curves": [{name: points(curve) for name, curve in curves.items()} for curves in result.curves],
    }


def as_markdown(results: Sequence[Found], num_seeds: int, note: str = "") -> str:
    """Formats every finding with its verdict and a table of its claims, and the note at each verdict."""
    note = note and f" ({note})"
    parts = [f"# Findings over {num_seeds} seed{'s' if num_seeds > 1 else ''}{note}", INTERVALS]
    for finding in results:
        parts.append(f"## {finding.finding.title}")
        parts.append(f"{finding.finding.source}. **{finding.verdict.capitalize()}{note}.**")
        head = ["claim", "expected", *(f"seed {seed}" for seed in range(num_seeds)), "mean", "verdict"]
        rows = [_row(claim, note) for claim in finding.claims]
        table = [head, ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
        if finding.curves[0]:
            parts.append(f"![{finding.finding.title}](figures/{finding.finding.name}.svg)")
    return "\n\n".join(parts) + "\n"


def _row(claim: Claim, note: str) -> list[str]:
    seeds = [spread(value) for value in claim.by_seed]
    return [claim.text, claim.rule.text, *seeds, spread(claim.over_seeds), claim.verdict + note]


def spread(interval: Interval) -> str:
    """Formats "0.12 (0.10 to 0.15)"; a dash if unknown."""
    mean, low, high = (
        number(value, 3) if value == value else "–" for value in (interval.mean, interval.low, interval.high)
    )
    return mean if mean == "–" or low == high == "–" else f"{mean} ({low} to {high})"


def draw_curves(name: str, title: str, by_seed: Sequence[Curves]) -> str:
    """Draws gold gain against √KL, one line per seed and arm; best-of-n, at the upper bound of its KL, is dashed."""

    def paint(axes: Any) -> None:
        for curves in by_seed:
            tones = LINE_TONES if len(curves) < MANY else TONES_OF_MANY
            for place, (label, curve) in enumerate(curves.items()):
                ordered = sorted(points(curve), key=lambda point: point.d)
                axes.plot(
                    [0.0, *(point.d for point in ordered)],
                    [0.0, *(point.gold.mean for point in ordered)],
                    linestyle="--" if curve.kind == "best_of_n" else "-",
                    marker="o",
                    markersize=2.5,
                    linewidth=1.2,
                    color=tone(tones[place % len(tones)]),
                    label=label if curves is by_seed[0] else None,
                )
        axes.axhline(0, color=tone("muted"), linewidth=0.8)
        axes.set_xlabel("√KL from SFT, √nats", loc="right")
        axes.set_ylabel("gold score above SFT's")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND_STEPS))
        axes.legend(frameon=False, fontsize=9, loc="best")

    return draw(
        paint, width=640, height=400, margins=(64, 16, 40, 12), name=name,
        label=f"{title}: gold score above SFT's against the root of KL, one line per seed.",
    )  # fmt: skip


def write_gold_by_labels(folder: Path, findings: Sequence[Finding], measures: Sequence[Measures]) -> None:
    """Writes figures/label-choice.svg: gold by number of labels, for each rule [seeds, rounds] the mean over seeds."""
    num_labels_R = num_labels(measures[-1], "uniform")
    gold = {
        rule: np.stack([gold_by_round(of_seed, rule).mean(axis=1) for of_seed in measures])
        for rule in RULES
        if any(choice_arm(rule, 1) in finding.arms for finding in findings)
    }

    def paint(axes: Any) -> None:
        for place, (rule, gold_SR) in enumerate(gold.items()):
            colour = tone(TONES_OF_MANY[place])
            axes.plot(
                num_labels_R, gold_SR.mean(axis=0), marker="o", markersize=3, linewidth=1.4, color=colour, label=rule
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(num_labels_R, [f"{size:,}" for size in num_labels_R])
        axes.set_xlabel("labels", loc="right")
        axes.set_ylabel("gold score of best-of-n")
        axes.legend(frameon=False, fontsize=9, loc="best")

    chart = draw(
        paint, width=640, height=400, margins=(64, 16, 40, 12), name="label-choice",
        label="Gold score of best-of-n by number of labels, one line per rule that chose them, mean over seeds.",
    )  # fmt: skip
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "figures" / "label-choice.svg").write_text(standalone(chart), encoding="utf-8")


def standalone(svg: str) -> str:
    """Turns a report's chart into a standalone SVG file, in the page's light colours."""
    css = files("stages.reports").joinpath("style.html.jinja").read_text(encoding="utf-8")
    light = dict(reversed(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", css)))  # the first of each is the light one
    svg = re.sub(r"var\(--([\w-]+)\)", lambda match: light[match[1]], svg)
    svg = re.sub(r"calc\(([\d.]+px) \* var\(--text, 1\)\)", r"\1", svg)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="background:{light["page"]}" font-family="sans-serif"'
    return svg.replace("<svg", head, 1) + "\n"
