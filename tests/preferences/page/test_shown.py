"""No text takes more CPU than its budget, and each is formatted once, however many people ask for it."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from pygments.lexers import get_lexer_by_name

from preferences.page import text as shown
from preferences.page.config import LabelingConfig
from preferences.page.rendering import LANGUAGES
from preferences.page.text import (
    CPU_SECONDS,
    FAILED,
    MAX_FORMATTED_CHARACTERS,
    TOO_LONG,
    RenderedText,
    TextCache,
    render,
    show,
)
from preferences.records import Message, Task

SLOW_CODE = "```c\n" + "\n " * 9_990 + "\n```"  # Pygments needs minutes


def children_seconds():
    """CPU-seconds of all processes that have formatted a text."""
    helper = shown._FORMATTER._helper
    times = psutil.Process(helper.pid).cpu_times()
    return times.children_user + times.children_system


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch):
    monkeypatch.setattr(shown, "_CACHE", TextCache())


@pytest.mark.parametrize("part", ["_", "(_a_)", "x._a_.", "[_a_]", "*_", "a*b*", "a_", "_a.", "*", "\\", "a__"])
def test_the_comparison_with_the_source_is_linear(part):
    text = (part * MAX_FORMATTED_CHARACTERS)[:MAX_FORMATTED_CHARACTERS]
    started = time.process_time()
    found = render(text)
    assert time.process_time() - started < 2  # 0.01 to 0.3; without the budget it takes minutes
    assert found.formatted
    assert not found.why_raw


def test_a_text_over_its_budget_is_shown_raw():
    show("so that the helper has started")
    before = children_seconds()
    found = show(SLOW_CODE + " <b>")
    assert children_seconds() - before < CPU_SECONDS + 0.3
    assert (found.formatted, found.why_raw) == ("", TOO_LONG)
    assert found.raw.endswith("\n``` &lt;b&gt;")
    assert show("*a* text").formatted == "<p><em>a</em> text</p>\n"  # the next one is formatted again


HOSTILE = (
    "\n ", "\n", " ", "\t\n", "(", "[", "{", "<", ")", "()", '"', "'", "\\", '\\"', "\\'", "\\\n", "`", "$", "${",
    "#", "//", "/*", "<!--", "<a ", "<?", "a", "a ", "a.", "a(", "a<", "a=", "@", "0", "0.", "--", ";", "=", "%", "&",
    ":", "- ", "?", "!", "~", "^", "_", "é", "(*", "<<A\n", "q(", "\\begin{", "class ", "template<", "\n#", "a\n  ",
    "\r", "\u2028",
)  # fmt: skip
LEXERS = {get_lexer_by_name(name).name: name for name in sorted(LANGUAGES)}


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "language"), enumerate(LEXERS.values()), ids=LEXERS.values())
def test_no_highlighter_takes_longer(number, language):
    """Each lexer with a quarter of the texts, neighbours with different ones: a minute instead of four."""
    show("so that the helper has started")
    for part in HOSTILE[number % 4 :: 4]:
        fence = "~~~~" if part == "`" else "```"
        before = children_seconds()
        found = show(f"{fence}{language}\n{('x' + part * 20_000)[:19_990]}\n{fence}")
        assert children_seconds() - before < CPU_SECONDS + 0.3, part
        assert found.why_raw in ("", TOO_LONG), part


def test_a_text_is_formatted_once_however_many_ask():
    show("so that the helper has started")
    before = children_seconds()
    with ThreadPoolExecutor(10) as threads:
        found = list(threads.map(show, [SLOW_CODE] * 10))
    assert len(set(map(id, found))) == 1
    assert children_seconds() - before < 2 * CPU_SECONDS


def test_texts_are_the_same_as_without_a_process():
    for text in ("a\ud800b\x00c", "$x^2$ *b* \r\n __init__.py", "| a |\n|---|\n| 1 | 2 |", "x" * 60_000, ""):
        assert show(text) == render(text)


def test_a_helper_that_was_ended_is_replaced():
    show("one")
    os.kill(shown._FORMATTER._helper.pid, signal.SIGKILL)
    assert show("*two*").formatted == "<p><em>two</em></p>\n"


def test_a_text_that_cannot_be_formatted_is_shown_raw(monkeypatch, caplog):
    monkeypatch.setattr(shown.sys, "executable", "/bin/false")
    monkeypatch.setattr(shown, "_FORMATTER", shown._Formatter())
    assert show("<i>").why_raw == FAILED
    assert show("<i>").raw == "&lt;i&gt;"
    assert "has ended" in caplog.text


def test_ten_labelers_on_texts_that_take_too_long(world, visit):
    responses = (SLOW_CODE, "_" * 50_000)
    world.add(Task("t1", (Message("user", "Say t1"),), responses, ("a", "b")), num_labelers=10)
    names = [f"cy{number}" for number in range(10)]
    for name in names:
        world.join(name)
    config = LabelingConfig(task_order="arrival")
    clients = [visit(name, config) for name in names]
    show("so that the helper has started")
    before = children_seconds() + time.process_time()
    with ThreadPoolExecutor(10) as threads:
        pages = list(threads.map(lambda client: client.get("/task"), clients))
    assert children_seconds() + time.process_time() - before < 4  # ten pages in all
    for page in pages:
        assert page.status_code == 200
        assert f"not formatted: {TOO_LONG}." in page.text


def test_a_cache_is_bounded_by_bytes():
    one = RenderedText("f" * 1_000, "r" * 1_000)
    size = sum(map(sys.getsizeof, ("key 0", one.formatted, one.raw)))
    cache = TextCache(3 * size)
    for number in range(10):
        cache.put(f"key {number}", one)
    assert (cache.num_bytes, cache.get("key 6"), cache.get("key 7")) == (3 * size, None, one)
    cache.put("key x", one)  # the least recently used one goes
    assert (cache.get("key 7"), cache.get("key 8"), cache.get("key x")) == (one, None, one)
    cache.put("large", RenderedText("f" * 10_000, ""))
    assert (cache.num_bytes, cache.get("large")) == (3 * size, None)
