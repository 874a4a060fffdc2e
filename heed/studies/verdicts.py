"""How a study decides, fixed before anything is measured: rules, claims and their verdicts.

A claim is a contrast of arms with one number per seed. Its interval is Student's over seeds, so it includes everything
that seeds draw (data, weights, labelers, samples) and is wide for few seeds: with three, it is the mean ± 2.48 standard
deviations. Each seed also has its own interval, a bootstrap over its held-out prompts (or texts, or tasks). That one
shows how precisely the seed was measured and decides nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from preferences.statistics.estimates import Interval
from preferences.statistics.intervals import clustered_mean

Verdict = Literal["replicates", "does not replicate", "undecided"]
Overall = Literal["replicates", "does not replicate", "undecided", "replicates in part"]


@dataclass(frozen=True)
class Rule:
    """The expected value of a contrast, and the smallest effect that matters, in its unit.

    "above": expected above 0. It replicates if the interval lies above 0, and does not if the interval lies below
    `size`, where any effect is too small to matter. If both hold, it does not replicate.
    "within": expected closer to 0 than `size`. It replicates if the interval lies within ± size, and does not if the
    interval lies entirely outside.
    "below": expected below `size`. It replicates if the interval lies below, and does not if the interval lies above.
    Everything else, including an unknown interval, is undecided.
    """

    kind: Literal["above", "within", "below"]
    size: float
    unit: str

    def verdict(self, found: Interval) -> Verdict:
        if not math.isfinite(found.low) or not math.isfinite(found.high):
            return "undecided"
        if self.kind == "above":
            does, does_not = found.low > 0, found.high < self.size
        elif self.kind == "within":
            does = -self.size < found.low and found.high < self.size
            does_not = found.low >= self.size or found.high <= -self.size
        else:
            does, does_not = found.high < self.size, found.low >= self.size
        if does_not:
            return "does not replicate"
        return "replicates" if does else "undecided"

    @property
    def text(self) -> str:
        if self.kind == "above":
            return f"above 0; too small to matter below {self.size:g} {self.unit}"
        bound = f"±{self.size:g}" if self.kind == "within" else f"{self.size:g}"
        return f"{self.kind} {bound} {self.unit}"


@dataclass(frozen=True)
class Contrast:
    """One seed's value for a claim, with its bootstrap interval."""

    claim: str
    rule: Rule
    value: Interval


@dataclass(frozen=True)
class Claim:
    """A claim over all seeds."""

    text: str
    rule: Rule
    by_seed: tuple[Interval, ...]
    over_seeds: Interval
    verdict: Verdict


def decide(contrasts: Sequence[Contrast]) -> Claim:
    """Combines one contrast over all seeds. A seed without a number leaves the claim undecided."""
    first = contrasts[0]
    assert all((other.claim, other.rule) == (first.claim, first.rule) for other in contrasts), "contrasts of one claim"
    values = np.array([contrast.value.mean for contrast in contrasts])
    over_seeds = clustered_mean(values, np.arange(len(values)))
    by_seed = tuple(contrast.value for contrast in contrasts)
    return Claim(first.claim, first.rule, by_seed, over_seeds, first.rule.verdict(over_seeds))


def overall(claims: Sequence[Claim]) -> Overall:
    """Returns the claims' common verdict; "in part" if some replicate and others do not or are undecided."""
    verdicts = {claim.verdict for claim in claims}
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return "replicates in part" if "replicates" in verdicts else "undecided"
