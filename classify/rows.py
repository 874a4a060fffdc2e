"""The rows of labelled data: texts with labels, sentences with tagged words, questions with answers in a text.

In addition to rows with fields, it reads columns as in CoNLL-2003 (a word per line, its tag in the last column, an
empty line after each sentence) and SQuAD's nested JSON.
"""

import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from classify.config import OUTSIDE, ClassifyData, Task, entity_type
from files.fields import any_text, kind_of, list_field, name_field, optional_text, present, shown, text_field
from files.rows import InvalidRows, Row, valid_rows
from files.strict_json import open_bytes, parse_json
from lm.progress import note_progress
from training.data import SourceRows, read_rows

COLUMNS = (".conll", ".bio", ".iob", ".iob2", ".tsv", ".txt")  # suffixes of files with a word per line
DOCUMENT = "-DOCSTART-"  # the word of a line between documents

_GAPS = re.compile(r"[ \t]+")  # between columns


@dataclass(frozen=True)
class LabelledText:
    """A text, or a pair of them, and its label."""

    texts: tuple[str, ...]
    label: str

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


@dataclass(frozen=True)
class TaggedWords:
    """A sentence's words and their tags in IOB2: "O", "B-TYPE" where an entity begins, "I-TYPE" inside it."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(word.encode()) + 1 for word in self.words)


@dataclass(frozen=True)
class Question:
    """A question about a text. `answers` are (text, place of its first character); none = the text has no answer."""

    question_id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return len(self.question.encode()) + len(self.context.encode())


Labelled = LabelledText | TaggedWords | Question


def read_labelled(
    task: Task, labels: Sequence[str], sources: Sequence[ClassifyData], counted: list[SourceRows], lines: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yields (where, `LabelledText`, `TaggedWords` or `Question`) of all sources. `counted` and `lines` get what is
    unusual about the rows of each.

    Raises: ValueError naming file, line and field.
    """
    for data in sources:
        invalid = InvalidRows(data.source, data.on_invalid)
        yield from valid_rows(_rows(task, data, invalid), partial(_read, task, labels, data), invalid)
        rows = SourceRows.of(invalid, {})
        counted.append(rows)
        lines += [*([f"{rows.source}: {rows}"] if rows else []), *invalid.first]


def _read(task: Task, labels: Sequence[str], data: ClassifyData, where: str, row: Row) -> Labelled:
    note_progress()
    if task == "sequence":
        field = data.text_field or "text"
        second = optional_text(where, row, "text_pair")
        texts = (text_field(where, row, field), *([second] if second.strip() else []))
        return LabelledText(texts, _label(where, row, data.label_field or "label", labels))
    if task == "token":
        return _tagged(where, row, data, labels)
    return _question(where, row)


def _label(where: str, row: Mapping[str, Any], field: str, labels: Sequence[str]) -> str:
    """Returns a label's name; with `labels`, a number stands for the label in that place."""
    value = present(where, row, field)
    if type(value) is int and labels:
        if not 0 <= value < len(labels):
            raise ValueError(f"{where}: field {field!r} is {value}; a number from 0 to {len(labels) - 1} was expected")
        return labels[value]
    if isinstance(value, bool):
        return str(value).lower()
    label = name_field(where, row, field)
    if not label:
        raise ValueError(f"{where}: field {field!r} is {shown(value)}; a label was expected")
    return label


def _tagged(where: str, row: Row, data: ClassifyData, labels: Sequence[str]) -> TaggedWords:
    words_field, tags_field = data.text_field or "tokens", data.label_field or "tags"
    words, tags = list_field(where, row, words_field), list_field(where, row, tags_field)
    places: list[str] = row.get(_LINES) or [f"{where}: field '{tags_field}[{index}]'" for index in range(len(tags))]
    for index, word in enumerate(words):
        if not isinstance(word, str) or not word.strip():
            raise ValueError(f"{where}: field '{words_field}[{index}]' is {shown(word)}; a word was expected")
    if not words or len(words) != len(tags):
        raise ValueError(
            f"{where}: field {tags_field!r} has {len(tags)} entries and {words_field!r} {len(words)}; a tag for each"
            " word was expected"
        )
    named = [tag if isinstance(tag, str) else _label(where, {tags_field: tag}, tags_field, labels) for tag in tags]
    return TaggedWords(tuple(words), tuple(iob2(named, data.tags, places)))


def iob2(tags: Sequence[str], scheme: str, places: Sequence[str]) -> Iterator[str]:
    """Yields the tags of a sentence in IOB2.

    Raises: ValueError, beginning with the tag's place, for what is no tag of the scheme or cannot follow the last one.
    """
    before = ""  # the type of the word before, "" outside
    for tag, place in zip(tags, places, strict=True):
        try:
            mark, kind = tag[:1], entity_type(tag)
        except ValueError as error:
            raise ValueError(f"{place} is {error}") from None
        if scheme == "iob2" and mark == "I" and kind != before:
            last = f"an entity of type {before}" if before else OUTSIDE
            raise ValueError(
                f"{place} is {tag!r} after {last}; in IOB2 an entity opens with B-{kind}"
                f' (tags = "iob1" in the source reads files in which it does not)'
            )
        if scheme == "iob1" and mark == "B" and kind != before:
            raise ValueError(
                f"{place} is {tag!r}, but no entity of type {kind} comes before it; in IOB1 such an entity opens with"
                f' I-{kind} (tags = "iob2" in the source reads files in which each opens with B-)'
            )
        yield f"B-{kind}" if mark == "I" and kind != before else tag
        before = kind


