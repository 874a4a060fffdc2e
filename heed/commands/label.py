"""`heed label`: import and export labels, make tasks, serve the labeling pages, and manage the people who label.

Tasks are sampled from policies, or made from outputs that models have left in files.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.options import Host, Port, Weights, length_that_fits, read_weights
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, Task
from stages.progress import console

if TYPE_CHECKING:
    from preferences.accounts import Accounts
    from preferences.formats.merging import ImportedLabels
    from preferences.formats.parts import Report, RowWarning
    from preferences.page.config import LabelingConfig
    from preferences.store import LabelStore
    from preferences.task_selection import Rule

label_app = typer.Typer(no_args_is_help=True, help="Collect labels; import and export published and own ones.")

SHOWN_PER_KIND = 10  # warnings of each kind that are printed; a report file has them all
STATUS_ROWS = 500

Strict = Annotated[bool, typer.Option(help="Stop at the first warning instead of reporting it and continuing.")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Write every warning to this file, as JSONL.")]
Store = Annotated[str, typer.Option(help="The label store: a file path or a database URL.", show_default=False)]
LabelToml = Annotated[Path | None, typer.Option(help="TOML file: title, instructions, flags, ...; see docs/labels.md.")]
PublicUrl = Annotated[str, typer.Option(help="The server's address for its users, such as https://labels.example.org.")]


@label_app.command("import")
def import_labels(
    file: Annotated[
        str, typer.Argument(help="A JSONL, JSON, CSV or Parquet file (.gz allowed), a dataset folder or a hub id.")
    ],
    store: Store = "",
    batch: Annotated[str, typer.Option(help="The tasks' batch. Rows in Heed's own format name it themselves.")] = "",
    form: Annotated[str, typer.Option("--format", help="The rows' format (docs/labels-formats.md).")] = "auto",
    objective: Annotated[
        str, typer.Option(help="What the labelers judged by, such as helpful, if the rows do not say.")
    ] = "",
    strict: Strict = False,
    check: Annotated[
        bool, typer.Option(help="Store nothing; report what an import into --store, or an empty store, would do.")
    ] = False,
    report: ReportFile = None,
    split: Annotated[str, typer.Option(help="Split of a dataset folder or a hub id.")] = "train",
    subset: Annotated[str, typer.Option(help="Subset of a hub id that has several.")] = "",
) -> None:
    """Import judgments into a label store: all of a file or nothing. Repeating an import changes nothing."""
    from files.rows import InvalidRows, read_source
    from preferences.formats.registry import AUTO, format_to_read, sniff

    if not check and not store:
        raise ValueError("--store is missing; a label store, or --check to store nothing, was expected")
    if form == AUTO:
        guessed, why = sniff(read_source(file, split=split, subset=subset), file)
        console.print(f"format: {guessed.name} ({guessed.description}): {why}")
        form = guessed.name
    if not check and not batch and form != "heed":
        raise ValueError(f"--batch is missing; format {form!r} names no batches of its own")
    from preferences.formats.merging import collect

    invalid = None if strict else InvalidRows(file, hint="")  # a strict import stops at the first row
    rows = read_source(file, split=split, subset=subset, invalid=invalid)
    with console.status("reading") as status:
        for found in collect(format_to_read(form), rows, strict=strict, objective=objective, invalid=invalid):
            if found.report.num_rows % STATUS_ROWS == 0:
                status.update(f"reading: {found.report.num_rows:,} rows, {len(found.report.warnings):,} warnings")
    print_warnings(found.report, report)
    if not len(found.found_tasks):
        raise ValueError(f"{file}: {found.report.num_rows} rows, none of which holds a judgment; see above")
    with console.status("checking" if check else "storing"):
        _store(file, found, batch, store, only_check=check)
    typer.echo(_summary(found, "checked" if check else f"stored in {store}"))


def _store(file: str, found: "ImportedLabels", batch: str, store: str, *, only_check: bool) -> None:
    """Stores what was found. A check without a store uses an empty temporary one. A store that would be new is made
    only for an import that such a check has passed.
    """
    from sqlalchemy.exc import DBAPIError

    from preferences.database import store_file
    from preferences.formats.exchange import store_found
    from preferences.store import LabelStore

    path = store_file(store) if store else None
    if path is not None and not path.exists() and not only_check:
        with TemporaryDirectory(prefix="heed-check-") as folder, LabelStore(f"{folder}/empty.sqlite") as empty:
            store_found(empty, found, batch, only_check=True)
    with ExitStack() as stack:
        if only_check and (not store or (path is not None and not path.exists())):
            store = str(Path(stack.enter_context(TemporaryDirectory(prefix="heed-check-"))) / "empty.sqlite")
            if not all(own.batch for own in found.found_tasks):  # a check needs no --batch, even if the rows name none
                batch = batch or "check"
        opened = stack.enter_context(LabelStore(store) if only_check else open_store(store))
        try:
            store_found(opened, found, batch, only_check=only_check)
        except DBAPIError as error:  # a full disk, a lost server, a lock that somebody else holds
            raise ValueError(f"{file}: the database stored nothing of it: {error.orig}") from error


@label_app.command("export")
def export_labels(
    out: Annotated[Path, typer.Option(help="A new .jsonl, .json (.gz allowed) or .parquet file, or a new folder.")],
    store: Store,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="The output format; docs/labels-formats.md lists them. `heed` with --names loses nothing."
        ),
    ] = "heed",
    batch: Annotated[str, typer.Option(help="Export only this batch.")] = "",
    criterion: Annotated[
        str, typer.Option(help="Rank by this criterion's ratings; by default, as labelers ranked.")
    ] = "",
    names: Annotated[bool, typer.Option("--names", help="Name the labelers; by default they have pseudonyms.")] = False,
    report: ReportFile = None,
) -> None:
    """Export judgments from a label store."""
    from preferences.database import require_store
    from preferences.formats.exchange import export
    from preferences.formats.registry import format_to_write

    chosen = format_to_write(form)
    require_store(store)
    with open_store(store) as opened, console.status("writing"):
        found, num_rows = export(opened, chosen, out, batch=batch, criterion=criterion, with_names=names)
    print_warnings(found, report)
    typer.echo(f"{num_rows:,} rows of {chosen.name} ({chosen.description}) in {out}")


TasksPerPrompt = Annotated[
    int, typer.Option(min=1, help="Tasks made of each prompt; with --tasks, the most of one prompt.")
]
NumTasks = Annotated[
    int, typer.Option(min=0, help="Tasks in all, for which the prompts compete; 0 = --tasks-per-prompt of each.")
]
Judges = Annotated[list[Path] | None, typer.Option(help="A reward model that selects comparisons; may repeat.")]
Choose = Annotated[
    str,
    typer.Option(
        help="How --judge selects: large-gap, information, near-tie, disagreement, or uniform (docs/labels-tasks.md);"
        " without a --judge, tasks are selected uniformly."
    ),
]


@label_app.command("sample")
def sample_for_labelers(
    policies: Annotated[list[Path], typer.Argument(help="Model directories. Every policy answers every prompt.")],
    prompts: Annotated[str, typer.Option(help="Prompts: JSONL, CSV, Parquet or a hub id (docs/data.md).")],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to.")],
    responses: Annotated[int, typer.Option(help="Responses per task: 2 to 9 to rank, or 1 to rate alone.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Samples per policy and prompt.")] = 4,
    tasks_per_prompt: TasksPerPrompt = 1,
    tasks: NumTasks = 0,
    judge: Judges = None,
    choose: Choose = "large-gap",
    weight: Weights = None,
    labelers: Annotated[int, typer.Option(min=1, help="How many labelers judge each task.")] = 1,
    max_new_tokens: Annotated[
        int,
        typer.Option(min=1, help="Maximum length of a response, in tokens; less if the longest prompt leaves less."),
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling and selecting.")] = 0,
) -> None:
    """Sample policies and make labeling tasks; with --judge, those that a rule selects by the reward models' scores."""
    from reward.collect import TaskSelection, sample_tasks
    from stages.reports.text import count_of
    from training.data import DataConfig, read_prompts

    read = read_prompts(DataConfig(source=prompts))
    rule = _rule_for(choose, judge or [], responses, has_weights=bool(weight))
    length = length_that_fits(policies, read, max_new_tokens)
    selection = TaskSelection(batch, rule, responses, tasks_per_prompt, seed, num_tasks=tasks)
    with console.status(f"sampling {len(policies)} x {samples} responses to {len(read):,} prompts"):
        made = sample_tasks(
            policies,
            judge or [],
            read,
            selection,
            num_samples=samples,
            max_new_tokens=length,
            temperature=temperature,
            weights=read_weights(weight),
        )
    if not made:
        raise ValueError(f"{prompts}: no prompt has {responses} different responses; try more --samples")
    with open_store(store) as opened:
        opened.add_tasks(made, batch=batch, num_labelers=labelers)
    judged = len({task.prompt for task in made})
    number = f"{count_of(len(made), 'task')} of {count_of(judged, 'prompt')}"
    typer.echo(f"{number}, selected by {rule.name}; in batch {batch!r} of {store}")
    if judged < len(read) and not tasks:
        typer.echo(
            f"{len(read) - judged:,} of {len(read):,} prompts are left out: the policies gave fewer than {responses}"
            " different responses to each"
        )


