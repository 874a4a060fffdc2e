"""Saved answers: a file of what a model has answered to a suite's items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.endpoint import Answer
from evaluation.inputs import asked_of, conversation_key
from evaluation.policies import ASKING_FIELDS, RESPONSE_FIELDS, WRITER_FIELDS, saved_rows
from evaluation.suites.suite import Continuation, Item, Request
from files.fields import any_text, names, shown
from files.hashes import file_hash
from lm.tokenizer import Messages

ID_FIELDS = ("item_id", "prompt_id", "question_id", "uid", "key", "id")
ANSWER_FIELDS = (*RESPONSE_FIELDS, "answer")
MODEL_FIELDS = (*WRITER_FIELDS, "model", "model_id")


@dataclass(frozen=True)
class SavedAnswers:
    """FILE or FILE#WRITER, whose rows are matched with items once a suite has read them."""

    name: str
    spec: str
    sha256: str

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
        by_asked = {conversation_key(item.messages): item for item in items}
        found: dict[str, tuple[str, list[str]]] = {}
        num_unused = 0
        for where, row in saved_rows(f"model {self.name!r}", self.name, self.spec, MODEL_FIELDS):
            if row.get("suite", suite) != suite:
                continue
            item = _item_of(where, row, by_id, by_asked)
            if item is None:
                num_unused += 1
                continue
            if item.item_id in found:
                raise ValueError(f"{where}: item {item.item_id!r} is already answered in {found[item.item_id][0]}")
            found[item.item_id] = (where, _turns(where, row))
        if not found:
            file = self.spec.partition("#")[0]
            raise ValueError(
                f"model {self.name!r}: {file} answers none of the {len(items):,} items of {suite} ({num_unused:,} other"
                f" rows); rows with an item's id ({', '.join(ID_FIELDS[:2])}) or its text were expected"
            )
        return SavedModel(self.name, by_asked, {item_id: turns for item_id, (_, turns) in found.items()})


def _item_of(
    where: str,
    row: Mapping[str, Any],
    by_id: Mapping[str, Item],
    by_asked: Mapping[tuple[tuple[str, str], ...], Item],
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
class SavedModel:
    """Saved answers to one suite's items, as a model. An item without an answer is a failed one."""

    name: str
    by_asked: Mapping[tuple[tuple[str, str], ...], Item]
    turns: Mapping[str, Sequence[str]]
    has_chat_template: bool = field(default=True, init=False)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """The n-th turn of an item is asked with n - 1 earlier answers after the item's messages."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        item_id, num_earlier = request.item_id, 0
        key = conversation_key(request.messages)
        for length in range(len(key), 0, -1):
            item = self.by_asked.get(key[:length])
            if item is not None:
                item_id = item_id or item.item_id
                num_earlier = sum(role == "assistant" for role, _ in key[length:])
                break
        turns = self.turns.get(item_id, ())
        if num_earlier < len(turns):
            return Answer(turns[num_earlier])
        turn = f", turn {num_earlier + 1}" if num_earlier else ""
        return Answer("", failure=f"the file has no answer to item {item_id!r}{turn}")

    def logprobs(self, continuations: Sequence[Continuation]) -> list[float]:
        raise ValueError(
            f"model {self.name!r} is a file of answers; the suite needs a local model, for {len(continuations):,}"
            " log-probabilities"
        )

    def rewards(self, conversations: Sequence[Messages]) -> list[Answer | float]:
        raise ValueError(
            f"model {self.name!r} is a file of answers; the suite needs a reward model, for {len(conversations):,}"
            " conversations"
        )
