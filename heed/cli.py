"""The command line."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heed.compare_cli import compare, judge_again
from heed.jobs_cli import jobs_app, submit
from heed.label_cli import label_app
from heed.measures_cli import measure_app
from heed.options import First, JobFile, Only, Overrides, RunsFolder, Weights, Workers, read_job, read_weights
from stages.progress import console, results_console

app = typer.Typer(
    name="heed",
    help="From raw text to a policy that people prefer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False)  # what was asked for; messages go to `console`, standard error


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
    """Run a job's stages in order, each unless its inputs are unchanged, and write the report.

    A run that was interrupted continues where it stopped.
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
    override: Annotated[list[str] | None, typer.Option("--set", help="workers=16, say; may repeat.")] = None,
    gpu: Annotated[str, typer.Option(help="b200, h200, h100, a100 or l40s; cpu is this machine's.")] = "cpu",
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster; 0: as many as it takes.", min=0)] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    price: Annotated[float, typer.Option(help="Dollars an hour of one GPU; -1: a round figure.", min=-1)] = -1,
    share: Annotated[float, typer.Option(help="Share of the peak rate that is reached.", min=0.01, max=1)] = 0.4,
    rows: Annotated[int, typer.Option(help="Rows of a source that cannot be counted here.", min=1)] = 100_000,
) -> None:
    """A job in numbers before it runs: batches, memory of a rank, time and cost, places. Nothing is started.

    Exit code 1: it does not fit.
    """
    from jobs.planning.tables import show_plan

    if not show_plan(out, job, override or [], gpu, nodes, gpus_per_node, price, share, rows):
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder, such as runs/demo, or that of a comparison.")],
) -> None:
    """Write report.html and report.json of a run or a comparison anew."""
    from compare.report.folder import is_comparison
    from compare.report.page import write_comparison_report
    from reports.report import write_report

    if is_comparison(folder):
        write_comparison_report(folder)
    else:
        write_report(folder)
    console.print(str(folder / "report.html"))


@app.command()
def chat(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 128,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    best_of: Annotated[int, typer.Option(min=1, help="Responses drawn, of which the judge's favourite is shown.")] = 1,
    judge: Annotated[str, typer.Option(help="A reward model's directory, such as runs/demo/reward/model.")] = "",
    weight: Weights = None,
) -> None:
    """Talk to a model: each line is a turn; an empty line starts over; end of input leaves."""
    from heed.chat import converse

    if (best_of > 1) != bool(judge):
        raise ValueError(
            f"--best-of is {best_of}, --judge {judge!r}; several responses and a reward model that chooses among them"
            " were expected, or neither"
        )
    if weight and not judge:
        raise ValueError("--weight is of a --judge's objectives, and none is given")
    converse(
        model,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        num_samples=best_of,
        judge=judge,
        weights=read_weights(weight),
    )


@app.command("few-shot")
def few_shot(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/pretrain/model.")],
    examples: Annotated[str, typer.Argument(help='Rows of {"prompt", "completion"}: JSONL, Parquet or a hub id.')],
    shots: Annotated[list[int] | None, typer.Option(min=0, help="Solved examples shown; may repeat.")] = None,
    max_rows: Annotated[int, typer.Option(min=0, help="Examples read; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """In-context learning: how well a model solves an example behind k solved ones, without training."""
    from rich.table import Table

    from evaluation.few_shot import evaluate_few_shot, read_examples
    from training.data import DataConfig

    rows = read_examples(DataConfig(source=examples, max_rows=max_rows))
    table = Table("shots", "examples", "exact match (95%)", "nats a token (95%)", box=None, pad_edge=False)
    for num_shots in shots or [0, 1, 4]:
        found = evaluate_few_shot(model, rows, num_shots, seed=seed)
        intervals = [f"{i.mean:.3f} ({i.low:.3f} to {i.high:.3f})" for i in (found.exact_match, found.nats)]
        table.add_row(str(num_shots), str(found.num_examples), *intervals)
    results_console().print(table)


@app.command()
def chaos(
    job: JobFile = None,
    faults: Annotated[int, typer.Option(min=1, help="How many faults strike, one after another.")] = 10,
    kinds: Annotated[
        str, typer.Option(help="Some of worker,node,driver,hang,partition,freeze,disk,folder; default: all possible.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Draws which faults strike, what, and when.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster that is started for it here.")] = 2,
    override: Annotated[list[str] | None, typer.Option("--set", help="As for run.")] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Run a job under random faults, and compare its outputs with those of the same job left alone.

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
    seeds: Annotated[int, typer.Option(min=1, help="How many; with one, nothing can be decided.")] = 3,
    runs: Annotated[Path, typer.Option("--runs", help="Where arms and findings lie.")] = Path("runs/study"),
    quick: Annotated[bool, typer.Option(help="At the debug job's size, to try the command; means nothing.")] = False,
    override: Annotated[list[str] | None, typer.Option("--set", help="As for run, for every arm.")] = None,
) -> None:
    """Published findings tried again in the playground world; docs/findings.md says how. A study that was killed goes
    on.
    """
    from importlib.resources import files

    from studies.study import QUICK, run_study

    job = Path(str(files("configs").joinpath("jobs", "debug.toml" if quick else "study.toml")))
    found = run_study(finding, job, runs, num_seeds=seeds, overrides=[*(QUICK if quick else ()), *(override or [])])
    for one in found:
        out.print(f"{one.finding.title}: [bold]{one.verdict}[/]")


inspect_app = typer.Typer(no_args_is_help=True, help="Look inside a model.")
app.add_typer(inspect_app, name="inspect")


@inspect_app.command("model")
def inspect_model(
    shape: Annotated[Path, typer.Argument(help="A model directory, or a TOML file: a shape, or a job.")],
) -> None:
    """Parameters part by part, FLOPs and key-value cache a token."""
    from heed.inspection import describe, read_shape

    out.print(describe(read_shape(shape)))


@inspect_app.command("attention")
def inspect_attention(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    text: Annotated[str, typer.Argument(help="What the model reads.")],
    layer: Annotated[int, typer.Option(help="From 0; -1 is the last.")] = -1,
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("attention.png"),
    target: Annotated[str, typer.Option(help="What an encoder-decoder writes: how that looks at TEXT.")] = "",
) -> None:
    """What every head of a layer attends to, as one picture: rows are queries, columns keys."""
    from heed.inspection import draw_attention

    draw_attention(model, text, layer, png, target)
    console.print(str(png))


def main() -> None:
    """Entry point: what the user can mend, and failures with a known cause, are one line without a traceback."""
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
