"""The formats of conversations in files. Rows are recognised by their fields, and all rows of a file have one format.

To add a format, write a function from a row to turns, and add an entry to FORMATS. docs/data.md shows a row of each.
`preferences.formats` reads both sides of a preference pair; here, demonstrations and prompts are read from the chosen
side.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from files.fields import (
    any_messages,
    any_text,
    as_number,
    from_json,
    names,
    object_field,
    objects_field,
    optional_text,
    present,
    shown,
    text_field,
    text_or_messages,
    tool_calls,
    tools_field,
)

AUTO = "auto"
TEXT_ROLE = "text"  # for a plain text, which no chat template applies to

Row = Mapping[str, Any]
Turns = list[dict[str, Any]]  # as `lm.chat_template.Messages`
# A demonstration ends with the assistant's turn, a prompt with the user's or a tool's.
Part = Literal["demonstration", "prompt"]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
TREE_FIELDS = ("message_tree_id", "prompt")
TREE_ROLES = {"prompter": "user", "assistant": "assistant"}  # Open-Assistant's
SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # in HH-RLHF
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}


class Turn(NamedTuple):
    """A turn of a conversation, and what the file calls the fields of its text and of its role (if it has one)."""

    role: str
    content: str
    content_field: str
    role_field: str = ""
    speaker: str = ""  # what the file calls the role; "" = the same as `role`
    more: Mapping[str, Any] = MappingProxyType({})  # the message's other fields: calls of tools, or whose result it is

    @property
    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True)
class ConversationFormat:
    """A format of conversations. A demonstration must have `fields`, a prompt `prompt_fields`.

    `known_as` is the format's common name; if it has none, its fields describe it. With `holds_answers`, a prompt is
    what comes before the assistant's last turn. `read` returns turns whose texts may be empty.
    """

    name: str
    known_as: str
    fields: tuple[str, ...]
    prompt_fields: tuple[str, ...]
    read: Callable[[str, Row, Part], list[Turn]]
    holds_answers: bool = True

    def title(self, part: Part) -> str:
        return self.known_as or " and ".join(self.needs(part))

    def needs(self, part: Part) -> tuple[str, ...]:
        return self.fields if part == "demonstration" else self.prompt_fields

    def fits(self, row: Row, part: Part) -> bool:
        return all(row.get(field) is not None for field in self.needs(part))


def _messages(where: str, row: Row, _part: Part) -> list[Turn]:
    """Reads OpenAI's and TRL's `messages`."""
    turns = message_turns(where, row.get("messages"), "messages")
    for index, message in enumerate(row["messages"]):
        # OpenAI's fine-tuning files can exclude answers from the loss. Heed must not train on those silently.
        if message.get("weight") not in (None, 1):
            raise ValueError(
                f"{where}: field 'messages[{index}].weight' is {shown(message['weight'])}; SFT weighs all answers"
                " of the assistant alike, so 1 or no weight was expected"
            )
    return turns


def _prompt_completion(where: str, row: Row, part: Part) -> list[Turn]:
    """Reads TRL's prompts and completions: texts, or lists of messages."""
    sides = [("prompt", "user"), ("completion", "assistant")]
    turns = []
    for field, role in sides if part == "demonstration" else sides[:1]:
        side = text_or_messages(where, row, field)
        turns += [Turn(role, side, field)] if isinstance(side, str) else message_turns(where, side, field)
    return turns


def _sharegpt(where: str, row: Row, _part: Part) -> list[Turn]:
    """Reads ShareGPT's `conversations` of {"from", "value"}, after an optional `system`."""
    turns = []
    if system := optional_text(where, row, "system"):
        turns.append(Turn("system", system, "system"))
    for index, turn in enumerate(objects_field(where, row, "conversations")):
        place = f"conversations[{index}]"
        speaker_field, content_field = "role" if "role" in turn else "from", "content" if "content" in turn else "value"
        speaker = turn.get(speaker_field)
        role = SHAREGPT_ROLES.get(str(speaker))
        if role is None:
            raise ValueError(
                f"{where}: field '{place}.{speaker_field}' is {shown(speaker)}; system, human, gpt, function_call or"
                " observation was expected"
            )
        content, more = any_text(f"{where}: {place}", turn, content_field), {}
        if speaker == "function_call":
            content, more = "", {"tool_calls": _sharegpt_calls(where, content, f"{place}.{content_field}")}
        turns.append(Turn(role, content, f"{place}.{content_field}", f"{place}.{speaker_field}", str(speaker), more))
    if not turns:
        raise ValueError(f"{where}: field 'conversations' is empty; at least one turn was expected")
    return turns


