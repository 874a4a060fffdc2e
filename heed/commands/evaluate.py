"""`heed evaluate`: models on published benchmarks, with answers, intervals and a report."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.compare import (
    Concurrency,
    FailIf,
    Timeout,
    TrainingData,
    asking_of,
    end_with,
    folder_of,
    progress_bars,
)
from heed.commands.options import refuse_run_folder
from stages.progress import console, results_console

if TYPE_CHECKING:
    from rich.table import Table

    from evaluation.evaluate.folder import EvaluationReport

MAX_SENTENCES = 10  # per suite

Models = Annotated[
    list[str],
    typer.Argument(
        help="Model directories, hub ids, .gguf files, URL#MODEL, files of saved answers, or reward models; without"
        " --suite, per-item logs of lm-evaluation-harness, inspect_ai or OpenAI evals. Prefix with"
        " NAME= to name one. A NAME with several of them is an algorithm with several training runs (seeds)."
    ),
]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        help="Suite (docs/evaluate.md lists them), FILE.py:NAME of your own, or harness:TASK[:SHOTS][:chat] of"
        " lm-evaluation-harness; may repeat."
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="File or folder with a suite's items, or folder with a task's YAML file, [SUITE=]PATH (default: its hub"
        " id, or lm_eval's task); may repeat."
    ),
]
Judge = Annotated[
    str, typer.Option(help="Judge of answers: URL#MODEL, a model directory, a hub id, FILE.py:FUNCTION or URL.")
]
Baseline = Annotated[
    str, typer.Option(help="Model or file of answers that a judge compares answers with (default: the suite's).")
]
MaxItems = Annotated[
    int,
    typer.Option(min=0, help="Number of items per suite, evenly spread over all (default: all).", show_default=False),
]
MaxNewTokens = Annotated[
    int, typer.Option(min=0, help="Maximum length of an answer, in tokens (default: the suite's).", show_default=False)
]
Samples = Annotated[
    int, typer.Option(min=1, help="Samples per item, at temperature 1 unless the suite samples; adds pass@k.")
]
MaxFailedShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of requests that may fail before the command stops.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Cache of all answers (default: answers.sqlite next to the output folder).")
]
MostRequests = Annotated[
    int,
    typer.Option(
        min=0, help="Most requests that the command may send to endpoints (default: no limit).", show_default=False
    ),
]


def evaluate(
    models: Models,
    suite: Suites = None,
    data: Data = None,
    judge: Judge = "",
    baseline: Baseline = "",
    training_data: TrainingData = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the evaluation (default: runs/evaluate-...).")] = None,
    max_items: MaxItems = 0,
    samples: Samples = 1,
    max_new_tokens: MaxNewTokens = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling and resampling.")] = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Sample local models in bf16 instead of fp32.")] = False,
    budget: MostRequests = 0,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    max_failed_share: MaxFailedShare = 0.1,
    cache: Cache = None,
    fail_if: FailIf = "",
) -> None:
    """Evaluate models on benchmarks: ask, score, compare, report. See docs/evaluate.md.

    An interrupted evaluation continues: answers are cached.
    """
    from evaluation.evaluate.evaluating import Evaluation
    from evaluation.evaluate.evaluating import evaluate as evaluate_models
    from evaluation.evaluate.models import Answering
    from evaluation.fail_if import Gate, undecided_if_it_fails
    from evaluation.inputs import named_runs

    named, runs = named_runs(models, "model")
    gate = Gate.of(fail_if, [*runs, *(name for name, _ in named)]) if fail_if else None
    for _, spec in named:
        if Path(spec).is_dir():
            refuse_run_folder(Path(spec))
    folder = out or folder_of("evaluate", [*(suite or ["logs"]), *(name for name, _ in named)])
    asking = asking_of(folder, cache, concurrency, timeout, max_failed_share, budget)
    with progress_bars() as progress:
        say = partial(console.print, markup=False)
        how = Answering(asking, seed, "bf16" if bf16 else "fp32", max_new_tokens, progress, say, samples)
        wanted = Evaluation(models, suite or [], data or [], judge, baseline, training_data or [], max_items, how, gate)
        with undecided_if_it_fails(gate, "evaluation"):
            report = evaluate_models(wanted, folder)
    _print_results(report)
    console.print(str(folder / "report.html"), markup=False)
    if gate is not None:
        end_with(*gate.of_evaluation(report))


def _print_results(report: "EvaluationReport") -> None:
    """Print a table of models and measures per suite, then what the measures show, in words."""
    from evaluation.evaluate.report import ALGORITHMS, algorithm_conclusions, conclusions, other_conclusions

    for suite in report.suites:
        results_console().print(values_table(report, suite.suite))
        sentences = [text for _, text in (*algorithm_conclusions(suite), *conclusions(suite))]
        sentences += other_conclusions(suite)
        for sentence in sentences[:MAX_SENTENCES]:
            results_console().print(sentence, markup=False)
        if len(sentences) > MAX_SENTENCES:
            results_console().print(f"and {len(sentences) - MAX_SENTENCES:,} more differences, in the report")
    if any(suite.statistics.algorithms for suite in report.suites):
        console.print(ALGORITHMS, markup=False)


def values_table(report: "EvaluationReport", name: str) -> "Table":
    """Returns the measures of all models on one suite, with their intervals; the numbers are the report's own."""
    from rich.table import Table

    from evaluation.evaluate.report import interval_text, value_text, without_value

    suite = next(found for found in report.suites if found.suite == name)
    table = Table(title=suite.title, title_justify="left", box=None, pad_edge=False)
    for column in ("model", *(measure.name for measure in suite.measures)):
        table.add_column(column)
    for model in suite.statistics.models:
        cells = []
        for measure in suite.measures:
            value = suite.statistics.of(model, measure.name)
            ends = interval_text(value)
            missing = without_value(value)
            cells.append(f"{value_text(value)}{f' ({ends})' if ends else ''}{missing and f'; {missing}'}")
        table.add_row(model, *cells)
    return table
