"""What comes of a comparison's verdicts: the statistics, the report, a table for the terminal."""

from pathlib import Path

from rich.table import Table

from evaluation.statistics.results import PairSummary, Summary
from evaluation.statistics.summary import summarise
from evaluation.verdicts import read_verdicts
from heed.comparison_folder import VERDICTS, read_settings


def conclude(folder: Path) -> Summary:
    """The one place where a comparison's statistics and report are made, of its folder alone."""
    settings = read_settings(folder)
    policies = [policy["name"] for policy in settings["policies"]]
    return summarise(read_verdicts(folder / VERDICTS), policies, seed=settings["seed"])


def results_table(summary: Summary) -> Table:
    """Every two policies by every judge: the win rate of the first, and whether the difference is real."""
    table = Table("judge", "policies", "win rate (95%)", "p (Holm)", "prompts", "", box=None, pad_edge=False)
    for judge in summary.judges:
        for pair in judge.pairs:
            rate = pair.win_rate
            failed = f"; {pair.num_failed} verdicts failed" if pair.num_failed else ""
            table.add_row(
                judge.judge,
                f"{pair.policy_a} against {pair.policy_b}",
                f"{rate.mean:.1%} ({rate.low:.1%} to {rate.high:.1%})",
                f"{pair.significance.holm_p:.3g}",
                f"{rate.num_prompts:,}",
                in_words(pair) + failed,
            )
    return table


def in_words(pair: PairSummary) -> str:
    """Which of the two is better; where that is not shown, the smallest difference that would have been."""
    if pair.different:
        better = pair.policy_a if pair.win_rate.mean > 0.5 else pair.policy_b
        return f"{better} is better"
    detectable = pair.power.detectable
    if detectable != detectable:
        return "no difference shown; so few prompts could show none"
    return f"no difference shown; {0.5 + detectable:.0%} would have been"