def _sharegpt_calls(where: str, text: str, field: str) -> list[dict[str, Any]]:
    """Reads LLaMA-Factory's calls: JSON text of {"name", "arguments"}, or of a list of them."""
    calls = from_json(where, text, field)
    return tool_calls(where, [{"function": call} for call in (calls if isinstance(calls, list) else [calls])], field)


def _alpaca(where: str, row: Row, part: Part) -> list[Turn]:
    """Reads Alpaca's `instruction`, `input` and `output`. The input follows the instruction after an empty line."""
    more = optional_text(where, row, "input")
    question = "\n\n".join([text_field(where, row, "instruction"), *([more] if more.strip() else [])])
    turns = [Turn("user", question, "instruction")]
    if system := optional_text(where, row, "system"):
        turns.insert(0, Turn("system", system, "system"))
    if part == "demonstration":
        turns.append(Turn("assistant", any_text(where, row, "output"), "output"))
    return turns


def _pair(where: str, row: Row, _part: Part) -> list[Turn]:
    """Reads the prompt and the chosen side of a preference pair."""
    return chosen_turns(where, row)


def is_transcript(text: Any) -> bool:
    """Returns whether a text is one of HH-RLHF's transcripts."""
    return isinstance(text, str) and text.startswith("\n\nHuman:")


def transcript_turns(where: str, row: Mapping[str, Any], field: str) -> list[Turn]:
    """Splits a transcript into turns. The space after a speaker's name is not part of the text."""
    text = any_text(where, row, field)
    start, *parts = SPEAKER.split(text)
    if start.strip() or not parts:
        raise ValueError(f"{where}: field {field!r} begins with {text[:20]!r}; '\\n\\nHuman: ...' was expected")
    spoken = enumerate(zip(parts[::2], parts[1::2], strict=True), start=1)
    return [
        Turn(
            TRANSCRIPT_ROLES[name], text.removeprefix(" "), f"{field} (turn {number})", f"{field} (turn {number})", name
        )
        for number, (name, text) in spoken
    ]


def implicit_prompt(chosen: str, rejected: str) -> int:
    """Returns the length of the common beginning of two texts, which is their prompt; 0 if there is none."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if length and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the replies
    return length if chosen[:length].strip() else 0


def chosen_turns(where: str, row: Mapping[str, Any]) -> list[Turn]:
    """Returns the prompt of a preference pair and its chosen answer.

    Raises: ValueError naming file, line and field.
    """
    chosen = present(where, row, "chosen")
    if is_transcript(chosen):
        return transcript_turns(where, row, "chosen")
    if not isinstance(chosen, str):
        turns = message_turns(where, text_or_messages(where, row, "chosen"), "chosen")
        return [*_pair_prompt(where, row), *turns] if len(turns) == 1 else turns
    if row.get("prompt") is not None:
        return [*_pair_prompt(where, row), Turn("assistant", chosen, "chosen")]
    length = implicit_prompt(chosen, any_text(where, row, "rejected"))
    if not length:
        raise ValueError(
            f"{where}: fields 'chosen' and 'rejected' begin differently; a common prompt, or a field 'prompt', was"
            " expected"
        )
    return [Turn("user", chosen[:length], "chosen"), Turn("assistant", chosen[length:], "chosen")]


def message_turns(where: str, messages: Any, field: str) -> list[Turn]:
    """Returns the turns of a list of messages; their texts may be empty."""
    turns = enumerate(any_messages(where, messages, field, takes_tools=True))
    return [
        Turn(turn.pop("role"), turn.pop("content"), f"{field}[{index}].content", f"{field}[{index}].role", more=turn)
        for index, turn in turns
    ]


def tool_messages(where: str, messages: Any, field: str) -> Turns:
    """Returns the messages in `field`, with any tool calls, as chat templates read them. Texts may be empty.

    Raises: ValueError naming the field of an invalid message, or of a result without a call before it.
    """
    turns = message_turns(where, messages, field)
    check_results(where, turns)
    return [turn.message for turn in turns]


def _pair_prompt(where: str, row: Mapping[str, Any]) -> list[Turn]:
    prompt = text_or_messages(where, row, "prompt")
    return [Turn("user", prompt, "prompt")] if isinstance(prompt, str) else message_turns(where, prompt, "prompt")


def _tree(where: str, row: Row, part: Part) -> list[Turn]:
    """Reads the path of best replies in Open-Assistant's tree; a demonstration ends with an answer."""
    turns, message, place = list[Turn](), object_field(where, row, "prompt"), "prompt"
    while True:
        speaker = any_text(f"{where}: {place}", message, "role")
        if speaker not in TREE_ROLES:
            raise ValueError(f"{where}: field '{place}.role' is {shown(speaker)}; prompter or assistant was expected")
        text = any_text(f"{where}: {place}", message, "text")
        turns.append(Turn(TREE_ROLES[speaker], text, f"{place}.text", f"{place}.role", speaker))
        replies = objects_field(f"{where}: {place}", message, "replies") if message.get("replies") else []
        kept = [number for number, reply in enumerate(replies) if not reply.get("deleted")]
        if not kept:
            break
        best = min(kept, key=lambda number: _rank(replies[number]))
        message, place = replies[best], f"{place}.replies[{best}]"
    if part == "demonstration" and len(turns) > 1 and turns[-1].role == "user":
        turns.pop()  # an unanswered question
    return turns


