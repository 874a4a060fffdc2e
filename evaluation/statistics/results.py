"""The results of a comparison's statistics, as plain records; `files.records.as_json` turns them into JSON.

A win rate is from 0 to 1, with ties counting half; above ½, policy a is better. Unless a field says otherwise,
intervals are 95% intervals over prompts, or over clusters of prompts if the comparison names them. Unknown values are
NaN, and `reason` says why.

A pair's interval and its test are one: the interval excludes ½ exactly if `holm_p` is below 5%.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from preferences.statistics.agreement import Alpha
from preferences.statistics.estimates import Interval, Share

FEW_RUNS, FEW_VALUES = 20, 20  # fewer give more than 5% false differences if they are skewed
SAME = "they gave the same"  # begins the reason why two models are not compared


def turned_share(share: Interval) -> Interval:
    """Returns a share from the other policy's side."""
    return Interval(1 - share.mean, 1 - share.high, 1 - share.low)


@dataclass(frozen=True)
class Conclusion:
    """What the comparison of a with b shows. Sentences and exit codes are made from it.

        better, worse   a difference is shown, in favour of a or of b
        undecided       no difference is shown
        bound           answers are missing: the interval covers the difference whatever these would have been
        none            nothing can be concluded

    `low` to `high` is the interval of a's advantage: a win rate minus ½, or a difference in a measure, negated if lower
    is better. Without a conclusion it is NaN. `reason` says why there is only a bound, or none, and `caution` how often
    a difference that is shown with so few runs or values is false.
    """

    kind: Literal["better", "worse", "undecided", "bound", "none"]
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    caution: str = ""

    @classmethod
    def of(cls, advantage: Interval) -> "Conclusion":
        """Returns the conclusion from an interval that excludes 0 exactly if a difference is shown."""
        undecided = cls("undecided", advantage.low, advantage.high)
        return replace(undecided, kind=undecided.shown or "undecided")

    def with_caution(self, num_runs: int, num_clusters: int, *, bounded: bool) -> "Conclusion":
        """Returns the conclusion with a caution if it is from few runs, or from few values that are not `bounded`: no
        test of so few holds if they are skewed (docs/statistics.md). It belongs next to a difference that is shown, and
        to one that is shown to be within a margin.
        """
        few = f"fewer than {FEW_RUNS} runs, up to 18%" if 1 < num_runs < FEW_RUNS else ""
        if not few and num_clusters < FEW_VALUES and not bounded:
            few = f"fewer than {FEW_VALUES} items, up to 10%"
        who = "runs" if "runs" in few else "values"
        said = f"With {few} of such verdicts are false if {who} are skewed." if few else ""
        return replace(self, caution=said)

    @property
    def shown(self) -> Literal["better", "worse", ""]:
        """Whether a is shown to be better or worse than b, which a bound can do too; "" if neither."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else ""

    @property
    def turned(self) -> "Conclusion":
        """The conclusion from the other side."""
        if self.kind == "better":
            return replace(self, kind="worse", low=-self.high, high=-self.low)
        return replace(self, kind="better" if self.kind == "worse" else self.kind, low=-self.high, high=-self.low)


@dataclass(frozen=True)
class Counts:
    """Counts wins of policy a, ties, and losses: preferences above ½, at ½, and below."""

    wins: int
    ties: int
    losses: int

    @property
    def turned(self) -> "Counts":
        return Counts(self.losses, self.ties, self.wins)


@dataclass(frozen=True)
class WinRate:
    """How often a is preferred to b; every prompt weighs the same, whatever the number of its verdicts.

    `low` and `high` are the score interval over prompts with the critical value of the pair's test
    (`significance.EqualityTest`), which is Wilson's if every prompt has one verdict and there are no ties.
    `over_labelers` is the interval for other prompts and other labelers; it is unknown with one labeler. Without
    clusters, `num_clusters` is `num_prompts`.
    """

    mean: float
    low: float
    high: float
    over_labelers: Interval
    num_prompts: int
    num_clusters: int
    num_verdicts: int
    num_labelers: int

    @property
    def turned(self) -> "WinRate":
        mean, low, high = 1 - self.mean, 1 - self.high, 1 - self.low
        return replace(self, mean=mean, low=low, high=high, over_labelers=turned_share(self.over_labelers))


@dataclass(frozen=True)
class Significance:
    """Two-sided p-values of "a and b are preferred equally often", over prompts (`significance.EqualityTest`).

    `num_permutations` is 0 if all sign vectors were counted. `holm_p` is `p` corrected for all `num_pairs` pairs of
    this judge.
    """

    p: float
    num_permutations: int
    holm_p: float
    num_pairs: int


@dataclass(frozen=True)
class Power:
    """What this many prompts could have shown with 80% power, in the pair's test at the level that Holm's correction
    leaves it (`significance.holm_levels`).

    `detectable` is the smallest distance of a win rate from ½ that they would have shown, at the observed spread; NaN
    if they could have shown no difference (fewer than six prompts that are not ties). `num_prompts_needed` prompts
    would show the observed difference; None if there was no difference. If it was not shown, it is below `detectable`,
    and needs more prompts than there are.
    """

    detectable: float
    num_prompts_needed: int | None


@dataclass(frozen=True)
class LengthControlled:
    """The win rate at equal length by a logistic fit, with the fit's error in the interval.

    `length_effect` is the fit's coefficient of tanh(length difference / its standard deviation), in log-odds; above 0,
    the longer response is preferred. `shrunk` is true if the fit had no finite maximum without its prior.
    """

    mean: float
    low: float
    high: float
    length_effect: Interval
    num_prompts: int
    shrunk: bool
    reason: str

    @property
    def turned(self) -> "LengthControlled":
        """The fit from the other policy's side. The length effect keeps its sign, because both the difference in length
        and the outcome are reversed.
        """
        return replace(self, mean=1 - self.mean, low=1 - self.high, high=1 - self.low)


@dataclass(frozen=True)
class PositionBias:
    """How often the response shown first is preferred, with ties counting half and the policies' strengths cancelled.

    ½ means no bias. `num_verdicts` counts the verdicts whose display order is known.
    """

    mean: float
    low: float
    high: float
    num_prompts: int
    num_verdicts: int
    reason: str


@dataclass(frozen=True)
class Flips:
    """The share of verdicts that change with the order, among responses that one labeler judged in both orders.

    `changed` counts any change between win, tie and loss; `reversed` only a win that becomes a loss, or a loss that
    becomes a win. A Share's `num_pairs` counts pairs of verdicts, and its `num_tasks` counts prompts.
    """

    changed: Share
    reversed: Share


@dataclass(frozen=True)
class CategoryWinRate:
    """The win rate on the prompts of one category; `holm_p` is corrected for the categories of this pair."""

    category: str
    win_rate: WinRate
    p: float
    holm_p: float


@dataclass(frozen=True)
class PairSummary:
    """One judge's results on two policies; `win_rate` is a's.

    `verdicts` counts verdicts; `prompts` counts prompts by their mean preference. `num_failed` counts failed verdicts,
    and `num_prompts_missing` prompts on which this judge has verdicts, but none on this pair. `different` is true if
    the conclusion is "better" or "worse": if `holm_p` is below 5%, which is exactly when the win rate's interval
    excludes ½, and the verdicts allow a conclusion. `length_controlled` and the fields after it use only this pair's
    verdicts.
    """

    policy_a: str
    policy_b: str
    win_rate: WinRate
    verdicts: Counts
    prompts: Counts
    num_failed: int
    num_prompts_missing: int
    significance: Significance
    conclusion: Conclusion
    different: bool
    power: Power
    length_controlled: LengthControlled
    position_bias: PositionBias
    flips: Flips
    categories: tuple[CategoryWinRate, ...]

    @property
    def turned(self) -> "PairSummary":
        """The pair from the other policy's side. Tests, power, position and flips are the same from both sides."""
        return replace(
            self,
            policy_a=self.policy_b,
            policy_b=self.policy_a,
            win_rate=self.win_rate.turned,
            verdicts=self.verdicts.turned,
            prompts=self.prompts.turned,
            conclusion=self.conclusion.turned,
            length_controlled=self.length_controlled.turned,
            categories=tuple(replace(category, win_rate=category.win_rate.turned) for category in self.categories),
        )

    @property
    def ahead_first(self) -> "PairSummary":
        """The pair from the side of the policy that is preferred more often."""
        return self.turned if self.win_rate.mean < 0.5 else self


