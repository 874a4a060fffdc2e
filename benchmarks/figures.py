"""Measured figures in the README: each comes from a file that a command wrote.

    heed run configs/jobs/demo.toml && python -m benchmarks.figures runs/demo

stores the demo's figures as `benchmarks/demo.json` and writes them, with those of `make bench`
(`benchmarks/speed/with-amx.json` and `without-amx.json`), between the markers of README.md and docs/tutorials/demo.md.
Without a folder it only rewrites the documents from the stored files.
`tests/benchmarks/test_figures.py` holds the documents to the stored files.
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
from benchmarks.speed.peers import RESULTS
from benchmarks.speed.rows import HEED
from benchmarks.speed.table import rate, write_between_markers
from files.atomic import write_text

DEMO = ROOT / "benchmarks" / "demo.json"
PAGES = {"demo": [ROOT / "README.md", ROOT / "docs" / "tutorials" / "demo.md"], "speed": [ROOT / "README.md"]}


def stored(report: Mapping[str, Any], measured_on: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a demo's report.json: seed, seconds, the machine, and the figures that the documents name."""
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
    """The demo's machine, time, policies, and what beats what, in Markdown."""
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
    """Heed's rate divided by each peer's, median over rounds: a paragraph for each kind of CPU."""
    stored_files = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS if path.exists()]
    return "\n\n".join(_speed_paragraph(results) for results in stored_files)


def _speed_paragraph(results: Mapping[str, Any]) -> str:
    unit = "with" if results["machine"]["amx_bf16"] else "without"
    found = [f"{name}: {_ratios(row, results['seconds'])}" for name, row in results["rows"].items()]
    sentence = f"On {results['threads']} cores {unit} AMX, Heed's speed divided by a peer's: {'; '.join(found)}."
    return textwrap.fill(sentence, width=120, break_on_hyphens=False)


def _ratios(row: Mapping[str, Any], seconds: str) -> str:
    """Each peer and Heed's rate divided by its own."""
    found = []
    for peer in row["peers"]:
        pairs = [(runs[HEED], runs[peer["name"]]) for runs in row["runs"]]
        ratio = median(rate(own, seconds) / rate(other, seconds) for own, other in pairs)
        found.append(f"{peer['name']} {ratio:.2f}")
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
    unit = "with" if measured_on["amx_bf16"] else "without"
    return f"{measured_on['cores']} cores {unit} AMX ({measured_on['cpu']})"


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