def _rank(reply: Row) -> float:
    """Returns a reply's rank, 0 for the best; replies without one come last."""
    rank = as_number(reply.get("rank"))
    return math.inf if rank is None else rank


def _text(where: str, row: Row, part: Part) -> list[Turn]:
    """Reads a plain text. A demonstration is learned in full, without a chat template; a prompt is the user's turn."""
    if {"message_id", "role"} <= row.keys():
        raise ValueError(
            f"{where}: the row is a single message of one of Open-Assistant's trees; a whole tree was expected, as in"
            " the data set's files of trees"
        )
    return [Turn(TEXT_ROLE if part == "demonstration" else "user", any_text(where, row, "text"), "text")]


FORMATS = (
    ConversationFormat("messages", "", ("messages",), ("messages",), _messages),
    ConversationFormat("prompt", "", ("prompt", "completion"), ("prompt",), _prompt_completion, holds_answers=False),
    ConversationFormat("sharegpt", "ShareGPT", ("conversations",), ("conversations",), _sharegpt),
    ConversationFormat("alpaca", "Alpaca", ("instruction", "output"), ("instruction",), _alpaca),
    ConversationFormat("pairs", "the chosen side of pairs", ("chosen", "rejected"), ("chosen", "rejected"), _pair),
    ConversationFormat("oasst", "Open-Assistant's trees", TREE_FIELDS, TREE_FIELDS, _tree),
    ConversationFormat("text", "plain text", ("text",), ("text",), _text),
)
FALLBACKS = {"pairs", "text"}
NAMES = (AUTO, *(form.name for form in FORMATS))


def _accept(_turns: Turns) -> None:
    """Accepts every row."""


