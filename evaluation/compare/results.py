"""The result of a comparison that a run's compare stage makes, computed from the comparison's folder: its results.json.

The terminal, the comparison's own page and the report of the run all take their numbers from it, and their sentences
from `evaluation.compare.report.answer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from evaluation.compare.folder import MEASURES, ComparisonFolder
from evaluation.measures.best_of_n import BestOfN
from evaluation.measures.policies import PolicyMeasures, PolicyScores, Scores, response_scores
from evaluation.measures.reward_hacking import RewardHacking
from evaluation.policies import INITIAL, TRAINED, Policy, policy_styles
from evaluation.statistics.results import PairSummary, Summary
from evaluation.verdicts import Response
from files.records import record_of
from lm.tokenizer import Messages
from preferences.statistics.estimates import UNKNOWN, Interval
from stages.reports.text import DEFAULT_NAMES, Names, PolicyStyle
from training.data import Overlong, SourceRows

GOLD = "gold"  # the kind of judge that a world has
UNSCORED = PolicyScores(UNKNOWN, UNKNOWN, {})


@dataclass(frozen=True)
class PolicyResults:
    """Means over responses with 95% intervals over prompts or their clusters. `by_kind` is the mean gold score by kind
    of prompt.

    `kl_nats` is None if it was not measured, and for best-of-n, for which only a bound is known. `distinct_2` is
    measured on the same number of words of each policy.
    """

    policy: Policy
    gold_score: Interval
    pass_share: Interval
    kl_nats: Interval | None
    proxy_score: Interval | None
    distinct_2: float
    end_rate: float
    mean_tokens: float
    by_kind: Mapping[str, float]


@dataclass(frozen=True)
class JudgeResults:
    """The judge: its name, what it measures, and whether it is a world's gold scorer, a reward model or a function.

    `is_reward` is true if the judge is the reward that the policies were trained to raise, or comes from the same file.
    """

    name: str
    description: str
    kind: str = GOLD
    is_reward: bool = False
    relation: str = ""  # of a reward model to the policies, if it shares their data or may; "" = none

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "JudgeResults":
        """Returns the judge of an entry in the settings."""
        description = entry.get("description", entry.get("spec", ""))
        if entry.get("kind") == "people":
            store = str(entry["spec"]).removeprefix("people:")
            description = f"people, {entry['num_labelers']} per task, by the labels in {store}"
        is_reward, relation = bool(entry.get("is_reward")), str(entry.get("relation", ""))
        return cls(entry["name"], description, entry.get("kind", ""), is_reward, relation)


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

    `pairs` holds the statistics of every two policies in both orders, under "a/b". `best_of_n` chooses among the
    initial policy's samples by the score of `scorer`, which a policy may be trained to raise; `training_kl_nats` and
    `training_scores` are that policy's, per iteration, from its metrics, and `hacking` compares it with the initial
    policy.
    """

    judge: JudgeResults
    num_prompts: int
    num_samples: int
    temperature: float
    policies: Mapping[str, PolicyResults]
    pairs: Mapping[str, PairSummary]
    best_of_n: tuple[BestOfN, ...] = ()
    training_kl_nats: tuple[float, ...] = ()
    training_scores: tuple[float, ...] = ()
    samples: tuple[SampledPrompt, ...] = ()
    hacking: RewardHacking | None = None
    overlong: Overlong | None = None  # of the prompts
    sources: tuple[SourceRows, ...] = ()  # of the prompts, if rows are unusual
    scorer: str = DEFAULT_NAMES.scorer
    cluster_by: str = ""  # the prompts' field whose values are clusters
    num_clusters: int = 0  # if `cluster_by` is set

    @property
    def initial(self) -> PolicyResults:
        """The policy that training starts from."""
        return next(one for one in self.policies.values() if one.policy.kind == INITIAL)

    @property
    def trained(self) -> list[PolicyResults]:
        """The policies that a stage trained from the initial one, in the job's order."""
        return [one for one in self.policies.values() if one.policy.kind == TRAINED]

    @property
    def raising(self) -> Policy | None:
        """The policy that is trained to raise the score of `scorer`; the first, if several rounds do."""
        return next((one.policy for one in self.trained if one.policy.raises_score), None)

    @property
    def names(self) -> Names:
        styles, raising = self.styles, self.raising
        algorithm = styles[raising.name].title if raising else DEFAULT_NAMES.algorithm
        return Names(self.initial.policy.title or DEFAULT_NAMES.initial, algorithm, self.scorer)

    @property
    def styles(self) -> Mapping[str, PolicyStyle]:
        """How pages show each policy."""
        return policy_styles([one.policy for one in self.policies.values()])

    def pair(self, policy: Policy, other: Policy) -> PairSummary | None:
        """Returns a policy's results against another; None if they were not compared or the win rate is unknown."""
        pair = self.pairs.get(f"{policy.name}/{other.name}")
        return None if pair is None or not isfinite(pair.win_rate.mean) else pair

    @property
    def seen(self) -> tuple[int, list[str]]:
        """How many prompts any stage trained a policy on, and the titles of these stages."""
        by_stage: dict[str, set[str]] = {}
        for one in self.policies.values():
            for stage, prompt_ids in one.policy.seen.items():
                by_stage.setdefault(stage, set()).update(prompt_ids)
        titles = {one.policy.trainer: self.styles[one.policy.name].title for one in self.trained}
        stages = [titles.get(stage, stage) for stage, prompt_ids in by_stage.items() if prompt_ids]
        return len(set().union(*by_stage.values())), stages

    @property
    def are_heldout(self) -> bool:
        """Whether no policy was trained on any of the prompts, as far as all trainers say what they trained on."""
        return not self.seen[0] and all(one.policy.is_seen_known for one in self.trained)


