"""Turns a comparison's verdicts into statistics, the report, and a table for the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from evaluation.compare.folder import BEST_OF_N, MEASURES, RESPONSES, VERDICTS, read_settings
from evaluation.compare.report.page import write_comparison_report
from evaluation.measures.policies import Known, measure_policies
from evaluation.verdicts import Response, read_responses, read_verdicts
from files.atomic import write_json
from files.records import as_json


def conclude(folder: Path) -> dict[str, Any]:
    """Compute a comparison's statistics, measures and report from its folder alone; no other place does.

    Returns the contents of report.json.
    """
    settings = read_settings(folder)
    responses, verdicts = read_responses(folder / RESPONSES), read_verdicts(folder / VERDICTS)
    path = folder / MEASURES
    # Measures from elsewhere are kept.
    measures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if _share_prompts(responses):
        known = Known(
            best_of={found["name"]: found["n"] for found in settings["policies"] if found.get("kind") == BEST_OF_N},
            pass_marks={judge["name"]: judge["pass_mark"] for judge in settings["judges"] if "pass_mark" in judge},
        )
        found = measure_policies(responses, verdicts, seed=settings["seed"], known=known)
        write_json(path, measures | {"policies": as_json(found)})
    return write_comparison_report(folder)


def _share_prompts(responses: Sequence[Response]) -> bool:
    """Returns whether all policies answer at least one common prompt, which only external judgments can lack."""
    by_policy: dict[str, set[str]] = {}
    for response in responses:
        by_policy.setdefault(response.policy, set()).add(response.prompt_id)
    return bool(set.intersection(*by_policy.values()))


def results_table(report: Mapping[str, Any]) -> Table:
    """A table of every two policies by every judge, from the report's own numbers: the first one's win rate and the
    verdict."""
    table = Table(box=None, pad_edge=False)
    for column in ("judge", "policies", "win rate (95%)", "p (Holm)", "prompts", ""):
        table.add_column(column, no_wrap=column not in ("judge", "policies", ""))
    for judge in report["summary"]["judges"]:
        for pair in judge["pairs"]:
            rate = pair["win_rate"]
            interval = f"({_share(rate['low'])} to {_share(rate['high'])})"
            failed = f"; {pair['num_failed']} verdicts failed" if pair["num_failed"] else ""
            table.add_row(
                judge["judge"],
                f"{pair['policy_a']} against {pair['policy_b']}",
                f"{_share(rate['mean'])} {interval}",
                f"{pair['significance']['holm_p']:.3g}",
                f"{rate['num_prompts']:,}",
                in_words(pair) + failed,
            )
    return table


def in_words(pair: Mapping[str, Any]) -> str:
    """Says which of the two is better; if that is not shown, the smallest win rate that would have been shown."""
    if pair["different"]:
        return f"{pair['policy_a'] if pair['win_rate']['mean'] > 0.5 else pair['policy_b']} is better"
    detectable = pair["power"]["detectable"]
    if pair["verdicts"]["wins"] == pair["verdicts"]["losses"] == 0:
        return "no difference shown: all verdicts are ties"
    if detectable is None:
        return "no difference shown: too few prompts"
    return f"no difference shown; {_share(0.5 + detectable)} would be"


def _share(value: float | None) -> str:
    """Formats a share in percent; None is unknown."""
    return "?" if value is None else f"{value:.1%}"
