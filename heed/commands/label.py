"""Command lines for labels: in and out of a store, and the labeling server."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from heed.commands.options import Weights, read_weights
from stages.progress import console

if TYPE_CHECKING:
    from labeling.config import LabelingConfig
    from preferences.choosing import Method
    from preferences.formats.merging import Found
    from preferences.formats.parts import Oddity, Report
    from preferences.people import People
    from preferences.store import LabelStore

label_app = typer.Typer(no_args_is_help=True, help="Labels: published and own, in and out of the store.")

SHOWN_A_KIND = 10  # oddities that are told one by one; a report file has them all
STATUS_ROWS = 500

Store = Annotated[str, typer.Option(help="The label store: a file's path, or a database's URL.", show_default=False)]
LabelToml = Annotated[Path | None, typer.Option(help="TOML: title, instructions, batches, flags; docs/labels.md.")]
PublicUrl = Annotated[str, typer.Option(help="How people reach the server: https://labels.example.org, say.")]
Strict = Annotated[bool, typer.Option(help="Refuse the first oddity, instead of reporting it and going on.")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Where every oddity goes, as JSONL.")]


@label_app.command("import")
def import_labels(
    file: Annotated[str, typer.Argument(help="JSONL, JSON, Parquet (.gz allowed), a data set's folder or a hub id.")],
    store: Store = "",
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to; our own format names them itself.")] = "",
    form: Annotated[str, typer.Option("--format", help="What the rows are; docs/labels.md lists them.")] = "auto",
    objective: Annotated[str, typer.Option(help="What was judged by, where the rows do not say: helpful, say.")] = "",
    strict: Strict = False,
    check: Annotated[
        bool, typer.Option(help="Only read and report, as an import into an empty store, or into --store, would.")
    ] = False,
    report: ReportFile = None,
    split: Annotated[str, typer.Option(help="Of a data set's folder or a hub id.")] = "train",
    subset: Annotated[str, typer.Option(help="Of a hub id that has several.")] = "",
) -> None:
    """Bring judgments into a label store, all of a file or nothing. The same import again changes nothing."""
    from preferences.formats.registry import AUTO, format_to_read, sniff
    from reading.rows import read_source

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
                status.update(f"reading: {found.report.num_rows:,} rows, {len(found.report.oddities):,} oddities")
    tell(found.report, report)
    if not found.tasks:
        raise ValueError(f"{file}: {found.report.num_rows} rows, none of which holds a judgment; see above")
    with console.status("checking" if check else "storing"):
        _store(file, found, batch, store, only_check=check)
    typer.echo(_summary(found, "checked" if check else f"stored in {store}"))


def _store(file: str, found: "Found", batch: str, store: str, *, only_check: bool) -> None:
    """Store what was found. A check without a store is one against an empty store, which is thrown away."""
    from sqlalchemy.exc import DBAPIError

    from preferences.database import store_file
    from preferences.formats.exchange import store_found

    path = store_file(store) if store else None
    with ExitStack() as stack:
        if only_check and (not store or (path is not None and not path.exists())):
            store = str(Path(stack.enter_context(TemporaryDirectory(prefix="heed-check-"))) / "empty.sqlite")
            if not all(found.batches.values()):  # the rows name none, and none is asked for before there is a store
                batch = batch or "check"
        opened = stack.enter_context(open_store(store))
        try:
            store_found(opened, found, batch, only_check=only_check)
        except DBAPIError as error:  # a full disk, a server that went away, a lock that others keep
            raise ValueError(f"{file}: the database stored nothing of it: {error.orig}") from error


@label_app.command("export")
def export_labels(
    out: Annotated[Path, typer.Option(help="A new .jsonl, .json (also .gz) or .parquet file, or a folder.")],
    store: Store,
    form: Annotated[str, typer.Option("--format", help="docs/labels.md lists them; heed loses nothing.")] = "heed",
    batch: Annotated[str, typer.Option(help="This batch alone.")] = "",
    strict: Strict = False,
    report: ReportFile = None,
) -> None:
    """Write judgments out of a label store."""
    from preferences.database import require_store
    from preferences.formats.exchange import export
    from preferences.formats.registry import format_to_write

    chosen = format_to_write(form)
    require_store(store)
    with open_store(store) as opened, console.status("writing"):
        told, num_rows = export(opened, chosen, out, batch=batch, strict=strict)
    tell(told, report)
    typer.echo(f"{num_rows:,} rows of {chosen.name} ({chosen.description}) in {out}")


@label_app.command("sample")
def sample_for_labelers(
    policies: Annotated[list[Path], typer.Argument(help="Model directories; all of them answer every prompt.")],
    prompts: Annotated[str, typer.Option(help="Rows with prompt_id and messages that end with a user's turn.")],
    store: Store,
    batch: Annotated[str, typer.Option(help="The batch that the tasks go to.")],
    responses: Annotated[int, typer.Option(help="In a task, 2 to 9.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Drawn of every policy for every prompt.")] = 4,
    tasks_per_prompt: Annotated[int, typer.Option(min=1)] = 1,
    judge: Annotated[list[Path] | None, typer.Option(help="A reward model that chooses what is uncertain.")] = None,
    weight: Weights = None,
    evaluation_share: Annotated[float, typer.Option(help="Of the prompts, chosen uniformly in any case.")] = 0.1,
    labelers: Annotated[int, typer.Option(min=1, help="How many are to judge each task.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    seed: int = 0,
) -> None:
    """Put samples of policies before labelers. With reward models (--judge), those that they are least sure of."""
    from collect.label_sampling import Choosing, sample_tasks
    from training.data import DataConfig, read_prompts

    asked = read_prompts(DataConfig(source=prompts))
    if weight and not judge:
        raise ValueError("--weight is of a --judge's objectives, and none is given")
    method: Method = "uncertainty" if judge else "uniform"
    choosing = Choosing(batch, method, responses, tasks_per_prompt, evaluation_share, seed)
    with console.status(f"sampling {len(policies)} x {samples} responses to {len(asked):,} prompts"):
        tasks = sample_tasks(
            policies,
            judge or [],
            asked,
            choosing,
            num_samples=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            weights=read_weights(weight),
        )
    if not tasks:
        raise ValueError(f"{prompts}: no prompt has {responses} different responses; more --samples may give them")
    with open_store(store) as opened:
        opened.add_tasks(tasks, batch=batch, num_labelers=labelers)
    judged = len({task.prompt for task in tasks})
    typer.echo(f"{len(tasks):,} tasks of {judged:,} prompts, chosen by {method}; in batch {batch!r} of {store}")
    if judged < len(asked):
        typer.echo(
            f"{len(asked) - judged:,} of {len(asked):,} prompts are left out: the policies gave fewer than {responses}"
            " different responses to each"
        )


@label_app.command("serve")
def serve_labels(
    store: Store,
    config: LabelToml = None,
    host: Annotated[
        str, typer.Option(help="Where to listen. Beyond this machine, put a TLS proxy before it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535)] = 8100,
    public_url: PublicUrl = "",
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network of a proxy whose X-Forwarded headers are believed; may repeat."),
    ] = None,
    trusted_host: Annotated[
        list[str] | None, typer.Option(help="A further name that the server answers to; may repeat.")
    ] = None,
) -> None:
    """Serve the labeling page and its API. Where nobody leads yet, it prints a one-time link for a lead."""
    from labeling.serve import serve

    told = _labeling_config(config, public_url, trusted_proxy or [], trusted_host or [])
    serve(store, told, host=host, port=port, announce=typer.echo)


@label_app.command("invite")
def invite_labeler(
    name: Annotated[str, typer.Argument(help="It stands next to the judgments.")],
    store: Store,
    lead: Annotated[bool, typer.Option("--lead", help="Somebody who leads, instead of a labeler.")] = False,
    config: LabelToml = None,
    public_url: PublicUrl = "",
) -> None:
    """Make a one-time link for somebody new, or for somebody who lost their key. An older link of theirs is void."""
    server = _labeling_config(config, public_url, [], []).server
    with _people(store) as people:
        link = server.link(people.invite(name, "lead" if lead else "labeler"))
    typer.echo(f"Send this to {name}. It opens once, within a week, and shows the key to sign in with:\n{link}")
    if not server.public_url:
        console.print("The address is that of a server on this machine; --public-url says another.", markup=False)


@label_app.command("links")
def list_links(store: Store) -> None:
    """List one-time links that nobody has used yet."""
    from datetime import UTC, datetime

    with _people(store) as people:
        links = people.links()
    for link in links:
        until = datetime.fromtimestamp(link.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        typer.echo(f"{link.name}: {link.role}, until {until}, invited by {link.invited_by or 'unknown'}")
    if not links:
        console.print("no link is waiting to be used")


@label_app.command("revoke")
def revoke_link(name: Annotated[str, typer.Argument(help="Whose one-time link.")], store: Store) -> None:
    """Void the one-time link of somebody who has not used it. An account is closed on the page of people."""
    with _people(store) as people:
        people.revoke(name)
    typer.echo(f"the link of {name} no longer works")


@contextmanager
def _people(store: str) -> "Iterator[People]":
    from preferences.database import require_store
    from preferences.people import People

    require_store(store)
    people = People(store)
    try:
        yield people
    finally:
        people.close()


def _labeling_config(
    path: Path | None, public_url: str, proxies: Sequence[str], hosts: Sequence[str]
) -> "LabelingConfig":
    """The file's configuration with what the command line says of the server instead."""
    from labeling.config import LabelingConfig

    told = LabelingConfig.load(path) if path is not None else LabelingConfig()
    options = {"public_url": public_url, "trusted_proxies": tuple(proxies), "trusted_hosts": tuple(hosts)}
    return told.with_server({name: value for name, value in options.items() if value})


