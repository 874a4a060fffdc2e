"""Agreement between judges, and between the labelers of one judge.

Shape letters: T items (two responses to a prompt), as in `preferences.statistics.agreement`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from evaluation.statistics.results import Agreement
from evaluation.verdicts import Verdict
from preferences.statistics.agreement import ranking_alpha
from preferences.statistics.intervals import Tally, clustered_shares
from preferences.statistics.panel import PairCounts

Item = tuple[str, tuple[str, int], tuple[str, int]]


def judges_agree(verdicts: Sequence[Verdict], judge: str, other: str, *, seed: int) -> Agreement:
    """Returns the agreement of two judges. A judge's preference between two responses is the mean of its verdicts on
    them, over labelers and orders."""
    return _agreement(_preferences((v.judge, v) for v in verdicts if v.judge in (judge, other)), judge, other, seed)


def labelers_agree(verdicts: Sequence[Verdict], judge: str, *, seed: int) -> Agreement:
    """Returns the agreement of a judge's labelers. If a labeler saw both orders, the mean of both verdicts counts."""
    return _agreement(_preferences((v.labeler, v) for v in verdicts if v.judge == judge), judge, judge, seed)


def _preferences(named: Iterable[tuple[str, Verdict]]) -> dict[Item, dict[str, list[float]]]:
    """Returns, by item and rater, preferences for the policy whose name sorts first. Failed verdicts are left out."""
    said: dict[Item, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rater, verdict in named:
        if verdict.failure:
            continue
        a, b = (verdict.policy_a, verdict.index_a), (verdict.policy_b, verdict.index_b)
        won = verdict.preference_a if a < b else 1 - verdict.preference_a
        said[verdict.prompt_id, min(a, b), max(a, b)][rater].append(won)
    return said


def _agreement(said: dict[Item, dict[str, list[float]]], judge: str, other: str, seed: int) -> Agreement:
    from_half = [[float(np.mean(found)) - 0.5 for found in raters.values()] for raters in said.values()]
    first_T = np.array([sum(d > 1e-9 for d in found) for found in from_half], dtype=np.float64)
    second_T = np.array([sum(d < -1e-9 for d in found) for found in from_half], dtype=np.float64)
    num_T = np.array([len(found) for found in from_half], dtype=np.float64)
    _, prompt_T = np.unique([prompt_id for prompt_id, _, _ in said], return_inverse=True)
    prompt_T = prompt_T.astype(np.int64)
    counts = PairCounts(first_T[:, None], second_T[:, None], (num_T - first_T - second_T)[:, None])
    # Pairs of raters of whom neither says tie.
    compared_T = (first_T + second_T) * (first_T + second_T - 1) / 2
    tally = Tally(
        group_R=np.zeros(len(said), dtype=np.int64),
        task_R=np.arange(len(said)),
        prompt_R=prompt_T,
        right_R=(first_T * (first_T - 1) + second_T * (second_T - 1)) / 2,
        compared_R=compared_T,
        pairs_R=np.ones(len(said)),
        responses_R=np.full(len(said), 2),
    )
    return Agreement(judge, other, clustered_shares(tally, 1)[0], ranking_alpha(counts, prompt_T, seed=seed))
