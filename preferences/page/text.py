"""Untrusted texts of models and people as HTML: Markdown, through an allow-list.

Formatting may remove only markup: white space and Markdown's punctuation. `render` compares what the browser will show
with the source, character by character. A text that would lose anything else is not formatted. If a text loses
characters that a reader may miss (backslashes, spacing), a note says so.

`show` formats each text once, in a process that may use half a second of CPU; a text that needs more is shown as
written. The libraries for Markdown, formulas and code run regular expressions and loops over untrusted text, and some
texts take them minutes. A thread cannot be interrupted inside a regular expression, and limits on a text's size or
constructs would have to foresee every such text. The kernel can end a process at any point, so every text gets its own:
a helper process that has imported the libraries forks for each text. That takes a few milliseconds, once per text.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token

from preferences.page.rendering import CODE_CLASSES, MATH_ATTRIBUTES, MATH_TAGS, add_code, add_maths
from preferences.records import Message

# No links, images or raw HTML: a response must not load anything, lead away, or look like a part of the page.
TAGS = {
    "p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5",
    "h6", "table", "thead", "tbody", "tr", "th", "td", "span", "div",
}  # fmt: skip
ATTRIBUTES = {"ol": {"start"}, "li": {"value"}, **MATH_ATTRIBUTES}
CLASSES = {"span": {*CODE_CLASSES, "formula"}, "p": {"language"}, "div": {"formula"}}
MAX_FORMATTED_CHARACTERS = 50_000
MAX_TITLE_CHARACTERS = 80
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
_MARKDOWN.disable(["link", "image", "autolink", "reference"])
add_maths(_MARKDOWN)
add_code(_MARKDOWN)
# A response's headings must not mix with the page's own headings, which users of screen readers navigate by.
_HEADINGS = {f"<{slash}h{level}>": f"<{slash}p>" for slash in ("", "/") for level in range(1, 7)}
_LENGTH = re.compile(r"[0-4](\.\d+)?em")  # of space in formulas; larger ones could draw over the text around them


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
    """Returns a title by which people recognise a task: its content warning, or the first words of its last turn.

    It is "" for a turn without words.
    """
    words = f"Content warning: {warning}" if warning else " ".join(prompt[-1].content[:1_000].split())
    return words if len(words) <= MAX_TITLE_CHARACTERS else words[:MAX_TITLE_CHARACTERS].rsplit(" ", 1)[0] + " …"


def arguments_of(call: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and values of a tool call's arguments; values are JSON, except for texts of several lines."""
    given: Mapping[str, Any] = call["function"]["arguments"]
    return [
        (name, value if isinstance(value, str) and "\n" in value else json.dumps(value, indent=2, ensure_ascii=False))
        for name, value in given.items()
    ]


def called_tool(prompt: Sequence[Message], place: int) -> str:
    """Returns the name of the tool whose result is the message at `place`; "" if it is not known."""
    result, first = prompt[place].turn, place
    while prompt[first].role == "tool" and first:
        first -= 1
    calls = prompt[first].turn.get("tool_calls", ())
    wanted, number = result.get("tool_call_id"), place - first - 1
    by_id = next((call for call in calls if wanted and call.get("id") == wanted), None)
    call = by_id or (calls[number] if number < len(calls) else None)
    return str(result.get("name") or (call["function"]["name"] if call is not None else ""))


def render(text: str) -> RenderedText:
    """Returns both views of a text, as safe HTML. Lone surrogates and NUL, which HTML cannot hold, become symbols.

    Some texts take very long; `show` limits that time.
    """
    raw = as_written(text)
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
        html, tags=TAGS | MATH_TAGS, attributes=ATTRIBUTES, allowed_classes=CLASSES, attribute_filter=_filter
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


def as_written(text: str) -> str:
    """Returns every character of a text. page.css keeps the white space; control characters become symbols."""
    return _SIGNS.sub(_sign, escape(text.replace("\r\n", "\n")))


def _sign(found: re.Match[str]) -> str:
    character = found[0]
    can_stand = character not in "\0\r" and not "\ud800" <= character <= "\udfff"
    kept = character if can_stand else "\ufffd"
    return f'<span class="sign" data-code="U+{ord(character):04X}">{kept}</span>'


# ---- comparing formatted text with its source ----

MARKUP = frozenset("\\*_`#>-+=~|:")
NAMES = {"\\": "backslashes", "&": "character references", "_": "underscores", "*": "asterisks"}
_NUMBER_ENDS = "\ue000"  # a private character, in place of the "." or ")" that ends a list item's number
_NAME = re.compile(r"__\w+__|[\w./\\]_\w+_|_\w+_[./\\(\[]\w")  # a program's identifier, rather than emphasis
_WORD = re.compile(r"\S+")
_BETWEEN_LETTERS = re.compile(r"(?<=[^\W_])\*+(?=[^\W_])")
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")


@dataclass(frozen=True)
class Compared:
    """The result of `compared`. `hidden` names removed characters that may be text, such as an escape's backslash."""

    is_whole: bool
    hidden: tuple[str, ...] = ()


