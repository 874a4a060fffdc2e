"""How a study decides, fixed before anything is measured: rules, claims and their verdicts.

A claim is a contrast of arms, one number a seed. Its interval is Student's over seeds, so it holds what seeds draw
(data, weights, labelers, samples) and widens fast where they are few: with three seeds it is the mean ± 2.48 standard
deviations. Beside it stands each seed's own interval, a bootstrap over that seed's held-out prompts (of texts or tasks
where they are what is measured): it says how well the seed was measured and decides nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from intervals.clustered import clustered_mean
from intervals.estimates import Interval

Verdict = Literal["replicates", "does not replicate", "undecided"]
Overall = Literal["replicates", "does not replicate", "undecided", "replicates in part"]


@dataclass(frozen=True)
class Rule:
    """What a contrast is expected to be, and the size of what matters, in its unit.

    "above": above 0. It replicates where the interval lies above 0, and does not where the interval lies below `size`:
    an effect, if there is one, that is too small to matter. Where both hold the effect is too small to matter.
    "within": nearer to 0 than `size`. It replicates where the interval lies within ± size, and does not where the
    interval lies wholly outside.
    "below": less than `size`. It replicates where the interval lies below, and does not where the interval lies above.
    All else, an unknown interval included, is undecided.
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
    def words(self) -> str:
        if self.kind == "above":
            return f"above 0; below {self.size:g} {self.unit} is nothing"
        bound = f"±{self.size:g}" if self.kind == "within" else f"{self.size:g}"
        return f"{self.kind} {bound} {self.unit}"


@dataclass(frozen=True)
class Contrast:
    """One seed's number for a claim, with its bootstrap interval."""

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
    """The same contrast of every seed. A seed that has no number leaves the claim undecided."""
    first = contrasts[0]
    assert all((other.claim, other.rule) == (first.claim, first.rule) for other in contrasts), "contrasts of one claim"
    values = np.array([contrast.value.mean for contrast in contrasts])
    over_seeds = clustered_mean(values, np.arange(len(values)))
    by_seed = tuple(contrast.value for contrast in contrasts)
    return Claim(first.claim, first.rule, by_seed, over_seeds, first.rule.verdict(over_seeds))


def overall(claims: Sequence[Claim]) -> Overall:
    """What all claims say where they say the same; "in part" where some replicate and others do not, or are open."""
    verdicts = {claim.verdict for claim in claims}
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return "replicates in part" if "replicates" in verdicts else "undecided"
