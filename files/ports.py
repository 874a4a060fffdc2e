"""Ports for servers that open them later."""

import random
import socket

# Below the ports for outgoing connections (32768 and up), so that no connection takes the port before its server opens
# it, which can be minutes later; above the ports of Ray's own workers (10002 to 19999).
PORTS = range(20_000, 32_000)
TRIES = 100


def free_port() -> int:
    """Returns a free port of this machine. Raises: OSError if none is found."""
    # Two runs with the same seed would draw the same port from Python's global generator.
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # the port is taken
                continue
            return port
    raise OSError(f"{TRIES} ports between {PORTS[0]} and {PORTS[-1]} are all taken")
