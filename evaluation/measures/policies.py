"""Measures of every policy of a comparison, computed from its responses and verdicts: the contents of measures.json.

KL, scores, and signs of collapse: similar responses to one prompt, similar responses to all prompts, repetition,
length, EOS rate. Words are lower-cased text split at white space. Measures that depend on the amount of text use the
same prompts, and equally many responses or words, for every policy.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evaluation.measures.best_of_n import best_of_n_kl
from evaluation.verdicts import NO_CLUSTERS, Clusters, Response, Verdict, places_of
from preferences.statistics.estimates import UNKNOWN, Interval, Ints
from preferences.statistics.intervals import clustered_mean, share_interval

REPEATED_WORDS = 4  # of the n-grams that `repetition` counts
NUM_ORDERS = 20  # random orders in which texts are concatenated until there are enough words
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

Scores = Mapping[tuple[str, str, int], float]  # by policy, prompt and sample


@dataclass(frozen=True)
class Within:
    """Similarity of `num_samples` responses to one prompt, averaged over prompts, with 95% intervals.

    `identical` is the share of pairs with the same text, `distinct_2` the share of bigrams that are distinct. Both lie
    between 0 and 1, and are unknown for one sample.
    """

    num_samples: int
    identical: Interval
    distinct_2: Interval


@dataclass(frozen=True)
class Across:
    """Similarity of the first responses to all prompts. `distinct_*` use `num_words` words. These are not means over
    prompts, so they have no interval.
    """

    num_words: int
    identical: float
    distinct_1: float
    distinct_2: float


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses in tokens or words, with the quantiles 0, 5, 25, 50, 75, 95 and 100%."""

    mean: Interval
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class Diversity:
    """Lengths, EOS rate, repetition and empty responses over all responses, and diversity as in `Within` and `Across`.

    `tokens` and `finished` (the share that ended with EOS) are unknown if the responses do not record them.

    `repetition` is the mean share of 4-grams that repeat an earlier one of the same response; responses of fewer than
    four words have none. `empty` is the share without a word.
    """

    num_prompts: int
    num_responses: int
    within: Within
    across: Across
    words: Lengths
    tokens: Lengths | None
    finished: Interval
    repetition: Interval
    empty: Interval


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
    interval over prompts; it is unknown if responses have no log-ratio. All that is known of best-of-n's KL is the
    bound `kl_bound_nats`, because the log-ratio of a chosen sample says nothing about the choosing policy.

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
    responses: Sequence[Response],
    verdicts: Sequence[Verdict] = (),
    clusters: Clusters = NO_CLUSTERS,
    *,
    seed: int,
    known: Known | None = None,
) -> dict[str, PolicyMeasures]:
    """Returns measures by policy, in order of appearance, with intervals over `clusters` of prompts.

    Raises: as `measure_diversity` does, and for no responses.
    """
    if not responses:
        raise ValueError("there are no responses to measure; at least one was expected")
    known = known or Known()
    by_policy: dict[str, list[Response]] = {}
    for row in responses:
        by_policy.setdefault(row.policy, []).append(row)
    diversity = measure_diversity(by_policy, clusters, seed=seed)
    categories = {verdict.prompt_id: verdict.category for verdict in verdicts}
    scores = response_scores(verdicts)
    return {
        name: PolicyMeasures(
            kl_nats=_mean_of_all(rows, [row.log_ratio for row in rows], clusters),
            kl_bound_nats=best_of_n_kl(known.best_of[name]) if name in known.best_of else math.nan,
            proxy_score=_mean_of_all(rows, [row.proxy_score for row in rows], clusters),
            scores={
                judge: _policy_scores(rows, judge_scores, categories, known.pass_marks.get(judge, math.nan), clusters)
                for judge, judge_scores in scores.items()
                if any((name, row.prompt_id, row.index) in judge_scores for row in rows)
            },
            diversity=diversity[name],
        )
        for name, rows in by_policy.items()
    }


