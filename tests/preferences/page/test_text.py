"""Texts on the page: nothing that a model wrote is lost in formatting, and nothing of it is trusted."""

import html
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from preferences.page.text import MAX_FORMATTED_CHARACTERS, compared, render
from tests.examples import examples


def visible(formatted):
    """What a browser shows of it; of formulas their source. A paragraph ends a line."""
    kept = re.sub(r"<math.*?(<annotation[^>]*>.*?</annotation>).*?</math>", r"\1", formatted, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"</p>", "\n", kept)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**bold** `code`", "<p><strong>bold</strong> <code>code</code></p>"),
        ("<script>alert(1)</script>", "&lt;script&gt;"),
        ("<img src=x onerror=alert(1)>", "&lt;img"),
        ("[click](javascript:alert(1))", "[click](javascript:alert(1))"),
        ("![x](http://evil/x.png)", "![x](http://evil/x.png)"),
        ("# Heading", "<p><strong>Heading</strong></p>"),
        ("```html\n<b>\n```", "&lt;"),
        ("$\\text{<script>alert(1)</script>}$", "&lt;script&gt;"),
        ("$\\href{javascript:alert(1)}{x}$", "<code>$\\href{javascript:alert(1)}{x}$</code>"),
        ("$\\style{position:fixed}{x}$", "<code>"),
        ("$\\class{main}{x}$", "<code>"),
        ("```<img/src=x>\ncode\n```", '<p class="language">&lt;img/src=x&gt;</p>'),
        ("a\ud800b\x00c", "a?b\ufffdc"),
    ],
)
def test_texts_of_models_are_hostile(text, expected):
    found = render(text).formatted
    assert expected in found
    for tag in ("<script", "<img", "<a ", "<h1", "<iframe", "<style", "style=", "href=", "onerror="):
        assert tag not in re.sub("<code>.*?</code>|>[^<]*<", "><", found.lower())


# ---- nothing is lost ----


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (r"C:\*temp\_x", ("backslashes",)),
        ("see `a` and __init__.py", ("underscores",)),
        ("2*3*4", ("asterisks",)),
        ("a &lt; b", ("character references",)),
        ("one\n\n\n\ntwo", ("spacing",)),
        ("roses\n    are red", ("spacing",)),
        ("a     b", ("spacing",)),
        ("all \u202edlof", ("control characters",)),
        ("**bold**, _slanted_ and `x  y`.  Next.\n\n- a\n  - b\n\n```\na\n\n\n\nb\n```\n\n1. x\n\n", ()),
    ],
)
def test_what_formatting_hides_is_named(text, hidden):
    found = render(text)
    assert found.formatted
    assert found.hidden == hidden


@pytest.mark.parametrize(
    "text",
    [
        "> " * 25 + "deep",
        "\n".join("  " * level + f"- level {level}" for level in range(14)),
        "| a | b |\n|---|---|\n| 1 | 2 | left out by tables |",
        "x" * (MAX_FORMATTED_CHARACTERS + 1),
        "a private \ue000 character",
    ],
)
def test_what_cannot_be_formatted_whole_is_shown_exactly(text):
    found = render(text)
    assert found.formatted == ""
    assert found.why_raw
    assert html.unescape(found.raw) == text


@pytest.mark.parametrize("text", ["1. a\n1. b\n7. c", "3) x\n2) y"])
def test_numbers_of_lists_are_those_that_were_written(text):
    assert re.findall(r'<li value="(\d+)">', render(text).formatted) == re.findall(r"^\d+", text, re.MULTILINE)


PIECES = st.sampled_from(
    ["> ", ">", "- ", "+ ", "* ", "1. ", "2) ", "    ", " ", "\n", "\n\n", "```", "```python\n", "~~~\n", "`", "``",
     "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\", "*", "**", "_", "__", "~~", "|", "\n|---|---|\n", "[", "](", ")",
     "![", "&amp;", "&lt;", "&", "<b>", "<!--", "# ", "===\n", "---\n", "\\frac{", "}{", "}", "^", "\\begin{align}",
     "\\end{align}", "\\text{", "%", "\t", "\r\n", ":", ".", "\x00", "\u202e"]
)  # fmt: skip
WORDS = st.integers(0, 99).map("word{}x".format)  # no digit last: the page may show a number right after a word


@examples(1_500)
@given(st.lists(PIECES | WORDS, max_size=40), st.integers(0, 30))
@example(pieces=["word0x", "```", "1. ", "```"], depth=0)
def test_every_word_is_there_in_order_or_the_text_is_shown_exactly(pieces, depth):
    text = "> " * depth + "".join(pieces)
    found = render(text)
    words = re.findall(r"word\d+x", text)
    if not found.why_raw:
        assert re.findall(r"word\d+x", visible(found.formatted)) == words
    exact = html.unescape(re.sub(r"<span class=\"sign\"[^>]*>|</span>", "", found.raw))
    assert exact == text.replace("\r\n", "\n").replace("\0", "\ufffd")


@given(st.text(st.characters(categories=["L", "N", "S", "P", "Z"]), max_size=80))
@examples(500)
def test_every_character_that_is_no_markup_is_there(text):
    found = render(text)
    if found.formatted:
        plain = lambda said: [c for c in said if not c.isspace() and c not in "\\*_`#>-+=~|:&;"]  # noqa: E731
        numbers = re.findall(r'<li value="(\d+)">', found.formatted)
        if not numbers and "&" not in text:
            assert plain(visible(found.formatted)) == plain(text)


