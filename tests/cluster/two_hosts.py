"""The driver program of tests/cluster/test_two_hosts.py: `python two_hosts.py sum|hosts|count FOLDER`."""

import os
import socket
import sys
import time
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.connection import connect, living_nodes
from cluster.group import WorkerGroup
from heed.jobs.recovery import Workers, run_to_end
from lm.progress import note_progress
from training.notices import speaking_through

CONFIG = ClusterConfig(silence_seconds=20, wait_for_nodes_seconds=240)


def total() -> tuple[str, float, int]:
    import torch

    torch.distributed.init_process_group("gloo")
    summed = torch.tensor([10.0 + int(os.environ["RANK"])])
    torch.distributed.all_reduce(summed)
    torch.distributed.destroy_process_group()
    return socket.gethostname(), float(summed), torch.get_num_threads()


def count_together(folder: str) -> None:
    """Steps that both ranks take together; rank 0 records the last one, as a stage keeps checkpoints."""
    from datetime import timedelta

    import torch

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    kept = Path(folder, "checkpoints")
    kept.mkdir(exist_ok=True)
    for step in range(len(list(kept.iterdir())), 60):
        torch.distributed.all_reduce(torch.ones(1))
        note_progress()
        if os.environ["RANK"] == "0":
            (kept / f"step-{step:06d}").touch()
        time.sleep(0.2)
    torch.distributed.destroy_process_group()


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    connect(2)
    while len(living_nodes()) < 2:
        time.sleep(0.2)
    if what == "sum":
        with WorkerGroup(2, CONFIG) as group:
            print(group.run("sum", total), flush=True)
        return
    workers = Workers([2], folder, CONFIG)
    if what == "hosts":
        with speaking_through(print):
            workers.start()
        print(workers.hosts)
        workers.close()
        return

    def work() -> None:
        print("placing", flush=True)
        group = workers()
        print("working", flush=True)
        group.run("count", count_together, str(folder))

    run_to_end("count", folder, work, workers.abandon)
    print("done", flush=True)
    workers.close()


if __name__ == "__main__":
    main()
