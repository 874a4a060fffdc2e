"""What the trained policy's log-probabilities say of held-out rankings."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpo.objective import Floats
from dpo.results import PairMeans
from preferences.records import Ranking
from preferences.statistics.estimates import UNKNOWN, Interval
from preferences.statistics.intervals import clustered_mean
from reward.comparisons import Comparison


@dataclass(frozen=True)
class Measured:
    """Of a comparison's K responses: log-probabilities before and after training, implicit rewards, tokens."""

    before: Floats
    after: Floats
    rewards: Floats
    tokens: Floats


def margin_and_means(
    rankings: Sequence[Ranking], measured: Mapping[str, Measured]
) -> tuple[Interval, PairMeans | None]:
    """The mean margin over all untied pairs, with its interval over prompts, and the means of both sides."""
    sides: list[tuple[Floats, Floats]] = []
    prompts: list[int] = []
    numbers: dict[object, int] = {}
    for ranking in rankings:
        of = measured[ranking.task_id]
        values_4K = np.stack([of.rewards, of.before, of.after, of.tokens])
        for i, j in itertools.permutations(range(len(ranking.ranks)), 2):
            if ranking.ranks[i] < ranking.ranks[j]:
                sides.append((values_4K[:, i], values_4K[:, j]))
                prompts.append(numbers.setdefault(ranking.prompt, len(numbers)))
    if not sides:
        return UNKNOWN, None
    better_P4, worse_P4 = (np.stack(side).astype(np.float64) for side in zip(*sides, strict=True))
    margin = clustered_mean(better_P4[:, 0] - worse_P4[:, 0], np.array(prompts))
    (_, *chosen), (_, *rejected) = better_P4.mean(axis=0).tolist(), worse_P4.mean(axis=0).tolist()
    return margin, PairMeans(chosen[0], chosen[1], rejected[0], rejected[1], chosen[2], rejected[2])


def length_correlation(measured: Sequence[Measured]) -> float | None:
    """Pearson's correlation of implicit rewards and lengths, both less their mean within the comparison."""
    rewards_N = np.concatenate([of.rewards - of.rewards.mean() for of in measured]).astype(np.float64)
    tokens_N = np.concatenate([of.tokens - of.tokens.mean() for of in measured]).astype(np.float64)
    scale = float(np.sqrt((rewards_N**2).sum() * (tokens_N**2).sum()))
    return float((rewards_N * tokens_N).sum()) / scale if scale > 0 else None


def count_pairs(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Pairs of responses, and those of two equal ones, whose difference has no gradient."""
    found = equal = 0
    for comparison in comparisons:
        texts = [bytes(np.asarray(tokens, dtype=np.int32)) for tokens in comparison.sequences]
        pairs = [one == other for one, other in itertools.combinations(texts, 2)]
        found, equal = found + len(pairs), equal + sum(pairs)
    return found, equal
