"""Lets scripted labelers answer through a labeling server's HTTP API; `preferences.scripted` does so in process.

Leaves out: labelers that answer at the same time (use one client per thread or process for that).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx
import tenacity

from preferences.records import Answer, Labeler, Message, ShownTask

FIRST_WAIT_SECONDS = 0.2  # before the first retry; each further wait is twice as long, up to LONGEST_WAIT_SECONDS
LONGEST_WAIT_SECONDS = 5.0
REQUEST_SECONDS = 60.0


class LabelClient:
    """A labeler's session with a labeling server. `key` is what the labeler's one-time link showed.

    The server measures the time from when it hands out a task, so `Answer.milliseconds` is not sent. While the server
    is unreachable or fails, each request is repeated for up to `patience_seconds`; nothing is stored twice.

    Raises: ValueError if name and key do not match.
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
        """Returns the instructions' `version` and `text`, and the `flags` that labelers may give."""
        found: dict[str, Any] = self._call("GET", "/instructions")
        return found

    def confirm_reading(self) -> None:
        """Confirms that the instructions were read. Without that there are no tasks."""
        self._call("POST", "/instructions/read")

    def answer_next(self) -> str:
        """Gives the next task to the labeler and sends their answer, which is on disk when this returns.

        Returns "", or what the labeler waits for if there is no task: "instructions", "nothing open", "screening".

        Raises: ValueError, with the server's reason, for an answer that is refused.
        """
        task = self._call("POST", "/lease")
        if "waiting" in task:
            return str(task["waiting"])
        prompt = tuple(Message.of(message) for message in task["prompt"])
        result = self.labeler.judge(ShownTask(task["form"]["task"], prompt, tuple(task["responses"]), task["warning"]))
        if isinstance(result, Answer):
            body = {"ranks": result.ranks, "ratings": result.ratings, "flags": result.flags, "note": result.note}
            said = result.annotations
            criteria = {one.name: one.ratings for one in said.criteria}
            turns: dict[str, list[float]] = {}
            for one in sorted(said.turns, key=lambda one: one.turn):
                turns.setdefault(one.name, []).append(one.rating)
            more = {"criteria": criteria, "turns": turns, "edits": said.edits}
            self._call("POST", "/answers", {"form": task["form"], **body, **more})
        else:
            self._call("POST", "/skips", {"form": task["form"], "reason": result.reason})
        return ""

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        is_down = tenacity.retry_if_result(lambda response: response.status_code >= 500)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.RequestError) | is_down,
            stop=tenacity.stop_after_delay(self._patience_seconds),
            wait=tenacity.wait_exponential(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )
        response = retrying(self._client.request, method, path, json=body)
        if response.is_success:
            return response.json() if response.content else None
        raise ValueError(
            f"labeler {self.labeler.name!r}: {method} {response.url} was refused with status"
            f" {response.status_code}: {response.text}"
        )


def answer_in_turns(clients: Sequence[LabelClient]) -> dict[str, str]:
    """Lets the labelers take turns, one task each, until none has one. Returns what each waits for, by name.

    Raises what `LabelClient.answer_next` raises.
    """
    while True:
        waiting = {client.labeler.name: client.answer_next() for client in clients}
        if all(waiting.values()):
            return waiting
