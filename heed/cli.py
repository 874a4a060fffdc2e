"""The entry point of `heed`, and its short commands; the longer ones are in heed/commands."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heed.commands.chat import chat
from heed.commands.compare import compare, judge_again
from heed.commands.inspect import inspect_app
from heed.commands.jobs import jobs_app, submit
from heed.commands.label import label_app
from heed.commands.measure import measure_app
from heed.commands.options import First, JobFile, Only, Overrides, RunsFolder, Workers, read_job
from stages.progress import console, results_console

app = typer.Typer(
    name="heed",
    help="From raw text to a policy that people prefer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False)  # results; messages go to `console`, which is standard error


@app.callback()
def _main() -> None:
    """Heed takes a language model from raw text to a policy that people prefer."""


@app.command()
def run(
    job: JobFile = None,
    override: Overrides = None,
    workers: Workers = 0,
    first: First = "",
    only: Only = "",
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a job's stages in order and write the report. Stages whose inputs have not changed are skipped.

    An interrupted run continues where it stopped.
    """
    from jobs.pipeline import run_job

    run_job(read_job(job, override, workers, first, only), runs, first=first, only=only)


app.command()(submit)
app.command()(compare)
app.command("judge")(judge_again)
app.add_typer(jobs_app, name="jobs")
app.add_typer(label_app, name="label")
app.add_typer(measure_app, name="measure")


@app.command()
def plan(
    job: JobFile = None,
    override: Overrides = None,
    gpu: Annotated[str, typer.Option(help="b200, h200, h100, a100, l40s, or cpu for this machine.")] = "cpu",
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster; 0 uses as many as the job needs.", min=0)] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node.", min=1)] = 8,
    node_memory: Annotated[
        int, typer.Option(help="CPU memory of a node, or limit of a pod, in GiB; 0 does not check it.", min=0)
    ] = 0,
    price: Annotated[float, typer.Option(help="Dollars per GPU-hour; -1 uses a rough built-in price.", min=-1)] = -1,
    share: Annotated[float, typer.Option(help="Expected share of the peak FLOP rate.", min=0.01, max=1)] = 0.4,
    rows: Annotated[
        int, typer.Option(help="Number of rows to assume for data that cannot be counted here.", min=1)
    ] = 100_000,
) -> None:
    """Estimate a job without running it: batch sizes, memory per rank, time and cost, placement. If the job does not
    fit, suggest changes.

    Exit code 1: the job does not fit.
    """
    from jobs.plan_tables import Machines, show_plan

    machines = Machines(gpu, nodes, gpus_per_node, node_memory, price)
    if not show_plan(out, job, override or [], machines, share, rows):
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/demo, or of a comparison.")],
) -> None:
    """Write report.html and report.json of a run or a comparison again."""
    from compare.folder import is_comparison
    from compare.report.page import write_comparison_report
    from jobs.report import write_run_report

    if is_comparison(folder):
        write_comparison_report(folder)
    else:
        write_run_report(folder)
    console.print(str(folder / "report.html"))


app.command()(chat)


@app.command("few-shot")
def few_shot(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/pretrain/model.")],
    examples: Annotated[str, typer.Argument(help='Rows of {"prompt", "completion"}: JSONL, Parquet or a hub id.')],
    shots: Annotated[
        list[int] | None, typer.Option(min=0, help="Number of solved examples shown; may repeat (default: 0, 1, 4).")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=0, help="Number of examples to read; 0 reads all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for choosing the solved examples.")] = 0,
) -> None:
    """Measure in-context learning: how well a model solves an example after k solved ones, without training."""
    from rich.table import Table

    from evaluation.few_shot import evaluate_few_shot, read_examples
    from training.data import DataConfig

    rows = read_examples(DataConfig(source=examples, max_rows=max_rows))
    table = Table("shots", "examples", "exact match (95%)", "nats per token (95%)", box=None, pad_edge=False)
    for num_shots in shots or [0, 1, 4]:
        found = evaluate_few_shot(model, rows, num_shots, seed=seed)
        intervals = [f"{i.mean:.3f} ({i.low:.3f} to {i.high:.3f})" for i in (found.exact_match, found.nats)]
        table.add_row(str(num_shots), str(found.num_examples), *intervals)
    results_console().print(table)


@app.command()
def chaos(
    job: JobFile = None,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults, injected one after another.")] = 10,
    kinds: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of worker,node,driver,hang,partition,freeze,disk,folder; default: all possible."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed for drawing the faults, their targets and times.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster that is started on this machine.")] = 2,
    override: Overrides = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a job under random faults, and compare its outputs with those of an undisturbed run.

    Exit code 1: outputs differ, or a run did not recover as documented.
    """
    from chaos.campaign import run_chaos
    from chaos.result import summary

    chosen = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    result = run_chaos(job, override or [], runs, num_faults=faults, seed=seed, num_nodes=nodes, kinds=chosen)
    results_console().print(summary(result))
    if result.has_failed:
        raise typer.Exit(1)


@app.command()
def study(
    finding: Annotated[str, typer.Argument(help="over-optimisation, kl-penalty, ptx, equal-kl, labelers, or all.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; at least 2 for any verdict.")] = 3,
    runs: Annotated[Path, typer.Option("--runs", help="Folder for run folders and findings.")] = Path("runs/study"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Use the debug job's size to try the command; results mean nothing.")
    ] = False,
    override: Overrides = None,
) -> None:
    """Test published findings in the playground world (docs/findings.md). An interrupted study continues."""
    from importlib.resources import files

    from studies.study import QUICK, run_study

    job = Path(str(files("configs").joinpath("jobs", "debug.toml" if quick else "study.toml")))
    found = run_study(finding, job, runs, num_seeds=seeds, overrides=[*(QUICK if quick else ()), *(override or [])])
    for one in found:
        out.print(f"{one.finding.title}: [bold]{one.verdict}[/]")


app.add_typer(inspect_app, name="inspect")


def main() -> None:
    """Entry point. Mistakes of the user, and failures with a known cause, become one line without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except ValueError as error:
        console.print(f"[bold red]error:[/] {_escape(str(error))}")
        raise SystemExit(2) from None
    except (RuntimeError, OSError) as error:
        from training.failures import in_one_line

        message = in_one_line(error)
        if not message:
            raise
        console.print(f"[bold red]error:[/] {_escape(message)}")
        raise SystemExit(1) from None


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
