"""Texts of models and people as HTML: Markdown, through an allow-list. Nothing that they wrote is trusted."""

import nh3
from markdown_it import MarkdownIt

# No links, images or raw HTML: a response must not fetch, lead away, or look like a part of the page.
TAGS = {
    "p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5",
    "h6", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
_MARKDOWN.disable(["link", "image", "autolink", "reference"])
# A response's headings must not stand among the page's own, which people go through by ear.
_HEADINGS = {f"<{slash}h{level}>": f"<{slash}p>" for slash in ("", "/") for level in range(1, 7)}


def to_html(text: str) -> str:
    """Safe HTML of a Markdown text; lone surrogates, which HTML cannot hold, become replacement characters."""
    sound = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    cleaned: str = nh3.clean(_MARKDOWN.render(sound), tags=TAGS, attributes={"ol": {"start"}})
    for heading, paragraph in _HEADINGS.items():
        strong = "<p><strong>" if paragraph == "<p>" else "</strong></p>"
        cleaned = cleaned.replace(heading, strong)
    return cleaned
