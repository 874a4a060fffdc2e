"""Texts, conversations and prompts from files and the Hugging Face hub, with errors that name the row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from lm.progress import note_progress
from reading.fields import checked_messages, name_field, text_field
from reading.rows import Rows, read_source
from training.config import Config


class DataConfig(Config):
    """Where rows come from. A plain-text file gives one row per paragraph (separated by blank lines)."""

    source: str = Field(
        description="A local file (JSONL, a JSON list, Parquet or plain text, also .gz), a data set's folder, a hub id,"
        ' "world:NAME" for a file of the job\'s world, or "collect:rankings".'
    )
    split: str = Field(default="train", description="Split of a folder or hub data set.")
    subset: str = Field(default="", description="Subset (configuration) of a hub data set; empty = the default one.")
    field: str = Field(default="text", description="Field that holds the text of a row.")
    max_rows: int = Field(default=0, ge=0, description="Rows to read at most; 0 = all.")


def read_rows(data: DataConfig) -> Rows:
    """Stream (where, row); `where` names file and row for error messages. Hub data sets are never loaded whole."""
    return read_source(data.source, split=data.split, subset=data.subset, max_rows=data.max_rows)


def messages_field(where: str, row: Mapping[str, Any], *, ends_with: str) -> list[dict[str, str]]:
    """The `messages` of a row (TRL's conversational form), checked; the last must come from `ends_with`.

    `{"prompt": ..., "completion": ...}` rows of two strings are read as a user's turn and the assistant's.

    Raises:
        ValueError: the row has another form; the message names file, line and field.
    """
    if "messages" not in row and "prompt" in row:
        turns = [{"role": "user", "content": text_field(where, row, "prompt")}]
        if ends_with == "assistant":
            turns.append({"role": "assistant", "content": text_field(where, row, "completion")})
        return turns
    turns = checked_messages(where, row.get("messages"), "messages", ends_with=ends_with)
    for index, message in enumerate(row["messages"]):
        # OpenAI's fine-tuning files can exclude answers from the loss. Heed must not train on those without a word.
        if message.get("weight", 1) != 1:
            raise ValueError(
                f"{where}: field 'messages[{index}].weight' is {message['weight']!r}; SFT learns every answer of the"
                " assistant alike, so 1 or no weight was expected"
            )
    return turns


def read_texts(sources: Sequence[DataConfig]) -> Iterator[str]:
    """The texts of all sources, in order."""
    for data in sources:
        for where, row in read_rows(data):
            note_progress()
            yield text_field(where, row, data.field)


def read_conversations(sources: Sequence[DataConfig]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(where, messages) of demonstrations, each ending with the assistant's response."""
    for data in sources:
        for where, row in read_rows(data):
            note_progress()
            yield where, messages_field(where, row, ends_with="assistant")


class Prompt(Config):
    """A prompt with its id; `kind` groups prompts in reports."""

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    kind: str


def read_prompts(data: DataConfig) -> list[Prompt]:
    """Prompts, each ending with a user's turn.

    Raises:
        ValueError: a prompt has another form, an id occurs twice, or there are no prompts; the message names the line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for index, (where, row) in enumerate(read_rows(data)):
        prompt_id = name_field(where, row, "prompt_id") or str(index)
        if prompt_id in seen:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is already that of {seen[prompt_id]}")
        seen[prompt_id] = where
        messages = messages_field(where, row, ends_with="user")
        prompts.append(Prompt(prompt_id=prompt_id, messages=tuple(messages), kind=name_field(where, row, "kind")))
    if not prompts:
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    return prompts
