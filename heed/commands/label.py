"""`heed label`: import and export labels, sample tasks, serve the labeling pages. People are in `label_people`."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.label_people import LabelToml, PublicUrl, Store, labeling_config, people_app
from heed.commands.options import Weights, length_that_fits, read_weights
from stages.progress import console

if TYPE_CHECKING:
    from preferences.formats.merging import Found
    from preferences.formats.parts import Report, RowWarning
    from preferences.store import LabelStore
    from preferences.task_selection import Method

label_app = typer.Typer(no_args_is_help=True, help="Collect labels; import and export published and own ones.")
label_app.add_typer(people_app)

SHOWN_PER_KIND = 10  # warnings of each kind that are printed; a report file has them all
STATUS_ROWS = 500

Strict = Annotated[bool, typer.Option(help="Stop at the first warning instead of reporting it and continuing.")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write every warning to this file, as JSONL.")]


@label_app.command("import")
def import_labels(
    file: Annotated[
        str, typer.Argument(help="A JSONL, JSON, CSV or Parquet file (.gz allowed), a dataset folder or a hub id.")
    ],
    store: Store = "",
    batch: Annotated[str, typer.Option(help="The tasks' batch. Rows in Heed's own format name it themselves.")] = "",
    form: Annotated[str, typer.Option("--format", help="The rows' format; docs/labels.md lists them.")] = "auto",
    objective: Annotated[
        str, typer.Option(help="What the labelers judged by, such as helpful, if the rows do not say.")
    ] = "",
    strict: Strict = False,
    check: Annotated[
        bool, typer.Option(help="Read and report without storing, as if importing into --store or an empty store.")
    ] = False,
    report: ReportFile = None,
    split: Annotated[str, typer.Option(help="Split of a dataset folder or a hub id.")] = "train",
    subset: Annotated[str, typer.Option(help="Subset of a hub id that has several.")] = "",
) -> None:
    """Import judgments into a label store: all of a file or nothing. Repeating an import changes nothing."""
    from files.rows import read_source
    from preferences.formats.registry import AUTO, format_to_read, sniff

    if not check and not store:
        raise ValueError("--store is missing; a label store, or --check to store nothing, was expected")
    if form == AUTO:
        guessed, why = sniff(read_source(file, split=split, subset=subset))
        console.print(f"format: {guessed.name} ({guessed.description}): {why}")
        form = guessed.name
    if not check and not batch and form != "heed":
        raise ValueError(f"--batch is missing; format {form!r} names no batches of its own")
    from preferences.formats.merging import collect

    rows = read_source(file, split=split, subset=subset)
    with console.status("reading") as status:
        for found in collect(format_to_read(form), rows, strict=strict, objective=objective):
            if found.report.num_rows % STATUS_ROWS == 0:
                status.update(f"reading: {found.report.num_rows:,} rows, {len(found.report.warnings):,} warnings")
    print_warnings(found.report, report)
    if not found.tasks:
        raise ValueError(f"{file}: {found.report.num_rows} rows, none of which holds a judgment; see above")
    with console.status("checking" if check else "storing"):
        _store(file, found, batch, store, only_check=check)
    typer.echo(_summary(found, "checked" if check else f"stored in {store}"))


def _store(file: str, found: "Found", batch: str, store: str, *, only_check: bool) -> None:
    """Stores what was found. A check without a store uses an empty temporary one."""
    from sqlalchemy.exc import DBAPIError

    from preferences.database import store_file
    from preferences.formats.exchange import store_found

    path = store_file(store) if store else None
    with ExitStack() as stack:
        if only_check and (not store or (path is not None and not path.exists())):
            store = str(Path(stack.enter_context(TemporaryDirectory(prefix="heed-check-"))) / "empty.sqlite")
            if not all(found.batches.values()):  # a check needs no --batch, even if the rows name none
                batch = batch or "check"
        opened = stack.enter_context(open_store(store))
        try:
            store_found(opened, found, batch, only_check=only_check)
        except DBAPIError as error:  # a full disk, a server that went away, a lock that somebody else holds
            raise ValueError(f"{file}: the database stored nothing of it: {error.orig}") from error


@label_app.command("export")
def export_labels(
    out: Annotated[Path, typer.Option(help="A new .jsonl, .json (.gz allowed) or .parquet file, or a new folder.")],
    store: Store,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="The output format; docs/labels.md lists them. `heed` with --names loses nothing."
        ),
    ] = "heed",
    batch: Annotated[str, typer.Option(help="Export only this batch.")] = "",
    names: Annotated[bool, typer.Option("--names", help="Name the labelers; by default they have pseudonyms.")] = False,
    strict: Strict = False,
    report: ReportFile = None,
) -> None:
    """Export judgments from a label store."""
    from preferences.database import require_store
    from preferences.formats.exchange import export
    from preferences.formats.registry import format_to_write

    chosen = format_to_write(form)
    require_store(store)
    with open_store(store) as opened, console.status("writing"):
        found, num_rows = export(opened, chosen, out, batch=batch, strict=strict, with_names=names)
    print_warnings(found, report)
    typer.echo(f"{num_rows:,} rows of {chosen.name} ({chosen.description}) in {out}")


@label_app.command("sample")
def sample_for_labelers(
    policies: Annotated[list[Path], typer.Argument(help="Model directories. Every policy answers every prompt.")],
    prompts: Annotated[str, typer.Option(help="Prompts: JSONL, CSV, Parquet or a hub id (docs/data.md).")],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to.")],
    responses: Annotated[int, typer.Option(help="Responses per task, 2 to 9.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Samples per policy and prompt.")] = 4,
    tasks_per_prompt: Annotated[int, typer.Option(min=1, help="Tasks made of each prompt.")] = 1,
    judge: Annotated[
        list[Path] | None, typer.Option(help="A reward model that selects uncertain comparisons; may repeat.")
    ] = None,
    weight: Weights = None,
    evaluation_share: Annotated[
        float, typer.Option(help="Share of the prompts whose tasks are always selected uniformly, for evaluation.")
    ] = 0.1,
    labelers: Annotated[int, typer.Option(min=1, help="How many labelers judge each task.")] = 1,
    max_new_tokens: Annotated[
        int,
        typer.Option(min=1, help="Maximum length of a response, in tokens; less if the longest prompt leaves less."),
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling and selecting.")] = 0,
) -> None:
    """Sample policies and make labeling tasks, with --judge those that reward models are least certain about."""
    from reward.label_sampling import TaskSelection, sample_tasks
    from stages.reports.text import count_of
    from training.data import DataConfig, read_prompts

    read = read_prompts(DataConfig(source=prompts))
    if weight and not judge:
        raise ValueError("--weight sets the weight of a --judge's objective, but no --judge is given")
    method: Method = "uncertainty" if judge else "uniform"
    length = length_that_fits(policies, read, max_new_tokens)
    selection = TaskSelection(batch, method, responses, tasks_per_prompt, evaluation_share, seed)
    with console.status(f"sampling {len(policies)} x {samples} responses to {len(read):,} prompts"):
        tasks = sample_tasks(
            policies,
            judge or [],
            read,
            selection,
            num_samples=samples,
            max_new_tokens=length,
            temperature=temperature,
            weights=read_weights(weight),
        )
    if not tasks:
        raise ValueError(f"{prompts}: no prompt has {responses} different responses; try more --samples")
    with open_store(store) as opened:
        opened.add_tasks(tasks, batch=batch, num_labelers=labelers)
    judged = len({task.prompt for task in tasks})
    made = f"{count_of(len(tasks), 'task')} of {count_of(judged, 'prompt')}"
    typer.echo(f"{made}, selected by {method}; in batch {batch!r} of {store}")
    if judged < len(read):
        typer.echo(
            f"{len(read) - judged:,} of {len(read):,} prompts are left out: the policies gave fewer than {responses}"
            " different responses to each"
        )


@label_app.command("outputs")
def label_outputs(
    outputs: Annotated[
        list[str],
        typer.Argument(
            help="NAME=FILE per model, with --prompts; or one file whose rows hold a prompt and its responses."
        ),
    ],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to.")],
    prompts: Annotated[
        str, typer.Option(help="The prompts that the outputs answer: JSONL, CSV, Parquet or a hub id.")
    ] = "",
    labelers: Annotated[int, typer.Option(min=1, help="How many labelers judge each task.")] = 1,
) -> None:
    """Make labeling tasks of outputs that two or more models have left in files, one per prompt."""
    from files.rows import read_source
    from heed.commands.saved_outputs import as_stored, tasks_of_files, tasks_of_rows
    from stages.reports.text import count_of

    if prompts and len(outputs) < 2:
        raise ValueError(f"{outputs[0]}: one model's outputs; NAME=FILE of two or more were expected with --prompts")
    if not prompts and (len(outputs) > 1 or "=" in outputs[0]):
        raise ValueError("--prompts is missing; the prompts that these outputs answer were expected")
    tasks, num_same = tasks_of_files(outputs, prompts) if prompts else tasks_of_rows(read_source(outputs[0]))
    if not tasks:
        raise ValueError(f"{prompts or outputs[0]}: no prompt has two different responses")
    with open_store(store) as opened:
        stored = [one.task for one in opened.tasks(batch)]
        opened.add_tasks(as_stored(tasks, stored), batch=batch, num_labelers=labelers)
    made = count_of(len(tasks), "task")
    typer.echo(f"{made} in batch {batch!r} of {store}, each for {count_of(labelers, 'labeler')}")
    if num_same:
        left_out = f"{count_of(num_same, 'prompt')} {'is' if num_same == 1 else 'are'} left out"
        typer.echo(f"{left_out}: all responses to it are the same, or the prompt came twice")


@label_app.command("serve")
def serve_labels(
    store: Store,
    config: LabelToml = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. For users on other machines, put a TLS proxy in front.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535)] = 8100,
    public_url: PublicUrl = "",
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded headers are trusted; may repeat."),
    ] = None,
    trusted_host: Annotated[
        list[str] | None, typer.Option(help="Another host name that the server accepts; may repeat.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Create the store if it does not exist.")] = False,
) -> None:
    """Serve the labeling pages and their API. If there is no lead yet, print a one-time link for one."""
    from preferences.database import require_store
    from preferences.page.serve import serve

    if not new:
        require_store(store)
    merged = labeling_config(config, public_url, trusted_proxy or [], trusted_host or [])
    serve(store, merged, host=host, port=port, announce=typer.echo)


def open_store(url_or_path: str) -> "LabelStore":
    from preferences.store import LabelStore

    return LabelStore(url_or_path)


def print_warnings(report: "Report", path: Path | None) -> None:
    """Prints the number of warnings of each kind and the first few; writes all of them to the report file."""
    by_kind: dict[str, list[RowWarning]] = {}
    for warning in report.warnings:
        by_kind.setdefault(warning.kind, []).append(warning)
    for kind, count in report.counts().items():
        console.print(f"{kind}: {count:,}", style="bold", markup=False)
        for warning in by_kind[kind][:SHOWN_PER_KIND]:
            console.print(f"  {warning.where}: {warning.found}; {warning.done}", markup=False)
        if count > SHOWN_PER_KIND:
            rest = f"  and {count - SHOWN_PER_KIND:,} more"
            console.print(rest + ("" if path else " (use --report FILE for all of them)"))
    if path is not None:
        path.write_text("".join(json.dumps(vars(warning)) + "\n" for warning in report.warnings), encoding="utf-8")
        console.print(f"{len(report.warnings):,} warnings in {path}", markup=False)


def _summary(found: "Found", done: str) -> str:
    labelers = {judgment.labeler for judgment in found.judgments}
    lines = [
        f"{found.report.num_rows:,} rows: {len(found.tasks):,} tasks, {len(found.judgments):,} judgments by"
        f" {_names(sorted(labelers))}; {done}",
        *(f"  {count:>7,}  {kind}" for kind, count in found.report.counts().items()),
    ]
    return "\n".join(lines)


def _names(labelers: Sequence[str]) -> str:
    return ", ".join(labelers) if 0 < len(labelers) <= 3 else f"{len(labelers):,} labelers"