@pytest.mark.parametrize("text", ["one **two** three", "- a1\n- b2\n\n$x^2 + y$ and `code`", "```python\nx = 1\n```"])
def test_the_comparison_notices_every_loss(text):
    """Each letter and digit that is taken out of the formatted text in turn, two that change places, one too many."""
    formatted = render(text).formatted
    assert compared(text, formatted).is_whole
    places = [at.start() for at in re.finditer(r"[a-z0-9](?=[^<>]*(<|$))", formatted)]
    shown = [at for at in places if _is_text(formatted, at)]
    assert len(shown) >= 8
    for at in shown:
        assert not compared(text, formatted[:at] + formatted[at + 1 :]).is_whole, formatted[at:]
        assert not compared(text, formatted[:at] + formatted[at] + formatted[at:]).is_whole, formatted[at:]


def _is_text(formatted, at):
    """Whether a place is in text that is seen, rather than in a tag or in a formula's MathML."""
    before = formatted[:at]
    in_formula = before.rfind("<math") > before.rfind("</math") and "<annotation" not in before[before.rfind("<math") :]
    return before.rfind("<") <= before.rfind(">") and not in_formula


# ---- formulas ----


@pytest.mark.parametrize(
    "text",
    [r"$x^2$", r"so $x^2$, then", r"$$\frac{a}{b}$$", r"\(a+b\)", "\\[\na\n+ b\n\\]", "> $$\n> a\n> $$",
     "the $n$th, costing \\$5", "\\begin{align}a&=b\\\\c&=d\\end{align}", r"$$x^2\,dx \\ \{a\} \_b$$",
     "$a$, $b$ and $c$ is 4", "\\[x\\]."],
)  # fmt: skip
def test_formulas_are_rendered(text):
    found = render(text)
    assert "<math" in found.formatted
    assert "<code>" not in found.formatted
    assert (found.hidden, found.why_raw) in (((), ""), (("backslashes",), ""))


@pytest.mark.parametrize(
    "text",
    ["$5 and $10", "between $5 and 10$", "US$5, CA$7 and A$", "$HOME/$USER", "${A}:${B}", "from $5-$10",
     "$20M for $30M", "$", "$$", "$$$", "$ a $", "costs 5$ or 6$", "$5 apples$", "a \\( b", "\\[ a"],
)  # fmt: skip
def test_sums_of_money_are_no_formulas(text):
    found = render(text)
    assert "<math" not in found.formatted
    assert "<code>" not in found.formatted
    assert text.replace("\\", "") in visible(found.formatted)


@pytest.mark.parametrize(
    "tex",
    [r"\frac{a", r"\unknown{x}", r"x % hidden", r"\phantom{xyz} = 1", r"\color{white}{x}", r"\newcommand{\x}{y} \x",
     r"\text{a < b &lt;}", r"\left( x", r"a & b", "{" * 400 + "}" * 400, r"\hspace{100cm} x", "x" * 2_001,
     r"\label{eq:1} x", r"\text{&#xFFFFFF;}", "a_b_c"],
)  # fmt: skip
def test_formulas_that_cannot_be_rendered_whole_are_shown_as_their_source(tex):
    found = render(f"$${tex}$$").formatted
    assert f"<code>$${html.escape(tex, quote=False)}$$</code>" in found.replace("&quot;", '"')
    assert "<math" not in found


TEX = st.sampled_from(
    [r"\frac", r"\sqrt[3]", "{", "}", "^", "_", "x", "7", "+", r"\left(", r"\right)", r"\text{ab}", "&", r"\\",
     r"\sum", r"\begin{matrix}", r"\end{matrix}", "<", ">", "'", '"', r"\mathbb{R}", r"\overset", "%", "#", "~"]
)  # fmt: skip


@examples(400)
@given(st.lists(TEX, max_size=14))
def test_no_formula_loses_what_stands_in_it(parts):
    found = render("\\(" + " ".join(parts) + " 5\\)")
    shown = re.sub(r"<annotation.*?</annotation>", "", found.formatted, flags=re.DOTALL)
    for character in "x7+5":
        wanted = sum(part == character for part in [*parts, "5"])
        assert html.unescape(re.sub("<[^>]*>", "", shown)).count(character) >= wanted


# ---- code ----


def test_code_has_its_language_and_colours():
    found = render("```python\ndef f(x):\n    return 'a'  # why\n```").formatted
    assert '<p class="language">python</p>' in found
    assert '<span class="code-k">def</span>' in found
    assert "style=" not in found
    assert visible(found).split() == ["python", "def", "f(x):", "return", "'a'", "#", "why"]


@pytest.mark.parametrize("language", ["", "nothing-known", "text title='x'", "python"])
def test_code_keeps_every_character(language):
    code = "\n\n\tif a:\n  <b>&amp;</b>\n\\n  'open\n\n"
    found = render(f"```{language}\n{code}```").formatted
    assert visible(found.partition("<pre>")[2]).removesuffix("\n") in (code.removesuffix("\n"), code)
