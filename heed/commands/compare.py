"""Commands for comparisons: `heed compare` policies, `heed verdicts` of others in a file, `heed judge` an existing
comparison again, `heed judge-quality` of a judge.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from heed.commands.label import print_warnings
from stages.progress import StageProgress, console, results_console

if TYPE_CHECKING:
    from evaluation.compare.comparing import Outcome, Progress
    from evaluation.compare.folder import Settings
    from evaluation.compare.judges import Asking, Judging
    from reward.endpoint import OnProgress

LONGEST_NAME = 80
WARNINGS = "warnings.jsonl"  # in the comparison's folder: warnings about a file of judgments
JUDGES = "people:STORE, gold:JOB.toml, URL#MODEL, URL, FILE.py:FUNCTION or a reward model"

Template = Annotated[Path | None, typer.Option(help="File with the prompt template for a language-model judge.")]
Rubric = Annotated[
    Path | None,
    typer.Option(help="TOML file of criteria, by which language models grade each response (docs/verifiers.md)."),
]
JudgeTokens = Annotated[int, typer.Option(min=1, help="Maximum answer length of a language-model judge, in tokens.")]
Labelers = Annotated[int, typer.Option(min=1, help="Number of people who judge each task.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Concurrent requests to an endpoint.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Time limit of each whole answer, in seconds.")]
MaxFailedShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of a judge's verdicts that may fail before the command stops.")
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Cache of endpoint responses (default: answers.sqlite next to the output folder)."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the comparison (default: runs/compare-...).")]
Category = Annotated[str, typer.Option(help="Field that holds the category (default: category, kind or dataset).")]
Quality = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of `heed judge-quality` of one of the judges, for the report; may repeat."),
]
ClusterBy = Annotated[
    str,
    typer.Option(help="Field that says which prompts depend on each other, such as their template (default: none do)."),
]
TrainingData = Annotated[
    list[str] | None,
    typer.Option(help="[MODEL=]FILE that a model was trained on, searched for the items; may repeat."),
]
Policies = Annotated[
    list[str],
    typer.Argument(
        help="Two or more model directories, .gguf files, hub ids, URL#MODEL or files of outputs; prefix with NAME="
        " to name one. A NAME with several of them is an algorithm with several training runs (seeds)."
    ),
]
Prompts = Annotated[
    str, typer.Option(help="Prompts: rows with prompt or messages, and optionally prompt_id and category.")
]
MaxPrompts = Annotated[int, typer.Option(min=0, help="Number of prompts to read (default: all).", show_default=False)]

FailIf = Annotated[
    str,
    typer.Option(
        help='"B worse than A", "... in MEASURE" (a suite\'s or a judge; default: the first), "... by .02": exit code 0'
        " if shown not to be (by more than that), 1 if shown, 2 if undecided."
    ),
]


def compare(
    policies: Policies,
    prompts: Prompts,
    judge: Annotated[list[str] | None, typer.Option(help=f"Judge: {JUDGES}; may repeat.")] = None,
    out: Out = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Responses per policy and prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a response, in tokens.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling and resampling.")] = 0,
    reference: Annotated[str, typer.Option(help="Model directory to measure KL against, e.g. the SFT model's.")] = "",
    bf16: Annotated[bool, typer.Option("--bf16", help="Sample local models in bf16 instead of fp32.")] = False,
    category: Category = "",
    cluster_by: ClusterBy = "",
    max_prompts: MaxPrompts = 0,
    split: Annotated[str, typer.Option(help="Split of the prompts, for a data set folder or hub id.")] = "train",
    subset: Annotated[str, typer.Option(help="Subset of the prompts, for a hub id with several.")] = "",
    training_data: TrainingData = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Accept empty responses in files.")] = False,
    template: Template = None,
    rubric: Rubric = None,
    judge_tokens: JudgeTokens = 1024,
    labelers: Labelers = 1,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    max_failed_share: MaxFailedShare = 0.1,
    cache: Cache = None,
    judge_quality: Quality = None,
    fail_if: FailIf = "",
) -> None:
    """Compare policies: which is better, by how much, and is the difference real? See docs/comparing.md.

    An interrupted comparison continues. With people as judges, run the same command again to collect new judgments.
    """
    from evaluation.compare.comparing import Compared
    from evaluation.compare.comparing import compare as compare_policies
    from evaluation.compare.folder import read_settings
    from evaluation.fail_if import UNDECIDED, Gate, undecided_if_it_fails
    from evaluation.inputs import named_runs, named_specs
    from evaluation.policies import Sampling
    from training.data import DataConfig

    if not prompts:
        raise ValueError("--prompts is empty; a file or a hub id was expected")
    named, runs = named_runs(policies)
    gate = Gate.of(fail_if, [*runs, *(name for name, _ in named)]) if fail_if else None
    folder = out or folder_of("compare", (name for name, _ in named))
    if gate is not None and judge:
        earlier = [entry["name"] for entry in read_settings(folder)["judges"]] if folder.exists() else []
        gate.check("this comparison", "judge", dict.fromkeys([*dict(named_specs(judge, "judge")), *earlier], True))
    asking = asking_of(folder, cache, concurrency, timeout, max_failed_share)
    judging = _judging_of(folder, asking, template, rubric, judge_tokens, labelers, seed)
    data = DataConfig(source=prompts, split=split, subset=subset, max_rows=max_prompts)
    sampling = Sampling(num_samples, temperature, max_new_tokens, seed, "bf16" if bf16 else "fp32", reference)
    compared = Compared(
        policies, data, category, cluster_by, judge or [], sampling, judging, allow_empty, training_data or []
    )
    with undecided_if_it_fails(gate, "comparison"):
        with progress_bars() as progress:
            outcome = compare_policies(compared, folder, progress, partial(console.print, markup=False))
        _print_policies(outcome.settings)
        _print_people(outcome, judge or [])
        report = _print_results(outcome, folder, judge_quality or [])
    if gate is not None:
        end_with(*(gate.of_comparison(report) if report else (UNDECIDED, "undecided: there are no verdicts yet")))


def verdicts(
    file: Annotated[str, typer.Argument(help="File of judgments that name each response's writer, or NAME=FILE.")],
    form: Annotated[str, typer.Option("--format", help="Format of the file (docs/labels-formats.md).")] = "auto",
    out: Out = None,
    category: Category = "",
    cluster_by: ClusterBy = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed for resampling.")] = 0,
) -> None:
    """Compare policies by existing judgments, without sampling or judging. See docs/comparing.md."""
    from evaluation.compare.comparing import take_verdicts
    from evaluation.inputs import named_runs

    folder = out or folder_of("compare", (name for name, _ in named_runs([file])[0]))
    outcome, report = take_verdicts(file, form, folder, category=category, cluster_by=cluster_by, seed=seed)
    print_warnings(report, folder / WARNINGS if report.warnings else None)
    _print_policies(outcome.settings)
    _print_results(outcome, folder)


def judge_again(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished comparison.")],
    judges: Annotated[list[str], typer.Argument(help=f"{JUDGES}; prefix with NAME= to name one.")],
    template: Template = None,
    rubric: Rubric = None,
    judge_tokens: JudgeTokens = 1024,
    labelers: Labelers = 1,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    max_failed_share: MaxFailedShare = 0.1,
    cache: Cache = None,
    judge_quality: Quality = None,
) -> None:
    """Add judges to a finished comparison, without sampling again. Existing verdicts stay."""
    from evaluation.compare.comparing import judge_again as judge_folder
    from evaluation.compare.folder import holding, read_comparison, read_settings
    from evaluation.compare.judges import open_judges

    settings = read_settings(folder)
    asking = asking_of(folder, cache, concurrency, timeout, max_failed_share)
    judging = _judging_of(folder, asking, template, rubric, judge_tokens, labelers, settings["seed"])
    prompts = read_comparison(folder).prompts
    opened = open_judges(judges, judging, prompts, len(settings["policies"]))
    with holding(folder), progress_bars() as progress:
        outcome = judge_folder(folder, opened, max_failed_share, progress)
    _print_people(outcome, judges)
    _print_results(outcome, folder, judge_quality or [])


def judge_quality(
    judge: Annotated[str, typer.Argument(help=f"{JUDGES}; prefix with NAME= to name one.")],
    files: Annotated[list[str], typer.Argument(help="Pairs or rankings by people, in any format; or NAME=FILE.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures (default: runs/judge-quality-...).")] = None,
    max_tasks: Annotated[
        int, typer.Option(min=0, help="Number of tasks to judge, evenly spread (default: all).", show_default=False)
    ] = 0,
    template: Template = None,
    rubric: Rubric = None,
) -> None:
    """Measure a judge before it is believed: agreement with people, and effects of order, length and its own responses.

    See docs/comparing.md.
    """
    from evaluation.compare.judges import open_judges
    from evaluation.compare.report.quality import figure_rows, findings, write_quality
    from evaluation.inputs import named_specs
    from evaluation.judges.quality import measure_judge, read_labelled

    ((name, _),) = named_specs([judge], "judge")
    folder = out or folder_of("judge-quality", [name])
    asking = asking_of(folder, None, 8, 120.0, 0.1)
    (opened,) = open_judges([judge], _judging_of(folder, asking, template, rubric, 1024, 1, 0), (), 2)
    labelled = read_labelled(files, max_tasks)
    with progress_bars() as progress:
        quality = measure_judge(opened, labelled, asking.max_failed_share, progress(f"judge {name}"))
    write_quality(folder, quality)
    figures = Table("", "95%", "", box=None, pad_edge=False)
    for row in figure_rows(quality):
        figures.add_row(*map(escape, row))
    results_console().print(figures)
    for sentence in findings(quality):
        results_console().print(sentence, markup=False)
    console.print(str(folder / "report.html"), markup=False)


def end_with(code: int, sentence: str) -> NoReturn:
    """Prints what `--fail-if` has found, and ends the command with its exit code."""
    results_console().print(sentence, markup=False)
    raise typer.Exit(code)


def asking_of(
    folder: Path, cache: Path | None, concurrency: int, timeout: float, max_failed_share: float, max_requests: int = 0
) -> "Asking":
    """Returns how to query endpoints; commands that write into neighbouring folders share one cache of responses."""
    from evaluation.compare.judges import Asking
    from reward.endpoint import Budget
    from reward.external import MAX_WAIT_SECONDS

    budget = Budget(max_requests) if max_requests else Budget()
    shared = folder.absolute().parent / "answers.sqlite"
    return Asking(cache or shared, concurrency, timeout, MAX_WAIT_SECONDS, max_failed_share, budget)


def _judging_of(
    folder: Path,
    asking: "Asking",
    template: Path | None,
    rubric: Path | None,
    judge_tokens: int,
    labelers: int,
    seed: int,
) -> "Judging":
    from evaluation.compare.judges import Judging
    from heed.jobs.job_file import open_world
    from preferences.store import LabelStore

    batch = folder.absolute().name
    return Judging(asking, template, judge_tokens, batch, labelers, seed, open_world, rubric, open_labels=LabelStore)


def folder_of(command: str, names: Iterable[str]) -> Path:
    """Returns a folder in runs/ with the names of what is compared, evaluated or measured."""
    return Path("runs") / f"{command}-{re.sub(r'[^A-Za-z0-9._-]+', '_', '-'.join(names))[:LONGEST_NAME]}"


@contextmanager
def progress_bars() -> Iterator["Progress"]:
    """Shows a progress bar per step, one at a time, or occasional lines; removes the last one at the end."""
    opened: list[StageProgress] = []

    def start(step: str) -> "OnProgress":
        for bar in opened:
            bar.close()
        opened[:] = [StageProgress(escape(step))]
        return opened[0].update

    try:
        yield start
    finally:
        for bar in opened:
            bar.close()


def _print_policies(settings: "Settings") -> None:
    """Prints what readers of the numbers should know about the policies' responses."""
    for policy in settings["policies"]:
        counts = settings["responses"][policy["name"]]
        notes = []
        if policy.get("num_unused"):
            notes.append(f"{policy['num_unused']:,} rows of {policy['spec']} answer other prompts and are unused")
        if counts["num_empty"]:
            notes.append(f"{counts['num_empty']:,} of {counts['num_responses']:,} responses are empty")
        if policy["kind"] == "model" and policy["sampling"]["reference"] and not policy["reference_sha256"]:
            notes.append("KL is not measured, because its tokenizer differs from the reference's")
        for line in notes:
            console.print(f"{policy['name']}: {line}", markup=False)


