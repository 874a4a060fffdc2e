"""The report of a comparison: report.json with every number and its rows, and report.html to look at.

Both are functions of the comparison's folder alone, so the same folder gives the same report, byte for byte. The page
stands alone: nothing is loaded, and its one script, named by hash in its policy, only filters the samples.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import reports
from compare.report.curves import curve_view
from compare.report.folder import VERDICTS, ComparisonFolder, read_comparison
from compare.report.measures import measure_tables
from compare.report.pairs import PAIR_COLUMNS, as_shown
from compare.report.samples import MAX_CHARACTERS, MAX_PROMPTS, Samples, samples_of
from compare.report.sources import sources_of
from compare.report.view import View, meta_of
from compare.report.warnings import warnings_of
from compare.report.words import Answer, answer_of, looks_of
from evaluation.statistics.results import Summary
from evaluation.statistics.summary import summarise
from files.atomic import write_text
from files.records import as_json
from reports.run import clean_text
from reports.run import plain as finite

SCRIPT = Path(__file__).with_name("page.js")


def write_comparison_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into a comparison's folder. Returns what report.json holds.

    Errors: ValueError naming the file (and row) in the folder that is absent, malformed, or contradicts another.
    """
    comparison = read_comparison(folder)
    page, report = render(comparison)
    write_text(folder / "report.json", json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(folder / "report.html", page)
    return report


def render(
    comparison: ComparisonFolder, *, max_prompts: int = MAX_PROMPTS, max_characters: int = MAX_CHARACTERS
) -> tuple[str, dict[str, Any]]:
    """The page, and what report.json holds. The bounds are on the prompts and characters of the sample browser."""
    summary = as_shown(_summary_of(comparison), comparison.judges)
    looks = looks_of(comparison.policies)
    answer = answer_of(summary, looks)
    warnings = warnings_of(comparison, summary, looks)
    sources = sources_of(comparison, summary)
    samples = samples_of(comparison, looks, max_prompts=max_prompts, max_characters=max_characters)
    view = View(summary, looks, sources)
    script = SCRIPT.read_text(encoding="utf-8")
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            comparison=comparison,
            meta=meta_of(summary),
            answer=answer,
            warnings=warnings,
            judges=view.judges(),
            pair_columns=PAIR_COLUMNS,
            agreement=view.agreement(),
            failures=view.failures(),
            measure_tables=measure_tables(comparison.measures, looks),
            curves=curve_view(comparison.measures),
            samples=samples,
            settings=flat(comparison.settings),
            sources=sources,
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    return clean_text(page), finite(_report(comparison, answer, warnings, samples, as_json(summary), as_json(sources)))


def _summary_of(comparison: ComparisonFolder) -> Summary:
    try:
        return summarise(comparison.verdicts, comparison.policies, seed=comparison.seed)
    except ValueError as error:
        raise ValueError(f"{VERDICTS}: {error}") from None


def _report(
    comparison: ComparisonFolder,
    answer: Answer,
    warnings: tuple[str, ...],
    samples: Samples,
    summary: dict[str, Any],
    sources: dict[str, Any],
) -> dict[str, Any]:
    return {
        "comparison": comparison.name,
        "answer": as_json(answer),
        "warnings": list(warnings),
        "summary": summary,
        "measures": dict(comparison.measures),
        "samples": {
            "num_shown": len(samples.prompts),
            "num_prompts": samples.num_prompts,
            "prompt_ids": [prompt.prompt_id for prompt in samples.prompts],
        },
        "settings": dict(comparison.settings),
        "sources": sources,
        "files": dict(comparison.files),
    }


def flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Settings as (dotted path, text), an entry a line."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [line for key, entry in entries for line in flat(entry, f"{path}.{key}" if path else str(key))]
    return [(path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, Path(reports.__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
