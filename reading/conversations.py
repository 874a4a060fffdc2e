"""The formats of conversations in files. Rows are recognised by their fields, and all rows of a file have one format.

To add a format, write a function from a row to turns, and add an entry to FORMATS. docs/data.md shows a row of each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reading.fields import any_text, checked_messages, names, objects_field, optional_text, shown, text_field

AUTO = "auto"
TEXT_ROLE = "text"  # of a plain text, which stands outside any chat template

Row = Mapping[str, Any]
Turns = list[dict[str, str]]
Part = Literal["demonstration", "prompt"]  # a demonstration ends with the assistant's turn, a prompt with the user's

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class ConversationFormat:
    """`fields` are those that a demonstration must have, `prompt_fields` those that a prompt must have.

    `known_as` is the format's name where people have one; otherwise its fields describe it.
    """

    name: str
    known_as: str
    fields: tuple[str, ...]
    prompt_fields: tuple[str, ...]
    read: Callable[[str, Row, Part], Turns]

    def title(self, part: Part) -> str:
        return self.known_as or " and ".join(self.needs(part))

    def needs(self, part: Part) -> tuple[str, ...]:
        return self.fields if part == "demonstration" else self.prompt_fields

    def fits(self, row: Row, part: Part) -> bool:
        return all(row.get(field) is not None for field in self.needs(part))


def _messages(where: str, row: Row, part: Part) -> Turns:
    """OpenAI's and TRL's `messages`."""
    turns = checked_messages(where, row.get("messages"), "messages", ends_with=_last(part))
    for index, message in enumerate(row["messages"]):
        # OpenAI's fine-tuning files can exclude answers from the loss. Heed must not train on those without a word.
        if message.get("weight") not in (None, 1):
            raise ValueError(
                f"{where}: field 'messages[{index}].weight' is {shown(message['weight'])}; SFT learns every answer of"
                " the assistant alike, so 1 or no weight was expected"
            )
    return turns


def _prompt_completion(where: str, row: Row, part: Part) -> Turns:
    """TRL's prompts and completions: texts, or lists of messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, list | tuple):
        turns = checked_messages(where, list(prompt), "prompt", ends_with="user")
    else:
        turns = [{"role": "user", "content": text_field(where, row, "prompt")}]
    if part == "prompt":
        return turns
    completion = row.get("completion")
    if isinstance(completion, list | tuple):
        return turns + checked_messages(where, list(completion), "completion", ends_with="assistant")
    return [*turns, {"role": "assistant", "content": text_field(where, row, "completion")}]


def _sharegpt(where: str, row: Row, part: Part) -> Turns:
    """ShareGPT's `conversations` of {"from", "value"}, after an optional `system`."""
    turns = []
    if system := optional_text(where, row, "system"):
        turns.append({"role": "system", "content": system})
    for index, turn in enumerate(objects_field(where, row, "conversations")):
        speaker = turn.get("from", turn.get("role"))
        role = SHAREGPT_ROLES.get(str(speaker))
        if role is None:
            raise ValueError(
                f"{where}: field 'conversations[{index}].from' is {shown(speaker)}; system, human or gpt was expected"
            )
        content = any_text(f"{where}: conversations[{index}]", turn, "value" if "value" in turn else "content")
        turns.append({"role": role, "content": content})
    return checked_messages(where, turns, "conversations", ends_with=_last(part))


def _alpaca(where: str, row: Row, part: Part) -> Turns:
    """Alpaca's `instruction`, `input` and `output`. The input follows the instruction after an empty line."""
    given = optional_text(where, row, "input")
    asked = "\n\n".join([text_field(where, row, "instruction"), *([given] if given.strip() else [])])
    turns = [{"role": "user", "content": asked}]
    if system := optional_text(where, row, "system"):
        turns.insert(0, {"role": "system", "content": system})
    if part == "demonstration":
        turns.append({"role": "assistant", "content": text_field(where, row, "output")})
    return turns


def _text(where: str, row: Row, part: Part) -> Turns:
    """A plain text: all of it is learned, without a chat template; as a prompt it is the user's turn."""
    return [{"role": TEXT_ROLE if part == "demonstration" else "user", "content": text_field(where, row, "text")}]


def _last(part: Part) -> str:
    return "assistant" if part == "demonstration" else "user"


