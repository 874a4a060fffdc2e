"""The report of a run: report.json with every number and its source, and report.html to look at.

Both are functions of the run directory alone, so the same directory gives the same report, byte for byte. The page
stands alone: no scripts, no fonts, nothing loaded. Stages that have not run are left out, and named as such.
"""

import json
from pathlib import Path
from typing import Any

import jinja2

from files.atomic import write_text
from reports.figures import headlines, kl_headline, seconds_of, sources_of, total_time
from reports.plots import gold_chart, kl_charts
from reports.run import Run, StageRun, read_run
from reports.text import verdict_of
from reports.view import kind_table, policy_table, samples_of, stage_views, win_table


def write_report(run_folder: Path) -> dict[str, Any]:
    """Write report.json and report.html into `runs/<job>`. Returns what report.json holds.

    Errors: ValueError naming the file (and line) in the run directory that is absent or malformed.
    """
    run = read_run(run_folder)
    report = report_of(run)
    write_text(run_folder / "report.json", json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(run_folder / "report.html", page_of(run))
    return report


def report_of(run: Run) -> dict[str, Any]:
    """All numbers of a run: each finished stage's results under its name, and where everything comes from."""
    report: dict[str, Any] = {
        "job": {
            "name": run.name,
            "note": run.job.get("note", ""),
            "seed": run.job.get("seed"),
            "workers": run.job.get("workers"),
            "config": run.job,
        },
        "verdict": verdict_of(run).text,
        "stages": {name: _status(run.stages[name]) for name in run.stage_names},
        "stages_missing": [name for name in run.stage_names if not run.stages[name].results],
        **{name: dict(stage.results) for name, stage in run.stages.items() if stage.results},
    }
    kl = kl_headline(run)
    if "ppo" in report:
        report["ppo"]["kl_nats"] = None if kl is None else kl.value
    return {
        **report,
        "seconds": seconds_of(run),
        "sources": sources_of(run),
        "lineage": {name: stage.lineage for name, stage in run.stages.items() if stage.lineage},
        "files": run.files,
    }


def _status(stage: StageRun) -> dict[str, Any]:
    if stage.status != "unfinished":
        return {"status": stage.status}
    last = stage.metrics[-1]
    return {"status": stage.status, "step": last.get("step"), "num_steps": last.get("num_steps")}


def page_of(run: Run) -> str:
    """The whole page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    stages = stage_views(run)
    return environment.get_template("report.html.jinja").render(
        run=run,
        verdict=verdict_of(run),
        headlines=headlines(run),
        total_time=total_time(run),
        stages=stages,
        compare=next((stage for stage in stages if stage.name == "compare"), None),
        gold_chart=gold_chart(run),
        kl_charts=kl_charts(run),
        win_table=win_table(run),
        policy_table=policy_table(run),
        kind_table=kind_table(run),
        samples=samples_of(run),
    )
