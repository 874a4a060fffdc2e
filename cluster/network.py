"""Several hosts on one machine: network namespaces joined by a bridge, each with an address and a cable to pull.

The namespaces' names contain this process's id, and the machine's own interfaces are left alone. It takes root, or a
user namespace in which one is root (`unshare --user --map-root-user --net --mount`).
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path

INTERFACE = "eth0"  # every host's
_NAMESPACES = Path("/run/netns")
_numbers = count()


class Network:
    """A network of `hosts`, names of at most 15 characters; the switch between them is a namespace too.

    Raises:
        OSError: this process may not make namespaces.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self._prefix = tuple(hosts), f"heed-{os.getpid()}-{next(_numbers)}"
        self._made = list[str]()
        try:
            self._lay_cables()
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        return f"10.77.0.{1 + self.hosts.index(host)}"

    def command(self, host: str, arguments: Sequence[str]) -> list[str]:
        """A command line that runs the command on that host, in the process that it starts."""
        return ["nsenter", f"--net={_NAMESPACES / self._name(host)}", "--", *arguments]

    def unplug(self, host: str) -> None:
        """Pull the host's cable out of the switch: packets to and from it are lost without notice."""
        _ip("-n", self._name("switch"), "link", "set", "dev", host, "down")

    def plug(self, host: str) -> None:
        _ip("-n", self._name("switch"), "link", "set", "dev", host, "up")

    def close(self) -> None:
        """Remove the namespaces; their cables disappear once no process is left inside."""
        while self._made:
            _ip("netns", "delete", self._made.pop(), check=False)

    def _name(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _add(self, host: str) -> str:
        name = self._name(host)
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "dev", "lo", "up")
        return name

    def _lay_cables(self) -> None:
        switch = self._add("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "dev", "bridge", "up")
        for host in self.hosts:
            name = self._add(host)
            _ip("link", "add", host, "netns", switch, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", switch, "link", "set", "dev", host, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "dev", INTERFACE, "up")


def why_no_network() -> str:
    """Why this process cannot make a network, for its user; "" where it can. Makes and removes one to find out."""
    missing = [command for command in ("ip", "nsenter") if shutil.which(command) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2 and util-linux)"
    try:
        Network(["probe"]).close()
    except OSError as error:
        return f"no network namespaces here ({error}); root may make them"
    return ""


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
