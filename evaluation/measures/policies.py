"""Measures of every policy of a comparison, computed from its responses and verdicts: the contents of measures.json."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evaluation.measures.diversity import Diversity, measure_diversity
from evaluation.verdicts import Response, Verdict
from preferences.statistics.estimates import UNKNOWN, Interval
from preferences.statistics.intervals import clustered_mean, share_interval
from reward.best_of_n import best_of_n_kl

Scores = Mapping[tuple[str, str, int], float]  # by policy, prompt and sample


@dataclass(frozen=True)
class PolicyScores:
    """A policy's scores by one judge: their mean with its 95% interval over prompts, and the mean of each category.

    `pass_share` is the share above the judge's pass mark; unknown if it has none.
    """

    mean: Interval
    pass_share: Interval
    by_category: Mapping[str, float]


@dataclass(frozen=True)
class PolicyMeasures:
    """`kl_nats` is the k1 estimate of the KL to the reference (`evaluation.measures.kl`), unclamped, with its 95%
    interval over prompts; unknown if responses carry no log-ratio. The KL of best-of-n is at most `kl_bound_nats`, and
    unknown otherwise: the log-ratio of a chosen sample says nothing about the choosing policy.

    `proxy_score` is the mean score of the reward model that policies were trained on. `scores` are by the judges that
    score one response at a time.
    """

    kl_nats: Interval
    kl_bound_nats: float
    proxy_score: Interval
    scores: Mapping[str, PolicyScores]
    diversity: Diversity


@dataclass(frozen=True)
class Known:
    """What the measures need from a comparison's settings: the n of each best-of-n policy, and judges' pass marks."""

    best_of: Mapping[str, int] = field(default_factory=dict)
    pass_marks: Mapping[str, float] = field(default_factory=dict)


def measure_policies(
    responses: Sequence[Response], verdicts: Sequence[Verdict] = (), *, seed: int, known: Known | None = None
) -> dict[str, PolicyMeasures]:
    """Returns measures by policy, in order of appearance. Raises: as `measure_diversity` does, and for no responses."""
    if not responses:
        raise ValueError("there are no responses to measure; at least one was expected")
    known = known or Known()
    by_policy: dict[str, list[Response]] = {}
    for row in responses:
        by_policy.setdefault(row.policy, []).append(row)
    diversity = measure_diversity(by_policy, seed=seed)
    categories = {verdict.prompt_id: verdict.category for verdict in verdicts}
    scores = response_scores(verdicts)
    return {
        name: PolicyMeasures(
            kl_nats=_mean(rows, [row.log_ratio for row in rows]),
            kl_bound_nats=best_of_n_kl(known.best_of[name]) if name in known.best_of else math.nan,
            proxy_score=_mean(rows, [row.proxy_score for row in rows]),
            scores={
                judge: _scores(rows, found, categories, known.pass_marks.get(judge, math.nan))
                for judge, found in scores.items()
                if any((name, row.prompt_id, row.index) in found for row in rows)
            },
            diversity=diversity[name],
        )
        for name, rows in by_policy.items()
    }


def response_scores(verdicts: Sequence[Verdict]) -> dict[str, Scores]:
    """Returns, by judge, the scores of responses in its verdicts. Responses whose score failed are left out."""
    found: dict[str, dict[tuple[str, str, int], float]] = {}
    for row in verdicts:
        for policy, index, score in (
            (row.policy_a, row.index_a, row.score_a),
            (row.policy_b, row.index_b, row.score_b),
        ):
            if not math.isnan(score):
                found.setdefault(row.judge, {})[policy, row.prompt_id, index] = score
    return dict(found)


def _mean(rows: Sequence[Response], values: Sequence[float]) -> Interval:
    """Returns the mean over responses with its interval over prompts; unknown if a value is missing."""
    if np.isnan(values).any():
        return UNKNOWN
    return clustered_mean(np.array(values, dtype=np.float64), _prompt_places(rows))


def _prompt_places(rows: Sequence[Response]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.unique([row.prompt_id for row in rows], return_inverse=True)[1].astype(np.int64)


def _scores(rows: Sequence[Response], found: Scores, categories: Mapping[str, str], pass_mark: float) -> PolicyScores:
    scored = [row for row in rows if (row.policy, row.prompt_id, row.index) in found]
    score_R = np.array([found[row.policy, row.prompt_id, row.index] for row in scored])
    place_R = _prompt_places(scored)
    category_R = np.array([categories[row.prompt_id] for row in scored])
    passed_P = np.bincount(place_R, score_R > pass_mark) / np.bincount(place_R)
    return PolicyScores(
        mean=clustered_mean(score_R, place_R),
        pass_share=UNKNOWN if math.isnan(pass_mark) else share_interval(passed_P),
        by_category={str(name): float(score_R[category_R == name].mean()) for name in np.unique(category_R)},
    )