def response_scores(verdicts: Sequence[Verdict]) -> dict[str, Scores]:
    """Returns, by judge, the scores of responses in its verdicts. Responses whose score failed are left out."""
    scores: dict[str, dict[tuple[str, str, int], float]] = {}
    for row in verdicts:
        for policy, index, score in (
            (row.policy_a, row.index_a, row.score_a),
            (row.policy_b, row.index_b, row.score_b),
        ):
            if not math.isnan(score):
                scores.setdefault(row.judge, {})[policy, row.prompt_id, index] = score
    return dict(scores)


def _mean_of_all(rows: Sequence[Response], values: Sequence[float], clusters: Clusters) -> Interval:
    """Returns the mean over responses with its interval over prompts; unknown if a value is missing."""
    if np.isnan(values).any():
        return UNKNOWN
    return clustered_mean(np.array(values, dtype=np.float64), _places(rows, clusters))


def _places(rows: Sequence[Response], clusters: Clusters = NO_CLUSTERS) -> Ints:
    clusters_of_rows = [clusters.get(row.prompt_id, row.prompt_id) for row in rows]
    return np.unique(clusters_of_rows, return_inverse=True)[1].astype(np.int64)


def _policy_scores(
    rows: Sequence[Response], scores: Scores, categories: Mapping[str, str], pass_mark: float, clusters: Clusters
) -> PolicyScores:
    scored = [row for row in rows if (row.policy, row.prompt_id, row.index) in scores]
    score_R = np.array([scores[row.policy, row.prompt_id, row.index] for row in scored])
    place_R, cluster_R = _places(scored), _places(scored, clusters)
    category_R = np.array([categories[row.prompt_id] for row in scored])
    passed_P = np.bincount(place_R, score_R > pass_mark) / np.bincount(place_R)
    cluster_P = cluster_R[np.unique(place_R, return_index=True)[1]]
    return PolicyScores(
        mean=clustered_mean(score_R, cluster_R),
        pass_share=UNKNOWN if math.isnan(pass_mark) else share_interval(passed_P, cluster_P),
        by_category={str(name): float(score_R[category_R == name].mean()) for name in np.unique(category_R)},
    )


def measure_diversity(
    responses: Mapping[str, Sequence[Response]], clusters: Clusters = NO_CLUSTERS, *, seed: int
) -> dict[str, Diversity]:
    """Measures every policy, by name, on equal amounts of text where the amount matters.

    Raises: ValueError for a policy without responses, policies without a common prompt, and two responses with the same
    policy, prompt and index.
    """
    by_prompt = {name: _texts_by_prompt(name, rows) for name, rows in responses.items()}
    common = [
        prompt
        for prompt in next(iter(by_prompt.values()))
        if all(prompt in texts_of for texts_of in by_prompt.values())
    ]
    if not common:
        raise ValueError(f"policies {', '.join(responses)} share no prompt; at least one common prompt was expected")
    by_prompt = {name: {prompt: prompts[prompt] for prompt in common} for name, prompts in by_prompt.items()}
    num_samples = min(len(texts) for prompts in by_prompt.values() for texts in prompts.values())
    firsts = {name: [texts[0] for texts in prompts.values()] for name, prompts in by_prompt.items()}
    num_words = min(sum(len(text.split()) for text in texts) for texts in firsts.values())
    return {
        name: _diversity(rows, by_prompt[name], firsts[name], num_samples, num_words, clusters, seed)
        for name, rows in responses.items()
    }


def _texts_by_prompt(name: str, rows: Sequence[Response]) -> dict[str, list[str]]:
    """Returns the texts per prompt, sorted by index."""
    if not rows:
        raise ValueError(f"policy {name!r} has no responses; at least one was expected")
    seen: dict[tuple[str, int], Response] = {}
    for row in rows:
        if (row.prompt_id, row.index) in seen:
            raise ValueError(f"policy {name!r}: prompt {row.prompt_id!r} has two responses with index {row.index}")
        seen[row.prompt_id, row.index] = row
    texts: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.index):
        texts.setdefault(row.prompt_id, []).append(row.text)
    return texts