def _question(where: str, row: Row) -> Question:
    """Reads a question; `answers` is a list of objects as in SQuAD's files, or an object of lists as on the hub."""
    question_id = name_field(where, row, "id")
    where = f"{where}: question {question_id!r}" if question_id else where
    context, question = text_field(where, row, "context"), text_field(where, row, "question")
    given_answers = row.get("answers", [])
    if isinstance(given_answers, Mapping):
        texts, starts = list_field(where, given_answers, "text"), list_field(where, given_answers, "answer_start")
        if len(texts) != len(starts):
            raise ValueError(
                f"{where}: field 'answers' has {len(texts)} texts and {len(starts)} places; one each expected"
            )
        given_answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(given_answers, list | tuple):
        raise ValueError(f"{where}: field 'answers' is {kind_of(given_answers)}; a list was expected")
    answers = []
    for index, answer in enumerate(given_answers):
        place = f"{where}: field 'answers[{index}]'"
        if not isinstance(answer, Mapping):
            raise ValueError(f"{place} is {kind_of(answer)}; an object was expected")
        text, start = text_field(place, answer, "text"), present(place, answer, "answer_start")
        if type(start) is not int or start < 0 or context[start : start + len(text)] != text:
            there = f", where the context has {shown(context[start : start + len(text)])}" if type(start) is int else ""
            raise ValueError(
                f"{place}: answer_start is {shown(start)}{there}; the place of {shown(text)} in it was expected"
            )
        answers.append((text, start))
    if row.get("is_impossible") is True and answers:
        raise ValueError(f"{where}: field 'is_impossible' is true, but there are answers; no answers were expected")
    if row.get("is_impossible") is False and not answers:
        raise ValueError(f"{where}: field 'answers' is empty, but 'is_impossible' is false; an answer was expected")
    return Question(question_id or where, question, context, tuple(answers))


_LINES = "\0lines"  # in rows of columns: the place of each tag; no file can have such a field


def _rows(task: Task, data: ClassifyData, invalid: InvalidRows) -> Iterator[tuple[str, Row]]:
    path = Path(data.source)
    suffix = Path(data.source.removesuffix(".gz")).suffix
    if task == "token" and suffix in COLUMNS and path.is_file():
        rows = _columns(path, data)
    elif task == "span" and suffix == ".json" and (articles := _articles(path)) is not None:
        rows = _questions(path, articles)
    else:
        return read_rows(data, invalid)
    return itertools.islice(rows, data.skip_rows, data.skip_rows + data.max_rows if data.max_rows else None)


def _columns(path: Path, data: ClassifyData) -> Iterator[tuple[str, Row]]:
    """Yields each sentence of a file with a word per line. Raises: ValueError naming file and line."""
    lines: list[tuple[int, list[str]]] = []

    def row() -> tuple[str, Row]:
        return f"{path}: line {lines[0][0]}", {
            data.text_field or "tokens": [columns[0] for _, columns in lines],
            data.label_field or "tags": [columns[-1] if len(columns) > 1 else "" for _, columns in lines],
            _LINES: [f"{path}: line {number}: the tag" for number, _ in lines],
        }

    with open_bytes(path) as file:
        for number in itertools.count(1):
            try:
                line = file.readline()
                # Only spaces and tabs separate columns: a word may contain a no-break space.
                columns = _GAPS.split(stripped) if (stripped := line.decode("utf-8-sig").strip(" \t\r\n")) else []
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: line {number}: not UTF-8: {error.reason}") from None
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{path}: line {number}: cannot be read: {error}") from None
            if not line:
                break
            if columns and columns[0] != DOCUMENT:
                lines.append((number, columns))
            elif lines:
                yield row()
                lines = []
    if lines:
        yield row()


def _articles(path: Path) -> list[Any] | None:
    """Returns the articles of SQuAD's JSON, or None for a file with anything else."""
    if not path.is_file():
        return None
    try:
        with open_bytes(path) as file:
            content = file.read()
        whole = json.loads(content.decode("utf-8-sig", errors="replace"))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError):
        return None  # a row per line
    if not isinstance(whole, dict) or "data" not in whole:
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise ValueError(f"{path}: line {line}: not UTF-8: {error.reason}") from None
    return list_field(f"{path}", parse_json(f"{path}", text), "data")


def _questions(path: Path, articles: list[Any]) -> Iterator[tuple[str, Row]]:
    for number, article in enumerate(articles):
        where = f"{path}: data[{number}]"
        for place, paragraph in enumerate(list_field(where, _an_object(where, article), "paragraphs")):
            inside = f"{where}.paragraphs[{place}]"
            context = any_text(inside, _an_object(inside, paragraph), "context")
            for index, qa in enumerate(list_field(inside, paragraph, "qas")):
                at = f"{inside}.qas[{index}]"
                yield at, {**_an_object(at, qa), "context": context}


def _an_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {kind_of(value)} found; an object was expected")
    return dict(value)
