"""Saved answers: a file of what a model has answered to a suite's items."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.inputs import conversation_key
from evaluation.policies import ASKING_FIELDS, RESPONSE_FIELDS, WRITER_FIELDS, saved_rows
from evaluation.suites.suite import Asks, Item, Request, Unable
from files.conversations import turns_of
from files.fields import any_messages, any_text, names, shown
from files.hashes import file_hash
from lm.tokenizer import Messages
from reward.endpoint import Answer

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

        A row holds one answer (`response`, `output`, `completion`, `text` or `answer`), or those to successive turns:
        in `turns`, also within `choices`, as in MT-Bench's files, or in `messages`, as in Arena-Hard's. A row by id
        answers the items of this id, and a row by text all items that ask this.
        Raises: ValueError naming file and line of a row that is malformed or repeated, or whose id contradicts its
        text; if no row answers an item.
        """
        asked = _Asked.of(items)
        answers: dict[str, tuple[str, list[str]]] = {}
        unused: list[str] = []
        for where, row in saved_rows(f"model {self.name!r}", self.name, self.spec, MODEL_FIELDS):
            if row.get("suite", suite) != suite:
                continue
            conversation = _Conversation.of(where, row)
            answered = asked.by(where, row, conversation)
            if not answered:
                unused.append(where)
                continue
            turns = conversation.answers(answered[0]) if conversation.has_answers else _turns(where, row)
            for item_id in dict.fromkeys(item.asked_id or item.item_id for item in answered):
                if item_id in answers:
                    raise ValueError(f"{where}: item {item_id!r} is already answered in {answers[item_id][0]}")
                answers[item_id] = where, turns
        if not answers:
            file = self.spec.partition("#")[0]
            raise ValueError(
                f"model {self.name!r}: {file} answers none of the {len(items):,} items of {suite} ({len(unused):,}"
                f" other rows); rows with an item's id ({', '.join(ID_FIELDS[:2])}) or its text were expected"
            )
        return SavedModel(self.name, asked, {item_id: turns for item_id, (_, turns) in answers.items()}, tuple(unused))


@dataclass(frozen=True)
class _Conversation:
    """What a row says was asked, and answered if its `messages` end with an answer. No messages if it does not say."""

    messages: Messages
    has_answers: bool

    @classmethod
    def of(cls, where: str, row: Mapping[str, Any]) -> "_Conversation":
        """Raises: ValueError naming file, line and field."""
        messages = row.get("messages")
        if (
            isinstance(messages, list)
            and messages
            and isinstance(messages[-1], dict)
            and messages[-1].get("role") == "assistant"
        ):
            # In Arena-Hard's files an answer's content is {"answer": text}.
            plain = [
                {**turn, "content": turn["content"].get("answer")}
                if isinstance(turn, dict) and isinstance(turn.get("content"), dict)
                else turn
                for turn in messages
            ]
            has_answers = not any(name in row for name in (*ANSWER_FIELDS, "turns", "choices"))
            return cls(any_messages(where, plain, "messages"), has_answers)
        if any(name in row for name in ASKING_FIELDS):
            return cls(turns_of(where, row, "prompt"), has_answers=False)
        return cls((), has_answers=False)

    def beginnings(self) -> Iterator[Conversation]:
        """Yields what may have been asked: the messages up to an answer, or all of them; the longest first."""
        key = conversation_key(self.messages)
        ends = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        yield from (key[:end] for end in ([] if not key or key[-1][0] == "assistant" else [len(key)]) + ends[::-1])

    def answers(self, item: Item) -> list[str]:
        """Returns the answers, without those that are part of what the item asks."""
        answers = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return answers[_num_answers(item.messages) :]


