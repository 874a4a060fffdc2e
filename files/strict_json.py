"""Strict JSON for rows, in files of lines or of one list, compressed or not, in bounded memory.

It refuses what Python's parser would silently accept, change or crash on: duplicate keys (the last would win),
integers beyond 64 bits, deep nesting, and halves of a surrogate pair, which no UTF-8 file, tokenizer or database can
hold. It reads NaN and Infinity as floats: published files contain them, and a field that needs a number refuses them by
name.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

MAX_NESTING = 200  # nested lists and objects; Open-Assistant's deepest trees have some 40 levels
MAX_ROW_BYTES = 32 * 2**20  # uncompressed: a .gz of half a megabyte can hold a line of half a gigabyte
CHUNK_BYTES = 2**16  # longer than any escape or literal; see _Window.value
SPACES = " \t\n\r"  # JSON's
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_MAX_DIGITS = 20  # of integers that fit 64 bits, including the sign
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class NotPlainJSONError(ValueError):
    """The text is JSON, but contains something that rows may not contain."""


def parse_json(where: str, text: str) -> Any:
    """Parses one JSON value.

    Raises: ValueError, starting with `where`, for text that is not JSON (with the column, counted from 1) and for what
    rows may not contain (with the key or field).
    """
    text = text.rstrip()  # so that the place of what is missing at a line's end is on that line
    try:
        value = DECODER.decode(text)
        refuse_unsound(value, text)
    except json.JSONDecodeError as error:
        cut = "; a whole JSON object on the line was expected" if text and error.pos >= len(text) else ""
        raise ValueError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{cut}") from None
    except NotPlainJSONError as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: {TOO_DEEP}") from None
    return value


def refuse_unsound(value: Any, text: str = "") -> None:
    """Checks a parsed value for deep nesting and lone surrogates. Most texts cannot contain either and are not walked;
    without the text, the value is.

    Raises: NotPlainJSONError with the field.
    """
    if not text or text.count("[") + text.count("{") > MAX_NESTING or _SURROGATE_ESCAPE.search(text):
        _walk(value)


def _walk(value: Any) -> None:
    """Checks every key and text. One iterator per level keeps memory small for a row of many small parts."""
    levels: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    path: list[str] = []
    while levels:
        step, item = next(levels[-1], (None, None))
        if step is None:
            levels.pop()
            del path[-1:]
        elif isinstance(item, str):
            _refuse_surrogate(f"field {''.join((*path, step)).lstrip('.')!r}", item)
        elif isinstance(item, dict | list):
            if len(levels) > MAX_NESTING:
                raise NotPlainJSONError(TOO_DEEP)
            path.append(step)
            levels.append(_keyed(item, path) if isinstance(item, dict) else _numbered(item))


def _keyed(item: dict[str, Any], path: list[str]) -> Iterator[tuple[str, Any]]:
    for key, inner in item.items():
        _refuse_surrogate(f"a key of {''.join(path).lstrip('.')!r}" if path[1:] else "a key", key)
        yield f".{key}", inner


def _numbered(item: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{index}]", inner) for index, inner in enumerate(item))


def _refuse_surrogate(name: str, text: str) -> None:
    surrogate = _SURROGATE.search(text)
    if surrogate:
        raise NotPlainJSONError(
            f"{name} contains \\u{ord(surrogate.group()):04x}, half of a surrogate pair, which is not a character"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotPlainJSONError(f"key {twice!r} appears twice in one object; unique keys were expected")
    return values


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= _MAX_DIGITS else 2**64
    if not -(2**63) <= value < 2**63:
        digits_text = digits if len(digits) <= _MAX_DIGITS else f"{digits[:8]}... ({len(digits)} digits)"
        raise NotPlainJSONError(f"the integer {digits_text} does not fit 64 bits")
    return value


TOO_DEEP = f"nested more than {MAX_NESTING} levels deep"
DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)


def open_bytes(path: Path) -> IO[bytes]:
    """Opens a file for reading bytes, and decompresses a .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def starts_a_list(path: Path) -> bool:
    """Whether the first character other than white space opens a list."""
    with open_bytes(path) as file:
        while chunk := read_part(path, file, CHUNK_BYTES):
            if start := chunk.removeprefix(codecs.BOM_UTF8).lstrip():
                return start.startswith(b"[")
    return False


def refuse(error: ValueError) -> None:
    """Raises the error about a row that cannot be parsed, so that reading stops."""
    raise error