class ConversationReader:
    """Reads the rows of one file. The first row that is valid decides the format, unless `form` names it.

    Without `takes_texts`, a demonstration that is a plain text is invalid.
    """

    def __init__(self, part: Part, form: str = AUTO, *, takes_texts: bool = True) -> None:
        self.part, self.takes_texts = part, takes_texts
        self.num_rows = 0
        self.num_answers = 0  # when reading prompts: rows whose last turn, the assistant's, is left out
        self.num_repeated = 0  # rows that are the same conversation as an earlier one
        self.num_left_out = 0
        self._seen = set[int]()  # their hashes, since the texts would fill the memory
        self._format = next((known for known in FORMATS if known.name == form), None)
        self._first = ""  # where the first valid row is
        self._misfits = Counter[str]()  # rows in another format than the first, by the format's name

    def read(self, where: str, row: Row, check: Callable[[Turns], None] = _accept) -> Turns:
        """Returns the row's turns.

        A row that is refused, here or by `check`, is not counted and does not decide the format.

        Raises: ValueError naming file, line and field for a row in no format, in two that contradict each other, or in
        a different one from earlier rows; and whatever `check` raises.
        """
        row = {name: value for name, value in row.items() if value is not None}  # Parquet stores every field
        form = self._format or _recognise(where, row, self.part)
        if not form.fits(row, self.part):
            raise self._misfit(where, row, form)
        turns, has_answer = _read(form, where, row, self.part)
        if turns[0]["role"] == TEXT_ROLE and not self.takes_texts:
            raise ValueError(f"{where}: field 'text' holds a plain text; a prompt and a response were expected")
        check(turns)
        if self._format is None:
            self._format, self._first = form, where
        self.num_rows += 1
        self.num_answers += has_answer
        key = hash_of(turns)
        self.num_repeated += key in self._seen
        self._seen.add(key)
        return turns

    def _misfit(self, where: str, row: Row, expected: ConversationFormat) -> ValueError:
        missing = next(field for field in expected.needs(self.part) if field not in row)
        other = next((form for form in FORMATS if form.fits(row, self.part)), None)
        hint = ""
        if other is not None and self._first:
            self._misfits[other.name] += 1
            first = f"{self._first} is {expected.title(self.part)}"
            hint = (
                f"; the row is {other.title(self.part)}, but {first}: one format per file was expected, so split the"
                " file"
            )
        return ValueError(f"{where}: field {missing!r} is missing; found {names(row)}{hint}")

    def check_format(self) -> None:
        """Raises: ValueError if most rows differ in format from the first, which may be a header."""
        num_misfits = self._misfits.total()
        num_rows = self.num_rows + self.num_left_out + num_misfits
        if self._format is not None and num_misfits > num_rows // 2:
            raise ValueError(
                f"{self._first} is {self._format.title(self.part)}, but {num_misfits:,} of {num_rows:,} rows have"
                f" another format: name the one to read, such as format = {self._misfits.most_common(1)[0][0]!r}, or"
                " split the file"
            )

    def summary(self, source: str) -> str:
        """Returns what was read, such as "demos.jsonl: 1,234 conversations, ShareGPT"."""
        if self._format is None:
            return f"{source}: no rows"
        what = "text" if self._format.name == "text" else "prompt" if self.part == "prompt" else "conversation"
        count = f"{self.num_rows:,} {what}{'' if self.num_rows == 1 else 's'}"
        return f"{source}: {count}, {self._format.title(self.part)}"

    def unusual(self) -> dict[str, int]:
        """Counts rows by what is unusual about them, and what was done."""
        counts = {
            "ends with an answer (not read)": self.num_answers,
            "seen before (kept)": self.num_repeated,
            "seen before (left out)": self.num_left_out,
        }
        return {kind: count for kind, count in counts.items() if count}

    def leave_out(self) -> None:
        """Counts the last row, which repeats an earlier one, as left out."""
        self.num_rows -= 1
        self.num_repeated -= 1
        self.num_left_out += 1


def turns_of(where: str, row: Row, part: Part) -> Turns:
    """Returns the turns of a single row. Raises: ValueError as `ConversationReader.read`."""
    return ConversationReader(part).read(where, row)


def _read(form: ConversationFormat, where: str, row: Row, part: Part) -> tuple[Turns, bool]:
    """Returns the row's turns, and whether an answer that ended them was left out. The first has the row's `tools`.

    Raises: ValueError naming the field, as the file calls it, of an empty turn, a tool's result without a call, or a
        last turn of the wrong role.
    """
    turns = form.read(where, row, part)
    answered = list(turns)
    while part == "prompt" and form.holds_answers and turns and turns[-1].role == "assistant":
        turns = turns[:-1]
    for turn in turns:
        if not turn.content.strip() and turn.role != "tool" and "tool_calls" not in turn.more:
            raise ValueError(f"{where}: field {turn.content_field!r} is empty; text was expected")
    check_results(where, turns)
    final = (turns or answered)[-1]
    if final.role not in (("user", "tool") if part == "prompt" else ("assistant", TEXT_ROLE)):
        name, last = final.role_field or final.content_field, "user" if part == "prompt" else "assistant"
        raise ValueError(
            f"{where}: field {name!r} is {final.speaker or final.role!r}; the last turn must be the {last}'s"
        )
    messages = [turn.message for turn in turns]
    if messages[0]["role"] != TEXT_ROLE and (tools := tools_field(where, row, "tools")):
        messages[0]["tools"] = [*messages[0].get("tools", ()), *tools]
    return messages, len(turns) < len(answered)


