"""Client for a model behind an OpenAI-compatible endpoint (chat/completions)."""

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

KEY = "HEED_API_KEY"  # environment variable; HEED_API_KEY_<NAME> takes precedence for the policy or judge called NAME
LONGEST_WAIT_SECONDS = 60.0
MOST_BYTES = 16 * 2**20  # per answer


@dataclass(frozen=True)
class Answer:
    """A model's answer. `finished` (it ended with EOS) and `num_tokens` are None if the server does not report them.

    `failure` says why there is no text; "" if there is.
    """

    text: str
    finished: bool | None = None
    num_tokens: int | None = None
    failure: str = ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors, because the key would be sent to wherever they lead."""

    def redirect_request(self, *_arguments: Any, **_more: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """An API and one of its models. `url` is its base, such as https://host/v1; the key comes from the environment.

    A broken connection, no answer within `timeout_seconds`, and a "try later" status are retried `num_retries` times.
    Each wait is twice the last one, or longer if the server asks for it.
    """

    url: str
    model: str
    timeout_seconds: float
    num_retries: int
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, spec: str, name: str, *, timeout_seconds: float, num_retries: int) -> Self:
        """Parses URL#MODEL. Raises: ValueError if `spec` has another form or the URL contains a password."""
        url, _, model = spec.partition("#")
        try:
            parts = urlsplit(url)
            _ = parts.port  # reading it validates it
        except ValueError as error:
            raise ValueError(f"{url}: not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not model:
            raise ValueError(f"{spec}: URL#MODEL was expected, such as http://127.0.0.1:8000/v1#my-model")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"{parts.hostname}: the URL contains a user, a password or a query; put the key into {KEY}"
            )
        own = f"{KEY}_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}"
        key = os.environ.get(own) or os.environ.get(KEY, "")
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"{own if own in os.environ else KEY} must contain printable ASCII characters only")
        return cls(url.rstrip("/"), model, timeout_seconds, num_retries, key)

    def ask(self, request: Mapping[str, Any], stop: threading.Event) -> Answer:
        """Returns the answer to a request (its fields except the model). Setting `stop` ends the wait between tries."""
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
            except (OSError, http.client.HTTPException) as error:  # refused, reset, truncated, timed out
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
        """Returns the beginning of a server's reply without the key, which some servers repeat."""
        text = " ".join(said.decode(errors="replace").split())
        return repr((text.replace(self.key, "***") if self.key else text)[:SHOWN_CHARACTERS])


def _read(response: IO[bytes]) -> bytes:
    said = response.read(MOST_BYTES + 1)
    if len(said) > MOST_BYTES:
        raise OSError(f"the answer has more than {MOST_BYTES:,} bytes")
    return said


def _beginning(error: urllib.error.HTTPError) -> bytes:
    """Returns the body of an error response, or nothing if reading it fails too."""
    with error, suppress(OSError, http.client.HTTPException):
        return error.read(MOST_BYTES)
    return b""


def _asked_wait(value: str) -> float:
    """Returns the wait that Retry-After asks for, in seconds; 0 if it is absent or not a number of seconds."""
    return min(float(value), LONGEST_WAIT_SECONDS) if value.isdecimal() else 0.0
