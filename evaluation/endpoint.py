"""Client for a model behind an OpenAI-compatible endpoint (chat/completions)."""

import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from files.retries import post_json
from reward.external import SHOWN_CHARACTERS

KEY = "HEED_API_KEY"  # environment variable; HEED_API_KEY_<NAME> takes precedence for the policy or judge NAME


@dataclass(frozen=True)
class Answer:
    """A model's answer. `finished` (it ended with EOS) and `num_tokens` are None if the server does not report them.

    `failure` says why there is no text; "" if there is.
    """

    text: str
    finished: bool | None = None
    num_tokens: int | None = None
    failure: str = ""


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
        try:
            response = post_json(
                f"{self.url}/chat/completions",
                {"model": self.model, **request},
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout_seconds=self.timeout_seconds,
                num_retries=self.num_retries,
                stopped=stop,
            )
        except httpx.RequestError as error:  # refused, reset, truncated, timed out
            return Answer("", failure=f"{self.url}: {type(error).__name__}: {error}")
        if not response.is_success:
            said = self._shown(response.content)
            return Answer("", failure=f"{self.url}: status {response.status_code} ({response.reason_phrase}): {said}")
        return self._answer(response.content)

    def _answer(self, said: bytes) -> Answer:
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