def _print_people(outcome: "Outcome", judges: Sequence[str]) -> None:
    """Prints the labelers' progress and how to continue; `judges` are the specs with the stores' addresses."""
    for entry in outcome.settings["judges"]:
        if entry["kind"] == "people" and any("people:" in spec for spec in judges):
            judged = entry["num_tasks"] - entry["num_open"]
            console.print(
                f"{entry['name']}: {judged:,} of {entry['num_tasks']:,} tasks are judged, in batch {entry['batch']!r}",
                markup=False,
            )
            if entry["num_open"]:
                store = entry["spec"].removeprefix("people:")
                console.print(f"  for the remaining ones: heed label serve --store {store}", markup=False)
                console.print("  then run the same command again to collect the judgments", markup=False)


def _print_results(outcome: "Outcome", folder: Path, quality: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns report.json; empty without verdicts."""
    from evaluation.compare.comparing import conclude, results_table
    from evaluation.compare.folder import SETTINGS
    from evaluation.judges.quality import add_quality
    from files.atomic import write_json

    if not outcome.has_verdicts:
        console.print("no verdicts yet, nothing to report")
        return {}
    if quality:
        add_quality(outcome.settings["judges"], quality)
        write_json(folder / SETTINGS, outcome.settings)
    report = conclude(folder)
    results_console().print(results_table(report))
    for sentence in (report["answer"]["text"], *report["answer"]["more"], *report["judge_quality"]):
        console.print(sentence, markup=False)
    console.print(str(folder / "report.html"), markup=False)
    return report
