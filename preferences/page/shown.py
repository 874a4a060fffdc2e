"""Formats each text once, in a process that may use half a second of CPU; a text that needs more is shown as written.

The libraries for Markdown, formulas and code run regular expressions and loops over untrusted text, and some texts take
them minutes. A thread cannot be interrupted inside a regular expression, and limits on a text's size or constructs
would have to foresee every such text. The kernel can end a process at any point, so every text gets its own: a helper
process that has imported the libraries forks for each text. That takes a few milliseconds, once per text.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from preferences.page.text import RenderedText, as_written, render

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
