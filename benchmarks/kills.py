"""Kills each algorithm's run ten times: `python -m benchmarks.kills FOLDER [ALGORITHM ...] [--faults 10]`.

The debug job runs once. Each algorithm then starts from that job's models and rankings, as a one-stage job with at
least a hundred steps, while `research.chaos` kills its workers and drivers. Each algorithm has the settings of its job
in configs/jobs, except sizes.

`continuous` is RLOO with two learners, two generators and a reward's server, on four hosts: `--faults 100` kills each
of learners, generators, drivers, hosts and the server twenty times.
"""

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from research.chaos.campaign import run_chaos
from research.chaos.local_cluster import HEAD_ADDRESS, why_no_network
from research.chaos.result import summary
from stages.progress import results_console

JOBS = Path(__file__).parents[1] / "configs" / "jobs"
CRITIC_FREE = ("rloo", "grpo", "dr-grpo", "reinforce")
ALGORITHMS = ("ppo", *CRITIC_FREE, "dpo", "ipo", "rejection", "continuous")
STAGES = ("pretrain", "sft", "collect", "reward", "dpo", "ppo", "compare")
NUM_ITERATIONS, NUM_EPOCHS = 80, 60  # of policy gradients; of DPO and rejection sampling. A minute each
KINDS = ("worker", "driver")
KINDS_OF_ALL = (*KINDS, "generator", "node", "server")
PORT = 8791


def job_of(algorithm: str, parents: Path) -> dict[str, Any]:
    """Returns the algorithm's job, which starts from the models of the debug run in `parents`."""
    if algorithm == "continuous":
        colocated = job_of("rloo", parents)
        placement = {"kind": "continuous", "num_generators": 2, "num_rows": 24, "round_tokens": 4}
        reward = {"kind": "url", "url": f"http://{head_address()}:{PORT}/score"}
        ppo = {**colocated["ppo"], "max_new_tokens": 48, "placement": placement, "reward": reward}
        return colocated | {"name": algorithm, "workers": 2, "ppo": ppo}
    stage = {"dpo": "dpo", "ipo": "dpo", "rejection": "rejection"}.get(algorithm, "ppo")
    models: dict[str, Any] = {"init_from": str(parents / "sft" / "model")}
    judge = str(parents / "reward" / "model")
    dropped = [name for name in STAGES if name != stage]
    job: dict[str, Any] = {"base": str(JOBS / "debug.toml"), "name": algorithm, "without": [*dropped, "model"]}
    if stage == "ppo":
        job["without"] += ["ppo.ptx", *["ppo.advantage"] * (algorithm in CRITIC_FREE)]
        own = shipped(algorithm)["ppo"] if algorithm in CRITIC_FREE else {}
        models["reward"] = {"model": judge}
        return job | {"ppo": {**models, **own, "num_iterations": NUM_ITERATIONS, "save_every_iterations": 5}}
    if stage == "dpo":
        rankings = {"rankings": {"source": str(parents / "collect" / "rankings.jsonl")}}
        loss = {"loss": "ipo"} if algorithm == "ipo" else {}
        return job | {"dpo": {**models, **rankings, **loss, "num_epochs": NUM_EPOCHS, "save_every_steps": 10}}
    sizes = {
        "num_epochs": NUM_EPOCHS, "max_new_tokens": 96, "seq_len": 100, "save_every_steps": 10,
        "batch": {"batch_size": 4, "micro_batch_size": 2},
    }  # fmt: skip
    return job | {"rejection": {**shipped(algorithm)["rejection"], **models, "reward_from": judge, **sizes}}


def head_address() -> str:
    """Returns the address of the host on which drivers and the reward's server run."""
    return "127.0.0.1" if why_no_network() else HEAD_ADDRESS


def shipped(algorithm: str) -> dict[str, Any]:
    """Returns the algorithm's job file in configs/jobs."""
    return tomllib.loads((JOBS / f"{algorithm}.toml").read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=", ".join(ALGORITHMS))
    parser.add_argument("--faults", type=int, default=10)
    asked = parser.parse_args(arguments)
    unknown = sorted({*asked.algorithms} - {*ALGORITHMS})
    if unknown:
        parser.error(f"{', '.join(unknown)}: some of {', '.join(ALGORITHMS)} were expected, or none for all")
    algorithms = asked.algorithms or ALGORITHMS
    folder = asked.folder.resolve()
    heed = [sys.executable, "-c", "from heed.cli import main; main()"]
    subprocess.run([*heed, "run", str(JOBS / "debug.toml"), "--runs", str(folder)], check=True)
    failed = [name for name in algorithms if not survives(name, folder, asked.faults)]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(algorithms)} algorithms left the same bits")
    return bool(failed)


def survives(algorithm: str, folder: Path, num_faults: int) -> bool:
    """Returns whether every killed run of an algorithm has the same outputs, bit for bit, as the undisturbed run.

    Prints what happened.
    """
    job = folder / f"{algorithm}.toml"
    job.write_text(tomli_w.dumps(job_of(algorithm, folder / "debug")), encoding="utf-8")
    if algorithm == "continuous":
        server = [sys.executable, "-m", "benchmarks.reward_server", head_address(), str(PORT)]
        found = run_chaos(
            job, [], folder, num_faults=num_faults, seed=7, num_nodes=4, kinds=KINDS_OF_ALL, server=server
        )
    else:
        found = run_chaos(job, [], folder, num_faults=num_faults, seed=7, num_nodes=1, kinds=KINDS)
    results_console().print(f"[bold]{algorithm}[/]\n{summary(found)}\n")
    return not found.has_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
