"""results.json of the compare stage: metrics of each policy, and win rates of every two."""

from collections.abc import Mapping
from dataclasses import dataclass

from evaluation.measures.best_of_n import BestOfN
from evaluation.measures.reward_hacking import RewardHacking
from lm.tokenizer import Messages
from preferences.statistics.estimates import Interval
from stages.reports.text import DEFAULT_NAMES, Names
from training.data import Overlong, SourceRows

GOLD = "gold"  # the kind of judge that a world has


@dataclass(frozen=True)
class PolicyResults:
    """Means over responses with 95% intervals over prompts or their clusters. `by_kind` is the mean gold score by kind
    of prompt.

    `kl_nats` is None if it was not measured, and for best-of-n, for which only a bound is known. `distinct_2` is
    measured on the same number of words of each policy.
    """

    gold_score: Interval
    pass_share: Interval
    kl_nats: Interval | None
    proxy_score: Interval | None
    distinct_2: float
    end_rate: float
    mean_tokens: float
    by_kind: Mapping[str, float]


@dataclass(frozen=True)
class WinRateResults:
    """How often the first policy is preferred, with ties counting half. `holm_p` is corrected for all pairs.

    The interval excludes ½ exactly if `holm_p` is below 5% (`evaluation.statistics.significance.EqualityTest`).
    """

    mean: float
    low: float
    high: float
    num_prompts: int
    holm_p: float

    @property
    def different(self) -> bool:
        """Whether one of the two is shown to be preferred."""
        return self.low > 0.5 or self.high < 0.5


@dataclass(frozen=True)
class PairResults:
    """The judge's results on two policies, keyed as "first/second"."""

    win_rate: WinRateResults


@dataclass(frozen=True)
class JudgeResults:
    """The judge: its name, what it measures, and whether it is a world's gold scorer, a reward model or a function.

    `is_reward` is true if the judge is the reward that the policies were trained to raise, or comes from the same file.
    """

    name: str
    description: str
    kind: str = GOLD
    is_reward: bool = False


@dataclass(frozen=True)
class SampledText:
    """A policy's first response to a prompt, with both scores."""

    text: str
    gold_score: float
    proxy_score: float


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt, which is a whole conversation, with the first response of each policy."""

    prompt_id: str
    kind: str
    messages: Messages
    responses: Mapping[str, SampledText]


@dataclass(frozen=True)
class CompareResults:
    """The contents of results.json.

    `best_of_n` chooses among the SFT policy's samples by the reward model. `training_kl_nats` and `training_scores` are
    PPO's, per iteration, from its metrics; `hacking` compares PPO with SFT. "sft" is the policy that training starts
    from, and "ppo" the one that [ppo] trains; `names` says what they are called.
    """

    judge: JudgeResults
    num_prompts: int
    num_samples: int
    temperature: float
    policies: Mapping[str, PolicyResults]
    pairs: Mapping[str, PairResults]
    best_of_n: tuple[BestOfN, ...] = ()
    training_kl_nats: tuple[float, ...] = ()
    training_scores: tuple[float, ...] = ()
    samples: tuple[SampledPrompt, ...] = ()
    hacking: RewardHacking | None = None
    num_seen: int = 0  # of the prompts, how many [ppo] or [rejection] trains on too
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
    names: Names = DEFAULT_NAMES
    cluster_by: str = ""  # the prompts' field whose values are clusters
    num_clusters: int = 0  # if `cluster_by` is set