def _rule_for(choose: str, judges: Sequence[Path], num_responses: int, *, has_weights: bool) -> "Rule":
    """Returns the rule that chooses the responses of a task. Raises: ValueError for options that do not fit."""
    from preferences.task_selection import RULES

    if has_weights and not judges:
        raise ValueError("--weight sets the weight of a --judge's objective, but no --judge is given")
    if choose not in RULES:
        raise ValueError(f"--choose {choose!r}: one of {', '.join(RULES)} was expected")
    rule = RULES[choose] if judges else RULES["uniform"]
    if judges and len(judges) < rule.num_models:
        raise ValueError(f"--choose {choose} compares reward models; {rule.num_models} --judge or more were expected")
    if not 1 <= num_responses <= MAX_RESPONSES:
        raise ValueError(f"--responses {num_responses}: 1 to {MAX_RESPONSES} were expected")
    if num_responses < MIN_RESPONSES and rule.num_models:
        raise ValueError(
            f"--responses {num_responses}: single responses are drawn uniformly, but --choose {choose} compares"
            " responses; no --judge was expected"
        )
    return rule


@label_app.command("outputs")
def label_outputs(
    outputs: Annotated[
        list[str],
        typer.Argument(
            help="NAME=FILE per model, with --prompts; or one file whose rows hold a prompt and its responses. With"
            " several models, labelers rank the responses; with one, they rate each response."
        ),
    ],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to.")],
    prompts: Annotated[
        str, typer.Option(help="The prompts that the outputs answer: JSONL, CSV, Parquet or a hub id.")
    ] = "",
    labelers: Annotated[int, typer.Option(min=1, help="How many labelers judge each task.")] = 1,
) -> None:
    """Make one labeling task per prompt from files of model outputs.

    Repeating the command adds nothing. A changed prompt or response makes a new task, and the old one stays.
    """
    from files.rows import read_source
    from preferences.formats.exchange import tasks_of_rows
    from stages.reports.text import count_of

    if not prompts and (len(outputs) > 1 or "=" in outputs[0]):
        raise ValueError("--prompts is missing; the prompts that these outputs answer were expected")
    tasks, num_same = tasks_of_files(outputs, prompts) if prompts else tasks_of_rows(read_source(outputs[0]))
    if not tasks:
        why = "no prompt has two different responses" if num_same else "there are no rows; at least one was expected"
        raise ValueError(f"{prompts or outputs[0]}: {why}")
    with open_store(store) as opened:
        stored = [one.task for one in opened.tasks(batch)]
        opened.add_tasks(tasks, batch=batch, num_labelers=labelers)
    num_new = len({task.task_id for task in tasks} - {task.task_id for task in stored})
    made = f"{count_of(num_new, 'new task')} in batch {batch!r} of {store}, each for {count_of(labelers, 'labeler')}"
    there = f"; {len(tasks) - num_new:,} already there; the batch now has {count_of(len(stored) + num_new, 'task')}"
    typer.echo(made + (there if stored else ""))
    if num_same:
        left_out = f"{count_of(num_same, 'prompt')} {'is' if num_same == 1 else 'are'} left out"
        typer.echo(f"{left_out}: all responses to it are the same, or the prompt came twice")


