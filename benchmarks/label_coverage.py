"""Do the intervals of a lead's page have their nominal coverage? `python -m benchmarks.label_coverage`.

Worlds with known labelers (`benchmarks.known_labelers`) are drawn repeatedly, each with new tasks and answers. Every
interval of `preferences.statistics.summary` is compared with the truth (`benchmarks.label_truth`). The same labelers
give the same answers over HTTP in `tests/preferences/page/test_scripted_labelers.py`, so this also covers the server.
`tests/preferences/statistics/test_coverage.py` runs fewer worlds; docs/labels.md has the table for 2,000.
"""

import argparse
import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.known_labelers import Size, draw_world
from benchmarks.label_truth import held_against_truth, is_covered
from preferences.statistics.agreement import Alpha
from preferences.statistics.intervals import Tally, clustered_shares
from preferences.statistics.summary import summary

SIZE = Size(num_ordinary=90, num_gold=40, num_repeats=40)


# ---- coverage ----


@dataclass(frozen=True)
class Covered:
    """How often an interval contained the truth; `bias` is the mean of estimate - truth, `width` the mean width."""

    num_covered: int
    num_counted: int
    bias: float
    width: float

    @property
    def share(self) -> float:
        return self.num_covered / self.num_counted


def coverage(num_worlds: int, seed: int, size: Size = SIZE) -> dict[str, Covered]:
    """Compares every interval of worlds `seed`, `seed + 1`, ... with the truth, by what is estimated."""
    rows: dict[str, list[tuple[bool, float, float]]] = {}
    for world in range(num_worlds):
        report = summary(*draw_world(size, seed + world), seed=world)
        for what, _, estimate, truth in held_against_truth(report):
            value = estimate.value if isinstance(estimate, Alpha) else estimate.mean
            row = (is_covered(estimate, truth), value - truth, estimate.high - estimate.low)
            rows.setdefault(what, []).append(row)
    return {
        what: Covered(sum(r[0] for r in found), len(found), *np.mean([r[1:] for r in found], axis=0).tolist())
        for what, found in rows.items()
    }


# ---- few tasks, as in screening ----

FEW_TASKS = (5, 10, 20, 50)
JUDGES = ((0.15, 0.0), (0.5, 0.0), (1.5, 0.0), (0.15, 0.2))  # (noise, share of tasks ranked at random)


@dataclass(frozen=True)
class FewTasks:
    """Accuracy on a few gold tasks: the truth, how often its interval contains it, and the mean width."""

    truth: float
    share: float
    width: float


def few_tasks(
    num_tasks: int, num_responses: int, noise: float, careless: float, *, num_labelers: int, seed: int
) -> FewTasks:
    """Compares `num_labelers` identical labelers, each with its own gold tasks, with the truth."""
    generator = np.random.default_rng(seed)
    shape = (num_labelers, num_tasks, num_responses)
    quality = generator.normal(size=shape)
    liking = quality + noise * generator.normal(size=shape)
    is_careless = generator.random(shape[:2]) < careless
    liking[is_careless] = generator.normal(size=(int(is_careless.sum()), num_responses))
    pairs = list(combinations(range(num_responses), 2))
    alike = [(quality[..., i] > quality[..., j]) == (liking[..., i] > liking[..., j]) for i, j in pairs]
    rows = num_labelers * num_tasks
    compared = np.full(rows, float(len(pairs)))
    tally = Tally(
        group_R=np.repeat(np.arange(num_labelers), num_tasks),
        task_R=np.tile(np.arange(num_tasks), num_labelers),
        prompt_R=np.tile(np.arange(num_tasks), num_labelers),
        right_R=np.sum(alike, axis=0, dtype=np.float64).ravel(),
        compared_R=compared,
        pairs_R=compared,
        responses_R=np.full(rows, num_responses),
    )
    truth = 0.5 + (1 - careless) * math.asin(1 / math.sqrt(1 + noise**2)) / math.pi
    shares = clustered_shares(tally, num_labelers)
    covered = float(np.mean([share.low <= truth <= share.high for share in shares]))
    return FewTasks(truth, covered, float(np.mean([share.high - share.low for share in shares])))


def print_few_tasks(num_labelers: int, seed: int) -> None:
    titles = [f"noise {noise:g}" + (f", {careless:.0%} careless" if careless else "") for noise, careless in JUDGES]
    print(f"\n| responses | gold tasks | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
    for num_responses in (2, 4):
        for num_tasks in FEW_TASKS:
            found = [
                few_tasks(num_tasks, num_responses, *judge, num_labelers=num_labelers, seed=seed) for judge in JUDGES
            ]
            cells = [f"{100 * few.share:.1f}% of {few.truth:.2f}, ±{few.width / 2:.2f}" for few in found]
            print(f"| {num_responses} | {num_tasks} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| estimate | intervals | cover the truth | bias | mean width |\n|---|---|---|---|---|")
    for what, covered in coverage(arguments.worlds, arguments.seed).items():
        share = f"{100 * covered.share:.1f}%"
        print(f"| {what} | {covered.num_counted} | {share} | {covered.bias:.4g} | {covered.width:.3g} |")
    print_few_tasks(2 * arguments.worlds, arguments.seed)


if __name__ == "__main__":
    main()