@dataclass(frozen=True)
class _Asked:
    """The items of a suite, by the id of their request and by what they ask. Several items may share either."""

    by_id: Mapping[str, Sequence[Item]]
    by_text: Mapping[Conversation, Sequence[Item]]

    @classmethod
    def of(cls, items: Sequence[Item]) -> "_Asked":
        by_id: dict[str, list[Item]] = {}
        by_text: dict[Conversation, list[Item]] = {}
        for item in items:
            by_id.setdefault(item.asked_id or item.item_id, []).append(item)
            by_text.setdefault(conversation_key(item.messages), []).append(item)
        return cls(by_id, by_text)

    def by(self, where: str, row: Mapping[str, Any], conversation: _Conversation) -> Sequence[Item]:
        """Returns the items that a row answers; empty if there is none.

        Raises: ValueError if the row names no item, or if it names one by id and asks something else. A field `id` is
        no such name: it may number the file's rows, so the text overrules it.
        """
        field = next((name for name in ID_FIELDS if name in row), "")
        if not field and not conversation.messages:
            wanted = ", ".join((*ID_FIELDS, *ASKING_FIELDS))
            raise ValueError(f"{where}: the row names no item; one of {wanted} was expected, found {names(row)}")
        named = self.by_id.get(str(row[field]), ()) if field else ()
        same = self.of_text(conversation.beginnings())
        if not named or not conversation.messages:
            return named or same
        if named[0] in same:
            return named
        # A prompt may be saved as it was sent, with an instruction or examples around the question.
        is_within = any(
            _squeezed(named[0].messages[-1]["content"]) in _squeezed(message["content"])
            for message in conversation.messages
        )
        if is_within and not same:
            return named
        if field == "id":
            return same
        raise ValueError(
            f"{where}: field {field!r} is {shown(row[field])}, but the row asks something else than this item,"
            f" {shown(named[0].messages[-1]['content'])}"
        )

    def of_text(self, beginnings: Iterable[Conversation]) -> Sequence[Item]:
        return next((items for key in beginnings if (items := self.by_text.get(key, ()))), ())


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _turns(where: str, row: Mapping[str, Any]) -> list[str]:
    choices = row.get("choices")
    turns = row.get("turns")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        turns = choices[0].get("turns")
    if turns is None:
        name = next((name for name in ANSWER_FIELDS if name in row), ANSWER_FIELDS[0])
        return [any_text(where, row, name)]
    answers = turns if isinstance(turns, list) else []
    contents = [turn.get("content") if isinstance(turn, dict) else turn for turn in answers]
    texts = [content for content in contents if isinstance(content, str)]
    if not texts or len(texts) < len(contents):
        raise ValueError(f"{where}: field 'turns' is {shown(turns)}; a list of answers was expected")
    return texts


@dataclass(frozen=True)
class SavedModel(Unable):
    """Saved answers to one suite's items, as a model. An item without an answer is a failed one.

    `unused` are the places of the rows that answer no item.
    """

    name: str
    asked: _Asked
    turns: Mapping[str, Sequence[str]]
    unused: Sequence[str]
    has_chat_template: bool = field(default=True, init=False)

    @property
    def kind(self) -> str:
        return "a file of answers"

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        key = conversation_key(request.messages)
        items = self.asked.by_id.get(request.item_id) or self.asked.of_text(
            key[:length] for length in range(len(key), 0, -1)
        )
        by_id = {item.asked_id or item.item_id: item for item in items}
        if not request.item_id and len({tuple(self.turns.get(item_id, ())) for item_id in by_id}) > 1:
            return Answer("", failure=f"the file has different answers to items that ask the same, {', '.join(by_id)}")
        item_id, item = next(iter(by_id.items()), (request.item_id, None))
        turns = self.turns.get(item_id, ())
        num_earlier = _num_answers(request.messages) - (_num_answers(item.messages) if item else 0)
        if num_earlier < len(turns):
            return Answer(turns[num_earlier])
        turn = f", turn {num_earlier + 1}" if num_earlier else ""
        return Answer("", failure=f"the file has no answer to item {item_id!r}{turn}")


def _num_answers(messages: Messages) -> int:
    return sum(message["role"] == "assistant" for message in messages)
