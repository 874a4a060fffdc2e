"""Ports for servers that open them later."""

import random
import socket

# Below the ports that systems use for outgoing connections (32768 and up), so that none of those takes the port before
# its server opens it, which can be minutes later; above those that Ray uses for its own workers (10002 to 19999).
PORTS = range(20_000, 32_000)
TRIES = 100


def free_port() -> int:
    """A port of this machine on which nobody listens. Raises OSError where none is found."""
    # Two runs that were seeded alike would draw the same port from Python's shared generator.
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # somebody listens there
                continue
            return port
    raise OSError(f"{TRIES} ports between {PORTS[0]} and {PORTS[-1]} are all taken")
