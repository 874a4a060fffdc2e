"""Writes docs/reference from the code: `python -m benchmarks.reference`, or `make reference`.

One page per section of a job, with a heading per key, and one page per command, from the descriptions of config fields
and the help of commands; benchmarks/command_examples.py has the commands' examples. It also updates the list of pages
in mkdocs.yml. A test checks that all of it is current.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperGroup
from typer.main import get_command

from benchmarks.command_examples import EXAMPLES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MKDOCS = ROOT / "mkdocs.yml"
_HEADER = "<!-- Written by `make reference`; edit the code instead. -->"
_NAV = re.compile(
    r"(?<=# written by `make reference`: begins\n).*?(?=^ *# written by `make reference`: ends$)", re.M | re.S
)
_BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {}"}
_VALUES = {
    "<list[str]>": "TEXT",
    "<str>": "TEXT",
    "<path>": "PATH",
    "<list[Path]>": "PATH",
    "<int>": "INTEGER",
    "<int range>": "INTEGER",
    "<list[int]>": "INTEGER",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
}
MAX_DEFAULT = 40  # characters of a default
READ_BY = {  # commands that read the files of these pages, which are no sections of a job
    "job/labeling.md": "heed label serve --config FILE.toml",
}


def pages() -> dict[str, str]:
    """The text of each page by its path in docs/reference."""
    return configuration_pages() | command_pages()


def with_nav(config: str) -> str:
    """Returns mkdocs.yml with the current list of reference pages between its two markers.

    Raises: ValueError if the markers are missing.
    """
    lines = ["- Job file:", "    - All keys: reference/configuration.md"]
    sections = _sections()
    lines += [f'    - "{section.title}": reference/{section.page}' for section in sections if not section.is_table]
    lines += ["    - Tables in sections:"]
    lines += [f"        - {section.title}: reference/{section.page}" for section in sections if section.is_table]
    lines += ["- Commands:", "    - All commands: reference/cli.md"]
    lines += [f"    - {command.name}: reference/{command.page}" for command in _commands()]
    block = "".join(f"      {line}\n" for line in lines)
    written, count = _NAV.subn(lambda _: block, config)
    if count != 1:
        raise ValueError(f"mkdocs.yml: {count} pairs of markers; one was expected")
    return written


# --- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    title: str  # "[ppo]", or a shared table's, such as "Optimizer"
    page: str  # its path in docs/reference
    model: type[BaseModel]
    is_table: bool = False


def _sections() -> list[_Section]:
    """The sections of a job, then the file of the labeling server, then shared tables."""
    from heed.jobs.job import BUILT_IN_JOB
    from preferences.page.config import LabelingConfig

    sections = []
    for name, field in BUILT_IN_JOB.model_fields.items():
        for model in _models(field.annotation):
            kind = model.model_fields.get("kind")
            tag = get_args(kind.annotation)[0] if kind is not None and kind.is_required() else ""
            title = f"[{name}] kind = '{tag}'" if tag else f"[{name}]"
            sections.append(_Section(title, f"job/{name}{'-' if tag else ''}{tag}.md", model))
    sections.append(_Section("Labeling server", "job/labeling.md", LabelingConfig))
    shared: dict[str, type[BaseModel]] = {}
    todo = [section.model for section in sections]
    while todo:
        inner = [model for field in todo.pop(0).model_fields.values() for model in _models(field.annotation)]
        todo += [model for model in inner if _title(model) not in shared]
        shared |= {_title(model): model for model in inner}
    return sections + [_Section(title, _table_page(title), model, True) for title, model in shared.items()]


def configuration_pages() -> dict[str, str]:
    """A page per section and shared table, and configuration.md, which lists all keys."""
    from heed.jobs.job import BUILT_IN_JOB

    sections = _sections()
    uses = _uses(sections)
    written = {}
    for section in sections:
        title = section.title if section.is_table or not section.title.startswith("[") else f"`{section.title}`"
        parts = [_HEADER, f"# {title}", _intro(section.model)]
        if section.page in READ_BY:
            parts.append(f"`{READ_BY[section.page]}` reads these keys.")
        parts += [f"Used by {', '.join(uses[section.title])}."] if section.is_table else []
        parts += _keys(section.model.model_fields)
        written[section.page] = _page(parts, depth=2)
    top = {name: field for name, field in BUILT_IN_JOB.model_fields.items() if not _models(field.annotation)}
    parts = [
        _HEADER,
        "# All keys of a job",
        'A job is a TOML file; `heed run --set ppo.kl.coef=0.05` overrides one key. A job with `base = "other.toml"`'
        " (a path relative to the file) inherits what it does not say: tables are merged, anything else is replaced."
        " Unknown keys are refused. `runs/NAME/job.toml` records the job with all defaults.",
        "## Sections",
        _list_of_keys(section for section in sections if not section.is_table),
        "## Tables in sections",
        "A key such as `optimizer` or `batch` holds a table with these keys: `optimizer = { learning_rate = 1e-5 }`.",
        _list_of_keys(section for section in sections if section.is_table),
        "## Above the sections",
        *_keys(top, level=3),
    ]
    return {"configuration.md": _page(parts, depth=1)} | written


def _list_of_keys(sections: Iterable[_Section]) -> str:
    rows = ["| where | keys |", "|---|---|"]
    for section in sections:
        keys = ", ".join(f"[{name}]({section.page}#{name})" for name in section.model.model_fields)
        title = section.title if section.is_table or not section.title.startswith("[") else f"`{section.title}`"
        rows.append(f"| [{title}]({section.page}) | {keys} |")
    return "\n".join(rows)


def _uses(sections: list[_Section]) -> dict[str, list[str]]:
    """Links to the keys that hold each shared table, by the table's title."""
    uses: dict[str, list[str]] = {}
    for section in sections:
        for name, field in section.model.model_fields.items():
            place = section.title.split("]")[0].strip("[").lower()
            link = f"[`{place}.{name}`](../{section.page}#{name})"
            for model in _models(field.annotation):
                if link not in (of_table := uses.setdefault(_title(model), [])):
                    of_table.append(link)
    return uses


