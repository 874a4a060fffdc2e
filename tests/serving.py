"""Runs a test's HTTP server."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import TypeVar

AnyServer = TypeVar("AnyServer", bound=HTTPServer)


@contextmanager
def serving(server: AnyServer) -> Iterator[AnyServer]:
    """The server, which answers in a thread of its own until the block ends, and is closed then."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