def _diversity(
    rows: Sequence[Response],
    by_prompt: Mapping[str, Sequence[str]],
    firsts: Sequence[str],
    num_samples: int,
    num_words: int,
    clusters: Clusters,
    seed: int,
) -> Diversity:
    place_R = _places(rows, clusters).tolist()
    tokens = [row.num_tokens for row in rows if row.num_tokens is not None]
    finished = [row.finished for row in rows if row.finished is not None]
    return Diversity(
        num_prompts=len({row.prompt_id for row in rows}),
        num_responses=len(rows),
        within=_within(by_prompt, num_samples, clusters),
        across=Across(
            num_words=num_words,
            identical=identical_share(firsts),
            distinct_1=distinct_at(firsts, 1, num_words, seed=seed),
            distinct_2=distinct_at(firsts, 2, num_words, seed=seed),
        ),
        words=_lengths([len(row.text.split()) for row in rows], place_R),
        tokens=_lengths(tokens, place_R) if len(tokens) == len(rows) else None,
        finished=_mean_of_known(finished, place_R) if len(finished) == len(rows) else UNKNOWN,
        repetition=_mean_of_known([repetition(row.text, REPEATED_WORDS) for row in rows], place_R),
        empty=_mean_of_known([not row.text.strip() for row in rows], place_R),
    )


def _within(by_prompt: Mapping[str, Sequence[str]], num_samples: int, clusters: Clusters) -> Within:
    if num_samples < 2:
        return Within(num_samples, UNKNOWN, UNKNOWN)
    prompts = [texts[:num_samples] for texts in by_prompt.values()]
    places = places_of(list(by_prompt), clusters).tolist()
    return Within(
        num_samples,
        identical=_mean_of_known([identical_share(texts) for texts in prompts], places),
        distinct_2=_mean_of_known([distinct_n(texts, 2) for texts in prompts], places),
    )


def _mean_of_known(values: Sequence[float], places: Sequence[int]) -> Interval:
    """Averages the values that are not NaN, with an interval over prompts."""
    value_R, place_R = np.array(values, dtype=np.float64), np.array(places, dtype=np.int64)
    there_R = ~np.isnan(value_R)
    return clustered_mean(value_R[there_R], place_R[there_R])


def _lengths(lengths: Sequence[int], places: Sequence[int]) -> Lengths:
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return Lengths(_mean_of_known(lengths, places), tuple(float(value) for value in quantiles))


def identical_share(texts: Sequence[str]) -> float:
    """Returns the share of pairs of texts that are equal after stripping white space; NaN for fewer than two texts."""
    if len(texts) < 2:
        return math.nan
    counts = Counter(text.strip() for text in texts).values()
    return sum(count * (count - 1) for count in counts) / (len(texts) * (len(texts) - 1))


def distinct_at(texts: Sequence[str], n: int, num_words: int, *, seed: int) -> float:
    """Computes distinct-n (Li et al. 2016, arXiv 1510.03055) of `num_words` words: texts in random order, the last cut.

    Averages over NUM_ORDERS orders. Distinct-n falls as text grows, so compare policies only at equal numbers of words.
    """
    words = [text.split() for text in texts]
    generator = np.random.default_rng(seed)
    shares = []
    for _ in range(NUM_ORDERS):
        taken, left = [], num_words
        for place in generator.permutation(len(words)):
            taken.append(" ".join(words[place][:left]))
            left -= min(left, len(words[place]))
            if not left:
                break
        shares.append(distinct_n(taken, n))
    return float(np.mean(shares))


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Returns the share of n-grams across all texts that are distinct, from 0 (everything repeats) to 1.

    It falls as the amount of text grows, so compare policies on equally many samples of similar length. NaN if no text
    has n words. distinct-1 and distinct-2 of Li et al. 2016, arXiv 1510.03055. Raises: ValueError for n < 1.
    """
    return _share_distinct([gram for text in texts for gram in _ngrams(text, n)])


def repetition(text: str, n: int) -> float:
    """Returns the share of a text's n-grams that repeat an earlier one: 0 means none; near 1, the text loops.

    NaN if the text has fewer than n words. This is seq-rep-n of Welleck et al. 2019, arXiv 1908.04319, over words.
    """
    return 1 - _share_distinct(list(_ngrams(text, n)))


def _ngrams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n is {n}; at least 1 was expected")
    words = text.lower().split()
    return zip(*(words[start:] for start in range(n)), strict=False)


def _share_distinct(grams: Sequence[tuple[str, ...]]) -> float:
    return len(set(grams)) / len(grams) if grams else float("nan")
