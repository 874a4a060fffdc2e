"""The command lines of comparisons: `heed compare`, and `heed judge` for one that is there."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from heed.label_cli import tell
from stages.progress import StageProgress, console, results_console

if TYPE_CHECKING:
    from compare.comparing import Outcome, Progress
    from compare.folder import Settings
    from evaluation.answers import OnProgress

LONGEST_NAME = 80
ODDITIES = "oddities.jsonl"  # of a file of judgments, in the comparison's folder
JUDGES = "people:STORE, gold:JOB.toml, URL#MODEL, URL, FILE.py:FUNCTION or a reward model"

Template = Annotated[Path | None, typer.Option(help="What a language model that judges is asked: a file.")]
JudgeTokens = Annotated[int, typer.Option(min=1, help="Longest answer of a language model that judges.")]
Labelers = Annotated[int, typer.Option(min=1, help="How many people judge each task.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests on their way to an endpoint at once.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds of silence before a request is given up.")]
Retries = Annotated[int, typer.Option(min=0, help="Of a request to an endpoint that failed.")]
MaxFailedShare = Annotated[float, typer.Option(min=0, max=1, help="Of a judge's verdicts, before that is an error.")]
Cache = Annotated[Path | None, typer.Option(help="Answers of endpoints; answers.sqlite beside the folder by itself.")]


def compare(
    policies: Annotated[
        list[str] | None,
        typer.Argument(help="Two or more: a model directory, a hub id, URL#MODEL or a file of outputs; NAME=... too."),
    ] = None,
    prompts: Annotated[str, typer.Option(help="Rows of prompt or messages, with prompt_id and category.")] = "",
    judge: Annotated[list[str] | None, typer.Option(help=f"{JUDGES}; may repeat.")] = None,
    verdicts: Annotated[str, typer.Option(help="A file of judgments, in place of policies and prompts.")] = "",
    form: Annotated[str, typer.Option("--format", help="What --verdicts holds; docs/labels.md lists them.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="The comparison's folder; runs/compare-... by itself.")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Responses of every policy to every prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    reference: Annotated[str, typer.Option(help="The model directory that KL is measured to: SFT's, say.")] = "",
    bf16: Annotated[bool, typer.Option("--bf16", help="Sample models here in bf16 instead of fp32.")] = False,
    category: Annotated[str, typer.Option(help="The field of category; category, kind or dataset by itself.")] = "",
    max_prompts: Annotated[int, typer.Option(min=0, help="Prompts read; 0 is all.")] = 0,
    split: Annotated[str, typer.Option(help="Of a data set's folder or a hub id of prompts.")] = "train",
    subset: Annotated[str, typer.Option(help="Of a hub id that has several.")] = "",
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Files may hold empty responses.")] = False,
    template: Template = None,
    judge_tokens: JudgeTokens = 1024,
    labelers: Labelers = 1,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 4,
    max_failed_share: MaxFailedShare = 0.1,
    cache: Cache = None,
) -> None:
    """Which policy is better, by how much, and is it real? docs/comparing.md explains all of it.

    A comparison that was interrupted goes on. The same command again asks people what they have said since.
    """
    from compare.comparing import Compared, take_verdicts
    from compare.comparing import compare as compare_policies
    from compare.judges import Asking, Judging
    from evaluation.policies.policy import Sampling
    from jobs.worlds import open_world
    from training.data import DataConfig

    if verdicts and (policies or prompts or judge):
        raise ValueError("--verdicts names policies, prompts and judges itself; it was expected without them")
    if not verdicts and not (policies and prompts):
        raise ValueError("two or more policies with --prompts and --judge, or --verdicts alone, were expected")
    folder = out or Path("runs") / f"compare-{_called(policies or [verdicts], 'policy')}"
    if verdicts:
        outcome, report = take_verdicts(verdicts, form, folder, category=category, seed=seed)
        tell(report, folder / ODDITIES if report.oddities else None)
    else:
        asking = Asking(cache or _answers(folder), concurrency, timeout, retries, max_failed_share)
        judging = Judging(asking, template, judge_tokens, folder.absolute().name, labelers, seed, open_world)
        data = DataConfig(source=prompts, split=split, subset=subset, max_rows=max_prompts)
        sampling = Sampling(num_samples, temperature, max_new_tokens, seed, "bf16" if bf16 else "fp32", reference)
        compared = Compared(policies or [], data, category, judge or [], sampling, judging, allow_empty)
        with _bars() as progress:
            outcome = compare_policies(compared, folder, progress)
    _tell_policies(outcome.settings)
    _tell_people(outcome, judge or [])
    _conclude(outcome, folder)


def judge_again(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished comparison.")],
    judges: Annotated[list[str], typer.Argument(help=f"{JUDGES}; NAME=... too.")],
    template: Template = None,
    judge_tokens: JudgeTokens = 1024,
    labelers: Labelers = 1,
    concurrency: Concurrency = 8,
    timeout: Timeout = 120.0,
    retries: Retries = 4,
    max_failed_share: MaxFailedShare = 0.1,
    cache: Cache = None,
) -> None:
    """Judge a comparison by further judges, without sampling again. What the others said stays."""
    from compare.comparing import judge_again as judge_folder
    from compare.folder import holding, read_judged, read_settings
    from compare.judges import Asking, Judging, open_judges
    from jobs.worlds import open_world

    settings = read_settings(folder)
    asking = Asking(cache or _answers(folder), concurrency, timeout, retries, max_failed_share)
    judging = Judging(asking, template, judge_tokens, folder.absolute().name, labelers, settings["seed"], open_world)
    prompts, _, _ = read_judged(folder)
    opened = open_judges(judges, judging, prompts, len(settings["policies"]))
    with holding(folder), _bars() as progress:
        outcome = judge_folder(folder, opened, max_failed_share, progress)
    _tell_people(outcome, judges)
    _conclude(outcome, folder)


def _answers(folder: Path) -> Path:
    """Where answers of endpoints are kept, for all comparisons that lie side by side."""
    return folder.absolute().parent / "answers.sqlite"


def _called(specs: Sequence[str], what: str) -> str:
    """A folder's name of the names of what is compared."""
    from evaluation.names import named_specs

    names = "-".join(name for name, _ in named_specs(specs, what))
    return re.sub(r"[^A-Za-z0-9._-]+", "_", names)[:LONGEST_NAME]