@label_app.command("serve")
def serve_labels(
    store: Store,
    config: LabelToml = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    public_url: PublicUrl = "",
    new: Annotated[bool, typer.Option("--new", help="Create the store if it does not exist.")] = False,
) -> None:
    """Serve the labeling pages and their API. If there is no lead yet, print a one-time link for one."""
    from preferences.database import require_store
    from preferences.page.app import serve

    if not new:
        require_store(store, "; a store that exists, or --new to create one, was expected")
    merged = labeling_config(config, public_url)
    serve(store, merged, host=host, port=port, announce=typer.echo)


@label_app.command("invite")
def invite_labeler(
    name: Annotated[str, typer.Argument(help="The account's name. Pages show it; exports have a pseudonym.")],
    store: Store,
    lead: Annotated[bool, typer.Option("--lead", help="Invite a lead instead of a labeler.")] = False,
    config: LabelToml = None,
    public_url: PublicUrl = "",
) -> None:
    """Make a one-time link for somebody new, or for somebody who lost their key. It voids an older link."""
    server = labeling_config(config, public_url).server
    with _people(store) as accounts:
        link = server.link(accounts.invite(name, "lead" if lead else "labeler"))
    typer.echo(f"Send this link to {name}. It works once, within a week, and shows the key to sign in with:\n{link}")
    if not server.public_url:
        console.print(
            "It points to port 8100 of this machine. If the server has another port or address, use --public-url.",
            markup=False,
        )


