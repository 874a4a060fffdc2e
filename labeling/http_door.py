"""Lets scripted labelers answer over HTTP, through the API of a labeling server: `preferences.door` for other machines.

Leaves out: labelers that answer at the same time (a door a thread, or a process, does that).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity

from endpoints.retries import send_with_retries
from preferences.records import Answer, Labeler, Message, ShownTask

FIRST_WAIT_SECONDS = 0.2  # before the first retry; each further one waits twice as long, up to LONGEST_WAIT_SECONDS
LONGEST_WAIT_SECONDS = 5.0
REQUEST_SECONDS = 60.0


class HttpDoor:
    """A labeler's session at a labeling server. `key` is what the labeler's one-time link showed.

    The server counts the time from the moment that it hands a task out; `Answer.milliseconds` is not sent. While the
    server cannot be reached, or fails, each request is repeated for `patience_seconds`: nothing is stored twice.

    Raises ValueError where name and key do not go together.
    """

    def __init__(self, address: str, labeler: Labeler, key: str, *, patience_seconds: float = 60.0) -> None:
        self.labeler, self._patience_seconds = labeler, patience_seconds
        self._client = httpx.Client(base_url=f"{address.rstrip('/')}/api", timeout=REQUEST_SECONDS)
        session = self._call("POST", "/session", {"name": labeler.name, "key": key})
        self._client.headers["Authorization"] = f"Bearer {session['token']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def instructions(self) -> dict[str, Any]:
        """`version` and `text` of what labelers are told, and the `flags` that they may give."""
        found: dict[str, Any] = self._call("GET", "/instructions")
        return found

    def read_instructions(self) -> None:
        """Say that they are read, without which there are no tasks."""
        self._call("POST", "/instructions/read")

    def answer_next(self) -> str:
        """Put the next task to the labeler, and what they say to the server, where it is then on disk.

        Returns "" or, where there is no task, what the labeler waits for: "instructions", "nothing open", "screening".
        Raises ValueError, with the server's reason, for an answer that is refused.
        """
        asked = self._call("POST", "/lease")
        if "waiting" in asked:
            return str(asked["waiting"])
        prompt = tuple(Message(**message) for message in asked["prompt"])
        said = self.labeler.judge(ShownTask(asked["form"]["task"], prompt, tuple(asked["responses"])))
        if isinstance(said, Answer):
            body = {"ranks": said.ranks, "ratings": said.ratings, "flags": said.flags, "note": said.note}
            self._call("POST", "/answers", {"form": asked["form"], **body})
        else:
            self._call("POST", "/skips", {"form": asked["form"], "reason": said.reason})
        return ""

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = send_with_retries(
            lambda: self._client.request(method, path, json=body),
            tenacity.stop_after_delay(self._patience_seconds),
            first_pause_seconds=FIRST_WAIT_SECONDS,
            longest_pause_seconds=LONGEST_WAIT_SECONDS,
            retried_statuses=(),  # a labeler who has to wait is told so
        )
        if response.is_success:
            return response.json() if response.content else None
        raise ValueError(
            f"labeler {self.labeler.name!r}: {method} {response.url} was refused with status"
            f" {response.status_code}: {response.text}"
        )


def answer_in_turns(doors: Sequence[HttpDoor]) -> dict[str, str]:
    """Let the labelers take turns, a task each, until none has one; returns what each waits for then, by name.

    Raises what `HttpDoor.answer_next` raises.
    """
    while True:
        waiting = {door.labeler.name: door.answer_next() for door in doors}
        if all(waiting.values()):
            return waiting
