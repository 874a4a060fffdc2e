"""One rank: a process that keeps objects and runs the driver's calls. It imports torch only after it sends heartbeats.

It imports the driver's copy of Heed, and user code that may exist only on the driver's machine.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle
from ray.job_config import JobConfig

from cluster.messages import listen_for_request, send_beats, send_notice
from files.importing import import_from, imports_uncollected, source_tree
from training.notices import speak_through


class _Worker:
    """One rank. Functions run in it see the rank environment that `torch.distributed` and Accelerate read.

    A user's modules are searched for in `folders`, which are the driver's, after all other folders.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        ranks_per_node: int,
        name: str,
        limit_seconds: float,
        cpu_threads: int = 0,
        folders: Sequence[str] = (),
    ) -> None:
        send_beats(name, limit_seconds)
        for folder in folders:
            import_from(folder)
        threads = cpu_threads or max(1, usable_cores() // ranks_per_node)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch loads
        interface = interface_of(ray.util.get_node_ip_address())
        if interface:
            # Otherwise gloo takes the address that this machine's own name resolves to (on Debian 127.0.1.1), and NCCL
            # the first interface that is up, perhaps a container bridge. "=": NCCL takes other names as prefixes.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        unsupported = ""
        with imports_uncollected():
            import torch

            with suppress(ImportError):  # the environment of another sampling engine has no Accelerate
                import training.engine  # noqa: F401  # early, while the driver prepares data
                from training.internals import use_supported_segments

                unsupported = use_supported_segments()

        torch.set_num_threads(threads)
        speak_through(send_notice)
        if unsupported:
            notice = f"rank {rank}: its GPU's driver has no expandable segments ({unsupported}): memory fragments more"
            send_notice(notice)
        if rank == 0:
            listen_for_request()
        self.rank = rank
        self.kept: dict[str, Any] = {}
        self.stores: list[Any] = []  # servers of rendezvous, whose ports nobody else can take before ranks meet there
        os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(num_workers))

    def address(self) -> tuple[bool, Any]:
        """This node's address and the port of a new store. A rank 0 in this process that starts one there shares it."""

        def serve() -> tuple[str, int]:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            host = ray.util.get_node_ip_address()
            self.stores.append(TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True))
            return host, self.stores[-1].port

        return self._guarded(serve)

    def visible_gpus(self) -> tuple[bool, Any]:
        """The GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES; "" for none."""
        return self._guarded(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def join(self, host: str, port: int) -> tuple[bool, Any]:
        return self._guarded(lambda: os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port)))

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        return self._guarded(lambda: function(*args, **kwargs))

    def put(
        self, key: str, factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        def make() -> None:
            self.kept[key] = factory(*args, **kwargs)

        return self._guarded(make)

    def call(self, key: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        return self._guarded(lambda: getattr(self.kept[key], method)(*args, **kwargs))

    def hand_over(self, key: str, give: str, taker: str, take: str) -> tuple[bool, Any]:
        """Call a method of one kept object with the values that a method of another yields."""
        return self._guarded(lambda: getattr(self.kept[taker], take)(getattr(self.kept[key], give)()))

    def offer(self, key: str, give: str) -> tuple[bool, Any]:
        """Call a method, and put each value that rank 0 yields where other groups can fetch it."""

        def put() -> list[Any]:
            references = [ray.put(value) if self.rank == 0 else None for value in getattr(self.kept[key], give)()]
            return references if self.rank == 0 else []

        return self._guarded(put)

    def receive(self, key: str, take: str, *values: Any) -> tuple[bool, Any]:
        """Call a method with offered values, which Ray has fetched by the time this runs."""
        return self._guarded(lambda: getattr(self.kept[key], take)(values))

    def drop(self, key: str) -> tuple[bool, Any]:
        return self._guarded(lambda: self.kept.pop(key).close())

    def _guarded(self, work: Callable[[], Any]) -> tuple[bool, Any]:
        """Returns (True, result) or (False, Failure), so that the driver learns which rank failed first and why."""
        from cluster.failures import Failure

        try:
            return True, work()
        except Exception as error:
            return False, Failure.of(error)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the cores that this process, not the machine, may use, given its affinity and its container's limit."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()  # both in microseconds
        limit = cores if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):  # control groups version 1, or none
        limit = cores
    try:
        old_quota = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())  # -1 for no limit
        old_period = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
        limit = min(limit, old_quota / old_period) if old_quota > 0 else limit
    except (OSError, ValueError):
        pass
    return max(1, math.floor(min(cores, limit)))


def interface_of(address: str) -> str:
    """Return the network interface that has this address; "" if none does, as behind NAT."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(candidate.address == address for candidate in addresses):
            return str(name)
    return ""


class HeedFirst(JobConfig):
    """Makes workers look for modules in the driver's tree of Heed first, if that is a checkout.

    Ray would put the driver's script folder and current folder first, so a user's `reward.py` or `datasets.py` would
    shadow the package of that name. A rank adds the current folder after all others.
    """

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[source_tree()] if source_tree() else [])

    def _runtime_env_has_working_dir(self) -> bool:
        """Claim to have one. Ray asks only to decide whether to add its folders (`ray._private.worker.connect`)."""
        return True


def send_by_value(module: ModuleType) -> None:
    """Send the module's functions and classes to ranks as code, rather than as names to import, from now on."""
    cloudpickle.register_pickle_by_value(module)
