"""Conversations in preference pairs: transcripts, lists of messages, and prompts that both sides begin with.

`preferences.formats` reads both sides of a pair; here, demonstrations and prompts are read from the chosen side.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from files.fields import any_messages, any_text, present, text_or_messages

SPEAKER = re.compile(r"\n\n(Human|Assistant):")  # in HH-RLHF
ROLES = {"Human": "user", "Assistant": "assistant"}


class Turn(NamedTuple):
    """A turn of a conversation, and what the file calls the fields of its text and of its role (if it has one)."""

    role: str
    content: str
    content_field: str
    role_field: str = ""
    speaker: str = ""  # what the file calls the role; "" = the same as `role`


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
        Turn(ROLES[name], text.removeprefix(" "), f"{field} (turn {number})", f"{field} (turn {number})", name)
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
        return [*_prompt(where, row), *turns] if len(turns) == 1 else turns
    if row.get("prompt") is not None:
        return [*_prompt(where, row), Turn("assistant", chosen, "chosen")]
    length = implicit_prompt(chosen, any_text(where, row, "rejected"))
    if not length:
        raise ValueError(
            f"{where}: fields 'chosen' and 'rejected' begin differently; a common prompt, or a field 'prompt', was"
            " expected"
        )
    return [Turn("user", chosen[:length], "chosen"), Turn("assistant", chosen[length:], "chosen")]


def message_turns(where: str, messages: Any, field: str) -> list[Turn]:
    """Returns the turns of a list of messages; their texts may be empty."""
    turns = enumerate(any_messages(where, messages, field))
    return [
        Turn(turn["role"], turn["content"], f"{field}[{index}].content", f"{field}[{index}].role")
        for index, turn in turns
    ]


def _prompt(where: str, row: Mapping[str, Any]) -> list[Turn]:
    prompt = text_or_messages(where, row, "prompt")
    return [Turn("user", prompt, "prompt")] if isinstance(prompt, str) else message_turns(where, prompt, "prompt")
