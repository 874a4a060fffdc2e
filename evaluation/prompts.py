"""The prompts of a comparison: ids, conversations that end with a user's turn, and categories."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from files.conversations import ConversationReader, turns_of
from files.fields import names, text_field
from training.data import DataConfig, Prompt, read_rows

CATEGORY_FIELDS = ("category", "kind", "dataset")  # names of the category in published prompt sets


def read_compared_prompts(data: DataConfig, category_field: str = "") -> list[Prompt]:
    """Reads prompts in the rows' order, in one of the formats of docs/data.md.

    If rows have no `prompt_id`, it is the row's number, from 0. A prompt's `kind` is the row's `category_field`, which
    every row must then have; if it is "", it is the first of `category`, `kind` and `dataset` that the row has.
    Raises: ValueError naming file, line and field; for a repeated id or conversation, naming both lines.
    """
    prompts: list[Prompt] = []
    ids: dict[str, str] = {}
    texts: dict[tuple[tuple[str, str], ...], str] = {}
    reader = ConversationReader("prompt", data.format)
    for index, (where, row) in enumerate(read_rows(data)):
        prompt_id = id_of(where, row) if "prompt_id" in row else str(index)
        messages = reader.read(where, row)
        if prompt_id in ids:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is already used in {ids[prompt_id]}")
        if conversation_key(messages) in texts:
            raise ValueError(f"{where}: the prompt is the same as in {texts[conversation_key(messages)]}")
        ids[prompt_id] = texts[conversation_key(messages)] = where
        category = category_of(where, row, category_field)
        prompts.append(Prompt(prompt_id=prompt_id, messages=tuple(messages), kind=category))
    if not prompts:
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    return prompts


def id_of(where: str, row: Mapping[str, Any]) -> str:
    """Returns the row's `prompt_id` as text. Raises: ValueError if it is neither text nor a whole number."""
    value = row["prompt_id"]
    if type(value) is int:
        return str(value)
    return text_field(where, row, "prompt_id")


def asked_of(where: str, row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns a row's question as messages.

    Raises: ValueError naming file, line and field.
    """
    return turns_of(where, row, "prompt")


def category_of(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns the row's category as text, "" if it has none. Raises: ValueError if `field` is set and missing."""
    if field and row.get(field) is None:
        raise ValueError(f"{where}: the category field {field!r} is missing; found {names(row)}")
    fields = (field,) if field else CATEGORY_FIELDS
    return next((str(row[name]) for name in fields if isinstance(row.get(name), str | int)), "")


def conversation_key(messages: Iterable[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns a key that is equal for equal conversations; whitespace around texts is ignored."""
    return tuple((message["role"], message["content"].strip()) for message in messages)


def by_id(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    return {prompt.prompt_id: prompt for prompt in prompts}
