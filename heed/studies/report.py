"""Writes a study's findings: findings.json, findings.md, and a figure per finding with curves."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from evaluation.measures.curves import points
from files.records import as_json
from heed.studies.findings import Curves, Found
from heed.studies.verdicts import Claim
from preferences.statistics.estimates import Floats, Interval
from stages.progress import console
from stages.reports.plots import ROUND_STEPS, draw, tone
from stages.reports.text import number

LINE_TONES = ("ppo", "sft", "other-1")
TONES_OF_MANY = ("best-of-n", "ppo", "sft", "other-1", "other-2", "other-3", "pretrained", "muted")
MANY = 7  # from this many curves on, different kinds of curve must differ in tone
INTERVALS = (
    "Each seed's number has a 95% bootstrap interval over its held-out prompts (texts, tasks). The mean has a 95%"
    " Student's interval over seeds, and only that one decides, by the rules in `heed/studies/verdicts.py`."
)


def write_findings(folder: Path, found: Sequence[Found], num_seeds: int) -> None:
    """Writes all findings. Raises: OSError if the folder cannot be written."""
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for finding in found:
        svg = finding.figure
        if finding.curves[0]:
            svg = draw_curves(finding.finding.name, finding.finding.title, finding.curves)
        if svg:
            (figures / f"{finding.finding.name}.svg").write_text(standalone(svg), encoding="utf-8")
    shown = {"num_seeds": num_seeds, "intervals": INTERVALS, "findings": [_as_json(finding) for finding in found]}
    (folder / "findings.json").write_text(json.dumps(as_json(shown), indent=2) + "\n", encoding="utf-8")
    (folder / "findings.md").write_text(as_markdown(found, num_seeds), encoding="utf-8")
    console.print(str(folder / "findings.md"))


def _as_json(found: Found) -> dict[str, Any]:
    finding = found.finding
    return {
        "name": finding.name,
        "title": finding.title,
        "source": finding.source,
        "arms": finding.arms,
        "verdict": found.verdict,
        "claims": [
            {
                "claim": claim.text,
                "expected": claim.rule.text,
                "by_seed": claim.by_seed,
                "over_seeds": claim.over_seeds,
                "verdict": claim.verdict,
            }
            for claim in found.claims
        ],
        "curves": [{name: points(curve) for name, curve in curves.items()} for curves in found.curves],
    }


def as_markdown(found: Sequence[Found], num_seeds: int) -> str:
    """Formats every finding with its verdict and a table of its claims."""
    parts = [f"# Findings over {num_seeds} seed{'s' if num_seeds > 1 else ''}", INTERVALS]
    for finding in found:
        parts.append(f"## {finding.finding.title}")
        parts.append(f"{finding.finding.source}. **{finding.verdict.capitalize()}.**")
        head = ["claim", "expected", *(f"seed {seed}" for seed in range(num_seeds)), "mean", "verdict"]
        rows = [_row(claim) for claim in finding.claims]
        table = [head, ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in table))
        if finding.table:
            parts.append(finding.table)
        if finding.curves[0] or finding.figure:
            parts.append(f"![{finding.finding.title}](figures/{finding.finding.name}.svg)")
    return "\n\n".join(parts) + "\n"


def _row(claim: Claim) -> list[str]:
    seeds = [spread(value) for value in claim.by_seed]
    return [claim.text, claim.rule.text, *seeds, spread(claim.over_seeds), claim.verdict]


def spread(found: Interval) -> str:
    """Formats "0.12 (0.10 to 0.15)"; a dash if unknown."""
    mean, low, high = (number(value, 3) if value == value else "–" for value in (found.mean, found.low, found.high))
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


def write_gold_by_labels(folder: Path, num_labels: Sequence[int], gold: Mapping[str, Floats]) -> None:
    """Writes figures/label-choice.svg: gold by number of labels, for each rule [seeds, rounds] the mean over seeds."""

    def paint(axes: Any) -> None:
        for place, (rule, gold_SR) in enumerate(gold.items()):
            colour = tone(TONES_OF_MANY[place])
            axes.plot(
                num_labels, gold_SR.mean(axis=0), marker="o", markersize=3, linewidth=1.4, color=colour, label=rule
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(num_labels, [f"{size:,}" for size in num_labels])
        axes.set_xlabel("labels", loc="right")
        axes.set_ylabel("gold score of best-of-n")
        axes.legend(frameon=False, fontsize=9, loc="best")

    chart = draw(
        paint, width=640, height=400, margins=(64, 16, 40, 12), name="label-choice",
        label="Gold score of best-of-n by number of labels, one line per rule that chose them, mean over seeds.",
    )  # fmt: skip
    (folder / "figures" / "label-choice.svg").write_text(standalone(chart), encoding="utf-8")


def standalone(svg: str) -> str:
    """Turns a report's chart into a standalone SVG file, in the page's light colours."""
    css = files("stages.reports").joinpath("style.html.jinja").read_text(encoding="utf-8")
    light = dict(reversed(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", css)))  # the first of each is the light one
    svg = re.sub(r"var\(--([\w-]+)\)", lambda found: light[found[1]], svg)
    svg = re.sub(r"calc\(([\d.]+px) \* var\(--text, 1\)\)", r"\1", svg)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="background:{light["page"]}" font-family="sans-serif"'
    return svg.replace("<svg", head, 1) + "\n"