def read_jsonl(path: Path, on_unreadable: Callable[[ValueError], None] = refuse) -> Iterator[tuple[str, Any]]:
    """Yields (where, value) for every line that is not blank.

    It does not use `datasets`, whose parser does not say which line is malformed. `on_unreadable` gets the error about
    a line that is not JSON or not UTF-8, which names file and line; unless it raises, the next line is read.

    Raises: ValueError, naming file and line, for one that is longer than MAX_ROW_BYTES.
    """
    with open_bytes(path) as file:
        number = 0
        while line := _read_line(path, file, number + 1):
            number += 1
            where = f"{path}: line {number}"
            if number == 1:
                line = _without_bom(where, line)
            if line.strip():
                try:
                    value = parse_json(where, _decoded(where, line))
                except ValueError as error:
                    on_unreadable(error)
                else:
                    yield where, value


def _decoded(where: str, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None


def _read_line(path: Path, file: IO[bytes], number: int) -> bytes:
    try:
        line = file.readline(MAX_ROW_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: line {number}: not a complete gzip file: {error}") from None
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"{path}: line {number}: {too_long('line')}")
    return line


def too_long(what: str) -> str:
    return f"this {what} is longer than {MAX_ROW_BYTES:,} bytes; rows of at most that size were expected"


def read_part(path: Path, file: IO[bytes], size: int) -> bytes:
    """Reads up to `size` bytes. Raises: ValueError for a .gz file that is cut short or not in gzip format."""
    try:
        return file.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a complete gzip file: {error}") from None


def _without_bom(where: str, start: bytes) -> bytes:
    """Removes the byte order mark that Excel and Windows put before UTF-8. Raises: ValueError for UTF-16."""
    if start.startswith(UTF16_MARKS):
        raise ValueError(f"{where}: the file is UTF-16 (by its first two bytes); save it as UTF-8")
    return start.removeprefix(codecs.BOM_UTF8)


def read_list(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (where, value) for every entry of a file that is one JSON list, holding one entry at a time.

    Raises: ValueError naming file and line for what is not JSON, and file and row for other errors.
    """
    with open_bytes(path) as file:
        text, number = _Window(path, file), 0
        assert text.take() == "[", f"{path} does not start a list"
        ended = text.peek() == "]"
        while not ended:
            number += 1
            where = f"{path}: row {number}"
            yield where, text.value(where)
            ended = text.peek() == "]"
            if not ended and text.peek() != ",":
                raise text.not_json("Expecting ',' delimiter")
            if not ended:
                text.take()
        text.take()
        if text.peek():
            raise text.not_json("Extra data")


class _Window:
    """The part of a file's text that is being parsed. `_at` is the index of the next character."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text, self._at = "", 0
        self._line, self._column = 1, 1  # of the window's first character
        self._is_new = True

    def peek(self) -> str:
        """Returns the next character other than white space, or "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in SPACES:
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def take(self) -> str:
        character = self.peek()
        self._at += len(character)
        return character

    def value(self, where: str) -> Any:
        """Parses the next value. If the window's end cuts it off, it is parsed again with twice as much text."""
        self.peek()
        # The error of the last try. If it stays in the same place with CHUNK_BYTES more, it is not due to the cut.
        before = ("", -1)
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                refuse_unsound(value, self._text[self._at : end])
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated string")
                if len(self._text) - self._at > MAX_ROW_BYTES:
                    raise ValueError(f"{where}: {too_long('row')}") from None
                problem = (error.msg, error.pos - self._at)
                if (problem == before and not is_open) or not self._more():
                    raise self.not_json(error.msg, problem[1]) from None
                before = problem
            except NotPlainJSONError as error:
                raise ValueError(f"{where}: {error}") from None
            except RecursionError:
                raise ValueError(f"{where}: {TOO_DEEP}") from None
            else:
                self._at = end
                return value

    def not_json(self, message: str, offset: int = 0) -> ValueError:
        """Returns an error about the text `offset` characters from here."""
        line, column = self._place(self._at + offset)
        return ValueError(f"{self._path}: line {line}: not JSON: {message.removesuffix(' at')} at column {column}")

    def _place(self, at: int) -> tuple[int, int]:
        newline = self._text.rfind("\n", 0, at)
        column = at - newline if newline >= 0 else self._column + at
        return self._line + self._text.count("\n", 0, at), column

    def _more(self) -> bool:
        """Drops the parsed text and reads at least as much as is left. Returns False at the end of the file."""
        self._line, self._column = self._place(self._at)
        self._text, self._at = self._text[self._at :], 0
        size = min(max(CHUNK_BYTES, len(self._text)), max(CHUNK_BYTES, MAX_ROW_BYTES - len(self._text) + 1))
        chunk = read_part(self._path, self._file, size)
        if self._is_new:
            chunk, self._is_new = _without_bom(f"{self._path}: line 1", chunk), False
        try:
            self._text += self._decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = self._place(len(self._text))[0] + error.object.count(b"\n", 0, error.start)
            raise ValueError(f"{self._path}: line {line}: not UTF-8: {error.reason}") from None
        return bool(chunk)
