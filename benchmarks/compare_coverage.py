"""Do the intervals of a comparison have their nominal coverage? `python -m benchmarks.compare_coverage`.

The worlds of `benchmarks.compare_worlds` and `dependent_worlds` are drawn repeatedly, and every interval is compared
with the truth. `tests/evaluation/statistics/test_coverage.py` runs fewer worlds; docs/statistics.md has the tables for
2,000.
Shape letters: W worlds.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks import compare_worlds as worlds
from benchmarks import dependent_worlds
from benchmarks.compare_worlds import Held
from evaluation.statistics.significance import ALPHA, EqualityTest
from preferences.statistics.estimates import Floats

Draw = Callable[[np.random.Generator, int], Iterator[Held]]

STATISTICS: dict[str, tuple[Draw, tuple[int, ...]]] = {
    "win_rate": (worlds.win_rates, (20, 50, 200, 2_000)),
    "labelers": (worlds.over_labelers, (20, 100)),
    "ratings": (worlds.ratings, (20, 100)),
    "two_policies": (worlds.two_policies, (20, 50, 200)),
    "length": (worlds.lengths, (20, 50, 200)),
    "joint_length": (worlds.joint_lengths, (100,)),
    "position": (worlds.positions, (20, 100)),
    "flips": (worlds.flipped, (20, 100)),
    "rows": (worlds.rows_or_prompts, (200,)),
    "templates": (dependent_worlds.templates, (10, 20, 50)),  # of 5 prompts each
    "people": (dependent_worlds.people, (5, 8, 20, 50)),  # in an arena
    "playground": (dependent_worlds.playground, (100,)),
    "skewed": (worlds.skewed, (8, 25, 50, 200)),
    "wide_seeds": (dependent_worlds.wide_seeds, (2, 3, 5)),
    "skewed_seeds": (dependent_worlds.skewed_seeds, (2, 3, 5, 10)),
    "seeds": (dependent_worlds.seeds, (2, 3, 5, 10)),  # runs of each algorithm, on 100 prompts
}


# ---- coverage ----


@dataclass(frozen=True)
class Covered:
    """How often intervals contained the truth, among those with known ends, and their mean width if it is finite."""

    share: float
    num_known: int
    width: float


def coverage(draw: Draw, num_prompts: int, num_worlds: int, seed: int) -> dict[str, Covered]:
    found: dict[str, list[Held]] = {}
    for world in range(num_worlds):
        for held in draw(np.random.default_rng([seed, num_prompts, world]), num_prompts):
            found.setdefault(held.what, []).append(held)
    return {what: _covered(rows) for what, rows in found.items()}


def _covered(rows: Sequence[Held]) -> Covered:
    known = [row for row in rows if not np.isnan([row.low, row.high]).any()]
    widths = [row.high - row.low for row in known if np.isfinite([row.low, row.high]).all()]
    covers = [row.low <= row.truth <= row.high for row in known]
    return Covered(float(np.mean(covers)), len(known), float(np.mean(widths)))


# ---- tests under no difference, and power ----


def p_values(num_prompts: int, verdicts: int, num_worlds: int, seed: int) -> Floats:
    """Returns p [W] of the test for equal policies; 0 verdicts per prompt means one soft verdict."""
    p_W = np.empty(num_worlds)
    for world in range(num_worlds):
        generator = np.random.default_rng([seed, num_prompts, verdicts, world])
        size = num_prompts
        x_P = generator.binomial(verdicts, 0.5, size) / verdicts if verdicts else generator.beta(0.7, 0.7, size)
        p_W[world] = EqualityTest(x_P, seed=world).p
    return p_W


def power_at_detectable(num_prompts: int, tie: float, num_worlds: int, seed: int) -> float:
    """Returns how often the test detects what `EqualityTest.power` calls detectable, with one verdict per prompt."""
    decided = round(num_prompts * (1 - tie))
    detectable = EqualityTest(np.repeat([1.0, 0.5], [decided, num_prompts - decided]), seed=0).power().detectable
    generator = np.random.default_rng([seed, num_prompts])
    found = 0
    for world in range(num_worlds):
        x_P = worlds.outcome(generator.random(num_prompts), (1 - tie) / 2 + detectable, tie)
        found += EqualityTest(x_P, seed=world).p < ALPHA
    return found / num_worlds


def print_tests(num_worlds: int, seed: int) -> None:
    print("\n| no difference | prompts | KS p against uniform | p < 5% |\n|---|---|---|---|")
    for num_prompts, verdicts in ((10, 0), (20, 0), (50, 0), (200, 0), (50, 3), (200, 3), (200, 1)):
        p_W = p_values(num_prompts, verdicts, num_worlds, seed)
        values = f"{verdicts} verdicts per prompt" if verdicts else "soft"
        # With verdicts of 0, ½ or 1, p takes only a few values and cannot be uniform.
        fit = f"{stats.kstest(p_W, 'uniform').pvalue:.2f}" if not verdicts else "(few values)"
        print(f"| {values} | {num_prompts} | {fit} | {100 * (p_W < 0.05).mean():.1f}% |", flush=True)
    print("\n| prompts | ties | power at the detectable difference |\n|---|---|---|")
    for num_prompts, tie in ((20, 0.0), (20, 0.3), (50, 0.3), (200, 0.0), (200, 0.6), (2_000, 0.3)):
        power = power_at_detectable(num_prompts, tie, num_worlds, seed)
        print(f"| {num_prompts} | {tie:.0%} | {100 * power:.0f}% |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("statistics", nargs="*", help=f"all of: {' '.join(STATISTICS)} tests")
    parser.add_argument("--worlds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.statistics or (*STATISTICS, "tests"):
        if name == "tests":
            print_tests(arguments.worlds, arguments.seed)
            continue
        draw, sizes = STATISTICS[name]
        sized = "runs" if name.endswith("seeds") else name if name in ("templates", "people") else "prompts"
        print(f"\n| {name} | {sized} | intervals | cover the truth | mean width |\n|---|---|---|---|---|")
        for num_prompts in sizes:
            for what, covered in coverage(draw, num_prompts, arguments.worlds, arguments.seed).items():
                share, width = f"{100 * covered.share:.1f}%", f"{covered.width:.3g}"
                print(f"| {what} | {num_prompts} | {covered.num_known} | {share} | {width} |", flush=True)


if __name__ == "__main__":
    main()
