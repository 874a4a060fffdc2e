"""Writes docs/reference from the code: `python -m heed.reference`, or `make reference`.

Pages come from the descriptions of config fields and from the help of commands; a test holds that they are current.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperGroup
from typer.main import get_command

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_HEADER = "<!-- Written by `make reference`; edit the code instead. -->"
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {}"}
MAX_DEFAULT = 40  # characters of a default in a table


def pages() -> dict[str, str]:
    """The text of each page of docs/reference."""
    return {"configuration.md": configuration_page(), "cli.md": cli_page()}


# --- configuration ---------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Every section of a job file, and of the labeling server's configuration."""
    from jobs.job import BUILT_IN_JOB
    from labeling.config import LabelingConfig

    shared: dict[str, type[BaseModel]] = {}
    top = {name: field for name, field in BUILT_IN_JOB.model_fields.items() if not _models(field.annotation)}
    parts = [
        _HEADER,
        "# Configuration",
        'A job is a TOML file; `heed run --set ppo.kl_coef=0.05` overrides one key. A job with `base = "other.toml"`'
        " (a path relative to the file) inherits what it does not say: tables are merged, anything else is replaced."
        " Unknown keys are refused. `runs/NAME/job.toml` records the job with all defaults.",
        "Keys of a job, above its sections:",
        _table(top, shared),
    ]
    for name, field in BUILT_IN_JOB.model_fields.items():
        for model in _models(field.annotation):
            kind = model.model_fields.get("kind")
            tag = get_args(kind.annotation) if kind is not None and kind.is_required() else ()
            title = f'[{name}] with kind = "{tag[0]}"' if tag else f"[{name}]"
            parts += [f"## `{title}`", _intro(model), _table(model.model_fields, shared)]
    parts += ["# Tables in several sections"]
    parts += _shared_tables(shared)
    parts += ["# Labeling", "`heed label serve --config FILE.toml` reads these keys."]
    own: dict[str, type[BaseModel]] = {}
    parts += [_intro(LabelingConfig), _table(LabelingConfig.model_fields, own), *_shared_tables(own)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shared_tables(shared: dict[str, type[BaseModel]]) -> list[str]:
    """A heading and a table for each model; tables may name further models."""
    parts: list[str] = []
    done: set[str] = set()
    while todo := [name for name in shared if name not in done]:
        for name in todo:
            done.add(name)
            parts += [f"## {name}", _intro(shared[name]), _table(shared[name].model_fields, shared)]
    return parts


def _intro(model: type[BaseModel]) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (model.__doc__ or "").strip().split("\n\n"))


def _table(fields: dict[str, FieldInfo], shared: dict[str, type[BaseModel]]) -> str:
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        for model in _models(field.annotation):
            shared[_title(model)] = model
        cells = (f"`{name}`", _type(field), _default(field), field.description or "")
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(rows)


def _title(model: type[BaseModel]) -> str:
    own = model.model_config.get("title")
    return own or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model.__name__.removesuffix("Config")).capitalize()


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The config classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _type(field: FieldInfo) -> str:
    """A field's type and bounds, in words."""
    bounds = [
        text.format(bound) for name, text in _BOUNDS.items() if (bound := _bound(field.metadata, name)) is not None
    ]
    return ", ".join([_type_words(field.annotation), *bounds])


def _bound(metadata: Iterable[Any], name: str) -> Any:
    return next((getattr(item, name) for item in metadata if getattr(item, name, None) is not None), None)


def _type_words(annotation: Any) -> str:
    args = [part for part in get_args(annotation) if part is not type(None)]
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        title = _title(annotation)
        return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        inner = [part for part in args if part is not Ellipsis]
        return (
            f"list of {_type_words(inner[0])}" if Ellipsis in args else f"list of {len(inner)}: {_type_words(inner[0])}"
        )
    if origin is dict:
        return f"table of {_type_words(args[1])}"
    if origin is not None:  # optional, or annotated
        return _type_words(args[0])
    names = {bool: "true or false", int: "integer", float: "number", str: "string", Path: "path"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    """A field's default as it would be written in TOML."""
    if field.is_required():
        return "required"
    value, lowest = field.get_default(call_default_factory=True), _bound(field.metadata, "ge")
    if value is None:
        return "absent"
    if isinstance(value, BaseModel):
        return "its defaults"
    if lowest is not None and value < lowest:
        return "derived"
    text = json.dumps(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`" if len(text) <= MAX_DEFAULT else "see the code"


# --- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its arguments and options."""
    from heed.cli import app

    parts = [_HEADER, "# Commands", "`heed COMMAND --help` shows the same."]
    for name, command in _commands("heed", get_command(app)):
        context = typer.Context(command, info_name=name)
        parts += [f"## `{name}`", _unwrapped(command.help or "")]
        records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
        rows = [(left, right) for left, right in records if not left.startswith("--help")]
        if rows:
            lines = (f"| `{_cell(left)}` | {_cell(right)} |" for left, right in rows)
            parts.append("\n".join(["| argument or option | |", "|---|---|", *lines]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command below this one by its full name."""
    if not isinstance(command, TyperGroup):
        yield name, command
        return
    for inner, found in command.commands.items():
        yield from _commands(f"{name} {inner}", found)


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
