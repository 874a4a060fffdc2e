"""Has a policy collapsed? Like responses to one prompt, like responses to all prompts, loops, lengths, endings.

Words are lower-cased text split at white space, as in `evaluation.diversity`. Whatever depends on how much text there
is is measured on the same prompts, and on equally many responses or words, of every policy.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evaluation.diversity import distinct_n, repetition
from evaluation.verdicts import Response
from intervals.interval import UNKNOWN, Interval, clustered_mean

BLEU_N = 4
BLEU_EPSILON = 0.1  # matches counted where there are none
NUM_ORDERS = 20  # in which texts are laid out until there are enough words
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Within:
    """Between `num_samples` responses to one prompt, averaged over prompts, with 95% intervals. Unknown for one sample.

    `identical` is the share of pairs that are the same text, `distinct_2` the distinct bigrams over all, `self_bleu`
    how much of a response the others say too. All from 0 to 1.
    """

    num_samples: int
    identical: Interval
    distinct_2: Interval
    self_bleu: Interval


@dataclass(frozen=True)
class Across:
    """Between the first responses to all prompts. `distinct_*` are of `num_words` words; no sum over prompts, so no
    interval.
    """

    num_words: int
    identical: float
    distinct_1: float
    distinct_2: float
    self_bleu: float


@dataclass(frozen=True)
class Lengths:
    """Of responses, with the quantiles 0, 5, 25, 50, 75, 95 and 100%. In tokens or words."""

    mean: Interval
    quantiles: tuple[float, ...]


@dataclass(frozen=True)
class Diversity:
    """Lengths, endings, repetition and empty responses are of everything that a policy said; the rest as above.

    `tokens` and `finished` (the share that ended by itself) are unknown where the responses do not say.

    `repetition` is the mean share of 4-grams that repeat an earlier one of the same response; responses of fewer than
    four words have none, `empty` is the share without a word.
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


def measure_diversity(responses: Mapping[str, Sequence[Response]], *, seed: int) -> dict[str, Diversity]:
    """Of every policy, by name; what depends on the amount of text is equal among them.

    Errors: ValueError for a policy without responses, policies without a prompt in common, and two responses of one
    policy, prompt and index.
    """
    by_prompt = {name: _by_prompt(name, rows) for name, rows in responses.items()}
    common = [prompt for prompt in next(iter(by_prompt.values())) if all(prompt in of for of in by_prompt.values())]
    if not common:
        raise ValueError(f"policies {', '.join(responses)} have no prompt in common; the same prompts were expected")
    by_prompt = {name: {prompt: prompts[prompt] for prompt in common} for name, prompts in by_prompt.items()}
    num_samples = min(len(texts) for prompts in by_prompt.values() for texts in prompts.values())
    firsts = {name: [texts[0] for texts in prompts.values()] for name, prompts in by_prompt.items()}
    num_words = min(sum(len(text.split()) for text in texts) for texts in firsts.values())
    return {
        name: _diversity(rows, by_prompt[name], firsts[name], num_samples, num_words, seed)
        for name, rows in responses.items()
    }


def _by_prompt(name: str, rows: Sequence[Response]) -> dict[str, list[str]]:
    """Texts of each prompt by index."""
    if not rows:
        raise ValueError(f"policy {name!r} has no responses; at least one was expected")
    seen: dict[tuple[str, int], Response] = {}
    for row in rows:
        if (row.prompt_id, row.index) in seen:
            raise ValueError(f"policy {name!r}: prompt {row.prompt_id!r} has two responses of index {row.index}")
        seen[row.prompt_id, row.index] = row
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.index):
        found.setdefault(row.prompt_id, []).append(row.text)
    return found


def _diversity(
    rows: Sequence[Response],
    by_prompt: Mapping[str, Sequence[str]],
    firsts: Sequence[str],
    num_samples: int,
    num_words: int,
    seed: int,
) -> Diversity:
    place_R = np.unique([row.prompt_id for row in rows], return_inverse=True)[1].tolist()
    tokens = [row.num_tokens for row in rows if row.num_tokens is not None]
    finished = [row.finished for row in rows if row.finished is not None]
    return Diversity(
        num_prompts=len(set(place_R)),
        num_responses=len(rows),
        within=_within([texts[:num_samples] for texts in by_prompt.values()], num_samples),
        across=Across(
            num_words=num_words,
            identical=identical_share(firsts),
            distinct_1=distinct_at(firsts, 1, num_words, seed=seed),
            distinct_2=distinct_at(firsts, 2, num_words, seed=seed),
            self_bleu=self_bleu(firsts),
        ),
        words=_lengths([len(row.text.split()) for row in rows], place_R),
        tokens=_lengths(tokens, place_R) if len(tokens) == len(rows) else None,
        finished=_mean(finished, place_R) if len(finished) == len(rows) else UNKNOWN,
        repetition=_mean([repetition(row.text, BLEU_N) for row in rows], place_R),
        empty=_mean([not row.text.strip() for row in rows], place_R),
    )