def compared(source: str, html: str) -> Compared:
    """Compares a source with its HTML. `is_whole` means that only markup is missing and the order is the same.

    Each character of the source is either the next one shown or markup. Taking the first match is safe, because there
    can be only markup between it and a later match, and markup may be missing.
    """
    if _NUMBER_ENDS in source:
        return Compared(False)
    shown, notable = _text_of(html), _notable(source)
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
        elif shown[right : right + 1] in (character, _NUMBER_ENDS if character in ".)" else character):
            left, right = left + 1, right + 1
        elif character in MARKUP:
            if left in notable:
                hidden.add(NAMES[character])
            left += 1
        else:
            return Compared(False)
    return Compared(right == len(shown), tuple(name for name in NAMES.values() if name in hidden))


def _notable(source: str) -> set[int]:
    """Returns where removed markup may have been meant as text, as in `C:\\*temp`, `__init__.py` or `2*3*4`."""
    found = {at for run in _BETWEEN_LETTERS.finditer(source) for at in range(*run.span())}
    for word in _WORD.finditer(source):
        if "_" in word[0] and _NAME.search(word[0]):
            found.update(word.start() + at for at, character in enumerate(word[0]) if character == "_")
    return found.union(at for at, character in enumerate(source) if character == "\\")


def _text_of(html: str) -> str:
    """Returns everything that a page shows of HTML, without white space."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    return "".join("".join(parser.parts).split())


class _Text(HTMLParser):
    """Collects text, the numbers of list items, and the sources of formulas, which are in annotations."""

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


# ---- within a budget of CPU time ----


LOG = logging.getLogger(__name__)
CPU_SECONDS = 0.5  # four times what a long answer with code takes; 50,000 characters of formulas take 0.35
MAX_CACHE_BYTES = 64 * 2**20
TOO_LONG = "formatting it takes too long"
FAILED = "formatting it failed"


class TextCache:
    """Keeps the most recently shown texts, up to `max_bytes` with both views. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[str, tuple[RenderedText, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> RenderedText | None:
        with self._lock:
            if text not in self._kept:
                return None
            self._kept.move_to_end(text)
            return self._kept[text][0]

    def put(self, text: str, rendered: RenderedText) -> None:
        num_bytes = sum(map(sys.getsizeof, (text, rendered.formatted, rendered.raw)))
        with self._lock:
            if text in self._kept or num_bytes > self.max_bytes:
                return
            self._kept[text] = (rendered, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                _, (_, num_freed) = self._kept.popitem(last=False)
                self.num_bytes -= num_freed


_CACHE = TextCache()


def show(text: str) -> RenderedText:
    """Returns both views of a text, as `render` does, within the CPU budget. Each text is formatted once."""
    found = _CACHE.get(text)
    return found if found is not None else _FORMATTER.format(text)


class _Formatter:
    """Owns the helper process, which formats one text at a time. The first text starts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    def format(self, text: str) -> RenderedText:
        with self._lock:
            found = _CACHE.get(text)  # another thread may have formatted it while this one waited
            if found is None:
                found = self._asked(text)
                if found.why_raw != FAILED:  # the next time it may not fail
                    _CACHE.put(text, found)
            return found

    def _asked(self, text: str) -> RenderedText:
        for _ in range(2):  # a helper that something has killed is replaced once
            try:
                helper = self._helper or self._started()
            except OSError:  # no memory or files left for a process
                break
            assert helper.stdin is not None
            assert helper.stdout is not None
            try:
                helper.stdin.write(json.dumps(text).encode() + b"\n")
                helper.stdin.flush()
                answer = helper.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if answer.endswith(b"\n"):
                return _as_rendered(text, json.loads(answer))
            helper.kill()
            helper.communicate()  # this also closes the pipes
            self._helper = None
        LOG.error("the process that formats texts has ended; a text is shown as it was written")
        return RenderedText("", as_written(text), FAILED)

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", f"from {__name__} import answer_texts; answer_texts()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        # A separate session keeps Ctrl-C from the helper. It ends when this process's end of the pipe closes.
        self._helper = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        return self._helper


_FORMATTER = _Formatter()


def _as_rendered(text: str, answer: dict[str, Any] | str) -> RenderedText:
    if isinstance(answer, str):
        return RenderedText("", as_written(text), answer)
    return RenderedText(answer["formatted"], answer["raw"], answer["why_raw"], tuple(answer["hidden"]))


# ---- in the helper process ----


def answer_texts() -> None:
    """Answers each text (a line of JSON on standard input) with JSON: a `RenderedText`, or the reason for none."""
    for line in sys.stdin.buffer:
        child = os.fork()
        if not child:
            _answer(line)
        _, status = os.waitpid(child, 0)
        if status:
            is_over = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            _write(TOO_LONG if is_over else FAILED)


def _answer(line: bytes) -> None:
    """Answers one text and ends this process. If that exceeds the CPU budget, the kernel ends it with SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    answer = asdict(render(json.loads(line)))
    signal.setitimer(signal.ITIMER_PROF, 0)  # no longer limited, so that the answer is written whole
    _write(answer)
    os._exit(0)


def _write(answer: dict[str, Any] | str) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()