@dataclass(frozen=True)
class AlgorithmPair:
    """One judge's results on two algorithms, each with several training runs (seeds): `algorithms.AlgorithmTest`.

    `win_rate` is how often a's runs are preferred to b's, over all pairs of runs; its interval is over seeds and
    prompts and excludes ½ exactly if `holm_p`, corrected for all pairs of algorithms, is below 5%. `score_difference`
    is the difference of the runs' mean scores; unknown if the judge gives none. `num_prompts` are those with a verdict
    on every pair of runs; `num_prompts_missing` lack one and are left out. `detectable` is the distance of a win rate
    from ½ that 4 of 5 such studies would have shown, after the correction; above ½ if none could be.
    """

    algorithm_a: str
    algorithm_b: str
    num_runs_a: int
    num_runs_b: int
    win_rate: Interval
    p: float
    holm_p: float
    num_pairs: int  # of algorithms, for which `holm_p` is corrected
    detectable: float
    score_difference: Interval
    num_prompts: int
    num_clusters: int
    num_prompts_missing: int
    conclusion: Conclusion

    @property
    def different(self) -> bool:
        """Whether one of the two is shown to be better."""
        return self.conclusion.shown != ""

    @property
    def ahead_first(self) -> "AlgorithmPair":
        """The pair from the side of the algorithm that is preferred more often."""
        gain = self.score_difference
        if not self.win_rate.mean < 0.5:
            return self
        return replace(
            self, algorithm_a=self.algorithm_b, algorithm_b=self.algorithm_a,
            num_runs_a=self.num_runs_b, num_runs_b=self.num_runs_a, win_rate=turned_share(self.win_rate),
            score_difference=Interval(-gain.mean, -gain.high, -gain.low), conclusion=self.conclusion.turned,
        )  # fmt: skip


