"""HTTP connections with deadlines, because uvicorn waits forever for the rest of a request and keeps every connection.

A connection must deliver all of a request's headers, then its body, in time. A client that does not read its response
is cut off too. If there are too many connections, the one that has gone longest without a complete request is closed,
so that half-sent requests do not keep others out. Leaves out: HTTP/2 and WebSockets.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass
class Deadlines:
    """Time limits of a connection in seconds, the number of connections, and those that may be closed for others."""

    header_seconds: float
    body_seconds: float
    reading_seconds: float
    max_connections: int
    waiting: dict["TimedProtocol", None] = field(default_factory=dict)  # in order of arrival


class TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with deadlines. `timed_protocol` makes the class for a server."""

    deadlines: Deadlines

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""  # "headers", "body", "request" between two requests, or "" while one is answered
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.deadlines.max_connections:
            next(iter(self.deadlines.waiting), self).abort()
        if not transport.is_closing():
            self._await("headers")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts a deadline: the client does not read what is sent."""
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self.deadlines.reading_seconds, self.abort)

    def resume_writing(self) -> None:
        """Cancels the deadline: the client reads again."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def abort(self) -> None:
        """Closes the connection immediately."""
        self._await("")
        self.transport.abort()

    def _look(self) -> None:
        """Starts the deadline for what must arrive next."""
        if self.transport.is_closing():
            return self._await("")
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return self._await("body")
        if state is not h11.IDLE:
            return self._await("")
        return self._await("headers" if self.conn.trailing_data[0] else "request")

    def _await(self, what: str) -> None:
        """Starts a deadline, unless it is running already: a byte now and then must not extend it."""
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = what
        if not what:
            self.deadlines.waiting.pop(self, None)
            return
        self.deadlines.waiting[self] = None
        if what == "request":
            return  # uvicorn's own keep-alive timer runs
        seconds = self.deadlines.header_seconds if what == "headers" else self.deadlines.body_seconds
        self._deadline = self.loop.call_later(seconds, self.abort)


def timed_protocol(deadlines: Deadlines) -> type[TimedProtocol]:
    """Returns the protocol class for one server."""
    return type("ServerProtocol", (TimedProtocol,), {"deadlines": deadlines})
