"""`heed measure`: measures of policies (docs/measures.md), as tables and text for a terminal."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from heed.commands.options import length_that_fits, model_folder
from stages.progress import console, results_console

if TYPE_CHECKING:
    from evaluation.measures.kl import KL
    from evaluation.measures.language_modelling import Change, Tax
    from preferences.statistics.estimates import Interval, Share

measure_app = typer.Typer(no_args_is_help=True, help="Measure policies.")

Seed = Annotated[int, typer.Option(min=0, help="Seed for sampling and resampling.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write all numbers to this file, as JSON.", show_default=False)
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; above 0.")]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, help="Maximum length of a response, in tokens; less if the longest prompt leaves less.")
]


@measure_app.command("kl")
def measure_kl(
    policy: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    reference: Annotated[Path, typer.Argument(help="The model it started from, such as runs/demo/sft/model.")],
    prompts: Annotated[str, typer.Option(help="Prompts: JSONL, CSV, Parquet or a hub id.")],
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt.")] = 1,
    max_prompts: Annotated[
        int, typer.Option(min=0, help="Number of prompts to read (default: all).", show_default=False)
    ] = 0,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the KL of a policy to its reference, unclamped, by three estimators."""
    from evaluation.measures.kl import Policy, draw
    from evaluation.measures.kl import measure_kl as measured
    from training.data import DataConfig, read_prompts

    prompt_rows = read_prompts(DataConfig(source=prompts, max_rows=max_prompts))
    policy, reference = model_folder(policy), model_folder(reference)
    length = length_that_fits([policy, reference], prompt_rows, max_new_tokens)
    ours, theirs = Policy.load(policy), Policy.load(reference)
    with console.status(f"sampling {samples} responses to {len(prompt_rows):,} prompts"):
        drawn = draw(ours, prompt_rows, num_samples=samples, max_new_tokens=length, temperature=temperature, seed=seed)
        kl = measured(ours, theirs, drawn)
    print_measures([kl_table(kl)], kl, json_file)


@measure_app.command("tax")
def measure_tax(
    before: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/pretrain/model.")],
    after: Annotated[list[Path], typer.Argument(help="Models trained from it; each is compared with the first.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Held-out texts: text files, JSONL, CSV or Parquet; may repeat.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a row that holds the text.")] = "text",
    few_shot: Annotated[
        list[str] | None, typer.Option(help='Few-shot examples: rows of {"prompt", "completion"}; may repeat.')
    ] = None,
    shots: Annotated[int, typer.Option(min=0, help="Solved examples shown before each.")] = 4,
    max_rows: Annotated[
        int, typer.Option(min=0, help="Number of rows to read per file (default: all).", show_default=False)
    ] = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure the alignment tax: what policies lost in bits per byte and on few-shot tasks, in paired comparisons."""
    from evaluation.measures.language_modelling import Task, read_examples
    from evaluation.measures.language_modelling import measure_tax as measured
    from training.data import DataConfig, TextConfig, read_texts

    policies = {str(model): model_folder(model) for model in (before, *after)}
    if len(policies) < 1 + len(after):
        raise ValueError(f"{before} {' '.join(map(str, after))}: each model directory may be named only once")
    texts = list(read_texts([TextConfig(source=source, field=field, max_rows=max_rows) for source in text or []]))
    tasks = [
        Task(source, read_examples(DataConfig(source=source, max_rows=max_rows)), shots) for source in few_shot or []
    ]
    with console.status(f"{len(policies)} policies, {len(texts):,} texts, {len(tasks)} tasks"):
        tax = measured(policies, texts, tasks, seed=seed)
    print_measures(tax_tables(tax), tax, json_file)


def print_measures(renderables: Sequence[Any], record: Any, json_file: Path | None) -> None:
    """Prints tables and notes to the terminal, and writes all numbers to the file."""
    from files.records import as_json

    for part in renderables:
        results_console().print(part)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(record), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(str(json_file))


def number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:z.{digits}f}"  # z: a rounded zero has no minus


def spread(interval: "Interval | Share", digits: int = 3) -> str:
    """Formats a number with its interval: "0.731 (0.701 to 0.760)", "0.731 (no interval)", or "-" if it is unknown."""
    if math.isnan(interval.mean):
        return "-"
    if math.isnan(interval.low) or math.isnan(interval.high):
        return f"{number(interval.mean, digits)} (no interval)"
    return f"{number(interval.mean, digits)} ({number(interval.low, digits)} to {number(interval.high, digits)})"


def table(*columns: str, rows: Sequence[Sequence[str]], title: str = "") -> Table:
    made = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def kl_table(kl: "KL") -> Table:
    rows = [
        ["full", spread(kl.full), "sums over the vocabulary; report this one"],
        ["k1", spread(kl.k1), "the log-ratio, as PPO penalises it"],
        ["k3", spread(kl.k3), "a check: if it is far from the others, trust none"],
    ]
    title = f"KL to the reference, {kl.num_responses:,} responses to {kl.num_prompts:,} prompts"
    return table("estimator", "nats per response (95%)", "", rows=rows, title=title)


def tax_tables(tax: "Tax") -> list[RenderableType]:
    tables: list[RenderableType] = []
    if tax.bits_per_byte:
        title = f"{tax.num_documents:,} texts, {tax.num_bytes:,} bytes"
        tables.append(_changes("bits per byte (95%)", tax.bits_per_byte, title))
    for task in tax.tasks:
        title = f"{task.task}: {task.num_examples:,} examples, {task.num_shots} shots"
        tables.append(_changes("exact match (95%)", task.exact_match, title))
        tables.append(_changes("bits per byte of the answer (95%)", task.bits_per_byte, title))
    return tables


def _changes(what: str, changes: "Mapping[str, Change]", title: str) -> Table:
    rows = [[name, spread(change.value, 4), spread(change.above_before, 4)] for name, change in changes.items()]
    return table("policy", what, "minus the first (95%)", rows=rows, title=title)