def _keys(fields: dict[str, FieldInfo], level: int = 2) -> list[str]:
    """A heading, a description, and a line with type and default for each key."""
    parts = []
    for name, field in fields.items():
        parts += [f"{'#' * level} `{name}`", field.description or "", f"Type: {_type(field)}. {_default(field)}."]
    return parts


def _intro(model: type[BaseModel]) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (model.__doc__ or "").strip().split("\n\n"))


def _page(parts: Iterable[str], depth: int) -> str:
    """Joins paragraphs, and links the pages that they name; the page is `depth` folders below docs."""
    text = "\n\n".join(part for part in parts if part) + "\n"
    return re.sub(r"(?<![\w/\[`])docs/([\w-]+\.md)", rf"[docs/\1]({'../' * depth}\1)", text)


def _table_page(title: str) -> str:
    return f"tables/{title.lower().replace(' ', '-')}.md"


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
        return f"[{title.lower()}](../{_table_page(title)})"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        inner = [part for part in args if part is not Ellipsis]
        return (
            f"list of {_type_words(inner[0])}" if Ellipsis in args else f"list of {len(inner)}: {_type_words(inner[0])}"
        )
    if origin is dict:
        return f"table of {_type_words(args[1])}"
    if origin in (Union, UnionType):  # optional, or kinds of table
        return ", ".join(map(_type_words, args))
    if origin is not None:  # annotated
        return _type_words(args[0])
    names = {bool: "true or false", int: "integer", float: "number", str: "string", Path: "path", Any: "any value"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    """Returns a field's default as one would write it in TOML."""
    if field.is_required():
        return "Required"
    value, lowest = field.get_default(call_default_factory=True), _bound(field.metadata, "ge")
    if value is None:
        return "Default: absent"
    if isinstance(value, BaseModel):
        is_one_of_several = len(_models(field.annotation)) > 1
        return f"Default: {_title(type(value)).lower()}" if is_one_of_several else "Default: the table's defaults"
    if lowest is not None and value < lowest:
        return "Default: derived"
    text = json.dumps(list(value) if isinstance(value, tuple) else value)
    return f"Default: `{text}`" if len(text) <= MAX_DEFAULT else "Default: see the code"


# --- the command line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Command:
    name: str  # "heed label import"
    panel: str  # the group of commands that it belongs to in `heed --help`
    command: Any

    @property
    def page(self) -> str:
        return f"commands/{self.name.removeprefix('heed ').replace(' ', '-')}.md"

    @property
    def help(self) -> str:
        return "\n\n".join(" ".join(part.split()) for part in (self.command.help or "").split("\n\n"))


def command_pages() -> dict[str, str]:
    """A page per command with examples, arguments and options, and cli.md, which lists all commands.

    Raises: ValueError for a command without an example, and for examples of an unknown command.
    """
    commands = _commands()
    names = {command.name for command in commands}
    if names != set(EXAMPLES):
        odd = sorted(names ^ set(EXAMPLES))
        raise ValueError(f"benchmarks/command_examples.py: examples of each command were expected; {odd}")
    parts = [_HEADER, "# All commands", "`heed COMMAND --help` shows a command's options in the terminal."]
    for panel in dict.fromkeys(command.panel for command in commands):
        rows = [f"| [`{c.name}`]({c.page}) | {_cell(_first_sentence(c.help))} |" for c in commands if c.panel == panel]
        parts += [f"## {panel}", "\n".join(["| command | what it does |", "|---|---|", *rows])]
    return {"cli.md": _page(parts, depth=1)} | {command.page: _command_page(command) for command in commands}


def _command_page(command: _Command) -> str:
    context = typer.Context(command.command, info_name=command.name)
    usage = " ".join([command.name, *command.command.collect_usage_pieces(context)])
    examples = "\n".join(["```", EXAMPLES[command.name].strip(), "```"])
    parts = [_HEADER, f"# `{command.name}`", command.help, f"Usage: `{usage}`", "## Examples", examples]
    records = [record for param in command.command.get_params(context) if (record := param.get_help_record(context))]
    rows = [(left, right) for left, right in records if not left.startswith("--help")]
    if rows:
        lines = (f"| `{_cell(_readable(left))}` | {_cell(right)} |" for left, right in rows)
        parts += ["## Arguments and options", "\n".join(["| name | meaning |", "|---|---|", *lines])]
    return _page(parts, depth=2)


def _commands() -> list[_Command]:
    """Every command, in the order of `heed --help`."""
    from heed.cli import app

    def below(name: str, panel: str, command: Any) -> Iterator[_Command]:
        if not isinstance(command, TyperGroup):
            yield _Command(name, panel, command)
            return
        children: Mapping[str, Any] = command.commands
        for inner, child in children.items():
            yield from below(f"{name} {inner}", panel or str(child.rich_help_panel), child)

    return list(below("heed", "", get_command(app)))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0]


def _readable(left: str) -> str:
    """An option's left column with TEXT, INTEGER, ... in place of Python's names of types."""
    for name, words in _VALUES.items():
        left = left.replace(name, words)
    return left


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    current = pages()
    for old in FOLDER.rglob("*.md"):
        if str(old.relative_to(FOLDER)) not in current:
            old.unlink()
    for name, text in current.items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
    MKDOCS.write_text(with_nav(MKDOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
