"""The report of a run: report.json with every number and its source, and report.html for reading.

Both are functions of the run directory alone, so the same directory gives the same report, byte for byte. Each stage
defines what it shows (`stages.reports.parts.StageReporter`). Stages that have not run are named as such and left out.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from files.atomic import write_text
from stages.reports.page import Live, Page, Step, render
from stages.reports.parts import (
    Answer,
    Block,
    Cell,
    Code,
    Details,
    Headline,
    Note,
    Part,
    Row,
    Section,
    StageReport,
    StageReporter,
    Table,
)
from stages.reports.run_folder import Run, StageFolder, read_run
from stages.reports.text import count_of, duration, listed, number

Reporters = Mapping[str, StageReporter]
Reports = Mapping[str, StageReport]


def write_report(run_folder: Path, reporters: Reporters) -> dict[str, Any]:
    """Write report.json and report.html into `runs/JOB`. Returns the content of report.json.

    `reporters` maps stages to reporters, in the order of the loop.

    Raises:
        ValueError: a file in the run directory is absent or malformed; the message names it (and the line).
    """
    run = read_run(run_folder, reporters)
    reports = _reports(run, reporters)
    page, report = render(_page(run, reporters, reports)), _json(run, reports)
    write_pages(run_folder, page, report)
    return report


def live_report(run_folder: Path, reporters: Reporters, live: Live) -> str:
    """Return the same page, as HTML, with what the run is doing now at the top. Raises: as `write_report`."""
    run = read_run(run_folder, reporters)
    return render(replace(_page(run, reporters, _reports(run, reporters)), live=live))


def _reports(run: Run, reporters: Reporters) -> Reports:
    return {stage.name: _report_of(stage, reporters[stage.name]) for stage in run.shown}


def write_pages(folder: Path, page: str, report: Mapping[str, Any]) -> None:
    """Write report.json and report.html, each atomically."""
    numbers = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(folder / "report.json", numbers)
    write_text(folder / "report.html", page)


def _report_of(stage: StageFolder, reporter: StageReporter) -> StageReport:
    is_shown = stage.status != "not run" or reporter.is_always_shown
    return reporter.report(stage) if is_shown else StageReport()


def headlines_of(reports: Reports) -> tuple[Headline, ...]:
    """Return the cards, those of later stages first. If two are of the same field, the later stage's is kept."""
    headlines: dict[str, Headline] = {}
    for report in reversed(list(reports.values())):
        for headline in report.headlines:
            headlines.setdefault(headline.field, headline)
    return tuple(headlines.values())


def answer_of(reports: Reports) -> Answer:
    """Say in plain words what the run shows: its last stage's answer, or else what the stages have achieved."""
    answers = [report.answer for report in reports.values() if report.answer is not None]
    sentences = [report.sentence for report in reports.values() if report.sentence]
    answer = (answers or [Answer("unclear", " ".join(["No policies have been compared.", *sentences]))])[-1]
    return replace(answer, text=" ".join([answer.text, *(r.warning for r in reports.values() if r.warning)]))


def _json(run: Run, reports: Reports) -> dict[str, Any]:
    """Return all numbers of a run: each finished stage's results under its name, and the source of everything."""
    report: dict[str, Any] = {
        "job": {
            "name": run.name,
            "note": run.job.get("note", ""),
            "seed": run.job.get("seed"),
            "workers": run.job.get("workers"),
            "config": run.job,
        },
        "verdict": answer_of(reports).text,
        "stages": {stage.name: _status(stage) for stage in run.shown},
        "stages_missing": [stage.name for stage in run.shown if stage.status != "finished"],
        **{stage.name: dict(stage.raw_results) for stage in run.shown if stage.status == "finished"},
    }
    for headline in headlines_of(reports):
        *parents, leaf = headline.field.split(".")
        place = report
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = headline.value
    return {
        **report,
        "seconds": _seconds(run),
        "sources": _sources(run, reports),
        "lineage": {stage.name: stage.lineage for stage in run.shown if stage.lineage},
        "files": run.files,
    }


def _status(stage: StageFolder) -> dict[str, Any]:
    if stage.status != "unfinished":
        return {"status": stage.status}
    return {"status": stage.status, **{name: stage.metrics[-1].get(name) for name in ("step", "num_steps")}}


def _seconds(run: Run) -> dict[str, float]:
    """Return the wall-clock seconds of each finished stage, and their sum."""
    seconds = {stage.name: stage.seconds for stage in run.shown if stage.seconds is not None}
    return {**seconds, "total": sum(seconds.values())}


def _sources(run: Run, reports: Reports) -> dict[str, dict[str, str]]:
    """Map fields of report.json, or their prefixes, to the file and field they come from. The longest prefix wins."""
    finished = [stage.name for stage in run.shown if stage.status == "finished"]
    results = {
        name: {"file": f"{name}/results.json", "field": "the same path below the stage's name"} for name in finished
    }
    named = {
        headline.field: {"file": headline.file, "field": headline.source_field} for headline in headlines_of(reports)
    }
    times = {
        f"seconds.{stage.name}": {"file": f"{stage.name}/lineage.json", "field": "seconds"}
        for stage in run.shown
        if stage.seconds is not None
    }
    return {**results, **named, **times}