def _within(prompts: Sequence[Sequence[str]], num_samples: int) -> Within:
    if num_samples < 2:
        return Within(num_samples, UNKNOWN, UNKNOWN, UNKNOWN)
    places = list(range(len(prompts)))
    return Within(
        num_samples,
        identical=_mean([identical_share(texts) for texts in prompts], places),
        distinct_2=_mean([distinct_n(texts, 2) for texts in prompts], places),
        self_bleu=_mean([self_bleu(texts) for texts in prompts], places),
    )


def _mean(values: Sequence[float], places: Sequence[int]) -> Interval:
    """Over the values that are there, with an interval over prompts."""
    value_R, place_R = np.array(values, dtype=np.float64), np.array(places, dtype=np.int64)
    there_R = ~np.isnan(value_R)
    return clustered_mean(value_R[there_R], place_R[there_R])


def _lengths(lengths: Sequence[int], places: Sequence[int]) -> Lengths:
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return Lengths(_mean(lengths, places), tuple(float(value) for value in quantiles))


def identical_share(texts: Sequence[str]) -> float:
    """The share of pairs of texts that are the same, white space at their ends aside; NaN for fewer than two."""
    if len(texts) < 2:
        return math.nan
    counts = Counter(text.strip() for text in texts).values()
    return sum(count * (count - 1) for count in counts) / (len(texts) * (len(texts) - 1))


def distinct_at(texts: Sequence[str], n: int, num_words: int, *, seed: int) -> float:
    """distinct-n (Li et al. 2016, arXiv 1510.03055) of `num_words` words: texts in random order, the last one cut.

    It falls as text grows, so policies compare only at the same number of words. A mean over NUM_ORDERS orders.
    """
    words = [text.split() for text in texts]
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(NUM_ORDERS):
        taken, left = [], num_words
        for place in generator.permutation(len(words)):
            taken.append(" ".join(words[place][:left]))
            left -= min(left, len(words[place]))
            if not left:
                break
        found.append(distinct_n(taken, n))
    return float(np.mean(found))


def self_bleu(texts: Sequence[str]) -> float:
    """The mean BLEU of each text with all others as references (Zhu et al. 2018, arXiv 1802.01886): 1 is all the same.

    BLEU (Papineni et al. 2002) of up to 4-grams, in a shorter text of as many as it has words; an order without a match
    counts as BLEU_EPSILON matches (Chen & Cherry 2014, method 1). Texts without words are left out; NaN for fewer than
    two that have some.
    """
    words = [text.lower().split() for text in texts if text.split()]
    if len(words) < 2:
        return math.nan
    orders = [[_grams(text, n) for text in words] for n in range(1, BLEU_N + 1)]
    highest = [_two_highest(counts) for counts in orders]
    lengths = sorted(len(text) for text in words)
    scores = []
    for place, text in enumerate(words):
        logs = []
        for n in range(1, min(BLEU_N, len(text)) + 1):
            matches = 0
            for gram, count in orders[n - 1][place].items():
                first, owner, second = highest[n - 1][gram]
                matches += min(count, second if owner == place else first)
            logs.append(math.log(max(matches, BLEU_EPSILON) / (len(text) - n + 1)))
        closest = _closest_other(lengths, len(text))
        brevity = min(0.0, 1 - closest / len(text))
        scores.append(math.exp(brevity + sum(logs) / len(logs)))
    return sum(scores) / len(scores)


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(n)), strict=False))


def _two_highest(counts: Sequence[Counter[tuple[str, ...]]]) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Of each n-gram: how often the text with most of it has it, which text that is, and how often the next one has it.

    So the most that any other text has is known without looking at each of them.
    """
    found: dict[tuple[str, ...], tuple[int, int, int]] = {}
    for place, grams in enumerate(counts):
        for gram, count in grams.items():
            first, owner, second = found.get(gram, (0, -1, 0))
            found[gram] = (count, place, first) if count > first else (first, owner, max(second, count))
    return found


def _closest_other(lengths: Sequence[int], own: int) -> int:
    """Of the lengths (sorted, `own` among them) but one of `own`, the nearest to it; the shorter of two as near."""
    place = int(np.searchsorted(lengths, own))
    others = [*lengths[max(0, place - 1) : place], *lengths[place + 1 : place + 2]]
    return min(others, key=lambda length: (abs(length - own), length))