@dataclass(frozen=True)
class Rating:
    """A policy's strength on the log-odds scale; higher is better.

    For two policies, `low` and `high` are the interval of the share of wins, as log-odds. For more, they come
    from the sandwich over prompts, and are unknown if all prompts came out alike, because there is no spread then.
    `best_rank` to `worst_rank` (1 is best) are the ranks that simultaneous intervals of all differences allow.

    `unbounded` is "above" if no chain of wins leads from the anchor to the policy, "below" if none leads from the
    policy to the anchor, and "both" if neither exists; if the anchor is the mean, one other policy without such a chain
    is enough. The maximum-likelihood difference is then infinite, so `value` comes from the fit with a prior, and that
    end of the interval is infinite (None in JSON).
    """

    policy: str
    value: float
    low: float
    high: float
    best_rank: int
    worst_rank: int
    unbounded: Literal["", "above", "below", "both"]


@dataclass(frozen=True)
class Ratings:
    """Ratings of all policies by one judge: differences in log-odds from `anchor`, or from their mean if it is "".

    `islands` are groups of policies with no verdict between them; if there is more than one, `policies` is empty and
    `reason` names them. It is also empty if every verdict is a tie. `shrunk` is true if some policies are unbounded, so
    that all values come from the fit with the prior.
    """

    anchor: str
    policies: tuple[Rating, ...]
    islands: tuple[tuple[str, ...], ...]
    shrunk: bool
    reason: str


@dataclass(frozen=True)
class Agreement:
    """The agreement of two judges, or of the labelers of one judge (`judge_b` is then the same).

    `share` is the share of pairs of verdicts on the same two responses, neither of them a tie, that prefer the same
    response. `alpha` is Krippendorff's, which counts ties and corrects for chance.
    """

    judge_a: str
    judge_b: str
    share: Share
    alpha: Alpha


@dataclass(frozen=True)
class Failures:
    """How many verdicts of a judge on two policies failed for one reason."""

    judge: str
    policy_a: str
    policy_b: str
    failure: str
    num_verdicts: int


@dataclass(frozen=True)
class JudgeSummary:
    """All results of one judge. `pairs` holds the pairs that it judged, in the order of `Summary.policies`, and
    `algorithms` the pairs of algorithms that have several runs.

    `num_prompts`, `num_labelers` and `num_verdicts` are counted over the verdicts that did not fail. `ratings` is None
    if all failed. `labelers` is the agreement of its labelers.
    """

    judge: str
    num_prompts: int
    num_labelers: int
    num_verdicts: int
    num_failed: int
    pairs: tuple[PairSummary, ...]
    algorithms: tuple[AlgorithmPair, ...]
    ratings: Ratings | None
    position_bias: PositionBias
    flips: Flips
    labelers: Agreement


@dataclass(frozen=True)
class Withheld:
    """Two policies whose verdicts are not used, by any judge; the conclusion says why."""

    policy_a: str
    policy_b: str
    conclusion: Conclusion


@dataclass(frozen=True)
class Summary:
    """All results of a comparison. The same rows in any order, with the same seed, give the same numbers.

    `num_seen` counts, by policy, the prompts of its training data, on which its verdicts are not used. Without
    clusters, `num_clusters` is `num_prompts`.
    """

    policies: tuple[str, ...]
    judges: tuple[JudgeSummary, ...]
    agreement: tuple[Agreement, ...]
    failures: tuple[Failures, ...]
    num_prompts: int
    num_clusters: int
    seed: int
    withheld: tuple[Withheld, ...] = ()
    num_seen: Mapping[str, int] = field(default_factory=dict)
