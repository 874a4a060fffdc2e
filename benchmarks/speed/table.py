"""Formats the figures as a Markdown table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.environments import ROOT
from benchmarks.speed.rows import HEED

README = ROOT / "benchmarks" / "README.md"


def markdown(found: Mapping[str, Any]) -> str:
    """Returns what was measured, on which machine, and Heed's rate over each peer's: median, lowest to highest."""
    ceiling = found["ceiling"]
    rounds = max(len(row["runs"]) for row in found["rows"].values())
    lines = [
        *taken_on(found, rounds),
        f"Matrix products at the model's own shapes: {ceiling['bf16_flops'] / 1e12:.2f} TFLOP/s in bf16,"
        f" {ceiling['fp32_flops'] / 1e12:.2f} in fp32; memory {ceiling['bytes_per_second'] / 1e9:.1f} GB/s.",
        "",
        "| work | peer | Heed per second | peer per second | Heed / peer | aim | of the ceiling | warm-up: Heed, peer"
        " |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        for peer, aim in zip(row["peers"], row["aims"], strict=True):
            lines.append(_line(name, row, peer, aim, found))
    return "\n".join(lines)


def taken_on(found: Mapping[str, Any], rounds: int) -> list[str]:
    """Returns the machine and the clock, as the first lines above a table."""
    machine = found["machine"]
    matrix_units = "with" if machine["amx_bf16"] else "without"
    lines = [
        f"{machine['cpu']}, {found['threads']} of {machine['cores']} cores used, {matrix_units} AMX; torch"
        f" {machine['torch']}, Python {machine['python']}; rounds: {rounds}.",
    ]
    if found["seconds"] == "cpu_seconds":
        lines.append(
            "**Taken on a machine that others were using**: seconds are those that a process computed, and its caches"
            " were not its own. Ratios are indicative."
        )
    return lines


def _line(name: str, row: Mapping[str, Any], peer: Mapping[str, Any], aim: float, found: Mapping[str, Any]) -> str:
    seconds, reason = found["seconds"], found["missing"].get(peer["environment"], "")
    ours, theirs = ([runs[who] for runs in row["runs"] if who in runs] for who in (HEED, peer["name"]))
    failed = next((run["failed"] for run in [*ours, *theirs] if "failed" in run), reason)
    if failed:
        return f"| {name} | {peer['name']} | | | not measured: {failed} | {aim} | | |"
    ratios = [rate(own, seconds) / rate(other, seconds) for own, other in zip(ours, theirs, strict=True)]
    heed = _middle(ours, seconds)
    work = ours[0]["work"] / row["timed_steps"]
    share = found["ceiling"]["step_seconds"][name] * heed / work
    cells = [
        name,
        theirs[0]["library"],
        f"{_readable(heed)} {row['unit']}",
        _readable(_middle(theirs, seconds)),
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{aim}",
        f"{share:.0%}",
        ", ".join(f"{median(run['warmup_seconds'] for run in runs):.0f} s" for runs in (ours, theirs)),
    ]
    return f"| {' | '.join(cells)} |"


def rate(run: Mapping[str, Any], seconds: str) -> float:
    """Returns work per second, of wall time or CPU time."""
    return float(run["work"] / run[seconds])


def _readable(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"


def _middle(runs: list[Mapping[str, Any]], seconds: str) -> float:
    return median(rate(run, seconds) for run in runs)


def spread(values: Sequence[float], form: str) -> str:
    """Returns the median, with the lowest and the highest."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def write_between_markers(path: Path, name: str, text: str) -> None:
    """Replaces the table of this name with `text`. Raises: ValueError for a file without its two markers."""
    opening, closing = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    before, begin, rest = path.read_text(encoding="utf-8").partition(opening)
    _, end, after = rest.partition(closing)
    if not (begin and end):
        raise ValueError(f"{path}: {opening!r} and {closing!r} were expected; the table goes between them")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
