"""Do corrected win rates cover what people would say? `python -m benchmarks.judge_worlds`.

Each world has two policies and 400 prompts (or 100 clusters of 4), on a few of which people judge too. A judge reports
people's verdict, but with some probability its own taste: chance, or a bias to one policy, such as for its length.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from benchmarks.compare_worlds import Held
from evaluation.statistics.corrected import corrected
from preferences.statistics.estimates import Floats, Ints
from preferences.statistics.intervals import score_interval

NUM_PROMPTS = 400
# name: people's win rate, how often the judge follows people, its own win rate otherwise, prompts per cluster
WORLDS: dict[str, tuple[float, float, float, int]] = {
    "good judge, equal policies": (0.5, 0.9, 0.5, 1),
    "judge with a bias of 18 points, equal policies": (0.5, 0.4, 0.8, 1),
    "judge with a bias against the better one": (0.7, 0.5, 0.2, 1),
    "judge of chance": (0.6, 0.0, 0.5, 1),
    "judge wrong in 8%, always for the same policy": (0.6, 0.8, 1.0, 1),
    "biased judge, clusters of 4": (0.6, 0.5, 0.8, 4),
}


def drawn(world: str, generator: np.random.Generator) -> tuple[Floats, Floats, Ints]:
    """Returns the preferences of the judge and of people, and the cluster, of each prompt."""
    rate, follows, taste, size = WORLDS[world]
    num_clusters = NUM_PROMPTS // size
    cluster_P = np.repeat(np.arange(num_clusters), size)
    chance_P = generator.beta(rate * 2, (1 - rate) * 2, num_clusters) if size > 1 else np.full(num_clusters, rate)
    y_P = (generator.random(NUM_PROMPTS) < chance_P[cluster_P]).astype(np.float64)
    own_P = (generator.random(NUM_PROMPTS) < taste).astype(np.float64)
    f_P = np.where(generator.random(NUM_PROMPTS) < follows, y_P, own_P)
    return f_P, y_P, cluster_P


def intervals(world: str, num_labelled: int, generator: np.random.Generator) -> Iterator[Held]:
    """Yields what the judge alone, the labelled prompts alone, and the corrected win rate say."""
    f_P, y_P, cluster_P = drawn(world, generator)
    truth, size = WORLDS[world][0], WORLDS[world][3]
    labelled = np.isin(cluster_P, generator.permutation(cluster_P[-1] + 1)[: num_labelled // size])
    yield Held("judge", *score_interval(f_P, cluster_P), truth)
    yield Held("people", *score_interval(y_P[labelled], cluster_P[labelled]), truth)
    rate, _ = corrected(f_P, np.where(labelled, y_P, np.nan), cluster_P)
    yield Held("corrected", rate.low, rate.high, truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1_000)
    parser.add_argument("--labelled", type=int, nargs="*", default=[20, 40, 100])
    arguments = parser.parse_args()
    print("| world | labelled | judge | people | corrected |\n|---|---|---|---|---|")
    for world in WORLDS:
        for num_labelled in arguments.labelled:
            held: dict[str, list[Held]] = {}
            for number in range(arguments.worlds):
                for one in intervals(world, num_labelled, np.random.default_rng([num_labelled, number])):
                    held.setdefault(one.what, []).append(one)
            cells = []
            for rows in held.values():
                covers = np.mean([row.low <= row.truth <= row.high for row in rows])
                cells.append(f"{100 * covers:.1f}%, {np.mean([row.high - row.low for row in rows]):.3f}")
            print(f"| {world} | {num_labelled} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
