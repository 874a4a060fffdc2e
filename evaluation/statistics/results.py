"""What the statistics of a comparison give, as plain records; `files.records.as_json` turns them into JSON.

A win rate is from 0 to 1, ties counting half; above ½ policy a is better. Unless a field says otherwise intervals are
95% intervals over prompts. What is unknown is NaN, and `reason` says why.
"""

from dataclasses import dataclass
from typing import Literal

from intervals.estimates import Interval, Share
from preferences.statistics.alpha import Alpha


@dataclass(frozen=True)
class Counts:
    """How many wins of policy a, ties, and losses; a preference above ½, at ½, and below."""

    wins: int
    ties: int
    losses: int


@dataclass(frozen=True)
class WinRate:
    """How often a is preferred to b; every prompt weighs the same, whatever the number of its verdicts.

    `low` and `high` are the score interval over prompts (Wilson's where every prompt has one verdict without ties:
    `method` is then "wilson", else "score"). `bootstrap` resamples prompts, and labelers too where there are several.
    `over_labelers` is the interval for other prompts and other labelers; unknown with one labeler. From a single
    prompt the ends are 0 and 1.
    """

    mean: float
    low: float
    high: float
    method: Literal["wilson", "score"]
    bootstrap: Interval
    over_labelers: Interval
    num_prompts: int
    num_verdicts: int
    num_labelers: int


@dataclass(frozen=True)
class Significance:
    """Two-sided p-values of "a and b are preferred equally often", over prompts.

    `sign_p` is the exact sign test (McNemar's on discordant prompts): prompts won against prompts lost, ties left out.
    `permutation_p` turns prompts around at random; `num_permutations` is 0 where all were enumerated. The `holm_p`
    is `permutation_p` corrected for all pairs of this judge.
    """

    sign_p: float
    permutation_p: float
    num_permutations: int
    holm_p: float


@dataclass(frozen=True)
class Power:
    """What this many prompts could have shown, at 80% power and a two-sided 5% test.

    `detectable` is the smallest distance of a win rate from ½ that they would have shown, at the observed spread; NaN
    where no difference could have been shown (fewer than six prompts that are no tie). `num_prompts_needed` to
    show the observed difference; None where none was observed.
    """

    detectable: float
    num_prompts_needed: int | None


@dataclass(frozen=True)
class LengthControlled:
    """The win rate that a logistic fit gives at equal length, with its fit error in the interval.

    `length_effect` is the fit's coefficient of tanh(length difference / its standard deviation), in log-odds; above 0
    the longer response is preferred. `shrunk` tells that the fit had no finite maximum without its prior.
    """

    mean: float
    low: float
    high: float
    length_effect: Interval
    num_prompts: int
    shrunk: bool
    reason: str


@dataclass(frozen=True)
class PositionBias:
    """How often the response shown first is preferred, ties half; ½ is no bias. The policies' strength is held apart.

    `num_verdicts` were shown in a known order.
    """

    mean: float
    low: float
    high: float
    num_prompts: int
    num_verdicts: int
    reason: str


@dataclass(frozen=True)
class Flips:
    """Of the responses judged in both orders by one labeler: the share whose verdict changes with the order.

    `changed` counts any change among win, tie and loss, `reversed` a win that becomes a loss or the other way round.
    A Share's `num_pairs` are pairs of verdicts, its `num_tasks` prompts.
    """

    changed: Share
    reversed: Share


@dataclass(frozen=True)
class CategoryWinRate:
    """The win rate on the prompts of one category; `holm_p` is corrected for the categories of this pair."""

    category: str
    win_rate: WinRate
    permutation_p: float
    holm_p: float


@dataclass(frozen=True)
class PairSummary:
    """What one judge says of two policies; `win_rate` is a's.

    `verdicts` counts verdicts, `prompts` prompts by their mean preference. `num_failed` verdicts failed, and
    `num_prompts_missing` prompts that this judge has verdicts for have none for this pair. `different` is true where
    `holm_p` is below 5%. `length_controlled` and the rest are of this pair's verdicts alone.
    """

    policy_a: str
    policy_b: str
    win_rate: WinRate
    verdicts: Counts
    prompts: Counts
    num_failed: int
    num_prompts_missing: int
    significance: Significance
    different: bool
    power: Power
    length_controlled: LengthControlled
    position_bias: PositionBias
    flips: Flips
    categories: tuple[CategoryWinRate, ...]


@dataclass(frozen=True)
class Rating:
    """A policy's strength on the log-odds scale; higher is better.

    `low` and `high` are of two policies the score interval of the share of wins in log-odds, of more from the sandwich
    over prompts (unknown where prompts that came out alike leave no spread); `bootstrap` resamples prompts.
    `best_rank` to `worst_rank` (1 is best) are the ranks that simultaneous intervals of all differences leave open.
    `unbounded` is "above" for a policy that lost nothing to the anchor or any policy on its side ("below": won
    nothing; "both": no chain of wins tells which): its maximum-likelihood difference is infinite, so `value` is that
    of the fit with a prior, and that end of the interval is infinite (None in JSON).
    """

    policy: str
    value: float
    low: float
    high: float
    bootstrap: Interval
    best_rank: int
    worst_rank: int
    unbounded: Literal["", "above", "below", "both"]


@dataclass(frozen=True)
class Ratings:
    """Ratings of all policies by one judge: differences in log-odds from `anchor`, or from their mean if it is "".

    `tie` is Davidson's log ν (NaN in Bradley-Terry, where a tie is half a win). `islands` are the groups of policies
    that no verdict connects; with more than one `policies` is empty and `reason` names them. It is empty too where
    every verdict is a tie. `shrunk` tells that some policies are unbounded, so that all values come from the fit with
    the prior.
    """

    model: Literal["bradley_terry", "davidson"]
    anchor: str
    policies: tuple[Rating, ...]
    tie: float
    islands: tuple[tuple[str, ...], ...]
    shrunk: bool
    reason: str


@dataclass(frozen=True)
class Agreement:
    """How far two judges, or the labelers of one judge (`judge_b` is then the same), agree.

    `share` of the pairs of verdicts on the same two responses, neither a tie, that prefer the same one; `alpha` is
    Krippendorff's, which counts ties and corrects for chance.
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
    """All that one judge says. `pairs` are in the order of `Summary.policies`, of those pairs that it judged.

    `num_prompts`, `num_labelers` and `num_verdicts` count verdicts that stand. Ratings by Davidson are there
    where the judge gives whole ties, else the tuple holds Bradley-Terry alone. `labelers` is how far its labelers
    agree.
    """

    judge: str
    num_prompts: int
    num_labelers: int
    num_verdicts: int
    num_failed: int
    pairs: tuple[PairSummary, ...]
    ratings: tuple[Ratings, ...]
    position_bias: PositionBias
    flips: Flips
    labelers: Agreement


@dataclass(frozen=True)
class Summary:
    """A whole comparison. The same rows in any order, with the same seed, give the same numbers."""

    policies: tuple[str, ...]
    judges: tuple[JudgeSummary, ...]
    agreement: tuple[Agreement, ...]
    failures: tuple[Failures, ...]
    num_prompts: int
    seed: int
