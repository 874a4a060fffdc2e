"""Formulas and code in Markdown.

LaTeX becomes MathML, which browsers show without a script. Code gets Pygments' classes, which page.css colours for
light and dark themes.

A formula is shown as its source if its MathML would leave something out, or if the library cannot parse it.
"""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from unicodedata import normalize

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES

MATH_TAGS = {
    "math", "semantics", "annotation", "mrow", "mi", "mo", "mn", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot",
    "msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "mtable", "mtr",
    "mtd", "mstyle", "menclose", "mpadded",
}  # fmt: skip
MATH_ATTRIBUTES = {
    "math": {"display"},
    "annotation": {"encoding"},
    "mo": {"stretchy", "fence", "form", "separator", "accent", "largeop", "symmetric", "movablelimits"},
    "mi": {"mathvariant"},
    "mfrac": {"linethickness"},
    "mover": {"accent"},
    "munder": {"accentunder"},
    "mspace": {"width", "linebreak"},
    "mstyle": {"displaystyle", "scriptlevel"},
    "mtable": {"displaystyle", "rowspacing", "columnspacing", "columnlines", "rowlines", "columnalign"},
    "mtd": {"columnalign"},
    "menclose": {"notation"},
}
NUM_CHILDREN = {
    "mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3,
}  # fmt: skip
MAX_FORMULA_CHARACTERS = 2_000
MAX_BRACES = 200  # deeper nesting ends in a RecursionError somewhere
# Macros may expand without end; the others hide, move or colour their arguments.
_NOT_RENDERED = re.compile(
    r"\\(?:(?:re)?newcommand|providecommand|[gex]?def|let|DeclareMathOperator|\w*phantom|smash|[rl]lap|\w*color\w*"
    r"|href|style|class|cssId|require|rule|raisebox|kern|mkern|mskip|hskip|hspace\*?|label|ref|eqref)(?![a-zA-Z])"
)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[clr|@\s]*\})?|\\[a-zA-Z]+\*?|\\.", re.DOTALL)
_ENTITY = re.compile("&#x([0-9A-Fa-f]{1,6});")  # how the library writes characters outside ASCII
_ALIGNED = re.compile(r"(?<=\\begin)\{aligned\}|(?<=\\end)\{aligned\}")  # looks like align*, which the library supports
_COUNTED = re.compile(r"[^\W_]|[+=<>!,/();|]")  # what the rendered formula must contain as often as its source

CODE_PREFIX = "code-"
CODE_CLASSES = {CODE_PREFIX + name for name in STANDARD_TYPES.values() if name}
MAX_COLOURED_CHARACTERS = 20_000
# The languages that responses are usually written in. Lexers are regular expressions, and rare ones are less tested.
LANGUAGES = {
    "bash", "c", "c++", "cpp", "cs", "csharp", "css", "diff", "go", "haskell", "html", "java", "javascript", "js",
    "json", "jsx", "julia", "kotlin", "latex", "lua", "makefile", "matlab", "perl", "php", "py", "python", "python3",
    "r", "rb", "ruby", "rust", "rs", "scala", "sh", "shell", "sql", "swift", "tex", "toml", "ts", "typescript",
    "xml", "yaml", "yml", "zsh",
}  # fmt: skip
_FORMATTER = HtmlFormatter(nowrap=True, classprefix=CODE_PREFIX)


def add_maths(markdown: MarkdownIt) -> None:
    r"""Recognises `$..$`, `$$..$$`, `\(..\)`, `\[..\]` and amsmath's environments as formulas, but not "$5 and $10"."""
    dollarmath_plugin(markdown, allow_labels=False, allow_space=False, allow_blank_lines=False, double_inline=True)
    amsmath_plugin(markdown)
    rules = {rule.name: rule.fn for rule in markdown.inline.ruler.__rules__}
    markdown.inline.ruler.at("math_inline", _if_no_money(rules["math_inline"]))
    markdown.inline.ruler.before("escape", "math_brackets", _inline_brackets)
    markdown.block.ruler.before(
        "fence", "math_block_brackets", _block_brackets, {"alt": ["paragraph", "blockquote", "list"]}
    )
    for name in ("math_inline", "math_inline_double", "math_block", "amsmath"):
        markdown.add_render_rule(name, _formula)


def add_code(markdown: MarkdownIt) -> None:
    """Shows the language of fenced code, which a renderer usually drops, and highlights the code."""
    markdown.add_render_rule("fence", _fence)


# ---- finding formulas ----

_AMOUNT = re.compile(r"\d[\d.,]*\s*(?:[kKmMbB]\b|[^\W\d_]{2,}|[-–—]|and\b|or\b|to\b)")
_FOLLOWS_WORD = re.compile(r"(?!(?:th|st|nd|rd|s|d)\b)[\w{]")