@label_app.command("person")
def export_person(
    name: Annotated[str, typer.Argument(help="A labeler's or lead's name.")],
    store: Store,
    out: Annotated[Path, typer.Option(help="A new .json file.")],
) -> None:
    """Export everything that the store holds about one person."""
    from files.atomic import atomic_file

    if out.exists():
        raise ValueError(f"{out}: already exists; a new path was expected")
    with _people(store) as accounts:
        held = accounts.held_about(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as temporary:
        temporary.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    typer.echo(f"{len(held['judgments']):,} judgments of {name} ({held['pseudonym']}), and everything else, in {out}")


@label_app.command("erase")
def erase_person(
    name: Annotated[str, typer.Argument(help="A labeler's or lead's name.")],
    store: Store,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a person: name, account, links and notes. Judgments stay, under a pseudonym."""
    with _people(store) as accounts:
        if name not in accounts.pseudonyms():
            raise ValueError(f"name {name!a}: the store holds nothing under this name")
        if not yes:
            typer.confirm(f"Erase {name} from {store}? It cannot be undone.", abort=True)
        pseudonym = accounts.erase(name)
    typer.echo(f"{name} is erased; the judgments stay, as those of {pseudonym}. Backups still hold the name.")


@label_app.command("backup")
def backup_store(
    store: Store, out: Annotated[Path, typer.Option(help="A new file, which is itself a SQLite label store.")]
) -> None:
    """Copy a label store into one file while labelers work."""
    from preferences.backup import backup

    with console.status("copying"):
        num_tasks, num_judgments = backup(store, out)
    typer.echo(f"{num_tasks:,} tasks with {num_judgments:,} judgments in {out}")


@label_app.command("restore")
def restore_store(
    backup: Annotated[Path, typer.Argument(help="A file that heed label backup wrote.")],
    store: Annotated[str, typer.Option(help="A new file path, or the URL of an empty database.", show_default=False)],
    current: Annotated[
        str, typer.Option(help="The store as it was last, or a newer backup: who was erased or closed since, stays so.")
    ] = "",
) -> None:
    """Make a new label store from a backup. Without --current, all accounts come back closed."""
    from preferences.backup import restore

    with console.status("restoring"):
        found = restore(backup, store, current=current)
    typer.echo(f"{found.num_tasks:,} tasks with {found.num_judgments:,} judgments in {store}")
    if current:
        typer.echo(f"since the backup, {found.num_erased} people were erased and {found.num_closed} accounts closed")
    else:
        typer.echo(
            f"all {found.num_closed} accounts are closed, because nothing says who was shut out since the backup. heed"
            " label serve prints a link for a lead, who admits people; erase again whoever was erased since."
        )


def open_store(url_or_path: str) -> "LabelStore":
    """Opens a label store, or creates one and says so. Raises: ValueError for a damaged one."""
    from preferences.database import create_or_check
    from preferences.store import LabelStore

    created = create_or_check(url_or_path)
    store = LabelStore(url_or_path)
    if created:
        console.print(created, markup=False)
    return store


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


def _summary(found: "ImportedLabels", done: str) -> str:
    judgments = found.judgments
    labelers = {judgment.labeler for judgment in judgments}
    lines = [
        f"{found.report.num_rows:,} rows: {len(found.found_tasks):,} tasks, "
        + (f"{len(judgments):,} judgments by {_names(sorted(labelers))}" if judgments else "not yet judged")
        + f"; {done}",
        *(f"  {count:>7,}  {kind}" for kind, count in found.report.counts().items()),
    ]
    return "\n".join(lines)


def _names(labelers: Sequence[str]) -> str:
    return ", ".join(labelers) if len(labelers) <= 3 else f"{len(labelers):,} labelers"


@contextmanager
def _people(store: str) -> "Iterator[Accounts]":
    from preferences.accounts import Accounts
    from preferences.database import require_store

    require_store(store)
    accounts = Accounts(store)
    try:
        yield accounts
    finally:
        accounts.close()


def labeling_config(path: Path | None, public_url: str) -> "LabelingConfig":
    """Returns the file's configuration, with the public address of the command line if there is one."""
    from preferences.page.config import LabelingConfig

    config = LabelingConfig.load(path) if path is not None else LabelingConfig()
    return config.with_server({"public_url": public_url}) if public_url else config


def tasks_of_files(specs: Sequence[str], prompts: str) -> tuple[list[Task], int]:
    """Makes one task per prompt from files of outputs, NAME=FILE, each with one model's response to every prompt.

    A prompt's row may have a `warning`, which labelers see first.

    If several models wrote the same text, it is one response. Its source names them all, and so do the task's details,
    under `policies`: one list of names per response, as `heed compare` writes them.

    Returns the tasks, and the number of prompts that are left out because all their responses are the same.
    Raises: ValueError naming file and line of a malformed row, and prompts without a response.
    """
    from evaluation.inputs import named_specs, read_compared_prompts
    from evaluation.policies import SavedPolicy
    from preferences.formats.exchange import content_warning, different_tasks, task_of_outputs
    from training.data import DataConfig, read_rows

    asked = read_compared_prompts(DataConfig(source=prompts))
    warnings = [content_warning(where, row) for where, row in read_rows(DataConfig(source=prompts))]
    policies = [SavedPolicy.open(name, spec, asked, allow_empty=True) for name, spec in named_specs(specs, "outputs")]
    texts = [{row.prompt_id: row.text for row in reversed(policy.responses)} for policy in policies]
    sources = [policy.name for policy in policies]
    responses = [dict(zip(sources, (own[prompt.prompt_id] for own in texts), strict=True)) for prompt in asked]
    found = zip(asked, responses, warnings, strict=True)
    return different_tasks([task_of_outputs(prompt.messages, own, warning) for prompt, own, warning in found])
