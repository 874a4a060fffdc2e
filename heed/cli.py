"""The entry point of `heed`, and its short commands; the longer ones are in heed/commands."""

import atexit
import gc
import logging
import os
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from cluster import local_ray
from cluster.processes import LAUNCHER_VARIABLES
from files.importing import imports_uncollected, missing_extra
from heed.commands.arena import arena
from heed.commands.chat import chat
from heed.commands.compare import compare, judge_again, judge_quality, verdicts
from heed.commands.complete import classify, complete
from heed.commands.evaluate import evaluate
from heed.commands.jobs import jobs_app, submit
from heed.commands.label import label_app
from heed.commands.measure import measure_app
from heed.commands.models import export_app, inspect, merge_adapter
from heed.commands.options import (
    First,
    JobFile,
    Only,
    Overrides,
    RunsFolder,
    Submission,
    Workers,
    all_overrides,
    last_state,
    model_folder,
    read_job,
    require_cores_for,
)
from heed.commands.samplers import replay, verify_sampler
from stages.progress import console, results_console

# What other tools call a command or an option.
COMMANDS = {"train": "run", "finetune": "init", "new": "init", "benchmark": "evaluate", "generate": "complete"}
OPTIONS = {"--benchmark": "--suite", "--tasks": "--suite", "--config": "the job's file, without an option"}


