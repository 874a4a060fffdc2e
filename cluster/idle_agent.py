"""Runs in place of Ray's dashboard agent, which Heed does not use and whose imports take a CPU second.

Ray's raylet starts it as `idle_agent.py --session-dir=FOLDER --node-id=ID ...`, waits for the files with its ports, and
ends if it ends. Standard library only.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules must not shadow the standard library's

import os
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_IN_USE = "-1"
POLL_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    """Report that no port is in use, and run as long as the raylet does."""
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for name in PORTS:
        port = Path(options["--session-dir"], f"{name}_{options['--node-id']}")
        unfinished = port.with_name(f"{port.name}.writing")
        unfinished.write_text(NOT_IN_USE)
        unfinished.rename(port)
    while os.getppid() == int(os.environ["RAY_RAYLET_PID"]):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
