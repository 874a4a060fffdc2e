"""The results of a campaign, and what it reads from run folders."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from heed.jobs.recovery import milestones
from heed.jobs.registry import BUILT_IN, Registry
from stages.lineage import LINEAGE, outputs_hash

TOLERATED = "tolerated"  # the driver reported no lost worker
REPLACED = "replaced"  # by the driver: a new process took the lost one's place, and all others kept their state
RECOVERED = "recovered"  # by the driver
RESTARTED = "restarted"  # the driver was killed, or ended with a one-line message; the same command continued
FAILED = "failed"  # the driver ended with a traceback, or made no progress
OUTCOMES = (TOLERATED, REPLACED, RECOVERED, RESTARTED, FAILED)  # from the least disturbance to the most

# `heed.jobs.recovery.run_to_end` prints this once per loss that it recovers from.
LOSS = re.compile(r"^\w+: continues from ", re.MULTILINE)
REPLACEMENT = "A new process repeats what was under way"  # `cluster.remote` prints this once per lost generator


@dataclass(frozen=True)
class Injected:
    """One fault and its outcome.

    `noticed_seconds` is the time until the driver reported lost workers. `recovered_seconds` and `lost_seconds` are the
    time until the run made progress again, from the end and from the beginning of the fault. The first two are -1 if
    that did not happen. `message` is the last line of a driver that ended.
    """

    kind: str
    what: str
    stage: str
    outcome: str
    noticed_seconds: float = -1.0
    recovered_seconds: float = -1.0
    lost_seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class ChaosResult:
    """Outcomes of a job under faults. `differing` lists the stages whose outputs differ from the undisturbed run's.
    `impossible` gives the reason for each kind of fault that this machine does not allow. `useful_seconds` is how long
    an undisturbed run takes: that of the first run, with each stage's time replaced by its fastest in any run.
    """

    faults: tuple[Injected, ...]
    rounds: int
    differing: tuple[str, ...]
    calm_seconds: float
    chaos_seconds: float
    impossible: dict[str, str]
    useful_seconds: float

    @property
    def effective_share(self) -> float:
        """Useful time as a share of the time under faults. Work that is done twice counts once as useful."""
        return self.rounds * self.useful_seconds / max(self.chaos_seconds, 1e-9)

    @property
    def has_failed(self) -> bool:
        return bool(self.differing) or any(fault.outcome == FAILED for fault in self.faults)


def summary(result: ChaosResult) -> str:
    """Summarises in a few lines: faults by kind and stage, outcomes, time to notice, and whether any output differs."""
    faults, outcomes = result.faults, Counter(fault.outcome for fault in result.faults)
    lines = [
        f"{_struck(result)}: {_counts([fault.kind for fault in faults])}",
        f"by stage: {_counts([fault.stage for fault in faults])}",
        "; ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name]),
    ]
    for kind in dict.fromkeys(fault.kind for fault in faults):
        noticed = [f.noticed_seconds for f in faults if f.kind == kind and f.noticed_seconds >= 0]
        if noticed:
            lines.append(
                f"{kind}: {_num(len(noticed), 'loss', 'losses')} noticed after {median(noticed):.1f} s (median),"
                f" {max(noticed):.1f} s at most"
            )
    operator = [fault for fault in faults if fault.outcome == RESTARTED and fault.kind != "driver"]
    lines += [f"operator restart after {fault.what} in {fault.stage}: {fault.message}" for fault in operator]
    lines += [f"FAILED: {f.what} in {f.stage}: {f.message}" for f in faults if f.outcome == FAILED]
    lines += [f"not possible here: {kind}: {why}" for kind, why in result.impossible.items()]
    lines.append(
        f"{result.calm_seconds:.0f} s undisturbed, {result.chaos_seconds / max(1, result.rounds):.0f} s per run under"
        f" faults, {result.chaos_seconds / 60:.1f} min in all"
    )
    lines += _effective_time(result)
    same = (
        f"differing: {', '.join(result.differing)}"
        if result.differing
        else "every stage's results are bitwise the same"
    )
    return "\n".join([*lines, same])


def _effective_time(result: ChaosResult) -> list[str]:
    """Returns a table of the time that faults cost: one row per kind, and one for all faults."""
    rows = [("effective training time", "faults", "seconds lost", "at most", "with one fault per run")]
    for kind in dict.fromkeys(fault.kind for fault in result.faults):
        lost = [fault.lost_seconds for fault in result.faults if fault.kind == kind]
        share = result.useful_seconds / (result.useful_seconds + fmean(lost))
        rows.append((kind, str(len(lost)), f"{fmean(lost):.1f}", f"{max(lost):.1f}", f"{share:.0%}"))
    widths = (8, 14, 9, 24)
    lines = [
        f"{name:<24}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
    useful, share = result.rounds * result.useful_seconds, result.effective_share
    return [
        *lines,
        f"{_struck(result)}: {useful:.0f} s of training in {result.chaos_seconds:.0f} s, {share:.0%}",
    ]


def worse(one: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    """Returns the worse of two (outcome, message)."""
    return max(one, other, key=lambda ranked: OUTCOMES.index(ranked[0]))


def _struck(result: ChaosResult) -> str:
    return f"{_num(len(result.faults), 'fault', 'faults')} in {_num(result.rounds, 'run', 'runs')}"


def _num(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _counts(names: Sequence[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(names).items())


def stage_of(folder: Path) -> str:
    """Returns the active stage of a run folder: started, but not finished."""
    begun = [path.parent for path in sorted(folder.glob("*/inputs.json"))]
    return next((stage.name for stage in begun if not (stage / LINEAGE).exists()), "start")


def pulse(folder: Path) -> list[tuple[str, int]]:
    """Returns a value that changes with every step of a run: its stage, log sizes and number of checkpoints."""
    sizes = []
    for path in folder.glob("*/metrics.jsonl"):
        try:
            sizes.append((str(path), path.stat().st_size))
        except FileNotFoundError:  # the folder is missing right now
            continue
    saved = [(path.name, len(milestones(path))) for path in sorted(folder.glob("*/"))]
    return [(stage_of(folder), 0), *sorted(sizes), *saved]


def differing_stages(calm: Path, chaos: Path, stages: Registry = BUILT_IN) -> list[str]:
    """Returns the stages whose outputs differ between two run folders."""
    outputs = {stage.name: Path(stage.name) / stage.output for stage in stages if (calm / stage.name).exists()}
    return [name for name, path in outputs.items() if outputs_hash(calm / path) != outputs_hash(chaos / path)]
