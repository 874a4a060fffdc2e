"""Measured figures in the documents: each comes from a file that a command wrote.

    heed run configs/jobs/demo.toml && python -m benchmarks.figures runs/demo

stores the demo's figures as `benchmarks/demo.json` and writes them, with those of `make bench`
(`benchmarks/speed/peers-CPU.json`), between the markers of docs/tutorials/demo.md and docs/index.md.
Without a folder it only rewrites the documents from the stored files.
`tests/benchmarks/test_figures.py` checks the documents against the stored files.
"""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.environments import ROOT
from benchmarks.speed.machine import describe
from benchmarks.speed.peers import stored_results
from benchmarks.speed.rows import HEED
from benchmarks.speed.table import rate, write_between_markers
from files.atomic import write_text

DEMO = ROOT / "benchmarks" / "demo.json"
PAGES = {"demo": [ROOT / "docs" / "tutorials" / "demo.md"], "speed": [ROOT / "docs" / "index.md"]}


def stored(report: Mapping[str, Any], measured_on: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is stored of a demo's report.json: seed, seconds, the machine, and the figures in the documents."""
    compared = report["compare"]
    fields = ("gold_score", "pass_share", "kl_nats")
    return {
        "machine": dict(measured_on),
        "seed": report["job"]["seed"],
        "seconds": report["seconds"],
        "num_prompts": compared["num_prompts"],
        "policies": {name: {field: policy[field] for field in fields} for name, policy in compared["policies"].items()},
        "win_rate": compared["pairs"]["ppo/sft"]["win_rate"],
        "best_of_n": compared["best_of_n"],
        "reward_gold_accuracy": report["reward"]["gold_accuracy"],
        "labeler_agreement": report["collect"]["agreement"],
    }


def demo_text(demo: Mapping[str, Any]) -> str:
    """Returns the demo's machine, time, policies, and which policy beats which, in Markdown."""
    best = demo["best_of_n"][-1]
    names = {"pretrained": "pretrained", "sft": "SFT", f"best_of_{best['n']}": f"best of {best['n']}", "ppo": "PPO"}
    rows = [_policy_row(label, demo["policies"][name], best) for name, label in names.items()]
    return "\n".join(
        [
            f"Seed {demo['seed']}, {demo['num_prompts']} held-out prompts, {_minutes(demo['seconds']['total'])} on"
            f" {_described(demo['machine'])}:",
            "",
            "| policy | gold score (0 to 1) | perfect responses | KL from SFT, nats |",
            "|---|---|---|---|",
            *rows,
            "",
            textwrap.fill(_sentences(demo), width=120),
        ]
    )


def _sentences(demo: Mapping[str, Any]) -> str:
    return (
        f"PPO beats SFT {_share(demo['win_rate'])} of the time (ties count half). The reward model orders held-out"
        f" pairs as a noiseless labeler would in {_share(demo['reward_gold_accuracy'])} of cases; two labelers agree on"
        f" {_share(demo['labeler_agreement'])} of pairs."
    )


def speed_text() -> str:
    """Returns Heed's rate divided by each peer's, median over rounds, with a column per CPU."""
    found = stored_results()
    names = list(found[0]["rows"])
    peers = {name: ", ".join(peer["name"] for peer in found[0]["rows"][name]["peers"]) for name in names}
    heads = [f"{one['machine']['cpu']}, {_units(one['machine'])}" for one in found]
    rows = [
        [f"{name}: {peers[name]}", *(_ratios(one["rows"][name], one["seconds"]) for one in found)] for name in names
    ]
    lines = [["Heed's speed divided by a peer's, 2 cores", *heads], ["---"] * (len(found) + 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _ratios(row: Mapping[str, Any], seconds: str) -> str:
    """Heed's rate divided by that of each peer."""
    found = []
    for peer in row["peers"]:
        pairs = [(runs[HEED], runs[peer["name"]]) for runs in row["runs"]]
        ratio = median(rate(own, seconds) / rate(other, seconds) for own, other in pairs)
        found.append(f"{ratio:.2f}")
    return ", ".join(found)


def _policy_row(label: str, policy: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    kl = policy["kl_nats"]
    nats = f"at most {best['kl_bound_nats']:.2f}" if kl is None else f"{kl['mean']:.2f}"
    return f"| {label} | {policy['gold_score']['mean']:.2f} | {policy['pass_share']['mean']:.0%} | {nats} |"


def _share(estimate: Mapping[str, float]) -> str:
    return f"{estimate['mean']:.0%} ({estimate['low']:.0%} to {estimate['high']:.0%})"


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _described(measured_on: Mapping[str, Any]) -> str:
    return f"{measured_on['cores']} cores, {measured_on['cpu']}, {_units(measured_on)}"


def _units(machine: Mapping[str, Any]) -> str:
    return f"{'with' if machine['amx_bf16'] else 'without'} AMX"


def write_pages() -> None:
    """Rewrite the marked parts of all documents from the stored files."""
    texts = {"demo": demo_text(json.loads(DEMO.read_text())), "speed": speed_text()}
    for name, pages in PAGES.items():
        for page in pages:
            write_between_markers(page, name, texts[name])


def main(runs: Sequence[str]) -> None:
    """Store the figures of the demo in a run's folder, if one is given, and rewrite the documents."""
    for run in runs:
        report = json.loads((Path(run) / "report.json").read_text(encoding="utf-8"))
        write_text(DEMO, json.dumps(stored(report, describe()), indent=1) + "\n")
    write_pages()


if __name__ == "__main__":
    main(sys.argv[1:])
