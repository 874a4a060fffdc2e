"""Texts, conversations and prompts from files and the Hugging Face hub, with errors that name the row."""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from files.conversations import AUTO, NAMES, ConversationReader, Turns, hash_of
from files.fields import name_field, text_field
from files.rows import InvalidRows, OnInvalid, Row, Rows, read_source, valid_rows
from lm.progress import note_progress
from training.config import Config

OnOverlong = Literal["refuse", "skip", "truncate"]
Item = TypeVar("Item")


class SourceConfig(Config):
    """Where rows come from. A plain-text file gives one row per paragraph (separated by blank lines)."""

    source: str = Field(
        description="A local file (JSONL, a JSON list, CSV, Parquet or plain text, also .gz), a data set's folder, a"
        ' hub id, "world:NAME" for a file of the job\'s world, or "collect:rankings".'
    )
    split: str = Field(default="train", description="Split of a folder or hub data set.")
    subset: str = Field(default="", description="Subset (configuration) of a hub data set; empty = the default one.")
    skip_rows: int = Field(
        default=0, ge=0, description="Rows to skip at the beginning, such as those that another stage reads."
    )
    max_rows: int = Field(default=0, ge=0, description="Maximum number of rows to read; 0 = all.")
    on_invalid: OnInvalid = Field(
        default="refuse",
        description="What to do with malformed rows: `refuse` stops before training and counts them, `skip` leaves"
        " them out (docs/data.md).",
    )


class TextConfig(SourceConfig):
    """Where texts come from."""

    field: str = Field(default="text", description="Field that holds the text of a row.")


class DataConfig(SourceConfig):
    """Where conversations or prompts come from; docs/data.md shows the formats."""

    format: str = Field(
        default=AUTO,
        description=f"Format of the rows, one of {', '.join(NAMES)}; `auto` recognises it by the rows' fields.",
    )

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in NAMES:
            raise ValueError(f"format is {name!r}; one of {', '.join(NAMES)} was expected")
        return name


def overlong_field() -> OnOverlong:
    """The field of a stage that says what happens to rows that are too long."""
    on_overlong: OnOverlong = Field(
        default="refuse",
        description="What to do with rows that are too long: `refuse` stops before training, `skip` leaves them out,"
        " `truncate` cuts them (docs/data.md).",
    )
    return on_overlong


@dataclass(frozen=True)
class Overlong:
    """How many rows were longer than a limit, and how many of those were truncated or skipped."""

    num_rows: int = 0
    num_truncated: int = 0
    num_skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_truncated or self.num_skipped)

    def __str__(self) -> str:
        long = self.num_truncated + self.num_skipped
        counts = ((self.num_truncated, "truncated"), (self.num_skipped, "skipped"))
        return f"{long:,} of {self.num_rows:,} too long: " + ", ".join(f"{n:,} {what}" for n, what in counts if n)


def sum_of(counts: Iterable[Overlong]) -> Overlong:
    """Returns the counts of several sources together."""
    found = list(counts)
    return Overlong(
        sum(one.num_rows for one in found),
        sum(one.num_truncated for one in found),
        sum(one.num_skipped for one in found),
    )


@dataclass(frozen=True)
class SourceRows:
    """How many rows a source has. `unusual` counts the unusual ones by kind, such as "invalid (skipped)"."""

    source: str
    num_rows: int
    unusual: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, invalid: InvalidRows, unusual: Mapping[str, int]) -> "SourceRows":
        """Return the counts made while the rows were read, including rows that were left out."""
        skipped = {"invalid (skipped)": invalid.num_invalid} if invalid.num_invalid else {}
        return cls(invalid.source, invalid.num_rows, skipped | dict(unusual))

    def __bool__(self) -> bool:
        return bool(self.unusual)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} x {kind}" for kind, count in self.unusual.items())
        return f"of {self.num_rows:,} rows, {counts or 'none is unusual'}"

    @property
    def fact(self) -> tuple[str, str]:
        """Title and text for a report."""
        return f"Rows of {Path(self.source).name}", str(self)