class Suggesting(TyperGroup):
    """Suggests commands and options where typer knows nothing similar: by other tools' words, and by the job's keys."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns what typer does. Fails, with a suggestion, where typer would fail without one."""
        if not get_close_matches(args[0], self.commands) and (known := get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {COMMANDS[known[0]]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        known = [option for of in getattr(command, "params", ()) for option in (*of.opts, *of.secondary_opts)]
        given = [word.partition("=")[0] for word in rest[: rest.index("--") if "--" in rest else None]]
        for option in () if isinstance(command, TyperGroup) or ctx.resilient_parsing else given:
            is_unknown = option.startswith("--") and option != "--help" and not get_close_matches(option, known)
            if is_unknown and option in OPTIONS:
                ctx.fail(f"No such option: {option}. Did you mean {OPTIONS[option]}?")
            if is_unknown and "--set" in known and (hint := _key_like(option)):
                ctx.fail(f"No such option: {option}. --set sets the job's keys: {hint}.")
        return name, command, rest


def _key_like(option: str) -> str:
    """Says which key of a job an option stands for; "" if none is like it."""
    from heed.jobs.job import BUILT_IN_JOB
    from heed.jobs.job_file import meaning_of_key

    return meaning_of_key((), option.removeprefix("--").replace("-", "_"), BUILT_IN_JOB)


app = typer.Typer(
    cls=Suggesting,
    name="heed",
    help="From raw text to a policy that people prefer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False)  # results; messages go to `console`, which is standard error


TRAIN, LOOK, PEOPLE, RESEARCH = "Train", "Talk and compare", "Labels", "Measure and test"
DATA = "JSONL, JSON, CSV, Parquet or a hub id"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"heed {version('heed-rlhf')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Heed takes a language model from raw text to a policy that people prefer."""


@app.command(rich_help_panel=TRAIN)
def run(
    job: JobFile = None,
    override: Overrides = None,
    workers: Workers = 0,
    first: First = "",
    only: Only = "",
    runs: RunsFolder = Path("runs"),
    submission: Submission = "",
) -> None:
    """Run a job's stages in order and write the report. Stages whose inputs have not changed are skipped.

    An interrupted run continues where it stopped.
    """
    state = last_state(job, override, runs)
    needs_ray = not os.environ.get("RAY_ADDRESS") and (bool(first) or state != "finished")
    if needs_ray and (state or job is None):  # a job that has run before is unlikely to be wrong
        local_ray.begin()  # Ray starts while this process imports, which takes seconds too
    with console.status("reading the job"), imports_uncollected():
        from heed.jobs.pipeline import run_job

        require_cores_for(workers)
        config = read_job(job, override, workers, first, only)
    if config.loop is not None:
        raise ValueError(f"{job}: the job has [loop]; `heed loop {job}` runs it")
    if needs_ray:
        local_ray.begin()
    run_job(config, runs, first=first, only=only, submission=submission)


@app.command(rich_help_panel=TRAIN)
def loop(
    job: JobFile = None,
    override: Overrides = None,
    workers: Workers = 0,
    runs: RunsFolder = Path("runs"),
    wait: Annotated[
        bool,
        typer.Option(
            help="Wait for people's labels; with --no-wait, end instead, and the same command continues later."
        ),
    ] = True,
) -> None:
    """Run a job's preference loop: collect labels, train the reward model and the policy, compare, and repeat until the
    gain per hundred labels is no longer worth it or the labels are used.

    RUN/report.html grows with each round. An interrupted loop continues where it stopped.
    """
    if not os.environ.get("RAY_ADDRESS") and last_state(job, override, runs) not in {"", "finished"}:
        local_ray.begin()  # Ray starts while this process imports, which takes seconds too
    with console.status("reading the job"), imports_uncollected():
        from heed.jobs.job_file import load_job
        from heed.jobs.loop import run_loop

    require_cores_for(workers)
    given = all_overrides(override, workers)
    run_loop(lambda rounds: load_job(job, [*given, *([f"rounds={rounds}"] if rounds else [])]), runs, waits=wait)


@app.command(rich_help_panel=TRAIN)
def init(
    job: Annotated[Path, typer.Argument(help="The job file to write.")],
    model: Annotated[str, typer.Option(help="The model to start from: a directory, a .gguf file or a hub id.")],
    demonstrations: Annotated[
        str, typer.Option(help=f"Conversations for SFT, or texts with labels for an encoder: {DATA}.")
    ] = "",
    preferences: Annotated[
        str, typer.Option(help=f"Preference pairs or rankings, for a reward model and DPO, or labels for KTO: {DATA}.")
    ] = "",
    prompts: Annotated[str, typer.Option(help=f"Prompts to answer, in training and in the comparison: {DATA}.")] = "",
    reward: Annotated[
        str,
        typer.Option(
            help="A Python function that scores responses, FILE.py:NAME; FILE.py if it has one public function."
        ),
    ] = "",
    algorithm: Annotated[
        str,
        typer.Option(
            help="ppo, grpo, rloo, dpo, kto, loop or classify (default: by model and data; ppo with --prompts).",
            show_default=False,
        ),
    ] = "",
    form: Annotated[
        str, typer.Option("--format", help="Format of demonstrations and prompts, if their rows fit more than one.")
    ] = "auto",
    on_invalid: Annotated[
        Literal["refuse", "skip"], typer.Option(help="Whether malformed rows are an error, or left out and counted.")
    ] = "refuse",
) -> None:
    """Write a short, complete job for your own model and data, which `heed run` takes as it is. It ends with a
    comparison of the new policy with the model that it started from.

    The formats of the data are recognised (docs/data.md). What is missing for further stages is reported.
    """
    from files.importing import function_named
    from heed.jobs.starter import Starter

    reward = function_named(reward, "--reward")
    starter = Starter(
        model, demonstrations, preferences, prompts, reward, algorithm, format=form, on_invalid=on_invalid
    )
    for line in starter.write(job):
        console.print(line, markup=False)
    for line in starter.missing:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{job} is ready: `heed plan {job}` estimates it, `{starter.command} {job}` runs it", markup=False)


app.command(rich_help_panel=TRAIN)(submit)
app.command("merge-adapter", rich_help_panel=TRAIN)(merge_adapter)
app.command(rich_help_panel=LOOK)(arena)
app.command(rich_help_panel=LOOK)(compare)
app.command(rich_help_panel=LOOK)(verdicts)
app.command("judge", rich_help_panel=LOOK)(judge_again)
app.command("judge-quality", rich_help_panel=LOOK)(judge_quality)
app.command(rich_help_panel=LOOK)(evaluate)
app.add_typer(export_app, name="export", rich_help_panel=TRAIN)
app.add_typer(jobs_app, name="jobs", rich_help_panel=TRAIN)
app.add_typer(label_app, name="label", rich_help_panel=PEOPLE)
app.add_typer(measure_app, name="measure", rich_help_panel=RESEARCH)


@app.command(rich_help_panel=TRAIN)
def plan(
    job: JobFile = None,
    override: Overrides = None,
    workers: Workers = 0,
    gpu: Annotated[str, typer.Option(help="b200, h200, h100, a100, l40s, or cpu for this machine.")] = "cpu",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node.", min=1)] = 8,
    price: Annotated[
        float | None,
        typer.Option(help="Dollars per GPU-hour (default: a rough built-in price).", min=0, show_default=False),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            help="Network between nodes, in Gbit/s per GPU (default: that of NVIDIA's DGX systems).",
            min=0.1,
            show_default=False,
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="Share of the peak FLOP rate that matrix products reach (default: 0.65; on a CPU 0.4, for whole"
            " steps).",
            min=0.01,
            max=1,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Number of rows to assume for data that cannot be counted here.", min=1)
    ] = 100_000,
    response_tokens: Annotated[
        str,
        typer.Option(
            help="Lengths of PPO's responses with weights, such as 100:9,1000:1, for which the plan also predicts how"
            " long workers wait for each other (default: all as long as they may be).",
            metavar="TOKENS:WEIGHT,...",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Estimate a job without running it: batch sizes, memory per rank, time and cost, placement. If the job does not
    fit, suggest changes.

    Exit code 1: the job does not fit.
    """
    from heed.jobs.plan import show_plan

    overrides = all_overrides(override, workers)
    if not show_plan(
        out, job, overrides, gpu=gpu, gpus_per_node=gpus_per_node, price=price, network_gbit=network,
        share_of_peak=share, assumed_rows=rows, response_tokens=response_tokens,
    ):  # fmt: skip
        raise typer.Exit(1)


@app.command(rich_help_panel=TRAIN)
def report(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a run, such as runs/demo, of a comparison, or of an evaluation.")
    ],
) -> None:
    """Write the report of a run, a comparison or an evaluation again."""
    from evaluation.compare.folder import is_comparison
    from evaluation.compare.report.page import write_comparison_report
    from evaluation.evaluate.folder import is_evaluation
    from evaluation.evaluate.report import write_evaluation_report
    from heed.jobs.report import write_run_report

    if is_comparison(folder):
        write_comparison_report(folder)
    elif is_evaluation(folder):
        write_evaluation_report(folder)
    else:
        write_run_report(folder)
    console.print(str(folder / "report.html"))


@app.command(rich_help_panel=TRAIN)
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/demo; it may be on a shared disk.")],
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 chooses a free one.", min=0)] = 8200,
) -> None:
    """Serve a run's report while it runs: curves, samples, the current phase, time left, workers and their restarts."""
    from heed.jobs.watch import watch as serve

    serve(folder, port=port, announce=typer.echo)


app.command(rich_help_panel=LOOK)(chat)
app.command(rich_help_panel=LOOK)(complete)
app.command(rich_help_panel=LOOK)(classify)


@app.command("few-shot", rich_help_panel=RESEARCH)
def few_shot(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/pretrain/model.")],
    examples: Annotated[str, typer.Argument(help='Rows of {"prompt", "completion"}: JSONL, CSV, Parquet or a hub id.')],
    shots: Annotated[
        list[int] | None, typer.Option(min=0, help="Number of solved examples shown; may repeat (default: 0, 1, 4).")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=0, help="Number of examples to read; 0 reads all.")] = 0,
) -> None:
    """Measure in-context learning: how well a model solves an example after k solved ones, without training."""
    from rich.table import Table

    from evaluation.measures.language_modelling import evaluate_few_shot, read_examples
    from training.data import DataConfig

    rows = read_examples(DataConfig(source=examples, max_rows=max_rows))
    folder = model_folder(model)
    table = Table("shots", "examples", "exact match (95%)", "nats per token (95%)", box=None, pad_edge=False)
    for num_shots in shots or [0, 1, 4]:
        found = evaluate_few_shot(folder, rows, num_shots, seed=0)
        intervals = [f"{i.mean:.3f} ({i.low:.3f} to {i.high:.3f})" for i in (found.exact_match, found.nats)]
        table.add_row(str(num_shots), str(found.num_examples), *intervals)
    results_console().print(table)


app.command(rich_help_panel=RESEARCH)(replay)
app.command("verify-sampler", rich_help_panel=RESEARCH)(verify_sampler)
app.command(rich_help_panel=LOOK)(inspect)


def main() -> None:
    """Entry point."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command. Mistakes of the user, and failures with a known cause, become one line without a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    gc.set_threshold(10_000, 50, 100)  # imports make many objects that stay: collect less often than by default
    atexit.register(gc.freeze)  # otherwise exit takes another second, searching torch's objects for garbage
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # every retry would print two lines; the last error says enough
    try:
        app()
    except ModuleNotFoundError as error:
        if not (message := missing_extra(error)):
            raise
        console.print(f"[bold red]error:[/] {escape(message)}")
        raise SystemExit(2) from None
    except ValueError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise SystemExit(2) from None
    except (RuntimeError, OSError) as error:
        from training.notices import cause_of, in_one_line

        message = in_one_line(error) or (cause_of(error) if isinstance(error, OSError) else "")
        if not message:
            raise
        console.print(f"[bold red]error:[/] {escape(message)}")
        raise SystemExit(1) from None
