"""Saved answers: a file of what a model has answered to a suite's items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.endpoint import Answer
from evaluation.inputs import asked_of, conversation_key
from evaluation.policies import ASKING_FIELDS, RESPONSE_FIELDS, WRITER_FIELDS, saved_rows
from evaluation.suites.suite import Asks, Item, Request, Unable
from files.fields import any_text, names, shown
from files.hashes import file_hash
from lm.tokenizer import Messages

ID_FIELDS = ("item_id", "prompt_id", "question_id", "uid", "key", "id")
ANSWER_FIELDS = (*RESPONSE_FIELDS, "answer")
MODEL_FIELDS = (*WRITER_FIELDS, "model", "model_id")

Conversation = tuple[tuple[str, str], ...]  # of `conversation_key`


@dataclass(frozen=True)
class SavedAnswers:
    """FILE or FILE#WRITER, whose rows are matched with items once a suite has read them."""

    name: str
    spec: str
    sha256: str
    kind: str = field(default="a file of answers", init=False)
    can: frozenset[Asks] = field(default=frozenset({"conversations", "texts"}), init=False)

    @classmethod
    def open(cls, name: str, spec: str) -> "SavedAnswers":
        """Raises: ValueError if there is no such file."""
        file = Path(spec.partition("#")[0])
        if not file.is_file():
            raise ValueError(f"model {name!r}: {file}: no such file")
        return cls(name, spec, file_hash(file))

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "saved", "spec": self.spec, "sha256": self.sha256}

    def close(self) -> None:
        """Hold nothing."""

    def of_items(self, suite: str, items: Sequence[Item]) -> "SavedModel":
        """Match rows with items by id, or by the text of what was asked. Rows of another suite are left out.

        A row holds one answer (`response`, `output`, `completion`, `text` or `answer`), or in `turns` those to
        successive turns, also within `choices`, as in MT-Bench's and Arena-Hard's files.
        Raises: ValueError naming file and line of a row that is malformed or repeated; if no row answers an item.
        """
        by_id = {item.item_id: item for item in items}
        by_asked: dict[Conversation, Item] = {}
        for item in items:
            by_asked.setdefault(conversation_key(item.messages), item)
        found: dict[str, tuple[str, list[str]]] = {}
        num_unused = 0
        for where, row in saved_rows(f"model {self.name!r}", self.name, self.spec, MODEL_FIELDS):
            if row.get("suite", suite) != suite:
                continue
            answered = _item_of(where, row, by_id, by_asked)
            if answered is None:
                num_unused += 1
                continue
            if answered.item_id in found:
                raise ValueError(
                    f"{where}: item {answered.item_id!r} is already answered in {found[answered.item_id][0]}"
                )
            found[answered.item_id] = (where, _turns(where, row))
        if not found:
            file = self.spec.partition("#")[0]
            raise ValueError(
                f"model {self.name!r}: {file} answers none of the {len(items):,} items of {suite} ({num_unused:,} other"
                f" rows); rows with an item's id ({', '.join(ID_FIELDS[:2])}) or its text were expected"
            )
        return SavedModel(self.name, by_id, by_asked, {item_id: turns for item_id, (_, turns) in found.items()})


def _item_of(
    where: str,
    row: Mapping[str, Any],
    by_id: Mapping[str, Item],
    by_asked: Mapping[Conversation, Item],
) -> Item | None:
    named = next((name for name in ID_FIELDS if name in row), "")
    if named:
        return by_id.get(str(row[named]))
    if any(name in row for name in ASKING_FIELDS):
        return by_asked.get(conversation_key(asked_of(where, row)))
    wanted = ", ".join((*ID_FIELDS, *ASKING_FIELDS))
    raise ValueError(f"{where}: the row names no item; one of {wanted} was expected, found {names(row)}")


def _turns(where: str, row: Mapping[str, Any]) -> list[str]:
    choices = row.get("choices")
    turns = row.get("turns")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        turns = choices[0].get("turns")
    if turns is None:
        name = next((name for name in ANSWER_FIELDS if name in row), ANSWER_FIELDS[0])
        return [any_text(where, row, name)]
    given = turns if isinstance(turns, list) else []
    contents = [turn.get("content") if isinstance(turn, dict) else turn for turn in given]
    texts = [content for content in contents if isinstance(content, str)]
    if not texts or len(texts) < len(contents):
        raise ValueError(f"{where}: field 'turns' is {shown(turns)}; a list of answers was expected")
    return texts


@dataclass(frozen=True)
class SavedModel(Unable):
    """Saved answers to one suite's items, as a model. An item without an answer is a failed one.

    `by_asked` has the first item of those that ask the same.
    """

    name: str
    by_id: Mapping[str, Item]
    by_asked: Mapping[Conversation, Item]
    turns: Mapping[str, Sequence[str]]
    has_chat_template: bool = field(default=True, init=False)

    @property
    def kind(self) -> str:
        return "a file of answers"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        key = conversation_key(request.messages)
        begun = (self.by_asked.get(key[:length]) for length in range(len(key), 0, -1))
        same = next(filter(None, begun), None)
        item = self.by_id.get(request.item_id, same)
        item_id = item.item_id if item else request.item_id
        # A row that names its question by text answers every item that asks it.
        turns = self.turns.get(item_id) or (self.turns.get(same.item_id, ()) if same else ())
        num_earlier = _num_answers(request.messages) - (_num_answers(item.messages) if item else 0)
        if num_earlier < len(turns):
            return Answer(turns[num_earlier])
        turn = f", turn {num_earlier + 1}" if num_earlier else ""
        return Answer("", failure=f"the file has no answer to item {item_id!r}{turn}")


def _num_answers(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)