def _page(run: Run, reporters: Reporters, reports: Reports) -> Page:
    on_their_own = tuple(section for report in reversed(list(reports.values())) for section in report.sections)
    headlines = headlines_of(reports)
    workers = run.job.get("workers")
    return Page(
        kicker="Heed report",
        title=run.name,
        meta=(
            f"seed {run.job.get('seed', '–')}",
            count_of(workers, "worker") if isinstance(workers, int) else "– workers",
            *_times(run),
        ),
        answer=answer_of(reports),
        sections=(*on_their_own, _loop(run, reporters, reports), _origins(run, headlines)),
        skip_to=_skip_to(on_their_own),
        styles=tuple(style for report in reports.values() for style in report.styles),
        caution=str(run.job.get("note") or ""),
        headlines=headlines,
        steps=tuple(_step(stage, reports[stage.name]) for stage in run.shown),
    )


def _times(run: Run) -> tuple[str, ...]:
    """Return the time that the stages took; until all are finished, also which are not."""
    left = [f"{stage.name} ({_progress(stage)})" for stage in run.shown if stage.status != "finished"]
    seconds = _seconds(run)
    total = f"{duration(seconds['total'])} in {'finished' if left else 'all'} stages"
    return (*((total,) if len(seconds) > 1 else ()), *((f"not finished: {listed(left)}",) if left else ()))


def _skip_to(sections: tuple[Section, ...]) -> tuple[str, str]:
    """Return anchor and name of what comes after the head of the page."""
    if not sections:
        return "loop", "the stages"
    title = sections[0].title
    return sections[0].anchor, title[0].lower() + title[1:]


def _step(stage: StageFolder, report: StageReport) -> Step:
    anchor = report.sections[0].anchor if report.sections and not report.parts else stage.name
    text = duration(stage.seconds) if stage.status == "finished" else _progress(stage)
    return Step(stage.name, anchor, stage.status, text)


def _progress(stage: StageFolder) -> str:
    if stage.status != "unfinished":
        return stage.status
    last = stage.metrics[-1]
    return f"unfinished: step {number(last.get('step'))} of {number(last.get('num_steps'))}"


def _loop(run: Run, reporters: Reporters, reports: Reports) -> Section:
    """Return a block for each stage that has no section of its own."""
    with_blocks = [stage for stage in run.shown if reports[stage.name].parts or not reports[stage.name].sections]
    blocks = tuple(
        Block(stage.name, place, reporters[stage.name].head_of(stage)[0], _block_parts(stage, reporters, reports))
        for place, stage in enumerate(with_blocks, 1)
    )
    aside = Note(
        "Faint lines are single steps, strong lines a running mean over about a twentieth of the run. Numbers next to"
        " the keys are the last ones measured.",
        "aside",
    )
    return Section("loop", "The loop, stage by stage", (*blocks, aside))


def _block_parts(stage: StageFolder, reporters: Reporters, reports: Reports) -> tuple[Part, ...]:
    if stage.status == "not run":
        return (Note("This stage has not run.", "absent"),)
    _, about = reporters[stage.name].head_of(stage)
    state = f" {_progress(stage).capitalize()}." if stage.status == "unfinished" else ""
    note = (Note((about + state).strip()),) if about or state else ()
    return (*note, *reports[stage.name].parts)


def _origins(run: Run, headlines: tuple[Headline, ...]) -> Section:
    about = Note(
        "Every figure is copied from a file of the run directory; report.json holds them all, with each file's SHA-256."
        " A stage's lineage names its parents and data by hash."
    )
    key_figures = Table(
        "Each key figure, its place in report.json, and the file and field it was read from.",
        ("Figure", "Value", "In report.json", "File", "Field"),
        tuple(Row((card.title,), (Cell(card.text), *map(_code, _source(card)))) for card in headlines),
        title="Sources of the key figures",
    )
    lineages = [Details(f"Lineage of {stage.name}", (_lineage(stage),)) for stage in run.shown if stage.lineage]
    tables = [Details("Key figures", (key_figures,)), *lineages] if headlines else lineages
    job = Details("The job, as resolved", (Code(run.job_text),))
    return Section("origins", "Where the numbers come from", (about, *tables, job))


def _source(card: Headline) -> tuple[str, str, str]:
    return card.field, card.file, card.source_field


def _code(text: object) -> Cell:
    return Cell(str(text), is_code=True)


def _versions(unlike: Mapping[str, Any]) -> str:
    """Describe a host of the ranks by its versions that differ from the driver's, which the lineage lists."""
    return ", ".join(f"{name} {installed}" for name, installed in unlike.items()) or "the same versions as the driver"


def _lineage(stage: StageFolder) -> Table:
    lines = [
        (f"{key}: {name}", _versions(text) if isinstance(text, dict) else text)
        for key, value in stage.lineage.items()
        for name, text in (value.items() if isinstance(value, dict) else [("", value)])
    ]
    rows = tuple(Row((name.removesuffix(": "),), (_code(text),)) for name, text in lines)
    return Table(f"What went into {stage.name}.", (), rows, title=f"Lineage of {stage.name}")