FORMATS = (
    ConversationFormat("messages", "", ("messages",), ("messages",), _messages),
    ConversationFormat("prompt", "", ("prompt", "completion"), ("prompt",), _prompt_completion),
    ConversationFormat("sharegpt", "ShareGPT", ("conversations",), ("conversations",), _sharegpt),
    ConversationFormat("alpaca", "Alpaca", ("instruction", "output"), ("instruction",), _alpaca),
    ConversationFormat("text", "plain text", ("text",), ("text",), _text),
)
NAMES = (AUTO, *(form.name for form in FORMATS))


class ConversationReader:
    """Reads the rows of one file. The first row decides the format, unless `form` names it."""

    def __init__(self, part: Part, form: str = AUTO) -> None:
        self.part = part
        self.num_rows = 0
        self._format = next((known for known in FORMATS if known.name == form), None)
        self._first = ""  # where the first row is

    def read(self, where: str, row: Row) -> Turns:
        """Returns the row's turns.

        Raises: ValueError naming file, line and field for a row in no format, in two that contradict each other, or in
        another one than the rows before.
        """
        row = {name: value for name, value in row.items() if value is not None}  # Parquet stores every field
        turns = None
        if self._format is None:
            self._format, turns = _recognise(where, row, self.part)
            self._first = where
        elif not self._format.fits(row, self.part):
            raise self._misfit(where, row, self._format)
        self.num_rows += 1
        return self._format.read(where, row, self.part) if turns is None else turns

    def _misfit(self, where: str, row: Row, expected: ConversationFormat) -> ValueError:
        missing = next(field for field in expected.needs(self.part) if field not in row)
        other = next((form.title(self.part) for form in FORMATS if form.fits(row, self.part)), "")
        hint = ""
        if other and self._first:
            first = f"{self._first} is {expected.title(self.part)}"
            hint = f"; the row is {other}, but {first}: one format per file was expected, so split the file"
        return ValueError(f"{where}: field {missing!r} is missing; found {names(row)}{hint}")

    def summary(self, source: str) -> str:
        """Says what was read, such as "demos.jsonl: 1,234 conversations, ShareGPT"."""
        if self._format is None:
            return f"{source}: no rows"
        what = "text" if self._format.name == "text" else "prompt" if self.part == "prompt" else "conversation"
        count = f"{self.num_rows:,} {what}{'' if self.num_rows == 1 else 's'}"
        return f"{source}: {count}, {self._format.title(self.part)}"


def turns_of(where: str, row: Row, part: Part) -> Turns:
    """Returns the turns of a row that stands alone. Raises: ValueError as `ConversationReader.read`."""
    return ConversationReader(part).read(where, row)


def _recognise(where: str, row: Row, part: Part) -> tuple[ConversationFormat, Turns]:
    """Returns the row's format, and its turns. A `text` next to other fields is taken to repeat them."""
    found = [form for form in FORMATS if form.fits(row, part)]
    specific = [form for form in found if form.name != "text"] or found
    if not specific:
        raise _unknown(where, row, part)
    first, *others = specific
    if not others:
        return first, first.read(where, row, part)
    read = [_read_or_why(form, where, row, part) for form in specific]
    if any(turns != read[0] for turns in read):
        both = " and ".join(f"{form.name} ({', '.join(form.needs(part))})" for form in specific)
        raise ValueError(
            f"{where}: the row can be read as {both}, and the two differ; a single one was expected: name it with"
            f" {' or '.join(f'format = {form.name!r}' for form in specific)}, or remove the other's fields"
        )
    return first, first.read(where, row, part)


def _read_or_why(form: ConversationFormat, where: str, row: Row, part: Part) -> Turns | str:
    try:
        return form.read(where, row, part)
    except ValueError as error:
        return f"{form.name}: {error}"


def _unknown(where: str, row: Row, part: Part) -> ValueError:
    """Says what was expected, and where the rows belong if they are something else."""
    if {"chosen", "rejected"} <= row.keys():
        return ValueError(
            f"{where}: fields 'chosen' and 'rejected' make a preference pair; a {part} was expected (pairs are for"
            " reward.rankings)"
        )
    partial = [form for form in FORMATS if set(form.needs(part)) & row.keys()]
    if partial:  # such as a prompt without its completion
        missing = next(field for field in partial[0].needs(part) if field not in row)
        return ValueError(f"{where}: field {missing!r} is missing; found {names(row)} (docs/data.md has the formats)")
    wanted = ", or ".join(" and ".join(f"'{field}'" for field in form.needs(part)) for form in FORMATS)
    return ValueError(f"{where}: no format of a {part} has the fields {names(row)}; expected {wanted} (docs/data.md)")