def results_of(comparison: ComparisonFolder, summary: Summary, num_shown: int = 0) -> CompareResults:
    """Computes the result from the folder of a run's comparison and its statistics, by the first judge.

    `num_shown` is the number of prompts whose first responses it holds, for the report of the run.
    """
    settings, judge = comparison.settings, JudgeResults.of(comparison.settings["judges"][0])
    by_judge = next(one for one in summary.judges if one.judge == judge.name)
    clusters = settings["prompts"].get("cluster_by", "")
    sampling = next(entry["sampling"] for entry in settings["policies"] if "sampling" in entry)
    found = record_of(comparison.measures, _Measures, MEASURES)
    scores = response_scores([row for row in comparison.verdicts if row.judge == judge.name]).get(judge.name, {})
    return CompareResults(
        judge=judge,
        num_prompts=len(comparison.prompts),
        num_samples=sampling["num_samples"],
        temperature=sampling["temperature"],
        policies={one.name: _policy(one, found.policies[one.name], judge.name) for one in comparison.about},
        pairs={f"{one.policy_a}/{one.policy_b}": one for pair in by_judge.pairs for one in (pair, pair.turned)},
        best_of_n=found.best_of_n,
        samples=_shown(comparison, scores, num_shown),
        hacking=found.reward_hacking,
        scorer=comparison.scorer,
        cluster_by=clusters,
        num_clusters=len({prompt.cluster for prompt in comparison.prompts}) if clusters else 0,
    )


@dataclass(frozen=True)
class _Measures:
    """The part of measures.json that the results contain."""

    policies: Mapping[str, PolicyMeasures]
    best_of_n: tuple[BestOfN, ...] = ()
    reward_hacking: RewardHacking | None = None


def _policy(policy: Policy, measures: PolicyMeasures, judge: str) -> PolicyResults:
    gold, diversity = measures.scores.get(judge, UNSCORED), measures.diversity
    assert diversity.tokens is not None, "a sampled response has a number of tokens"
    return PolicyResults(
        policy=policy,
        gold_score=gold.mean,
        pass_share=gold.pass_share,
        kl_nats=_known(measures.kl_nats),
        proxy_score=_known(measures.proxy_score),
        distinct_2=diversity.across.distinct_2,
        end_rate=diversity.finished.mean,
        mean_tokens=diversity.tokens.mean.mean,
        by_kind=gold.by_category,
    )


def _known(interval: Interval) -> Interval | None:
    return interval if isfinite(interval.mean) else None


def _shown(comparison: ComparisonFolder, scores: Scores, num_shown: int) -> tuple[SampledPrompt, ...]:
    """Returns the first sample of every policy on the first prompts, with gold and proxy scores."""
    firsts: dict[tuple[str, str], Response] = {}
    for row in comparison.responses:
        firsts.setdefault((row.policy, row.prompt_id), row)
    return tuple(
        SampledPrompt(
            prompt_id=prompt.prompt_id,
            kind=prompt.kind,
            messages=prompt.messages,
            responses={name: _text(firsts[name, prompt.prompt_id], scores) for name in comparison.policies},
        )
        for prompt in comparison.prompts[:num_shown]
    )


def _text(row: Response, scores: Scores) -> SampledText:
    return SampledText(row.text, scores.get((row.policy, row.prompt_id, row.index), nan), row.proxy_score)