def read_rows(data: SourceConfig, invalid: InvalidRows | None = None) -> Rows:
    """Stream (where, row); `where` names file and row for error messages. Hub data sets are never loaded whole."""
    last = data.max_rows and data.skip_rows + data.max_rows
    rows = read_source(data.source, split=data.split, subset=data.subset, max_rows=last, invalid=invalid)
    for _ in itertools.islice(rows, data.skip_rows):
        pass
    if invalid is not None:
        invalid.forget()  # do not count the rows skipped by `skip_rows`
    yield from rows


def read_valid(
    data: SourceConfig, read: Callable[[str, Row], Item], invalid: InvalidRows
) -> Iterator[tuple[str, Item]]:
    """Stream (where, `read(where, row)`) of the rows that are valid. Raises: ValueError as `InvalidRows.finish`."""

    def noted(where: str, row: Row) -> Item:
        note_progress()
        return read(where, row)

    return valid_rows(read_rows(data, invalid), noted, invalid)


def untold(_line: str) -> None:
    """Discard a line about what was read."""


def uncounted(_rows: SourceRows) -> None:
    """Discard the counts of a source's rows."""


def report_rows(
    invalid: InvalidRows,
    unusual: Mapping[str, int],
    tell: Callable[[str], None],
    count: Callable[[SourceRows], None] = uncounted,
) -> None:
    """Report how many rows of a source are unusual, and the messages about the first skipped rows."""
    rows = SourceRows.of(invalid, unusual)
    count(rows)
    for line in (*([f"{rows.source}: {rows}"] if rows else []), *invalid.first):
        tell(line)


def read_texts(
    sources: Sequence[TextConfig],
    tell: Callable[[str], None] = untold,
    count: Callable[[SourceRows], None] = uncounted,
) -> Iterator[str]:
    """Stream the texts of all sources, in order. After each, `tell` and `count` get what is unusual about its rows."""
    for data in sources:
        invalid = InvalidRows(data.source, data.on_invalid)
        for _, text in read_valid(data, partial(text_field, field=data.field), invalid):
            yield text
        report_rows(invalid, {}, tell, count)


def read_conversations(
    sources: Sequence[DataConfig],
    tell: Callable[[str], None] = untold,
    *,
    takes_texts: bool = False,
    count: Callable[[SourceRows], None] = uncounted,
) -> Iterator[tuple[str, Turns]]:
    """Stream (where, turns) of demonstrations, each ending with the assistant's response.

    With `takes_texts`, a plain text becomes a single turn of TEXT_ROLE; otherwise it is refused. After each source,
    `tell` receives lines with the number of conversations per format and with what is unusual about the rows; `count`
    receives the numbers of unusual rows.
    """
    for data in sources:
        invalid = InvalidRows(data.source, data.on_invalid)
        reader = ConversationReader("demonstration", data.format, takes_texts=takes_texts)
        yield from read_valid(data, reader.read, invalid)
        reader.check_format()
        tell(reader.summary(data.source))
        report_rows(invalid, reader.unusual(), tell, count)


class Prompt(Config):
    """A prompt with its id; `kind` groups prompts in reports. `row` has fields of its row that a reward reads.

    Prompts with the same `cluster` are not independent of each other; a prompt without one is independent of all.
    """

    prompt_id: str
    messages: tuple[dict[str, Any], ...]
    kind: str
    cluster: str = ""
    row: Row = Field(default_factory=dict)


def read_prompts(data: DataConfig, tell: Callable[[str], None] = untold) -> list[Prompt]:
    """Return all prompts. For `tell` and what it raises, see `stream_prompts`."""
    return [prompt for _, prompt in stream_prompts(data, tell)]


def _no_fields(_where: str, _row: Row) -> Row:
    return {}


