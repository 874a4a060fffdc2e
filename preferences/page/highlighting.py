"""Highlighting code in texts with Pygments' classes, which page.css colours for light and dark themes."""

from collections.abc import Sequence
from html import escape

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES

PREFIX = "code-"
CLASSES = {PREFIX + name for name in STANDARD_TYPES.values() if name}
MAX_COLOURED_CHARACTERS = 20_000
# The languages that responses are usually written in. Lexers are regular expressions, and rare ones are less tested.
LANGUAGES = {
    "bash", "c", "c++", "cpp", "cs", "csharp", "css", "diff", "go", "haskell", "html", "java", "javascript", "js",
    "json", "jsx", "julia", "kotlin", "latex", "lua", "makefile", "matlab", "perl", "php", "py", "python", "python3",
    "r", "rb", "ruby", "rust", "rs", "scala", "sh", "shell", "sql", "swift", "tex", "toml", "ts", "typescript",
    "xml", "yaml", "yml", "zsh",
}  # fmt: skip
_FORMATTER = HtmlFormatter(nowrap=True, classprefix=PREFIX)


def add_code(markdown: MarkdownIt) -> None:
    """Shows the language of fenced code, which a renderer usually drops, and highlights the code."""
    markdown.add_render_rule("fence", _fence)


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
