"""The report of a comparison: report.json with every number and its rows, and report.html for reading.

Both depend only on the comparison's folder, so the same folder gives the same report, byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.compare.folder import VERDICTS, ComparisonFolder, read_comparison
from evaluation.compare.report.answer import Styles, answer_of, warnings_of
from evaluation.compare.report.measures import curve_parts, measure_tables
from evaluation.compare.report.samples import MAX_CHARACTERS, MAX_PROMPTS, samples_of
from evaluation.compare.report.sections import Sections, Source, meta_of, sources_of
from evaluation.inputs import clusters_of
from evaluation.statistics.results import (
    AlgorithmPair,
    CategoryWinRate,
    Counts,
    JudgeSummary,
    LengthControlled,
    PairSummary,
    Summary,
    WinRate,
)
from evaluation.statistics.summary import summarise
from files.records import as_json
from preferences.statistics.estimates import Interval
from stages.reports.page import Page
from stages.reports.page import render as render_page
from stages.reports.parts import Cell, Details, Note, Row, Samples, Section, Table
from stages.reports.report import write_pages
from stages.reports.text import clean_json, number, styles_of


def write_comparison_report(folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into a comparison's folder. Returns the contents of report.json.

    Raises: ValueError if a file in the folder is absent, malformed, or contradicts another; the message names it and
    the row.
    """
    page, report = render(read_comparison(folder))
    write_pages(folder, page, report)
    return report


def render(
    comparison: ComparisonFolder, *, max_prompts: int = MAX_PROMPTS, max_characters: int = MAX_CHARACTERS
) -> tuple[str, dict[str, Any]]:
    """Returns the page, and the contents of report.json. The limits are on the prompts and characters of the sample
    browser.
    """
    summary = as_shown(summary_of(comparison), comparison.judges)
    styles = styles_of(comparison.policies, comparison.names.titles)
    sources = sources_of(comparison, summary)
    samples = samples_of(comparison, styles, max_prompts=max_prompts, max_characters=max_characters)
    page = Page(
        kicker="Heed comparison",
        title=comparison.name,
        meta=meta_of(summary),
        answer=answer_of(summary, styles),
        sections=(
            *Sections(summary, styles, sources).all(),
            *_measures(comparison, styles),
            Section("samples", "Samples side by side", (_about(samples), samples)),
            _origins(comparison, sources),
        ),
        skip_to=("samples", "the samples"),
        styles=tuple(styles.values()),
        warnings=warnings_of(comparison, summary, styles),
    )
    return render_page(page), clean_json(_report(comparison, page, samples, as_json(summary), as_json(sources)))


def summary_of(comparison: ComparisonFolder) -> Summary:
    """Computes all statistics of the folder's verdicts. Raises: ValueError for verdicts that contradict each other."""
    try:
        clusters = clusters_of(comparison.prompts)
        return summarise(comparison.verdicts, comparison.policies, clusters, comparison.runs, seed=comparison.seed)
    except ValueError as error:
        raise ValueError(f"{VERDICTS}: {error}") from None


def _measures(comparison: ComparisonFolder, styles: Styles) -> list[Section]:
    parts = (*curve_parts(comparison.measures), *measure_tables(comparison.measures, styles))
    return [Section("measures", "Measures", parts)] if parts else []


def _about(samples: Samples) -> Note:
    held = (
        f"This page holds {number(len(samples.prompts))} of {number(samples.num_prompts)} prompts, evenly spread over"
        " all; the files hold the rest."
        if samples.is_cut
        else f"All {number(samples.num_prompts)} prompts, with every response and every verdict."
    )
    return Note(f"{held} Each prompt is shown with the result of each judge's verdicts.")


