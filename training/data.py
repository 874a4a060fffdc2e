"""Texts, conversations and prompts from files and the Hugging Face hub, with errors that name the row."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from lm.progress import note_progress
from reading.conversations import AUTO, NAMES, TEXT_ROLE, ConversationReader, Turns
from reading.fields import name_field, text_field
from reading.rows import Rows, read_source
from training.config import Config

OnOverlong = Literal["refuse", "skip", "truncate"]


class SourceConfig(Config):
    """Where rows come from. A plain-text file gives one row per paragraph (separated by blank lines)."""

    source: str = Field(
        description="A local file (JSONL, a JSON list, CSV, Parquet or plain text, also .gz), a data set's folder, a"
        ' hub id, "world:NAME" for a file of the job\'s world, or "collect:rankings".'
    )
    split: str = Field(default="train", description="Split of a folder or hub data set.")
    subset: str = Field(default="", description="Subset (configuration) of a hub data set; empty = the default one.")
    skip_rows: int = Field(
        default=0, ge=0, description="Rows to leave out at the beginning, such as those that another stage reads."
    )
    max_rows: int = Field(default=0, ge=0, description="Rows to read at most; 0 = all.")


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
    found: OnOverlong = Field(
        default="refuse",
        description="What happens to rows that are too long: `refuse` stops before training, `skip` leaves them out,"
        " `truncate` cuts them (docs/data.md).",
    )
    return found


@dataclass(frozen=True)
class Overlong:
    """How many rows were longer than a limit, and what became of them."""

    num_rows: int = 0
    num_truncated: int = 0
    num_skipped: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_truncated or self.num_skipped)

    def __str__(self) -> str:
        long = self.num_truncated + self.num_skipped
        counts = ((self.num_truncated, "truncated"), (self.num_skipped, "skipped"))
        return f"{long:,} of {self.num_rows:,} too long: " + ", ".join(f"{n:,} {what}" for n, what in counts if n)


def read_rows(data: SourceConfig) -> Rows:
    """Stream (where, row); `where` names file and row for error messages. Hub data sets are never loaded whole."""
    last = data.max_rows and data.skip_rows + data.max_rows
    rows = read_source(data.source, split=data.split, subset=data.subset, max_rows=last)
    return itertools.islice(rows, data.skip_rows, None)


def read_texts(sources: Sequence[TextConfig]) -> Iterator[str]:
    """The texts of all sources, in order."""
    for data in sources:
        for where, row in read_rows(data):
            note_progress()
            yield text_field(where, row, data.field)


def untold(_line: str) -> None:
    """Takes lines about what was read that nobody wants to see."""


def read_conversations(
    sources: Sequence[DataConfig], tell: Callable[[str], None] = untold, *, takes_texts: bool = False
) -> Iterator[tuple[str, Turns]]:
    """(where, turns) of demonstrations, each ending with the assistant's response.

    With `takes_texts`, a plain text is a single turn of TEXT_ROLE; otherwise it is refused. After each source, `tell`
    gets a line on how many conversations of which format it has.
    """
    for data in sources:
        reader = ConversationReader("demonstration", data.format)
        for where, row in read_rows(data):
            note_progress()
            turns = reader.read(where, row)
            if turns[0]["role"] == TEXT_ROLE and not takes_texts:
                raise ValueError(f"{where}: field 'text' holds a plain text; a prompt and a response were expected")
            yield where, turns
        tell(reader.summary(data.source))


class Prompt(Config):
    """A prompt with its id; `kind` groups prompts in reports."""

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    kind: str


def read_prompts(data: DataConfig, tell: Callable[[str], None] = untold) -> list[Prompt]:
    """Prompts, each ending with a user's turn. `tell` gets a line on how many of which format there are.

    Raises:
        ValueError: a prompt has another form, an id occurs twice, or there are no prompts; the message names the line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    reader = ConversationReader("prompt", data.format)
    for index, (where, row) in enumerate(read_rows(data)):
        prompt_id = name_field(where, row, "prompt_id") or str(index)
        if prompt_id in seen:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is already that of {seen[prompt_id]}")
        seen[prompt_id] = where
        messages = tuple(reader.read(where, row))
        prompts.append(Prompt(prompt_id=prompt_id, messages=messages, kind=name_field(where, row, "kind")))
    if not prompts:
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    tell(reader.summary(data.source))
    return prompts
