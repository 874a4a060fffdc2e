"""Client for a model behind an OpenAI-compatible endpoint (chat/completions).

`Endpoint` sends one request. `Asker` sends many, several at a time and never the same one twice: answers are stored in
a SQLite file under the SHA-256 of the whole request, so later runs reuse them. `read_reply` reads what a judge said.
"""

import hashlib
import itertools
import json
import math
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from files.atomic import on_network
from training.notices import waiting_aloud

KEY = "HEED_API_KEY"  # environment variable; HEED_API_KEY_<NAME> takes precedence for the policy or judge NAME
FIRST_FAILURES = 10  # if this many requests are done and all of them failed, no more are sent
TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sent (model TEXT PRIMARY KEY, num_requests INTEGER NOT NULL)",
)
LINE_CHARACTERS = 120  # of a reply's last line, in an error message

Request = Mapping[str, Any]
Read = Callable[[str], tuple[float, str]]  # a reply -> (value, "") or (NaN, why there is none)
OnProgress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class Answer:
    """A model's answer. `finished` (it ended with EOS) and `num_tokens` are None if the server does not report them.

    `failure` says why there is no text; "" if there is. `tokens` has, if the request asked for `top_logprobs` and the
    server gave them, a pair per token of the answer: its text, and the log-probabilities in nats of the likeliest
    tokens at its place.
    """

    text: str
    finished: bool | None = None
    num_tokens: int | None = None
    failure: str = ""
    tokens: Sequence[tuple[str, Mapping[str, float]]] = ()


OVER_BUDGET = Answer("", failure="the budget of requests is used up")


@dataclass(frozen=True)
class Endpoint:
    """An API and one of its models. `url` is its base, such as https://host/v1; the key comes from the environment.

    A broken connection, no whole answer within `timeout_seconds`, a malformed one and a "try later" status are retried
    for `max_wait_seconds`. Each wait is twice the last one, or longer if the server asks for it.
    """

    url: str
    model: str
    timeout_seconds: float
    max_wait_seconds: float
    key: str = field(default="", repr=False)

    @classmethod
    def of(cls, spec: str, name: str, *, timeout_seconds: float, max_wait_seconds: float) -> Self:
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
        return cls(url.rstrip("/"), model, timeout_seconds, max_wait_seconds, key)

    def ask(self, request: Request, stop: threading.Event) -> Answer:
        """Returns the answer to a request (its fields except the model). Setting `stop` ends the wait between tries."""
        from files.retries import ServerError, post_json  # only here: a bare GPU machine has no HTTP client

        try:
            return post_json(
                f"{self.url}/chat/completions",
                {"model": self.model, **request},
                self._answer,
                key=self.key,
                timeout_seconds=self.timeout_seconds,
                max_wait_seconds=self.max_wait_seconds,
                waiting=waiting_aloud,
                stopped=stop,
            )
        except ServerError as error:
            return Answer("", failure=str(error))

    def _answer(self, said: bytes) -> Answer:
        """Returns the answer in a server's response. Raises: ValueError for a response of another format."""
        try:
            answer = json.loads(said)
            choice = answer["choices"][0]
            text = choice["message"].get("content")
            reason, num_tokens = choice.get("finish_reason"), (answer.get("usage") or {}).get("completion_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError("choices[0].message.content was expected") from None
        if not isinstance(text, str):  # as the model may answer this request each time
            return Answer("", failure=f"{self.url}: no text in the answer; choices[0].message.content was expected")
        finished = {"stop": True, "length": False}.get(reason) if isinstance(reason, str) else None
        tokens = _top_logprobs(choice.get("logprobs"))
        return Answer(text, finished, num_tokens if type(num_tokens) is int else None, tokens=tokens)


def _top_logprobs(logprobs: Any) -> tuple[tuple[str, dict[str, float]], ...]:
    """Returns the tokens of an answer as in `Answer.tokens`; empty if the server gave none, or gave another format."""
    try:
        return tuple(
            (str(place["token"]), {str(top["token"]): float(top["logprob"]) for top in place["top_logprobs"]})
            for place in logprobs["content"]
        )
    except (KeyError, TypeError, ValueError):
        return ()


def read_reply(reply: Answer, read: Read, max_tokens: int) -> tuple[float, str]:
    """Returns what `read` finds in a judge's reply, or (NaN, why there is nothing)."""
    if reply.failure:
        return math.nan, reply.failure
    value, failure = read(reply.text)
    if failure and reply.finished is False:
        failure = f"{failure}; the answer was truncated at {max_tokens} tokens"
    return value, failure


def read_last_line(answer: str, pattern: re.Pattern[str], what: str, expected: str) -> tuple[str, str]:
    """Returns (the pattern's group, "") if the last line of an answer matches, otherwise ("", why it does not)."""
    lines = [line for line in answer.splitlines() if line.strip()]
    found = pattern.fullmatch(lines[-1]) if lines else None
    if found:
        return found[1], ""
    last = lines[-1].strip()[:LINE_CHARACTERS] if lines else ""
    return "", f"no {what}: the answer ends with {last!r}; {expected} was expected"


class AnswerCache:
    """A cache of answers by request, in a SQLite file that several processes may share. Failures are not stored."""

    def __init__(self, path: Path) -> None:
        """Raises: ValueError if the file is not a SQLite database."""
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
        try:
            self._database.execute(f"PRAGMA journal_mode = {'DELETE' if on_network(path) else 'WAL'}")
            for table in TABLES:
                self._database.execute(table)
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise ValueError(f"{path}: not a cache of endpoint answers: {error}") from None

    def get(self, key: str) -> Answer | None:
        with self._lock:
            row = self._database.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
        if row is None:
            return None
        answer = Answer(**json.loads(row[0]))
        return replace(answer, tokens=tuple((token, top) for token, top in answer.tokens))

    def put(self, key: str, answer: Answer) -> None:
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, json.dumps(asdict(answer))))

    def take(self, model: str, num_wanted: int, most: float) -> int:
        """Counts requests to a model as sent, at most `most` in all by the processes that share the file. Returns how
        many of those wanted may be sent.
        """
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            row = self._database.execute("SELECT num_requests FROM sent WHERE model = ?", (model,)).fetchone()
            num_sent = row[0] if row else 0
            num_granted = int(max(0, min(num_wanted, most - num_sent)))
            self._database.execute("INSERT OR REPLACE INTO sent VALUES (?, ?)", (model, num_sent + num_granted))
            self._database.execute("COMMIT")
        return num_granted

    def close(self) -> None:
        self._database.close()