def _if_no_money(rule: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    """Excludes sums of money and shell variables from the rule for dollars.

    Such text starts like an amount and contains no TeX, or has a digit or a word directly before or after it.
    """

    def careful(state: StateInline, silent: bool) -> bool:
        start = state.pos
        if start > 0 and state.src[start - 1].isalnum():
            return False
        if not rule(state, True):
            return False
        inner, end = state.src[start : state.pos].strip("$"), state.pos
        state.pos = start
        is_tex = any(character in inner for character in "\\^_=")
        if not inner.strip() or _FOLLOWS_WORD.match(state.src, end) or (_AMOUNT.match(inner) and not is_tex):
            return False
        return rule(state, silent)

    return careful


def _inline_brackets(state: StateInline, silent: bool) -> bool:
    opening = state.src[state.pos : state.pos + 2]
    if opening not in ("\\(", "\\["):
        return False
    start = state.pos + 2
    end = state.src.find("\\)" if opening == "\\(" else "\\]", start, start + MAX_FORMULA_CHARACTERS)
    if end < 0 or not state.src[start:end].strip():
        return False
    if not silent:
        token = state.push("math_inline_double" if opening == "\\[" else "math_inline", "math", 0)
        token.content, token.markup = state.src[start:end], opening
    state.pos = end + 2
    return True


def _block_brackets(state: StateBlock, first: int, end: int, silent: bool) -> bool:
    r"""Parses lines from \[ to \]. Without this rule a line "+ x" between them would become a list."""

    def line(number: int) -> str:
        return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]].rstrip()

    if state.is_code_block(first) or not line(first).startswith("\\["):
        return False
    last = first
    while not line(last).endswith("\\]"):
        last += 1
        if last >= end or not line(last) or line(last).startswith("\\[") or state.sCount[last] < state.blkIndent:
            return False
    content = state.getLines(first, last + 1, state.blkIndent, False).strip()
    if "\\]" in content[2:-2] or not content[2:-2].strip():
        return False
    if not silent:
        token = state.push("math_block", "math", 0)
        token.block, token.content, token.markup, token.map = True, content[2:-2], "\\[", [first, last + 1]
    state.line = last + 1
    return True


# ---- rendering formulas ----

_CLOSING = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]", "": ""}


def _formula(_self: object, tokens: Sequence[Token], index: int, _options: object, _env: object) -> str:
    token = tokens[index]
    source = f"{token.markup}{token.content}{_CLOSING[token.markup]}"
    is_inline = token.type == "math_inline"
    found = _mathml(token.content.strip(), source, "inline" if is_inline else "block")
    shown = found or f"<code>{escape(source)}</code>"
    if is_inline:
        return shown
    tag = "div" if token.block else "span"  # a paragraph cannot contain a div
    return f'<{tag} class="formula">{shown}</{tag}>'


def _mathml(tex: str, source: str, display: str) -> str:
    """Returns MathML with its source as an annotation, or "" if the source must be shown instead."""
    if len(tex) > MAX_FORMULA_CHARACTERS or _NOT_RENDERED.search(tex) or "&#" in tex or tex.count("{") > MAX_BRACES:
        return ""
    try:
        math = convert_to_element(_ALIGNED.sub("{align*}", tex), xmlns="", display=display)
    except Exception:  # the text is untrusted, and the library raises many kinds of errors, RecursionError included
        return ""
    for element in math.iter():
        element.text = _ENTITY.sub(lambda found: chr(int(found[1], 16)), element.text or "") or None
        if len(element) != NUM_CHILDREN.get(element.tag, len(element)) or element.tag not in MATH_TAGS:
            return ""
    visible = "".join(math.itertext())
    if not visible.strip() or "\\" in visible or "&" in visible or _counts(_COMMAND.sub(" ", tex)) - _counts(visible):
        return ""
    whole = ET.Element("math", display=display)
    semantics = ET.SubElement(whole, "semantics")
    ET.SubElement(semantics, "mrow").extend(_in_lines(math))
    ET.SubElement(semantics, "annotation", encoding="application/x-tex").text = source
    return ET.tostring(whole, encoding="unicode")


def _in_lines(math: ET.Element) -> list[ET.Element]:
    r"""Puts the parts between top-level \\ into rows of a table, because browsers do not break lines there."""
    parts: list[list[ET.Element]] = [[]]
    for element in math[0] if len(math) == 1 else math:
        if element.tag == "mspace" and element.get("linebreak"):
            parts.append([])
        else:
            parts[-1].append(element)
    if len(parts) == 1:
        return parts[0]
    table = ET.Element("mtable", displaystyle="true")
    for part in parts:
        ET.SubElement(ET.SubElement(table, "mtr"), "mtd").extend(part)
    return [table]


def _counts(text: str) -> Counter[str]:
    return Counter(_COUNTED.findall(normalize("NFKC", text)))


# ---- rendering code ----


def _fence(_self: object, tokens: Sequence[Token], index: int, _options: object, _env: object) -> str:
    token = tokens[index]
    named = token.info.strip()
    label = f'<p class="language">{escape(named)}</p>' if named else ""
    return f"{label}<pre><code>{_coloured(token.content, named.lower())}</code></pre>\n"


def _coloured(code: str, language: str) -> str:
    if language not in LANGUAGES or len(code) > MAX_COLOURED_CHARACTERS:
        return escape(code)
    lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    return str(highlight(code, lexer, _FORMATTER))
