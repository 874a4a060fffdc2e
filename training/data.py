"""Reading text, conversations and prompts from hub ids and files, through `datasets`, with errors that name the row."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from pydantic import Field

from training.config import Config

LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}


class DataConfig(Config):
    """Where rows come from: a local file (JSONL, Parquet or plain text, .gz allowed) or a hub id with its split.

    A plain-text file gives one row a paragraph (blank lines between). `field` holds the text of a row.
    """

    source: str
    split: str = "train"
    field: str = "text"
    max_rows: int = Field(default=0, ge=0)  # 0 = all


def read_rows(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream (where, row); `where` names file and row for error messages. Hub data sets are never held whole."""
    path = Path(data.source)
    suffix = Path(data.source.removesuffix(".gz")).suffix
    if suffix not in LOADERS and not path.exists():
        rows: Any = _load_from_hub(data)
        where: Callable[[int], str] = lambda index: f"{data.source}: row {index + 1}"  # noqa: E731
    elif not path.is_file():
        raise ValueError(f"{path}: no such file")
    elif LOADERS.get(suffix) == "json":
        yield from _limited(_read_jsonl(path), data.max_rows)
        return
    elif suffix in LOADERS:
        options = {"sample_by": "paragraph"} if LOADERS[suffix] == "text" else {}
        rows = datasets.load_dataset(LOADERS[suffix], data_files=str(path), split="train", streaming=True, **options)
        where = lambda index: f"{path}: row {index + 1}"  # noqa: E731
    else:
        raise ValueError(f"{path}: suffix {suffix!r}; one of {sorted(LOADERS)} (.gz allowed) or a hub id was expected")
    yield from _limited(((where(index), row) for index, row in enumerate(rows)), data.max_rows)


def _limited(rows: Iterator[tuple[str, dict[str, Any]]], limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, row in enumerate(rows):
        if limit and index >= limit:
            return
        yield row


def _load_from_hub(data: DataConfig) -> Any:
    try:
        return datasets.load_dataset(data.source, split=data.split, streaming=True)
    except Exception as error:  # the hub's clients raise many kinds; each means the same to the user
        raise ValueError(
            f"source {data.source!r} is neither a file here nor a data set that the hub gave"
            f" (split {data.split!r}): {type(error).__name__}: {error}"
        ) from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Line by line rather than through `datasets`, whose parser does not say which line is malformed."""
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}: line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: {type(row).__name__} found; a JSON object was expected")
        yield where, row


def _lines(path: Path) -> Iterator[bytes]:
    """Errors: ValueError naming a .gz file that is cut short or is none."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file: {error}") from None


def text_field(where: str, row: Mapping[str, Any], field: str) -> str:
    """A non-empty string field of a row. Errors: ValueError naming file, line and field."""
    if field not in row:
        raise ValueError(f"{where}: field {field!r} is missing; found {sorted(row)}")
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is {type(value).__name__}; a string was expected")
    if not value.strip():
        raise ValueError(f"{where}: field {field!r} is empty; text was expected")
    return value


def messages_field(where: str, row: Mapping[str, Any], *, ends_with: str) -> list[dict[str, str]]:
    """The `messages` of a row (TRL's conversational form), checked; the last must come from `ends_with`.

    `{"prompt": ..., "completion": ...}` rows of two strings are read as a user's turn and the assistant's.
    Errors: ValueError naming file, line and field.
    """
    if "messages" not in row and "prompt" in row:
        turns = [{"role": "user", "content": text_field(where, row, "prompt")}]
        if ends_with == "assistant":
            turns.append({"role": "assistant", "content": text_field(where, row, "completion")})
        return turns
    return checked_messages(where, row.get("messages"), "messages", ends_with=ends_with)


def checked_messages(where: str, messages: Any, field: str, *, ends_with: str) -> list[dict[str, str]]:
    """The turns in `field`. Errors: ValueError naming file, line and field."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: field {field!r} is {type(messages).__name__}; a non-empty list was expected")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise ValueError(f"{where}: field '{field}[{index}].role': system, user or assistant was expected")
        text_field(f"{where}: {field}[{index}]", message, "content")
    if messages[-1]["role"] != ends_with:
        raise ValueError(
            f"{where}: field '{field}[{len(messages) - 1}].role' is {messages[-1]['role']!r};"
            f" the last turn must be the {ends_with}'s"
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def read_texts(sources: Sequence[DataConfig]) -> Iterator[str]:
    """The texts of all sources in order."""
    for data in sources:
        for where, row in read_rows(data):
            yield text_field(where, row, data.field)


def read_conversations(sources: Sequence[DataConfig]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(where, messages) of demonstrations, each ending with the assistant's response."""
    for data in sources:
        for where, row in read_rows(data):
            yield where, messages_field(where, row, ends_with="assistant")


class Prompt(Config):
    """A prompt with its name; `kind` groups prompts in reports."""

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    kind: str


def read_prompts(data: DataConfig) -> list[Prompt]:
    """Prompts, each ending with a user's turn. Errors: ValueError naming file, line, field; duplicate ids."""
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for index, (where, row) in enumerate(read_rows(data)):
        prompt_id = str(row.get("prompt_id", index))
        if prompt_id in seen:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is already that of {seen[prompt_id]}")
        seen[prompt_id] = where
        messages = messages_field(where, row, ends_with="user")
        prompts.append(Prompt(prompt_id=prompt_id, messages=tuple(messages), kind=str(row.get("kind", ""))))
    if not prompts:
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    return prompts
