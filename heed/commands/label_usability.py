"""`heed label usability`: studies that compare labeling forms by load, usability, time and agreement."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stages.progress import console, results_console

if TYPE_CHECKING:
    from preferences.statistics.usability import UsabilityReport

usability_app = typer.Typer(
    no_args_is_help=True, help="Compare labeling forms: load, usability, seconds per task, agreement."
)

Name = Annotated[str, typer.Argument(help="The study's name, as in its file.", show_default=False)]
Store = Annotated[str, typer.Option(help="The label store: a file path or a database URL.", show_default=False)]


@usability_app.command("start")
def start_study(
    file: Annotated[
        Path, typer.Argument(help="TOML file: the forms, their batches and the labelers (docs/usability.md).")
    ],
    store: Store,
    config: Annotated[
        Path | None, typer.Option(help="The labeling server's TOML file: the settings that conditions leave out.")
    ] = None,
) -> None:
    """Start a study, or add labelers to a running one. The label server then leads each labeler through the forms."""
    from preferences import recording, usability
    from preferences.accounts import Accounts
    from preferences.database import require_store
    from preferences.names import COMMAND_LINE
    from preferences.page.config import LabelingConfig
    from preferences.page.study_config import StudyConfig
    from preferences.store import LabelStore

    asked = StudyConfig.load(file)
    try:
        study, forms = asked.study(LabelingConfig.load(config) if config is not None else LabelingConfig())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    require_store(store)
    with LabelStore(store) as opened, opened.writing() as connection:
        try:
            added = usability.start(connection, study, asked.labelers, opened.now())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        recording.log(connection, COMMAND_LINE, "started the usability study", study.name, opened.now())
    accounts = Accounts(store)
    for form in forms:
        accounts.store_instructions(form.version, form.instructions, form.flags)
    accounts.close()
    names = [one.name for one in study.conditions]
    for person in added:
        typer.echo(f"{person.labeler}: {', then '.join(names[index] for index in person.conditions)}")
    new = f"{len(added)} new" if len(added) < len(asked.labelers) else str(len(added))
    typer.echo(f"study {study.name!r} runs with {new} labelers, {study.tasks_per_condition} tasks with each form")


@usability_app.command("status")
def show_status(name: Name, store: Store) -> None:
    """Show each labeler's progress."""
    from preferences import usability
    from preferences.database import require_store
    from preferences.store import LabelStore

    require_store(store)
    with LabelStore(store) as opened, opened.reading() as connection:
        study = usability.require(connection, name)
        said = usability.answers(connection, name)
        for person in usability.participants(connection, name):
            num_done = sum(one.labeler == person.labeler for one in said)
            stage = usability.stage_of(connection, person.labeler) if num_done < len(study.conditions) else None
            now = ""
            if stage is not None and stage.study.name == name:
                now = f"; now {stage.condition.name}, {stage.num_answered} of {study.tasks_per_condition} tasks"
            typer.echo(f"{person.labeler}: {num_done} of {len(study.conditions)} forms finished{now}")
    typer.echo(f"study {name!r} {'was stopped' if study.stopped_at else 'is running'}")


@usability_app.command("stop")
def stop_study(name: Name, store: Store) -> None:
    """End a study, whether or not it is finished. Its batches then go to all labelers again, with the server's form."""
    from preferences import recording, usability
    from preferences.database import require_store
    from preferences.names import COMMAND_LINE
    from preferences.store import LabelStore

    require_store(store)
    with LabelStore(store) as opened, opened.writing() as connection:
        usability.stop(connection, name, opened.now())
        recording.log(connection, COMMAND_LINE, "stopped the usability study", name, opened.now())
    typer.echo(f"study {name!r} is stopped")


@usability_app.command("report")
def report_study(
    name: Name,
    store: Store,
    half_width: Annotated[
        list[str] | None,
        typer.Option(
            help="MEASURE=NUMBER: half width of the interval for which the report says how many labelers it needs;"
            " may repeat. A factor for seconds, such as seconds=1.1."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all numbers to this file, as JSON.", show_default=False)
    ] = None,
) -> None:
    """Report each form's load, usability, time, accuracy and agreement, and how the forms differ."""
    from files.records import as_json
    from preferences.database import require_store
    from preferences.statistics.usability import read_report
    from preferences.store import LabelStore

    widths = _half_widths(half_width or [])
    require_store(store)
    with LabelStore(store) as opened, opened.reading() as connection:
        found = read_report(connection, name, half_widths=widths)
    _print(found)
    if json_file is not None:
        text = json.dumps(as_json(found), indent=2, allow_nan=False, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
        console.print(str(json_file), markup=False)


@usability_app.command("export")
def export_study(
    name: Name,
    store: Store,
    out: Annotated[Path, typer.Option(help="New .jsonl file with one row per labeler and form.")],
    names: Annotated[bool, typer.Option("--names", help="Write labelers' names instead of pseudonyms.")] = False,
) -> None:
    """Export the answers to the questionnaires, with scores, comments and the form's place in the labeler's order."""
    from files.atomic import atomic_file
    from preferences.database import require_store
    from preferences.store import LabelStore

    if out.exists():
        raise ValueError(f"{out}: already exists; a new path was expected")
    require_store(store)
    with LabelStore(store) as opened, opened.reading() as connection:
        rows = _rows(connection, name, with_names=names)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as temporary:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        temporary.write_text(text, encoding="utf-8")
    typer.echo(f"{len(rows)} questionnaires of study {name!r} in {out}")


def _rows(connection: Any, name: str, *, with_names: bool) -> list[dict[str, Any]]:
    from preferences import usability
    from preferences.questionnaire import LOAD, load_score, sus_score

    study = usability.require(connection, name)
    names = [one.name for one in study.conditions]
    order = {one.labeler: one.conditions for one in usability.participants(connection, name, with_names=with_names)}
    preferred = {usability.NO_PREFERENCE: "no preference", usability.NOT_ASKED: None, **dict(enumerate(names))}
    return [
        {
            "labeler": one.labeler,
            "condition": names[one.condition],
            "place": order[one.labeler].index(one.condition) + 1,
            "load": load_score(one.load),
            "sus": sus_score(one.sus),
            "load_ratings": {scale.name: rating for scale, rating in zip(LOAD, one.load, strict=True)},
            "sus_ratings": list(one.sus),
            "preferred": preferred[one.preferred],
            "comment": one.comment,
            "created_at": one.created_at,
        }
        for one in usability.answers(connection, name, with_names=with_names)
    ]


def _half_widths(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        key, _, width = text.partition("=")
        try:
            found[key] = float(width)
        except ValueError:
            raise ValueError(f"--half-width {text}: MEASURE=NUMBER was expected, such as load=5") from None
    return found


def _print(report: "UsabilityReport") -> None:
    from rich.table import Table

    from preferences.statistics.usability_tables import conclusions, usability_tables

    out = results_console()
    num_finished = sum(num for _, num in report.finished)
    out.print(
        f"Study {report.study}: {num_finished} of {report.num_labelers} labelers finished all forms", markup=False
    )
    for found in usability_tables(report):
        table = Table(*found.columns, title=f"\n{found.title}", title_justify="left", box=None, pad_edge=False)
        for row in found.rows:
            table.add_row(*row)
        out.print(table, markup=False)
    out.print()
    for sentence in (*conclusions(report), *report.notes):
        out.print(sentence, markup=False)