def request_key(endpoint: Endpoint, request: Request) -> str:
    """Returns the SHA-256 of everything that an answer depends on."""
    return hashlib.sha256(json.dumps([endpoint.url, endpoint.model, request], sort_keys=True).encode()).hexdigest()


class Budget:
    """The most requests that a command may still send to endpoints. Retries of a request count as one request."""

    def __init__(self, num_requests: float = math.inf) -> None:
        self.num_requests = self._num_left = num_requests

    def take(self, num_wanted: int) -> int:
        """Returns how many of these requests may be sent, and counts them as sent."""
        num_granted = int(min(num_wanted, self._num_left))
        self._num_left -= num_granted
        return num_granted


@dataclass(frozen=True)
class Asker:
    """Sends requests to an endpoint through `cache`, at most `concurrency` at a time.

    Stops with an error once more than `max_failed_share` of the requests have failed, or `budget` is used up.
    """

    endpoint: Endpoint
    cache: Path
    concurrency: int
    max_failed_share: float
    budget: Budget = field(default_factory=Budget)

    def ask_all(self, requests: Sequence[Request], on_progress: OnProgress) -> list[Answer]:
        """Returns one answer per request, in order. Equal requests are sent once.

        Raises: ValueError with the first cause if too many requests fail, or if the budget does not suffice. Answers
        received until then are stored.
        """
        answers, num_unsent = self._ask(requests, lambda _cache, wanted: self.budget.take(wanted), on_progress)
        if num_unsent:
            raise ValueError(
                f"--budget {self.budget.num_requests:,} requests is used up: {num_unsent:,} of"
                f" {len(requests):,} requests to {self.endpoint.model} have not been sent. The answers received are"
                " stored; the same command continues"
            )
        return answers

    def ask_within(self, requests: Sequence[Request], most: float, on_progress: OnProgress) -> list[Answer]:
        """Like `ask_all`, but an answer that cannot be had is a failure. `most` bounds the requests to the model of all
        processes that share the cache; beyond it, answers are `OVER_BUDGET`.
        """
        model = f"{self.endpoint.url}#{self.endpoint.model}"
        return self._ask(requests, lambda cache, wanted: cache.take(model, wanted, most), on_progress)[0]

    def _ask(
        self, requests: Sequence[Request], take: Callable[[AnswerCache, int], int], on_progress: OnProgress
    ) -> tuple[list[Answer], int]:
        """Returns the answers, and how many different requests `take` did not grant."""
        cache = AnswerCache(self.cache)
        try:
            keys = [request_key(self.endpoint, request) for request in requests]
            answers = {key: answer for key in dict.fromkeys(keys) if (answer := cache.get(key)) is not None}
            missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in answers}
            num_granted = take(cache, len(missing))
            sent = dict(itertools.islice(missing.items(), num_granted))
            answers |= self._ask_missing(sent, cache, len(keys), on_progress)
        finally:
            cache.close()
        return [answers.get(key, OVER_BUDGET) for key in keys], len(missing) - num_granted

    def _ask_missing(
        self, missing: Mapping[str, Request], cache: AnswerCache, num_requests: int, on_progress: OnProgress
    ) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        failures: list[str] = []
        stop = threading.Event()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="ask")
        try:
            waiting = {pool.submit(self.endpoint.ask, request, stop): key for key, request in missing.items()}
            for done in as_completed(waiting):
                key, answer = waiting[done], done.result()
                answers[key] = answer
                if answer.failure:
                    failures.append(answer.failure)
                    self._refuse_too_many(failures, len(answers), num_requests)
                else:
                    cache.put(key, answer)
                on_progress(num_requests - len(missing) + len(answers), num_requests)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
        return answers

    def _refuse_too_many(self, failures: Sequence[str], num_done: int, num_requests: int) -> None:
        none_came = len(failures) == num_done >= min(FIRST_FAILURES, num_requests)
        if len(failures) > self.max_failed_share * num_requests or (none_came and self.max_failed_share < 1):
            raise ValueError(
                f"{len(failures)} of the first {num_done} requests to {self.endpoint.model} failed; at most"
                f" {self.max_failed_share:.0%} of {num_requests} may fail. The first failure: {failures[0]}"
            )
