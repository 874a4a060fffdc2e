"""HTTP connections with deadlines: uvicorn waits for the rest of a request for ever, and holds every connection.

A connection must bring a whole request's headers, then its body, in time; a client that does not read what it asked
for is cut off too. With too many connections, the one that has gone longest without a whole request makes room, so
that half-sent requests do not keep others out. Leaves out: HTTP/2 and WebSockets.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass
class Deadlines:
    """How long a connection may take, in seconds, how many there may be; and those that may be closed for others."""

    header_seconds: float
    body_seconds: float
    reading_seconds: float
    max_connections: int
    waiting: dict["TimedProtocol", None] = field(default_factory=dict)  # in the order in which they came


class TimedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1 with deadlines; `timed_protocol` makes the class that a server uses."""

    deadlines: Deadlines

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""  # "headers", "body", "request" between two of them, or "" while one is answered
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
        """The client does not read what is sent."""
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self.deadlines.reading_seconds, self.abort)

    def resume_writing(self) -> None:
        """The client reads on."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def abort(self) -> None:
        """Close the connection at once."""
        self._await("")
        self.transport.abort()

    def _look(self) -> None:
        """What is awaited after what has just come."""
        if self.transport.is_closing():
            return self._await("")
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return self._await("body")
        if state is not h11.IDLE:
            return self._await("")
        return self._await("headers" if self.conn.trailing_data[0] else "request")

    def _await(self, what: str) -> None:
        """Start the deadline for this, unless it is running: a byte now and then must not move it."""
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
    """The protocol class of one server."""
    return type("ServerProtocol", (TimedProtocol,), {"deadlines": deadlines})