@dataclass(frozen=True)
class RowFields:
    """The fields of its row that each prompt keeps. `of(where, row)` returns them, and raises ValueError for a row that
    has them wrong. `key` names all that this depends on; "" = none are kept.
    """

    of: Callable[[str, Row], Row] = _no_fields
    key: str = ""

    def and_those(self, others: "RowFields") -> "RowFields":
        """Returns these fields and others."""
        if not (self.key and others.key):
            return self if self.key else others
        return RowFields(lambda where, row: {**self.of(where, row), **others.of(where, row)}, self.key + others.key)


NO_FIELDS = RowFields()


def named_fields(names: tuple[str, ...], wanted_by: str) -> RowFields:
    """Returns the fields of these names, which every row must have; an error says that `wanted_by` wants them."""

    def of(where: str, row: Row) -> Row:
        if missing := [name for name in names if name not in row]:
            raise ValueError(f"{where}: field {missing[0]!r}, of {wanted_by}, is missing")
        return {name: row[name] for name in names}

    return RowFields(of, f"{wanted_by} {names}") if names else NO_FIELDS


def stream_prompts(
    data: DataConfig,
    tell: Callable[[str], None] = untold,
    count: Callable[[SourceRows], None] = uncounted,
    keeps: RowFields = NO_FIELDS,
) -> Iterator[tuple[str, Prompt]]:
    """Stream (where, prompt), where each prompt ends with a user's or a tool's turn.

    Repeats of the same id and prompt are dropped. Each prompt keeps the fields `keeps` of its row.

    At the end, `tell` receives lines with the number of prompts per format and with what is unusual about the rows, and
    `count` receives the numbers of unusual rows. No text stays in memory.

    Raises:
        ValueError: a prompt is malformed, two different prompts have the same id, or there are no prompts; the message
            names the line.
    """
    known = _KnownPrompts(data.source)
    invalid, reader = InvalidRows(data.source, data.on_invalid), ConversationReader("prompt", data.format)

    def read(where: str, row: Row) -> Prompt:
        kind, prompt_id = name_field(where, row, "kind"), name_field(where, row, "prompt_id")
        prompt_id = prompt_id or str(invalid.num_rows - 1)
        turns = reader.read(where, row, lambda turns: known.check(where, prompt_id, turns))
        return Prompt(prompt_id=prompt_id, messages=tuple(turns), kind=kind, row=keeps.of(where, row))

    for where, prompt in read_valid(data, read, invalid):
        if known.add(where, prompt):
            yield where, prompt
        else:  # the row has another pair of responses to the same prompt
            reader.leave_out()
    reader.check_format()
    if not len(known):
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    tell(reader.summary(data.source))
    report_rows(invalid, reader.unusual(), tell, count)


class _KnownPrompts:
    """The ids of the prompts read so far, each with a hash of its turns and its place: about 200 bytes per prompt."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: dict[str, int] = {}
        self._hashes, self._places, self._place_ends = array("q"), bytearray(), array("q", [0])

    def __len__(self) -> int:
        return len(self._numbers)

    def check(self, where: str, prompt_id: str, turns: Turns) -> None:
        """Raises: ValueError if a different prompt has the same id."""
        number = self._numbers.get(prompt_id)
        if number is not None and self._hashes[number] != hash_of(turns):
            place = self._places[self._place_ends[number] : self._place_ends[number + 1]].decode()
            raise ValueError(
                f"{where}: prompt_id {prompt_id!r} is also that of a different prompt, {self._source}{place}; a"
                " prompt_id of its own was expected"
            )

    def add(self, where: str, prompt: Prompt) -> bool:
        """Remember the prompt's id, and return whether it is new."""
        if prompt.prompt_id in self._numbers:
            return False
        self._numbers[prompt.prompt_id] = len(self._numbers)
        self._hashes.append(hash_of(prompt.messages))
        self._places += where.removeprefix(self._source).encode()
        self._place_ends.append(len(self._places))
        return True
