"""Untrusted texts of models and people as HTML: Markdown, through an allow-list.

Formatting may remove markup and nothing else. `show` compares what the browser will show with the source. A text that
would lose anything else is not formatted, and a text that loses characters a reader may miss (backslashes, spacing)
says so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import pairwise

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token

from preferences.page import highlighting, maths
from preferences.page.comparing import compared
from preferences.records import Message

# No links, images or raw HTML: a response must not load anything, lead away, or look like a part of the page.
TAGS = {
    "p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5",
    "h6", "table", "thead", "tbody", "tr", "th", "td", "span", "div",
}  # fmt: skip
ATTRIBUTES = {"ol": {"start"}, "li": {"value"}, **maths.ATTRIBUTES}
CLASSES = {"span": {*highlighting.CLASSES, "formula"}, "p": {"language"}, "div": {"formula"}}
MAX_FORMATTED_CHARACTERS = 50_000
MAX_TITLE_CHARACTERS = 80
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
_MARKDOWN.disable(["link", "image", "autolink", "reference"])
maths.add_maths(_MARKDOWN)
highlighting.add_code(_MARKDOWN)
# A response's headings must not mix with the page's own, by which users of screen readers navigate.
_HEADINGS = {f"<{slash}h{level}>": f"<{slash}p>" for slash in ("", "/") for level in range(1, 7)}
_LENGTH = re.compile(r"[0-4](\.\d+)?em")  # of space in formulas; more could draw over the text around them


@dataclass(frozen=True)
class RenderedText:
    """A text in both views. `formatted` is "" if formatting would lose something; `why_raw` then says why.

    `hidden` names what formatting removed that a reader may want to see: "backslashes", "spacing", ...
    """

    formatted: str
    raw: str
    why_raw: str = ""
    hidden: tuple[str, ...] = ()


def task_title(prompt: Sequence[Message], warning: str) -> str:
    """Returns the first words of a task's last turn, by which people know it again, or its content warning; "" for a
    turn without words."""
    words = f"Content warning: {warning}" if warning else " ".join(prompt[-1].content[:1_000].split())
    return words if len(words) <= MAX_TITLE_CHARACTERS else words[:MAX_TITLE_CHARACTERS].rsplit(" ", 1)[0] + " …"


@lru_cache(maxsize=512)
def show(text: str) -> RenderedText:
    """Returns both views of a text, as safe HTML. Lone surrogates and NUL, which HTML cannot hold, become symbols."""
    raw = _raw(text)
    if len(text) > MAX_FORMATTED_CHARACTERS:
        return RenderedText("", raw, f"it is longer than {MAX_FORMATTED_CHARACTERS:,} characters")
    sound = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    tokens = _MARKDOWN.parse(sound)
    if any(token.level >= _MARKDOWN.options["maxNesting"] - 1 for token in tokens):
        return RenderedText("", raw, "its quotes or lists are nested too deeply")
    formatted = _clean(_MARKDOWN.renderer.render(_numbered(tokens), _MARKDOWN.options, {}))
    found = compared(sound, formatted)
    if not found.is_whole:
        return RenderedText("", raw, "formatting would leave some of it out")
    more = {"spacing": _loses_spacing(sound, tokens), "control characters": '"sign"' in raw}
    return RenderedText(
        formatted, raw, hidden=(*found.hidden, *(name for name, is_hidden in more.items() if is_hidden))
    )


def _numbered(tokens: list[Token]) -> list[Token]:
    """Gives items of numbered lists the number that was written. HTML would count up from the first."""
    for token in tokens:
        if token.type == "list_item_open" and token.info:
            token.attrSet("value", token.info)
    return tokens


def _clean(html: str) -> str:
    cleaned: str = nh3.clean(
        html,
        tags=TAGS | maths.TAGS,
        attributes=ATTRIBUTES,
        allowed_classes=CLASSES,
        attribute_filter=_filter,
    )
    for heading, paragraph in _HEADINGS.items():
        strong = "<p><strong>" if paragraph == "<p>" else "</strong></p>"
        cleaned = cleaned.replace(heading, strong)
    return cleaned


def _filter(tag: str, attribute: str, value: str) -> str | None:
    is_length = attribute in ("width", "rowspacing", "columnspacing")
    return value if not is_length or all(map(_LENGTH.fullmatch, value.split())) or tag == "mtable" else None


# ---- spacing ----

_CODE = ("fence", "code_block", "math_block", "amsmath")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)  # page.css keeps their spaces
_INNER = re.compile(r"\t|(?<![.!?:;,\s])[ ]{2,}(?=\S)|\n[ \t]+\S|\S[ ]{3,}\S")


def _loses_spacing(text: str, tokens: list[Token]) -> bool:
    """Whether formatting shortens empty lines, indentation or runs of spaces outside of code."""
    lines = text.rstrip().split("\n")  # nothing visible is lost at the end
    in_code = {line for token in tokens if token.type in _CODE and token.map for line in range(*token.map)}
    is_empty = [not line.strip() and number not in in_code for number, line in enumerate(lines)]
    if any(one and other for one, other in pairwise(is_empty)):
        return True
    for token in tokens:
        if token.type == "inline" and token.map:
            is_indented = token.level == 1 and lines[token.map[0]][:1] in (" ", "\t")
            if is_indented or _INNER.search(_CODE_SPAN.sub("x", token.content)):
                return True
    return False


# ---- the exact text ----

# Control characters except line feed and tab, and Unicode's bidirectional controls, which turn the text after them.
_SIGNS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _raw(text: str) -> str:
    """Returns every character of a text. page.css keeps the white space; control characters become symbols."""
    return _SIGNS.sub(_sign, escape(text.replace("\r\n", "\n")))


def _sign(found: re.Match[str]) -> str:
    character = found[0]
    can_stand = character not in "\0\r" and not "\ud800" <= character <= "\udfff"
    kept = character if can_stand else "\ufffd"
    return f'<span class="sign" data-code="U+{ord(character):04X}">{kept}</span>'
