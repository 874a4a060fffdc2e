"""Strict JSON for rows: refuses what Python's parser would silently accept, change or crash on.

It refuses duplicate keys (of which the last would win), integers beyond 64 bits, deep nesting, and halves of a
surrogate pair, which no UTF-8 file, tokenizer or database can hold. It reads NaN and Infinity as floats: published
files contain them, and a field that needs a number refuses them by name.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_NESTING = 200  # nested lists and objects; Open-Assistant's deepest trees have some 40 levels
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
    try:
        value = DECODER.decode(text)
        refuse_unsound(value, text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except NotPlainJSONError as error:
        raise ValueError(f"{where}: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: {TOO_DEEP}") from None
    return value


def refuse_unsound(value: Any, text: str) -> None:
    """Checks a parsed value for deep nesting and lone surrogates. Most texts cannot contain either and are not walked.

    Raises: NotPlainJSONError with the field.
    """
    if text.count("[") + text.count("{") > MAX_NESTING or _SURROGATE_ESCAPE.search(text):
        _walk(value)


def _walk(value: Any) -> None:
    """Checks every key and text. It keeps one iterator per level, so that a row of many small parts takes no memory."""
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
    found = _SURROGATE.search(text)
    if found:
        raise NotPlainJSONError(
            f"{name} contains \\u{ord(found.group()):04x}, half of a surrogate pair, which stands for no character"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise NotPlainJSONError(f"key {twice!r} appears twice in one object; each key once was expected")
    return found


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= _MAX_DIGITS else 2**64
    if not -(2**63) <= value < 2**63:
        shown = digits if len(digits) <= _MAX_DIGITS else f"{digits[:8]}... ({len(digits)} digits)"
        raise NotPlainJSONError(f"the integer {shown} does not fit 64 bits")
    return value


TOO_DEEP = f"nested more than {MAX_NESTING} levels deep"
DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