def check_results(where: str, turns: Iterable[Turn]) -> None:
    """Raises: ValueError naming the field of a tool's result that is not the result of one of the calls before it."""
    open_calls = list[Mapping[str, Any]]()
    for turn in turns:
        if turn.role != "tool":
            open_calls = list(turn.more.get("tool_calls", ()))
            continue
        if not open_calls:
            raise ValueError(
                f"{where}: field {turn.role_field!r} is {turn.speaker or turn.role!r} without a call before it; one"
                " result per call was expected"
            )
        wanted = turn.more.get("tool_call_id")
        answered = next((call for call in open_calls if wanted is None or call.get("id", wanted) == wanted), None)
        if answered is None:
            raise ValueError(
                f"{where}: field '{turn.content_field.rpartition('.')[0]}.tool_call_id' is {shown(wanted)}; the id of a"
                " call before it that has no result yet was expected"
            )
        open_calls.remove(answered)


def spoken(message: Mapping[str, Any]) -> str:
    """Returns a message's text for people and judges, with a line for each call of a tool."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join([*([message["content"]] if message["content"] or not lines else []), *lines])


def num_bytes(messages: Iterable[Mapping[str, Any]]) -> int:
    """Returns the bytes of a conversation's texts, calls and tools in UTF-8."""
    texts = ((spoken(m), json.dumps(m["tools"], ensure_ascii=False) if "tools" in m else "") for m in messages)
    return sum(len(text.encode()) for of_message in texts for text in of_message)


def hash_of(messages: Iterable[Mapping[str, Any]]) -> int:
    """Returns the same number, within this process, for equal conversations."""
    return hash(tuple((m["role"], m["content"], json.dumps(m, sort_keys=True) * (len(m) > 2)) for m in messages))


def _recognise(where: str, row: Row, part: Part) -> ConversationFormat:
    """Returns the row's format. If a row has fields of another format, its pairs or text are ignored.

    Raises: ValueError for a row in no format, or in two that contradict each other.
    """
    forms = {form.name: form for form in FORMATS if form.fits(row, part)}
    for name, others in (("prompt", {"oasst"}), ("text", forms.keys() - {"text"}), ("pairs", forms.keys() - FALLBACKS)):
        if forms.keys() & others:
            forms.pop(name, None)
    if not forms:
        raise _unknown(where, row, part)
    if len(forms) > 1:
        read = {name: _read_or_why(form, where, row, part) for name, form in forms.items()}
        if _is_beginning(read):  # the other format also has the prompt, after a system turn and before later ones
            del forms["prompt"], read["prompt"]
        first = next(iter(read.values()))
        if any(turns != first for turns in read.values()):
            both = " and ".join(f"{name} ({', '.join(form.needs(part))})" for name, form in forms.items())
            raise ValueError(
                f"{where}: the row can be read as {both}, with different results; choose one with"
                f" {' or '.join(f'format = {name!r}' for name in forms)}, or remove the other's fields"
            )
    return next(iter(forms.values()))


def _is_beginning(read: Mapping[str, Turns | str]) -> bool:
    """Whether the text in `prompt` is the first thing that the user says in every other format."""
    first_questions = set()
    for turns in read.values():
        if isinstance(turns, str):  # why the row is not in this format
            return False
        first_questions.add(next((turn["content"].strip() for turn in turns if turn["role"] == "user"), ""))
    return "prompt" in read and len(first_questions) == 1 and len(read["prompt"]) == 1


def _read_or_why(form: ConversationFormat, where: str, row: Row, part: Part) -> Turns | str:
    try:
        return _read(form, where, row, part)[0]
    except ValueError as error:
        return f"{form.name}: {error}"


def _unknown(where: str, row: Row, part: Part) -> ValueError:
    """Returns an error that says what was expected, or which field is missing."""
    partial = [form for form in FORMATS if set(form.needs(part)) & row.keys()]
    if partial:  # such as a prompt without its completion
        missing = next(field for field in partial[0].needs(part) if field not in row)
        return ValueError(f"{where}: field {missing!r} is missing; found {names(row)} (docs/data.md has the formats)")
    wanted = ", or ".join(" and ".join(f"'{field}'" for field in form.needs(part)) for form in FORMATS)
    return ValueError(f"{where}: no format of a {part} has the fields {names(row)}; expected {wanted} (docs/data.md)")
