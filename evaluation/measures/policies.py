"""Measures of every policy of a comparison, computed from its responses alone: the contents of measures.json."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.measures.diversity import Diversity, measure_diversity
from evaluation.verdicts import Response
from intervals.clustered import clustered_mean
from intervals.estimates import UNKNOWN, Interval


@dataclass(frozen=True)
class PolicyMeasures:
    """`kl_nats` is the k1 estimate of the KL to the reference (`evaluation.measures.kl`), unclamped, with its 95%
    interval over prompts; unknown if responses carry no log-ratio.
    """

    kl_nats: Interval
    diversity: Diversity


def measure_policies(responses: Sequence[Response], *, seed: int) -> dict[str, PolicyMeasures]:
    """Returns measures by policy, in order of appearance. Raises: as `measure_diversity` does, and for no responses."""
    if not responses:
        raise ValueError("there are no responses to measure; at least one was expected")
    by_policy: dict[str, list[Response]] = {}
    for row in responses:
        by_policy.setdefault(row.policy, []).append(row)
    diversity = measure_diversity(by_policy, seed=seed)
    return {name: PolicyMeasures(_kl(rows), diversity[name]) for name, rows in by_policy.items()}


def _kl(rows: Sequence[Response]) -> Interval:
    ratio_R = np.array([row.log_ratio for row in rows], dtype=np.float64)
    if np.isnan(ratio_R).any():
        return UNKNOWN
    return clustered_mean(ratio_R, np.unique([row.prompt_id for row in rows], return_inverse=True)[1])