@contextmanager
def _bars() -> Iterator["Progress"]:
    """A bar for each step, one at a time, or a line now and then; the last is gone when this ends, also in an error."""
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


def _tell_policies(settings: "Settings") -> None:
    """What a reader of the numbers should know of the policies' responses."""
    for policy in settings["policies"]:
        counts = settings["responses"][policy["name"]]
        told = []
        if policy.get("num_unused"):
            told.append(f"{policy['num_unused']:,} rows of {policy['spec']} answer other prompts and were not used")
        if counts["num_empty"]:
            told.append(f"{counts['num_empty']:,} of {counts['num_responses']:,} responses are empty")
        if policy["kind"] == "model" and policy["sampling"]["reference"] and not policy["reference_sha256"]:
            told.append("its KL is not measured, for it reads other tokens than the reference")
        for line in told:
            console.print(f"{policy['name']}: {line}", markup=False)


def _tell_people(outcome: "Outcome", judges: Sequence[str]) -> None:
    """How far people are, and how they are asked; `judges` are the specs with the stores' addresses."""
    for entry in outcome.settings["judges"]:
        if entry["kind"] == "people" and any("people:" in spec for spec in judges):
            judged = entry["num_tasks"] - entry["num_open"]
            console.print(
                f"{entry['name']}: {judged:,} of {entry['num_tasks']:,} tasks are judged, in batch {entry['batch']!r}",
                markup=False,
            )
            if entry["num_open"]:
                store = entry["spec"].removeprefix("people:")
                console.print(f"  for the others: heed label serve --store {store}", markup=False)
                console.print("  then the same command again takes what they said", markup=False)


def _conclude(outcome: "Outcome", folder: Path) -> None:
    from compare.results import conclude, results_table

    if not outcome.has_verdicts:
        console.print("no verdicts yet, so there is nothing to report")
        return
    results_console().print(results_table(conclude(folder)))
    console.print(str(folder / "report.html"), markup=False)
