"""Exact coverage of intervals from one verdict per prompt, by enumeration: there are few distinct outcomes if each
of n prompts is a win, a tie or a loss. `python -m benchmarks.exact_coverage` rewrites these tables of
docs/statistics.md, and tests/benchmarks/test_exact_coverage.py checks them. Worlds with more outcomes are simulated
(`compare_coverage`).

Shape letters: P prompts.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.compare_worlds import equality
from preferences.statistics.estimates import LEVEL, Floats
from preferences.statistics.intervals import bootstrap_ratio, wilson

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
BEGIN, END = "<!-- written by python -m benchmarks.exact_coverage: {} -->\n", "<!-- end -->\n"
NUM_RESAMPLES = 2_000
LEAST_CHANCE = 1e-9  # less likely outcomes are not enumerated; together, their probability is below 2e-5

Ends = tuple[float, float]


class Coverage(NamedTuple):
    """The probability that an interval contains the truth, and its expected width."""

    share: float
    width: float


def exact_coverage(
    interval: Callable[[Floats], Ends], num_prompts: int, win: float, tie: float, truth: float
) -> Coverage:
    """Returns the coverage over all outcomes [P], whose entries are 1, ½ or 0."""
    total = covered = width = 0.0
    loss = max(0.0, 1 - win - tie)
    for ties in range(num_prompts + 1 if tie else 1):
        for wins in range(num_prompts - ties + 1):
            losses = num_prompts - ties - wins
            ways = math.comb(num_prompts, wins) * math.comb(num_prompts - wins, ties)
            chance = ways * win**wins * tie**ties * loss**losses
            if chance > LEAST_CHANCE:
                low, high = interval(np.repeat([1.0, 0.5, 0.0], [wins, ties, losses]))
                total += chance
                covered += chance * (low <= truth <= high)
                width += chance * (high - low)
    return Coverage(covered / total, width / total)


# ---- intervals ----


def ours(x_P: Floats) -> Ends:
    return equality(x_P).interval()


def bootstrapped(x_P: Floats) -> Ends:
    """The percentile bootstrap over prompts, at the level that gives about 95% with this many of them."""
    level = expanded_level(len(x_P))
    _, low, high = bootstrap_ratio(x_P, np.ones(len(x_P)), seed=0, num_resamples=NUM_RESAMPLES, level=level)
    return low, high


def expanded_level(num_prompts: int) -> float:
    """Returns the level 1 - 2·Φ(-t·√(n/(n-1))) at which bootstrap percentiles over n prompts are about a 95% interval.

    A bootstrap's spread is too small by √((n-1)/n), and its quantiles are normal instead of Student's with n - 1
    degrees of freedom. Hesterberg 2015, What teachers should know about the bootstrap, American Statistician 69(4),
    "expanded percentile".
    """
    t = stats.t.ppf((1 + LEVEL) / 2, num_prompts - 1) * math.sqrt(num_prompts / (num_prompts - 1))
    return 1 - 2 * float(stats.norm.cdf(-t))


def students(x_P: Floats) -> Ends:
    """Mean ± t·s."""
    half = float(stats.t.ppf(0.975, len(x_P) - 1)) * float(x_P.std(ddof=1)) / len(x_P) ** 0.5
    return float(x_P.mean()) - half, float(x_P.mean()) + half


def wilson_of_effective_prompts(x_P: Floats) -> Ends:
    """Wilson's interval for p(1 - p)/v prompts, where v is the variance of the mean."""
    mean, variance = float(x_P.mean()), float(x_P.var(ddof=1)) / len(x_P)
    if not variance:
        return mean, mean
    low, high = wilson(np.array(mean), np.array(mean * (1 - mean) / variance))
    return float(low), float(high)


def plain_wilson(x_P: Floats) -> Ends:
    low, high = wilson(np.array(x_P.mean()), np.array(len(x_P)))
    return float(low), float(high)


# ---- tables ----


def _percent(found: Coverage) -> str:
    return f"{100 * found.share:.2f}%"


def win_rate_table() -> str:
    lines = ["| win rate, 20 prompts | interval covers | mean width |", "|---|---|---|"]
    for win, tie in (
        (0.5, 0.0),
        (0.75, 0.0),
        (0.9, 0.0),
        (0.95, 0.0),
        (0.35, 0.3),
        (0.3, 0.6),
        (0.12, 0.8),
        (0.8, 0.2),
    ):
        truth, ties = win + tie / 2, f"{tie:.0%} ties" if tie else "no ties"
        found = exact_coverage(ours, 20, win, tie, truth)
        lines.append(f"| {truth:.2f}, {ties} | {_percent(found)} | {found.width:.3f} |")
    return "\n".join(lines) + "\n"


def simpler_table() -> str:
    """Returns a table that compares intervals that Heed does not use with its own."""
    intervals = {
        "mean ± t·s": students,
        "Wilson, of p(1 - p)/v prompts": wilson_of_effective_prompts,
        "percentile bootstrap": bootstrapped,
        "score interval (ours)": ours,
    }
    rates = (0.5, 0.75, 0.9, 0.95)
    lines = [f"| 20 prompts, no ties | {' | '.join(f'win rate {rate:g}' for rate in rates)} |", "|---" * 5 + "|"]
    for name, interval in intervals.items():
        found = [exact_coverage(interval, 20, rate, 0.0, rate) for rate in rates]
        lines.append(f"| {name} | {' | '.join(map(_percent, found))} |")
    return "\n".join(lines) + "\n"


def sizes_table() -> str:
    """Returns a table of win rates and rates of flips with more prompts. Two policies' Bradley-Terry rating is the win
    rate's logit.
    """
    rows = (
        ("win rate .9, and its rating", ours, 0.9),
        ("win rate .95", ours, 0.95),
        ("flips at .05", plain_wilson, 0.05),
    )
    sizes = (20, 50, 100, 200)
    lines = [f"| no ties | {' | '.join(f'{num} prompts' for num in sizes)} |", "|---" * 5 + "|"]
    for what, interval, share in rows:
        found = [exact_coverage(interval, num, share, 0.0, share) for num in sizes]
        lines.append(f"| {what} | {' | '.join(map(_percent, found))} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {"win rate": win_rate_table, "simpler": simpler_table, "sizes": sizes_table}


def with_tables(page: str) -> str:
    """Returns the page with newly computed tables."""
    for name, table in TABLES.items():
        before, rest = page.split(BEGIN.format(name))
        page = before + BEGIN.format(name) + table() + END + rest.split(END, 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
