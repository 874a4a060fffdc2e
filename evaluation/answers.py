"""Sends many requests to one endpoint, several at a time, and never the same request twice.

Answers are stored in a SQLite file under the SHA-256 of the whole request, so later runs reuse them.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.endpoint import Answer, Endpoint

FIRST_FAILURES = 10  # if this many requests are done and all of them failed, no more are sent
TABLE = "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"

Request = Mapping[str, Any]
OnProgress = Callable[[int, int], None]  # (done, total)


class AnswerCache:
    """A cache of answers by request, in a SQLite file that several processes may share. Failures are not stored."""

    def __init__(self, path: Path) -> None:
        """Raises: ValueError if the file is not a SQLite database."""
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=30.0, check_same_thread=False, isolation_level=None)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute(TABLE)
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise ValueError(f"{path}: not a cache of endpoint answers: {error}") from None

    def get(self, key: str) -> Answer | None:
        with self._lock:
            row = self._database.execute("SELECT answer FROM answers WHERE request = ?", (key,)).fetchone()
        return Answer(**json.loads(row[0])) if row else None

    def put(self, key: str, answer: Answer) -> None:
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, json.dumps(asdict(answer))))

    def close(self) -> None:
        self._database.close()


def request_key(endpoint: Endpoint, request: Request) -> str:
    """Returns the SHA-256 of everything that an answer depends on."""
    return hashlib.sha256(json.dumps([endpoint.url, endpoint.model, request], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Asker:
    """Sends requests to an endpoint through `cache`, at most `concurrency` at a time.

    Stops with an error once more than `max_failed_share` of the requests have failed.
    """

    endpoint: Endpoint
    cache: Path
    concurrency: int
    max_failed_share: float

    def ask_all(self, requests: Sequence[Request], on_progress: OnProgress) -> list[Answer]:
        """Returns one answer per request, in order. Equal requests are sent once.

        Raises: ValueError with the first cause if too many requests fail. Answers received until then are stored.
        """
        cache = AnswerCache(self.cache)
        try:
            keys = [request_key(self.endpoint, request) for request in requests]
            answers = {key: answer for key in dict.fromkeys(keys) if (answer := cache.get(key)) is not None}
            missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in answers}
            answers |= self._ask_missing(missing, cache, len(keys), on_progress)
        finally:
            cache.close()
        return [answers[key] for key in keys]

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
