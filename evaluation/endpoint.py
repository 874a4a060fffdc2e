"""A model behind an OpenAI-compatible endpoint, asked by chat/completions."""

import http.client
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self
from urllib.parse import urlsplit

from reward.elsewhere import FIRST_WAIT_SECONDS, RETRIED_STATUSES, SHOWN_CHARACTERS

KEY = "HEED_API_KEY"  # the environment's variable; KEY_NAME goes before it for the policy or judge of that name
LONGEST_WAIT_SECONDS = 60.0
MOST_BYTES = 16 * 2**20  # of one answer


@dataclass(frozen=True)
class Answer:
    """What a model said. `finished` (it ended by itself) and `num_tokens` are None where the server does not tell.

    Where nothing came back `failure` says why.
    """

    text: str
    finished: bool | None = None
    num_tokens: int | None = None
    failure: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key would be sent to wherever it leads."""

    def redirect_request(self, *_arguments: Any, **_more: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """`url` is the API's base, such as https://host/v1; the key is in the environment and nowhere else.

    A connection that breaks, silence for `timeout_seconds` and "try later" are tried `num_retries` times more, each
    after twice the last wait, or as long as the server asks for.
    """

    url: str
    model: str
    timeout_seconds: float
    num_retries: int
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, spec: str, name: str, *, timeout_seconds: float, num_retries: int) -> Self:
        """From URL#MODEL. Errors: ValueError for another form, and for a URL that holds a password."""
        url, _, model = spec.partition("#")
        try:
            parts = urlsplit(url)
            _ = parts.port  # read, it is checked
        except ValueError as error:
            raise ValueError(f"{url}: not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not model:
            raise ValueError(f"{spec}: URL#MODEL was expected, such as http://127.0.0.1:8000/v1#my-model")
        if parts.username or parts.password or parts.query:
            raise ValueError(f"{parts.hostname}: a URL with a user, a password or a query; keys go into {KEY}")
        own = f"{KEY}_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}"
        key = os.environ.get(own) or os.environ.get(KEY, "")
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"{own if own in os.environ else KEY} holds characters that no key has")
        return cls(url.rstrip("/"), model, timeout_seconds, num_retries, key)

    def ask(self, request: Mapping[str, Any], stop: threading.Event) -> Answer:
        """The answer to a request's fields beside the model; waits between tries end when `stop` is set."""
        body = json.dumps({"model": self.model, **request}).encode()
        failure, wait = "", 0.0
        for attempt in range(self.num_retries + 1):
            if attempt and stop.wait(max(wait, FIRST_WAIT_SECONDS * 2 ** (attempt - 1))):
                break
            try:
                return self._answer(body)
            except urllib.error.HTTPError as error:
                failure = f"status {error.code} ({error.reason}): {self._shown(_beginning(error))}"
                wait = _asked_wait(error.headers.get("Retry-After", ""))
                if error.code < 500 and error.code not in RETRIED_STATUSES:
                    break
            except (OSError, http.client.HTTPException) as error:  # refused, reset, cut short, timed out
                failure, wait = f"{type(error).__name__}: {error}", 0.0
        return Answer("", failure=f"{self.url}: {failure}")

    def _answer(self, body: bytes) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.url}/chat/completions", body, headers)
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=self.timeout_seconds) as response:
            said = _read(response)
        try:
            answer = json.loads(said)
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            if not isinstance(text, str):
                raise TypeError
            reason, num_tokens = choice.get("finish_reason"), (answer.get("usage") or {}).get("completion_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return Answer(
                "", failure=f"{self.url} answered {self._shown(said)}; choices[0].message.content was expected"
            )
        finished = {"stop": True, "length": False}.get(reason) if isinstance(reason, str) else None
        return Answer(text, finished, num_tokens if type(num_tokens) is int else None)

    def _shown(self, said: bytes) -> str:
        """The beginning of what a server said, without the key, which some repeat."""
        text = " ".join(said.decode(errors="replace").split())
        return repr((text.replace(self.key, "***") if self.key else text)[:SHOWN_CHARACTERS])


def _read(response: IO[bytes]) -> bytes:
    said = response.read(MOST_BYTES + 1)
    if len(said) > MOST_BYTES:
        raise OSError(f"an answer of more than {MOST_BYTES:,} bytes")
    return said


def _beginning(error: urllib.error.HTTPError) -> bytes:
    """What a server says of an error; nothing where that breaks off too."""
    with error, suppress(OSError, http.client.HTTPException):
        return error.read(MOST_BYTES)
    return b""


def _asked_wait(value: str) -> float:
    """How long a server asks to wait by Retry-After, in seconds; 0 where it does not say so in seconds."""
    return min(float(value), LONGEST_WAIT_SECONDS) if value.isdecimal() else 0.0