def _origins(comparison: ComparisonFolder, sources: Mapping[str, Source]) -> Section:
    about = Note(
        "Every figure is computed from rows of this folder's files, named below it. report.json holds all of them in"
        " full precision; its sources give each field's file and rows, as filters that pandas and pyarrow take."
    )
    settings = [Row((path,), (Cell(value),)) for path, value in flat(comparison.settings)]
    files = [Row((file,), (Cell(sha256, is_code=True),)) for file, sha256 in comparison.files.items()]
    rows = [
        Row((field,), (Cell(source.file), Cell(_num_rows(source)), Cell(source.how)))
        for field, source in sources.items()
    ]
    places = (
        "Fields of report.json, the rows they are computed from, and how. A field that is not listed has the source"
        " of its longest listed prefix."
    )
    columns = ("In report.json", "File", "Rows", "How")
    tables = (
        Details("Settings", (Table("compare.json, as resolved.", (), tuple(settings), title="Settings"),)),
        Details("Files", (Table("What was read, by SHA-256.", (), tuple(files), title="Files"),)),
        Details(
            "Rows of each figure",
            (Table(places, columns, tuple(rows), title="Rows of each figure"),),
            is_printed=False,
        ),
    )
    return Section("made", "How it was made, and where the numbers come from", (about, *tables))


def _num_rows(source: Source) -> str:
    return number(source.num_rows) if source.file == VERDICTS else ""


def _report(
    comparison: ComparisonFolder, page: Page, samples: Samples, summary: dict[str, Any], sources: dict[str, Any]
) -> dict[str, Any]:
    return {
        "comparison": comparison.name,
        "answer": as_json(page.answer),
        "warnings": list(page.warnings),
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
    """Returns settings as (dotted path, text), one entry per line."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [line for key, entry in entries for line in flat(entry, f"{path}.{key}" if path else str(key))]
    return [(path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def as_shown(summary: Summary, judges: Sequence[str]) -> Summary:
    """Returns the same summary with judges in this order, and every pair oriented so that policy_a is preferred more
    often."""
    ordered = sorted(summary.judges, key=lambda judge: judges.index(judge.judge))
    return replace(summary, judges=tuple(_ahead_first(judge) for judge in ordered))


def _ahead_first(judge: JudgeSummary) -> JudgeSummary:
    return replace(
        judge,
        pairs=tuple(turned(pair) if pair.win_rate.mean < 0.5 else pair for pair in judge.pairs),
        algorithms=tuple(_turned_algorithms(pair) if pair.win_rate.mean < 0.5 else pair for pair in judge.algorithms),
    )


def _turned_algorithms(pair: AlgorithmPair) -> AlgorithmPair:
    gain = pair.score_difference
    return replace(
        pair, algorithm_a=pair.algorithm_b, algorithm_b=pair.algorithm_a,
        num_runs_a=pair.num_runs_b, num_runs_b=pair.num_runs_a, win_rate=_turned_interval(pair.win_rate),
        score_difference=Interval(-gain.mean, -gain.high, -gain.low),
    )  # fmt: skip


def turned(pair: PairSummary) -> PairSummary:
    """Returns the pair from the other policy's side. Tests, power, position and flips are the same from both sides."""
    return replace(
        pair,
        policy_a=pair.policy_b,
        policy_b=pair.policy_a,
        win_rate=_turned_rate(pair.win_rate),
        verdicts=_turned_counts(pair.verdicts),
        prompts=_turned_counts(pair.prompts),
        length_controlled=_turned_length(pair.length_controlled),
        categories=tuple(_turned_category(found) for found in pair.categories),
    )


def _turned_rate(rate: WinRate) -> WinRate:
    return replace(
        rate, mean=1 - rate.mean, low=1 - rate.high, high=1 - rate.low,
        bootstrap=_turned_interval(rate.bootstrap), over_labelers=_turned_interval(rate.over_labelers),
    )  # fmt: skip


def _turned_interval(found: Interval) -> Interval:
    return Interval(1 - found.mean, 1 - found.high, 1 - found.low)


def _turned_counts(counts: Counts) -> Counts:
    return Counts(counts.losses, counts.ties, counts.wins)


def _turned_length(found: LengthControlled) -> LengthControlled:
    """Returns the fit from the other policy's side. The coefficient of the length difference keeps its sign, because
    both the difference and the outcome are reversed.
    """
    return replace(found, mean=1 - found.mean, low=1 - found.high, high=1 - found.low)


def _turned_category(found: CategoryWinRate) -> CategoryWinRate:
    return replace(found, win_rate=_turned_rate(found.win_rate))
