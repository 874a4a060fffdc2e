"""Checks, character by character, that formatted text shows all of its source.

Formatting may remove only markup: white space and Markdown's punctuation.
"""

import re
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser

MARKUP = frozenset("\\*_`#>-+=~|:")
NAMES = {"\\": "backslashes", "&": "character references", "_": "underscores", "*": "asterisks"}
_NUMBER_ENDS = "\ue000"  # a private character, in place of the "." or ")" that ends a list item's number
_NAME = re.compile(r"__\w+__|[\w./\\]_\w+_|_\w+_[./\\(\[]\w")  # a program's identifier, rather than emphasis
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


@dataclass(frozen=True)
class Compared:
    """`hidden` names removed characters that may have been meant as text, such as an escape's backslash."""

    is_whole: bool
    hidden: tuple[str, ...] = ()


def compared(source: str, html: str) -> Compared:
    """Walks through a source and its HTML. `is_whole` means that only markup is missing and the order is the same.

    Each character of the source is either the next one shown or markup. Taking the first match is safe: between it and
    a later match there can be only markup, which may be missing too.
    """
    if _NUMBER_ENDS in source:
        return Compared(False)
    shown = _text_of(html)
    left, right, hidden = 0, 0, set[str]()
    while left < len(source):
        character = source[left]
        if character.isspace():
            left += 1
            continue
        reference = _REFERENCE.match(source, left) if character == "&" else None
        if reference is not None and not shown.startswith(reference[0], right):
            stands_for = "".join(unescape(reference[0]).split())
            if not shown.startswith(stands_for, right):
                return Compared(False)
            hidden.add(NAMES["&"])
            left, right = reference.end(), right + len(stands_for)
        elif right < len(shown) and _fits(character, shown[right]):
            left, right = left + 1, right + 1
        elif character in MARKUP:
            if _is_notable(source, left):
                hidden.add(NAMES[character])
            left += 1
        else:
            return Compared(False)
    return Compared(right == len(shown), tuple(name for name in NAMES.values() if name in hidden))


def _fits(character: str, shown: str) -> bool:
    return character == shown or (shown == _NUMBER_ENDS and character in ".)")


def _is_notable(source: str, at: int) -> bool:
    """Whether removed markup may have been meant as text: `C:\\*temp`, `__init__.py`, `2*3*4`."""
    character = source[at]
    if character == "\\":
        return True
    if character not in "_*":
        return False
    start, end = at, at + 1
    while start > 0 and source[start - 1] == character:
        start -= 1
    while end < len(source) and source[end] == character:
        end += 1
    if character == "*":
        return start > 0 and end < len(source) and source[start - 1].isalnum() and source[end].isalnum()
    while start > 0 and not source[start - 1].isspace():
        start -= 1
    while end < len(source) and not source[end].isspace():
        end += 1
    return _NAME.search(source, start, end) is not None


def _text_of(html: str) -> str:
    """Returns everything that a page shows of HTML, without white space."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return "".join("".join(parser.parts).split())


class _Text(HTMLParser):
    """Collects text, the numbers of list items, and for formulas their source, which is in an annotation."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._is_formula, self._is_source = False, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "math":
            self._is_formula = True
        elif tag == "annotation":
            self._is_source = True
        elif tag == "li" and (number := dict(attrs).get("value")):
            self.parts += [number, _NUMBER_ENDS]

    def handle_endtag(self, tag: str) -> None:
        if tag == "math":
            self._is_formula = False
        elif tag == "annotation":
            self._is_source = False

    def handle_data(self, data: str) -> None:
        if self._is_source or not self._is_formula:
            self.parts.append(data)