def open_store(url_or_path: str) -> "LabelStore":
    from preferences.store import LabelStore

    return LabelStore(url_or_path)


def tell(report: "Report", path: Path | None) -> None:
    """Oddities: counted by kind, the first of each one by one; all of them in the report file."""
    by_kind: dict[str, list[Oddity]] = {}
    for oddity in report.oddities:
        by_kind.setdefault(oddity.kind, []).append(oddity)
    for kind, count in report.counts().items():
        console.print(f"{kind}: {count:,}", style="bold", markup=False)
        for oddity in by_kind[kind][:SHOWN_A_KIND]:
            console.print(f"  {oddity.where}: {oddity.found}; {oddity.done}", markup=False)
        if count > SHOWN_A_KIND:
            console.print(f"  and {count - SHOWN_A_KIND:,} more" + ("" if path else " (--report FILE has them all)"))
    if path is not None:
        path.write_text("".join(json.dumps(vars(oddity)) + "\n" for oddity in report.oddities), encoding="utf-8")
        console.print(f"{len(report.oddities):,} oddities in {path}", markup=False)


def _summary(found: "Found", done: str) -> str:
    labelers = {act.labeler for act in found.judgments}
    told = found.report
    lines = [
        f"{told.num_rows:,} rows: {len(found.tasks):,} tasks, {len(found.judgments):,} judgments of"
        f" {_names(sorted(labelers))}; {done}",
        *(f"  {count:>7,}  {kind}" for kind, count in told.counts().items()),
    ]
    return "\n".join(lines)


def _names(labelers: Sequence[str]) -> str:
    return ", ".join(labelers) if 0 < len(labelers) <= 3 else f"{len(labelers):,} labelers"
